"""A rank's state dict: flattened and described once, and recognised from then on.

The first time, every leaf is described as DCP would describe it. Afterwards only what can have
changed is compared, by loops that run in C: keys and types, dtypes and shapes, and each DTensor's
mesh and placements.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain, compress
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from dcp_mem.common.sharded_tensor import ShardedTensor
from dcp_mem.format.catalog import Ints
from dcp_mem.format.torch_names import properties
from dcp_mem.planning import sharded_tensors, torch_rules
from dcp_mem.planning.flatten import Leaves, collect_leaves, flatten, is_container, may_be_container
from dcp_mem.planning.plain_tensors import BLOCK, PLAIN, Where, facts_of, where
from dcp_mem.planning.plan_columns import (
    ItemGroup,
    ItemKind,
    LocalPlan,
    NotDescribable,
    local_plan,
    numbered,
    objects_group,
)
from dcp_mem.planning.shard_marks import SAVE_MARKS, are_marked, have_own_marks, mark_of

try:
    from torch._C._dynamo.guards import TensorGuards
except ImportError:  # a future torch
    TensorGuards = None  # type: ignore[assignment,misc]

_DTYPE, _SHAPE, _LAYOUT = map(operator.attrgetter, ("dtype", "shape", "layout"))
_REQUIRES_GRAD, _SPEC = operator.attrgetter("requires_grad"), operator.attrgetter("_spec")
_LOCAL = operator.attrgetter("_local_tensor")
_LOOKED_AT: tuple[Callable[[Any], Any], ...] = (type, _DTYPE, _LAYOUT, _REQUIRES_GRAD, _SHAPE)


class DescribedState:
    """A state dict taken apart and described.

    `leaves`: its leaves, in the order of `plan.names`. `plan`: what this rank would write;
    `item_values` returns the value of each item. `has_sharded_tensors`: whether any leaf is a
    `ShardedTensor`; DTensors don't count. Raises NotDescribable, ValueError.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        self.root, found = flatten(state)
        self.leaves: Sequence[Any] = found.values
        self.plan = _plan_of(found)
        self.has_sharded_tensors = ShardedTensor in map(type, self.leaves)
        self._note_parts()

    def _note_parts(self) -> None:
        self._has_part = _occur(self.plan.name, len(self.leaves))
        held = map(type, compress(self.leaves, self._has_part))
        changes = np.diff(np.array([0, *(kind is DTensor for kind in held), 0], np.int8))
        self._dtensors = np.flatnonzero(changes).reshape(-1, 2).tolist()  # from one to another

    def item_values(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Return the values of the plan's items: of sharded leaves, the local tensors.

        `leaves`: in the order of `plan.names`: those described, or those of a state dict with this
        structure.
        """
        if not self._dtensors and not self.has_sharded_tensors:
            return leaves
        held = list(compress(leaves, self._has_part))
        if self.has_sharded_tensors:
            return list(chain.from_iterable(map(_parts, held)))
        for start, stop in self._dtensors:
            held[start:stop] = map(_LOCAL, held[start:stop])
        return held

    def leave_out(self, names: Collection[str]) -> None:
        """Remove the leaves of these names, and their items, from `leaves` and `plan`."""
        self.leaves = [
            leaf
            for leaf, name in zip(self.leaves, self.plan.names, strict=True)
            if name not in names
        ]
        self.plan = self.plan.without(names)
        self._note_parts()


class Structure:
    """The structure of a state dict, by which later ones are recognised.

    `recognise` returns the leaves of a state dict of the same structure, in the order of
    `plan.names`, and `item_values` the values of the plan's items. The structure holds no leaves.

    `plan`: what this rank would write. Raises NotDescribable, ValueError.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        described = DescribedState(state)
        torch_rules.refuse_other_save(described.plan, described.leaves)
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
        self._sharding = _Sharding(*self._sharded(leaves))
        one_of: dict[torch.Size, torch.Size] = {}
        self._looks = [_Looks(block, one_of) for _, block in self._blocks(leaves)]

    def recognise(
        self,
        state: Mapping[str, Any],
        visit: Callable[[int, Sequence[torch.Tensor], Where | None], None] | None = None,
    ) -> Sequence[Any] | None:
        """Return the leaves of a state dict of the same structure; None for any other.

        `visit`: called with the index of its first tensor, each block of the plan's tensors, and
        where these are known to lie, while the processor's cache has them. If None is returned, its
        results are void.
        """
        leaves: list[Any] = []
        if not collect_leaves(state, self._root, leaves):
            return None
        if list(map(type, leaves)) != self._types or torch.is_grad_enabled() != self._grad_enabled:
            return None
        doubtful = list(map(leaves.__getitem__, self._doubtful))
        if any(map(is_container, doubtful)) or any(map(_plans_itself, doubtful)):
            return None
        # Leaves that are sharded alike have as many items: only then can those be compared.
        if not self._sharding.is_that_of(*self._sharded(leaves)):
            return None
        for looks, (start, block) in zip(self._looks, self._blocks(leaves), strict=True):
            is_guarded = looks.guards.hold(block)
            if not (is_guarded or looks.are_those_of(block)) or are_marked(block, SAVE_MARKS):
                return None
            if visit is not None:
                visit(start, block, looks.guards.where if is_guarded else None)
        return leaves

    def _blocks(self, leaves: Sequence[Any]) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """Yield the plan's tensors a block at a time, with the index of its first."""
        tensors: list[torch.Tensor] = list(compress(self.item_values(leaves), self._is_tensor))
        for start in range(0, len(tensors), BLOCK):
            yield start, tensors[start : start + BLOCK]

    def _sharded(self, leaves: Sequence[Any]) -> tuple[list[DTensor], list[ShardedTensor]]:
        return list(map(leaves.__getitem__, self._dtensors)), [
            leaves[number] for number in self._others
        ]


class _Looks:
    """What a block of tensors looks like.

    `one_of`: of each shape the object to compare with. Comparing with few of them is faster: they
    stay in the processor's cache.
    """

    def __init__(self, block: Sequence[torch.Tensor], one_of: dict[torch.Size, torch.Size]) -> None:
        self.guards = Guards(block)
        *looks, shapes = _look_at(block)
        self._looks = (*looks, [one_of.setdefault(shape, shape) for shape in shapes])

    def are_those_of(self, block: Sequence[torch.Tensor]) -> bool:
        """Return whether as many tensors look the same in all that the plan depends on."""
        return all(map(operator.eq, _look_at(block), self._looks))


def _look_at(block: Sequence[torch.Tensor]) -> Iterator[list[Any]]:
    return (list(map(look, block)) for look in _LOOKED_AT)


class _Sharding:
    """How the sharded leaves of a state dict are sharded."""

    def __init__(self, dtensors: Sequence[DTensor], others: Sequence[ShardedTensor]) -> None:
        self._guards = Guards(dtensors)
        self._specs, self._wholes = list(map(_SPEC, dtensors)), _wholes(dtensors)
        self._others = list(map(sharded_tensors.sharding_of, others))

    def is_that_of(self, dtensors: Sequence[DTensor], others: Sequence[ShardedTensor]) -> bool:
        """Return whether as many leaves are sharded alike."""
        specs = list(map(_SPEC, dtensors))
        return (
            (all(map(operator.is_, specs, self._specs)) or all(map(_lie_alike, specs, self._specs)))
            and (self._guards.hold(dtensors) or _wholes(dtensors) == self._wholes)
            and list(map(sharded_tensors.sharding_of, others)) == self._others
            and not are_marked(others, SAVE_MARKS)
        )


def _wholes(dtensors: Sequence[DTensor]) -> list[tuple[Any, ...]]:
    return list(zip(map(_SHAPE, dtensors), map(_REQUIRES_GRAD, dtensors), strict=True))


def _parts(leaf: Any) -> Sequence[Any]:
    if type(leaf) is ShardedTensor:
        return sharded_tensors.local_tensors(leaf)
    return (leaf._local_tensor,) if type(leaf) is DTensor else (leaf,)


def _lie_alike(one: Any, other: Any) -> bool:
    """Return whether two DTensors' specs have the same mesh and placements."""
    return one is other or (
        one.mesh == other.mesh and sharded_tensors.are_alike(one.placements, other.placements)
    )


# -- looking at many tensors at once ---------------------------------------------------------------


class Guards:
    """The metadata of tensors, checked by torch.compile's guards; it holds none of them.

    These compare everything that is said of a tensor but its address and its values, in one loop of
    compiled code. Attribute by attribute the same takes six times as long.

    `where`: where they lie, if they can be copied as bytes; None also where `hold` can't tell.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._guards = _made(tensors) if _notice_everything() else None
        self.where = where(tensors) if self._guards is not None else None

    def hold(self, tensors: Sequence[Any]) -> bool:
        """Return whether as many tensors look the same, one by one.

        That is: class, dtype, layout, device, shape, strides, gradients, and whether it is the
        conjugate or the negative of what its memory has. False may also mean that nobody can tell.
        """
        if self._guards is None:
            return False
        with torch.enable_grad():  # without it, nobody looks whether a tensor requires gradients
            return bool(self._guards.check(*tensors))


def _made(tensors: Sequence[torch.Tensor]) -> Any:
    """Return torch's guards of tensors; None where it has none for one of them."""
    try:
        with torch.enable_grad():
            return TensorGuards(
                *tensors,
                dynamic_dims_sizes=[list(one.shape) for one in tensors],  # type: ignore[misc]
                dynamic_dims_strides=[list(one.stride()) for one in tensors],  # type: ignore[misc]
            )
    except Exception:
        return None


@cache
def _notice_everything() -> bool:
    """Return whether this torch's guards are there, and notice all that they are asked for."""
    if TensorGuards is None:
        return False
    one, complex_one = torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.cfloat)
    pairs: list[tuple[torch.Tensor, Any]] = [
        (one, torch.zeros(2, 4)),
        (one, torch.zeros(2, 3, 1)),
        (one, torch.zeros(3, 2).t()),
        (one, one.double()),
        (one, one.to_sparse()),
        (one, torch.zeros(2, 3, device="meta")),
        (one, torch.zeros(2, 3, requires_grad=True)),
        (one, torch.nn.Parameter(one, requires_grad=False)),
        (complex_one, complex_one.conj()),
        (complex_one.imag, complex_one.conj().imag),
        (one, "no tensor"),
    ]
    try:
        return all(_tell_apart(before, after) for before, after in pairs)
    except Exception:  # of a torch that wants to be asked otherwise
        return False


