"""One rank's part in having files made in the nodes' memory: sending, receiving, and agreeing with all ranks on how that went."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from dcp_mem import faults
from dcp_mem.errors import DcpMemError, RankFailed
from dcp_mem.format import names
from dcp_mem.format.catalog import Catalog
from dcp_mem.format.checksums import Crcs, checksum
from dcp_mem.format.manifest import ItemTable, Manifest, StripeRecord, items_of
from dcp_mem.memory.catalogs import read_catalog
from dcp_mem.memory.job import JobMemory, checksums_of
from dcp_mem.memory.slots import Slot, SlotPool
from dcp_mem.ranks import Ranks
from dcp_mem.ranks.base import Line
from dcp_mem.replicating import sources
from dcp_mem.replicating.exchange import CHUNK, Outgoing, receive, refuse, send
from dcp_mem.replicating.making import PIECE, Made, checksums_with, parts_of
from dcp_mem.replicating.sources import Source
from dcp_mem.replicating.transfers import Making

Failures = tuple[tuple[int, str], ...]
_MOST_FAILURES = 8
_LONGEST_ROUND = 5.0


@dataclass(frozen=True, slots=True)
class Work:
    """Files of a checkpoint that are to come about, and this rank's part in that.

    ranks: on connections of their own. makings: those that this rank has a part in, in an order that all ranks share. targets: of
    those that it makes, by file, the slot that was claimed for it, or why there is none. slot: of its own segment, where
    that was staged by this process. patience: seconds that a rank waits for another.
    """

    manifest: Manifest
    ranks: Ranks
    makings: Sequence[Making]
    targets: Mapping[str, Slot | str]
    slot: Slot | None
    patience: float

    @property
    def makes_slots(self) -> bool:
        """Whether slots had to be made for what comes to this rank."""
        return any(not isinstance(slot, str) and slot.mapping is None for slot in self.targets.values())


class Overtaken(Exception):
    """A newer checkpoint is to be replicated instead, or the job ends."""


class _News(NamedTuple):
    """What the ranks tell each other meanwhile. failures: (rank, text), some of them."""

    is_done: bool
    is_cancelled: bool
    failures: Failures

    def join(self, other: _News) -> _News:
        return _News(
            self.is_done and other.is_done,
            self.is_cancelled or other.is_cancelled,
            tuple(sorted(self.failures + other.failures)[:_MOST_FAILURES]),
        )


class Worker:
    """Does one rank's part."""

    def __init__(self, memory: JobMemory, slots: SlotPool, work: Work, cancelled: threading.Event) -> None:
        self._memory, self._slots, self._work, self._cancelled = memory, slots, work, cancelled
        self._ranks, self._manifest, self._rank = work.ranks, work.manifest, work.ranks.rank
        self._directory = memory.checkpoint_directory(work.manifest.name)
        self._failures: list[tuple[int, str]] = []
        self._resources = ExitStack()
        self._catalog: Catalog | None = None
        self._sources: dict[str, Source] = {}
        self._opening = threading.Lock()
        self._made: list[Made] = []
        self._has_summed = False

    def run(self) -> Failures:
        """Send and receive what is this rank's part, and hear how all ranks have fared; returns who has failed in what.

        By then every file is sealed or given up. Raises nothing.
        """
        self._guarded("replicating", lambda: faults.point("replicate.started"))
        threads: list[threading.Thread] = []
        self._guarded("replicating", lambda: threads.extend(self._begin()))
        try:
            failures = self._agree(threads)
        except RankFailed as error:
            for thread in threads:
                thread.join()
            self._sum_up()
            failures = (*self._failures, *((rank, f"agreeing: {plain(text)}") for rank, text in error.failures))
        finally:
            self._give_back()
        if failures:
            self._ranks.leave("; ".join(text for _, text in failures))
        return failures

    def _begin(self) -> list[threading.Thread]:
        """Threads that are under way: one for each rank that something goes to, or comes from."""
        mine, threads = self._rank, []
        self._made = [self._made_of(making) for making in self._work.makings if making.receiver == mine]
        outgoing: dict[int, list[Making]] = {}
        incoming: dict[int, list[Made]] = {}
        for making in self._work.makings:
            if mine in making.senders and making.receiver != mine:
                outgoing.setdefault(making.receiver, []).append(making)
        for made in self._made:
            for sender in made.making.senders or (mine,):
                incoming.setdefault(sender, []).append(made)
        for rank, makings in outgoing.items():
            threads.append(self._thread(f"sending to rank {rank}", partial(self._send, rank, makings)))
        for rank, mades in incoming.items():
            act = partial(self._receive, rank, mades) if rank != mine else partial(self._add_own, mades)
            threads.append(self._thread(f"receiving from rank {rank}", act))
        for thread in threads:
            thread.start()
        return threads

    def _thread(self, what: str, act: Callable[[], None]) -> threading.Thread:
        return threading.Thread(target=self._guarded, args=(what, act), name="dcp_mem-copy", daemon=True)

    def _guarded(self, what: str, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:
            self._failures.append((self._rank, f"{what}: {type(error).__name__}: {plain(str(error))}"))

    def _go_on(self) -> None:
        if self._cancelled.is_set():
            raise Overtaken("a newer checkpoint is saved, or the job ends")

    @contextmanager
    def _line(self, sender: int, receiver: int) -> Iterator[Line]:
        """The line between two ranks; it is closed where something fails, so that the other end doesn't wait."""
        line = self._ranks.line(sender, receiver)
        try:
            yield line
        except BaseException:
            line.close()
            raise

    # -- sending ----------------------------------------------------------------------------------------------------

    def _send(self, receiver: int, makings: Sequence[Making]) -> None:
        with self._line(self._rank, receiver) as line:
            for making in makings:
                send(line, self._outgoing(making), self._go_on)

    def _outgoing(self, making: Making) -> Iterator[Outgoing]:
        nbytes = CHUNK if making.is_copy else PIECE
        for part in parts_of(making, self._rank):
            for piece in self._source(part.file, making).pieces(part.start, part.stop, nbytes):
                yield piece
                faults.point("replicate.chunk")
        for file in checksums_with(making, self._rank):
            data = bytearray(self._checksums_for(making, file).tobytes())
            if data:
                yield Outgoing(data, partial(checksum, memoryview(data)))

    def _checksums_for(self, making: Making, file: str) -> Crcs:
        """Checksums that go behind the parts of a making; of a segment that is lost they lie beside its parity."""
        return self._known(file) if making.stripe is None else self._source(file, making).table().crc32c

    def _known(self, file: str) -> Crcs:
        """The checksums of a segment that lie here. Raises DcpMemError where there are none."""
        for held in self._memory.find(self._manifest.name):
            if held.manifest.save_id == self._manifest.save_id:
                try:
                    return np.asarray(checksums_of(held, file).crc32c)
                except FileNotFoundError:
                    break
        raise DcpMemError(f"the checksums of {file} don't lie here")

    def _source(self, file: str, making: Making) -> Source:
        with self._opening:
            if file not in self._sources:
                self._sources[file] = self._opened(file, making)
            return self._sources[file]

    def _opened(self, file: str, making: Making) -> Source:
        """What is sent of a file of this node; a segment that another process has staged is held against its checksums first."""
        nbytes = self._nbytes_of(file)
        is_parity = names.PARITY.fullmatch(file) is not None
        slot = self._work.slot
        if not is_parity and names.rank_of(file) == self._rank and slot is not None:
            return sources.of_slot(slot, nbytes, self._table(file))
        is_whole = not is_parity and (making.is_copy or making.stripe is not None)
        table = self._table(file) if is_whole else None
        source = sources.of_file(os.path.join(self._directory, file), nbytes, table, self._resources)
        if is_whole:
            source.hold_against(self._known(file))
        return source

    def _nbytes_of(self, file: str) -> int:
        if names.PARITY.fullmatch(file):
            return max(part.stop for making in self._work.makings for part in making.parts if part.file == file)
        return self._manifest.segments.nbytes[names.rank_of(file)]

    def _table(self, file: str) -> ItemTable:
        if self._catalog is None:
            self._catalog = read_catalog(self._directory, self._manifest.catalog)
        segment = self._manifest.segments[names.rank_of(file)]
        return items_of(self._catalog.layout(segment.rank), segment.tail)

    # -- receiving --------------------------------------------------------------------------------------------------

    def _made_of(self, making: Making) -> Made:
        files = {part.file for part in making.parts} if making.stripe is not None else {making.file}
        tables = {file: self._table(file) for file in files}
        return Made(making, self._work.targets[making.file], tables, self._seal)

    def _receive(self, sender: int, mades: Sequence[Made]) -> None:
        with self._line(sender, self._rank) as line:
            for made in mades:
                try:
                    made.begin()
                except DcpMemError as error:
                    refuse(line, str(error))
                    raise
                receive(line, made.awaited(sender), self._go_on)
                made.end()

    def _add_own(self, mades: Sequence[Made]) -> None:
        """Add what lies in this node's own memory to what comes from others."""
        for made in mades:
            made.begin()
            for part in parts_of(made.making, self._rank):
                source = self._source(part.file, made.making)
                for start in range(part.start, part.stop, PIECE):
                    self._go_on()
                    data = source.read(start, min(start + PIECE, part.stop))
                    made.add(part.place + start - part.start, data)
            for file in checksums_with(made.making, self._rank):
                made.checksums[file] = self._checksums_for(made.making, file)
            made.end()

    def _seal(self, made: Made) -> None:
        faults.point("replicate.received")
        making, slot = made.making, made.slot
        assert not isinstance(slot, str)
        seal = partial(self._slots.seal, slot)
        if making.stripe is None:
            self._memory.add_segment_copy(self._manifest, making.file, made.table(), seal)
        else:
            record = StripeRecord(self._manifest.save_id, making.stripe, made.crcs())
            self._memory.add_parity(self._manifest, making.file, record, made.tables(), seal)
        made.is_sealed = True
        faults.point("replicate.sealed")

    def _give_back(self) -> None:
        """Let readers in to what was made, make free slots of the rest, and end the leases on what was sent."""
        made = {one.making.file for one in self._made if one.is_sealed}
        for file, slot in self._work.targets.items():
            if not isinstance(slot, str):
                (self._slots.share if file in made else self._slots.abandon)(slot)
        self._sources.clear()
        self._resources.close()

    def _sum_up(self) -> None:
        """Once: put the checksums of this rank's own segment beside it, by which what comes back is known to be whole."""
        if self._work.slot is None or self._has_summed:
            return
        file = self._manifest.segments[self._rank].file
        source = self._sources.get(file)
        if source is not None and source.is_summed:
            self._has_summed = True
            write = partial(self._memory.add_checksums, self._manifest, {file: source.table()})
            self._guarded("writing checksums", write)

    # -- agreeing -----------------------------------------------------------------------------------------------------

    def _agree(self, threads: Sequence[threading.Thread]) -> Failures:
        """Ask round until every rank is done; who is quick waits for the others, as long as each is heard of now and then."""
        while True:
            deadline = time.monotonic() + min(_LONGEST_ROUND, self._work.patience / 4)
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


def plain(text: str) -> str:
    """What an error says, without gloo's source file and good wishes."""
    return re.sub(r"^\[[^]]*\] ", "", text.split("\n")[0]).partition(". This is typically caused")[0][:300]
