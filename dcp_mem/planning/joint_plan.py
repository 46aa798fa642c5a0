"""The plans of some ranks, joined: what their plans say alike is held once.

Plans of ranks that hold shards of the same tensors differ in little but the chunks' offsets. Items
that are alike on several ranks are one series. What else a series has (rows, offsets, extents) are
columns of one number per rank, and most series have the same few columns. So the plans of thousands
of ranks are as large as a few of them, and are joined as quickly. Nothing is lost: `plan_rows` has
every item again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from dcp_mem.common.sendable import sendable
from dcp_mem.format.catalog import Ints, Path, Properties
from dcp_mem.format.column_file import in_32_bits
from dcp_mem.planning.plan_columns import LocalPlan, PlanItems, widened

T = TypeVar("T")
_RANK = 1 << 32
"""In `named` and `tabled`: a rank times this, plus the position in the rank's own table."""


@sendable
@dataclass(frozen=True, slots=True, eq=False)
class Holders:
    """Ranks that hold the same series."""

    ranks: Ints
    # The distinct columns of their series: [columns, ranks], of 32 bits where they fit. A number of
    # a series is the sum of a base of its own and the rank's number here.
    columns: Ints


@sendable
@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
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

    def values(self, series: int, column: int) -> Ints:
        """Return one column of a series, a number for each of its holders.

        `column`: which one: 0 for rows, then offsets, then extents.
        """
        columns = self.groups[self.holders[series]].columns
        return added(columns[self.columns[series, column]], self.bases[series, column])


def added(numbers: Ints, bases: Ints) -> Ints:
    """Return the sum of columns and bases; both may have 32 bits, and their sum more."""
    return np.add(numbers, bases, dtype=np.int64)


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
    order, is_new = sorted_rows(keys)
    starts = np.flatnonzero(is_new)
    turns = np.zeros(len(keys), np.int64)
    turns[order] = np.arange(len(keys)) - np.repeat(starts, np.diff(np.append(starts, len(keys))))
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
    order, is_new = sorted_rows(joined)
    numbers = np.empty(len(joined), np.int64)
    numbers[order] = np.cumsum(is_new) - 1
    return joined[order[is_new]], np.split(numbers, np.cumsum([len(one) for one in keys])[:-1])


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
    order, is_new = sorted_rows(held)
    holders = np.empty(count, np.int64)
    holders[order] = np.cumsum(is_new) - 1
    columns, bases = np.empty((2, count, 1 + 2 * width), np.int64)
    groups = []
    for members in np.split(order, np.flatnonzero(is_new)[1:]) if count else ():
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
    keys = np.concatenate([wanted, shifts], axis=1)
    order, is_new = sorted_rows(keys)
    numbers = np.empty(len(keys), np.int64)
    numbers[order] = np.cumsum(is_new) - 1
    wanted, shifts = wanted[order[is_new]], shifts[order[is_new]]
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


def sorted_rows(keys: Ints) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """Return the order of rows, stable, and for each of the sorted rows whether it is a new one."""
    order = np.lexsort(keys.T[::-1])
    is_new = np.ones(len(keys), bool)
    found = keys[order]
    is_new[1:] = (found[1:] != found[:-1]).any(axis=1)
    return order, is_new


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


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PlanRows(PlanItems):
    """Items of some ranks, by rank and then in the order of the rank's own plan."""

    rank: Ints
    row: Ints  # of each item: its row in that rank's plan
    series: Ints
    place: Ints  # of each item: where among the holders of its series the rank is


def plan_rows(plan: JointPlan, series: Ints) -> PlanRows:
    """Return the items of some series."""
    held = plan.holders[series]
    present = np.flatnonzero(np.bincount(held, minlength=len(plan.groups)))
    pieces = [
        _rows_of_group(plan, plan.groups[one], series[held == one]) for one in present.tolist()
    ]
    of_series, rank, place, row, offset, extent = (
        np.concatenate(columns) for columns in zip(_no_rows(plan.width), *pieces, strict=True)
    )
    starts = np.zeros(int(plan.ranks.max(initial=-1)) + 1, np.int64)
    starts[plan.ranks] = np.cumsum(plan.lengths) - plan.lengths
    order = np.argsort(starts[rank] + row, kind="stable")
    of_series = of_series[order]
    return PlanRows(
        names=plan.names,
        paths=plan.paths,
        table=plan.table,
        name=plan.name[of_series],
        kind=plan.kind[of_series],
        properties=plan.properties[of_series],
        dimensions=plan.dimensions[of_series],
        size=plan.size[of_series],
        offset=offset[order],
        extent=extent[order],
        rank=rank[order],
        row=row[order],
        series=of_series,
        place=place[order],
    )


def _rows_of_group(plan: JointPlan, group: Holders, series: Ints) -> tuple[Ints, ...]:
    """Return these series' items: series, rank, place, row, offset and extent of each."""
    count = len(group.ranks)

    def values(column: int) -> Ints:
        numbers = group.columns[plan.columns[series, column]]
        return added(numbers, plan.bases[series, column][:, None]).ravel()

    width = plan.width
    return (
        np.repeat(series, count),
        np.tile(group.ranks, len(series)),
        np.tile(np.arange(count), len(series)),
        values(0),
        np.stack([values(1 + dimension) for dimension in range(width)], axis=1),
        np.stack([values(1 + width + dimension) for dimension in range(width)], axis=1),
    )


def _no_rows(width: int) -> tuple[Ints, ...]:
    nothing = np.zeros(0, np.int64)
    return (*[nothing] * 4, *[nothing.reshape(0, width)] * 2)
