"""What moving bytes between two processes costs, transport by transport, beside a plain copy.

Both processes are on this machine, each with a mapped tmpfs file, and move messages of 16 MiB, four
at a time, as replication does; without its checksums. NIXL reads the sender's memory where UCX may
(shared memory), or goes over TCP. Plain sockets are what a transport of our own would be.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import tempfile
import time
from collections import deque
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.harness.processes import MeasurementFailed
from benchmarks.harness.settings import MIB
from benchmarks.harness.tables import Part, Row, Section, attempt
from dcp_mem.comm.timed_store import MeetingPlace, TimedStore
from dcp_mem.comm.transports import Pair, transport
from dcp_mem.nixl.agents import import_trouble

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from multiprocessing.connection import Connection

    from benchmarks.harness.settings import Settings

TITLE = "Transports between two processes"
NBYTES, QUICK_NBYTES = 1024 * MIB, 128 * MIB
MESSAGE = 16 * MIB
IN_FLIGHT = 4
WARM_UPS = 2
SECONDS = 120.0
LIMIT = 0.35
GB = 1e9
BY_MEMORY = "nixl, shared memory"
WAYS: Mapping[str, Mapping[str, str]] = {
    "tcp": {},
    BY_MEMORY: {},
    "nixl, TCP": {"UCX_TLS": "tcp"},
    "plain gloo": {},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What one end measured.

    Attributes:
        wall: Seconds of each run.
        cpu: CPU seconds of this process in each run.
        connecting: Seconds that connecting took.
        descriptors: Opened by connecting and the first run.
        threads: Begun by these.
    """

    wall: tuple[float, ...]
    cpu: tuple[float, ...]
    connecting: float
    descriptors: int
    threads: int


class End(Protocol):
    """One end of a channel, or of a gloo group."""

    def send(self, data: Any) -> Any: ...

    def receive(self, data: Any) -> Any: ...

    def registered(self, memory: Any) -> AbstractContextManager[None]: ...


def run(settings: Settings) -> Section:
    nbytes = QUICK_NBYTES if settings.quick else NBYTES
    title = f"{nbytes // MIB} MiB from one process's tmpfs to another's, both ends' CPU"
    return Section(TITLE, [attempt("transports", title, partial(_part, settings, nbytes))])


def _part(settings: Settings, nbytes: int) -> Part:
    floor = _copied(nbytes, settings.repeats) / nbytes * GB
    rows, notes = [], [f"floor: one copy between two mapped tmpfs files, {floor:.2f} CPU-s/GB"]
    trouble = import_trouble()
    for way in WAYS:
        if trouble and way.startswith("nixl"):
            notes.append(f"{way}: not measured, {trouble}")
            continue
        sender, receiver = _measured(way, nbytes, settings.repeats)
        cpu = _per_gb(sender.cpu, nbytes) + _per_gb(receiver.cpu, nbytes)
        is_aimed_at = way == BY_MEMORY
        rows.append(
            Row(
                way,
                floor=f"{floor:.2f} CPU-s/GB",
                dcp_mem=f"{cpu:.2f} CPU-s/GB",
                ratio=f"{cpu / floor:.1f}",
                target=f"≤ {LIMIT} CPU-s/GB" if is_aimed_at else "",
                met=cpu <= LIMIT if is_aimed_at else None,
            )
        )
        notes.append(
            f"{way}: {1 / _per_gb(receiver.wall, nbytes):.2f} GB/s; sender "
            f"{_per_gb(sender.cpu, nbytes):.2f}, receiver {_per_gb(receiver.cpu, nbytes):.2f} "
            f"CPU-s/GB; connecting took {receiver.connecting * 1e3:.0f} ms; "
            f"{receiver.descriptors} descriptors and {receiver.threads} threads of the receiver"
        )
    return Part(rows, notes)


def _per_gb(seconds: tuple[float, ...], nbytes: int) -> float:
    return median(seconds) / nbytes * GB


def _copied(nbytes: int, repeats: int) -> float:
    with _in_tmpfs(nbytes) as source, _in_tmpfs(nbytes) as target:
        spent = []
        for _ in range(repeats):
            started = time.process_time()
            np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
            spent.append(time.process_time() - started)
        return median(spent)


