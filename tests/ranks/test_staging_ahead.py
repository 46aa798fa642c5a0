"""`dcp.async_save` with the writer as DCP's stager: copies go straight into a slot."""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib
import itertools
import os
import pickle
import sys
import threading
import time
import traceback
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dcp_mem
from dcp_mem import MemoryStorageWriter
from dcp_mem import writer as writer_module
from dcp_mem.comm.bridge.calls import StagingCall
from dcp_mem.common import faults
from dcp_mem.errors import RankFailed
from dcp_mem.memory import copying
from dcp_mem.runtime.session import close_session, open_session
from dcp_mem.saving import ahead
from dcp_mem.saving import overlap as overlap_module
from dcp_mem.saving import saver as saver_module
from dcp_mem.saving import stage as stage_module
from dcp_mem.saving.overlap import Overlap, wait_for_copies
from tests.support.checkpoints.copies import held_copies
from tests.support.checkpoints.jobs import (
    Job,
    load_anew,
    make_state,
    number_of,
    wait_for_spare_slots,
    wait_until,
)
from tests.support.processes.forks import forked, forked_ranks, in_process, on_ranks

pytestmark = pytest.mark.timeout(240)

_SECONDS = 150.0
_TYPES: Any = getattr(dcp.state_dict_saver, "AsyncCheckpointerType", None)
PROCESS: dict[str, Any] = {} if _TYPES is None else {"async_checkpointer_type": _TYPES.PROCESS}

needs_stager = pytest.mark.skipif(
    _TYPES is None, reason=f"torch {torch.__version__} has threads only"
)

FAILURES = (Exception, dcp.CheckpointException)


def _async_save(writer: MemoryStorageWriter, state: Any, name: str, **options: Any) -> Future[Any]:
    begun: Any = dcp.async_save(state, checkpoint_id=name, storage_writer=writer, **options)
    future: Future[Any] = getattr(begun, "upload_completion", begun)
    return future


def _load(job: Job, name: str | None, state: Any | None = None, **options: Any) -> Any:
    state = make_state(-1) if state is None else state
    with job.reader() as reader:
        dcp.load(state, checkpoint_id=name, storage_reader=reader, **options)
    return state


def _slots(job: Job) -> int:
    """How many slots the job has, free ones and segments together."""
    return sum(1 for path in job.directory.rglob("*") if path.suffix in (".slot", ".distcp"))


def _overwrite(state: Any) -> None:
    """Go on training: what is being saved must not notice."""
    for key, value in state.items():
        if isinstance(value, dict):
            _overwrite(value)
        elif isinstance(value, torch.Tensor):
            local = value.to_local() if hasattr(value, "to_local") else value
            local.fill_(-77)
        elif isinstance(value, list):
            value.append("later")
        else:
            state[key] = "later"


# -- several saves in flight -----------------------------------------------------------------------


def _overlap_four(job: Job, with_a_writer_each: bool, in_between: bool) -> None:
    first = job.writer(agent="thread", keep_memory=6)
    others = [job.writer(agent="thread", keep_memory=6) for _ in range(3)]
    # Making states uses the default group, which a save in the background must not share.
    options = {"process_group": dist.new_group(backend="gloo")} if dist.is_initialized() else {}
    for number in range(0, 60, 4):
        futures = []
        for beside in range(4):
            writer = [first, *others][beside] if with_a_writer_each else first
            state = make_state(number + beside)
            futures.append(_async_save(writer, state, f"step-{number + beside}", **options))
            _overwrite(state)
        if in_between:
            state = make_state(1000 + number)
            dcp.save(state, checkpoint_id="plain", storage_writer=first, **options)
        for future in futures:
            future.result(_SECONDS)
        for beside in range(4):
            assert number_of(_load(job, f"step-{number + beside}")) == number + beside
        if in_between:
            assert number_of(_load(job, "plain")) == 1000 + number
        if dist.is_initialized():
            dist.barrier()
    assert _slots(job) <= 11 * (dist.get_world_size() if dist.is_initialized() else 1)
    first.close()


@pytest.mark.parametrize("in_between", [False, True])
@pytest.mark.parametrize("with_a_writer_each", [False, True])
def test_four_overlapping_saves_are_each_of_their_own_step(
    memory_job: Job, with_a_writer_each: bool, in_between: bool
) -> None:
    forked(_overlap_four, memory_job, with_a_writer_each, in_between, timeout=90)


@pytest.mark.parametrize("in_between", [False, True])
@pytest.mark.parametrize("with_a_writer_each", [False, True])
def test_overlapping_saves_of_two_ranks_are_each_of_their_own_step(
    memory_job: Job, with_a_writer_each: bool, in_between: bool
) -> None:
    forked_ranks(_overlap_four, 2, memory_job, with_a_writer_each, in_between, timeout=90)


# -- whatever a state dict holds -------------------------------------------------------------------


class _Subclass(torch.Tensor):
    pass


