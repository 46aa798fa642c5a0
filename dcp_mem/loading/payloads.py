"""The payloads of items in a segment, and the bytes of them that are needed."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from dcp_mem.format.checksums import Blocks, blocks_of
from dcp_mem.format.manifest import ItemTable
from dcp_mem.planning.reads import ItemRead


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
