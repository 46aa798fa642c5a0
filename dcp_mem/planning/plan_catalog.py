"""The catalog of a global plan.

DCP's `Metadata` of it equals what torch's own planner makes of the same state dicts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dcp_mem.format.catalog import Catalog, Ints
from dcp_mem.format.layout import Layout
from dcp_mem.format.names import FROZEN, home_rank
from dcp_mem.planning.global_plan import GlobalPlan


@dataclass(frozen=True, slots=True, eq=False)
class WrittenItems:
    """The items of one rank's segment.

    Attributes:
        rank: The segment's number: the rank, with `names.FROZEN` added for its second segment.
        rows: Rows of the rank's own plan, in the order of the segment.
        layout: Of the segment.
    """

    rank: int
    rows: Ints
    layout: Layout


def share_written(written: Sequence[WrittenItems]) -> list[WrittenItems]:
    """Return the same values, with equal layouts and rows as one object.

    Args:
        written: The items of each rank's segment.
    """
    layouts: dict[str, Layout] = {}
    rows: dict[bytes, Ints] = {}
    return [
        WrittenItems(
            one.rank,
            rows.setdefault(one.rows.tobytes(), one.rows),
            layouts.setdefault(one.layout.key, one.layout),
        )
        for one in written
    ]


def catalog_of_plan(plan: GlobalPlan, written: Sequence[WrittenItems]) -> Catalog:
    """Return the catalog of what the ranks have written.

    Args:
        plan: The plan by which they wrote.
        written: What each rank has written, by rank, and then what some have in second segments.

    Raises:
        ValueError: A rank has written other items than planned.
    """
    layouts = {one.layout.key: one.layout for one in written}
    numbers = {key: number for number, key in enumerate(layouts)}
    names_with_items, firsts = np.unique(plan.name, return_index=True)
    order = np.argsort(firsts, kind="stable")  # entries in the order in which the plan has them
    firsts, entry_of_name = firsts[order], np.zeros(len(plan.names), np.int64)
    entry_of_name[names_with_items[order]] = np.arange(len(order))
    entry = entry_of_name[plan.name]
    by_offset = np.lexsort((*plan.offset.T[::-1], entry))
    counts = np.bincount(entry, minlength=len(order))
    writers, items = _places(plan, written)
    return Catalog(
        names=plan.names,
        paths=plan.paths,
        table=plan.table,
        name=plan.name[firsts],
        properties=plan.properties[firsts],
        dimensions=plan.dimensions[firsts],
        size=plan.size[firsts],
        first=np.concatenate([[0], np.cumsum(counts)]),
        offset=plan.offset[by_offset],
        extent=plan.extent[by_offset],
        writer=writers[by_offset],
        number=items[by_offset],
        ranks=np.array([one.rank for one in written], np.int64),
        layout_of=np.array([numbers[one.layout.key] for one in written], np.int64),
        layouts=list(layouts.values()),
    )


def _places(plan: GlobalPlan, written: Sequence[WrittenItems]) -> tuple[Ints, Ints]:
    """Return each row's segment, by its index in `written`, and which item of that it is."""
    writers, numbers = plan.writer.copy(), np.full(len(plan), -1, np.int64)
    planned_by = {one.rank: index for index, one in enumerate(written) if one.rank < FROZEN}
    starts = np.searchsorted(plan.writer, np.arange(len(planned_by) + 1))
    for index, one in enumerate(written):
        start, stop = starts[planned_by[home_rank(one.rank)] :][:2]
        planned = plan.row[start:stop]
        places = np.searchsorted(planned, one.rows)
        if not np.isin(one.rows, planned).all() or (numbers[start + places] >= 0).any():
            raise ValueError(f"rank {home_rank(one.rank)} has written other items than planned")
        writers[start + places], numbers[start + places] = index, np.arange(len(one.rows))
    if (numbers < 0).any():
        raise ValueError("a rank has written other items than planned")
    return writers, numbers
