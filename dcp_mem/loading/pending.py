"""Items and payloads that wait for bytes, and the bytes of a segment that they need.

Pieces come in any order; complete items go to the planner.
"""

from __future__ import annotations

import io
import math
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from pickle import UnpicklingError
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from dcp_mem.common.value_class import value_class
from dcp_mem.errors import (
    DcpMemError,
    ManifestInvalid,
    SegmentCorrupt,
    SizeRefused,
    UntrustedObject,
)
from dcp_mem.format.catalog import Ints
from dcp_mem.format.checksums import BLOCK, Blocks, blocks_of
from dcp_mem.format.manifest import ItemTable
from dcp_mem.format.saved_streams import is_whole, read_stream, why_refused
from dcp_mem.format.sizes import refuse_packed_stream
from dcp_mem.memory.copying import Move, copy_here, copy_many_here
from dcp_mem.memory.views import view_of
from dcp_mem.planning.plain_tensors import NO_MEMORY, PLAIN, is_plain, lacks_memory
from dcp_mem.planning.reads import DirectRead, ItemRead
from dcp_mem.planning.wrapper_tensors import class_name, copy_values, detached, naming
from dcp_mem.policy.pieces import Extent

_MOST_UNPACKED_BYTES, _MOST_RATIO = 64 << 20, 100
"""Limit for an unpacked item of torch's stream extensions that doesn't record its size: this many
bytes or, if more, this many times its packed size."""
_delivering = threading.Lock()


@value_class
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


@value_class
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


