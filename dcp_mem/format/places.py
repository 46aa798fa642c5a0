"""Where the items of a catalog's rows lie in their segments: in its layout for all saves, or in the tail of each save."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dcp_mem.errors import ManifestInvalid
from dcp_mem.format.catalog import Catalog, Extent, Ints


@dataclass(frozen=True, eq=False)
class LayoutItems:
    """The items of all of a catalog's layouts, one below the other."""

    catalog: Catalog

    @cached_property
    def columns(self) -> Ints:
        """Offset, length, and offset and bytes of the payload, of each; and one more item, for those that lie in tails."""
        layouts = self.catalog.layouts
        columns = [np.stack([one.offsets, one.lengths, one.payload_offsets, one.payload_nbytes]) for one in layouts]
        return np.concatenate([*columns, np.array([[0], [0], [-1], [0]])], axis=1)

    @cached_property
    def _starts(self) -> Ints:
        """Where each layout begins; and where the last one ends."""
        return np.append(0, np.cumsum(np.fromiter(map(len, self.catalog.layouts), np.int64)))

    def of(self, rows: Ints) -> Ints:
        """Of each of these rows, its number in `columns`; -1, the last one, where it lies in a tail."""
        layout, number = self.catalog.layout_of[self.catalog.writer[rows]], self.catalog.number[rows]
        start = self._starts[layout]
        return np.where(number < self._starts[layout + 1] - start, start + number, -1)

    def behind(self, rows: Ints) -> Ints:
        """Of each of these rows, its number in its writer's tail; negative where it lies in a layout."""
        layout = self.catalog.layout_of[self.catalog.writer[rows]]
        numbers: Ints = self.catalog.number[rows] - np.diff(self._starts)[layout]
        return numbers


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Rows that have been written, by number. offsets, lengths: in bytes, of the rows in a layout."""

    rows: Ints
    offsets: Ints
    lengths: Ints
    tail: TailPlaces


@dataclass(frozen=True, slots=True, eq=False)
class TailPlaces:
    """Rows whose items lie behind their segment's layout. ranks: who wrote each; numbers: counted from the tail's start."""

    rows: Ints
    ranks: Ints
    numbers: Ints

    def extents(self, tails: Mapping[int, Sequence[Extent]]) -> Ints:
        """Offset and length of each, as int64[rows, 2]. tails: by rank. Raises ManifestInvalid where one is missing."""
        ranks, of_rank = np.unique(self.ranks, return_inverse=True)
        found = [np.array(tails.get(rank, ()), np.int64).reshape(-1, 2) for rank in ranks.tolist()]
        counts = np.fromiter(map(len, found), np.int64, len(found))
        if (self.numbers >= counts[of_rank]).any():
            raise ManifestInvalid("the manifest lacks items that the catalog has: they aren't of one save")
        starts = np.cumsum(counts) - counts
        extents: Ints = np.concatenate([np.zeros((0, 2), np.int64), *found])[starts[of_rank] + self.numbers]
        return extents


def places_of(catalog: Catalog) -> Places:
    """Where each written row lies, as far as it is the same in all saves."""
    items, written = LayoutItems(catalog), np.flatnonzero(catalog.writer >= 0)
    found = items.of(written)
    rows, beyond = written[found >= 0], written[found < 0]
    offsets, lengths, _, _ = items.columns[:, found[found >= 0]]
    tail = TailPlaces(beyond, catalog.ranks[catalog.writer[beyond]], items.behind(beyond))
    return Places(rows, offsets, lengths, tail)
