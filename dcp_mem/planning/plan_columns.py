"""One rank's plan as columns: names once, everything else as numbers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from enum import IntEnum
from itertools import chain, compress
from typing import Any

import numpy as np

from dcp_mem.common.value_class import value_class
from dcp_mem.format.catalog import Ints, Path, Properties
from dcp_mem.format.column_file import padded

COLUMNS = ("name", "kind", "properties", "dimensions", "size", "offset", "extent")


class NotDescribable(Exception):
    """A state dict holds something that only DCP's own planner can plan."""


class ItemKind(IntEnum):
    """The kind of an item: a byte item, a whole tensor, or a chunk of a tensor."""

    OBJECT = 0
    TENSOR = 1
    SHARD = 2


@value_class(eq=False, kw_only=True)
class PlanItems:
    """Items of state dicts, one row each. `width` is the largest number of dimensions."""

    names: tuple[str, ...]  # flattened names; a name may have no item, or several
    paths: tuple[Path, ...]  # the path of each name, as in DCP's planner data
    table: tuple[Properties, ...]
    name: Ints
    kind: Ints
    properties: Ints  # of each item: index in `table`; -1 for byte items
    dimensions: Ints
    size: Ints  # size of the whole tensor: int64[items, width], padded with 1
    offset: Ints  # offset of the chunk in it: int64[items, width], padded with 0
    extent: Ints  # size of the chunk: int64[items, width], padded with 1

    def __len__(self) -> int:
        return len(self.name)


@value_class(eq=False, kw_only=True)
class LocalPlan(PlanItems):
    """The plan of one rank as if it saved alone, in the order of its state dict."""

    def is_same(self, other: LocalPlan) -> bool:
        """Return whether both plans describe the same structure."""
        return (self.names, self.paths, self.table) == (
            other.names,
            other.paths,
            other.table,
        ) and all(
            np.array_equal(getattr(self, column), getattr(other, column)) for column in COLUMNS
        )

    def without(self, names: Collection[str]) -> LocalPlan:
        """Return the plan without these names and their items."""
        stays = np.array([name not in names for name in self.names], bool)
        rows, numbers = stays[self.name], np.cumsum(stays) - 1
        columns: dict[str, Any] = {column: getattr(self, column)[rows] for column in COLUMNS}
        columns["name"] = numbers[columns["name"]]
        return replace(
            self,
            names=tuple(compress(self.names, stays)),
            paths=tuple(compress(self.paths, stays)),
            **columns,
        )


def widened(columns: Ints, width: int, value: int) -> Ints:
    """Return sizes, offsets or extents with `width` columns, padded with `value`.

    `columns`: int64[rows, at most `width`].
    """
    missing = width - columns.shape[1]
    return np.pad(columns, ((0, 0), (0, missing)), constant_values=value) if missing else columns


@value_class(kw_only=True)
class ItemGroup:
    """Items of one kind, as columns; input of `local_plan`. A name may have several shards."""

    name: Sequence[int]
    kind: ItemKind
    properties: Sequence[Properties | None]  # None for byte items
    sizes: Sequence[Sequence[int]]
    offsets: Sequence[Sequence[int]] | None = None  # of each chunk; None if the tensors are whole
    extents: Sequence[Sequence[int]] | None = None  # of each chunk; None if the tensors are whole


def objects_group(numbers: Sequence[int]) -> ItemGroup:
    """Return the byte items of these names."""
    count = len(numbers)
    return ItemGroup(
        name=numbers, kind=ItemKind.OBJECT, properties=[None] * count, sizes=[()] * count
    )


def local_plan(names: Sequence[str], paths: Sequence[Path], *groups: ItemGroup) -> LocalPlan:
    """Return the plan with these items, in the order of their names."""
    name = np.fromiter(chain.from_iterable(group.name for group in groups), np.int64)
    order = np.argsort(name, kind="stable")
    numbers, table = _numbered([one for group in groups for one in group.properties])
    kinds = np.repeat([group.kind for group in groups], [len(group.name) for group in groups])
    sizes = chain.from_iterable(group.sizes for group in groups)
    dimensions = np.fromiter(map(len, sizes), np.int64, len(order))
    width = int(dimensions.max(initial=1))
    sides = [_sides(group, width) for group in groups]
    size, offset, extent = [np.concatenate(side)[order] for side in zip(*sides, strict=True)]
    return LocalPlan(
        names=tuple(names),
        paths=tuple(paths),
        table=table,
        name=name[order],
        kind=kinds.astype(np.int64)[order],
        properties=numbers[order],
        dimensions=dimensions[order],
        size=size,
        offset=offset,
        extent=extent,
    )


def _sides(group: ItemGroup, width: int) -> tuple[Ints, Ints, Ints]:
    """Return sizes, offsets and extents."""
    size = padded(group.sizes, width, 1)
    if group.offsets is None or group.extents is None:
        return size, np.zeros_like(size), size
    return size, padded(group.offsets, width, 0), padded(group.extents, width, 1)


def _numbered(properties: Sequence[Properties | None]) -> tuple[Ints, tuple[Properties, ...]]:
    """Return the index of each in a table of the distinct ones, and the table."""
    # Most are the same few objects; hashing each would take as long as all the rest.
    objects = dict(zip(map(id, properties), properties, strict=True))
    table: dict[Properties, int] = {}
    number = {
        key: -1 if one is None else table.setdefault(one, len(table))
        for key, one in objects.items()
    }
    return np.fromiter(
        map(number.__getitem__, map(id, properties)), np.int64, len(properties)
    ), tuple(table)