def _odd_states(step: int, rows: int = 4) -> dict[str, dict[str, Any]]:
    """States by what is special about them."""
    base = torch.arange(rows * 6.0).view(rows, 6) + step
    tied = base.clone()
    return {
        "bytes": {"log": ["a"] * step, "nested": {"n": step, "text": "x" * step}, "w": base},
        "views": {"t": base.clone().t(), "slice": base.clone()[1:3, 2:5], "row": base[2].clone()},
        "conj": {
            "c": torch.complex(base, -base).conj(),
            "neg": torch.complex(base, base).conj().imag,
        },
        "sparse": {"s": torch.eye(4).mul(step + 1).to_sparse(), "w": base},
        "quantised": {"q": torch.quantize_per_tensor(base, 0.5, 0, torch.qint8), "w": base},
        "tied": {"one": tied, "other": tied, "view": tied.view(-1)},
        "subclass": {"w": base.clone().as_subclass(_Subclass)},
        "parameter": {"w": torch.nn.Parameter(base.clone()), "m": torch.tensor(step)},
        "learning": {"w": base.clone().requires_grad_(), "m": torch.tensor(step)},
        "ordered": {"model": OrderedDict(w=base.clone(), b=base[0].clone())},
        "empty": {},
        "hollow": {"w": torch.empty(0, 3), "scalar": torch.tensor(step)},
    }


def _spoil_odd(state: Any) -> None:
    for value in state.values():
        if isinstance(value, dict):
            _spoil_odd(value)
        elif isinstance(value, list):
            value.append("later")
        elif isinstance(value, torch.Tensor) and value.layout is torch.strided:
            value.detach().copy_(torch.full(value.shape, 9.0))


def _blank_odd(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _blank_odd(value) for key, value in state.items()}
    if not isinstance(state, torch.Tensor):
        return None
    if state.is_quantized:
        return torch.quantize_per_tensor(torch.zeros(state.shape), 0.5, 0, torch.qint8)
    blank = torch.zeros(state.shape, dtype=state.dtype)
    return blank if state.layout is torch.strided else blank.to_sparse()


def _assert_odd(expected: Any, found: Any, where: str) -> None:
    if isinstance(expected, dict):
        assert expected.keys() == found.keys(), where
        for key, value in expected.items():
            _assert_odd(value, found[key], f"{where} {key}")
    elif isinstance(expected, torch.Tensor):
        one, other = (
            each.detach().dequantize() if each.is_quantized else each.detach().to_dense()
            for each in (expected, found)
        )
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other)), where
    else:
        assert expected == found, where


@contextmanager
def _counted_messages() -> Iterator[list[int]]:
    """Count the bytes of each message that this process sends to another."""
    sent: list[int] = []
    send_bytes: Callable[..., Any] = Connection._send_bytes  # type: ignore[attr-defined]

    def counting(self: Connection, data: Any) -> None:
        sent.append(len(data))
        send_bytes(self, data)

    with patch.object(Connection, "_send_bytes", counting):
        yield sent


def _save_odd(job: Job, options: dict[str, Any], rows: int) -> dict[str, int]:
    """Save what is odd, and load it; return the bytes that were sent for each last save."""
    torch.serialization.add_safe_globals([_Subclass])
    crossed = {}
    with job.writer(agent="thread" if not options else "process", keep_memory=2) as writer:
        # torch sends no quantised tensors to other processes.
        for kind in set(_odd_states(0)) - ({"quantised"} if options else set()):
            for step in range(1 if options else 3):
                state = _odd_states(step, rows)[kind]
                with _counted_messages() as sent:
                    future = _async_save(writer, state, f"{kind}-{step}", **options)
                    _spoil_odd(state)
                    future.result(_SECONDS)
                expected = _odd_states(step, rows)[kind]
                found = _load(job, f"{kind}-{step}", _blank_odd(expected))
                _assert_odd(expected, found, f"{kind} {step}")
                crossed[kind] = sum(sent)
    return crossed


@needs_stager
def test_a_state_of_any_kind_may_change_as_soon_as_the_call_has_returned(memory_job: Job) -> None:
    forked(_save_odd, memory_job, {}, 4, timeout=90)


@needs_stager
def test_a_state_of_any_kind_goes_to_another_process_and_its_bytes_are_not_sent(
    memory_job: Job,
) -> None:
    """They lie in shared memory: what is sent names the file, the offset and the shape."""
    [crossed] = forked_ranks(_save_odd, 1, memory_job, PROCESS, 1 << 14, timeout=200)
    for kind, nbytes in crossed.items():
        assert 0 < nbytes < 64 << 10, (kind, nbytes)  # of 384 KiB and more


# -- the only copy ---------------------------------------------------------------------------------


def test_the_writer_is_a_stager_in_every_spelling(memory_job: Job) -> None:
    writer = memory_job.writer()
    for place in ("torch.distributed.checkpoint.staging", "torch.distributed.checkpoint"):
        stager = getattr(importlib.import_module(place), "AsyncStager", None)
        if stager is not None:
            assert isinstance(writer, stager)
    assert writer.should_synchronize_after_execute is True
    writer.synchronize_staging()
    writer.close()


