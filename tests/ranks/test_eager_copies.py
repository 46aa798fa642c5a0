"""Eager copies: a save in the call copies while its ranks agree."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

import dcp_mem
from dcp_mem import MemoryStorageReader, MemoryStorageWriter, RankFailed
from dcp_mem.common import faults
from dcp_mem.memory.copying import copies_of
from dcp_mem.runtime import session
from dcp_mem.saving import eager
from dcp_mem.saving import pipeline as pipeline_module
from dcp_mem.saving.agree import agree
from tests.support.checkpoints.jobs import wait_for_spare_slots, wait_until
from tests.support.checkpoints.plans import SAVES
from tests.support.checkpoints.roundtrip import Places, State
from tests.support.processes.forks import forked, forked_ranks, raised_by

ROADS = ("dcp.save", "dcp_mem.save")
RANKS = (None, 2)
_NUMBERS = 3 << 20
"""In each tensor; 12 MiB are enough for an eager copy."""


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


def _run(target: Callable[..., Any], ranks: int | None, *args: Any, **options: Any) -> Any:
    if ranks is None:
        return [forked(target, *args, **options)]
    return forked_ranks(target, ranks, *args, **options)


class _Spy:
    """Counts the saves that copy eagerly."""

    def __init__(self) -> None:
        self.begun = 0
        self._begin = eager._begun

    def __call__(self, *args: Any) -> Any:
        ahead = self._begin(*args)
        self.begun += ahead is not None
        return ahead


def _warm(road: str, writer: MemoryStorageWriter) -> None:
    """Save twice: from then on a slot is free."""
    for step in (1, 2):
        _save(road, writer, _state(step), f"step-{step}")
        wait_for_spare_slots()
        _barrier()


def _held_slots() -> int:
    """How many slots of this process somebody is writing to."""
    (own,) = session._sessions.values()
    return sum(slot.busy for slot in own.slots._open.values())


def _slots(places: Places) -> int:
    """How many slots the job has on all ranks, free ones and segments together."""
    job = Path(places.memory, places.job)
    return len([*job.rglob("*.slot"), *job.rglob("*.distcp")])


# -- what is saved comes back ----------------------------------------------------------------------


def _saves(places: Places, road: str) -> int:
    spy = _Spy()
    with places.writer(keep_memory=2, persist=False) as writer, patch.object(eager, "_begun", spy):
        _warm(road, writer)
        for step in range(3, 8):
            state = _state(step)
            _save(road, writer, state, f"step-{step}")
            state["model"][f"weights.{_rank()}"].fill_(-7)  # training goes on
            _assert_loads(places, f"step-{step}", step)
            _assert_loads(places, f"step-{step - 1}", step - 1)
        assert _held_slots() == 0
    return spy.begun


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("road", ROADS)
def test_what_is_copied_while_the_ranks_agree_is_the_state_of_the_call(
    places: Places, road: str, ranks: int | None
) -> None:
    assert min(_run(_saves, ranks, places, road)) >= 5


# -- it is copied before the others come -----------------------------------------------------------


def _saves_as_one_rank_is_late(places: Places, road: str, mark: Path) -> None:
    rank = _rank()

    def marked(*columns: Any) -> list[Callable[[], None]]:
        return [*copies_of(*columns), Path(f"{mark}-{rank}").touch]

    with places.writer(keep_memory=2, persist=False) as writer:
        _warm(road, writer)
        with patch.object(eager, "copies_of", marked):
            if rank == 1:
                wait_until(Path(f"{mark}-0").exists, "the early rank to have copied")
            _save(road, writer, _state(3), "step-3")
        _assert_loads(places, "step-3", 3)


@pytest.mark.parametrize("road", ROADS)
def test_a_rank_that_is_early_copies_while_it_waits_for_the_others(
    places: Places, road: str, tmp_path: Path
) -> None:
    forked_ranks(_saves_as_one_rank_is_late, 2, places, road, tmp_path / "copied")


# -- the ranks turn out not to agree ---------------------------------------------------------------


def _saves_changing_states(places: Places, road: str) -> int:
    """Rank 1 alone changes its structure, again and again."""
    spy = _Spy()
    with places.writer(keep_memory=2, persist=False) as writer, patch.object(eager, "_begun", spy):
        _warm(road, writer)
        for step, more in ((3, 0), (4, 1), (5, 1), (6, 0), (7, 2), (8, 1), (9, 3), (10, 4)):
            others = {f"more-{one}": 0.5 + step for one in range(more if _rank() == 1 else 0)}
            _save(road, writer, _state(step, **others), f"step-{step}")
            assert _held_slots() == 0
            _assert_loads(places, f"step-{step}", step, **others)
            _assert_loads(places, None, step, **others)
            wait_for_spare_slots()
            _barrier()
    return spy.begun


@pytest.mark.parametrize("road", ROADS)
def test_what_was_copied_by_a_plan_that_does_not_fit_all_ranks_is_given_back(
    places: Places, road: str
) -> None:
    first, _ = forked_ranks(_saves_changing_states, 2, places, road, timeout=120)
    assert first >= 8  # rank 0's state is always recognised
    assert _slots(places) <= 2 * (2 + 1)


def _saves_under_other_names(places: Places) -> None:
    with places.writer(keep_memory=2, persist=False) as writer:
        _warm("dcp_mem.save", writer)
        error = raised_by(lambda: _save("dcp_mem.save", writer, _state(-2), f"bad-{_rank()}"))
        assert "different checkpoint ids" in str(error)
        assert _held_slots() == 0
        _barrier()
        _assert_loads(places, None, 2)
        _save("dcp_mem.save", writer, _state(3), "step-3")
        _assert_loads(places, None, 3)


def test_what_was_copied_for_a_save_that_is_refused_is_given_back(places: Places) -> None:
    forked_ranks(_saves_under_other_names, 2, places)
    assert _slots(places) <= 2 * (2 + 1)


# -- failures --------------------------------------------------------------------------------------


def _fails(places: Places, road: str, point: str, failing: int) -> None:
    with places.writer(keep_memory=2, persist=False) as writer:
        _warm(road, writer)
        for step in (3, 5, 7):
            faults.arm(f"{point}:raise:1" if _rank() == failing else "")
            error = raised_by(functools.partial(_save, road, writer, _state(-step), "bad"))
            assert not faults.is_armed(point), "the save has copied later"
            faults.arm("")
            assert f"fault injected at {point}" in str(error)
            assert isinstance(error, faults.FaultInjected if _rank() == failing else RankFailed)
            assert _held_slots() == 0
            _barrier()
            _assert_loads(places, None, step - 1 if step > 3 else 2)
            _save(road, writer, _state(step + 1), f"step-{step + 1}")
            _assert_loads(places, None, step + 1)
            wait_for_spare_slots()
            _barrier()


@pytest.mark.parametrize(("ranks", "failing"), [(None, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize("point", ["eager.copying", "eager.copied"])
@pytest.mark.parametrize("road", ROADS)
def test_a_copy_that_fails_fails_the_save_on_all_ranks_and_harms_no_other(
    places: Places, road: str, point: str, ranks: int | None, failing: int
) -> None:
    _run(_fails, ranks, places, road, point, failing)
    assert _slots(places) <= (2 + 1) * (ranks or 1)


def _is_interrupted(places: Places, road: str) -> None:
    """Ctrl-C comes while the ranks agree, and the copy is under way."""

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
        assert _held_slots() == 0
        _assert_loads(places, None, 2)
        for step in range(3, 6):
            _save(road, writer, _state(step), f"step-{step}")
            _assert_loads(places, None, step)


@pytest.mark.parametrize("road", ROADS)
def test_an_interrupt_while_the_ranks_agree_leaves_no_copy_under_way(
    places: Places, road: str
) -> None:
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
        gc.collect()
        assert _held_slots() == 0


def test_a_save_that_dcp_breaks_off_gives_its_copy_back(places: Places) -> None:
    forked(_is_broken_off, places)
    assert _slots(places) <= 2 + 1


def _closes_as_it_copies(places: Places) -> None:
    """DCP breaks a save off, and the job's memory is left while threads still copy into it."""
    begun, go_on = threading.Event(), threading.Event()

    def blocked(*columns: Any) -> list[Callable[[], None]]:
        def wait() -> None:
            begun.set()
            assert go_on.wait(60)

        return [wait, *copies_of(*columns)]

    def refusing(plan: Any) -> Any:
        raise ValueError("not today")

    writer = places.writer(keep_memory=2, persist=False)
    _warm("dcp.save", writer)
    with (
        patch.object(eager, "copies_of", blocked),
        patch.object(writer, "prepare_local_plan", refusing),
    ):
        raised_by(lambda: _save("dcp.save", writer, _state(-1), "bad"))
    assert begun.wait(60)
    closing = threading.Thread(target=writer.close)
    closing.start()
    closing.join(0.3)
    assert closing.is_alive(), "the memory was left while a thread copied into it"
    go_on.set()
    closing.join(60)
    assert not closing.is_alive()
    with places.writer(keep_memory=2, persist=False) as writer:
        _assert_loads(places, None, 2)
        for step in range(3, 6):
            _save("dcp.save", writer, _state(step), f"step-{step}")
            _assert_loads(places, None, step)


