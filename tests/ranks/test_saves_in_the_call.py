"""Saves in the call that are refused, broken off, skipped, or come within each other."""

from __future__ import annotations

import fcntl
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

import dcp_mem
from dcp_mem import MemoryStorageReader, MemoryStorageWriter
from tests.support.checkpoints.copies import held_copies
from tests.support.checkpoints.jobs import slots_of, wait_for_spare_slots
from tests.support.checkpoints.plans import SAVES
from tests.support.checkpoints.roundtrip import Places, State
from tests.support.processes import faults
from tests.support.processes.forks import forked, in_process, raised_by

ROADS = ("dcp.save", "dcp_mem.save")
_NUMBERS = 3 << 20


def _state(step: int) -> State:
    """A state whose every value tells its step."""
    return {"model": {"weights": torch.full((_NUMBERS,), float(step))}, "step": step}


def _assert_loads(places: Places, name: str | None, step: int) -> None:
    found = _state(-1)
    with MemoryStorageReader(None, memory_root=places.memory, job=places.job) as reader:
        dcp_mem.load(found, checkpoint_id=name, storage_reader=reader)
    assert found["step"] == step
    torch.testing.assert_close(found, _state(step), rtol=0, atol=0)


def _save(road: str, writer: MemoryStorageWriter, state: State, name: str) -> None:
    SAVES[road](state, checkpoint_id=name, storage_writer=writer)


def _warm(road: str, writer: MemoryStorageWriter) -> None:
    """Save twice: from then on a slot is free."""
    for step in (1, 2):
        _save(road, writer, _state(step), f"step-{step}")
        wait_for_spare_slots()


# -- saves that are interrupted --------------------------------------------------------------------


def _interrupt() -> None:
    raise KeyboardInterrupt


def _is_interrupted(places: Places, road: str) -> None:
    """Ctrl-C comes once the ranks have agreed."""
    with places.writer(keep_memory=2, persist=False) as writer:
        _warm(road, writer)
        with (
            faults.at_point("save.agreed", _interrupt),
            pytest.raises((KeyboardInterrupt, CheckpointException)),
        ):
            _save(road, writer, _state(-1), "bad")
        _assert_loads(places, None, 2)
        for step in range(3, 6):
            _save(road, writer, _state(step), f"step-{step}")
            _assert_loads(places, None, step)


@pytest.mark.parametrize("road", ROADS)
def test_an_interrupt_as_the_ranks_have_agreed_harms_no_later_save(
    places: Places, road: str
) -> None:
    forked(_is_interrupted, places, road)
    assert slots_of(Path(places.memory, places.job)) <= 2 + 1


@in_process
def test_another_writer_saves_on_after_a_save_that_was_broken_off(places: Places) -> None:
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
    assert slots_of(Path(places.memory, places.job)) <= 2 + 1


@pytest.mark.parametrize("road", ROADS)
@in_process
def test_a_save_within_a_save_takes_no_bytes_from_it(places: Places, road: str) -> None:
    """A signal handler saves as the outer save's ranks agree."""
    with places.writer(keep_memory=3, persist=False) as writer:
        for step in range(4):
            _save(road, writer, _state(step), f"step-{step}")
            wait_for_spare_slots()

        def save_inner() -> None:
            dcp_mem.save(_state(8), checkpoint_id="inner", storage_writer=writer)

        with faults.at_point("save.agreed", save_inner):
            error = raised_by(lambda: _save(road, writer, _state(7), "outer"))
        _assert_loads(places, "inner", 8)
        if error is None:
            _assert_loads(places, "outer", 7)
        for step in (9, 10):
            _save(road, writer, _state(step), f"step-{step}")
            _assert_loads(places, None, step)


@pytest.mark.parametrize("road", ROADS)
@in_process
def test_a_save_that_is_skipped_harms_no_later_one(places: Places, road: str) -> None:
    """The ranks agree to skip a save, for which there is no room."""
    with places.writer(
        keep_memory=1, persist=False, on_full="skip", memory_limit="40MiB"
    ) as writer:
        _warm(road, writer)
        _save(road, writer, {"large": torch.zeros(16 << 20)}, "skipped")
        _assert_loads(places, None, 2)
        _save(road, writer, _state(3), "step-3")
        _assert_loads(places, None, 3)


@in_process
def test_a_checkpoint_that_is_read_stays_and_another_one_leaves_in_its_place(
    places: Places,
) -> None:
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


# -- saves that wait for earlier ones --------------------------------------------------------------


@contextmanager
def _on_signal(number: int, handler: Any) -> Iterator[None]:
    before = signal.signal(number, handler)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), number))
    timer.start()
    try:
        yield
    finally:
        timer.join()
        signal.signal(number, before)


@contextmanager
def _behind_a_held_save(places: Places) -> Iterator[tuple[MemoryStorageWriter, threading.Event]]:
    """A save goes on behind the loop for as long as the event isn't set."""
    parameter = torch.nn.Parameter(torch.ones(_NUMBERS))
    with places.writer(keep_memory=4, persist=False) as writer, held_copies() as may_go_on:
        optimizer = torch.optim.SGD([parameter])
        may_go_on.set()
        for name in ("known", "held"):
            begun: Any = dcp_mem.async_save(
                {"p": parameter}, checkpoint_id=name, storage_writer=writer, overlap=optimizer
            )
            if name == "known":
                begun.result(60)
                may_go_on.clear()
        yield writer, may_go_on
        may_go_on.set()
        begun.result(60)


@in_process
def test_a_save_that_waits_for_another_one_can_be_interrupted(places: Places) -> None:
    with _behind_a_held_save(places) as (writer, may_go_on):
        with (
            _on_signal(signal.SIGINT, signal.default_int_handler),
            pytest.raises((KeyboardInterrupt, CheckpointException)),
        ):
            dcp_mem.save(_state(1), checkpoint_id="waits", storage_writer=writer)
        may_go_on.set()
        dcp_mem.save(_state(2), checkpoint_id="next", storage_writer=writer)
        _assert_loads(places, "next", 2)
        assert "waits" not in [one.name for one in writer.status()]


@in_process
def test_a_save_in_a_signal_handler_comes_before_the_one_that_waits(places: Places) -> None:
    """The handler's save comes before the one that waits, and that one is made all the same."""
    with _behind_a_held_save(places) as (writer, may_go_on):

        def save(*_: object) -> None:
            may_go_on.set()
            dcp_mem.save(_state(1), checkpoint_id="handler", storage_writer=writer)

        with _on_signal(signal.SIGUSR1, save):
            dcp_mem.save(_state(2), checkpoint_id="interrupted", storage_writer=writer)
        assert [one.name for one in writer.status()][:3] == ["interrupted", "handler", "held"]
        _assert_loads(places, "handler", 1)
        _assert_loads(places, None, 2)
