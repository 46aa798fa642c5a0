"""The different sizes, offsets and extents of a catalog: most occur again and again, and one object does for all of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dcp_mem.format.catalog import LOOSE_CHUNKS, Catalog, Ints


@dataclass(frozen=True, slots=True, eq=False)
class Shapes:
    """values[shapes, width]: by dimensions, in ascending order. size, offset, extent: the number of each entry's or row's."""

    dimensions: Ints
    values: Ints
    size: Ints
    offset: Ints
    extent: Ints


def shapes_of(catalog: Catalog) -> Shapes:
    """Number the different ones."""
    of_row = np.repeat(catalog.dimensions, np.diff(catalog.first))
    dimensions = np.concatenate([catalog.dimensions, of_row, of_row])
    values = np.concatenate([catalog.size, catalog.offset, catalog.extent])
    values[np.arange(values.shape[1]) >= dimensions[:, None]] = 0  # padding isn't the same everywhere
    order = np.lexsort((*values.T[::-1], dimensions))
    values, dimensions = values[order], dimensions[order]
    differs = np.ones(len(order), bool)
    differs[1:] = (dimensions[1:] != dimensions[:-1]) | (values[1:] != values[:-1]).any(axis=1)
    number = np.empty(len(order), np.int64)
    number[order] = np.cumsum(differs) - 1
    size, offset, extent = np.split(number, [len(catalog.size), len(catalog.size) + len(catalog.offset)])
    return Shapes(dimensions[differs], values[differs], size, offset, extent)


def entry_of_rows(catalog: Catalog) -> Ints:
    """Of each row, which entry it belongs to."""
    return np.repeat(np.arange(len(catalog.name)), np.diff(catalog.first))


def have_offset(catalog: Catalog) -> npt.NDArray[np.bool_]:
    """Of each row, whether DCP's index of it has an offset: those of byte items have none."""
    has_chunks: npt.NDArray[np.bool_] = (catalog.properties >= 0) | (catalog.properties == LOOSE_CHUNKS)
    return has_chunks[entry_of_rows(catalog)]
