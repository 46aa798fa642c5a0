"""The catalog of a global plan.

DCP's `Metadata` of it equals what torch's own planner makes of the same state dicts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dcp_mem.common.sendable import sendable
from dcp_mem.common.value_class import value_class
from dcp_mem.format.catalog import Catalog, Ints
from dcp_mem.format.layout import Layout
from dcp_mem.format.names import FROZEN, home_rank
from dcp_mem.format.shared_runs import RunPool
from dcp_mem.planning.global_plan import GlobalPlan, WrittenChunks

_RANK = 1 << 32
"""A rank times this, plus a row of its plan, is a place in the order of the whole plan."""


@sendable
@value_class(eq=False)
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


def catalog_of_written(plan: GlobalPlan, written: Sequence[WrittenItems]) -> Catalog:
    """Return the catalog of what the ranks have written.

    `written`: what each rank has written, by rank, and then what some have in second segments.
    Raises ValueError.
    """
    layouts = {one.layout.key: one.layout for one in written}
    numbers = {key: number for number, key in enumerate(layouts)}
    segments = _Segments(plan.plan.lengths, written)
    boxes, places = RunPool(), RunPool()
    entries = []  # of each name: its first item's place and series, and the runs of its places
    for some in plan.written():
        place = some.writer * _RANK + some.row
        least = np.minimum.reduceat(place, some.first[:-1]) if len(place) else place
        series = some.series[place == np.repeat(least, np.diff(some.first))]
        segment, number = segments.of(some)
        runs = places.add_rows(segment, some.first)
        entries.append(np.stack([least, series, runs, *places.add_counted(number, some.first)]))
    segments.check()
    found = np.concatenate(entries, axis=1)
    # In the order in which the plan has them; no two begin with the same item.
    order = np.argsort(found[0])
    series, writer_runs, first_number, number_runs = found[1:, order]
    of_class = plan.names.of_class[order]
    box_runs = [
        np.array([boxes.add_rows(column, plan.first_chunks) for column in columns.T])[:, of_class].T
        for columns in (plan.chunks.offset, plan.chunks.extent)
    ]
    return Catalog(
        names=plan.plan.names,
        paths=plan.plan.paths,
        table=plan.plan.table,
        name=plan.plan.name[series],
        properties=plan.plan.properties[series],
        dimensions=plan.plan.dimensions[series],
        size=plan.plan.size[series],
        boxes=boxes.runs(),
        places=places.runs(),
        offset_runs=box_runs[0],
        extent_runs=box_runs[1],
        writer_runs=writer_runs,
        number_runs=number_runs,
        first_number=first_number,
        ranks=np.array([one.rank for one in written], np.int64),
        layout_of=np.array([numbers[one.layout.key] for one in written], np.int64),
        layouts=list(layouts.values()),
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

    def of(self, some: WrittenChunks) -> tuple[Ints, Ints]:
        """Return each chunk's segment, by its index in `written`, and which item of that it is."""
        writer = some.writer
        self._planned += np.bincount(writer, minlength=len(self._planned))
        segments, numbers = self._segment[0, writer], self._numbers(0, some)
        elsewhere = numbers < 0
        if elsewhere.any():
            segments = np.where(elsewhere, self._segment[1, writer], segments)
            numbers = np.where(elsewhere, self._numbers(1, some), numbers)
            if (numbers < 0).any():
                raise _other_items(int(writer[numbers < 0][0]))
        return segments, numbers

    def _numbers(self, which: int, some: WrittenChunks) -> Ints:
        """Return which items of these segments the chunks are; -1 for those that aren't there."""
        writer = some.writer
        is_there = some.row < self._size[which, writer]
        found = self._tables[np.where(is_there, self._start[which, writer] + some.row, 0)]
        return np.where(is_there, found.astype(np.int64), -1)

    def check(self) -> None:
        """Raise ValueError where a rank has written more than was planned.

        Called when `of` has had all chunks.
        """
        other = np.flatnonzero(self._planned != self._written)
        if len(other):
            raise _other_items(int(other[0]))


def _other_items(rank: int) -> ValueError:
    return ValueError(f"rank {rank} has written other items than planned")
