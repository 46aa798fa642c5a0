"""The locations of a catalog's items in their segments.

Items of the layout lie in the same place in all saves; items of the tail differ from save to save.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from dcp_mem.common.value_class import value_class
from dcp_mem.errors import ManifestInvalid
from dcp_mem.format.catalog import Catalog, Ints, Tails
from dcp_mem.format.column_file import distinct_rows

_LACKING = "the manifest lacks items that the catalog has: they aren't of one save"


@value_class(eq=False, frozen=True, slots=False)
class LayoutItems:
    """The items of all of a catalog's layouts, one layout below the other."""

    catalog: Catalog

    @cached_property
    def columns(self) -> Ints:
        """Offset, length, payload offset and payload bytes of each item: int64[4, items + 1].

        The last column stands for items that lie in a tail. In it, the payload offset is -1.
        """
        columns = [one.columns for one in self.catalog.layouts]
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

    def extents(self, writer: Ints, number: Ints, tails: Tails) -> Ints:
        """Return offset and length of each item in its writer's segment: int64[2, items].

        Raises ManifestInvalid.
        """
        found = self.columns[:2, self.find(writer, number)]
        beyond = self.beyond(writer, number)
        in_tail = np.flatnonzero(beyond >= 0)
        ranks = self.catalog.ranks[writer[in_tail]]
        found[:, in_tail] = extents_in_tails(ranks, beyond[in_tail], tails)
        return found


def extents_in_tails(ranks: Ints, numbers: Ints, tails: Tails) -> Ints:
    """Return offset and length of each item with this number in this rank's tail: int64[2, items].

    Raises ManifestInvalid.
    """
    try:
        found = [
            tails[rank][number]
            for rank, number in zip(ranks.tolist(), numbers.tolist(), strict=True)
        ]
    except LookupError:
        raise ManifestInvalid(_LACKING) from None
    extents: Ints = np.array(found, np.int64).reshape(-1, 2).T
    return extents


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

    values: Sequence[tuple[int, ...]]
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
    columns = zip(dimensions[specimens].tolist(), values[specimens].tolist(), strict=True)
    return DistinctShapes(
        values=[tuple(shape[:count]) for count, shape in columns],
        size=size,
        offset=offset,
        extent=extent,
    )
