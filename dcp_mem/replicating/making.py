"""A file that comes about in this rank's memory, from parts that other ranks send, or that lie here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from dcp_mem.errors import DcpMemError
from dcp_mem.format import names
from dcp_mem.format.checksums import BLOCK, BlockChecksums, Crcs, blocks_of, checksum
from dcp_mem.format.manifest import ItemTable
from dcp_mem.memory.slots import Slot
from dcp_mem.replicating.exchange import CHUNK, Awaited
from dcp_mem.replicating.transfers import Making, Part

PIECE = 2 << 20
"""Bytes of a piece that passes through private memory, of which each sender takes a few."""


def parts_of(making: Making, sender: int) -> Sequence[Part]:
    return [part for part in making.parts if part.sender == sender]


def checksums_with(making: Making, sender: int) -> Sequence[str]:
    """Segments whose checksums a sender sends behind its parts: those that parity is of; the one that comes back from it."""
    files = [part.file for part in parts_of(making, sender)]
    if making.stripe is not None:
        return list(dict.fromkeys(files))
    return [making.file] if any(map(names.PARITY.fullmatch, files)) else []


class Made:
    """The file. slot: that it comes into, or why there is none. tables: items of the segments in question, by file.

    seal: puts it into the checkpoint; called once everything is here.
    """

    def __init__(
        self, making: Making, slot: Slot | str, tables: Mapping[str, ItemTable], seal: Callable[[Made], None]
    ) -> None:
        self.making, self.slot = making, slot
        self.is_sealed = False
        self.checksums: dict[str, Crcs] = {}  # of segments, as senders gave them
        self._tables, self._seal = tables, seal
        self._left = max(len(making.senders), 1)
        self._guard = threading.Lock()
        self._memory: memoryview | None = None
        self._passed: BlockChecksums | None = None

    def begin(self) -> None:
        """Have the slot ready: mapped, and zero where parts are added up. Raises DcpMemError where there is no room."""
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
        making = self.making
        slot.frames = ""
        slot.shrink(making.nbytes)
        slot.map(making.nbytes, making.room)
        assert slot.mapping is not None
        memory = memoryview(slot.mapping.buffer).cast("B")[: making.nbytes]
        if making.is_copy:
            self._passed = self._blocks()
        elif making.nbytes:
            np.frombuffer(memory, np.uint8)[:] = 0
        return memory

    def _blocks(self) -> BlockChecksums:
        table = self._tables[self.making.file]
        return BlockChecksums(blocks_of(table.offsets, table.lengths))

    # -- what comes -----------------------------------------------------------------------------------------------

    def awaited(self, sender: int) -> Iterator[Awaited]:
        """All that comes from a sender, piece by piece."""
        if self.making.is_copy:
            yield from self._straight()
            return
        scratch: list[bytearray] = []  # used again and again
        for part in parts_of(self.making, sender):
            for start in range(part.start, part.stop, PIECE):
                room = scratch.pop() if scratch else bytearray(PIECE)
                data = memoryview(room)[: min(PIECE, part.stop - start)]
                accept = partial(self._add, part.place + start - part.start, data, room, scratch)
                yield Awaited(data, partial(checksum, data), accept)
        for file in checksums_with(self.making, sender):
            sums = bytearray(4 * self._count(file))
            self.checksums[file] = np.frombuffer(sums, "<u4")
            if sums:
                yield Awaited(sums, partial(checksum, memoryview(sums)), _nothing)

    def _straight(self) -> Iterator[Awaited]:
        assert self._memory is not None
        assert self._passed is not None
        for start in range(0, self.making.nbytes, CHUNK):
            data = self._memory[start : start + CHUNK]
            yield Awaited(data, partial(self._passed.add, start, data), _nothing)

    def _count(self, file: str) -> int:
        table = self._tables[file]
        return len(blocks_of(table.offsets, table.lengths).offsets)

    def _add(self, place: int, data: memoryview, room: bytearray, scratch: list[bytearray]) -> None:
        self.add(place, data)
        scratch.append(room)

    def add(self, place: int, data: memoryview) -> None:
        """Add a part's bytes to what is there."""
        assert self._memory is not None
        there = np.frombuffer(self._memory, np.uint8)[place : place + len(data)]
        with self._guard:
            np.bitwise_xor(there, np.frombuffer(data, np.uint8), out=there)

    def end(self) -> None:
        """Note that all of a sender has come. With the last one the file is sealed; raises what speaks against that."""
        with self._guard:
            self._left -= 1
            is_last = self._left == 0
        if is_last:
            self._seal(self)

    # -- what it has become ---------------------------------------------------------------------------------------

    def table(self) -> ItemTable:
        """The segment's items, with the checksums of what is here. Raises DcpMemError where the lost one had others."""
        table = self._tables[self.making.file]
        if self._passed is not None:
            return replace(table, crc32c=self._passed.result())
        assert self._memory is not None
        blocks = self._blocks()
        blocks.add(0, self._memory)
        crcs = blocks.result()
        known = self.checksums.get(self.making.file)
        wrong = len(crcs) if known is None else int(np.count_nonzero(crcs != known))
        if wrong:
            raise DcpMemError(f"{wrong} of {len(crcs)} blocks of {self.making.file} don't come back from its parity")
        return replace(table, crc32c=crcs)

    def tables(self) -> dict[str, ItemTable]:
        """The items, with checksums, of the segments that it is the parity of."""
        return {file: replace(self._tables[file], crc32c=crcs) for file, crcs in self.checksums.items()}

    def crcs(self) -> tuple[int, ...]:
        """CRC32C of each BLOCK of it."""
        assert self._memory is not None
        return tuple(checksum(self._memory[start : start + BLOCK]) for start in range(0, self.making.nbytes, BLOCK))


def _nothing() -> None:
    return
