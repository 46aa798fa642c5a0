"""Reads of a segment that are held against its checksums on their way.

Bytes are read a few at a time, and summed up while the processor's cache may have them: that costs
a fraction of a second pass over memory. Fewer at a time would cost more than they gain, since
threads would hand over the interpreter's lock more often. So neighbouring tensors that are small
share a read.
"""

from __future__ import annotations

import ctypes
import threading
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from dcp_mem.format.checksums import MOST_RUN, Blocks, Crcs, checksum, runs_of
from dcp_mem.memory.copying import read_threads, work_off
from dcp_mem.memory.views import fill, view_of

Columns = npt.NDArray[np.int64]

# Keeps the interpreter's lock: a move is of a block at most, and of far less mostly.
_memmove = ctypes.PyDLL(None).memmove
_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove.restype = None
_MOST_RUNS = 16
"""Runs of blocks that a thread takes at a time, at most."""
_SHARES_EACH = 4
"""So many times each thread has something to take."""
_AT_ONCE = 512 << 10
"""Bytes that are read with one system call and then summed up. The processor's cache holds them."""
_LONGEST_STRETCH = 4 << 20
"""Bytes of neighbouring large blocks that are looked at together."""
_MOST_BETWEEN = 4 << 10
"""Bytes between blocks that are rather read than left out; the frame of a tensor has fewer."""
_Piece = tuple[int, memoryview]
"""Where bytes begin in a segment, and where they are read to."""


