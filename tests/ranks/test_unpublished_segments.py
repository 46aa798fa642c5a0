"""A complete checkpoint has the segments of all ranks, whoever closes or saves on meanwhile.

Between a rank's sealing and the node's manifest, a segment is listed nowhere.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner

import dcp_mem
from dcp_mem import RankFailed
from tests.support.checkpoints.jobs import wait_until
from tests.support.checkpoints.roundtrip import Places, assert_same, blank_of
from tests.support.processes import faults
from tests.support.processes.forks import Forks, forked, raised_by

_TORCH_PLANS = {"DCP_MEM_TORCH_PLANS": "1"}


def _state(step: int) -> dict[str, Any]:
    return {"w": torch.full((9,), float(step)), "step": step}


def _closes(places: Places) -> None:
    """Rank 0 stops before it publishes; rank 1, whose part is done, closes its writer."""
    rank = dist.get_rank()
    with places.writer(persist=False, keep_memory=3) as writer:
        dcp.save(_state(1), checkpoint_id="1", storage_writer=writer)
        faults.arm("complete.catalog:stop:1" if rank == 0 else "")
        saving: Any = dcp.async_save(_state(2), checkpoint_id="2", storage_writer=writer)
        directory = places.directory("memory", "2")
        wait_until(lambda: any(directory.glob(f"__{rank}_*")), "this rank's segment")
    saving.result(timeout=60)
    dist.barrier()
    assert_same(_state(2), places.load("memory", "2", blank_of(_state(2))))


@pytest.mark.parametrize("env", [{}, _TORCH_PLANS], ids=["own plans", "torch plans"])
def test_close_waits_behind_an_async_save_until_another_rank_has_published(
    places: Places, env: dict[str, str]
) -> None:
    ranks = Forks(_closes, 2, places, env=env)
    try:
        ranks.wait_until_stopped(0)
        time.sleep(1.0)  # for a rank that doesn't wait
        ranks.send(0, signal.SIGCONT)
        ranks.join()
    finally:
        ranks.close()


def _breaks_off(places: Places, again: bool, left: Path) -> tuple[str, list[str]]:
    """Rank 0 stops before it publishes, until rank 1 has waited in vain, and gone on."""
    rank, writer = dist.get_rank(), places.writer(persist=False)
    dcp_mem.save(_state(1), checkpoint_id="1", storage_writer=writer)
    faults.arm("complete.catalog:stop:1" if rank == 0 else "")

    def save() -> None:
        dcp_mem.save(_state(2), checkpoint_id="2", storage_writer=writer)

    error = raised_by(save)
    if rank == 1:
        assert isinstance(error, RankFailed), error
        if again:
            assert isinstance(raised_by(save), RankFailed)
        else:
            writer.close()
        left.touch()
    wait_until(left.exists, "rank 1 to have gone on")
    listed = [one.name for one in writer.status()]
    writer.close()
    return f"{type(error).__name__}: {error}", listed


@pytest.mark.parametrize("again", [False, True], ids=["closes", "saves again"])
def test_a_checkpoint_isnt_complete_without_the_segment_of_a_rank_that_broke_off(
    places: Places, tmp_path: Path, again: bool
) -> None:
    left = tmp_path / "left"
    ranks = Forks(_breaks_off, 2, places, again, left, env={"DCP_MEM_TIMEOUT": "2"})
    try:
        ranks.wait_until_stopped(0)
        wait_until(left.exists, "rank 1 to have gone on")
        ranks.send(0, signal.SIGCONT)
        (first, listed), _ = ranks.join()
    finally:
        ranks.close()
    assert_same(_state(1), places.load("memory", "1", blank_of(_state(1))))
    if "2" in listed and again:  # rank 1's next save ended before it took anything back
        assert_same(_state(2), places.load("memory", "2", blank_of(_state(2))))
        return
    assert listed == ["1"]
    assert "2 isn't saved: __1_0-" in first
    assert "has left memory" in first


class _SlowPlanner(DefaultSavePlanner):
    """Takes longer, over the plan or over each item, than ranks wait for each other."""

    def __init__(self, slow: str) -> None:
        super().__init__()
        self._slow = slow

    def create_local_plan(self) -> Any:
        if self._slow == "plan":
            time.sleep(2.5)
        return super().create_local_plan()

    def resolve_data(self, write_item: Any) -> Any:
        if self._slow == "item":
            time.sleep(1.5)
        return super().resolve_data(write_item)


def _closes_behind_slow(places: Places, slow: str) -> tuple[list[str], str]:
    with places.writer(persist=False) as writer:
        saving: Any = dcp.async_save(
            _state(1), checkpoint_id="1", storage_writer=writer, planner=_SlowPlanner(slow)
        )
        wait_until(Path(places.memory, places.job, ".slots").exists, "the save to begin")
    found = [one.name for one in writer.status()]
    return found, str(raised_by(lambda: saving.result(timeout=60)) or "")


def test_close_waits_for_a_save_that_takes_longer_than_ranks_wait(places: Places) -> None:
    env = {**_TORCH_PLANS, "DCP_MEM_TIMEOUT": "1"}
    assert forked(_closes_behind_slow, places, "item", env=env) == (["1"], "")
    assert_same(_state(1), places.load("memory", "1", blank_of(_state(1))))


def test_a_save_whose_planning_took_so_long_that_close_went_ahead_fails(places: Places) -> None:
    env = {**_TORCH_PLANS, "DCP_MEM_TIMEOUT": "1"}
    found, error = forked(_closes_behind_slow, places, "plan", env=env)
    assert found == []
    assert "1 isn't saved: the writer was closed while DCP planned" in error
