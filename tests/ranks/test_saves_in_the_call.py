"""Saves in the call that are refused, broken off, skipped, or come within each other."""

from __future__ import annotations

import fcntl
import gc
import weakref
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

import dcp_mem
from dcp_mem import MemoryStorageReader, MemoryStorageWriter
from dcp_mem.saving import pipeline as pipeline_module
from dcp_mem.saving.agree import agree
from tests.support.checkpoints.jobs import wait_for_spare_slots
from tests.support.checkpoints.plans import SAVES
from tests.support.checkpoints.roundtrip import Places, State
from tests.support.processes.forks import forked, forked_ranks, raised_by

ROADS = ("dcp.save", "dcp_mem.save")
_NUMBERS = 3 << 20


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def _state(step: int, **others: float) -> State:
    """A state whose every value tells its step and its rank."""
    rank = _rank()
    weights = torch.full((_NUMBERS,), step + rank / 10)
    return {
        "model": {f"weights.{rank}": weights},
        "step": step,
        **{f"{name}.{rank}": torch.full((5,), value) for name, value in others.items()},
    }


def _assert_loads(places: Places, name: str | None, step: int, **others: float) -> None:
    found = _state(-1, **dict.fromkeys(others, -1.0))
    with MemoryStorageReader(None, memory_root=places.memory, job=places.job) as reader:
        dcp_mem.load(found, checkpoint_id=name, storage_reader=reader)
    expected = _state(step, **others)
    assert found["step"] == step
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    _barrier()


def _save(road: str, writer: MemoryStorageWriter, state: State, name: str) -> None:
    SAVES[road](state, checkpoint_id=name, storage_writer=writer)


def _warm(road: str, writer: MemoryStorageWriter) -> None:
    """Save twice: from then on a slot is free."""
    for step in (1, 2):
        _save(road, writer, _state(step), f"step-{step}")
        wait_for_spare_slots()
        _barrier()


def _slots(places: Places) -> int:
    """How many slots the job has on all ranks, free ones and segments together."""
    job = Path(places.memory, places.job)
    return len([*job.rglob("*.slot"), *job.rglob("*.distcp")])


# -- the ranks turn out not to agree ---------------------------------------------------------------


def _saves_changing_states(places: Places, road: str) -> None:
    """Rank 1 alone changes its structure, again and again."""
    with places.writer(keep_memory=2, persist=False) as writer:
        _warm(road, writer)
        for step, more in ((3, 0), (4, 1), (5, 1), (6, 0), (7, 2), (8, 1), (9, 3), (10, 4)):
            others = {f"more-{one}": 0.5 + step for one in range(more if _rank() == 1 else 0)}
            _save(road, writer, _state(step, **others), f"step-{step}")
            _assert_loads(places, f"step-{step}", step, **others)
            _assert_loads(places, None, step, **others)
            wait_for_spare_slots()
            _barrier()


@pytest.mark.parametrize("road", ROADS)
def test_a_structure_that_changes_on_one_rank_alone_is_saved_and_takes_no_more_slots(
    places: Places, road: str
) -> None:
    forked_ranks(_saves_changing_states, 2, places, road, timeout=120)
    assert _slots(places) <= 2 * (2 + 1)


def _saves_under_other_names(places: Places) -> None:
    with places.writer(keep_memory=2, persist=False) as writer:
        _warm("dcp_mem.save", writer)
        error = raised_by(lambda: _save("dcp_mem.save", writer, _state(-2), f"bad-{_rank()}"))
        assert "different checkpoint ids" in str(error)
        _barrier()
        _assert_loads(places, None, 2)
        _save("dcp_mem.save", writer, _state(3), "step-3")
        _assert_loads(places, None, 3)


def test_a_save_that_is_refused_takes_no_slot_with_it(places: Places) -> None:
    forked_ranks(_saves_under_other_names, 2, places)
    assert _slots(places) <= 2 * (2 + 1)


def _is_interrupted(places: Places, road: str) -> None:
    """Ctrl-C comes while the ranks agree."""

    def interrupted(*args: Any) -> Any:
        agree(*args)
        raise KeyboardInterrupt

    with places.writer(keep_memory=2, persist=False) as writer:
        _warm(road, writer)
        with (
            patch.object(pipeline_module, "agree", interrupted),
            pytest.raises((KeyboardInterrupt, CheckpointException)),
        ):
            _save(road, writer, _state(-1), "bad")
        _assert_loads(places, None, 2)
        for step in range(3, 6):
            _save(road, writer, _state(step), f"step-{step}")
            _assert_loads(places, None, step)


@pytest.mark.parametrize("road", ROADS)
def test_an_interrupt_while_the_ranks_agree_harms_no_later_save(places: Places, road: str) -> None:
    forked(_is_interrupted, places, road)
    assert _slots(places) <= 2 + 1


