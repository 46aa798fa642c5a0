"""Where in a segment the values of an item lie, and which of its bytes are asked for."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from dcp_mem.format.checksums import Blocks, blocks_of
from dcp_mem.format.manifest import ItemTable
from dcp_mem.planning.reads import Wanted


@dataclass(frozen=True, slots=True)
class Payload:
    """Raw contiguous data of an item: where it lies in the segment, and as what."""

    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: torch.Size


class TableIndex:
    """A segment's table, made ready to look things up in. crcs: of each block; empty where there are none."""

    def __init__(self, table: ItemTable) -> None:
        self.crcs = table.crc32c.tolist()
        self._table = table
        self._blocks: Blocks | None = None
        self._offsets = table.offsets.tolist()
        self._payload_offsets = table.payload_offsets.tolist()
        self._payload_nbytes = table.payload_nbytes.tolist()

    @property
    def blocks(self) -> Blocks:
        """What the checksums are of."""
        if self._blocks is None:
            self._blocks = blocks_of(self._table.offsets, self._table.lengths)
        return self._blocks

    def payload(self, item: Wanted) -> Payload | None:
        """The item's raw data, where table and plan agree that it has such; else None."""
        if item.transforms or item.saved is None or item.request.type != LoadItemType.TENSOR:
            return None
        row = bisect_left(self._offsets, item.offset)
        if row == len(self._offsets) or self._offsets[row] != item.offset or self._payload_offsets[row] < 0:
            return None
        (dtype, shape), nbytes = item.saved, self._payload_nbytes[row]
        if nbytes != math.prod(shape) * dtype.itemsize:
            return None
        return Payload(self._payload_offsets[row], nbytes, dtype, shape)


def hull(payload: Payload, request: ReadItem) -> tuple[int, int]:
    """Bytes [start, stop) of the segment from the first to the last value of the box that is asked for."""
    if 0 in request.lengths:
        return payload.offset, payload.offset
    first = last = 0
    for offset, length, stride in zip(request.storage_offsets, request.lengths, strides(payload.shape), strict=True):
        first += offset * stride
        last += (offset + length - 1) * stride
    itemsize = payload.dtype.itemsize
    return payload.offset + first * itemsize, payload.offset + (last + 1) * itemsize


def strides(shape: torch.Size) -> list[int]:
    """Strides, in values, of a contiguous tensor."""
    found, stride = [], 1
    for size in reversed(shape):
        found.append(stride)
        stride *= size
    return found[::-1]
