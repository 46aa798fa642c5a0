"""Repeated measurements, and what is computed from them."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median, quantiles
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


@dataclass(frozen=True, slots=True)
class Sample:
    """Figures of the same thing, in the order in which they were measured."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.values)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Ends of the middle half; of fewer than four values, of all of them."""
        if len(self.values) < 4:
            return min(self.values), max(self.values)
        low, _, high = quantiles(self.values, n=4, method="inclusive")
        return low, high

    def __add__(self, other: Sample) -> Sample:
        return Sample(tuple(a + b for a, b in zip(self.values, other.values, strict=True)))

    def __sub__(self, other: Sample) -> Sample:
        return Sample(tuple(a - b for a, b in zip(self.values, other.values, strict=True)))

    def per(self, other: Sample) -> Sample:
        """Return ratios of neighbours measured in turn, or to the median of `other`."""
        if len(self.values) != len(other.values):
            return Sample(tuple(value / other.median for value in self.values))
        return Sample(tuple(a / b for a, b in zip(self.values, other.values, strict=True)))


def joined(samples: Iterable[Sample]) -> Sample:
    """Return the values of all samples."""
    return Sample(tuple(value for sample in samples for value in sample.values))


def slowest(ranks: Sequence[Sample]) -> Sample:
    """Return the slowest rank of each run: training waits for it."""
    return Sample(tuple(max(values) for values in zip(*(r.values for r in ranks), strict=True)))


def slowest_by_name(ranks: Sequence[Mapping[str, Sample]]) -> dict[str, Sample]:
    """Return the slowest rank of each run, by name."""
    return {name: slowest([rank[name] for rank in ranks]) for name in ranks[0]}


def fastest(samples: Iterable[Sample]) -> Sample:
    """Return the sample with the least median."""
    return min(samples, key=lambda sample: sample.median)
