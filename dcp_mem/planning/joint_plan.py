"""The plans of some ranks, joined: what their plans say alike is held once.

Plans of ranks that hold shards of the same tensors differ in little but the chunks' offsets. Items
that are alike on several ranks are one series. What else a series has (rows, offsets, extents) are
columns of one number per rank, and most series have the same few columns. So the plans of thousands
of ranks are as large as a few of them, and are joined as quickly. Nothing is lost:
`SeriesNumbers` has every item again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from dcp_mem.common.sendable import sendable
from dcp_mem.common.value_class import value_class
from dcp_mem.format.catalog import Ints, Path, Properties, counted
from dcp_mem.format.column_file import distinct_rows, in_32_bits
from dcp_mem.planning.plan_columns import LocalPlan, PlanItems, widened

T = TypeVar("T")
_RANK = 1 << 32
"""In `named` and `tabled`: a rank times this, plus the position in the rank's own table."""


@sendable
@value_class(eq=False)
class Holders:
    """Ranks that hold the same series."""

    ranks: Ints
    # The distinct columns of their series: [columns, ranks], of 32 bits where they fit. A number of
    # a series is the sum of a base of its own and the rank's number here.
    columns: Ints


@sendable
@value_class(eq=False, kw_only=True)
class JointPlan:
    """The plans of some ranks. A series has one item on each of its holders."""

    ranks: Ints  # whose plans these are, ascending
    lengths: Ints  # of each of their plans: the number of items
    names: tuple[str, ...]  # all flattened names; some may have no item
    paths: tuple[Path, ...]  # the path of each name, as the first rank that has it says
    named: Ints  # of each name: the first rank that has it, and where in that rank's names
    table: tuple[Properties, ...]
    tabled: Ints  # of each of them: the first rank that has it, and where in that rank's table
    # Of each series: index in `names`. So are these, as in `PlanItems`: kind, properties,
    # dimensions, size.
    name: Ints
    kind: Ints
    properties: Ints
    dimensions: Ints
    size: Ints
    turn: Ints  # of each series: how many other items of its holders are like it, and come before
    holders: Ints
    # of each series: the columns of its rows in the ranks' own plans, of its offsets, and of its
    # extents, as indexes in `columns` of its holders: int64[series, 1 + 2 width]
    columns: Ints
    # Of each of these columns: what is added to its numbers. Both are of 32 bits where they fit.
    bases: Ints
    groups: tuple[Holders, ...]

    @property
    def width(self) -> int:
        """The largest number of dimensions."""
        return int(self.size.shape[1])

    @property
    def count(self) -> int:
        """The number of items on all ranks."""
        return int(self.lengths.sum())


def plan_of_rank(rank: int, plan: LocalPlan) -> JointPlan:
    """Return one rank's plan as a joint plan."""
    values = np.concatenate([np.arange(len(plan))[:, None], plan.offset, plan.extent], axis=1)
    keys = np.stack([plan.name, plan.kind, plan.properties, plan.dimensions, *plan.size.T], axis=1)
    return JointPlan(
        ranks=np.array([rank]),
        lengths=np.array([len(plan)]),
        names=plan.names,
        paths=plan.paths,
        named=rank * _RANK + np.arange(len(plan.names)),
        table=plan.table,
        tabled=rank * _RANK + np.arange(len(plan.table)),
        name=plan.name,
        kind=plan.kind,
        properties=plan.properties,
        dimensions=plan.dimensions,
        size=plan.size,
        turn=_turns(keys),
        holders=np.zeros(len(plan), np.int64),
        columns=np.zeros(values.shape, np.int32),
        bases=in_32_bits(values),
        groups=(Holders(np.array([rank]), np.zeros((1, 1), np.int32)),),
    )


def _turns(keys: Ints) -> Ints:
    """Return how many equal rows come before each."""
    specimens, kinds = distinct_rows(keys)
    order = np.argsort(kinds, kind="stable")
    turns = np.empty(len(keys), np.int64)
    turns[order] = counted(np.bincount(kinds, minlength=len(specimens)))
    return turns


# -- joining --------------------------------------------------------------------------------------


def join_plans(parts: Sequence[JointPlan]) -> JointPlan:
    """Return the plans of all parts' ranks as one joint plan; no rank is in two parts.

    1. Number names and properties anew, for all parts alike.
    2. Find the series that several parts have.
    3. Join holders and columns.
    """
    if len(parts) == 1:
        return parts[0]
    names, named, paths, of_name = _joined_table(
        [(part.names, part.named, part.paths) for part in parts]
    )
    table, tabled, _, of_properties = _joined_table(
        [(part.table, part.tabled, part.table) for part in parts]
    )
    width = max(part.width for part in parts)
    keys, series = _joined_series(parts, of_name, of_properties, width)
    ranks = np.concatenate([part.ranks for part in parts])
    order = np.argsort(ranks)
    holders, columns, bases, groups = _joined_groups(parts, series, len(keys), width)
    return JointPlan(
        ranks=ranks[order],
        lengths=np.concatenate([part.lengths for part in parts])[order],
        names=names,
        paths=paths,
        named=named,
        table=table,
        tabled=tabled,
        name=keys[:, 0],
        kind=keys[:, 1],
        properties=keys[:, 2],
        dimensions=keys[:, 3],
        size=keys[:, 5:],
        turn=keys[:, 4],
        holders=holders,
        columns=in_32_bits(columns),
        bases=in_32_bits(bases),
        groups=groups,
    )