def _tell_apart(before: torch.Tensor, after: Any) -> bool:
    guards = _made((before,))
    with torch.enable_grad():
        return bool(guards.check(before.detach())) and not guards.check(after)


# -- describing -----------------------------------------------------------------------------------


def _plan_of(leaves: Leaves) -> LocalPlan:
    kinds = list(map(type, leaves.values))
    _refuse_marks(leaves, kinds)
    is_plain = list(map(PLAIN.__contains__, kinds))
    others = [number for number, known in enumerate(is_plain) if not known]
    sharded = [number for number in others if kinds[number] is DTensor]
    others = [number for number in others if kinds[number] is not DTensor]
    # Before any work on other tensors: this may raise NotDescribable.
    groups = list(_groups_of_others(leaves.values, others))
    if sharded:
        dtensors = list(map(leaves.values.__getitem__, sharded))
        groups.append(sharded_tensors.dtensors_group(sharded, dtensors))
    numbers = list(compress(range(len(kinds)), is_plain))
    plain = list(compress(leaves.values, is_plain))
    try:
        look, facts = numbered(facts_of(plain, map(_REQUIRES_GRAD, plain)))
    except RuntimeError as error:  # of tensors nested in a tensor of torch's own class
        raise NotDescribable(f"a tensor without a shape ({error})") from None
    looks = [(properties(*known), size, (0,) * len(size), size) for *known, size in facts]
    groups.append(ItemGroup(name=numbers, kind=ItemKind.TENSOR, look=look, looks=looks))
    return local_plan(leaves.names, leaves.paths, *groups)


