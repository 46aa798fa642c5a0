"""The thread that has complete checkpoints copied to other nodes, one at a time, while training goes on."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from dcp_mem import faults
from dcp_mem.errors import DcpMemError, RankFailed
from dcp_mem.events import log
from dcp_mem.format.manifest import ItemTable, Manifest, NodeManifest, ReplicationRecord, items_of
from dcp_mem.memory.catalogs import read_catalog
from dcp_mem.memory.job import JobMemory
from dcp_mem.memory.locks import end_lease
from dcp_mem.memory.slots import Slot, SlotPool
from dcp_mem.ranks import Ranks
from dcp_mem.ranks.base import Line
from dcp_mem.replicating.exchange import Source, receive, refuse, send
from dcp_mem.replicating.transfers import Copy
from dcp_mem.values import Segment

Failures = tuple[tuple[int, str], ...]
_MOST_FAILURES = 8
_LONGEST_ROUND = 5.0


@dataclass(frozen=True, slots=True)
class Replication:
    """A checkpoint that is to be copied, and this rank's part in it.

    ranks: on connections of their own. copies: all of the checkpoint. replicas: of each segment. slot: of this rank's segment.
    targets: by sender, the slot that was claimed for its segment, or why there is none. lease: keeps the checkpoint in memory.
    patience: seconds that a rank waits for another. remark: what the record says where all goes well. then: what the node's
    leader does once that is written down.
    """

    manifest: Manifest
    ranks: Ranks
    copies: Sequence[Copy]
    replicas: int
    slot: Slot
    targets: Mapping[int, Slot | str]
    lease: int
    is_leader: bool
    patience: float
    remark: str
    then: Callable[[], None]


class Overtaken(Exception):
    """A newer checkpoint is to be replicated instead, or the job ends."""


class Replicator:
    """One process's part in replicating a job's checkpoints. What fails is written down, and never raised."""

    def __init__(self, memory: JobMemory, slots: SlotPool) -> None:
        self._memory, self._slots = memory, slots
        self._thread: threading.Thread | None = None
        self._cancelled = threading.Event()

    @property
    def is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, replication: Replication) -> None:
        """Have it done in the background. Only when nothing else is under way."""
        assert not self.is_busy
        self._cancelled.clear()
        task = _Task(self._memory, self._slots, replication, self._cancelled)
        self._thread = threading.Thread(target=task.run, name="dcp_mem-replicate", daemon=True)
        self._thread.start()

    def cancel(self) -> None:
        """End what is under way, on all ranks; it is over as soon as they all know, or time out."""
        self._cancelled.set()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until nothing is under way. A peer that hangs is waited for until it times out."""
        if self._thread is not None:
            self._thread.join(timeout)


class _News(NamedTuple):
    """What the ranks tell each other while they replicate. failures: (rank, text), some of them."""

    is_done: bool
    is_cancelled: bool
    failures: Failures

    def join(self, other: _News) -> _News:
        return _News(
            self.is_done and other.is_done,
            self.is_cancelled or other.is_cancelled,
            tuple(sorted(self.failures + other.failures)[:_MOST_FAILURES]),
        )


