"""Which saved chunks hold what a load needs: an interval index over a catalog's rows.

The rows of an entry lie in the order of their offsets, so they are sorted by the first dimension in
which any two of them differ. In that dimension, bisection finds the range of rows that may share an
element with a wanted box; only these are compared in all dimensions. Everything is done for all
boxes at once.
"""

from __future__ import annotations

import numpy as np

from dcp_mem.common.value_class import value_class
from dcp_mem.format.catalog import Ints, counted, portions

_AT_ONCE = 1 << 20
"""Candidates that are compared at once."""


@value_class(eq=False)
class Boxes:
    """Boxes of elements of tensors, one row each."""

    entry: Ints  # of each: the tensor's entry of the catalog
    offset: Ints  # of each: int64[boxes, width], padded with 0
    extent: Ints  # of each: int64[boxes, width], padded with 1

    def __len__(self) -> int:
        return len(self.entry)


@value_class(eq=False)
class Overlaps:
    """The elements that a wanted box and a saved chunk have in common, one row each."""

    wanted: Ints
    row: Ints
    offset: Ints
    extent: Ints


class ChunkIndex:
    """Finds the rows of a catalog that share elements with a box.

    `offset`: the catalog's column of this name: int64[rows, width]. `extent`: the catalog's column
    of this name: int64[rows, width]. `first`: the first row of each entry; at the end, the number
    of rows.
    """

    def __init__(self, offset: Ints, extent: Ints, first: Ints) -> None:
        self.offset, self.extent, self._first = offset, extent, first
        self._along = _first_difference(offset, first)
        entry = np.repeat(np.arange(len(first) - 1), np.diff(first))
        rows, along = np.arange(len(entry)), self._along[entry]
        self._start = offset[rows, along]
        self._reach = _running_max(self._start + extent[rows, along], entry)

    def find(self, wanted: Boxes) -> Overlaps:
        """Return every overlap of a wanted box and a row, by wanted box and then by row."""
        number = np.arange(len(wanted))
        along = self._along[wanted.entry]
        start = wanted.offset[number, along]
        stop = start + wanted.extent[number, along]
        first, end = self._first[wanted.entry], self._first[wanted.entry + 1]
        low = _bisect(self._reach, first, end, start + 1)
        counts = np.maximum(_bisect(self._start, low, end, stop) - low, 0)
        parts = [
            self._compare(wanted, number[part], low[part], counts[part])
            for part in portions(counts, _AT_ONCE)
        ]
        return Overlaps(*map(np.concatenate, zip(*parts, strict=True)))

    def _compare(
        self, wanted: Boxes, number: Ints, low: Ints, counts: Ints
    ) -> tuple[Ints, Ints, Ints, Ints]:
        """Return the overlaps of these boxes with the rows from `low` to `low + counts` of each."""
        box = np.repeat(number, counts)
        row = counted(counts) + np.repeat(low, counts)
        saved_offset, saved_extent = self.offset[row], self.extent[row]
        offset = np.maximum(wanted.offset[box], saved_offset)
        extent = (
            np.minimum(wanted.offset[box] + wanted.extent[box], saved_offset + saved_extent)
            - offset
        )
        keep = (extent > 0).all(axis=1)
        return box[keep], row[keep], offset[keep], extent[keep]


def _first_difference(offset: Ints, first: Ints) -> Ints:
    """Return the first dimension in which offsets of each entry's rows differ; 0 if none do."""
    if not len(offset) or not len(first) - 1:
        return np.zeros(len(first) - 1, np.int64)
    has_rows = np.flatnonzero(np.diff(first))
    starts = first[has_rows]
    differs = np.maximum.reduceat(offset, starts) != np.minimum.reduceat(offset, starts)
    along = np.zeros(len(first) - 1, np.int64)
    along[has_rows] = differs.argmax(axis=1)
    return along


def _running_max(values: Ints, entry: Ints) -> Ints:
    """Return the largest value so far, within each entry."""
    order = np.argsort(values, kind="stable")
    rank = np.empty(len(values), np.int64)
    rank[order] = np.arange(len(values))
    # Of ranks and not of values: values could overflow.
    start = entry * len(values)
    highest = np.maximum.accumulate(rank + start) - start
    result: Ints = values[order[highest]]
    return result


def _bisect(values: Ints, low: Ints, high: Ints, target: Ints) -> Ints:
    """Return the first index in [low, high) whose value is at least the target; high if none is."""
    low, high = low.copy(), high.copy()
    while (open_ := np.flatnonzero(low < high)).size:
        middle = (low[open_] + high[open_]) // 2
        below = values[middle] < target[open_]
        low[open_[below]] = middle[below] + 1
        high[open_[~below]] = middle[~below]
    return low