@contextmanager
def _counted_copies() -> Iterator[list[tuple[str, int]]]:
    """Who copies how much: (thread, bytes), and ("torch", 0) for torch's stager."""
    seen: list[tuple[str, int]] = []
    real_copied = ahead.copied

    def note(nbytes: int) -> None:
        if nbytes:
            seen.append((threading.current_thread().name, nbytes))

    def copy(moves: Any) -> None:
        note(sum(move[2] for move in moves))
        copying.copy(moves)

    def copy_many(destination: Any, source: Any, nbytes: Any) -> None:
        note(int(nbytes.sum()))
        copying.copy_many(destination, source, nbytes)

    def copied(*args: Any, **options: Any) -> Any:
        seen.append(("torch", 0))
        return real_copied(*args, **options)

    with (
        patch.object(stage_module, "copy", copy),
        patch.object(stage_module, "copy_many", copy_many),
        patch.object(saver_module, "copied", copied),
    ):
        yield seen


def _copy_once(job: Job) -> None:
    here = threading.current_thread().name
    rank = dist.get_rank() if dist.is_initialized() else 0
    with job.writer(agent="thread", keep_memory=2) as writer:
        for step in range(4):
            state = make_state(step)
            with _counted_copies() as seen:
                _async_save(writer, state, f"step-{step}").result(_SECONDS)
            if step == 0:
                assert ("torch", 0) in seen
            else:
                # All of it in one batch, by this thread.
                assert [thread for thread, _ in seen] == [here], (rank, seen)


@needs_stager
def test_a_warm_save_copies_once_in_the_callers_thread(memory_job: Job) -> None:
    forked(_copy_once, memory_job)
    forked_ranks(_copy_once, 2, memory_job)


@in_process
def test_a_first_save_makes_a_plan_by_which_the_next_one_copies_once(memory_job: Job) -> None:
    """The first state is planned by a copy of it, which has to be of the same kinds."""
    torch.serialization.add_safe_globals([_Subclass])
    elsewhere = set()
    with memory_job.writer(agent="thread", keep_memory=2, persist=False) as writer:
        for kind, state in _odd_states(1).items():
            for step in range(2):
                with _counted_copies() as seen:
                    _async_save(writer, state, f"{kind}-{step}").result(_SECONDS)
            if ("torch", 0) in seen:
                elsewhere.add(kind)
            _assert_odd(state, _load(memory_job, f"{kind}-1", _blank_odd(state)), kind)
    assert elsewhere == {"subclass"}


class _OwnPlanner(dcp.DefaultSavePlanner):
    pass


class _OwnStager:
    """A stager of the caller's own."""

    should_synchronize_after_execute = True
    _synchronize_after_execute = True

    def stage(self, state_dict: Any, **_: Any) -> Any:
        return _clone(state_dict)

    def synchronize_staging(self) -> None:
        pass

    def close(self) -> None:
        pass


@needs_stager
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("options", [{"planner": _OwnPlanner()}, {"async_stager": _OwnStager()}])
@on_ranks("ranks")
def test_whatever_dcp_is_told_to_save_with(
    memory_job: Job, options: dict[str, Any], ranks: int
) -> None:
    rank = dist.get_rank()
    with memory_job.writer(agent="thread", keep_memory=8) as writer:
        for step in range(3):
            state = {"w": torch.full((50,), float(step)), f"own{rank}": torch.tensor([rank, step])}
            expected = _clone(state)
            future = _async_save(writer, state, f"step-{step}", **options)
            _overwrite(state)
            future.result(_SECONDS)
            _assert_loads(memory_job, f"step-{step}", expected)
            dist.barrier()


# -- copies in private memory ----------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
@on_ranks("ranks")
def test_a_private_copy_shares_nothing_with_the_state(ranks: int) -> None:
    odd, inner = {1, 2}, torch.ones(2)
    state = make_state(3) | {"list": [inner], "tuple": (inner, 1), "odd": odd}
    copied = ahead.copied(state)
    _overwrite(state)
    inner.fill_(-77)
    odd.add(3)
    assert copied["list"][0].data_ptr() == copied["tuple"][0].data_ptr()
    assert copied.pop("list")[0].tolist() == [1, 1]
    assert copied.pop("tuple")[0].tolist() == [1, 1]
    assert copied.pop("odd") == {1, 2}
    assert number_of(copied) == 3


# -- structures that change ------------------------------------------------------------------------


def _shaped(step: int, kind: str) -> dict[str, Any]:
    state: dict[str, Any] = make_state(step)
    if kind == "key":
        state["more"] = torch.full((7,), float(step))
    elif kind == "shape":
        state["more"] = torch.full((9,), float(step))
    return state


def _change_structures(job: Job, kinds: Sequence[str]) -> None:
    with job.writer(agent="thread", keep_memory=3) as writer:
        for step, kind in enumerate(kinds):
            expected, state = _shaped(step, kind), _shaped(step, kind)
            future = _async_save(writer, state, f"step-{step}")
            _overwrite(state)
            future.result(_SECONDS)
            found = _load(job, f"step-{step}", _shaped(-1, kind))
            if kind:
                assert torch.equal(found.pop("more"), expected.pop("more"))
            assert number_of(found) == step
            if dist.is_initialized():
                dist.barrier()


@pytest.mark.parametrize("ranks", [1, 2])
def test_structures_that_change_on_all_ranks_are_saved(memory_job: Job, ranks: int) -> None:
    kinds = ["", "", "key", "key", "shape", "shape", "", "key", "", "shape", "key", ""]
    forked_ranks(_change_structures, ranks, memory_job, kinds)


