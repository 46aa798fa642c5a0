"""Bare copies: the least that a save or a restore can cost, with the threads that torch has.

There are several ways to copy, and which is best depends on the tensors and on what else runs:
torch's own copy splits every tensor over the threads, and waits for all of them each time. So a
floor is measured in each way, and the best counts. One more way isn't among these: see `by_loop`.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks.harness.clock import seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    Copy = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None]
    """Copies the second tensors into the first."""

ALIGNMENT = 64
SMALL_BYTES = 128 << 10
"""Tensors below this torch copies on the calling thread alone."""

_memcpy = ctypes.CDLL(None).memcpy
_memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcpy.restype = ctypes.c_void_p


def one_by_one(into: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    """One torch copy per tensor."""
    for destination, source in zip(into, tensors, strict=True):
        destination.copy_(source)


def together(into: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    """One torch call for all tensors."""
    torch._foreach_copy_(list(into), list(tensors))


class Shares:
    """Copies with threads: each has a share of the tensors, or of each tensor if they are few."""

    def __init__(self, threads: int, copy_share: Copy | None = None) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads)
        self._copy_share = copy_share or _copy_share

    def copy(self, into: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
        pairs = zip(self._cut(into), self._cut(tensors), strict=True)
        list(self._pool.map(lambda pair: self._copy_share(*pair), pairs))

    def _cut(self, tensors: Sequence[torch.Tensor]) -> list[Sequence[torch.Tensor]]:
        if len(tensors) < self._threads:
            return [list(pieces) for pieces in zip(*map(self._pieces, tensors), strict=True)]
        length = -(-len(tensors) // self._threads)
        return [tensors[start : start + length] for start in range(0, len(tensors), length)]

    def _pieces(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tensor.tensor_split(self._threads)

    def close(self) -> None:
        self._pool.shutdown()


@contextmanager
def by_loop(threads: int) -> Iterator[Copy]:
    """Return what copies by numpy's loop, a share per thread; see ADR 42.

    It isn't among the ways of `ways_to_copy`, as no other library copies like that. Where it is
    quicker, what dcp_mem does may take less than those. For tensors below 1 MiB it isn't.
    """
    shares = Shares(threads, _loop_over_share)
    try:
        yield shares.copy
    finally:
        shares.close()


@contextmanager
def ways_to_copy(threads: int, tensors: Sequence[torch.Tensor]) -> Iterator[dict[str, Copy]]:
    """Return the ways that make sense for such tensors, by name."""
    shares = Shares(threads)
    ways: dict[str, Copy] = {"one by one": one_by_one, "a share per thread": shares.copy}
    if tensors[0].nbytes < SMALL_BYTES:
        ways["in one call"] = together
    try:
        yield ways
    finally:
        shares.close()


@dataclass(frozen=True, slots=True)
class Span:
    """Where a tensor lies in a file."""

    start: int
    tensor: torch.Tensor


def layout(tensors: Sequence[torch.Tensor]) -> tuple[list[Span], int]:
    """Lay out `tensors` one after the other in a file, whose length comes second."""
    spans, offset = [], 0
    for tensor in tensors:
        spans.append(Span(offset, tensor))
        offset += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return spans, offset


class Mapping:
    """A mapped file with a view of it for each of the tensors that are copied to and from it."""

    def __init__(self, path: Path, tensors: Sequence[torch.Tensor]) -> None:
        spans, length = layout(tensors)
        with path.open("r+b" if path.exists() else "w+b") as file:
            file.truncate(length)
            self._map = mmap.mmap(file.fileno(), length)
        self._tensors = list(tensors)
        self.views = [_view(self._map, span) for span in spans]

    def fill(self, copy: Copy) -> None:
        """Copy the tensors into the file."""
        self.fill_with(copy, self._tensors)

    def fill_with(self, copy: Copy, tensors: Sequence[torch.Tensor]) -> None:
        """Copy others of the same shapes into the file."""
        copy(self.views, tensors)

    def empty_out(self, copy: Copy) -> None:
        """Copy the file into the tensors."""
        copy(self._tensors, self.views)

    def close(self) -> None:
        self.views.clear()
        self._map.close()


@contextmanager
def warm_mapping(path: Path, tensors: Sequence[torch.Tensor]) -> Iterator[Mapping]:
    """Make a mapping with all pages in place; the file is deleted at the end."""
    mapping = Mapping(path, tensors)
    try:
        mapping.fill(one_by_one)
        yield mapping
    finally:
        mapping.close()
        path.unlink()


def first_touch_seconds(path: Path, tensors: Sequence[torch.Tensor], copy: Copy) -> float:
    """Return how long it takes to make a new file, map it and copy `tensors` into it."""
    took, mapping = _mapped_and(path, tensors, lambda mapping: mapping.fill(copy))
    mapping.close()
    path.unlink()
    return took


def fresh_mapping_seconds(path: Path, tensors: Sequence[torch.Tensor], copy: Copy) -> float:
    """Return how long it takes to map a file in memory and to copy it into `tensors`."""
    took, mapping = _mapped_and(path, tensors, lambda mapping: mapping.empty_out(copy))
    mapping.close()
    return took


class Preads:
    """Reads of a file straight into tensors, a share of them per thread."""

    def __init__(self, path: Path, tensors: Sequence[torch.Tensor], threads: int) -> None:
        self._file = path.open("rb", buffering=0)
        self._pool = ThreadPoolExecutor(threads)
        spans, _ = layout(tensors)
        parts = [(span.start, _bytes_of(span.tensor)) for span in spans]
        self._shares = [parts[index::threads] for index in range(threads)]

    def read(self) -> None:
        list(self._pool.map(self._read_share, self._shares))

    def _read_share(self, share: list[tuple[int, memoryview]]) -> None:
        for start, view in share:
            done = 0
            while done < len(view):
                done += os.preadv(self._file.fileno(), [view[done:]], start + done)

    def close(self) -> None:
        self._pool.shutdown()
        self._file.close()


def touch_memory(path: Path, size: int) -> None:
    """Use `size` bytes of tmpfs once and give them back.

    In a virtual machine a page that the guest has never used costs the host a fault as well, and
    the first measurement would pay for it.
    """
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size)
    path.unlink()


def _mapped_and(
    path: Path, tensors: Sequence[torch.Tensor], use: Callable[[Mapping], None]
) -> tuple[float, Mapping]:
    """Map and use a file; return the seconds and the mapping, so that unmapping isn't counted."""
    mappings: list[Mapping] = []

    def work() -> None:
        mappings.append(Mapping(path, tensors))
        use(mappings[0])

    return seconds(work), mappings[0]


def _copy_share(into: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    if tensors[0].nbytes < SMALL_BYTES:
        together(into, tensors)
        return
    for destination, source in zip(into, tensors, strict=True):
        _memcpy(destination.data_ptr(), source.data_ptr(), source.nbytes)


def _loop_over_share(into: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    for destination, source in zip(into, tensors, strict=True):
        np.positive(_array_of(source), out=_array_of(destination))


def _array_of(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.int8]]:
    return np.frombuffer(_bytes_of(tensor), np.int8)


def _view(buffer: mmap.mmap, span: Span) -> torch.Tensor:
    tensor = span.tensor
    flat = torch.frombuffer(buffer, dtype=tensor.dtype, count=tensor.numel(), offset=span.start)
    return flat.view(tensor.shape)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    array = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return memoryview(array).cast("B")
