"""An error on one rank, wherever it comes, ends the call on all ranks; the next call works."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

import dcp_mem
from dcp_mem import CheckpointManager, MemoryStorageReader, MemoryStorageWriter
from tests.support.processes import faults
from tests.support.processes.forks import forked_ranks, on_ranks, raised_by

_ENV = {"DCP_MEM_TIMEOUT": "60"}
_SOON_SECONDS = 30.0
"""Well below the time-out."""


def _ends_together(
    case: object, act: Callable[[], object], well: Callable[[], object], *texts: str
) -> None:
    """A call fails on this rank in time, with these texts; then the same call works."""
    dist.barrier()
    started = time.monotonic()
    raised = raised_by(act)
    seconds, error = time.monotonic() - started, f"{raised!r} {raised}"
    dist.barrier()
    assert all(text in error for text in texts), (case, error)
    assert seconds < _SOON_SECONDS, case
    assert raised_by(well) is None, case


def _state() -> dict[str, Any]:
    return {"x": torch.arange(1000.0) + dist.get_rank(), "step": 1}


def _writer(root: str) -> MemoryStorageWriter:
    return MemoryStorageWriter(None, memory_root=root, job="job")


def _reader(root: str) -> MemoryStorageReader:
    return MemoryStorageReader(None, memory_root=root, job="job")


# -- callbacks of planners -------------------------------------------------------------------------

_FAILING = {"": ""}
"""Under "callback", the one that raises in this process."""


def _fail_in(callback: str) -> None:
    if _FAILING[""] == callback:
        raise OSError(f"{callback} has failed")


class _Failing:
    """What planners of saves and of loads both have; each method raises where it is told to."""

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        _fail_in("set_up_planner")
        super().set_up_planner(*args, **kwargs)  # type: ignore[misc]

    def create_local_plan(self) -> Any:
        _fail_in("create_local_plan")
        return super().create_local_plan()  # type: ignore[misc]

    def create_global_plan(self, *args: Any) -> Any:
        _fail_in("create_global_plan")
        return super().create_global_plan(*args)  # type: ignore[misc]

    def finish_plan(self, new_plan: Any) -> Any:
        _fail_in("finish_plan")
        return super().finish_plan(new_plan)  # type: ignore[misc]


class _Saving(_Failing, DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        _fail_in("resolve_data")
        return super().resolve_data(write_item)


class _Loading(_Failing, DefaultLoadPlanner):
    def resolve_tensor(self, read_item: Any) -> Any:
        _fail_in("resolve_tensor")
        return super().resolve_tensor(read_item)


class _Stateful:
    """Its methods raise where they are told to."""

    def state_dict(self) -> dict[str, Any]:
        _fail_in("state_dict")
        return {"y": torch.ones(3)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["y"].tolist() == [1.0, 1.0, 1.0]


@contextmanager
def _failing(callback: str, culprit: int) -> Iterator[None]:
    _FAILING[""] = callback if dist.get_rank() == culprit else ""
    try:
        yield
    finally:
        _FAILING[""] = ""


def _cases(callbacks: str) -> list[tuple[str, int]]:
    cases = [(callback, culprit) for callback in callbacks.split() for culprit in (0, 1)]
    return [case for case in cases if case != ("create_global_plan", 1)]


_CALLBACKS = "set_up_planner create_local_plan create_global_plan finish_plan"
_ASKED = {"save": f"{_CALLBACKS} resolve_data", "load": f"{_CALLBACKS} resolve_tensor"}
_ASKED["prepare"] = "set_up_planner create_local_plan create_global_plan"


@pytest.mark.parametrize("call", ["save", "load", "prepare"])
@on_ranks(2, timeout=200, env=_ENV)
def test_a_planner_that_raises_on_one_rank_ends_the_call_on_all(
    memory_root: Path, call: str
) -> None:
    root = str(memory_root)

    def save() -> None:
        dcp.save(_state(), checkpoint_id="a", storage_writer=writer, planner=_Saving())

    def load() -> None:
        with _reader(root) as reader:
            dcp.load(_state(), storage_reader=reader, planner=_Loading())

    def prepare() -> None:
        assert writer.prepare(_state(), _Saving()).wait(60)

    with _writer(root) as writer:
        save()
        well = {"save": save, "load": load, "prepare": prepare}[call]
        for callback, culprit in _cases(_ASKED[call]):

            def fail(callback: str = callback, culprit: int = culprit) -> None:
                with _failing(callback, culprit):
                    well()

            _ends_together((callback, culprit), fail, well, f"{callback} has failed")


@pytest.mark.parametrize("culprit", [0, 1])
@on_ranks(2, env=_ENV)
def test_what_one_rank_cannot_prepare_for_fails_prepare_on_both(
    memory_root: Path, tmp_path: Path, culprit: int
) -> None:
    """A state whose keys collide, and a memory root that can't be opened."""
    is_wrong = dist.get_rank() == culprit
    file = tmp_path / f"file-{dist.get_rank()}"
    file.write_text("no directory")

    def well() -> None:
        with _writer(str(memory_root)) as writer:
            assert writer.prepare(_state()).wait(60)

    def fail(root: str, state: dict[str, Any]) -> None:
        with _writer(root) as writer:
            writer.prepare(state).wait(60)

    colliding = {"a.b": torch.ones(3), "a": {"b": torch.ones(3)}} if is_wrong else _state()
    named = "" if is_wrong else f"rank {culprit}: "
    _ends_together("keys", lambda: fail(str(memory_root), colliding), well, named, "a.b")
    elsewhere = str(file if is_wrong else memory_root)
    said = ("MemoryRootRefused", "it is not a directory")
    _ends_together("root", lambda: fail(elsewhere, _state()), well, named, *said)


