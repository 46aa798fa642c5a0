"""The catalog of a global plan.

DCP's `Metadata` of it equals what torch's own planner makes of the same state dicts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dcp_mem.format.catalog import Catalog, Ints
from dcp_mem.format.layout import Layout
from dcp_mem.planning.global_plan import GlobalPlan


@dataclass(frozen=True, slots=True, eq=False)
class WrittenItems:
    """The items of one rank's segment.

    Attributes:
        rank: The rank.
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
        written: What each rank has written, by rank.

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
        writer=plan.writer[by_offset],
        number=_numbers(plan, written)[by_offset],
        ranks=np.array([one.rank for one in written], np.int64),
        layout_of=np.array([numbers[one.layout.key] for one in written], np.int64),
        layouts=list(layouts.values()),
    )


def _numbers(plan: GlobalPlan, written: Sequence[WrittenItems]) -> Ints:
    """Return, for each row of the plan, which item of its writer's segment it is."""
    numbers = np.full(len(plan), -1, np.int64)
    starts = np.searchsorted(plan.writer, np.arange(len(written) + 1))
    for number, one in enumerate(written):
        planned = plan.row[starts[number] : starts[number + 1]]
        if not np.array_equal(np.sort(one.rows), planned):
            raise ValueError(f"rank {one.rank} has written other items than planned")
        numbers[starts[number] + np.searchsorted(planned, one.rows)] = np.arange(len(one.rows))
    return numbers
