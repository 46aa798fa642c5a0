"""The catalog of a global plan.

DCP's `Metadata` of it equals what torch's own planner makes of the same state dicts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dcp_mem.common.sendable import sendable
from dcp_mem.format.catalog import Catalog, Ints, SharedCatalog
from dcp_mem.format.layout import Layout
from dcp_mem.format.names import FROZEN, home_rank
from dcp_mem.format.shared_runs import RunPool
from dcp_mem.planning.global_plan import GlobalPlan
from dcp_mem.planning.series_plan import SeriesPlan, WrittenSeries


@sendable
@dataclass(frozen=True, slots=True, eq=False)
class WrittenItems:
    """The items of one rank's segment."""

    rank: int  # the segment's number: the rank, with `names.FROZEN` added for its second segment
    rows: Ints  # rows of the rank's own plan, in the order of the segment
    layout: Layout


def share_written(written: Sequence[WrittenItems]) -> list[WrittenItems]:
    """Return the same values, with equal layouts and rows as one object."""
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


def catalog_of_written(
    plan: GlobalPlan | SeriesPlan, written: Sequence[WrittenItems]
) -> Catalog | SharedCatalog:
    """Return the catalog of what the ranks have written.

    `written`: what each rank has written, by rank, and then what some have in second segments.
    Raises ValueError.
    """
    if isinstance(plan, GlobalPlan):
        return catalog_of_plan(plan, written)
    return catalog_of_series(plan, written)


def _layouts(written: Sequence[WrittenItems]) -> tuple[list[Layout], Ints]:
    """Return the layouts, each once, and the number of each segment's."""
    layouts = {one.layout.key: one.layout for one in written}
    numbers = {key: number for number, key in enumerate(layouts)}
    return list(layouts.values()), np.array([numbers[one.layout.key] for one in written], np.int64)


def catalog_of_plan(plan: GlobalPlan, written: Sequence[WrittenItems]) -> Catalog:
    """Return the catalog of a plan that was made item by item.

    Raises ValueError.
    """
    layouts, layout_of = _layouts(written)
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
        layout_of=layout_of,
        layouts=layouts,
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


# -- series by series -----------------------------------------------------------------------------


def catalog_of_series(plan: SeriesPlan, written: Sequence[WrittenItems]) -> SharedCatalog:
    """Return the catalog of a plan that was made series by series.

    Raises ValueError.
    """
    layouts, layout_of = _layouts(written)
    segments = _Segments(plan.plan.lengths, written)
    boxes, places = RunPool(), RunPool()
    entries: list[tuple[int, int, tuple[int, ...]]] = []  # place, series, and the numbers of runs
    known: tuple[object, tuple[int, ...]] = (None, ())
    for one in plan.written():
        if one.box is not known[0]:  # names with the same box come one after the other
            known = one.box, tuple(map(boxes.add, (*one.box.offset, *one.box.extent)))
        found = map(places.add, segments.of(one))
        entries.append((one.place, one.first, (*known[1], *found)))
    segments.check()
    # In the order in which the plan has them; no two begin with the same item.
    entries.sort()
    series = np.array([first for _, first, _ in entries], np.int64)
    width = plan.plan.width
    runs = np.array([found for *_, found in entries], np.int64).reshape(-1, 2 * width + 2)
    return SharedCatalog(
        names=plan.plan.names,
        paths=plan.plan.paths,
        table=plan.plan.table,
        name=plan.plan.name[series],
        properties=plan.plan.properties[series],
        dimensions=plan.plan.dimensions[series],
        size=plan.plan.size[series],
        boxes=boxes,
        places=places,
        offset_runs=runs[:, :width],
        extent_runs=runs[:, width : 2 * width],
        writer_runs=runs[:, -2],
        number_runs=runs[:, -1],
        ranks=np.array([one.rank for one in written], np.int64),
        layout_of=layout_of,
        layouts=layouts,
    )


class _Segments:
    """Where the ranks have written their rows.

    `written`: what each rank has written, by rank, and then what some have in second segments.
    """

    def __init__(self, lengths: Ints, written: Sequence[WrittenItems]) -> None:
        self._segment, self._start, self._size = np.full((3, 2, len(lengths)), -1, np.int64)
        self._planned, self._written = np.zeros((2, len(lengths)), np.int64)
        starts: dict[int, int] = {}
        tables = [np.zeros(1, np.int32)]  # a number for each row; equal rows are one object
        done = 1
        for index, one in enumerate(written):
            rank, which = home_rank(one.rank), int(one.rank >= FROZEN)
            size = int(one.rows.max(initial=-1)) + 1
            if id(one.rows) not in starts:
                table = np.full(size, -1, np.int32)
                table[one.rows] = np.arange(len(one.rows))
                if np.count_nonzero(table >= 0) != len(one.rows):
                    raise _other_items(rank)
                tables.append(table)
                starts[id(one.rows)], done = done, done + size
            self._segment[which, rank], self._size[which, rank] = index, size
            self._start[which, rank] = starts[id(one.rows)]
            self._written[rank] += len(one.rows)
        self._tables = np.concatenate(tables)

    def of(self, one: WrittenSeries) -> tuple[Ints, Ints]:
        """Return each chunk's segment, by its index in `written`, and which item of that it is."""
        writer = one.box.writer
        np.add.at(self._planned, writer, 1)
        segments, numbers = self._segment[0, writer], self._numbers(0, one)
        elsewhere = numbers < 0
        if elsewhere.any():
            segments = np.where(elsewhere, self._segment[1, writer], segments)
            numbers = np.where(elsewhere, self._numbers(1, one), numbers)
            if (numbers < 0).any():
                raise _other_items(int(writer[numbers < 0][0]))
        return segments, numbers

    def _numbers(self, which: int, one: WrittenSeries) -> Ints:
        """Return which items of these segments the chunks are; -1 for those that aren't there."""
        writer = one.box.writer
        is_there = one.rows < self._size[which, writer]
        found = self._tables[np.where(is_there, self._start[which, writer] + one.rows, 0)]
        return np.where(is_there, found.astype(np.int64), -1)

    def check(self) -> None:
        """Raise ValueError where a rank has written more than was planned.

        Called when `of` has had all names.
        """
        other = np.flatnonzero(self._planned != self._written)
        if len(other):
            raise _other_items(int(other[0]))


def _other_items(rank: int) -> ValueError:
    return ValueError(f"rank {rank} has written other items than planned")