@needs_stager
@pytest.mark.parametrize("changing", [0, 1])
@on_ranks(2, timeout=90)
def test_a_structure_that_changes_on_one_rank_is_refused_once_on_all(
    memory_job: Job, changing: int
) -> None:
    rank, errors = dist.get_rank(), []
    with memory_job.writer(agent="thread", keep_memory=3) as writer:
        for step in range(2):
            _async_save(writer, make_state(step), f"step-{step}").result(_SECONDS)
        for step in (2, 3, 4):
            state: dict[str, Any] = make_state(step)
            if rank == changing:
                state["only here"] = torch.full((step,), float(step))
            try:
                _async_save(writer, state, f"step-{step}").result(_SECONDS)
                outcome = ""
            except FAILURES as error:
                outcome = str(error)
            if outcome:
                errors.append(outcome)
                assert number_of(_load(memory_job, None)) == step - 1
                dist.barrier()
                _async_save(writer, state, f"step-{step}").result(_SECONDS)
            assert number_of(_load(memory_job, f"step-{step}")) == step
            dist.barrier()
    assert errors
    assert all("The next save plans anew" in one for one in errors)


# -- room ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_full", ["wait", "skip", "raise"])
@in_process
def test_where_no_second_slot_is_allowed_the_state_is_copied_aside(
    memory_job: Job, on_full: str
) -> None:
    state = {"w": torch.zeros(1 << 17)}
    outcomes = []
    with memory_job.writer(
        agent="thread", keep_memory=1, memory_limit=3 << 20, on_full=on_full, persist=False
    ) as writer:
        for step in range(3):
            state["w"].fill_(step)
            future = _async_save(writer, state, f"step-{step}")
            state["w"].fill_(-1)
            try:
                future.result(_SECONDS)
                there = [one.name for one in writer.status() if one.in_memory]
                outcomes.append("saved" if f"step-{step}" in there else "skipped")
            except FAILURES as error:
                outcomes.append("raised" if "MemoryBudgetExceeded" in str(error) else str(error))
            assert _slots(memory_job) <= 1
        found = _load(memory_job, None, {"w": torch.zeros(1 << 17)})
        assert found["w"].eq(0).all()
    assert outcomes == ["saved"] + ["skipped" if on_full == "skip" else "raised"] * 2


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _mappings(job: Job) -> int:
    return Path("/proc/self/maps").read_text().count(str(job.directory))


def _held(job: Job) -> tuple[int, int, int]:
    """How many slots, descriptors and mappings there are."""
    return _slots(job), _descriptors(), _mappings(job)


def _is_as_before(before: tuple[int, int, int], now: tuple[int, int, int]) -> bool:
    return all(after <= earlier + 1 for earlier, after in zip(before, now, strict=True))


@needs_stager
@in_process
def test_slots_descriptors_and_mappings_stay_as_they_are(memory_job: Job) -> None:
    # torch 2.6 has no such module.
    threads = importlib.import_module("torch.distributed.checkpoint._async_thread_executor")
    state = {"w": torch.ones(1 << 16), "n": 1}
    counts = []
    with memory_job.writer(agent="thread", keep_memory=2) as writer:
        for step in range(24):
            if step % 3 == 1:
                # As dcp.async_save does, whose save never comes.
                with (
                    patch.object(
                        threads._ThreadBasedAsyncCheckpointExecutor,
                        "execute_save",
                        side_effect=LookupError("no thread"),
                    ),
                    pytest.raises(LookupError),
                ):
                    _async_save(writer, state, f"step-{step}")
                gc.collect()
            elif step % 3 == 2:
                faults.arm("complete.receipts:raise:1")
                with pytest.raises(FAILURES, match="fault"):
                    _async_save(writer, state, f"step-{step}").result(_SECONDS)
                gc.collect()
            else:
                _async_save(writer, state, f"step-{step}").result(_SECONDS)
            open_session(writer.settings).prefaulting.stop()  # type: ignore[union-attr]
            counts.append(_held(memory_job))
        # Threads that make checksums hold a segment for a while.
        wait_until(
            lambda: _is_as_before(counts[9], _held(memory_job)), "threads to let go of segments"
        )
    assert max(slots for slots, _, _ in counts) <= 4, counts


# -- what was said of a save -----------------------------------------------------------------------


def _annotate(job: Job, way: str) -> list[tuple[str, int | None, dict[str, float], bool]]:
    options = dict(PROCESS) if "process" in way else {}
    if "stager" in way:
        options["async_stager"] = _OwnStager()
    with job.writer(agent="process", keep_memory=9, persist=dcp_mem.every_n_saves(3)) as writer:
        for step in range(8):
            if step in (1, 5):
                writer.annotate_next_save(step=step, metrics={"loss": step / 2}, persist=True)
            _async_save(writer, {"w": torch.ones(5)}, f"step-{step}", **options).result(_SECONDS)
        return [
            (one.name, one.step, dict(one.metrics), one.persist)
            for one in sorted(writer.status(), key=lambda one: one.name)
        ]