def test_a_close_waits_for_copies_of_a_save_that_was_broken_off(places: Places) -> None:
    forked(_closes_as_it_copies, places)


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
        assert _held_slots() == 1
        for step in range(3, 6):
            _save("dcp_mem.save", other, _state(step), f"step-{step}")
            _assert_loads(places, None, step)
        assert _held_slots() == 0
    assert _slots(places) <= 2 + 1


def test_another_writer_has_the_slot_of_a_save_that_was_broken_off(places: Places) -> None:
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
        assert _held_slots() == 0


@pytest.mark.parametrize("road", ROADS)
def test_a_save_within_a_save_takes_no_bytes_from_it(places: Places, road: str) -> None:
    forked(_saves_within_a_save, places, road)


def _skips_a_save(places: Places, road: str) -> None:
    """The ranks agree to skip a save that is being copied."""
    with places.writer(keep_memory=1, persist=False, on_full="skip") as writer:
        _warm(road, writer)
        with patch.object(pipeline_module, "agree", lambda *_: None):
            _save(road, writer, _state(-1), "skipped")
        assert _held_slots() == 0
        _assert_loads(places, None, 2)
        _save(road, writer, _state(3), "step-3")
        _assert_loads(places, None, 3)


@pytest.mark.parametrize("road", ROADS)
def test_a_save_that_is_skipped_gives_its_copy_back(places: Places, road: str) -> None:
    forked(_skips_a_save, places, road)


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
def test_a_tensor_that_was_copied_eagerly_is_freed_though_no_collector_runs(
    places: Places, road: str
) -> None:
    forked(_keeps_nothing, places, road)
