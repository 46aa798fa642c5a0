"""One rank's plan as columns: names once, everything else as numbers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import replace
from enum import IntEnum
from itertools import chain, compress, count, repeat
from typing import Any, TypeVar

import numpy as np

from dcp_mem.common.value_class import value_class
from dcp_mem.format.catalog import Ints, Path, Properties

H = TypeVar("H", bound=Hashable)
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


Look = tuple[Properties | None, Sequence[int], Sequence[int] | None, Sequence[int] | None]
"""What a plan says of an item: properties, size, offset and extent of its chunk.

Properties are None for byte items, offset and extent for whole tensors.
"""


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
        looks=[(None, (), None, None)],
    )


def numbered(values: Iterable[H]) -> tuple[list[int], list[H]]:
    """Return the index of each value among the distinct ones, and these as they first occur."""
    index: defaultdict[H, int] = defaultdict(count().__next__)
    numbers = list(map(index.__getitem__, values))
    return numbers, list(index)


def local_plan(names: Sequence[str], paths: Sequence[Path], *groups: ItemGroup) -> LocalPlan:
    """Return the plan with these items, in the order of their names."""
    name = np.fromiter(chain.from_iterable(group.name for group in groups), np.int64)
    order = np.argsort(name, kind="stable")
    starts = np.cumsum([0, *(len(group.looks) for group in groups)]).tolist()
    looks = [look for group in groups for look in group.looks]
    # Thousands of items look the same: columns are made of their looks, and spread.
    item = np.concatenate(
        [
            np.fromiter(group.look, np.int64, len(group.look)) + start
            for group, start in zip(groups, starts, strict=False)
        ]
    )[order]
    kinds = np.repeat([group.kind for group in groups], [len(group.looks) for group in groups])
    known, table = numbered(one for one, *_ in looks if one is not None)
    properties = np.full(len(looks), -1)
    properties[[one is not None for one, *_ in looks]] = known
    sizes = [size for _, size, _, _ in looks]
    width = max([1, *map(len, sizes)])
    offsets = [(0,) * len(size) if offset is None else offset for _, size, offset, _ in looks]
    extents = [size if extent is None else extent for _, size, _, extent in looks]
    return LocalPlan(
        names=tuple(names),
        paths=tuple(paths),
        table=tuple(table),
        name=name[order],
        kind=kinds.astype(np.int64)[item],
        properties=properties[item],
        dimensions=np.fromiter(map(len, sizes), np.int64, len(sizes))[item],
        size=_padded(sizes, width, 1)[item],
        offset=_padded(offsets, width, 0)[item],
        extent=_padded(extents, width, 1)[item],
    )


def _padded(sides: Sequence[Sequence[int]], width: int, value: int) -> Ints:
    """Return int64[rows, width], padded with `value`."""
    rows = [(*side, *repeat(value, width - len(side))) for side in sides]
    return np.array(rows, np.int64).reshape(-1, width)
