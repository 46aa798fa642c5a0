"""The catalog of a global plan: DCP's `Metadata` of it is what torch's own planner would have made of the same state dicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dcp_mem.format.catalog import Catalog, Ints
from dcp_mem.format.layout import Layout
from dcp_mem.planning.merge import GlobalPlan


@dataclass(frozen=True, slots=True, eq=False)
class Written:
    """What a rank has put into its segment. rows: of its own plan, in the order of the segment."""

    rank: int
    rows: Ints
    layout: Layout


def shared(parts: Sequence[Written]) -> list[Written]:
    """The same parts; layouts and rows that several ranks have in common are one object."""
    layouts: dict[str, Layout] = {}
    rows: dict[bytes, Ints] = {}
    return [
        Written(
            part.rank,
            rows.setdefault(part.rows.tobytes(), part.rows),
            layouts.setdefault(part.layout.key, part.layout),
        )
        for part in parts
    ]


def describe(plan: GlobalPlan, parts: Sequence[Written]) -> Catalog:
    """The catalog of what the ranks have written by this plan. parts: of all ranks, in their order."""
    layouts = {part.layout.key: part.layout for part in parts}
    numbers = {key: number for number, key in enumerate(layouts)}
    names_with_items, firsts = np.unique(plan.name, return_index=True)
    order = np.argsort(firsts, kind="stable")  # entries in the order in which the plan has them
    firsts, entry_of_name = firsts[order], np.zeros(len(plan.names), np.int64)
    entry_of_name[names_with_items[order]] = np.arange(len(order))
    entry = entry_of_name[plan.name]
    by_place = np.lexsort((*plan.offset.T[::-1], entry))
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
        offset=plan.offset[by_place],
        extent=plan.extent[by_place],
        writer=plan.writer[by_place],
        number=_numbers(plan, parts)[by_place],
        ranks=np.array([part.rank for part in parts], np.int64),
        layout_of=np.array([numbers[part.layout.key] for part in parts], np.int64),
        layouts=list(layouts.values()),
    )


def _numbers(plan: GlobalPlan, parts: Sequence[Written]) -> Ints:
    """Of each row of the plan, which item of its writer's segment it is."""
    numbers = np.full(len(plan), -1, np.int64)
    starts = np.searchsorted(plan.writer, np.arange(len(parts) + 1))
    for number, part in enumerate(parts):
        mine = plan.row[starts[number] : starts[number + 1]]
        if not np.array_equal(np.sort(part.rows), mine):
            raise ValueError(f"rank {part.rank} has written other items than planned")
        numbers[starts[number] + np.searchsorted(mine, part.rows)] = np.arange(len(part.rows))
    return numbers
