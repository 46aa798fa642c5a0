"""One rank's plan as columns: names once, everything else numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import chain
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


class Whole(NamedTuple):
    """Tensors that are whole items, by columns. name: number of each one's name, ascending."""

    name: Sequence[int] | Ints = ()
    properties: Sequence[Properties] = ()
    sizes: Sequence[Sequence[int]] = ()


_NONE = Whole()


def local_plan(names: Sequence[str], paths: Sequence[Path], rows: Sequence[Row], whole: Whole = _NONE) -> LocalPlan:
    """The columns of these rows, and of tensors that are whole items, in the order of their names."""
    name, kind, properties, boxes = zip(*rows, strict=True) if rows else ((), (), (), ())
    sizes, offsets, extents = zip(*boxes, strict=True) if rows else ((), (), ())
    all_names = np.concatenate([np.asarray(name, np.int64), np.asarray(whole.name, np.int64)])
    order = np.argsort(all_names, kind="stable")
    dimensions = np.fromiter(map(len, chain(sizes, whole.sizes)), np.int64, len(order))
    numbers, table = _numbered([*properties, *whole.properties])
    of_whole = _padded(whole.sizes, dimensions[len(rows) :], dimensions, 1)
    own, paddings = dimensions[: len(rows)], (1, 0, 1)
    of_rows = [
        _padded(side, own, dimensions, value) for side, value in zip((sizes, offsets, extents), paddings, strict=True)
    ]
    return LocalPlan(
        names=tuple(names),
        paths=tuple(paths),
        table=table,
        name=all_names[order],
        kind=np.concatenate([np.asarray(kind, np.int64), np.full(len(whole.name), Kind.TENSOR, np.int64)])[order],
        properties=numbers[order],
        dimensions=dimensions[order],
        size=np.concatenate([of_rows[0], of_whole])[order],
        offset=np.concatenate([of_rows[1], np.zeros_like(of_whole)])[order],
        extent=np.concatenate([of_rows[2], of_whole])[order],
    )


def _numbered(properties: Sequence[Properties | None]) -> tuple[Ints, tuple[Properties, ...]]:
    """The number of each in a table of those that differ, and the table."""
    # Most are the same few objects; to ask each for its hash would take as long as all the rest.
    objects = dict(zip(map(id, properties), properties, strict=True))
    table: dict[Properties, int] = {}
    number = {key: -1 if one is None else table.setdefault(one, len(table)) for key, one in objects.items()}
    return np.fromiter(map(number.__getitem__, map(id, properties)), np.int64, len(properties)), tuple(table)


def _padded(sides: Sequence[Sequence[int]], counts: Ints, dimensions: Ints, value: int) -> Ints:
    """Rows of as many numbers each as the longest of all plans' rows has. counts: how many each has of its own."""
    result = np.full((len(sides), int(dimensions.max(initial=1))), value, np.int64)
    result[np.arange(result.shape[1]) < counts[:, None]] = np.fromiter(
        chain.from_iterable(sides), np.int64, int(counts.sum())
    )
    return result