class _Task:
    """One checkpoint's replication."""

    def __init__(
        self, memory: JobMemory, slots: SlotPool, replication: Replication, cancelled: threading.Event
    ) -> None:
        self._memory, self._slots, self._replication, self._cancelled = memory, slots, replication, cancelled
        self._ranks, self._manifest = replication.ranks, replication.manifest
        self._started = time.monotonic()
        self._failures: list[tuple[int, str]] = []
        self._received: set[int] = set()
        self._source: Source | None = None
        self._has_sent = self._has_summed = False

    def run(self) -> None:
        try:
            failures = self._replicate()
            if failures:
                self._ranks.leave("; ".join(text for _, text in failures))
            self._record(failures)
            faults.point("replicate.recorded")
        except Exception:
            log.warning("the replication of %s ended in disorder", self._manifest.name, exc_info=True)
        finally:
            end_lease(self._replication.lease)
            os.close(self._replication.lease)
        try:
            if self._replication.is_leader:
                self._replication.then()
        except Exception:
            log.warning("what %s supersedes stays in memory for now", self._manifest.name, exc_info=True)

    # -- the copies -----------------------------------------------------------------------------------------------

    def _replicate(self) -> Failures:
        """Send and receive what is this rank's part, and hear how all ranks have fared; returns who has failed in what."""
        self._guarded("replicating", lambda: faults.point("replicate.started"))
        threads: list[threading.Thread] = []
        self._guarded("replicating", lambda: threads.extend(self._begin_transfers()))
        try:
            return self._agree(threads)
        except RankFailed as error:
            for thread in threads:
                thread.join()
            self._sum_up()
            return (*self._failures, *((rank, f"agreeing: {_plain(text)}") for rank, text in error.failures))
        finally:
            self._give_back()

    def _begin_transfers(self) -> list[threading.Thread]:
        directory = self._memory.checkpoint_directory(self._manifest.name)
        catalog = read_catalog(directory, self._manifest.catalog)

        def table(segment: Segment) -> ItemTable:
            return items_of(catalog.layout(segment.rank), segment.tail)

        mine = self._manifest.segments[self._ranks.rank]
        self._source = source = Source(self._replication.slot, mine.nbytes, table(mine))
        threads = []
        for copy in self._replication.copies:
            if copy.sender == self._ranks.rank:
                threads.append(self._thread(f"sending to rank {copy.receiver}", partial(self._send, copy, source)))
            if copy.receiver == self._ranks.rank:
                segment = self._manifest.segments[copy.sender]
                act = partial(self._receive, copy, segment, table(segment))
                threads.append(self._thread(f"receiving from rank {copy.sender}", act))
        for thread in threads:
            thread.start()
        return threads

    def _thread(self, what: str, act: Callable[[], None]) -> threading.Thread:
        return threading.Thread(target=self._guarded, args=(what, act), name="dcp_mem-copy", daemon=True)

    def _guarded(self, what: str, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:
            self._failures.append((self._ranks.rank, f"{what}: {type(error).__name__}: {_plain(str(error))}"))

    def _send(self, copy: Copy, source: Source) -> None:
        with self._line(copy) as line:
            send(line, source, self._go_on)
        self._has_sent = True

    @contextmanager
    def _line(self, copy: Copy) -> Iterator[Line]:
        """The line for a copy; it is closed where the copy fails, so that the other end doesn't wait."""
        line = self._ranks.line(copy.sender, copy.receiver)
        try:
            yield line
        except BaseException:
            line.close()
            raise

    def _receive(self, copy: Copy, segment: Segment, table: ItemTable) -> None:
        with self._line(copy) as line:
            self._receive_by(line, copy, segment, table)

    def _receive_by(self, line: Line, copy: Copy, segment: Segment, table: ItemTable) -> None:
        slot = self._replication.targets[copy.sender]
        if not isinstance(slot, str):
            slot = _mapped(slot, segment.nbytes, copy.nbytes)
        if isinstance(slot, str):
            refuse(line, slot)
            raise DcpMemError(slot)
        assert slot.mapping is not None
        target = memoryview(slot.mapping.buffer).cast("B")[: segment.nbytes]
        checked = receive(line, target, table, self._go_on)
        faults.point("replicate.received")
        self._memory.add_checksums(
            self._manifest, segment.file, self._checksums(segment, checked), lambda path: self._slots.seal(slot, path)
        )
        self._received.add(copy.sender)
        faults.point("replicate.sealed")

    def _go_on(self) -> None:
        if self._cancelled.is_set():
            raise Overtaken("a newer checkpoint is saved, or the job ends")

    def _checksums(self, segment: Segment, table: ItemTable) -> NodeManifest:
        return NodeManifest(self._manifest.save_id, segment.node, {segment.file: table})

    def _sum_up(self) -> None:
        """Once: put the checksums of this rank's own segment beside it, by which a copy that comes back is known to be whole."""
        if self._has_sent and not self._has_summed and self._source is not None:
            self._has_summed = True
            mine, table = self._manifest.segments[self._ranks.rank], self._source.table()
            write = partial(self._memory.add_checksums, self._manifest, mine.file, self._checksums(mine, table))
            self._guarded("writing checksums", write)

    def _give_back(self) -> None:
        """Let readers in to what was received, and make free slots of the rest."""
        for sender, slot in self._replication.targets.items():
            if not isinstance(slot, str):
                (self._slots.share if sender in self._received else self._slots.abandon)(slot)

    # -- what becomes of it ---------------------------------------------------------------------------------------

    def _agree(self, threads: Sequence[threading.Thread]) -> Failures:
        """Ask round until every rank is done; who is quick waits for the others, as long as each is heard of now and then."""
        while True:
            deadline = time.monotonic() + min(_LONGEST_ROUND, self._replication.patience / 4)
            for thread in threads:
                thread.join(max(deadline - time.monotonic(), 0.0))
            is_done = not any(thread.is_alive() for thread in threads)
            if is_done:
                self._sum_up()
            mine = _News(is_done, self._cancelled.is_set(), tuple(self._failures[:_MOST_FAILURES]))
            news = self._ranks.all_reduce(mine, _News.join)
            if news.is_cancelled:
                self._cancelled.set()
            if news.is_done:
                return news.failures

    def _record(self, failures: Failures) -> None:
        replication, seconds = self._replication, time.monotonic() - self._started
        name, error = self._manifest.name, "; ".join(f"rank {rank}: {text}" for rank, text in failures)
        if failures:
            log.warning("%s is not replicated: %s", name, error)
        else:
            log.info("%s is replicated, %d times in %.2f s", name, replication.replicas, seconds)
        if replication.is_leader:
            record = ReplicationRecord(
                self._manifest.save_id,
                "failed" if failures else "replicated",
                0 if failures else replication.replicas,
                seconds,
                error or replication.remark,
            )
            self._memory.record_replication(self._manifest, record)


def _plain(text: str) -> str:
    """What an error says, without gloo's source file and good wishes."""
    return re.sub(r"^\[[^]]*\] ", "", text.split("\n")[0]).partition(". This is typically caused")[0][:300]


def _mapped(slot: Slot, nbytes: int, room: int) -> Slot | str:
    """The slot with all its pages, or why there is no room for them."""
    try:
        slot.frames = ""
        slot.shrink(nbytes)
        slot.map(nbytes, room)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return slot
