"""Runs of integers that occur many times: each is stored once, as a progression where it is one.

In a catalog of many ranks, the rows of most entries have the same offsets, extents and writers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np

from dcp_mem.format.column_file import Ints, in_32_bits

_COLUMNS = ("first", "step", "length", "is_listed", "values")
_MOST = float(1 << 62)
"""No number of a run is larger: the sum of two of them doesn't overflow."""


class RunPool:
    """Collects distinct runs."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int, int] | bytes, int] = {}
        self._runs: list[tuple[int, int, int, int]] = []
        self._values: list[Ints] = []
        self._listed = 0

    def add(self, run: Ints) -> int:
        """Return the number of a run; equal runs have the same."""
        length, first = len(run), int(run[0])
        step = int(run[1]) - first if length > 1 else 0
        # The last number is looked at first: mostly that tells.
        if int(run[-1]) == first + step * (length - 1) and (np.diff(run) == step).all():
            return self._number((first, step, length), (first, step, length, 0))
        before = len(self._runs)
        # A digest, not the bytes: runs of plans that aren't regular are many and long.
        digest = hashlib.blake2b(np.ascontiguousarray(run, np.int64).data).digest()
        number = self._number(digest, (self._listed, 0, length, 1))
        if number == before:
            self._values.append(in_32_bits(run))
            self._listed += length
        return number

    def _number(self, key: tuple[int, int, int] | bytes, run: tuple[int, int, int, int]) -> int:
        number = self._known.setdefault(key, len(self._runs))
        if number == len(self._runs):
            self._runs.append(run)
        return number

    def columns(self, name: str) -> dict[str, Ints]:
        """Return the columns that `Runs` reads."""
        runs = np.array(self._runs, np.int64).reshape(-1, 4)
        values = np.concatenate([np.zeros(0, np.int32), *self._values])
        found = (*(np.ascontiguousarray(column) for column in runs.T), values)
        return {f"{name}_{column}": one for column, one in zip(_COLUMNS, found, strict=True)}


class Runs:
    """Runs that were written down.

    Raises KeyError, ValueError.
    """

    def __init__(self, columns: Mapping[str, Ints], name: str) -> None:
        found = [columns[f"{name}_{column}"] for column in _COLUMNS]
        self._first, self._step, self.lengths, self._is_listed, self._values = found
        if any(one.ndim != 1 for one in found) or len({one.shape for one in found[:4]}) != 1:
            raise ValueError("runs of other columns")
        is_listed = self._is_listed != 0
        first, step = self._first.astype(np.float64), self._step.astype(np.float64)
        last = np.where(is_listed, 0.0, first + step * (self.lengths - 1.0))
        if (
            (self.lengths < 1).any()
            or (np.abs(first) > _MOST).any()
            or (np.abs(last) > _MOST).any()
        ):
            raise ValueError("runs of no length, or of too large numbers")
        stops = first + self.lengths
        if (is_listed & ((first < 0) | (stops > len(self._values)))).any():
            raise ValueError("runs of numbers that aren't listed")

    def joined(self, numbers: Ints) -> Ints:
        """Return some runs one after the other; the caller has added up their lengths."""
        known = {number: self.run(number) for number in np.unique(numbers).tolist()}
        nothing = np.zeros(0, np.int64)
        return np.concatenate([nothing, *map(known.__getitem__, numbers.tolist())])

    def at(self, numbers: Ints, index: Ints) -> Ints:
        """Return one integer of each of some runs."""
        first, is_listed = self._first[numbers], self._is_listed[numbers] != 0
        found: Ints = first + self._step[numbers] * index
        found[is_listed] = self._values[first[is_listed] + index[is_listed]]
        return found

    def bounds(self, numbers: Ints) -> Ints:
        """Return the least and the largest integer of each of some runs: int64[2, runs].

        `numbers`: of the runs, in range; the caller has added up their lengths.
        """
        ends = self.at(numbers, self.lengths[numbers] - 1)
        found = np.stack([self._first[numbers], ends])
        found.sort(axis=0)
        for place in np.flatnonzero(self._is_listed[numbers] != 0).tolist():
            run = self.run(int(numbers[place]))
            found[:, place] = run.min(), run.max()
        return found

    def run(self, number: int) -> Ints:
        """Return a run."""
        first, length = int(self._first[number]), int(self.lengths[number])
        if self._is_listed[number]:
            return self._values[first : first + length]
        return first + int(self._step[number]) * np.arange(length)
