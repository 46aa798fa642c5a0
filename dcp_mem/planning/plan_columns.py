"""One rank's plan as columns: names once, everything else as numbers."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import replace
from enum import IntEnum
from itertools import chain, compress, count
from typing import Any, TypeVar

import numpy as np

from dcp_mem.common.value_class import value_class
from dcp_mem.format.catalog import Ints, Path, Properties
from dcp_mem.format.column_file import padded

H = TypeVar("H", bound=Hashable)
_NAME = operator.attrgetter("name")
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


Look = tuple[Properties | None, Sequence[int], Sequence[int], Sequence[int]]
"""An item's properties (None for byte items), size, offset and extent."""


@value_class(kw_only=True)
class ItemGroup:
    """Items of one kind; input of `local_plan`. A name may have several shards."""

    name: Sequence[int]
    kind: ItemKind
    look: Sequence[int]  # of each item: index in `looks`
    looks: Sequence[Look]


def objects_group(numbers: Sequence[int]) -> ItemGroup:
    """Return the byte items of these names."""
    return ItemGroup(
        name=numbers,
        kind=ItemKind.OBJECT,
        look=[0] * len(numbers),
        looks=[(None, (), (), ())],
    )


def numbered(values: Iterable[H]) -> tuple[list[int], list[H]]:
    """Return the index of each value among the distinct ones, and these as they first occur."""
    index: defaultdict[H, int] = defaultdict(count().__next__)
    numbers = list(map(index.__getitem__, values))
    return numbers, list(index)


def local_plan(names: Sequence[str], paths: Sequence[Path], *groups: ItemGroup) -> LocalPlan:
    """Return the plan with these items, in the order of their names."""
    # Thousands of items look the same: columns are made of their looks, and spread.
    looks, kinds, numbers = list[Look](), list[ItemKind](), list[Ints]()
    for group in groups:
        numbers.append(np.asarray(group.look, np.int64) + len(looks))
        kinds += [group.kind] * len(group.looks)
        looks += group.looks
    known, size, offset, extent = zip(*looks, strict=True)
    index: dict[Properties | None, int] = {None: -1}
    properties = [index.setdefault(one, len(index) - 1) for one in known]
    dimensions = list(map(len, size))
    width = max(1, *dimensions)
    name = np.fromiter(chain.from_iterable(map(_NAME, groups)), np.int64)
    order = np.argsort(name, kind="stable")
    look = np.concatenate(numbers)[order]
    return LocalPlan(
        names=tuple(names),
        paths=tuple(paths),
        table=tuple(one for one in index if one is not None),
        name=name[order],
        kind=np.array(kinds, np.int64)[look],
        properties=np.array(properties, np.int64)[look],
        dimensions=np.array(dimensions, np.int64)[look],
        size=padded(size, width, 1)[look],
        offset=padded(offset, width, 0)[look],
        extent=padded(extent, width, 1)[look],
    )
