"""The distinct sizes, offsets and extents of a catalog: most of them occur many times."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dcp_mem.format.catalog import Catalog, Ints


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
    order = np.lexsort((*values.T[::-1], dimensions))
    values, dimensions = values[order], dimensions[order]
    differs = np.ones(len(order), bool)
    differs[1:] = (dimensions[1:] != dimensions[:-1]) | (values[1:] != values[:-1]).any(axis=1)
    number = np.empty(len(order), np.int64)
    number[order] = np.cumsum(differs) - 1
    size, offset, extent = np.split(
        number, [len(catalog.size), len(catalog.size) + len(catalog.offset)]
    )
    return DistinctShapes(
        dimensions=dimensions[differs],
        values=values[differs],
        size=size,
        offset=offset,
        extent=extent,
    )
