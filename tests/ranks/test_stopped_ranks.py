"""A rank that is stopped at any exchange of a call: the others end in time, and name it."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import dcp_mem
from dcp_mem import CheckpointManager, MemoryStorageReader, MemoryStorageWriter
from tests.support.processes import faults
from tests.support.processes.forks import forked_ranks, raised_by
from tests.support.variants import with_variants

_SECONDS = 6.0
_ONCE = 1.9
"""Times the time-out that a call may take which waits once; one that waits twice takes 2."""
_ENV = {"DCP_MEM_TIMEOUT": str(_SECONDS)}
_RANKS = 3
_AT_ONCE = 12
"""Jobs that run at the same time: all but all of their time is waiting."""
_FIRST, _LATER = 0, 1
"""A call of new ranks, which have to connect and to plan, and one behind it."""


class _Point(NamedTuple):
    """The exchange in front of which a rank stops."""

    call: int
    number: int
    culprit: int


class _End(NamedTuple):
    """How the call has ended on one of the other ranks.

    Attributes:
        error: What the call has raised.
        seconds: Until then.
        said: The first line of the log that names a silent rank; "" for none.
        said_after: Seconds until then.
    """

    point: _Point
    rank: int
    error: str
    seconds: float
    said: str
    said_after: float


def _state() -> dict[str, Any]:
    return {"x": torch.arange(1000.0) + dist.get_rank(), "step": 1}


def _save(root: str) -> None:
    with MemoryStorageWriter(None, memory_root=root, job="job") as writer:
        dcp_mem.save(_state(), checkpoint_id="a", storage_writer=writer)


def _save_by_dcp(root: str) -> None:
    with MemoryStorageWriter(None, memory_root=root, job="job") as writer:
        dcp.save(_state(), checkpoint_id="a", storage_writer=writer)


def _save_in_the_background(root: str) -> None:
    with MemoryStorageWriter(None, memory_root=root, job="job") as writer:
        begun: Any = dcp_mem.async_save(_state(), checkpoint_id="a", storage_writer=writer)
        getattr(begun, "upload_completion", begun).result()


def _prepare(root: str) -> None:
    with MemoryStorageWriter(None, memory_root=root, job="job") as writer:
        writer.prepare(_state()).wait()


def _load(root: str) -> None:
    with MemoryStorageReader(None, memory_root=root, job="job") as reader:
        dcp_mem.load(_state(), storage_reader=reader)


def _save_a_step(root: str) -> None:
    with CheckpointManager(memory_root=root, job="job", on_error="raise") as manager:
        manager.save(1, _state())


def _restore(root: str) -> None:
    with CheckpointManager(
        memory_root=root, job="job", on_error="raise", on_crash_loop="fall_back"
    ) as manager:
        manager.restore(_state())


_CALLS = {
    "save": _save,
    "dcp.save": _save_by_dcp,
    "async_save": _save_in_the_background,
    "prepare": _prepare,
    "load": _load,
    "restore": _restore,
}
"""Calls that make no other exchanges than those of dcp_mem, unless all ranks know of an error."""
_NEEDS = {"load": _save, "restore": _save_a_step}


def _set_up(root: str, name: str) -> Callable[[], object]:
    """Return a call by its name, once there is what it needs."""
    if name in _NEEDS:
        _NEEDS[name](root)
    return lambda: _CALLS[name](root)


class _Said(logging.Handler):
    """Keeps the first line that names a silent rank, and when it was logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text, self.when = "", 0.0

    def emit(self, record: logging.LogRecord) -> None:
        if not self.text and " ranks (a rank died or fell behind" in record.getMessage():
            self.text, self.when = record.getMessage(), time.monotonic()


def _counts(root: str, name: str) -> list[int]:
    """The exchanges of the first call, and of the later one."""
    act = _set_up(root, name)
    return [faults.passes_of("ranks.exchange", act) for _ in (_FIRST, _LATER)]


def _meets_a_stopped_rank(root: str, name: str, point: _Point) -> _End | None:
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    if rank == point.culprit:
        store.set("pid", str(os.getpid()))
    act, said = _set_up(root, name), _Said()
    logging.getLogger("dcp_mem").addHandler(said)
    for _ in range(point.call):
        act()
    dist.barrier()
    faults.arm(f"ranks.exchange:stop:{point.number}" if rank == point.culprit else "")
    started = time.monotonic()
    error = raised_by(act)
    seconds = time.monotonic() - started
    if rank == point.culprit:
        return None
    if store.add("ended", 1) == dist.get_world_size() - 1:
        os.kill(int(store.get("pid")), signal.SIGCONT)
    return _End(point, rank, str(error), seconds, said.text, said.when - started)


def _ends(memory_root: Path, name: str) -> list[_End]:
    """How a call ends on the others where rank 0 or 1 stops, in turn, at each exchange."""
    counts = forked_ranks(_counts, _RANKS, str(memory_root / "counted"), name, env=_ENV)
    points = [
        _Point(call, number, culprit)
        for call in (_FIRST, _LATER)
        for number in range(1, max(counts[0][call], counts[1][call]) + 1)
        if number <= counts[culprit := (number + call) % 2][call]
    ]
    assert points

    def ends(point: _Point) -> list[_End | None]:
        root = str(memory_root / "-".join(map(str, point)))
        return forked_ranks(_meets_a_stopped_rank, _RANKS, root, name, point, env=_ENV, timeout=100)

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        found = [end for of_ranks in pool.map(ends, points) for end in of_ranks if end is not None]
    assert len(found) == (_RANKS - 1) * len(points)
    return found


def _named(end: _End) -> str:
    return f"failed: rank {end.point.culprit}: "


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", with_variants(list(_CALLS), gate=["dcp.save", "load"]))
def test_a_rank_that_is_stopped_at_any_exchange_is_named_in_time(
    memory_root: Path, name: str
) -> None:
    found = _ends(memory_root, name)
    assert [end for end in found if _named(end) not in end.error] == []
    assert [end for end in found if _named(end) not in end.said] == []
    assert [end for end in found if end.seconds > _ONCE * _SECONDS] == []