class CheckedReader:
    """Reads parts of a segment straight into memory, and sums up the blocks that they lie in."""

    def __init__(self, descriptor: int, blocks: Blocks, known: Crcs) -> None:
        self._descriptor, self._blocks = descriptor, blocks
        self._known: list[int] = known.tolist()  # lists: they are looked at block by block
        self._starts: list[int] = blocks.offsets.tolist()
        self._stops: list[int] = (blocks.offsets + blocks.lengths).tolist()
        self._scratch = threading.local()

    def read(self, address: Columns, offset: Columns, nbytes: Columns) -> tuple[int, int] | None:
        """Read parts straight into memory, in several threads.

        `offset`: where each part begins in the segment, ascending. Returns number and checksum of a
        block that is damaged; None where all are whole.
        """
        is_any = nbytes > 0
        parts = _Parts(address[is_any], offset[is_any], nbytes[is_any])
        runs = runs_of(self._blocks, parts.numbers_in(self._blocks))
        damaged: list[tuple[int, int]] = []

        def read_runs(start: int) -> None:
            for stretch in self._stretches(runs[start : start + runs_each]):
                damaged.extend(self._read_stretch(stretch, parts))

        threads = read_threads()
        runs_each = max(1, min(_MOST_RUNS, len(runs) // (threads * _SHARES_EACH)))
        work_off(range(0, len(runs), runs_each), read_runs, threads)
        return min(damaged, default=None)

    def blocks_of(self, offset: Columns, nbytes: Columns) -> list[tuple[int, int]]:
        """Return first byte and end of each block that has some of these parts, in order.

        `offset`: where each part begins in the segment, ascending.
        """
        numbers = _Parts(offset, offset, nbytes).numbers_in(self._blocks).tolist()
        return [(self._starts[number], self._stops[number]) for number in numbers]

    def read_blocks(
        self, blocks: Sequence[tuple[int, int]], address: int
    ) -> tuple[int, int] | None:
        """Read neighbouring blocks, and what lies between them, in this thread.

        Returns number and checksum of a block that is damaged; None where all are whole.
        """
        low, high = blocks[0][0], blocks[-1][1]
        data = view_of(address, high - low)
        fill(self._descriptor, [data], low)
        for start, stop in blocks:
            number = bisect_right(self._starts, start) - 1
            found = checksum(data[start - low : stop - low])
            if found != self._known[number]:
                return number, found
        return None

    def _stretches(self, runs: Sequence[tuple[int, int]]) -> Iterator[Sequence[tuple[int, int]]]:
        """Yield runs, with neighbours together that are one large block each."""
        stretch: list[tuple[int, int]] = []
        for run in runs:
            if stretch and not self._belongs_to(stretch, run):
                yield stretch
                stretch = []
            stretch.append(run)
        if stretch:
            yield stretch

    def _belongs_to(self, stretch: Sequence[tuple[int, int]], run: tuple[int, int]) -> bool:
        before, number = stretch[-1][1], run[0]
        are_single = stretch[-1][0] == before and run[1] == number
        return (
            are_single
            and self._starts[number] - self._stops[before] <= _MOST_BETWEEN
            and self._stops[number] - self._starts[stretch[0][0]] <= _LONGEST_STRETCH
        )

    def _read_stretch(
        self, stretch: Sequence[tuple[int, int]], parts: _Parts
    ) -> Iterator[tuple[int, int]]:
        if stretch[0][0] != stretch[0][1]:
            yield from self._read_run(*stretch[0], parts)
            return
        low, high = self._starts[stretch[0][0]], self._stops[stretch[-1][1]]
        inside = parts.within(low, high)
        pieces = self._pieces(stretch, inside) if len(inside) <= len(stretch) else None
        if pieces is None:
            for number, _ in stretch:
                yield from self._read_run(number, number, parts)
            return
        blocks = iter([number for number, _ in stretch])
        number, found = next(blocks), 0
        for read in _reads(pieces):
            fill(self._descriptor, [data for _, data in read], read[0][0])
            for offset, data in read:
                if offset < self._starts[number]:
                    continue  # it lies between two blocks
                found = checksum(data, found)
                if offset + len(data) == self._stops[number]:
                    if found != self._known[number]:
                        yield number, found
                    number, found = next(blocks, number), 0

    def _pieces(
        self, stretch: Sequence[tuple[int, int]], inside: Sequence[tuple[int, int, int]]
    ) -> list[_Piece] | None:
        """Return memory for a stretch's bytes: where they are wanted, else scratch memory.

        Returns None where bytes are wanted in two places, or too many of them nowhere. No piece is
        longer than `_AT_ONCE`, or belongs to two blocks.
        """
        _, scratch = self._scratch_memory()
        numbers = [number for number, _ in stretch]
        bounds = sorted({at[number] for number in numbers for at in (self._starts, self._stops)})
        end = bounds[-1]
        pieces: list[_Piece] = []
        at, used = bounds[0], 0
        for address, start, stop in [*inside, (0, end, end)]:
            if start < at or used + start - at > len(scratch):
                return None
            if start > at:
                pieces += _cut(at, scratch[used : used + start - at], bounds)
            if stop > start:
                pieces += _cut(start, view_of(address, stop - start), bounds)
            at, used = stop, used + start - at
        return pieces

    def _read_run(self, first: int, last: int, parts: _Parts) -> Iterator[tuple[int, int]]:
        low, high, here = self._starts[first], self._stops[last], slice(first, last + 1)
        scratch, data = self._scratch_memory()
        fill(self._descriptor, [data[: high - low]], low)
        start = self._blocks.offsets[here] - low
        places = map(slice, start.tolist(), (start + self._blocks.lengths[here]).tolist())
        # Loops in C, as there may be a hundred small blocks in a run, and as many moves.
        sums, known = list(map(checksum, map(data.__getitem__, places))), self._known[here]
        if sums != known:
            yield next(
                (number, found)
                for number, (found, one) in enumerate(zip(sums, known, strict=True), first)
                if found != one
            )
        deque(map(_memmove, *parts.moves(low, high, scratch)), maxlen=0)

    def _scratch_memory(self) -> tuple[int, memoryview]:
        """Return this thread's scratch memory: its address, and its bytes."""
        memory = getattr(self._scratch, "memory", None)
        if memory is None:
            memory = self._scratch.memory = np.empty(MOST_RUN, np.uint8)
        return memory.ctypes.data, memory.data


def _cut(offset: int, data: memoryview, bounds: Sequence[int]) -> Iterator[_Piece]:
    """Cut memory for the bytes from `offset` on at bounds, and into pieces of `_AT_ONCE` bytes."""
    start, end = offset, offset + len(data)
    number = bisect_right(bounds, start)
    while start < end:
        stop = min(start + _AT_ONCE, end)
        if number < len(bounds) and bounds[number] <= stop:
            stop = bounds[number]
            number += 1
        yield start, data[start - offset : stop - offset]
        start = stop


def _reads(pieces: Sequence[_Piece]) -> Iterator[Sequence[_Piece]]:
    """Yield neighbouring pieces together, up to `_AT_ONCE` bytes: one system call reads them."""
    read: list[_Piece] = []
    nbytes = 0
    for piece in pieces:
        if read and nbytes + len(piece[1]) > _AT_ONCE:
            yield read
            read, nbytes = [], 0
        read.append(piece)
        nbytes += len(piece[1])
    yield read


class _Parts:
    """The parts of a segment that are wanted, ordered by where they begin."""

    def __init__(self, address: Columns, offset: Columns, nbytes: Columns) -> None:
        self._offset, self._nbytes, self._end = offset, nbytes, offset + nbytes
        self._starts: list[int] = offset.tolist()
        self._stops: list[int] = self._end.tolist()
        self._shift = address - offset
        self._shifts: list[int] = self._shift.tolist()
        # Parts may overlap: several tensors may be loaded from the same bytes.
        self._reached = list(accumulate(self._stops, max))

    def numbers_in(self, blocks: Blocks) -> Columns:
        """Return the numbers of the blocks that have the bytes, ascending. Raises EOFError."""
        ends = blocks.offsets + blocks.lengths
        first = np.searchsorted(ends, self._offset, "right")
        last = np.searchsorted(blocks.offsets, self._end, "left")
        counts = last - first
        # What lies between items has no checksum; a wanted byte there isn't what was saved.
        gaps = np.cumsum(np.append(0, blocks.offsets[1:] != ends[:-1]))
        if (
            (counts <= 0).any()
            or (blocks.offsets[first] > self._offset).any()
            or (ends[last - 1] < self._end).any()
            or (gaps[first] != gaps[last - 1]).any()
        ):
            raise EOFError("its checksums are those of other items")
        is_wanted = np.zeros(len(ends), bool)
        is_wanted[np.arange(counts.sum()) + np.repeat(last - np.cumsum(counts), counts)] = True
        return np.flatnonzero(is_wanted & (blocks.lengths > 0))

    def within(self, low: int, high: int) -> list[tuple[int, int, int]]:
        """Return (address, first byte, end) of what is wanted of the bytes [low, high)."""
        first, last = bisect_right(self._reached, low), bisect_left(self._starts, high)
        return [
            (max(start, low) + shift, max(start, low), min(stop, high))
            for start, stop, shift in zip(
                self._starts[first:last],
                self._stops[first:last],
                self._shifts[first:last],
                strict=True,
            )
            if stop > low
        ]

    def moves(self, low: int, high: int, source: int) -> Iterator[list[int]]:
        """Return what is wanted of [low, high), which lie at `source`, as columns of moves.

        For many parts: columns are quicker then than `within` is.
        """
        first, last = bisect_right(self._reached, low), bisect_left(self._starts, high)
        starts, nbytes = self._offset[first:last], self._nbytes[first:last]
        if first < last and (self._starts[first] < low or max(self._stops[first:last]) > high):
            starts = np.maximum(starts, low)
            nbytes = np.maximum(np.minimum(self._end[first:last], high) - starts, 0)
        columns = starts + self._shift[first:last], starts + (source - low), nbytes
        return map(np.ndarray.tolist, columns)
