"""The files that a rank sends from, in its node's memory, and their checksums."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from dcp_mem.comm.collectives import Channel
from dcp_mem.comm.transfer import CHUNK, Amount, OutgoingChunk
from dcp_mem.common import faults
from dcp_mem.errors import DcpMemError
from dcp_mem.format import names
from dcp_mem.format.checksums import BlockChecksums, Crcs, blocks_of, checksum
from dcp_mem.format.manifest import ItemTable
from dcp_mem.memory.checkpoint import (
    LocalCheckpoint,
    check_unchanged,
    checksums_of,
    has_checksums,
)
from dcp_mem.memory.job import JobMemory
from dcp_mem.memory.locks import end_lease, open_leased
from dcp_mem.memory.slot import Slot
from dcp_mem.memory.views import fill, lent
from dcp_mem.policy.pieces import Extent
from dcp_mem.replicating.earlier import PAGE, EarlierSegment, Offer, Read, Vote, sums_of
from dcp_mem.replicating.plan import FilePlan
from dcp_mem.replicating.task import SMALL_CHUNK, ReplicationTask, SegmentTables


class OutgoingFiles:
    """The files that this rank sends from, opened as they are needed, and leased until `close`."""

    def __init__(self, memory: JobMemory, task: ReplicationTask, tables: SegmentTables) -> None:
        self._memory, self._task, self._tables = memory, task, tables
        self._directory = memory.checkpoint_directory(task.manifest.name)
        self._files: dict[str, OutgoingFile] = {}
        self.reused: list[Amount] = []
        self._earlier: dict[str, EarlierSegment] = {}
        self._opening = threading.Lock()
        self._resources = ExitStack()

    def chunks(
        self,
        plan: FilePlan,
        offer: Offer | None,
        channel: Channel,
        register: Callable[[memoryview], None],
        go_on: Callable[[], None],
    ) -> Iterator[OutgoingChunk]:
        """Yield all that this rank sends for a plan: its parts, then checksums of segments.
        `register` is called with memory before chunks of it; `go_on` raises where the rest isn't
        wanted.
        """
        verdict = bytearray(1)
        if offer is not None:
            channel.receive(verdict).wait()
        if offer is not None and verdict[0]:
            chunks = self._differences(plan, offer, channel, go_on)
        else:
            chunks = self._parts(plan, register)
        for chunk in chunks:
            yield chunk
            faults.point("replicate.chunk")
        # Last: without them, nobody seals a copy of damaged bytes.
        for name in plan.checksums_from(self._task.ranks.rank):
            data = bytearray(self.checksums(name, plan).tobytes())
            if data:
                yield OutgoingChunk(data, partial(checksum, memoryview(data)))

    def _parts(
        self, plan: FilePlan, register: Callable[[memoryview], None]
    ) -> Iterator[OutgoingChunk]:
        for part in plan.parts_from(self._task.ranks.rank):
            file = self.open(part.file, plan)
            register(file.mapped[part.start : part.stop])
            yield from file.chunks(part.start, part.stop, CHUNK if plan.is_copy else SMALL_CHUNK)

    def vote(self, plan: FilePlan, offer: Offer) -> Vote:
        """Return what this rank says to an offer: whether all of its parts are here, and gain."""
        if not offer.save_id:
            return Vote.CANNOT
        votes = []
        try:
            for part, stop in zip(plan.parts_from(self._task.ranks.rank), offer.stops, strict=True):
                earlier = self._earlier_segment(part.file, offer.save_id)
                if plan.is_copy and earlier.is_at(os.path.join(self._directory, part.file)):
                    return Vote.SHARES
                votes.append(earlier.vote(part, stop, self.open(part.file, plan).read))
        except (OSError, EOFError):  # it has been evicted, or somebody has cut it off
            return Vote.CANNOT
        return Vote.CANNOT if Vote.CANNOT in votes else max(votes)

    def _differences(
        self, plan: FilePlan, offer: Offer, channel: Channel, go_on: Callable[[], None]
    ) -> Iterator[OutgoingChunk]:
        parts = plan.parts_from(self._task.ranks.rank)
        reads = [self.open(part.file, plan).read for part in parts]
        old = [self._earlier_segment(part.file, offer.save_id) for part in parts]
        found = list(zip(old, parts, offer.stops, reads, strict=True))
        pages = [one.changed(part, stop, read, go_on) for one, part, stop, read in found]
        note = bytearray(b"".join(np.packbits(one).tobytes() for one in pages))
        if note:
            channel.send(note).wait()
        unchanged = PAGE * sum(int(np.count_nonzero(~one)) for one in pages)
        self.reused.append(Amount(reused_nbytes=unchanged))
        for (one, part, stop, read), changed in zip(found, pages, strict=True):
            yield from one.chunks(part, stop, read, changed)
        if plan.stripe is not None:
            sums = bytearray(sums_of(parts, reads, plan.nbytes).tobytes())
            yield OutgoingChunk(sums, partial(checksum, memoryview(sums)))

    def _earlier_segment(self, file: str, save_id: str) -> EarlierSegment:
        """Return a rank's segment in an earlier checkpoint."""
        name = names.segment_file(names.rank_of(file), save_id)
        with self._opening:
            if name not in self._earlier:
                found = [
                    one for one in self._memory.checkpoints() if one.manifest.save_id == save_id
                ]
                if not found:
                    raise FileNotFoundError(name)
                earlier = EarlierSegment(found[0].segment_path(name))
                self._resources.callback(earlier.close)
                self._earlier[name] = earlier
            return self._earlier[name]

    def open(self, name: str, plan: FilePlan) -> OutgoingFile:
        """Return a file of this node, to be sent for a plan."""
        with self._opening:
            if name not in self._files:
                self._files[name] = self._opened(name, plan)
            return self._files[name]

    def checksums(self, name: str, plan: FilePlan) -> Crcs:
        """Return the checksums of a segment's blocks, which follow the parts of a plan."""
        if plan.stripe is None and not plan.is_copy:  # it is lost: they lie beside its parity
            return self._kept_checksums(name)
        file = self.open(name, plan)
        self._check_unchanged(name, file)
        return file.table().crc32c

    def _check_unchanged(self, name: str, file: OutgoingFile) -> None:
        """Raise SegmentCorrupt where a segment has changed since its checksums were made."""
        local = self._local() if names.SEGMENT.fullmatch(name) else None
        if local is not None and has_checksums(local, name):
            check_unchanged(local, name, file.table(), "memory")

    def _local(self) -> LocalCheckpoint | None:
        manifest = self._task.manifest
        found = self._memory.find(manifest.name)
        return next((one for one in found if one.manifest.save_id == manifest.save_id), None)

    def own_tables(self) -> dict[str, ItemTable]:
        """Return this rank's own segments and their items, where all checksums were computed."""
        return {
            name: file.table()
            for name, file in self._files.items()
            if self._is_own(name) and file.is_summed
        }

    def _is_own(self, name: str) -> bool:
        """Return whether a file is a segment that this process has staged."""
        is_segment = names.SEGMENT.fullmatch(name) is not None
        is_of_rank = names.home_rank(names.rank_of(name)) == self._task.ranks.rank
        return is_segment and is_of_rank and self._task.own_slot is not None

    def close(self) -> None:
        """End the leases."""
        self._files.clear()
        self._earlier.clear()
        self._resources.close()

    def _opened(self, name: str, plan: FilePlan) -> OutgoingFile:
        nbytes = self._nbytes_of(name)
        is_parity = names.PARITY.fullmatch(name) is not None
        path = os.path.join(self._directory, name)
        own_slot, is_own = self._task.own_slot, self._is_own(name)
        is_mapped = own_slot is not None and own_slot.mapping is not None
        if is_own and own_slot is not None and is_mapped and names.rank_of(name) < names.FROZEN:
            return of_slot(own_slot, path, nbytes, self._tables[name], self._resources)
        is_sent_whole = not is_parity and (plan.is_copy or plan.stripe is not None)
        table = self._tables[name] if is_sent_whole else None
        file = of_file(path, nbytes, table, self._resources)
        if is_sent_whole and not is_own:  # another process staged it: it may be damaged since
            file.verify(self._kept_checksums(name))
        return file

    def _nbytes_of(self, name: str) -> int:
        if names.PARITY.fullmatch(name):
            parts = (part for plan in self._task.plans for part in plan.parts)
            return max(part.stop for part in parts if part.file == name)
        return self._task.manifest.segments.numbered(names.rank_of(name)).nbytes

    def _kept_checksums(self, name: str) -> Crcs:
        """Return the checksums of a segment from this node's memory."""
        with suppress(FileNotFoundError):
            if (local := self._local()) is not None:
                return np.asarray(checksums_of(local, name).crc32c)
        raise DcpMemError(f"the checksums of {name} don't lie here")


