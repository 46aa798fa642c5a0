"""A rank's state dict: flattened and described once, and recognised from then on.

The first time, every leaf is described as DCP would. Afterwards only what could have changed is compared, by loops that
run in C: keys and types, dtypes and shapes, and where each DTensor says that it lies.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, compress
from typing import Any

import numpy as np
import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor

from dcp_mem.format.catalog import Ints
from dcp_mem.planning import distributed, sharded
from dcp_mem.planning.columns import Group, Kind, LocalPlan, NotDescribable, Row, local_plan
from dcp_mem.planning.flatten import Leaves, collect, flatten, is_container, may_be_container
from dcp_mem.planning.plain import BLOCK, PLAIN, properties_of

_DTYPE, _SHAPE, _LAYOUT = map(operator.attrgetter, ("dtype", "shape", "layout"))
_REQUIRES_GRAD, _SPEC = operator.attrgetter("requires_grad"), operator.attrgetter("_spec")
_LOCAL = operator.attrgetter("_local_tensor")
_LOOKED_AT: tuple[Callable[[Any], Any], ...] = (_DTYPE, _LAYOUT, _REQUIRES_GRAD, _SHAPE)


@dataclass(frozen=True, slots=True)
class _Sharding:
    """How sharded leaves say that they lie. others: of ShardedTensors; all else is of DTensors."""

    specs: Sequence[Any]
    shapes: Sequence[torch.Size]
    requires_grad: Sequence[bool]
    local_types: Sequence[type]
    others: Sequence[tuple[object, ...]]

    def is_same(self, other: _Sharding) -> bool:
        return (
            self.shapes == other.shapes
            and self.requires_grad == other.requires_grad
            and self.local_types == other.local_types
            and self.others == other.others
            and (all(map(operator.is_, self.specs, other.specs)) or all(map(_lie_alike, self.specs, other.specs)))
        )


class Described:
    """A state dict taken apart.

    leaves: in the order of plan.names. plan: what this rank would write; `parts_of` has what each item of it stands for.
    has_sharded_tensors: ShardedTensors, that is; DTensors are told apart from these.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        """Describe a state dict. Raises NotDescribable, and ValueError where two leaves get the same name."""
        self.root, found = flatten(state)
        self.leaves: Sequence[Any] = found.values
        self.plan = _plan_of(found)
        types = list(map(type, self.leaves))
        self._has_dtensors, self.has_sharded_tensors = DTensor in types, ShardedTensor in types
        self._has_part = _occur(self.plan.name, len(self.leaves))

    def parts_of(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """What the items of the plan stand for, in their order: of sharded leaves the local tensors; others as they are."""
        if not self._has_dtensors and not self.has_sharded_tensors:
            return leaves
        held = compress(leaves, self._has_part)
        if not self.has_sharded_tensors:
            return [leaf._local_tensor if type(leaf) is DTensor else leaf for leaf in held]
        return list(chain.from_iterable(map(_parts, held)))

    def leave_out(self, names: Collection[str]) -> None:
        """Leave the leaves of these names, and their items, out of `leaves` and `plan`."""
        self.leaves = [leaf for leaf, name in zip(self.leaves, self.plan.names, strict=True) if name not in names]
        self.plan = self.plan.without(names)
        self._has_part = _occur(self.plan.name, len(self.leaves))


class Structure:
    """A described state dict, which is recognised from then on.

    plan: what this rank would write. leaves of a state dict of the same structure come from `recognise`, in the order of
    plan.names; `parts_of` has what each item of the plan stands for.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        """Describe a state dict. Raises NotDescribable, and ValueError where two leaves get the same name."""
        described = Described(state)
        self.plan, self.parts_of, self._root, leaves = (
            described.plan,
            described.parts_of,
            described.root,
            described.leaves,
        )
        described.leaves = ()  # to be held by nobody
        self._types = list(map(type, leaves))
        self._dtensors = [number for number, kind in enumerate(self._types) if kind is DTensor]
        self._others = [number for number, kind in enumerate(self._types) if kind is ShardedTensor]
        self._doubtful = [number for number, kind in enumerate(self._types) if may_be_container(kind)]
        self._is_tensor = (self.plan.kind != Kind.OBJECT).tolist()
        self._grad_enabled = torch.is_grad_enabled()
        self._sharding = self._sharding_of(leaves)
        one_of: dict[torch.Size, torch.Size] = {}  # what is compared with few objects needn't wait for memory
        self._looks = [
            (*looks, [one_of.setdefault(shape, shape) for shape in shapes]) for *looks, shapes in self._look_at(leaves)
        ]

    def recognise(
        self, state: Mapping[str, Any], visit: Callable[[int, Sequence[torch.Tensor]], None] | None = None
    ) -> Sequence[Any] | None:
        """The leaves of a state dict of the same structure; None for any other.

        visit: gets each block of the plan's tensors, and the number of its first, while the cache still has them; what it
        has made of them counts for nothing where None is returned.
        """
        leaves: list[Any] = []
        if not collect(state, self._root, leaves):
            return None
        if list(map(type, leaves)) != self._types or torch.is_grad_enabled() != self._grad_enabled:
            return None
        if any(is_container(leaves[number]) for number in self._doubtful):
            return None
        # Leaves that lie alike have as many parts: only then can those be compared.
        if not self._sharding.is_same(self._sharding_of(leaves)):
            return None
        return leaves if all(map(operator.eq, self._look_at(leaves, visit), self._looks)) else None

    def _look_at(
        self, leaves: Sequence[Any], visit: Callable[[int, Sequence[torch.Tensor]], None] | None = None
    ) -> Iterator[tuple[list[Any], ...]]:
        """What is compared of this rank's tensors, a block at a time."""
        tensors: list[torch.Tensor] = list(compress(self.parts_of(leaves), self._is_tensor))
        for start in range(0, len(tensors), BLOCK):
            block = tensors[start : start + BLOCK]
            yield tuple(list(map(look, block)) for look in _LOOKED_AT)
            if visit is not None:  # if it goes on here, the block is as it was described
                visit(start, block)

    def _sharding_of(self, leaves: Sequence[Any]) -> _Sharding:
        distributed = list(map(leaves.__getitem__, self._dtensors))
        return _Sharding(
            specs=list(map(_SPEC, distributed)),
            shapes=list(map(_SHAPE, distributed)),
            requires_grad=list(map(_REQUIRES_GRAD, distributed)),
            local_types=list(map(type, map(_LOCAL, distributed))),
            others=[sharded.sharding_of(leaves[number]) for number in self._others],
        )


def _parts(leaf: Any) -> Sequence[Any]:
    if type(leaf) is ShardedTensor:
        return sharded.parts_of(leaf)
    return (leaf._local_tensor,) if type(leaf) is DTensor else (leaf,)


def _lie_alike(one: Any, other: Any) -> bool:
    """Whether two DTensors are laid out alike, going by their specs."""
    return one is other or (one.mesh == other.mesh and distributed.are_alike(one.placements, other.placements))


# -- describing --------------------------------------------------------------------------------------------------------


def _plan_of(leaves: Leaves) -> LocalPlan:
    kinds = list(map(type, leaves.values))
    if PLAIN.issuperset(kinds):
        rows, groups = [], []
        plain = leaves.values
        numbers: Sequence[int] = range(len(plain))
    else:
        is_plain, is_dtensor = list(map(PLAIN.__contains__, kinds)), [kind is DTensor for kind in kinds]
        others = [number for number, kind in enumerate(kinds) if kind not in PLAIN and kind is not DTensor]
        # Before anything is asked of plain tensors: that others can't be described may be the answer.
        rows = [row for number in others for row in _rows(number, leaves.values[number])]
        everything = range(len(kinds))
        groups = [
            distributed.group_of(list(compress(everything, is_dtensor)), list(compress(leaves.values, is_dtensor)))
        ]
        plain, numbers = list(compress(leaves.values, is_plain)), list(compress(everything, is_plain))
    known = properties_of(plain, map(_REQUIRES_GRAD, plain))
    groups.append(Group(numbers, Kind.TENSOR, known, list(map(_SHAPE, plain))))
    return local_plan(leaves.names, leaves.paths, rows, *groups)


def _rows(name: int, leaf: Any) -> Iterator[Row]:
    """Rows of a leaf that is neither a plain tensor nor a DTensor."""
    if type(leaf) is ShardedTensor:
        yield from sharded.rows_of(name, leaf)
    elif isinstance(leaf, torch.Tensor) or hasattr(leaf, "__create_write_items__"):
        raise NotDescribable(f"a {type(leaf).__module__}.{type(leaf).__name__}")
    else:
        yield Row(name, Kind.OBJECT)


def _occur(numbers: Ints, count: int) -> list[bool]:
    """Of each number below `count`, whether it occurs."""
    occurs: list[bool] = (np.bincount(numbers, minlength=count) > 0).tolist()
    return occurs