def _is_broken_off(places: Places) -> None:
    """DCP fails after the save was agreed on, and before it has the writer write."""

    def refusing(plan: Any) -> Any:
        raise ValueError("not today")

    with places.writer(keep_memory=2, persist=False) as writer:
        _warm("dcp.save", writer)
        with patch.object(writer, "prepare_local_plan", refusing):
            error = raised_by(lambda: _save("dcp.save", writer, _state(-1), "bad"))
        assert "not today" in str(error)
        _assert_loads(places, None, 2)
        for step in range(3, 7):
            _save("dcp.save", writer, _state(step), f"step-{step}")
            _assert_loads(places, None, step)


def test_a_save_that_dcp_breaks_off_takes_no_slot_with_it(places: Places) -> None:
    forked(_is_broken_off, places)
    assert _slots(places) <= 2 + 1


def _saves_by_another_writer(places: Places) -> None:
    def refusing(plan: Any) -> Any:
        raise ValueError("not today")

    with (
        places.writer(keep_memory=2, persist=False) as writer,
        places.writer(keep_memory=2, persist=False) as other,
    ):
        _warm("dcp.save", writer)
        with patch.object(writer, "prepare_local_plan", refusing):
            raised_by(lambda: _save("dcp.save", writer, _state(-1), "bad"))
        for step in range(3, 6):
            _save("dcp_mem.save", other, _state(step), f"step-{step}")
            _assert_loads(places, None, step)
    assert _slots(places) <= 2 + 1


def test_another_writer_saves_on_after_a_save_that_was_broken_off(places: Places) -> None:
    forked(_saves_by_another_writer, places)


def _saves_within_a_save(places: Places, road: str) -> None:
    """A signal handler saves as the outer save's ranks agree."""
    with places.writer(keep_memory=3, persist=False) as writer:
        for step in range(4):
            _save(road, writer, _state(step), f"step-{step}")
            wait_for_spare_slots()

        def agreeing(*args: Any) -> Any:
            with patch.object(pipeline_module, "agree", agree):
                dcp_mem.save(_state(8), checkpoint_id="inner", storage_writer=writer)
            return agree(*args)

        with patch.object(pipeline_module, "agree", agreeing):
            error = raised_by(lambda: _save(road, writer, _state(7), "outer"))
        _assert_loads(places, "inner", 8)
        if error is None:
            _assert_loads(places, "outer", 7)
        for step in (9, 10):
            _save(road, writer, _state(step), f"step-{step}")
            _assert_loads(places, None, step)


@pytest.mark.parametrize("road", ROADS)
def test_a_save_within_a_save_takes_no_bytes_from_it(places: Places, road: str) -> None:
    forked(_saves_within_a_save, places, road)


def _skips_a_save(places: Places, road: str) -> None:
    """The ranks agree to skip a save."""
    with places.writer(keep_memory=1, persist=False, on_full="skip") as writer:
        _warm(road, writer)
        with patch.object(pipeline_module, "agree", lambda *_: None):
            _save(road, writer, _state(-1), "skipped")
        _assert_loads(places, None, 2)
        _save(road, writer, _state(3), "step-3")
        _assert_loads(places, None, 3)


@pytest.mark.parametrize("road", ROADS)
def test_a_save_that_is_skipped_harms_no_later_one(places: Places, road: str) -> None:
    forked(_skips_a_save, places, road)


def _leaves_what_is_read(places: Places) -> None:
    with places.writer(keep_memory=2, persist=False) as writer:

        def save(step: int) -> set[str]:
            _save("dcp.save", writer, _state(step), f"step-{step}")
            return {one.name for one in writer.status() if one.in_memory}

        save(0)
        manifest = places.directory("memory", "step-0") / ".dcp_mem" / "manifest.json"
        with manifest.open("rb") as held:
            fcntl.flock(held, fcntl.LOCK_SH)  # as whoever reads the checkpoint does
            assert [save(step) for step in (1, 2, 3)][-1] == {"step-0", "step-3"}
        assert save(4) == {"step-3", "step-4"}


def test_a_checkpoint_that_is_read_stays_and_another_one_leaves_in_its_place(
    places: Places,
) -> None:
    forked(_leaves_what_is_read, places)


def _keeps_nothing(places: Places, road: str) -> None:
    gc.disable()
    with places.writer(keep_memory=2, persist=False) as writer:
        _warm(road, writer)
        tensor = torch.full((_NUMBERS,), 3.0)
        alive = weakref.ref(tensor)
        _save(road, writer, {"model": {"weights.0": tensor}, "step": 3}, "step-3")
        del tensor
        assert alive() is None, "the save has kept what it copied"


@pytest.mark.parametrize("road", ROADS)
def test_a_tensor_that_was_saved_is_freed_though_no_collector_runs(
    places: Places, road: str
) -> None:
    forked(_keeps_nothing, places, road)