def _joined_table(
    parts: Sequence[tuple[tuple[T, ...], Ints, tuple[Any, ...]]],
) -> tuple[tuple[T, ...], Ints, tuple[Any, ...], list[Ints]]:
    """Return one table of what the parts' tables have.

    `parts`: for each: entries, where each comes from, and what belongs to each. Returns the table,
    likewise, and for each part the index of its entries in it.
    """
    entries, firsts, values = parts[0]
    if all(one[0] == entries and one[2] == values for one in parts[1:]):
        first = np.min([one[1] for one in parts], axis=0)
        return entries, first, values, [np.arange(len(entries))] * len(parts)
    numbers: dict[T, int] = {}
    indexes = []
    for one, _, _ in parts:
        found = (numbers.setdefault(entry, len(numbers)) for entry in one)
        indexes.append(np.fromiter(found, np.int64, len(one)))
    first = np.full(len(numbers), np.iinfo(np.int64).max)
    kept: list[Any] = [None] * len(numbers)
    for (_, firsts, values), index in zip(parts, indexes, strict=True):
        for position in np.flatnonzero(firsts < first[index]).tolist():
            kept[index[position]] = values[position]
        first[index] = np.minimum(first[index], firsts)
    return tuple(numbers), first, tuple(kept), indexes


def _joined_series(
    parts: Sequence[JointPlan], of_name: Sequence[Ints], of_properties: Sequence[Ints], width: int
) -> tuple[Ints, list[Ints]]:
    """Return the keys of all series, and for each part which of them its own are."""
    keys = [
        np.concatenate(
            [
                np.stack(
                    [
                        names[part.name],
                        part.kind,
                        np.append(properties, -1)[part.properties],
                        part.dimensions,
                        part.turn,
                    ],
                    axis=1,
                ),
                widened(part.size, width, 1),
            ],
            axis=1,
        )
        for part, names, properties in zip(parts, of_name, of_properties, strict=True)
    ]
    if all(np.array_equal(one, keys[0]) for one in keys[1:]):
        return keys[0], [np.arange(len(keys[0]))] * len(parts)
    joined = np.concatenate(keys)
    specimens, numbers = distinct_rows(joined)
    return joined[specimens], np.split(numbers, np.cumsum([len(one) for one in keys])[:-1])


def _joined_groups(
    parts: Sequence[JointPlan], series: Sequence[Ints], count: int, width: int
) -> tuple[Ints, Ints, Ints, tuple[Holders, ...]]:
    """Return holders, columns and bases of each series, and the groups of holders."""
    held = np.full((count, len(parts)), -1, np.int64)
    # Of each series, column and part: the column's number there, and its base.
    pieces = np.zeros((2, count, 1 + 2 * width, len(parts)), np.int64)
    groups_of_part = []
    for index, (part, own) in enumerate(zip(parts, series, strict=True)):
        wide = _wide(part, width)
        held[own, index] = wide.holders
        pieces[0, own, :, index], pieces[1, own, :, index] = wide.columns, wide.bases
        groups_of_part.append(wide.groups)
    _, holders = distinct_rows(held)
    by_holders = np.argsort(holders, kind="stable")
    columns, bases = np.empty((2, count, 1 + 2 * width), np.int64)
    groups = []
    for members in np.split(by_holders, np.cumsum(np.bincount(holders))[:-1]) if count else ():
        present = np.flatnonzero(held[members[0]] >= 0)
        if len(present) == 1:  # as where each rank has names of its own
            only = int(present[0])
            columns[members] = pieces[0, ..., only][members]
            bases[members] = pieces[1, ..., only][members]
            groups.append(groups_of_part[only][held[members[0], only]])
            continue
        of_parts = [groups_of_part[index][held[members[0], index]] for index in present.tolist()]
        wanted, based = pieces[:, members][..., present].reshape(2, -1, len(present))
        group, found = _joined_columns(of_parts, wanted, based - based[:, :1])
        columns[members] = found.reshape(len(members), -1)
        bases[members] = based[:, 0].reshape(len(members), -1)
        groups.append(group)
    return holders, columns, bases, tuple(groups)


def _wide(part: JointPlan, width: int) -> JointPlan:
    """Return the same with `width` dimensions; missing offsets are zeros, missing extents ones."""
    missing = width - part.width
    if not missing:
        return part
    groups = [Holders(one.ranks, np.pad(one.columns, ((0, 1), (0, 0)))) for one in part.groups]
    zeros = np.array([len(one.columns) for one in part.groups], np.int64)[part.holders]
    parts = slice(0, 1 + part.width), slice(1 + part.width, None)
    columns, bases = ([values[:, one] for one in parts] for values in (part.columns, part.bases))
    columns = [columns[0], *[zeros[:, None]] * missing, columns[1], *[zeros[:, None]] * missing]
    nothing = np.zeros((len(zeros), missing), np.int64)
    return replace(
        part,
        size=widened(part.size, width, 1),
        columns=np.concatenate(columns, axis=1),
        bases=np.concatenate([bases[0], nothing, bases[1], nothing + 1], axis=1),
        groups=tuple(groups),
    )


