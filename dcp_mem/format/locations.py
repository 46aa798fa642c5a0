"""The locations of a catalog's items in their segments.

Items of the layout lie in the same place in all saves; items of the tail differ from save to save.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dcp_mem.common.value_class import value_class
from dcp_mem.errors import ManifestInvalid
from dcp_mem.format.catalog import Catalog, Ints, Tails
from dcp_mem.format.column_file import distinct_rows

_LACKING = "the manifest lacks items that the catalog has: they aren't of one save"


@dataclass(frozen=True, eq=False)
class LayoutItems:
    """The items of all of a catalog's layouts, one layout below the other."""

    catalog: Catalog

    @cached_property
    def columns(self) -> Ints:
        """Offset, length, payload offset and payload bytes of each item: int64[4, items + 1].

        The last column stands for items that lie in a tail. In it, the payload offset is -1.
        """
        layouts = self.catalog.layouts
        columns = [
            np.stack([one.offsets, one.lengths, one.payload_offsets, one.payload_nbytes])
            for one in layouts
        ]
        return np.concatenate([*columns, np.array([[0], [0], [-1], [0]])], axis=1)

    @cached_property
    def _starts(self) -> Ints:
        """The index in `columns` at which each layout begins, and the end of the last one."""
        return np.append(0, np.cumsum(np.fromiter(map(len, self.catalog.layouts), np.int64)))

    def find(self, writer: Ints, number: Ints) -> Ints:
        """Return each item's index in `columns`; -1, the last one, for tail items."""
        layout = self.catalog.layout_of[writer]
        start = self._starts[layout]
        return np.where(number < self._starts[layout + 1] - start, start + number, -1)

    def beyond(self, writer: Ints, number: Ints) -> Ints:
        """Return each item's index in its writer's tail; negative for items of a layout."""
        layout = self.catalog.layout_of[writer]
        numbers: Ints = number - np.diff(self._starts)[layout]
        return numbers


@value_class(eq=False)
class ItemLocations:
    """The rows that have been written."""

    rows: Ints
    offsets: Ints  # where each of these lies in its segment, in bytes
    lengths: Ints
    tail: TailLocations


@value_class(eq=False)
class TailLocations:
    """Rows whose items lie in a tail."""

    rows: Ints
    ranks: Ints
    numbers: Ints  # the index of each in that rank's tail

    def extents(self, tails: Tails) -> Ints:
        """Return offset and length of each, as int64[rows, 2].

        Raises ManifestInvalid.
        """
        ranks, of_rank = np.unique(self.ranks, return_inverse=True)
        found = [np.array(tails.get(rank, ()), np.int64).reshape(-1, 2) for rank in ranks.tolist()]
        counts = np.fromiter(map(len, found), np.int64, len(found))
        if (self.numbers >= counts[of_rank]).any():
            raise ManifestInvalid(_LACKING)
        starts = np.cumsum(counts) - counts
        extents: Ints = np.concatenate([np.zeros((0, 2), np.int64), *found])[
            starts[of_rank] + self.numbers
        ]
        return extents


def locations_of(catalog: Catalog) -> ItemLocations:
    """Return where each written row lies, as far as that is the same in all saves."""
    items, written = LayoutItems(catalog), np.flatnonzero(catalog.writer >= 0)
    writer, number = catalog.writer[written], catalog.number[written]
    found = items.find(writer, number)
    is_tail = found < 0
    offsets, lengths, _, _ = items.columns[:, found[~is_tail]]
    beyond = items.beyond(writer, number)[is_tail]
    tail = TailLocations(written[is_tail], catalog.ranks[writer[is_tail]], beyond)
    rows = written[~is_tail]
    return ItemLocations(rows, offsets, lengths, tail)


def refuse_missing_tails(catalog: Catalog, tails: Tails) -> None:
    """Raise ManifestInvalid where the catalog has items that lie in no tail, nor in a layout."""
    lengths = np.fromiter(map(len, catalog.layouts), np.int64, len(catalog.layouts))
    beyond = catalog.most_numbers() - lengths[catalog.layout_of]
    for writer in np.flatnonzero(beyond >= 0).tolist():
        if beyond[writer] >= len(tails.get(int(catalog.ranks[writer]), ())):
            raise ManifestInvalid(_LACKING)


@value_class(eq=False, kw_only=True)
class DistinctShapes:
    """The distinct shapes, by number of dimensions and then in ascending order."""

    dimensions: Ints
    values: Ints  # of each shape: int64[shapes, width], padded with 0
    size: Ints  # of each entry of the catalog: index of its size among the shapes
    offset: Ints
    extent: Ints


def distinct_shapes(catalog: Catalog) -> DistinctShapes:
    """Return the distinct shapes of a catalog.

    `catalog`: its entries' sizes and its rows' offsets and extents are compared.
    """
    of_row = np.repeat(catalog.dimensions, np.diff(catalog.first))
    dimensions = np.concatenate([catalog.dimensions, of_row, of_row])
    values = np.concatenate([catalog.size, catalog.offset, catalog.extent])
    values[np.arange(values.shape[1]) >= dimensions[:, None]] = (
        0  # padding isn't the same everywhere
    )
    specimens, number = distinct_rows(np.column_stack([dimensions, values]))
    entries, rows = len(catalog.size), len(catalog.offset)
    size, offset, extent = np.split(number, [entries, entries + rows])
    return DistinctShapes(
        dimensions=dimensions[specimens],
        values=values[specimens],
        size=size,
        offset=offset,
        extent=extent,
    )
