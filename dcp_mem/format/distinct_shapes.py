"""The distinct sizes, offsets and extents of a catalog: most of them occur many times."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dcp_mem.format.catalog import Catalog, Ints
from dcp_mem.format.column_file import distinct_rows


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
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
