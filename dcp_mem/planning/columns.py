"""One rank's plan as columns: names once, everything else numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import numpy as np

from dcp_mem.format.catalog import Ints, Path, Properties

COLUMNS = ("name", "kind", "properties", "dimensions", "size", "offset", "extent")


class Kind(IntEnum):
    """What an item is: a byte item, a whole tensor, or a chunk of one."""

    OBJECT = 0
    TENSOR = 1
    SHARD = 2


@dataclass(frozen=True, slots=True, eq=False)
class LocalPlan:
    """What one rank would write if it were alone, one row an item, in the order of its state dict.

    names: of the flattened state dict, with the path of each (`planner_data` of DCP's metadata); some may have no item
    here, others several. name, kind, properties: of each item, by number; properties are -1 for byte items. size, offset,
    extent: of the tensor, and of the chunk in it; int64[items, dimensions], and rows of fewer dimensions are padded
    with 1, 0 and 1. dimensions: how many of them count.
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


@dataclass(frozen=True, slots=True)
class Row:
    """One item, on its way into a LocalPlan. name: number of its name. box: size, offset and extent."""

    name: int
    kind: Kind
    properties: Properties | None = None
    box: tuple[Sequence[int], Sequence[int], Sequence[int]] = ((), (), ())


def local_plan(names: Sequence[str], paths: Sequence[Path], rows: Sequence[Row]) -> LocalPlan:
    """The columns of these rows."""
    numbers: dict[Properties, int] = {}
    dimensions = np.fromiter((len(row.box[0]) for row in rows), np.int64, len(rows))
    width = int(dimensions.max(initial=1))
    boxes = np.empty((3, len(rows), width), np.int64)
    boxes[0], boxes[1], boxes[2] = 1, 0, 1
    for index, row in enumerate(rows):
        for part, values in enumerate(row.box):
            boxes[part, index, : len(values)] = values
    return LocalPlan(
        names=tuple(names),
        paths=tuple(paths),
        name=np.fromiter((row.name for row in rows), np.int64, len(rows)),
        kind=np.fromiter((row.kind for row in rows), np.int64, len(rows)),
        properties=np.fromiter(
            (-1 if row.properties is None else numbers.setdefault(row.properties, len(numbers)) for row in rows),
            np.int64,
            len(rows),
        ),
        table=tuple(numbers),
        dimensions=dimensions,
        size=boxes[0],
        offset=boxes[1],
        extent=boxes[2],
    )
