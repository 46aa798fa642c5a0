"""The files that this rank assembles from parts that other ranks send, or that its own node has."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from dcp_mem.comm.collectives import Channel
from dcp_mem.comm.transfer import IncomingChunk
from dcp_mem.errors import DcpMemError
from dcp_mem.format.checksums import (
    BLOCK,
    BlockChecksums,
    Blocks,
    Crcs,
    block_count,
    blocks_of,
    checksum,
)
from dcp_mem.format.manifest import ItemTable
from dcp_mem.memory.slot import Slot
from dcp_mem.replicating.earlier import EarlierCopy, FindEarlier, Told, cuts_of
from dcp_mem.replicating.earlier_parity import Deciding
from dcp_mem.replicating.plan import FilePlan
from dcp_mem.replicating.task import SMALL_CHUNK, SegmentTables


class IncomingFile:
    """A file that is assembled in a slot. Its senders' threads add to it at the same time.

    Each of them calls `begin`, then receives `chunks_from` its sender, then calls `end`.

    `is_sealed`: whether it lies in the checkpoint, in its slot. `is_finished`: whether nothing is
    left to do for it: it is sealed, shared, or to be made anew.
    """

    def __init__(
        self,
        plan: FilePlan,
        slot: Slot | str,
        tables: SegmentTables,
        seal: Callable[[IncomingFile], None],
        find_earlier: FindEarlier,
        deciding: Deciding | None,
    ) -> None:
        """Describe the file.

        `slot`: the slot that was claimed for it, or why there is none. `seal`: puts the file into
        the checkpoint; called once all senders have ended. `deciding`: decides what parity is made
        from; None: from its shares.
        """
        self.plan, self.slot = plan, slot
        self.is_sealed = self.is_finished = False
        self.key = b""  # of a segment of frozen items
        self.checksums: dict[str, Crcs] = {}
        """Of segments, as the senders gave them."""
        files = {part.file for part in plan.parts} if plan.stripe is not None else {plan.file}
        self._tables, self._seal = {file: tables[file] for file in files}, seal
        self._senders_left = max(len(plan.senders), 1)
        self._guard = threading.Lock()
        self._memory: memoryview | None = None
        self._copied: BlockChecksums | None = None
        self._find_earlier = find_earlier
        self._earlier: EarlierCopy | None = None
        self._deciding = deciding

    def begin(self) -> None:
        """Map the slot; where parts are added up, fill it with zeros, unless that is decided later.

        Raises DcpMemError.
        """
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
        if plan.is_copy:
            self._copied = BlockChecksums(self._blocks())
            self._earlier = self._find_earlier(self._blocks())
        elif plan.nbytes and self._deciding is None:
            np.frombuffer(memory, np.uint8)[:] = 0
        return memory

    def _blocks(self) -> Blocks:
        table = self._tables[self.plan.file]
        return blocks_of(table.offsets, table.lengths)

    @property
    def received_into(self) -> memoryview:
        """The memory that chunks are received into; empty where parts are added up."""
        if self._memory is None or not self.plan.is_copy:
            return memoryview(b"")
        return self._memory

    # -- receiving ---------------------------------------------------------------------------------

    def told(self, sender: int) -> bytearray | None:
        """Return what a sender is told first: what lies here of what it sends; None for nothing."""
        if self._deciding is not None:
            return self._deciding.offer(sender)
        if not self.plan.is_copy:
            return None
        if self._earlier is not None:
            return self._earlier.told.message
        return Told(block_count(self._tables[self.plan.file].lengths)).message

    def chunks_from(self, sender: int, channel: Channel) -> Iterator[IncomingChunk]:
        """Yield all that a rank sends for the plan, in the order of `OutgoingFiles.chunks`.

        Raises DcpMemError.
        """
        if self.plan.is_copy:
            yield from self._chunks_in_place()
            return
        if self._deciding is not None:
            assert self._memory is not None
            self._deciding.settle(channel, self._memory)
        if self._deciding is not None and self._deciding.is_reused:
            yield from self._deciding.chunks(sender, self.add)
        else:
            yield from self._chunks_of_parts(sender)
        for file in self.plan.checksums_from(sender):
            crcs = bytearray(4 * block_count(self._tables[file].lengths))
            self.checksums[file] = np.frombuffer(crcs, "<u4")
            if crcs:
                yield IncomingChunk(crcs, partial(checksum, memoryview(crcs)), _nothing)

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
        assert self._copied is not None
        earlier = self._earlier
        for cut in cuts_of(self._blocks(), self.plan.nbytes):
            data = self._memory[cut.start : cut.stop]
            crc = partial(self._copied.add, cut.start, data)
            if earlier is None or not earlier.told.is_any:
                yield IncomingChunk(data, crc, _nothing)
            else:
                refill = partial(earlier.refill, cut, data)
                yield IncomingChunk(data, crc, _nothing, note_nbytes=cut.note_nbytes, refill=refill)

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
        """Note that all of a sender has been received; seal the file after the last sender.

        Raises Exception.
        """
        with self._guard:
            self._senders_left -= 1
            is_last = self._senders_left == 0
        if is_last:
            self._seal(self)

    def fail(self) -> None:
        """Have the other senders' threads fail as well, where they wait for this one's."""
        if self._deciding is not None:
            self._deciding.fail()

    def close(self) -> None:
        """Let the earlier copy, or parity, be recycled."""
        if self._earlier is not None:
            self._earlier.close()
            self._earlier = None
        if self._deciding is not None:
            self._deciding.close()

    # -- the assembled file ------------------------------------------------------------------------

    def table(self) -> ItemTable:
        """Return the segment's items, with the checksums of the assembled bytes.

        Raises DcpMemError.
        """
        table = self._tables[self.plan.file]
        if self._copied is not None:
            return replace(table, crc32c=self._copied.result())
        assert self._memory is not None
        checksums = BlockChecksums(self._blocks())
        checksums.add(0, self._memory)
        crcs = checksums.result()
        known = self.checksums.get(self.plan.file)
        wrong = len(crcs) if known is None else int(np.count_nonzero(crcs != known))
        if wrong:
            raise DcpMemError(
                f"{wrong} of {len(crcs)} blocks of {self.plan.file} don't come back from its parity"
            )
        return replace(table, crc32c=crcs)

    def stripe_tables(self) -> dict[str, ItemTable]:
        """Return the items, with checksums, of the segments that the file is the parity of."""
        return {
            file: replace(self._tables[file], crc32c=crcs) for file, crcs in self.checksums.items()
        }

    def is_parity(self, crcs: Sequence[int]) -> bool:
        """Return whether what began as an earlier parity is that of its shares now."""
        return self._deciding is None or self._deciding.is_parity(crcs)

    def crcs(self) -> tuple[int, ...]:
        """Return the CRC32C of each BLOCK of the file."""
        assert self._memory is not None
        return tuple(
            checksum(self._memory[start : start + BLOCK])
            for start in range(0, self.plan.nbytes, BLOCK)
        )


def _nothing() -> None:
    return
