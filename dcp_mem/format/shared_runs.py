"""Runs of integers that occur many times: each is stored once, as a progression where it is one.

In a catalog of many ranks, the rows of most entries have the same offsets, extents and writers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cached_property
from itertools import chain, repeat

import numpy as np

from dcp_mem.common.value_class import value_class
from dcp_mem.format.column_file import Ints, in_32_bits, matrix

_MOST = float(1 << 62)
"""No number of a run is larger: the sum of two of them doesn't overflow."""


class RunPool:
    """Collects distinct runs."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int, int], int] = {}  # first, step and length, as in `Runs`
        self._starts: dict[bytes, int] = {}
        self._values: list[Ints] = []
        self._listed = 0

    def add(self, runs: Ints) -> Ints:
        """Return the numbers of some runs, int64[runs, length]; equal runs have the same."""
        count, length = runs.shape
        if count > 1 and (runs == runs[0]).all():
            return np.repeat(self.add(runs[:1]), count)
        first, step = np.zeros((2, count), np.int64)
        if length:
            first = runs[:, 0]
        if length > 1:
            step = runs[:, 1] - first
        keys = list(zip(first.tolist(), step.tolist(), repeat(length)))
        for row in np.flatnonzero((np.diff(runs, axis=1) != step[:, None]).any(axis=1)).tolist():
            keys[row] = (self._start(runs[row]), 0, -length)
        numbers = self._numbers
        return np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)

    def _start(self, run: Ints) -> int:
        """Return where a run that is no progression begins among all that are listed."""
        # A digest, not the bytes: runs of plans that aren't regular are many and long.
        digest = hashlib.blake2b(np.ascontiguousarray(run, np.int64).data).digest()
        start = self._starts.setdefault(digest, self._listed)
        if start == self._listed:
            self._values.append(in_32_bits(run))
            self._listed += len(run)
        return start

    def add_rows(self, column: Ints, first: Ints) -> Ints:
        """Return the numbers of the runs of a column that begin at `first`, to its last one."""
        counts = np.diff(first)
        if len(counts) and (counts == counts[0]).all():
            return self.add(column[first[0] :].reshape(len(counts), counts[0]))
        numbers = np.empty(len(counts), np.int64)
        for count in dict.fromkeys(counts.tolist()):
            of_count = np.flatnonzero(counts == count)
            numbers[of_count] = self.add(column[first[of_count, None] + np.arange(count)])
        return numbers

    def add_counted(self, column: Ints, first: Ints) -> tuple[Ints, Ints]:
        """Return the first integers of these runs, and the numbers of the runs counted from it."""
        counts = np.diff(first)
        firsts = np.full(len(counts), 0)
        firsts[counts > 0] = column[first[:-1][counts > 0]]
        return firsts, self.add_rows(column - np.repeat(firsts, counts), first)

    def runs(self) -> Runs:
        """Return all runs that were added."""
        found = np.fromiter(chain.from_iterable(self._numbers), np.int64, 3 * len(self._numbers))
        first, step, length = found.reshape(-1, 3).T
        values = np.concatenate([np.zeros(0, np.int32), *self._values])
        return Runs(first, step, length, values)


@value_class(eq=False, frozen=True, slots=False)
class Runs:
    """Runs by number. One of negative length is listed: its integers are values[first:]."""

    first: Ints
    step: Ints
    length: Ints
    values: Ints

    @cached_property
    def lengths(self) -> Ints:
        """Of each run, how many integers it has."""
        return np.abs(self.length)

    def columns(self, name: str) -> dict[str, Ints]:
        """Return the columns that `read_runs` reads."""
        return {name: np.stack([self.first, self.step, self.length]), f"{name}_values": self.values}

    def at(self, numbers: Ints, index: Ints) -> Ints:
        """Return one integer of each of some runs; the two are broadcast to one shape."""
        first = self.first[numbers]
        found: Ints = first + self.step[numbers] * index
        if len(self.values):
            first, index = np.broadcast_arrays(first, index)
            is_listed = np.broadcast_to(self.length[numbers] < 0, found.shape)
            found[is_listed] = self.values[first[is_listed] + index[is_listed]]
        return found

    @cached_property
    def bounds(self) -> Ints:
        """The least and the largest integer of each run: int64[2, runs]."""
        last = self.first + self.step * np.maximum(self.length - 1, 0)
        found = np.stack([np.minimum(self.first, last), np.maximum(self.first, last)])
        for number in np.flatnonzero(self.length < 0).tolist():
            run = self.run(number)
            found[:, number] = run.min(), run.max()
        return found

    def run(self, number: int) -> Ints:
        """Return a run."""
        first, length = int(self.first[number]), int(self.length[number])
        if length < 0:
            return self.values[first : first - length]
        return first + int(self.step[number]) * np.arange(length)


def read_runs(columns: Mapping[str, Ints], name: str) -> Runs:
    """Return the runs that were written down.

    Raises KeyError, ValueError.
    """
    values = columns[f"{name}_values"]
    run = matrix(columns, name, 3)
    first, step, length = run.astype(np.float64)
    bounds = np.abs([first, length, first + step * np.maximum(length - 1.0, 0.0)])
    if values.ndim != 1 or bounds.max(initial=0.0) > _MOST:
        raise ValueError("runs of too large numbers")
    if ((length < 0.0) & ((first < 0.0) | (first - length > len(values)))).any():
        raise ValueError("runs of numbers that aren't listed")
    return Runs(run[0], run[1], run[2], values)