class _Old(DefaultSavePlanner):
    """Knows no storage_meta."""

    def set_up_planner(  # type: ignore[override]
        self, state_dict: dict[str, Any], is_coordinator: bool
    ) -> None:
        super().set_up_planner(state_dict, is_coordinator=is_coordinator)


@on_ranks(2)
def test_a_planner_of_before_storage_meta_is_set_up_as_it_can_be(memory_root: Path) -> None:
    root = str(memory_root)
    with _writer(root) as writer:
        dcp.save({"x": torch.ones(2)}, checkpoint_id="a", storage_writer=writer, planner=_Old())
    into = {"x": torch.zeros(2)}
    dcp.load(into, storage_reader=_reader(root))
    assert float(into["x"].sum()) == 2.0


# -- anything else between two exchanges -----------------------------------------------------------


def _calls(root: str) -> dict[str, Callable[[], object]]:
    def save(**options: Any) -> None:
        with _writer(root) as writer:
            dcp.save(_state(), checkpoint_id="a", storage_writer=writer, **options)

    def save_by_function() -> None:
        with _writer(root) as writer:
            dcp_mem.save(_state(), checkpoint_id="a", storage_writer=writer)

    def load(**options: Any) -> None:
        with _reader(root) as reader:
            dcp.load(_state(), storage_reader=reader, **options)

    def load_by_function() -> None:
        with _reader(root) as reader:
            dcp_mem.load(_state(), storage_reader=reader)

    def prepare() -> None:
        with _writer(root) as writer:
            writer.prepare(_state()).wait()

    def look() -> None:
        with _reader(root) as reader:
            assert reader.recoverable()

    def delete() -> None:
        with CheckpointManager(memory_root=root, job="job", on_error="raise") as manager:
            manager.save(7, _state())
            manager.delete(7)

    return {
        "dcp.save": save,
        "dcp.save with a planner": lambda: save(planner=_Saving()),
        "dcp_mem.save": save_by_function,
        "dcp.load": load,
        "dcp.load with a planner": lambda: load(planner=_Loading()),
        "dcp_mem.load": load_by_function,
        "prepare": prepare,
        "recoverable": look,
        "manager": delete,
    }


@pytest.mark.parametrize("name", list(_calls("")))
@on_ranks(2, timeout=250, env=_ENV)
def test_an_error_in_front_of_any_exchange_ends_the_call_on_all_ranks(
    memory_root: Path, name: str
) -> None:
    root = str(memory_root)
    act = _calls(root)[name]
    _calls(root)["dcp.save"]()
    for number in range(1, faults.passes_of("ranks.exchange", act) + 1):
        for culprit in (0, 1):

            def interrupted(number: int = number, culprit: int = culprit) -> None:
                faults.arm(f"ranks.exchange:raise:{number}" if dist.get_rank() == culprit else "")
                try:
                    act()
                finally:
                    faults.arm("")

            said = "fault injected at ranks.exchange"
            _ends_together((culprit, number), interrupted, act, said)


# -- stateful objects ------------------------------------------------------------------------------


@on_ranks(2, timeout=200, env=_ENV)
def test_a_stateful_object_that_raises_on_one_rank_ends_the_call_on_all(memory_root: Path) -> None:
    root = str(memory_root)

    def state() -> dict[str, Any]:
        return {"x": torch.arange(4.0), "own": _Stateful()}

    def async_save() -> None:
        begun = dcp_mem.async_save(state(), checkpoint_id="b", storage_writer=writer)
        getattr(begun, "upload_completion", begun).result()

    def load(**options: Any) -> None:
        with _reader(root) as reader:
            dcp_mem.load(state(), checkpoint_id="a", storage_reader=reader, **options)

    with _writer(root) as writer:

        def save(**options: Any) -> None:
            dcp_mem.save(state(), checkpoint_id="a", storage_writer=writer, **options)

        save()
        roads: dict[str, Callable[[], object]] = {
            "save": save,
            "save with a planner": lambda: save(planner=_Saving()),
            "async_save": async_save,
            "load": load,
            "load with a planner": lambda: load(planner=_Loading()),
        }
        for name, act in roads.items():
            for culprit in (0, 1):

                def fail(act: Callable[[], object] = act, culprit: int = culprit) -> None:
                    with _failing("state_dict", culprit):
                        act()

                _ends_together((name, culprit), fail, act, "has failed")


