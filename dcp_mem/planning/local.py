"""A rank's state dict: flattened and described once, and recognised from then on.

The first time, every leaf is described as DCP would. Afterwards only what could have changed is compared, by loops that
run in C: keys and types, dtypes and shapes, and where each DTensor says that it lies.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, compress
from typing import Any

import numpy as np
import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from dcp_mem.format.catalog import Path
from dcp_mem.format.torch_names import properties
from dcp_mem.planning import sharded
from dcp_mem.planning.columns import Kind, LocalPlan, NotDescribable, Row, local_plan
from dcp_mem.planning.plain import PLAIN

_DTYPE, _SHAPE, _LAYOUT = map(operator.attrgetter, ("dtype", "shape", "layout"))
_REQUIRES_GRAD, _SPEC = operator.attrgetter("requires_grad"), operator.attrgetter("_spec")
_LOCAL = operator.attrgetter("_local_tensor")
_LOOKED_AT: tuple[Callable[[Any], Any], ...] = (_DTYPE, _LAYOUT, _REQUIRES_GRAD, _SHAPE)
_NO_CONTAINERS = frozenset({*PLAIN, DTensor, ShardedTensor, type(None), bool, int, float, str, bytes, tuple})
_BLOCK = 1024
"""Tensors are looked at in blocks: what the first loop over one brings into the cache, the next ones find there."""

Extent = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Container:
    """What a mapping or list looked like. keys: of a mapping. inner: its values that are containers themselves."""

    kind: type[Any]
    length: int
    keys: Sequence[Any] | None
    key_types: Sequence[type]
    inner: Mapping[int, _Container]


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


class Structure:
    """A described state dict.

    plan: what this rank would write. leaves of a state dict of the same structure come from `recognise`, in the order of
    plan.names; `parts_of` has what each item of the plan stands for.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        """Describe a state dict. Raises NotDescribable, and ValueError where two leaves get the same name."""
        leaves: list[Any] = []
        paths: list[Path] = []
        self._root = _container(state, (), leaves, paths)
        rows = list(_rows(leaves))  # before anything is asked of leaves that can't be described
        names = [".".join(map(str, path)) for path in paths]
        if len(set(names)) < len(names):
            doubled = next(name for index, name in enumerate(names) if name in names[:index])
            raise ValueError(f"two entries of the state dict have the same flattened name: {doubled}")
        self.plan: LocalPlan = local_plan(names, paths, rows)
        self._types = list(map(type, leaves))
        self._dtensors = [number for number, kind in enumerate(self._types) if kind is DTensor]
        self._others = [number for number, kind in enumerate(self._types) if kind is ShardedTensor]
        self._doubtful = [number for number, kind in enumerate(self._types) if kind not in _NO_CONTAINERS]
        self._has_part = (np.bincount(self.plan.name, minlength=len(names)) > 0).tolist()
        self._is_tensor = (self.plan.kind != Kind.OBJECT).tolist()
        self._grad_enabled = torch.is_grad_enabled()
        self._sharding = self._sharding_of(leaves)
        one_of: dict[torch.Size, torch.Size] = {}  # what is compared with few objects needn't wait for memory
        self._looks = [
            (*looks, [one_of.setdefault(shape, shape) for shape in shapes]) for *looks, shapes in self._look_at(leaves)
        ]

    def leaves_of(self, state: Mapping[str, Any]) -> Sequence[Any]:
        """The leaves of the state dict that was described."""
        leaves: list[Any] = []
        _collect(state, self._root, leaves)
        return leaves

    def recognise(
        self, state: Mapping[str, Any], visit: Callable[[int, Sequence[torch.Tensor]], None] | None = None
    ) -> Sequence[Any] | None:
        """The leaves of a state dict of the same structure; None for any other.

        visit: gets each block of the plan's tensors, and the number of its first, while the cache still has them; what it
        has made of them counts for nothing where None is returned.
        """
        leaves: list[Any] = []
        if not _collect(state, self._root, leaves):
            return None
        if list(map(type, leaves)) != self._types or torch.is_grad_enabled() != self._grad_enabled:
            return None
        if any(_is_container(leaves[number]) for number in self._doubtful):
            return None
        # Leaves that lie alike have as many parts: only then can those be compared.
        if not self._sharding.is_same(self._sharding_of(leaves)):
            return None
        return leaves if all(map(operator.eq, self._look_at(leaves, visit), self._looks)) else None

    def parts_of(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """What the items of the plan stand for, in their order: of sharded leaves the local tensors; others as they are."""
        if not self._dtensors and not self._others:
            return leaves
        held = compress(leaves, self._has_part)
        if not self._others:
            return [leaf._local_tensor if type(leaf) is DTensor else leaf for leaf in held]
        return list(chain.from_iterable(map(_parts, held)))

    def _look_at(
        self, leaves: Sequence[Any], visit: Callable[[int, Sequence[torch.Tensor]], None] | None = None
    ) -> Iterator[tuple[list[Any], ...]]:
        """What is compared of this rank's tensors, a block at a time."""
        tensors: list[torch.Tensor] = list(compress(self.parts_of(leaves), self._is_tensor))
        for start in range(0, len(tensors), _BLOCK):
            block = tensors[start : start + _BLOCK]
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
    return one is other or (one.mesh == other.mesh and one.placements == other.placements)


# -- flattening, by the rules of torch.distributed.checkpoint._nested_dict --------------------------------------------


def _container(value: Any, path: Path, leaves: list[Any], paths: list[Path]) -> _Container:
    keys = list(value) if isinstance(value, Mapping) else None
    parts: Sequence[str | int] = range(len(value)) if keys is None else list(map(str, keys))
    inner: dict[int, _Container] = {}
    for position, (part, entry) in enumerate(zip(parts, _values(value, keys is not None), strict=True)):
        if _is_container(entry):
            inner[position] = _container(entry, (*path, part), leaves, paths)
        else:
            leaves.append(entry)
            paths.append((*path, part))
    return _Container(type(value), len(value), keys, list(map(type, keys or ())), inner)


def _collect(value: Any, known: _Container, leaves: list[Any]) -> bool:
    """Append the leaves of a container that has the same keys as the known one, and so within; whether it has.

    A leaf that has become a container is appended as it is.
    """
    if type(value) is not known.kind or len(value) != known.length:
        return False
    if known.keys is not None:
        keys = list(value)
        # Most often they are the very same: equal ones may have other names, as 1 and True have.
        if not all(map(operator.is_, keys, known.keys)) and (
            keys != known.keys or list(map(type, keys)) != known.key_types
        ):
            return False
    values = _values(value, known.keys is not None)
    done = 0
    for position, container in known.inner.items():
        leaves.extend(values[done:position])
        if not _collect(values[position], container, leaves):
            return False
        done = position + 1
    leaves.extend(values[done:])
    return True


def _values(value: Any, is_mapping: bool) -> list[Any]:
    return list(value.values()) if is_mapping else list(value)


def _is_container(value: Any) -> bool:
    """Whether DCP goes into it: any mapping, and lists that hold a tensor or a mapping somewhere."""
    if type(value) in _NO_CONTAINERS:
        return False
    if isinstance(value, Mapping):
        return True
    return isinstance(value, list) and any(isinstance(entry, torch.Tensor) or _is_container(entry) for entry in value)


# -- describing --------------------------------------------------------------------------------------------------------


def _rows(leaves: Sequence[Any]) -> Iterator[Row]:
    chunk = lru_cache(maxsize=None)(_chunk)  # torch takes up to a millisecond for one; few of a model's tensors differ
    for name, leaf in enumerate(leaves):
        kind = type(leaf)
        if kind in PLAIN:
            size = leaf.shape
            known = properties(leaf.dtype, leaf.layout, leaf.requires_grad, leaf.is_pinned())
            yield Row(name, Kind.TENSOR, known, (size, (0,) * len(size), size))
        elif kind is DTensor:
            yield from _rows_of_dtensor(name, leaf, chunk)
        elif kind is ShardedTensor:
            yield from sharded.rows_of(name, leaf)
        elif isinstance(leaf, torch.Tensor) or hasattr(leaf, "__create_write_items__"):
            raise NotDescribable(f"a {kind.__module__}.{kind.__name__}")
        else:
            yield Row(name, Kind.OBJECT)


def _rows_of_dtensor(name: int, leaf: DTensor, chunk: Callable[..., tuple[Extent, Extent]]) -> Iterator[Row]:
    mesh, placements, local = leaf.device_mesh, leaf.placements, leaf._local_tensor
    if mesh.get_coordinate() is None:
        return
    if any(placement.is_partial() for placement in placements):
        raise ValueError("a DTensor with partial placements has no value that could be saved: redistribute it first")
    if type(local) not in PLAIN:
        raise NotDescribable(f"a DTensor of {type(local).__name__}")
    size = leaf.shape
    extent, offset = chunk(size, mesh, placements)
    if extent != local.shape:
        raise NotDescribable("a DTensor whose local tensor isn't what its placements say")
    # As of leaf.to_local(), which takes an autograd node to make.
    needs_grad = leaf.requires_grad if torch.is_grad_enabled() else local.requires_grad
    known = properties(local.dtype, local.layout, needs_grad, local.is_pinned())
    yield Row(name, Kind.SHARD, known, (size, offset, extent))


def _chunk(shape: torch.Size, mesh: DeviceMesh, placements: tuple[Any, ...]) -> tuple[Extent, Extent]:
    """Extent and offset of this rank's chunk."""
    extent, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
    return tuple(map(int, extent)), tuple(map(int, offset))
