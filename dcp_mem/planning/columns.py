"""One rank's plan as columns: names once, everything else numbers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import chain, compress, repeat
from typing import Any, NamedTuple

import numpy as np

from dcp_mem.format.catalog import Ints, Path, Properties

COLUMNS = ("name", "kind", "properties", "dimensions", "size", "offset", "extent")


class NotDescribable(Exception):
    """A state dict holds something that only DCP's own planner knows how to plan."""


class Kind(IntEnum):
    """What an item is: a byte item, a whole tensor, or a chunk of one."""

    OBJECT = 0
    TENSOR = 1
    SHARD = 2


@dataclass(frozen=True, slots=True, eq=False)
class Items:
    """Items of state dicts, one row each.

    names: of flattened state dicts, with the path of each (`planner_data` of DCP's metadata); some may have no item, others
    several. name, kind, properties: of each item, by number; properties are -1 for byte items. size, offset, extent: of the
    tensor, and of the chunk in it; int64[items, dimensions], and rows of fewer dimensions are padded with 1, 0 and 1.
    dimensions: how many of them count.
    """

    names: tuple[str, ...]
    paths: tuple[Path, ...]
    table: tuple[Properties, ...]
    name: Ints
    kind: Ints
    properties: Ints
    dimensions: Ints
    size: Ints
    offset: Ints
    extent: Ints

    def __len__(self) -> int:
        return len(self.name)


@dataclass(frozen=True, slots=True, eq=False)
class LocalPlan(Items):
    """What one rank would write if it were alone, in the order of its state dict."""

    def is_same(self, other: LocalPlan) -> bool:
        """Whether the two describe the same structure."""
        return (self.names, self.paths, self.table) == (other.names, other.paths, other.table) and all(
            np.array_equal(getattr(self, column), getattr(other, column)) for column in COLUMNS
        )

    def without(self, names: Collection[str]) -> LocalPlan:
        """The plan without these names and their items."""
        stays = np.array([name not in names for name in self.names], bool)
        rows, numbers = stays[self.name], np.cumsum(stays) - 1
        columns: dict[str, Any] = {column: getattr(self, column)[rows] for column in COLUMNS}
        columns["name"] = numbers[columns["name"]]
        return replace(
            self, names=tuple(compress(self.names, stays)), paths=tuple(compress(self.paths, stays)), **columns
        )


def share_columns(plans: Sequence[LocalPlan]) -> list[LocalPlan]:
    """The same plans; what several ranks have in common, as most names and numbers are, is one object."""
    texts: list[LocalPlan] = []
    known: dict[tuple[str, bytes], Ints] = {}
    return [_shared(plan, texts, known) for plan in plans]


def _shared(plan: LocalPlan, texts: list[LocalPlan], known: dict[tuple[str, bytes], Ints]) -> LocalPlan:
    mine = plan.names, plan.paths, plan.table
    alike = next((one for one in texts if (one.names, one.paths, one.table) == mine), None)
    if alike is None:
        texts.append(plan)
    columns: dict[str, Any] = {
        name: known.setdefault((str(column.shape), column.tobytes()), column)
        for name, column in zip(COLUMNS, map(plan.__getattribute__, COLUMNS), strict=True)
    }
    return replace(alike or plan, **columns)


def widened(columns: Ints, width: int, value: int) -> Ints:
    """Sizes, offsets or extents with room for more dimensions, padded with `value`."""
    missing = width - columns.shape[1]
    return np.pad(columns, ((0, 0), (0, missing)), constant_values=value) if missing else columns


class Row(NamedTuple):
    """One item, on its way into a LocalPlan. name: number of its name. box: size, offset and extent."""

    # A tuple, unlike other values: twenty thousand of them are made in a tenth of the time.
    name: int
    kind: Kind
    properties: Properties | None = None
    box: tuple[Sequence[int], Sequence[int], Sequence[int]] = ((), (), ())


class Group(NamedTuple):
    """Tensors of one kind, by columns. offsets, extents: None for tensors that are whole items."""

    name: Sequence[int]
    kind: Kind
    properties: Sequence[Properties]
    sizes: Sequence[Sequence[int]]
    offsets: Sequence[Sequence[int]] | None = None
    extents: Sequence[Sequence[int]] | None = None


def local_plan(names: Sequence[str], paths: Sequence[Path], rows: Sequence[Row], *groups: Group) -> LocalPlan:
    """The columns of these rows and groups, in the order of their names."""
    name, kind, properties, boxes = zip(*rows, strict=True) if rows else ((), (), (), ())
    sizes, offsets, extents = zip(*boxes, strict=True) if rows else ((), (), ())
    kinds = [*kind, *chain.from_iterable(repeat(group.kind, len(group.name)) for group in groups)]
    numbers, table = _numbered([*properties, *chain.from_iterable(group.properties for group in groups)])
    all_names = np.array([*name, *chain.from_iterable(group.name for group in groups)], np.int64)
    order = np.argsort(all_names, kind="stable")
    dimensions = np.fromiter(map(len, chain(sizes, *(group.sizes for group in groups))), np.int64, len(order))
    width = int(dimensions.max(initial=1))
    of_rows = _padded(sizes, width, 1), _padded(offsets, width, 0), _padded(extents, width, 1)
    sides = zip(of_rows, *(_sides(group, width) for group in groups), strict=True)
    size, offset, extent = (np.concatenate(side)[order] for side in sides)
    return LocalPlan(
        names=tuple(names),
        paths=tuple(paths),
        table=table,
        name=all_names[order],
        kind=np.array(kinds, np.int64)[order],
        properties=numbers[order],
        dimensions=dimensions[order],
        size=size,
        offset=offset,
        extent=extent,
    )


def _sides(group: Group, width: int) -> tuple[Ints, Ints, Ints]:
    """Sizes, offsets and extents."""
    size = _padded(group.sizes, width, 1)
    if group.offsets is None or group.extents is None:
        return size, np.zeros_like(size), size
    return size, _padded(group.offsets, width, 0), _padded(group.extents, width, 1)


def _numbered(properties: Sequence[Properties | None]) -> tuple[Ints, tuple[Properties, ...]]:
    """The number of each in a table of those that differ, and the table."""
    # Most are the same few objects; to ask each for its hash would take as long as all the rest.
    objects = dict(zip(map(id, properties), properties, strict=True))
    table: dict[Properties, int] = {}
    number = {key: -1 if one is None else table.setdefault(one, len(table)) for key, one in objects.items()}
    return np.fromiter(map(number.__getitem__, map(id, properties)), np.int64, len(properties)), tuple(table)


def _padded(sides: Sequence[Sequence[int]], width: int, value: int) -> Ints:
    """Rows of so many numbers each."""
    counts = np.fromiter(map(len, sides), np.int64, len(sides))
    result = np.full((len(sides), width), value, np.int64)
    result[np.arange(width) < counts[:, None]] = np.fromiter(chain.from_iterable(sides), np.int64, int(counts.sum()))
    return result
