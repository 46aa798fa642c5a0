"""Ranks that plan series by series, as thousands of them do."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

import dcp_mem
from dcp_mem.format.catalog import SHARED_VERSION, SharedCatalog
from dcp_mem.planning import global_plan
from tests.support.checkpoints.models import (
    full_tensor,
    sharded_state,
    unsharded_state,
    zero_tensor,
)
from tests.support.checkpoints.roundtrip import Places, comes_back
from tests.support.processes.forks import forked_ranks


def _plan_as_large_jobs(versions: list[int]) -> None:
    """Let this process plan as for thousands of ranks; note the versions of its catalogs."""
    global_plan._LARGE = global_plan._ALIKE = 0
    write = SharedCatalog.to_bytes

    def noted(catalog: SharedCatalog) -> bytes:
        versions.append(SHARED_VERSION)
        return write(catalog)

    setattr(SharedCatalog, "to_bytes", noted)  # noqa: B010 - a method


def _saves(places: Places) -> list[int]:
    versions: list[int] = []
    _plan_as_large_jobs(versions)
    rank = dist.get_rank()
    state = {
        **sharded_state(full_tensor, "a"),
        "replicated": torch.arange(100.0),
        "nested": {"lr": 0.5, "step": torch.tensor(7)},
        f"own.{rank}": torch.full((3,), rank),
    }
    blank = functools.partial(sharded_state, zero_tensor, "a")
    with places.writer(keep_memory=2) as writer:
        for name in ("first", "second"):
            dcp_mem.save(state, checkpoint_id=name, storage_writer=writer)
            writer.wait(name)
            dist.barrier()
            comes_back(places, name, sharded_state(full_tensor, "a"), blank=blank)
    return versions


@pytest.mark.timeout(240)
def test_what_is_planned_series_by_series_comes_back_from_every_road(places: Places) -> None:
    versions, *others = forked_ranks(_saves, 4, places, timeout=200)
    assert versions == [SHARED_VERSION]  # planned once, by rank 0
    assert not any(others)
    expected = {**unsharded_state("a", full_tensor), "replicated": torch.arange(100.0)}
    expected |= {f"own.{rank}": torch.full((3,), rank) for rank in range(4)}
    comes_back(places, "second", expected)


def _contradicts(places: Places) -> str:
    _plan_as_large_jobs([])
    state = {"same": torch.zeros(5), "other": torch.zeros(3 + dist.get_rank())}
    with places.writer() as writer:
        try:
            dcp_mem.save(state, checkpoint_id="never", storage_writer=writer)
        except CheckpointException as error:
            return str(error)
    return ""


def test_ranks_that_contradict_each_other_all_hear_of_it(places: Places) -> None:
    for text in forked_ranks(_contradicts, 3, places):
        assert "other: ranks have different sizes of the whole tensor" in text
