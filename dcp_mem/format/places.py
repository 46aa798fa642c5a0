"""Where the items of a catalog's rows lie in their segments: in its layout for all saves, or in the tail of each save."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dcp_mem.errors import ManifestInvalid
from dcp_mem.format.catalog import Catalog, Extent, Ints


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
    counts = np.fromiter(map(len, catalog.layouts), np.int64, len(catalog.layouts))
    starts = np.cumsum(counts) - counts
    written = np.flatnonzero(catalog.writer >= 0)
    layout, number = catalog.layout_of[catalog.writer[written]], catalog.number[written]
    is_fixed = number < counts[layout]
    rows, beyond = written[is_fixed], written[~is_fixed]
    items = starts[layout[is_fixed]] + number[is_fixed]
    offsets = [layout.offsets for layout in catalog.layouts]
    lengths = [layout.lengths for layout in catalog.layouts]
    return Places(
        rows,
        np.concatenate([*offsets, np.zeros(0, np.int64)])[items],
        np.concatenate([*lengths, np.zeros(0, np.int64)])[items],
        TailPlaces(beyond, catalog.ranks[catalog.writer[beyond]], (number - counts[layout])[~is_fixed]),
    )