def _joined_columns(parts: Sequence[Holders], wanted: Ints, shifts: Ints) -> tuple[Holders, Ints]:
    """Return these groups as one.

    `wanted`: for each column wanted, the number of its piece in each part. Returns the group, and
    the number of each wanted column.
    """
    specimens, numbers = distinct_rows(np.concatenate([wanted, shifts], axis=1))
    wanted, shifts = wanted[specimens], shifts[specimens]
    ranks = np.concatenate([part.ranks for part in parts])
    columns = np.concatenate(
        [
            in_32_bits(part.columns[wanted[:, index]] + shifts[:, index, None])
            for index, part in enumerate(parts)
        ],
        axis=1,
    )
    if (ranks[1:] < ranks[:-1]).any():
        by_rank = np.argsort(ranks)
        ranks, columns = ranks[by_rank], columns[:, by_rank]
    return Holders(ranks, columns), numbers


# -- looking at it --------------------------------------------------------------------------------


def in_order(plan: JointPlan) -> JointPlan:
    """Return the same plan with names and properties in the order of the ranks that have them."""
    by_name, by_table = np.argsort(plan.named), np.argsort(plan.tabled)
    return replace(
        plan,
        names=tuple(map(plan.names.__getitem__, by_name.tolist())),
        paths=tuple(map(plan.paths.__getitem__, by_name.tolist())),
        named=plan.named[by_name],
        table=tuple(map(plan.table.__getitem__, by_table.tolist())),
        tabled=plan.tabled[by_table],
        name=_inverse(by_name)[plan.name],
        properties=np.append(_inverse(by_table), -1)[plan.properties],
    )


def _inverse(order: Ints) -> Ints:
    result = np.empty_like(order)
    result[order] = np.arange(len(order))
    return result


@value_class(eq=False, kw_only=True)
class PlanRows(PlanItems):
    """Items of some ranks, by rank and then in the order of the rank's own plan."""

    rank: Ints
    row: Ints  # of each item: its row in that rank's plan
    series: Ints
    place: Ints  # of each item: where among the holders of its series the rank is


class SeriesNumbers:
    """The rows, offsets and extents of a joint plan's items, looked up many at once."""

    def __init__(self, plan: JointPlan) -> None:
        self.plan = plan
        counts = np.array([len(one.ranks) for one in plan.groups], np.int64)
        sizes = np.array([one.columns.size for one in plan.groups], np.int64)
        starts = (np.cumsum(sizes) - sizes)[plan.holders]
        self.counts = counts[plan.holders]  # of each series: its items
        self._columns = _joined([one.columns.ravel() for one in plan.groups])
        self._at = starts[:, None] + plan.columns * self.counts[:, None]
        self._ranks = _joined([one.ranks for one in plan.groups])
        self._ranks_at = (np.cumsum(counts) - counts)[plan.holders]

    def of(self, column: int, series: Ints, place: Ints) -> Ints:
        """Return a number of each of some items.

        `column`: which one: 0 for rows, then offsets, then extents. `place`: of each item: where
        among the holders of its series its rank is.
        """
        numbers = self._columns[self._at[series, column] + place]
        return _added(numbers, self.plan.bases[series, column])

    def items(self, series: Ints) -> PlanRows:
        """Return the items of some series."""
        plan, counts = self.plan, self.counts[series]
        series, place = np.repeat(series, counts), counted(counts)
        rank, row = self._ranks[self._ranks_at[series] + place], self.of(0, series, place)
        starts = np.zeros(int(plan.ranks.max(initial=-1)) + 1, np.int64)
        starts[plan.ranks] = np.cumsum(plan.lengths) - plan.lengths
        order = np.argsort(starts[rank] + row, kind="stable")
        series, place = series[order], place[order]
        boxes = np.empty((2 * plan.width, len(series)), np.int64)
        for column, numbers in enumerate(boxes, 1):
            numbers[:] = self.of(column, series, place)
        return PlanRows(
            names=plan.names,
            paths=plan.paths,
            table=plan.table,
            name=plan.name[series],
            kind=plan.kind[series],
            properties=plan.properties[series],
            dimensions=plan.dimensions[series],
            size=plan.size[series],
            offset=boxes[: plan.width].T,
            extent=boxes[plan.width :].T,
            rank=rank[order],
            row=row[order],
            series=series,
            place=place,
        )


def _joined(arrays: Sequence[Ints]) -> Ints:
    return np.concatenate(arrays) if arrays else np.zeros(0, np.int64)


def _added(numbers: Ints, bases: Ints) -> Ints:
    """Return the sum of columns and bases; both may have 32 bits, and their sum more."""
    return np.add(numbers, bases, dtype=np.int64)