def _refuse_marks(leaves: Leaves, kinds: Sequence[type]) -> None:
    """Raise NotDescribable for a tensor of torch's own classes that isn't what its class says."""
    plain = list(compress(leaves.values, map(PLAIN.__contains__, kinds)))
    sharded = list(compress(leaves.values, map((DTensor, ShardedTensor).__contains__, kinds)))
    parts = [leaf._local_tensor for leaf in sharded if type(leaf) is DTensor]
    if not (are_marked(plain) or have_own_marks(sharded) or have_own_marks(parts)):
        return
    for name, leaf in zip(leaves.names, leaves.values, strict=True):
        for part in (leaf, getattr(leaf, "_local_tensor", leaf)):
            mark = mark_of(part) if type(part) in {*PLAIN, DTensor, ShardedTensor} else ""
            if mark:
                raise NotDescribable(f"{name} is a tensor with {mark}")


def _groups_of_others(leaves: Sequence[Any], numbers: Sequence[int]) -> Iterator[ItemGroup]:
    """Yield the items of those leaves, which are neither plain tensors nor DTensors."""
    objects = []
    for number in numbers:
        leaf, kind = leaves[number], type(leaves[number])
        if kind is ShardedTensor:
            yield sharded_tensors.sharded_tensor_group(number, leaf)
        elif isinstance(leaf, torch.Tensor) or _plans_itself(leaf):
            raise NotDescribable(f"a {kind.__module__}.{kind.__name__}")
        else:
            objects.append(number)
    yield objects_group(objects)


def _plans_itself(leaf: Any) -> bool:
    return hasattr(leaf, "__create_write_items__")


def _occur(numbers: Ints, count: int) -> list[bool]:
    """Return, for each number below `count`, whether it occurs."""
    occurs: list[bool] = (np.bincount(numbers, minlength=count) > 0).tolist()
    return occurs
