"""The files that this rank assembles from parts that other ranks send, or that its own node has."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from dcp_mem.comm.collectives import Channel
from dcp_mem.comm.transfer import CHUNK, IncomingChunk
from dcp_mem.errors import DcpMemError
from dcp_mem.format.checksums import (
    BLOCK,
    BlockChecksums,
    Crcs,
    block_count,
    blocks_of,
    checksum,
)
from dcp_mem.format.manifest import ItemTable
from dcp_mem.memory.slot import Slot
from dcp_mem.replicating.earlier import Deciding
from dcp_mem.replicating.plan import FilePlan
from dcp_mem.replicating.task import SMALL_CHUNK, SegmentTables, nothing


class IncomingFile:
    """A file that is assembled in a slot. Its senders' threads add to it at the same time.

    Each of them calls `begin`, then receives `chunks_from` its sender, then calls `end`; after the
    last of them, `seal` is called. It is finished once nothing is left to do for it: it is sealed,
    shared, or to be made anew. `crcs` are those of its blocks, or of a segment's items.
    """

    def __init__(
        self,
        plan: FilePlan,
        slot: Slot | str,
        tables: SegmentTables,
        seal: Callable[[IncomingFile], None],
        deciding: Deciding | None,
    ) -> None:
        self.plan, self.slot, self.deciding = plan, slot, deciding
        self.is_sealed = self.is_finished = False
        self.crcs: Crcs = np.zeros(0, "<u4")
        self.checksums: dict[str, Crcs] = {}
        """Of segments, as the senders gave them."""
        files = {part.file for part in plan.parts} if plan.stripe is not None else {plan.file}
        self._tables, self._seal = {file: tables[file] for file in files}, seal
        self._senders_left = max(len(plan.senders), 1)
        self._guard = threading.Lock()
        self._memory: memoryview | None = None
        self._copied: BlockChecksums | None = None  # sums up what is received in place

    def begin(self) -> None:
        """Map the slot; where parts are added up, fill it with zeros, unless that comes later."""
        with self._guard:
            if self._memory is not None:
                return
            if isinstance(self.slot, str):
                raise DcpMemError(self.slot)
            try:
                self._memory = self._mapped(self.slot)
            except Exception as error:
                raise DcpMemError(f"{type(error).__name__}: {error}") from None

    def _mapped(self, slot: Slot) -> memoryview:
        plan = self.plan
        slot.frames = ""
        slot.shrink(plan.nbytes)
        slot.map(plan.nbytes, plan.slot_nbytes)
        assert slot.mapping is not None
        memory = memoryview(slot.mapping.buffer).cast("B")[: plan.nbytes]
        if plan.nbytes and self.deciding is None:
            np.frombuffer(memory, np.uint8)[:] = 0
        return memory

    def _item_checksums(self) -> BlockChecksums:
        table = self._tables[self.plan.file]
        return BlockChecksums(blocks_of(table.offsets, table.lengths))

    @property
    def received_into(self) -> memoryview:
        """The memory that chunks are received into; empty where parts are added up."""
        if self._memory is None or not self.plan.is_copy:
            return memoryview(b"")
        return self._memory

    # -- receiving ---------------------------------------------------------------------------------

    @property
    def is_reused(self) -> bool:
        """Whether it has begun as the file of an earlier checkpoint."""
        return self.deciding is not None and self.deciding.is_reused

    def chunks_from(self, sender: int, channel: Channel) -> Iterator[IncomingChunk]:
        """Yield all that a rank sends for the plan, in the order of `OutgoingFiles.chunks`."""
        if self.deciding is not None:
            assert self._memory is not None
            self.deciding.settle(channel, self._memory)
        if self.deciding is not None and self.is_reused:
            yield from self.deciding.chunks(sender, channel, self.add)
        elif self.plan.is_copy:
            yield from self._chunks_in_place()
        else:
            yield from self._chunks_of_parts(sender)
        for file in self.plan.checksums_from(sender):
            crcs = bytearray(4 * block_count(self._tables[file].lengths))
            self.checksums[file] = np.frombuffer(crcs, "<u4")
            if crcs:
                yield IncomingChunk(crcs, partial(checksum, memoryview(crcs)), nothing)

    def _chunks_of_parts(self, sender: int) -> Iterator[IncomingChunk]:
        buffers: list[bytearray] = []  # free ones, used again and again
        for part in self.plan.parts_from(sender):
            for start in range(part.start, part.stop, SMALL_CHUNK):
                buffer = buffers.pop() if buffers else bytearray(SMALL_CHUNK)
                data = memoryview(buffer)[: min(SMALL_CHUNK, part.stop - start)]
                place = part.place + start - part.start
                accept = partial(self._add_and_free, place, data, buffer, buffers)
                yield IncomingChunk(data, partial(checksum, data), accept)

    def _chunks_in_place(self) -> Iterator[IncomingChunk]:
        assert self._memory is not None
        self._copied = self._item_checksums()
        for start in range(0, self.plan.nbytes, CHUNK):
            data = self._memory[start : start + CHUNK]
            yield IncomingChunk(data, partial(self._copied.add, start, data), nothing)

    def _add_and_free(
        self, place: int, data: memoryview, buffer: bytearray, buffers: list[bytearray]
    ) -> None:
        self.add(place, data)
        buffers.append(buffer)

    def add(self, place: int, data: memoryview) -> None:
        """Add a part's bytes to the file, by XOR, from `place` on."""
        assert self._memory is not None
        target = np.frombuffer(self._memory, np.uint8)[place : place + len(data)]
        with self._guard:
            np.bitwise_xor(target, np.frombuffer(data, np.uint8), out=target)

    def end(self) -> None:
        """Note that all of a sender has been received; seal the file after the last sender."""
        with self._guard:
            self._senders_left -= 1
            is_last = self._senders_left == 0
        if is_last:
            self._seal(self)

    def fail(self) -> None:
        """Have the other senders' threads fail as well, where they wait for this one's."""
        if self.deciding is not None:
            self.deciding.fail()

    def close(self) -> None:
        if self.deciding is not None:
            self.deciding.close()

    # -- the assembled file ------------------------------------------------------------------------

    def sum_up(self) -> int:
        """Compute the checksums of the assembled file; return how many of them are wrong."""
        assert self._memory is not None
        if self.plan.stripe is not None:
            starts = range(0, self.plan.nbytes, BLOCK)
            found = [checksum(self._memory[start : start + BLOCK]) for start in starts]
            self.crcs = crcs = np.array(found, "<u4")
            known = self.deciding.expected() if self.deciding and self.is_reused else crcs
            return int(np.count_nonzero(crcs != known))
        checksums = self._copied
        if checksums is None:
            checksums = self._item_checksums()
            checksums.add(0, self._memory)
        self.crcs = crcs = checksums.result()
        given = self.checksums.get(self.plan.file)
        return len(crcs) if given is None else int(np.count_nonzero(crcs != given))

    def table(self) -> ItemTable:
        """Return the segment's items, with the checksums of the assembled bytes."""
        return replace(self._tables[self.plan.file], crc32c=self.crcs)

    def stripe_tables(self) -> dict[str, ItemTable]:
        """Return the items, with checksums, of the segments that the file is the parity of."""
        return {
            file: replace(self._tables[file], crc32c=crcs) for file, crcs in self.checksums.items()
        }
