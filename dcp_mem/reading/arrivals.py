"""Items on their way into their tensors, while their bytes come in pieces and in any order."""

from __future__ import annotations

import io
import math
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from dcp_mem.errors import DcpMemError
from dcp_mem.format.checksums import BLOCK
from dcp_mem.memory.copying import Move, copy
from dcp_mem.memory.views import view_of
from dcp_mem.planning.plain import is_plain
from dcp_mem.planning.reads import Wanted
from dcp_mem.reading.payloads import TableIndex, hull, strides

_handing_on = threading.Lock()


class Arrival:
    """One item. It takes bytes [start, stop) of its segment: whole blocks, where there are checksums to check.

    Where they may lie as they come, they go straight into the tensor; else into a buffer, and from there by torch.
    """

    def __init__(self, item: Wanted, planner: LoadPlanner, index: TableIndex | None, *, by_blocks: bool) -> None:
        self.item, self._planner = item, planner
        self._payload = index.payload(item) if index is not None else None
        self._hull = hull(self._payload, item.request) if self._payload is not None else None
        self.start, self.stop = _extent(item, self._hull, by_blocks=by_blocks)
        self._target: torch.Tensor | None = None
        self._low, self._high, self._address = self.start, self.stop, 0
        self._buffer: np.ndarray[Any, Any] | None = None
        self._lock = threading.Lock()
        self._missing = self.stop - self.start
        if self._payload is not None and self._hull is not None:
            self._aim_straight(self._payload.dtype, *self._hull)

    def _aim_straight(self, dtype: torch.dtype, low: int, high: int) -> None:
        """Have the bytes go into the tensor as they come, if nothing lies between its values and it is laid out alike."""
        request = self.item.request
        if high - low != math.prod(request.lengths) * dtype.itemsize:
            return
        target = self._planner.resolve_tensor(request).detach()
        check_shape(request, target)
        if target.dtype is dtype and is_plain(target):
            self._target, self._address = target, target.data_ptr()
            self._low, self._high = low, high

    @property
    def is_straight(self) -> bool:
        """Whether the bytes go straight into the tensor."""
        return self._target is not None

    @property
    def is_empty(self) -> bool:
        """Whether nothing has to be read for it."""
        return self.start == self.stop

    def place_for(self, start: int, stop: int) -> memoryview | None:
        """The tensor's own memory for bytes [start, stop) of the segment; None where they don't all go straight into it."""
        if self._target is None or start < self._low or self._high < stop:
            return None
        return view_of(self._address + start - self._low, stop - start)

    def straight_move(self) -> Move:
        """Where the bytes that the tensor takes go, and where in the segment they lie."""
        return self._address, self._low, self._high - self._low

    def around(self, start: int, stop: int) -> list[memoryview]:
        """Memory for bytes [start, stop) of the segment, one behind the other: the tensor's own, and scratch around it."""
        low, high = min(max(start, self._low), stop), max(min(stop, self._high), start)
        if low >= high:
            return [memoryview(bytearray(stop - start))]
        middle = view_of(self._address + low - self._low, high - low)
        return [memoryview(bytearray(low - start)), middle, memoryview(bytearray(stop - high))]

    def moves(self, start: int, stop: int, address: int) -> list[Move]:
        """What to copy where bytes [start, stop) of the segment lie in memory at `address`."""
        low, high = max(start, self._low), min(stop, self._high)
        if low >= high:
            return []
        with self._lock:
            if self._address == 0 and self._buffer is None:
                self._buffer = np.empty(self._high - self._low, np.uint8)
                self._address = self._buffer.ctypes.data
        return [(self._address + low - self._low, address + low - start, high - low)]

    def note(self, start: int, stop: int) -> bool:
        """Take down that bytes [start, stop) are where they belong, once; True where they were the last."""
        count = min(stop, self.stop) - max(start, self.start)
        if count <= 0:
            return False
        with self._lock:
            self._missing -= count
            if self._missing < 0:
                raise AssertionError(f"{self.item.request.storage_index.fqn}: some bytes came twice")
            return not self._missing

    def hand_on(self) -> None:
        """Give the planner what has arrived. Several threads may; a planner hears of one thing at a time."""
        with _handing_on:
            self._hand_on()

    def _hand_on(self) -> None:
        request = self.item.request
        if self._target is not None:
            self._planner.commit_tensor(request, self._target)
            return
        buffer, self._buffer = self._buffer, None
        data = buffer.data if buffer is not None else memoryview(b"")
        if request.type == LoadItemType.BYTE_IO:
            self._planner.load_bytes(request, io.BytesIO(_plain_stream(self.item, data).read()))
            return
        target = self._planner.resolve_tensor(request)
        if target.layout is torch.strided:
            target = target.detach()  # values copied into a detached sparse tensor would stay there
        check_shape(request, target)
        with torch.no_grad():
            target.copy_(self._values(data))
        self._planner.commit_tensor(request, target)

    def _values(self, data: memoryview) -> torch.Tensor:
        request, payload = self.item.request, self._payload
        if payload is None or self._hull is None:
            whole = torch.load(_plain_stream(self.item, data), map_location="cpu", weights_only=True)
            return narrow_tensor_by_index(whole, request.storage_offsets, request.lengths)
        low, high = self._hull
        if low == high:
            return torch.empty(request.lengths, dtype=payload.dtype)
        values = torch.frombuffer(data[low - self.start : high - self.start], dtype=payload.dtype)
        return values.as_strided(request.lengths, strides(payload.shape))


