"""The bytes that `torch.save` puts around a tensor's payload.

An item of a `.distcp` file is a `torch.save` stream: head, payload at a 64-byte aligned offset,
tail. Head and tail depend on dtype and shape alone. So they are made once, from a tensor whose data
is neither allocated nor written (`torch.serialization.skip_data`), and reused for every save.
"""

from __future__ import annotations

import hashlib
import io
import math
import mmap
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import compress

import numpy as np
import torch

from dcp_mem.common.sendable import sendable_as
from dcp_mem.common.value_class import value_class
from dcp_mem.format.layout import Layout, align, layout_of
from dcp_mem.format.torch_names import dtype_named

Spec = tuple[torch.dtype, torch.Size]
"""Dtype and shape of a tensor."""


@value_class
class Specs:
    """Dtypes and shapes of tensors, as columns.

    Two plans of twenty thousand tensors are compared in half a millisecond.
    """

    dtypes: Sequence[torch.dtype]
    shapes: Sequence[torch.Size]

    def __iter__(self) -> Iterator[Spec]:
        return zip(self.dtypes, self.shapes, strict=True)

    def only(self, is_wanted: Sequence[bool]) -> Specs:
        """Return some of them."""
        return Specs(list(compress(self.dtypes, is_wanted)), list(compress(self.shapes, is_wanted)))


sendable_as(
    Specs,
    lambda specs: (list(map(str, specs.dtypes)), list(map(tuple, specs.shapes))),
    lambda names, shapes: Specs(list(map(dtype_named, names)), list(map(torch.Size, shapes))),
)


QUANTISED = frozenset({torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4})
"""Dtypes without a frame: their scales, which are values, are part of the head."""


_LARGE = 1 << 30
_NORESERVE = 0x4000  # MAP_NORESERVE, which older Pythons have no name for


@value_class
class Frame:
    """Head and tail of one item; `payload_nbytes` bytes of payload lie between them."""

    head: bytes
    payload_nbytes: int
    tail: bytes

    @property
    def nbytes(self) -> int:
        """Bytes of the item: head, payload and tail."""
        return len(self.head) + self.payload_nbytes + len(self.tail)


class _SparseSink(io.RawIOBase):
    """Keeps what is written, with its offset; bytes skipped by seeking take no memory."""

    def __init__(self) -> None:
        self._position = 0
        self.end = 0
        self.parts: list[tuple[int, bytes]] = []

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.end}[whence]
        self._position = base + offset
        return self._position

    def write(self, data: bytes | bytearray | memoryview) -> int:  # type: ignore[override]
        piece = bytes(data)
        self.parts.append((self._position, piece))
        self._position += len(piece)
        self.end = max(self.end, self._position)
        return len(piece)


@lru_cache(maxsize=8192)
def frame(dtype: torch.dtype, shape: tuple[int, ...]) -> Frame:
    """Return the frame of a contiguous CPU tensor.

    Takes about 0.3 ms the first time, and nothing afterwards.
    """
    tensor = _without_memory(dtype, shape)
    sink = _SparseSink()
    with torch.serialization.skip_data():
        torch.save(tensor, sink)  # type: ignore[arg-type]
    return _split(sink, tensor.nbytes)


def _without_memory(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor whose data is only an address range; it may exceed the machine's memory."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < _LARGE:
        return torch.empty(shape, dtype=dtype, device="cpu")
    room = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    return torch.frombuffer(room, dtype=torch.uint8).view(dtype).view(shape)


def _split(sink: _SparseSink, payload_nbytes: int) -> Frame:
    head, tail, position = bytearray(), bytearray(), 0
    for offset, piece in sorted(sink.parts):
        if offset < position:
            raise _unknown("rewrote part of its stream")
        if offset > position:
            if tail or offset - position != payload_nbytes:
                raise _unknown("left an unexpected hole")
            tail += piece
        else:
            (tail or head).extend(piece)
        position = offset + len(piece)
    if payload_nbytes and not tail:
        raise _unknown("wrote data under skip_data")
    return Frame(bytes(head), payload_nbytes, bytes(tail))


def _unknown(what: str) -> RuntimeError:
    return RuntimeError(f"torch.save {what}: this torch version needs a look at format/frames.py")


def lay_out(specs: Sequence[Spec]) -> Layout:
    """Return the layout of dense tensors with these dtypes and shapes, in this order.

    `specs`: Dtype and shape of each tensor.
    """
    columns = np.zeros((4, len(specs)), dtype="<i8")
    offset = 0
    for index, (dtype, shape) in enumerate(specs):
        item = frame(dtype, tuple(shape))
        columns[:, index] = offset, item.nbytes, offset + len(item.head), item.payload_nbytes
        offset = align(offset + item.nbytes)
    return layout_of(columns)


def frames_key(specs: Sequence[Spec]) -> str:
    """Return a name for these tensors' heads and tails, made from the specs; "" for none.

    `specs`: Dtype and shape of each tensor, in the order of the segment.
    """
    return hashlib.sha256(repr(specs).encode()).hexdigest()[:16] if specs else ""


def frame_pieces(layout: Layout, specs: Sequence[Spec]) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, bytes) of every head and tail: what a slot must hold besides payloads.

    Zeros follow each tail up to the next item: so equal items make equal bytes, in any slot.

    `specs`: Dtype and shape of each item of the layout.
    """
    for offset, (dtype, shape) in zip(layout.offsets.tolist(), specs, strict=True):
        item = frame(dtype, tuple(shape))
        yield offset, item.head
        start = offset + len(item.head) + item.payload_nbytes
        rest = item.tail.ljust(align(start + len(item.tail)) - start, b"\0")
        if rest:
            yield start, rest