class OutgoingFile:
    """A file that is sent, in whole or in part, to one rank or several. The checksums of its items
    are computed once, by the threads that send its chunks.
    """

    def __init__(
        self, nbytes: int, read: Read, table: ItemTable | None = None, mapped: Any = b""
    ) -> None:
        """Describe the file. `table`: its items, if it is a segment that is sent as a whole.
        `mapped`: the mapping that `read` returns views of; it may be shorter than the file.
        """
        self.nbytes, self.read, self._table = nbytes, read, table
        self.mapped = memoryview(mapped)
        self._checksums = (
            None if table is None else BlockChecksums(blocks_of(table.offsets, table.lengths))
        )
        # Each extent is claimed by the first thread that sums it up; `_gaps` had no such thread.
        self._claimed: set[Extent] = set()
        self._gaps: list[Extent] = []
        self._nbytes_left, self._is_broken = nbytes, False
        self._progress = threading.Condition()

    def chunks(self, start: int, stop: int, nbytes: int) -> Iterator[OutgoingChunk]:
        """Yield bytes [start, stop) in chunks of `nbytes` each."""
        for low in range(start, stop, nbytes):
            data = self.read(low, min(low + nbytes, stop))
            yield OutgoingChunk(data, partial(self._chunk_crc, low, data))

    def _chunk_crc(self, start: int, data: memoryview) -> int:
        """Return a chunk's CRC32C; sum up its items as well, unless another thread does."""
        stop = start + len(data)
        with self._progress:
            is_claimed = (start, stop) in self._claimed or any(
                low <= start and stop <= high for low, high in self._gaps
            )
            self._claimed.add((start, stop))
        if is_claimed or self._checksums is None:
            return checksum(data)
        return self._sum_up(start, data)

    def _sum_up(self, start: int, data: memoryview) -> int:
        assert self._checksums is not None
        crc = self._checksums.add(start, data)
        with self._progress:
            self._nbytes_left -= len(data)
            self._progress.notify_all()
        return crc

    @property
    def is_summed(self) -> bool:
        """Whether the checksums of all items have been computed."""
        return self._checksums is not None and not self._nbytes_left

    def table(self) -> ItemTable:
        """Return the segment's items with their checksums, and compute those that are missing."""
        assert self._table is not None
        assert self._checksums is not None
        with self._progress:
            gaps = _gaps([*self._claimed, *self._gaps], self.nbytes)
            self._gaps += gaps
        try:
            for low, high in gaps:
                for start in range(low, high, SMALL_CHUNK):  # some of it may have to be read
                    self._sum_up(start, self.read(start, min(start + SMALL_CHUNK, high)))
        except BaseException:
            with self._progress:
                self._is_broken = True
                self._progress.notify_all()
            raise
        with self._progress:
            self._progress.wait_for(lambda: self._is_broken or not self._nbytes_left)
            if self._nbytes_left:
                raise DcpMemError("another thread could not read the segment")
            return replace(self._table, crc32c=self._checksums.result())

    def verify(self, known: Crcs) -> None:
        """Raise DcpMemError unless the segment has these checksums."""
        wrong = int(np.count_nonzero(self.table().crc32c != known))
        if wrong:
            raise DcpMemError(f"{wrong} of {len(known)} blocks of the copy here are damaged")