class PendingItem:
    """One item that waits for its bytes.

    Bytes that may lie in the tensor as they lie in the segment go there directly. Others go to a
    buffer, from which torch makes the values.

    `start`: first byte of the segment that it needs. `stop`: one past the last; with checksums,
    these are edges of whole blocks. `is_direct`: whether the bytes go directly into the tensor.
    """

    def __init__(
        self,
        item: ItemRead,
        planner: LoadPlanner,
        index: TableIndex | None,
        *,
        by_blocks: bool,
        weights_only: bool,
        corrupt: Callable[[str], SegmentCorrupt],
    ) -> None:
        """Find out which bytes the item needs, and whether they go directly into its tensor.

        `index`: the segment's table; None for one that torch's own writer made. `by_blocks`:
        whether bytes are checked, by whole blocks. `weights_only`: whether a tensor that was
        pickled whole is unpickled with restrictions. Raises DcpMemError.
        """
        self.item, self._planner, self._corrupt = item, planner, corrupt
        self._weights_only = weights_only
        self._payload = index.payload(item) if index is not None else None
        self._hull = hull(self._payload, item.request) if self._payload is not None else None
        self.start, self.stop = _extent(item, self._hull, by_blocks=by_blocks)
        self._target: torch.Tensor | None = None
        self._low, self._high, self._address = self.start, self.stop, 0
        self._buffer: np.ndarray[Any, Any] | None = None
        self._lock = threading.Lock()
        self._missing = self.stop - self.start
        self.is_direct = False
        if self._payload is not None and self._hull is not None:
            self._resolve_directly(self._payload.dtype, *self._hull)

    def _resolve_directly(self, dtype: torch.dtype, low: int, high: int) -> None:
        """Take the tensor itself as target, if its values lie in it as they do in the segment."""
        request = self.item.request
        if high - low != math.prod(request.lengths) * dtype.itemsize:
            return
        target = self._target_of(request)
        _check_shape(request, target)
        if target.dtype is dtype and is_plain(target):
            self.is_direct, self._target, self._address = True, target, target.data_ptr()
            self._low, self._high = low, high

    def _target_of(self, request: ReadItem) -> torch.Tensor:
        with torch.no_grad():  # Of a DTensor, its local tensor itself, not a view of it.
            target = self._planner.resolve_tensor(request)
        if type(target) in PLAIN and target.layout is torch.strided and lacks_memory(target):
            raise DcpMemError(f"{request.dest_index.fqn}: {NO_MEMORY}: load while it has")
        if target.layout is not torch.strided:
            return target  # Values copied into a detached sparse tensor would not reach the tensor.
        with naming(request.dest_index.fqn):
            return detached(target)

    @property
    def place(self) -> Place | None:
        """The tensor's memory, where bytes are read straight into it."""
        return Place(self._low, self._high, self._address) if self.is_direct else None

    def read(self) -> Move:
        """Return what to read from the segment, into the tensor or a buffer."""
        if self._address == 0 and self._buffer is None:
            self._buffer = np.empty(self._high - self._low, np.uint8)
            self._address = self._buffer.ctypes.data
        return self._address, self._low, self._high - self._low

    def moves(self, start: int, stop: int, address: int) -> list[Move]:
        """Return what to copy for this item.

        `address`: where these bytes lie in memory.
        """
        low, high = max(start, self._low), min(stop, self._high)
        if low >= high:
            return []
        with self._lock:
            self.read()
        return [(self._address + low - self._low, address + low - start, high - low)]

    def note(self, start: int, stop: int) -> bool:
        """Count bytes [start, stop) of the segment as received; return whether all are now."""
        count = min(stop, self.stop) - max(start, self.start)
        if count <= 0:
            return False
        with self._lock:
            self._missing -= count
            if self._missing < 0:
                raise AssertionError(
                    f"{self.item.request.storage_index.fqn}: some bytes came twice"
                )
            return not self._missing

    def deliver(self) -> None:
        """Give the planner the values. Threads may call this; a planner gets one item at a time.

        Raises SegmentCorrupt, UntrustedObject, Exception.
        """
        with _delivering:
            self._deliver()

    def _deliver(self) -> None:
        request = self.item.request
        if self._target is not None:
            self._planner.commit_tensor(request, self._target)
            return
        buffer, self._buffer = self._buffer, None
        data = buffer.data if buffer is not None else memoryview(b"")
        if request.type == LoadItemType.BYTE_IO:
            stream = self._plain_stream(data)
            with self._damage_told(stream):
                self._planner.load_bytes(request, io.BytesIO(stream))
            return
        target = self._target_of(request)
        _check_shape(request, target)
        values = self._values(data)
        with torch.no_grad(), naming(request.storage_index.fqn):
            copy_values(target, values)
        self._planner.commit_tensor(request, target)

    def _values(self, data: memoryview) -> torch.Tensor:
        request, payload = self.item.request, self._payload
        if payload is None or self._hull is None:
            stream = self._plain_stream(data)
            with self._damage_told(stream):
                whole = self._unpickled(stream)
            return self._part_of(whole)
        low, high = self._hull
        if low == high:
            return torch.empty(request.lengths, dtype=payload.dtype)
        values = torch.frombuffer(data[low - self.start : high - self.start], dtype=payload.dtype)
        return values.as_strided(request.lengths, strides(payload.shape))

    def _part_of(self, whole: torch.Tensor) -> torch.Tensor:
        request = self.item.request
        try:
            return _narrowed(whole, request.storage_offsets, request.lengths)
        except Exception as error:
            if type(whole) in PLAIN:
                raise
            why = f"{type(error).__name__}: {str(error).strip().split(chr(10))[0]}"
            raise DcpMemError(
                f"{request.storage_index.fqn} was saved as {class_name(whole)}, no part of which "
                f"can be taken ({why}): load it sharded as it was saved"
            ) from error

    def _unpickled(self, stream: bytes) -> torch.Tensor:
        """Return a tensor that was pickled whole: a subclass, or one without a plain layout."""
        restricted = self._weights_only
        try:
            whole = read_stream(io.BytesIO(stream), weights_only=restricted, map_location="cpu")
        except UnpicklingError as error:
            if not restricted or not is_whole(stream):
                raise
            name = self.item.request.storage_index.fqn
            raise UntrustedObject(name, why_refused(error)) from None
        if not isinstance(whole, torch.Tensor):
            raise UnpicklingError(f"a {type(whole).__name__} in place of a tensor")
        return whole

    def _plain_stream(self, data: memoryview) -> bytes:
        """Return the item's stream, with DCP's transforms undone. Raises SizeRefused as well."""
        item, stream = self.item, bytes(data)
        fqn = item.request.storage_index.fqn
        if item.transforms:
            transforms = getattr(filesystem, "_StorageReaderTransforms", None)
            if transforms is None:
                raise DcpMemError(
                    f"{item.file} was written with stream extensions, which need torch 2.7 or newer"
                )
            limit = _most_unpacked(item)
            with self._damage_told(b""):
                packed = transforms().transform_load_stream(
                    item.request, item.transforms, io.BytesIO(data)
                )
                stream = bytes(packed.read(limit + 1))
            if len(stream) > limit:
                raise SizeRefused(f"{fqn}, unpacked", len(stream), limit)
        refuse_packed_stream(memoryview(stream), fqn)
        return stream

    @contextmanager
    def _damage_told(self, stream: bytes) -> Iterator[None]:
        """Raise SegmentCorrupt where a stream can't be read because it isn't what torch wrote."""
        try:
            yield
        except Exception as error:
            if is_whole(stream):
                raise
            name, why = self.item.request.storage_index.fqn, str(error).split("\n")[0]
            raise self._corrupt(f"{name} can't be read: {type(error).__name__}: {why}") from error