@needs_stager
@pytest.mark.parametrize("way", ["thread", "process", "thread, stager", "process, stager"])
def test_what_is_said_goes_to_the_next_save_alone_and_saves_are_counted(job: Job, way: str) -> None:
    [told] = forked_ranks(_annotate, 1, job, way, timeout=200)
    assert told == [
        ("step-0", None, {}, True),
        ("step-1", 1, {"loss": 0.5}, True),
        ("step-2", None, {}, False),
        ("step-3", None, {}, True),
        ("step-4", None, {}, False),
        ("step-5", 5, {"loss": 2.5}, True),
        ("step-6", None, {}, True),
        ("step-7", None, {}, False),
    ]


def test_a_writer_that_is_sent_in_the_background_leaves_what_was_said_of_a_later_save(
    memory_job: Job,
) -> None:
    writer = memory_job.writer()
    writer.annotate_next_save(step=1)
    assert pickle.loads(pickle.dumps(writer))._saver.take_info().step == 1
    assert writer._saver.take_info().step is None
    writer.annotate_next_save(step=2)
    call = StagingCall(
        planner=None,
        process_group=None,
        is_alone=True,
        uses_collectives=True,
        is_in_process=True,
    )
    with patch.object(writer_module, "staging_call", lambda _: call):
        assert torch.equal(writer.stage({"w": torch.ones(1)})["w"], torch.ones(1))
    writer.annotate_next_save(step=3)
    assert pickle.loads(pickle.dumps(writer))._saver.take_info().step == 2
    assert writer._saver.take_info().step == 3


# -- the last save ---------------------------------------------------------------------------------


def _close_at_once(job: Job) -> None:
    for first in (0, 2):
        writer = job.writer(agent="thread", keep_memory=2)
        futures = [
            _async_save(writer, make_state(first + step), f"step-{first + step}")
            for step in range(2)
        ]
        writer.close()
        assert all(future.done() for future in futures)


@pytest.mark.parametrize("ranks", [None, 2])
def test_a_close_waits_for_the_last_save_and_its_flush(job: Job, ranks: int | None) -> None:
    if ranks is None:
        forked(_close_at_once, job)
    else:
        forked_ranks(_close_at_once, ranks, job)
    for step in range(4):
        assert number_of(_load(Job(job.url, job.memory + "/none"), f"step-{step}")) == step


def _leave_at_once(job: Job) -> None:
    writer = job.writer(agent="process", keep_memory=2)
    _async_save(writer, make_state(1), "step-1").result(_SECONDS)
    _async_save(writer, make_state(2), "step-2")


@pytest.mark.parametrize("ranks", [None, 2])
def test_a_process_that_ends_right_after_the_call_neither_hangs_nor_tears(
    memory_job: Job, ranks: int | None
) -> None:
    if ranks is None:
        forked(_leave_at_once, memory_job)
    else:
        forked_ranks(_leave_at_once, ranks, memory_job)
    assert load_anew(memory_job).number in (1, 2)


# -- failures --------------------------------------------------------------------------------------