def _gaps(claimed: list[Extent], nbytes: int) -> list[Extent]:
    """Return the extents of a file that no claim covers."""
    gaps, reached = [], 0
    for start, stop in sorted(claimed):
        if start > reached:
            gaps.append((reached, start))
        reached = max(reached, stop)
    return [*gaps, (reached, nbytes)] if reached < nbytes else gaps


def of_slot(
    slot: Slot, path: str, nbytes: int, table: ItemTable, resources: ExitStack
) -> OutgoingFile:
    """Return the segment in the slot that it was staged into."""
    # Under a lease nobody claims the slot, also not once the checkpoint has left memory.
    descriptor = _leased(path, resources)
    if os.fstat(descriptor).st_ino != slot.inode:
        raise FileNotFoundError(errno.ENOENT, "it isn't in the slot any more", path)
    assert slot.mapping is not None
    mapped, mapped_nbytes = memoryview(slot.mapping.buffer).cast("B"), slot.mapping.nbytes

    def read(start: int, stop: int) -> memoryview:
        if stop <= mapped_nbytes:
            return mapped[start:stop]
        # Byte items may have grown beyond the slot's mapping.
        rest = bytearray(stop - start)
        fill(descriptor, [memoryview(rest)], start)
        return memoryview(rest)

    return OutgoingFile(nbytes, read, table, mapped)


def of_file(path: str, nbytes: int, table: ItemTable | None, resources: ExitStack) -> OutgoingFile:
    """Return a file of a checkpoint on this node; with its items, if it is sent as a whole."""
    descriptor = _leased(path, resources)
    mapped = lent(descriptor, 0, nbytes) if nbytes else memoryview(b"")
    return OutgoingFile(nbytes, lambda start, stop: mapped[start:stop], table, mapped)


def _leased(path: str, resources: ExitStack) -> int:
    """Return a descriptor of a file, with a lease that ends with `resources`."""
    descriptor = open_leased(path)
    resources.callback(os.close, descriptor)
    resources.callback(end_lease, descriptor)
    return descriptor
