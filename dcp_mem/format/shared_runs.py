"""Runs of integers that occur many times: each is stored once, as a progression where it is one.

In a catalog of many ranks, the rows of most entries have the same offsets, extents and writers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, repeat

import numpy as np

from dcp_mem.format.column_file import Ints, in_32_bits

_COLUMNS = ("first", "step", "length", "values")
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


@dataclass(frozen=True, eq=False)
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
        return {f"{name}_{column}": getattr(self, column) for column in _COLUMNS}

    def at(self, numbers: Ints, index: Ints) -> Ints:
        """Return one integer of each of some runs."""
        first = self.first[numbers]
        found: Ints = first + self.step[numbers] * index
        if len(self.values):
            is_listed = self.length[numbers] < 0
            found[is_listed] = self.values[first[is_listed] + index[is_listed]]
        return found

    def bounds(self) -> Ints:
        """Return the least and the largest integer of each run: int64[2, runs]."""
        is_listed = self.length < 0
        ends = self.first + self.step * np.maximum(self.length - 1, 0)
        found = np.sort(np.where(is_listed, 0, np.stack([self.first, ends])), axis=0)
        for number in np.flatnonzero(is_listed).tolist():
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
    runs = Runs(*(columns[f"{name}_{column}"] for column in _COLUMNS))
    if {runs.first.ndim, runs.values.ndim} != {1} or (
        not runs.first.shape == runs.step.shape == runs.length.shape
    ):
        raise ValueError("runs of other columns")
    is_listed = runs.length < 0
    first, step, length = (one.astype(np.float64) for one in (runs.first, runs.step, runs.length))
    last = np.where(is_listed, 0.0, first + step * (length - 1.0))
    if any((np.abs(one) > _MOST).any() for one in (first, length, last)):
        raise ValueError("runs of too large numbers")
    if (is_listed & ((first < 0) | (first - length > len(runs.values)))).any():
        raise ValueError("runs of numbers that aren't listed")
    return runs
