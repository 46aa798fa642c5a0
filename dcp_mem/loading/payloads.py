"""The payloads of items in a segment, and the bytes of them that are needed."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
import torch
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from dcp_mem.errors import ManifestInvalid
from dcp_mem.format.catalog import Ints
from dcp_mem.format.checksums import BLOCK, Blocks, blocks_of
from dcp_mem.format.manifest import ItemTable
from dcp_mem.memory.views import view_of
from dcp_mem.planning.reads import DirectRead, ItemRead


@dataclass(frozen=True, slots=True)
class Payload:
    """Raw contiguous data of an item."""

    offset: int  # in the segment, in bytes
    nbytes: int
    dtype: torch.dtype
    shape: torch.Size


class TableIndex:
    """A segment's table, ready for look-ups.

    `crcs`: CRC32C of each block; empty where there are none.
    """

    def __init__(self, table: ItemTable) -> None:
        self.crcs = table.crc32c.tolist()
        self._table = table
        self._blocks: Blocks | None = None
        self._offsets = table.offsets.tolist()
        self._payload_offsets = table.payload_offsets.tolist()
        self._payload_nbytes = table.payload_nbytes.tolist()

    @property
    def blocks(self) -> Blocks:
        """The blocks that have checksums."""
        if self._blocks is None:
            self._blocks = blocks_of(self._table.offsets, self._table.lengths)
        return self._blocks

    def payload(self, item: ItemRead) -> Payload | None:
        """Return the item's raw data; None where table and plan don't agree that it has such."""
        if item.transforms or item.saved is None or item.request.type != LoadItemType.TENSOR:
            return None
        row = bisect_left(self._offsets, item.offset)
        if row == len(self._offsets) or self._offsets[row] != item.offset:
            return None
        if self._payload_offsets[row] < 0:
            return None
        (dtype, shape), nbytes = item.saved, self._payload_nbytes[row]
        if nbytes != math.prod(shape) * dtype.itemsize:
            return None
        return Payload(self._payload_offsets[row], nbytes, dtype, shape)

    def extents(self, payloads: DirectRead, *, by_blocks: bool) -> tuple[Ints, Ints]:
        """Return the bytes to read for these payloads: starts and stops.

        Raises ManifestInvalid where the table has no such payloads.
        """
        table, low, high = self._table, payloads.offset, payloads.offset + payloads.nbytes
        row = np.maximum(np.searchsorted(table.offsets, low, "right") - 1, 0)
        if (
            not len(table.offsets)
            or (
                (table.payload_offsets[row] != low) | (table.payload_nbytes[row] != payloads.nbytes)
            ).any()
        ):
            raise ManifestInvalid("its table and its catalog don't agree where tensors lie")
        if not by_blocks:
            return low, high
        first, last = table.offsets[row], table.offsets[row] + table.lengths[row]
        start = first + (low - first) // BLOCK * BLOCK
        return start, np.minimum(first - (first - high) // BLOCK * BLOCK, last)


def table_index(table: ItemTable | None) -> TableIndex | None:
    """Return a segment's table for look-ups; None for one that torch's own writer made."""
    return None if table is None else TableIndex(table)


@dataclass(frozen=True, slots=True)
class Place:
    """Memory into which bytes [low, high) of a segment go as they are."""

    low: int
    high: int
    address: int  # of byte `low`

    def view(self, start: int, stop: int) -> memoryview | None:
        """Return the memory for bytes [start, stop) of the segment, if all go there."""
        if start < self.low or self.high < stop:
            return None
        return view_of(self.address + start - self.low, stop - start)

    def buffers(self, start: int, stop: int) -> list[memoryview]:
        """Return memory for bytes [start, stop) of the segment: scratch, the place, scratch."""
        low, high = min(max(start, self.low), stop), max(min(stop, self.high), start)
        if low >= high:
            return [memoryview(bytearray(stop - start))]
        middle = view_of(self.address + low - self.low, high - low)
        return [memoryview(bytearray(low - start)), middle, memoryview(bytearray(stop - high))]


class PendingPayloads:
    """Payloads of one segment that go as they are into tensors in this process's memory.

    They are complete when their bytes have come: nobody is told.
    """

    def __init__(self, payloads: DirectRead, index: TableIndex, *, by_blocks: bool) -> None:
        """`payloads`: by ascending offsets. Raises ManifestInvalid."""
        payloads = payloads.only(payloads.nbytes > 0)
        self.starts, self.stops = index.extents(payloads, by_blocks=by_blocks)
        self._low, self._high = payloads.offset, payloads.offset + payloads.nbytes
        self._shift = payloads.address - payloads.offset
        self._reach = np.maximum.accumulate(self.stops)

    def _within(self, start: int, stop: int) -> Ints:
        """Return the numbers of the payloads that need some of the bytes [start, stop)."""
        first = int(np.searchsorted(self._reach, start, "right"))
        last = int(np.searchsorted(self.starts, stop, "left"))
        return first + np.flatnonzero(self.stops[first:last] > start)

    def places(self, start: int, stop: int) -> list[Place]:
        """Return the places of the first two payloads that need some of the bytes [start, stop)."""
        few = self._within(start, stop)[:2]
        columns = (self._low[few], self._high[few], self._shift[few] + self._low[few])
        return [Place(*row) for row in np.stack(columns, 1).tolist()]

    def moves(self, start: int, stop: int, address: int) -> tuple[Ints, Ints, Ints]:
        """Return what to copy of bytes [start, stop), which lie at an address.

        Returns destinations, sources and bytes.
        """
        rows = self._within(start, stop)
        low = np.maximum(self._low[rows], start)
        nbytes = np.maximum(np.minimum(self._high[rows], stop) - low, 0)
        return self._shift[rows] + low, address - start + low, nbytes


def hull(payload: Payload, request: ReadItem) -> tuple[int, int]:
    """Return the bytes of the segment from the first to the last value that is asked for.

    Returns first byte, and one past the last.
    """
    if request.lengths == payload.shape:
        return payload.offset, payload.offset + payload.nbytes
    if 0 in request.lengths:
        return payload.offset, payload.offset
    first = last = 0
    for offset, length, stride in zip(
        request.storage_offsets, request.lengths, strides(payload.shape), strict=True
    ):
        first += offset * stride
        last += (offset + length - 1) * stride
    itemsize = payload.dtype.itemsize
    return payload.offset + first * itemsize, payload.offset + (last + 1) * itemsize


def strides(shape: torch.Size) -> list[int]:
    """Return the strides, in values, of a contiguous tensor."""
    found, stride = [], 1
    for size in reversed(shape):
        found.append(stride)
        stride *= size
    return found[::-1]