@contextmanager
def _in_tmpfs(nbytes: int) -> Iterator[memoryview]:
    """The pages of a file in /dev/shm, all present."""
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)
        mapped = mmap.mmap(file.fileno(), nbytes)
    view = memoryview(mapped)
    np.frombuffer(view, np.uint8)[:] = 1
    yield view


# -- the two ends ----------------------------------------------------------------------------------


def _measured(way: str, nbytes: int, repeats: int) -> tuple[Found, Found]:
    """Return what the sender and the receiver found, each a fresh process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", __name__])
    with tempfile.TemporaryDirectory() as directory:
        pipes = [context.Pipe(duplex=False) for _ in range(2)]
        processes = [
            context.Process(target=_live, args=(way, end == 0, nbytes, repeats, directory, answer))
            for end, (_, answer) in enumerate(pipes)
        ]
        try:
            for process in processes:
                process.start()
            found = []
            for answers, _ in pipes:
                if not answers.poll(SECONDS):
                    raise MeasurementFailed(f"{way}: one end says nothing")
                found.append(answers.recv())
            return found[0], found[1]
        finally:
            for process in processes:
                process.kill()
                process.join()


def _live(
    way: str, is_sender: bool, nbytes: int, repeats: int, directory: str, answer: Connection
) -> None:
    os.environ.update({"GLOO_SOCKET_IFNAME": "lo", **WAYS[way]})
    import_trouble()  # what is imported once counts for no transport
    opened, begun = _count("fd"), _count("task")
    started = time.perf_counter()
    end = _connected(way, directory, is_sender)
    connecting = time.perf_counter() - started
    wall, cpu = [], []
    with _in_tmpfs(nbytes) as memory, end.registered(memory):
        for number in range(WARM_UPS + repeats):
            _meet(end, is_sender)
            started, spent = time.perf_counter(), time.process_time()
            _move(end, is_sender, memory)
            wall.append(time.perf_counter() - started)
            cpu.append(time.process_time() - spent)
            if number == 0:
                descriptors, threads = _count("fd") - opened, _count("task") - begun
        _meet(end, is_sender)
    found = Found(
        wall=tuple(wall[WARM_UPS:]),
        cpu=tuple(cpu[WARM_UPS:]),
        connecting=connecting,
        descriptors=descriptors,
        threads=threads,
    )
    answer.send(found)
    time.sleep(SECONDS)


def _connected(way: str, directory: str, is_sender: bool) -> End:
    if way == "plain gloo":
        return _Gloo(directory, 0 if is_sender else 1)
    store = TimedStore(dist.FileStore(f"{directory}/meeting", -1), SECONDS)
    place = MeetingPlace(store, "")
    return transport(way.partition(",")[0])(Pair(store=place, is_sender=is_sender, seconds=SECONDS))


def _meet(end: End, is_sender: bool) -> None:
    acts = [partial(end.send, bytearray(1)), partial(end.receive, bytearray(1))]
    for act in acts if is_sender else reversed(acts):
        act().wait()


def _move(end: End, is_sender: bool, memory: memoryview) -> None:
    """Move all bytes; wait until the receiver has them."""
    act, pending = end.send if is_sender else end.receive, deque[Any]()
    for start in range(0, len(memory), MESSAGE):
        if len(pending) == IN_FLIGHT:
            pending.popleft().wait()
        pending.append(act(memory[start : start + MESSAGE]))
    while pending:
        pending.popleft().wait()
    _meet(end, not is_sender)


def _count(what: str) -> int:
    return len(os.listdir(f"/proc/self/{what}"))


class _Gloo:
    """A group of two ranks."""

    def __init__(self, directory: str, rank: int) -> None:
        store, self._peer = dist.FileStore(f"{directory}/gloo", -1), 1 - rank
        self._group: Any = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=SECONDS))

    def send(self, data: Any) -> Any:
        return self._group.send([torch.frombuffer(data, dtype=torch.uint8)], self._peer, 0)

    def receive(self, data: Any) -> Any:
        return self._group.recv([torch.frombuffer(data, dtype=torch.uint8)], self._peer, 0)

    def registered(self, memory: Any) -> AbstractContextManager[None]:
        return nullcontext()