class PendingItems:
    """All that one rank waits for, by segment: items and payloads. Each needs some bytes."""

    def __init__(
        self,
        items: Sequence[PendingItem],
        payloads: Mapping[str, PendingPayloads] = MappingProxyType({}),
    ) -> None:
        self._payloads = payloads
        self._by_file: dict[str, list[PendingItem]] = {}
        for pending in items:
            self._by_file.setdefault(pending.item.file, []).append(pending)
        for of_file in self._by_file.values():
            of_file.sort(key=lambda pending: pending.start)
        self._starts = {
            file: [pending.start for pending in of_file] for file, of_file in self._by_file.items()
        }
        self._stops = {
            file: list(accumulate((pending.stop for pending in of_file), max))
            for file, of_file in self._by_file.items()
        }

    @property
    def nbytes(self) -> int:
        """Bytes that are needed; those that several items need count for each."""
        return sum(stop - start for of_file in self.extents().values() for start, stop in of_file)

    def extents(self) -> dict[str, list[tuple[int, int]]]:
        """Return the bytes of each segment that are needed, in any order; they may overlap."""
        found = {
            file: list(zip(of_file.starts.tolist(), of_file.stops.tolist(), strict=True))
            for file, of_file in self._payloads.items()
        }
        for file, items in self._by_file.items():
            found.setdefault(file, []).extend((one.start, one.stop) for one in items)
        return found

    def only_place(self, file: str, start: int, stop: int) -> Place | None:
        """Return where bytes go directly, if one tensor alone takes any of them."""
        places = [item.place for item in self.within(file, start, stop)]
        if file in self._payloads:
            places += self._payloads[file].places(start, stop)
        return places[0] if len(places) == 1 else None

    def room_for(
        self, file: str, start: int, stop: int
    ) -> tuple[memoryview, Callable[[], list[PendingItem]]]:
        """Return memory for bytes of a segment, and what to call once they are there.

        That is the tensor itself where one alone takes them, else a buffer. The call has the bytes
        go on to where they belong, and returns the items that are complete then.
        """
        place = self.only_place(file, start, stop)
        data = None if place is None else place.view(start, stop)
        if data is not None:
            return data, partial(self.received, file, start, stop)
        buffer = np.empty(stop - start, np.uint8)
        return buffer.data, partial(self.take, file, start, stop, buffer)

    def take(
        self,
        file: str,
        start: int,
        stop: int,
        data: np.ndarray[Any, Any],
        wanted: Sequence[Extent] = (),
    ) -> list[PendingItem]:
        """Copy bytes of a segment, in this thread; return the items that are complete then.

        `wanted`: what of them goes to items; () for all. The rest may come to items another way.
        """
        address, parts = data.ctypes.data - start, wanted or [(start, stop)]
        taken = [(one, *of) for of in parts for one in self.within(file, *of)]
        moves = [one.moves(low, high, address + low) for one, low, high in taken]
        copy_here([move for of_item in moves for move in of_item])
        if file in self._payloads:
            copy_many_here(*self._payloads[file].moves(start, stop, data.ctypes.data))
        return [one for one, low, high in taken if one.note(low, high)]

    def received(self, file: str, start: int, stop: int) -> list[PendingItem]:
        """Count bytes that are where they belong; return the items that are complete then."""
        return [one for one in self.within(file, start, stop) if one.note(start, stop)]

    def within(self, file: str, start: int, stop: int) -> list[PendingItem]:
        """Return the items that need some of the bytes [start, stop) of a segment."""
        if file not in self._by_file:
            return []
        first, last = bisect_right(self._stops[file], start), bisect_left(self._starts[file], stop)
        return [pending for pending in self._by_file[file][first:last] if pending.stop > start]


def _extent(item: ItemRead, values: tuple[int, int] | None, *, by_blocks: bool) -> tuple[int, int]:
    """Return the bytes to read: the values, in whole blocks; where unknown, the whole item."""
    if values is None:
        return item.offset, item.stop
    start, stop = values
    if start == stop:
        return item.offset, item.offset
    if not by_blocks:
        return start, stop
    first, last = (start - item.offset) // BLOCK, -(-(stop - item.offset) // BLOCK)
    return item.offset + first * BLOCK, min(item.offset + last * BLOCK, item.stop)


def _check_shape(request: ReadItem, target: torch.Tensor) -> None:
    """Raise DcpMemError where the planner's tensor has another shape than the planner asked for."""
    if target.size() != request.lengths:
        given = f"the planner gave a tensor of {target.size()} for {request.lengths}"
        raise DcpMemError(f"{request.dest_index.fqn}: {given}")


def _narrowed(whole: torch.Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    for dimension, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        if length != whole.size(dimension):  # sparse tensors can't be narrowed at all
            whole = whole.narrow(dimension, offset, length)
    return whole


def _most_unpacked(item: ItemRead) -> int:
    """Return how many bytes an item may have once stream extensions have unpacked it."""
    if item.saved is None:
        return max(_MOST_UNPACKED_BYTES, _MOST_RATIO * item.length)
    dtype, shape = item.saved
    return math.prod(shape) * dtype.itemsize + _MOST_UNPACKED_BYTES