class Arrivals:
    """Everything that one rank awaits, by segment. Each needs some bytes."""

    def __init__(self, arrivals: Sequence[Arrival]) -> None:
        self._by_file: dict[str, list[Arrival]] = {}
        for one in arrivals:
            self._by_file.setdefault(one.item.file, []).append(one)
        for of_file in self._by_file.values():
            of_file.sort(key=lambda one: one.start)
        self._starts = {file: [one.start for one in of_file] for file, of_file in self._by_file.items()}
        self._stops = {
            file: list(accumulate((one.stop for one in of_file), max)) for file, of_file in self._by_file.items()
        }

    @property
    def nbytes(self) -> int:
        """How many bytes are needed; those that several need count for each."""
        return sum(one.stop - one.start for of_file in self._by_file.values() for one in of_file)

    def extents(self) -> dict[str, list[tuple[int, int]]]:
        """Bytes of each segment that are needed, in order; they may overlap."""
        return {file: [(one.start, one.stop) for one in of_file] for file, of_file in self._by_file.items()}

    def by_file(self) -> Iterable[tuple[str, list[Arrival]]]:
        """All of them, segment by segment."""
        return self._by_file.items()

    def without_straight(self) -> Arrivals:
        """The others, which go through a buffer."""
        return Arrivals([one for of_file in self._by_file.values() for one in of_file if not one.is_straight])

    def place_for(self, file: str, start: int, stop: int) -> memoryview | None:
        """The memory that bytes [start, stop) of a segment belong into, where that is one, and they need nothing else."""
        here = self.within(file, start, stop)
        return here[0].place_for(start, stop) if len(here) == 1 else None

    def take(self, file: str, start: int, stop: int, address: int) -> None:
        """Take bytes [start, stop) of a segment, which lie at `address`, and hand on what is complete."""
        copy([move for one in self.within(file, start, stop) for move in one.moves(start, stop, address)])
        self.have_come(file, start, stop)

    def have_come(self, file: str, start: int, stop: int) -> None:
        """Take down that bytes [start, stop) of a segment are where they belong, and hand on what is complete."""
        for one in self.within(file, start, stop):
            if one.note(start, stop):
                one.hand_on()

    def names(self, file: str, start: int, stop: int) -> str:
        """What takes some of these bytes, for people to read."""
        return ", ".join(one.item.request.storage_index.fqn for one in self.within(file, start, stop)[:8])

    def within(self, file: str, start: int, stop: int) -> list[Arrival]:
        """Those that take some of these bytes."""
        if file not in self._by_file:
            return []
        first, last = bisect_right(self._stops[file], start), bisect_left(self._starts[file], stop)
        return [one for one in self._by_file[file][first:last] if one.stop > start]


def _extent(item: Wanted, values: tuple[int, int] | None, *, by_blocks: bool) -> tuple[int, int]:
    """What to read. values: where those that are asked for lie; None: only the whole item tells."""
    if values is None:
        return item.offset, item.stop
    start, stop = values
    if start == stop:
        return item.offset, item.offset
    if not by_blocks:
        return start, stop
    first, last = (start - item.offset) // BLOCK, -(-(stop - item.offset) // BLOCK)
    return item.offset + first * BLOCK, min(item.offset + last * BLOCK, item.stop)


def check_shape(request: ReadItem, target: torch.Tensor) -> None:
    """Raise DcpMemError where the planner's tensor isn't of the shape that it asked for."""
    if target.size() != request.lengths:
        raise DcpMemError(
            f"{request.dest_index.fqn}: the planner gave a tensor of {target.size()} for {request.lengths}"
        )


def _plain_stream(item: Wanted, data: memoryview) -> Any:
    stream: Any = io.BytesIO(data)
    if item.transforms:
        transforms = getattr(filesystem, "_StorageReaderTransforms", None)
        if transforms is None:
            raise DcpMemError(f"{item.file} was written with stream extensions, which need torch 2.7 or newer")
        stream = transforms().transform_load_stream(item.request, item.transforms, stream)
        stream = io.BytesIO(stream.read(-1))
    return stream
