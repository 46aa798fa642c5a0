"""A rank's state dict: flattened and described once, and recognised from then on.

The first time, every leaf is described as DCP would describe it. Afterwards only what can have
changed is compared, by loops that run in C: keys and types, dtypes and shapes, and each DTensor's
mesh and placements.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, compress
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from dcp_mem.common.sharded_tensor import ShardedTensor
from dcp_mem.format.catalog import Ints
from dcp_mem.planning import dtensors, sharded_tensors
from dcp_mem.planning.flatten import Leaves, collect_leaves, flatten, is_container, may_be_container
from dcp_mem.planning.plain_tensors import BLOCK, PLAIN, properties_of
from dcp_mem.planning.plan_columns import (
    ItemKind,
    ItemRow,
    LocalPlan,
    NotDescribable,
    TensorGroup,
    local_plan,
)

_DTYPE, _SHAPE, _LAYOUT = map(operator.attrgetter, ("dtype", "shape", "layout"))
_REQUIRES_GRAD, _SPEC = operator.attrgetter("requires_grad"), operator.attrgetter("_spec")
_LOCAL = operator.attrgetter("_local_tensor")
_LOOKED_AT: tuple[Callable[[Any], Any], ...] = (_DTYPE, _LAYOUT, _REQUIRES_GRAD, _SHAPE)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sharding:
    """The sharding of leaves: `others` of ShardedTensors, the other fields of DTensors."""

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
            and (
                all(map(operator.is_, self.specs, other.specs))
                or all(map(_lie_alike, self.specs, other.specs))
            )
        )


class DescribedState:
    """A state dict taken apart and described.

    Args:
        state: As `dcp.save` gets it.

    Attributes:
        root: Its structure.
        leaves: Its leaves, in the order of `plan.names`.
        plan: What this rank would write; `item_values` returns the value of each item.
        has_sharded_tensors: Whether any leaf is a `ShardedTensor`; DTensors don't count.

    Raises:
        NotDescribable: It holds something that only DCP's own planner can plan.
        ValueError: Two leaves get the same flattened name, or a DTensor has partial placements.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        self.root, found = flatten(state)
        self.leaves: Sequence[Any] = found.values
        self.plan = _plan_of(found)
        types = list(map(type, self.leaves))
        self._has_dtensors, self.has_sharded_tensors = DTensor in types, ShardedTensor in types
        self._has_part = _occur(self.plan.name, len(self.leaves))

    def item_values(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Return the values of the plan's items: of sharded leaves, the local tensors.

        Args:
            leaves: In the order of `plan.names`: those described, or those of a state dict with
                this structure.
        """
        if not self._has_dtensors and not self.has_sharded_tensors:
            return leaves
        held = compress(leaves, self._has_part)
        if not self.has_sharded_tensors:
            return [leaf._local_tensor if type(leaf) is DTensor else leaf for leaf in held]
        return list(chain.from_iterable(map(_parts, held)))

    def leave_out(self, names: Collection[str]) -> None:
        """Remove the leaves of these names, and their items, from `leaves` and `plan`.

        Args:
            names: Flattened names.
        """
        self.leaves = [
            leaf
            for leaf, name in zip(self.leaves, self.plan.names, strict=True)
            if name not in names
        ]
        self.plan = self.plan.without(names)
        self._has_part = _occur(self.plan.name, len(self.leaves))


class Structure:
    """The structure of a state dict, by which later ones are recognised.

    `recognise` returns the leaves of a state dict of the same structure, in the order of
    `plan.names`, and `item_values` the values of the plan's items. The structure holds no leaves.

    Args:
        state: As `dcp.save` gets it.

    Attributes:
        plan: What this rank would write.

    Raises:
        NotDescribable: It holds something that only DCP's own planner can plan.
        ValueError: Two leaves get the same flattened name, or a DTensor has partial placements.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        described = DescribedState(state)
        self.plan, self.item_values, self._root, leaves = (
            described.plan,
            described.item_values,
            described.root,
            described.leaves,
        )
        described.leaves = ()  # item_values is bound to it, and must not keep the leaves alive
        self._types = list(map(type, leaves))
        self._dtensors = [number for number, kind in enumerate(self._types) if kind is DTensor]
        self._others = [number for number, kind in enumerate(self._types) if kind is ShardedTensor]
        self._doubtful = [
            number for number, kind in enumerate(self._types) if may_be_container(kind)
        ]
        self._is_tensor = (self.plan.kind != ItemKind.OBJECT).tolist()
        self._grad_enabled = torch.is_grad_enabled()
        self._sharding = self._sharding_of(leaves)
        # Comparing with few objects is faster: they stay in the processor's cache.
        one_of: dict[torch.Size, torch.Size] = {}
        self._looks = [
            (*looks, [one_of.setdefault(shape, shape) for shape in shapes])
            for *looks, shapes in self._look_at(leaves)
        ]

    def recognise(
        self,
        state: Mapping[str, Any],
        visit: Callable[[int, Sequence[torch.Tensor]], None] | None = None,
    ) -> Sequence[Any] | None:
        """Return the leaves of a state dict of the same structure; None for any other.

        Args:
            state: The state dict.
            visit: Called with the index of its first tensor and each block of the plan's tensors,
                while the processor's cache has them. If None is returned, its results are void.
        """
        leaves: list[Any] = []
        if not collect_leaves(state, self._root, leaves):
            return None
        if list(map(type, leaves)) != self._types or torch.is_grad_enabled() != self._grad_enabled:
            return None
        if any(is_container(leaves[number]) for number in self._doubtful):
            return None
        # Leaves that are sharded alike have as many items: only then can those be compared.
        if not self._sharding.is_same(self._sharding_of(leaves)):
            return None
        return leaves if all(map(operator.eq, self._look_at(leaves, visit), self._looks)) else None

    def _look_at(
        self,
        leaves: Sequence[Any],
        visit: Callable[[int, Sequence[torch.Tensor]], None] | None = None,
    ) -> Iterator[tuple[list[Any], ...]]:
        """Yield what is compared of this rank's tensors, a block at a time."""
        tensors: list[torch.Tensor] = list(compress(self.item_values(leaves), self._is_tensor))
        for start in range(0, len(tensors), BLOCK):
            block = tensors[start : start + BLOCK]
            yield tuple(list(map(look, block)) for look in _LOOKED_AT)
            if visit is not None:  # only reached if the block is as it was described
                visit(start, block)

    def _sharding_of(self, leaves: Sequence[Any]) -> _Sharding:
        found = list(map(leaves.__getitem__, self._dtensors))
        return _Sharding(
            specs=list(map(_SPEC, found)),
            shapes=list(map(_SHAPE, found)),
            requires_grad=list(map(_REQUIRES_GRAD, found)),
            local_types=list(map(type, map(_LOCAL, found))),
            others=[sharded_tensors.sharding_of(leaves[number]) for number in self._others],
        )


def _parts(leaf: Any) -> Sequence[Any]:
    if type(leaf) is ShardedTensor:
        return sharded_tensors.local_tensors(leaf)
    return (leaf._local_tensor,) if type(leaf) is DTensor else (leaf,)


def _lie_alike(one: Any, other: Any) -> bool:
    """Return whether two DTensors' specs have the same mesh and placements."""
    return one is other or (
        one.mesh == other.mesh and dtensors.are_alike(one.placements, other.placements)
    )


# -- describing -----------------------------------------------------------------------------------


def _plan_of(leaves: Leaves) -> LocalPlan:
    kinds = list(map(type, leaves.values))
    if PLAIN.issuperset(kinds):
        rows, groups = [], []
        plain = leaves.values
        numbers: Sequence[int] = range(len(plain))
    else:
        is_plain, is_dtensor = (
            list(map(PLAIN.__contains__, kinds)),
            [kind is DTensor for kind in kinds],
        )
        others = [
            number for number, kind in enumerate(kinds) if kind not in PLAIN and kind is not DTensor
        ]
        # Before any work on plain tensors: this may raise NotDescribable.
        rows = [row for number in others for row in _rows(number, leaves.values[number])]
        everything = range(len(kinds))
        groups = [
            dtensors.tensor_group_of(
                list(compress(everything, is_dtensor)), list(compress(leaves.values, is_dtensor))
            )
        ]
        plain, numbers = (
            list(compress(leaves.values, is_plain)),
            list(compress(everything, is_plain)),
        )
    known = properties_of(plain, map(_REQUIRES_GRAD, plain))
    groups.append(
        TensorGroup(
            name=numbers, kind=ItemKind.TENSOR, properties=known, sizes=list(map(_SHAPE, plain))
        )
    )
    return local_plan(leaves.names, leaves.paths, rows, *groups)


def _rows(name: int, leaf: Any) -> Iterator[ItemRow]:
    """Yield the rows of a leaf that is neither a plain tensor nor a DTensor."""
    if type(leaf) is ShardedTensor:
        yield from sharded_tensors.rows_of(name, leaf)
    elif isinstance(leaf, torch.Tensor) or hasattr(leaf, "__create_write_items__"):
        raise NotDescribable(f"a {type(leaf).__module__}.{type(leaf).__name__}")
    else:
        yield ItemRow(name, ItemKind.OBJECT)


def _occur(numbers: Ints, count: int) -> list[bool]:
    """Return, for each number below `count`, whether it occurs."""
    occurs: list[bool] = (np.bincount(numbers, minlength=count) > 0).tolist()
    return occurs