# -- the manager -----------------------------------------------------------------------------------


def _metrics_are_wrong(root: str, culprits: tuple[int, ...]) -> list[str]:
    found: list[str] = []
    with CheckpointManager(memory_root=root, job="job") as manager:
        for step, is_wrong in enumerate([False, True, False]):
            metrics = {"loss": "low"} if is_wrong and dist.get_rank() in culprits else {"loss": 1.0}
            try:
                found.append(manager.save(step, _state(), metrics=metrics).outcome)
            except dcp_mem.ConfigError as error:
                found.append(str(error).split(":")[0])
    return found


def test_what_one_rank_alone_gets_wrong_is_a_warning_for_all(memory_root: Path) -> None:
    for culprit in (0, 1):
        found = forked_ranks(_metrics_are_wrong, 2, str(memory_root), (culprit,), env=_ENV)
        assert found == [["complete", "failed", "complete"]] * 2
    found = forked_ranks(_metrics_are_wrong, 2, str(memory_root), (0, 1), env=_ENV)
    assert found == [["complete", "metrics", "complete"]] * 2


# -- what all ranks raise --------------------------------------------------------------------------


def _next_call(root: str) -> Callable[[], object]:
    return lambda: _writer(root).prepare(_state()).wait(_SOON_SECONDS)


def _all_raise(root: str) -> list[tuple[str, str, Exception | None]]:
    """What each case raises, and what the next call does, which the ranks begin as they come."""
    rank = dist.get_rank()
    found = []

    def note(case: str, act: Callable[[], object]) -> None:
        error = raised_by(act)
        found.append((case, type(error).__name__, raised_by(_next_call(root))))
        dist.barrier()

    def save(writer: MemoryStorageWriter, name: str, **state: Any) -> None:
        dcp_mem.save({**_state(), **state}, checkpoint_id=name, storage_writer=writer)

    def load(name: str | None, state: dict[str, Any]) -> None:
        dcp_mem.load(state, checkpoint_id=name, storage_reader=_reader(root))

    note("no checkpoint", lambda: load(None, _state()))
    with MemoryStorageWriter(None, memory_root=root, job="job", overwrite=False) as writer:
        save(writer, "a")
        note("the name is taken", lambda: save(writer, "a"))
        note("other names", lambda: save(writer, f"b{rank}"))
        note("one rank's value", lambda: save(writer, "c", lock=Lock() if rank else 1))
        note("one rank's shape", lambda: save(writer, "c", y=torch.ones(2 + rank)))
    note("no such checkpoint", lambda: load("z", _state()))
    note("other names to load", lambda: load(f"a{rank}", _state()))
    note("one rank's key", lambda: load("a", {**_state(), **({"more": 1} if rank else {})}))
    limited = MemoryStorageWriter(
        None, memory_root=root, job="limited", memory_limit="1MiB", on_full="raise"
    )
    with limited as writer:
        note("no room", lambda: save(writer, "a", large=torch.ones(1 << 20)))
    with CheckpointManager(memory_root=root, job="managed") as manager:
        metrics = {"loss": "low" if rank else 1.0}
        note("one rank's metrics", lambda: manager.save(1, _state(), metrics=metrics))
    return found


def test_a_rank_does_not_leave_ranks_that_raise_as_well(memory_root: Path) -> None:
    """It would do so late, when they are in their next call, which would break."""
    for found in forked_ranks(_all_raise, 2, str(memory_root), env=_ENV):
        for case, error, next_error in found:
            assert next_error is None, (case, error, next_error)
            # The manager warns, and goes on.
            assert (error == "NoneType") == (case == "one rank's metrics"), (case, error)


# -- shapes ----------------------------------------------------------------------------------------


@on_ranks(2, env=_ENV)
def test_a_tensor_that_ranks_have_in_different_shapes_is_refused(memory_root: Path) -> None:
    """torch's own planner would save one of them."""

    def save(size: int, **options: Any) -> None:
        dcp.save({"x": torch.ones(size)}, checkpoint_id="a", storage_writer=writer, **options)

    with _writer(str(memory_root)) as writer:
        for planner in (None, _Saving()):
            differs = partial(save, 3 + dist.get_rank(), planner=planner)
            _ends_together(planner, differs, partial(save, 3, planner=planner), "x: ")