def _trained(step: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.BatchNorm1d(32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    _step(model, optimizer)
    return model, optimizer


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(8, 32)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _set(model: torch.nn.Module, step: int) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(step)


# -- copies behind the training loop ---------------------------------------------------------------


def _overlapped(
    writer: MemoryStorageWriter, state: Any, name: str, *optimizers: Any, validate: bool = False
) -> Future[Any]:
    with writer._saver.overlapping(Overlap(*optimizers, validate=validate)):
        return _async_save(writer, state, name)


def _clone(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _clone(inner) for key, inner in value.items()}
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _assert_loads(job: Job, name: str, expected: dict[str, Any]) -> None:
    blank = _clone(expected)
    _zero(blank)
    found = _load(job, name, blank)
    _assert_odd(expected, found, name)


def _zero(state: Any) -> None:
    for key, value in state.items():
        if isinstance(value, dict):
            _zero(value)
        elif isinstance(value, torch.Tensor):
            value.zero_()
        elif isinstance(value, int):
            state[key] = -1


def _all_of(model: torch.nn.Module, *optimizers: torch.optim.Optimizer, step: int) -> Any:
    state = {
        "model": dict(model.state_dict()),
        "rng": torch.full((16,), step),
        "counter": torch.tensor(step),
        "step": step,
    }
    for number, optimizer in enumerate(optimizers):
        of_parameters = optimizer.state_dict()["state"]
        state[f"optimizer{number}"] = {str(key): dict(of) for key, of in of_parameters.items()}
    return state


def _forward_and_backward(model: torch.nn.Module) -> None:
    model(torch.randn(8, 32)).sum().backward()


def test_a_step_of_the_optimizer_waits_for_the_copies_and_all_else_goes_on(
    memory_job: Job,
) -> None:
    with memory_job.writer(agent="thread", keep_memory=2) as writer:
        model, optimizer = _trained(0)
        for step in range(4):
            state = _all_of(model, optimizer, step=step)
            expected = _clone(state)
            with held_copies() as may_go_on:
                future = _overlapped(writer, state, f"step-{step}", optimizer)
                # What may change at any time has been copied.
                state["rng"].fill_(-1)
                state["counter"].fill_(-1)
                _forward_and_backward(model)  # changes the buffers
                _forward_and_backward(model)  # and accumulates
                stepping = threading.Thread(target=optimizer.step, daemon=True)
                stepping.start()
                stepping.join(0.2)
                # The first save plans, and copies all at once.
                assert stepping.is_alive() == (step > 0)
                assert step == 0 or not future.done()
                may_go_on.set()
                stepping.join(_SECONDS)
                assert not stepping.is_alive()
            optimizer.zero_grad()
            future.result(_SECONDS)
            _assert_loads(memory_job, f"step-{step}", expected)


def test_each_of_several_optimizers_waits_and_one_that_was_not_named_does_not(
    memory_job: Job,
) -> None:
    with memory_job.writer(agent="thread", keep_memory=2) as writer:
        model, first = _trained(0)
        other_model, second = _trained(0)
        strange_model, strange = _trained(0)
        models = torch.nn.ModuleList([model, other_model])
        for step in range(3):
            state = _all_of(models, first, second, step=step)
            expected = _clone(state)
            with held_copies() as may_go_on:
                future = _overlapped(writer, state, f"step-{step}", first, second)
                _step(strange_model, strange)
                for each in (model, other_model):
                    _forward_and_backward(each)
                threads = [
                    threading.Thread(target=one.step, daemon=True) for one in (first, second)
                ]
                for thread in threads:
                    thread.start()
                time.sleep(0.1)
                assert [thread.is_alive() for thread in threads] == [step > 0] * 2
                may_go_on.set()
                for thread in threads:
                    thread.join(_SECONDS)
            future.result(_SECONDS)
            _assert_loads(memory_job, f"step-{step}", expected)


def test_a_parameter_that_is_given_other_memory_is_saved_as_it_was(memory_job: Job) -> None:
    memory = np.full((300, 200), 3.0, np.float32)
    is_kept = weakref.ref(memory)
    parameter = torch.nn.Parameter(torch.from_numpy(memory))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    del memory
    with memory_job.writer(agent="thread", keep_memory=2) as writer:
        for step in range(2):
            with held_copies() as may_go_on:
                state = {"parameter": parameter}  # not detached: no other tensor has the memory
                future = _overlapped(writer, state, f"step-{step}", optimizer)
                del state
                if step:
                    parameter.data = torch.zeros(300, 200)
                    gc.collect()
                    assert not future.done()
                    assert is_kept() is not None
                may_go_on.set()
                future.result(_SECONDS)
        gc.collect()
        assert is_kept() is None
        _assert_loads(memory_job, "step-1", {"parameter": torch.full((300, 200), 3.0)})


def _have_hooks_on_gradients(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: None)


def _step_in_backward(model: torch.nn.Module) -> None:
    optim = importlib.import_module("torch.distributed.optim")
    optim._apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 1.0})


@pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated")  # torch's own import
@pytest.mark.parametrize(
    ("arrange", "why"),
    [
        (_have_hooks_on_gradients, "hooks on gradients may run an optimizer"),
        (_step_in_backward, "an optimizer runs in the backward pass"),
    ],
)
def test_an_optimizer_in_the_backward_pass_has_everything_copied_at_once(
    memory_job: Job,
    caplog: pytest.LogCaptureFixture,
    arrange: Callable[[torch.nn.Module], None],
    why: str,
) -> None:
    with memory_job.writer(agent="thread", keep_memory=2) as writer:
        model, optimizer = _trained(0)
        arrange(model)
        for step in range(4):
            state = _all_of(model, optimizer, step=step)
            expected = _clone(state)
            with held_copies():  # nothing is copied behind the loop
                future = _overlapped(writer, state, f"step-{step}", optimizer)
                _forward_and_backward(model)
                _set(model, -5)
                future.result(_SECONDS)
            _assert_loads(memory_job, f"step-{step}", expected)
    said = [record.message for record in caplog.records if "no effect" in record.message]
    assert len(said) == 1
    assert why in said[0]


def test_whatever_no_optimizer_changes_is_saved_as_it_was_at_the_call(memory_job: Job) -> None:
    amax, log = torch.zeros(16, 4), ["begun"]
    with memory_job.writer(agent="thread", keep_memory=2) as writer:
        model, optimizer = _trained(0)
        for step in range(3):
            state = _all_of(model, optimizer, step=step) | {"scaling": {"amax": amax}, "log": log}
            expected = copy.deepcopy(_clone(state))
            with held_copies() as may_go_on:
                future = _overlapped(writer, state, f"step-{step}", optimizer)
                amax.copy_(amax.roll(1, 0))
                amax[0] = step + 1.0
                log.append("later")
                assert step == 0 or not future.done()
                may_go_on.set()
                future.result(_SECONDS)
            found = _load(memory_job, f"step-{step}", _blank_odd(expected))
            _assert_odd(expected, found, f"step-{step}")


class _TorchWithCuda:
    """torch, as it looks where CUDA is in use."""

    cuda = SimpleNamespace(is_initialized=lambda: True)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _why_all_is_copied_at_once(
    job: Job, caplog: pytest.LogCaptureFixture, beside: Callable[[int], dict[str, torch.Tensor]]
) -> str:
    """Make overlapped saves of which nothing is copied behind the loop; return the logged reason.

    Args:
        beside: Returns what a step's state has beside model and optimizer.
    """
    with job.writer(agent="thread", keep_memory=2) as writer:
        model, optimizer = _trained(0)
        for step in range(3):
            state = {**_all_of(model, optimizer, step=step), **beside(step)}
            expected = _clone(state)
            with held_copies():
                future = _overlapped(writer, state, f"step-{step}", optimizer)
                _set(model, -5)
                future.result(_SECONDS)
            _assert_loads(job, f"step-{step}", expected)
    (said,) = [record.message for record in caplog.records if "no effect" in record.message]
    return said


