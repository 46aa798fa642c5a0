"""What a catalog must not contradict itself in, so that no index in it is out of range."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from dcp_mem.format.column_file import Ints

if TYPE_CHECKING:
    from dcp_mem.format.catalog import Catalog, Rows

BYTES = -1
"""In `Catalog.properties`, in place of a number: the entry is a byte item."""
LOOSE_CHUNKS, LOOSE_BYTES = -2, -3
"""In place of a number: an entry that isn't in DCP's metadata, though its items were written.

Its items are chunks, or a byte item. Only custom planners make such entries. The entry's
`dimensions` counts; its size and its rows' extents mean nothing.
"""
MOST_DIMENSIONS = 64
MOST = (1 << 62) - 1
"""The largest size or offset: the sum of two of them doesn't overflow."""


def contradictions_of_entries(catalog: Catalog) -> Iterator[str]:
    """Yield what doesn't fit together, rows apart; later checks assume that earlier ones passed."""
    if not _have_shapes(catalog):
        yield "its columns don't fit together"
    if catalog.paths is not None and (
        len(catalog.paths) != len(catalog.names) or catalog.planner_pickle
    ):
        yield "its planner data don't fit"
    if not within(catalog.name, 0, len(catalog.names) - 1) or len(set(catalog.names)) != len(
        catalog.names
    ):
        yield "names"
    if not within(catalog.properties, LOOSE_BYTES, len(catalog.table) - 1):
        yield "properties"
    if not within(catalog.dimensions, 0, catalog.size.shape[1]):
        yield "dimensions"
    if not _are_distinct(catalog.name[catalog.properties >= BYTES]):
        yield "an entry occurs twice"
    counts = np.diff(catalog.first)
    is_bytes = (catalog.properties == BYTES) | (catalog.properties == LOOSE_BYTES)
    if (counts[is_bytes] > 1).any() or catalog.dimensions[is_bytes].any():
        yield "rows of its entries"
    if not within(catalog.size, 0, MOST):
        yield "sizes"
    if not within(catalog.ranks, 0, MOST) or not _are_distinct(catalog.ranks):
        yield "ranks"
    if not within(catalog.layout_of, 0, len(catalog.layouts) - 1):
        yield "layouts"


def contradictions_of_runs(catalog: Catalog) -> Iterator[str]:
    """Yield what doesn't fit together in the least and the largest integers of a catalog's rows."""
    if not within(catalog.boxes.bounds(), 0, MOST):
        yield "sizes"
    bounds = catalog.places.bounds()
    if not within(bounds[:, catalog.writer_runs], -1, len(catalog.ranks) - 1):
        yield "writers"
    if not within(catalog.first_number, -1, MOST) or not within(
        bounds[:, catalog.number_runs] + catalog.first_number, -1, MOST
    ):
        yield "numbers"


def are_in_order(rows: Rows) -> bool:
    """Return whether the rows of each entry ascend by offset; several may have the same."""
    before, after = rows.offset[:-1], rows.offset[1:]
    if not after.size:
        return True
    decisive = (after != before).argmax(axis=1)[:, None]
    falls = np.take_along_axis(after < before, decisive, axis=1)[:, 0]
    begins = rows.first[(rows.first > 0) & (rows.first < len(rows.offset))]
    falls[begins - 1] = False
    return not falls.any()


def _have_shapes(catalog: Catalog) -> bool:
    entries, writers = catalog.name.shape[:1], catalog.ranks.shape[:1]
    if not (entries and writers and catalog.size.shape[:1] == entries):
        return False
    return {catalog.name.shape, catalog.properties.shape, catalog.dimensions.shape} == {
        entries
    } and {catalog.ranks.shape, catalog.layout_of.shape} == {writers}


def _are_distinct(column: Ints) -> bool:
    # Not np.unique: it imports 10 ms of NumPy when it is first called.
    return not (np.diff(np.sort(column)) == 0).any()


def within(column: Ints, least: int, most: int) -> bool:
    """Return whether all integers of a column are in a range, both ends included."""
    return bool(((least <= column) & (column <= most)).all())
