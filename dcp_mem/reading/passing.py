"""Bytes that one rank alone needs of another node's memory: sent to it by itself, while everything else goes on.

Each pair of ranks has a line of its own for the length of a load. Pieces are checked before they leave, and as they come.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import numpy.typing as npt

from dcp_mem import faults
from dcp_mem.errors import RankFailed
from dcp_mem.format.checksums import checksum
from dcp_mem.policy.sharing import Part, Passed
from dcp_mem.ranks import Ranks
from dcp_mem.ranks.base import Line
from dcp_mem.reading.arrivals import Arrivals
from dcp_mem.replicating.exchange import CHUNK, Awaited, Outgoing, receive, send
from dcp_mem.sources.memory import MemorySource

Room = npt.NDArray[np.uint8]


class _Stopped(Exception):
    """The load has failed elsewhere."""


class Passing:
    """What passes between this rank and others. Errors are kept: whose they are is seen when all have ended."""

    def __init__(self, ranks: Ranks, token: str, memory: MemorySource | None, arrivals: Arrivals) -> None:
        self._ranks, self._token, self._memory, self._arrivals = ranks, token, memory, arrivals
        self._own: list[Exception] = []
        self._broken: list[tuple[int, str]] = []
        self._lines: list[Line] = []
        self.stopped = threading.Event()

    def threads(self, part: Part) -> list[threading.Thread]:
        """One for each rank that something goes to, and for each that something comes from."""
        rank = self._ranks.rank
        acts = [partial(self._send, rank, peer, pieces) for peer, pieces in _by_peer(part.sends)]
        acts += [partial(self._receive, peer, rank, pieces) for peer, pieces in _by_peer(part.receives)]
        return [threading.Thread(target=act, name="dcp_mem-pass", daemon=True) for act in acts]

    def end(self) -> None:
        """Close the lines that are of no more use, in the background: it takes gloo a while for each."""
        lines, self._lines = self._lines, []
        if lines:
            threading.Thread(target=_close, args=(lines,), name="dcp_mem-end").start()

    def raise_own(self) -> None:
        """Raise what went wrong on this rank."""
        if self._own:
            raise self._own[0]

    def raise_broken(self) -> None:
        """Raise what went wrong with lines, though nothing did on any rank."""
        if self._broken:
            raise RankFailed("passing on what lies in memory", self._broken)

    def _send(self, sender: int, receiver: int, pieces: Sequence[Passed]) -> None:
        self._on_line(sender, receiver, lambda line: send(line, self._outgoing(pieces), self._go_on))

    def _receive(self, sender: int, receiver: int, pieces: Sequence[Passed]) -> None:
        self._on_line(sender, receiver, lambda line: receive(line, self._awaited(pieces), self._go_on))

    def _on_line(self, sender: int, receiver: int, act: Callable[[Line], None]) -> None:
        peer = receiver if sender == self._ranks.rank else sender
        line: Line | None = None
        try:
            line = self._ranks.line(sender, receiver, self._token)
            act(line)
            self._lines.append(line)
            return
        except _Own as error:
            self._own.append(error.cause)
        except Exception as error:
            self._broken.append((peer, f"{type(error).__name__}: {error}".split("\n")[0]))
        if line is not None:
            line.close()

    def _go_on(self) -> None:
        if self.stopped.is_set():
            raise _Stopped("the load has failed elsewhere")

    def _outgoing(self, pieces: Sequence[Passed]) -> Iterator[Outgoing]:
        for file, start, stop in _cut(pieces):
            with _as_own():
                assert self._memory is not None
                data, crc = self._memory.checked(file, start, stop)
            yield Outgoing(data, partial(int, crc))

    def _awaited(self, pieces: Sequence[Passed]) -> Iterator[Awaited]:
        scratch: list[Room] = []  # used again and again
        for file, start, stop in _cut(pieces):
            data = self._arrivals.place_for(file, start, stop)
            if data is not None:
                accept = partial(self._have_come, file, start, stop)
            else:
                room = scratch.pop() if scratch else np.empty(CHUNK, np.uint8)
                data = memoryview(room.data).cast("B")[: stop - start]
                accept = partial(self._take, file, start, stop, room, scratch)
            yield Awaited(data, partial(checksum, data), accept)
            faults.point("load.batch")

    def _have_come(self, file: str, start: int, stop: int) -> None:
        with _as_own():
            self._arrivals.have_come(file, start, stop)

    def _take(self, file: str, start: int, stop: int, room: Room, scratch: list[Room]) -> None:
        with _as_own():
            self._arrivals.take(file, start, stop, room.ctypes.data)
        scratch.append(room)


class _Own(Exception):
    """Something that went wrong on this rank, and not with the line."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


@contextmanager
def _as_own() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise _Own(error) from error


@contextmanager
def passing(ranks: Ranks, token: str, part: Part, memory: MemorySource | None, arrivals: Arrivals) -> Iterator[Passing]:
    """Send and receive, in threads, what is this rank's part; they have ended when this ends. token: of this load alone."""
    passed = Passing(ranks, token, memory, arrivals)
    threads = passed.threads(part)
    for thread in threads:
        thread.start()
    try:
        yield passed
    except BaseException:
        passed.stopped.set()
        raise
    finally:
        for thread in threads:
            thread.join()
        passed.end()


def _close(lines: Sequence[Line]) -> None:
    for line in lines:
        line.close()


def _by_peer(pieces: Sequence[Passed]) -> list[tuple[int, list[Passed]]]:
    found: dict[int, list[Passed]] = {}
    for one in pieces:
        found.setdefault(one.peer, []).append(one)
    return list(found.items())


def _cut(pieces: Sequence[Passed]) -> Iterator[tuple[str, int, int]]:
    for one in pieces:
        for start in range(one.start, one.stop, CHUNK):
            yield one.file, start, min(start + CHUNK, one.stop)