def test_parameters_that_are_offloaded_to_the_cpu_are_copied_at_once(
    memory_job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    with patch.object(overlap_module, "torch", _TorchWithCuda()):
        said = _why_all_is_copied_at_once(memory_job, caplog, lambda step: {})
    assert "offloaded to the CPU" in said


def test_beside_a_tensor_that_is_not_plain_all_are_copied_at_once_and_the_log_says_so(
    memory_job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    strided = torch.arange(12.0).reshape(3, 4).t()
    said = _why_all_is_copied_at_once(memory_job, caplog, lambda step: {"strided": strided + step})
    assert "contiguous" in said


@pytest.mark.parametrize("by", ["in place", "data", "set", "when copied"])
def test_who_changes_a_parameter_before_the_step_is_found_and_the_checkpoint_discarded(
    memory_job: Job, by: str
) -> None:
    with memory_job.writer(agent="thread", keep_memory=3) as writer:
        model, optimizer = _trained(0)
        weight = model.get_parameter("0.weight")
        for step in range(2):
            state = _all_of(model, optimizer, step=step)
            _overlapped(writer, state, f"step-{step}", optimizer, validate=True).result(_SECONDS)
        wait_for_spare_slots()
        before, slots = _clone(_all_of(model, optimizer, step=1)), _slots(memory_job)
        with held_copies() as may_go_on:
            state = _all_of(model, optimizer, step=2)
            future = _overlapped(writer, state, "step-2", optimizer, validate=True)
            if by == "in place":
                with torch.no_grad():
                    weight.add_(1)
            elif by == "data":
                weight.data.mul_(3)
            elif by == "set":
                weight.data.view(-1).numpy()[:] = 7
            may_go_on.set()
            if by == "when copied":
                wait_for_copies()
                _step(model, optimizer)  # too late to do harm
                future.result(_SECONDS)
                return
            with pytest.raises(FAILURES, match=r"model\.0\.weight"):
                future.result(_SECONDS)
        assert "step-2" not in [one.name for one in writer.status()]
        assert _slots(memory_job) <= slots + 1
        _assert_loads(memory_job, "step-1", before)
        state = _all_of(model, optimizer, step=3)
        expected = _clone(state)
        _overlapped(writer, state, "step-3", optimizer, validate=True).result(_SECONDS)
        _assert_loads(memory_job, "step-3", expected)


@pytest.mark.parametrize("load", [dcp.load, dcp_mem.load])
@in_process
def test_a_load_into_what_is_being_copied_waits(memory_job: Job, load: Any) -> None:
    with memory_job.writer(agent="thread", keep_memory=3) as writer:
        model, optimizer = _trained(0)
        _overlapped(writer, _all_of(model, optimizer, step=0), "step-0", optimizer).result(_SECONDS)
        first = _clone(_all_of(model, optimizer, step=0))
        _step(model, optimizer)
        state = _all_of(model, optimizer, step=1)
        expected = _clone(state)
        with held_copies() as may_go_on:
            future = _overlapped(writer, state, "step-1", optimizer)

            def read() -> None:
                with memory_job.reader() as reader:
                    load(state, checkpoint_id="step-0", storage_reader=reader)

            loading = threading.Thread(target=read, daemon=True)
            loading.start()
            loading.join(0.3)
            assert loading.is_alive()
            may_go_on.set()
            loading.join(_SECONDS)
            assert not loading.is_alive()
        future.result(_SECONDS)
        _assert_odd(first, state, "loaded")
        _assert_loads(memory_job, "step-1", expected)


# -- any of it, in any order -----------------------------------------------------------------------

_CALLS = st.lists(
    st.sampled_from(
        [
            "async",
            "async",
            "async",
            "await",
            "dcp",
            "own",
            "load",
            "dcp.load",
            "status",
            "wait",
            "close",
            "grow",
        ]
    ),
    min_size=1,
    max_size=8,
)
_jobs = itertools.count()
_numbers = itertools.count(1)


def _live(job: Job, begun: set[int], is_shared: MemoryStorageWriter | None, calls: Any) -> None:
    """Make these calls, in one thread."""
    writer = is_shared or job.writer(agent="thread", keep_memory=2)
    pending: list[Future[Any]] = []
    last, has_more = 0, False
    for call in calls:
        if call in ("async", "dcp", "own"):
            last = next(_numbers)
            begun.add(last)
            state, name = make_state(last), f"step-{last}"
            if has_more:
                state["more"] = torch.ones(3)
            if call == "async":
                pending.append(_async_save(writer, state, name))
                _overwrite(state)
            else:
                save = dcp.save if call == "dcp" else dcp_mem.save
                save(state, checkpoint_id=name, storage_writer=writer)
        elif call == "await":
            while pending:
                pending.pop(0).result(_SECONDS)
        elif call in ("load", "dcp.load"):
            load = dcp.load if call == "dcp.load" else dcp_mem.load
            state = make_state(-1)
            with job.reader() as reader:
                try:
                    load(state, storage_reader=reader)
                except dcp.CheckpointException as error:
                    [(cause, _)] = error.failures.values()
                    assert isinstance(cause, dcp_mem.NoRecoverableCheckpoint), cause
                    continue
                except dcp_mem.NoRecoverableCheckpoint:
                    continue
            assert number_of(state) in begun
        elif call == "status":
            assert {int(one.name.removeprefix("step-")) for one in writer.status()} <= begun
        elif call == "wait" and last:
            while pending:
                pending.pop(0).result(_SECONDS)
            # A newer one of another thread may take its place on the way to storage.
            with contextlib.suppress(dcp_mem.FlushFailed):
                writer.wait(f"step-{last}", timeout=_SECONDS)
        elif call == "close":
            writer.close()
        elif call == "grow":
            has_more = not has_more
    for future in pending:
        future.result(_SECONDS)


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(threads=st.lists(_CALLS, min_size=1, max_size=3), shares=st.booleans())
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_saves_in_flight_of_several_threads_are_whole_in_any_order(
    memory_root: Path, tmp_path: Path, threads: list[list[str]], shares: bool
) -> None:
    name = f"job-{next(_jobs)}"
    job = Job(str(tmp_path / name), str(memory_root), name=name)
    writer = job.writer(agent="thread", keep_memory=2)
    begun: set[int] = set()
    errors: list[BaseException] = []

    def run(calls: list[str]) -> None:
        try:
            _live(job, begun, writer if shares else None, calls)
        except BaseException as error:
            errors.append(error)

    running = [threading.Thread(target=run, args=(calls,), daemon=True) for calls in threads]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(_SECONDS)
        where = sys._current_frames().get(thread.ident or 0)
        assert not thread.is_alive(), "a thread hangs:\n" + "".join(traceback.format_stack(where))
    if errors:
        raise errors[0]
    writer.close()
    assert open_session(writer.settings) is None
    if begun:
        assert number_of(_load(job, None)) in begun
    assert gc.isenabled()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("is_known", [False, True])
def test_a_close_by_another_thread_lets_a_staged_save_begin_and_end(
    memory_job: Job, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    writer = memory_job.writer(agent="thread", keep_memory=2)
    for number in range(2 * is_known):
        _async_save(writer, make_state(number), f"step-{number}").result(_SECONDS)
    may_begin, session = threading.Event(), writer._saver.open_session()
    asked = MemoryStorageWriter.storage_meta

    def held(self: MemoryStorageWriter) -> Any:
        assert may_begin.wait(_SECONDS)
        return asked(self)

    monkeypatch.setattr(MemoryStorageWriter, "storage_meta", held)
    saving = _async_save(writer, make_state(7), "step-7")
    closing = threading.Thread(target=close_session, args=(writer.settings,), daemon=True)
    closing.start()
    while session._end is None:
        time.sleep(0.001)
    may_begin.set()
    saving.result(_SECONDS)
    closing.join(_SECONDS)
    assert not closing.is_alive()
    assert number_of(_load(memory_job, "step-7")) == 7


@pytest.mark.timeout(60)
def test_a_close_does_not_wait_for_a_save_that_could_not_begin_in_the_background(
    memory_job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the store that the ranks have met in has died with its host."""
    opened = saver_module.Saver.open_session

    def open_here(self: saver_module.Saver) -> Any:
        if threading.current_thread() is threading.main_thread():
            return opened(self)
        raise RankFailed("meeting the other ranks", [(0, "the store is gone")])

    monkeypatch.setattr(saver_module.Saver, "open_session", open_here)
    writer = memory_job.writer(agent="thread")
    begun = _async_save(writer, {"x": torch.ones(9)}, "a")
    with pytest.raises(FAILURES) as kept:  # its frames have the turn's ticket
        begun.result(_SECONDS)
    writer.close(flush=False)
    assert open_session(writer.settings) is None
    assert "the store is gone" in str(kept.value)


@pytest.mark.parametrize("breaking", [0, 1])
@on_ranks(2, timeout=120)
def test_who_breaks_the_rule_on_one_rank_has_the_checkpoint_discarded_on_all(
    memory_job: Job, breaking: int
) -> None:
    with memory_job.writer(agent="thread", keep_memory=3) as writer:
        model, optimizer = _trained(0)
        weight = model.get_parameter("0.weight")
        for step in range(4):
            # Of its own: of what several ranks hold, one rank's bytes are saved.
            state = {f"of rank {dist.get_rank()}": _all_of(model, optimizer, step=step)}
            expected = _clone(state)
            with held_copies() as may_go_on:
                future = _overlapped(writer, state, f"step-{step}", optimizer, validate=True)
                if step == 2 and dist.get_rank() == breaking:
                    with torch.no_grad():
                        weight.add_(1)
                may_go_on.set()
                if step == 2:
                    with pytest.raises(FAILURES, match=r"model\.0\.weight"):
                        future.result(_SECONDS)
                    assert "step-2" not in [one.name for one in writer.status()]
                else:
                    future.result(_SECONDS)
                    _assert_loads(memory_job, f"step-{step}", expected)
            dist.barrier()
            _step(model, optimizer)
