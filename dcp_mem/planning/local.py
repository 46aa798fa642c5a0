"""A rank's state dict: flattened and described once, and recognised from then on.

The first time, every leaf is described as DCP would. Afterwards only what could have changed is compared, by loops that
run in C: keys and types, dtypes and shapes, and where each DTensor says that it lies.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import compress
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from dcp_mem.format.catalog import Path, Properties
from dcp_mem.format.torch_names import properties
from dcp_mem.planning.columns import Kind, LocalPlan, Row, local_plan

_DTYPE, _SHAPE, _LAYOUT = map(operator.attrgetter, ("dtype", "shape", "layout"))
_REQUIRES_GRAD, _SPEC = operator.attrgetter("requires_grad"), operator.attrgetter("_spec")
_LOCAL = operator.attrgetter("_local_tensor")
_PLAIN = (torch.Tensor, torch.nn.Parameter)
Extent = tuple[int, ...]


class NotDescribable(Exception):
    """A state dict holds something that only DCP's own planner knows how to plan."""


@dataclass(frozen=True, slots=True)
class _Container:
    """What a mapping or list looked like. inner: its values that are containers themselves, by position."""

    kind: type
    keys: Sequence[Any]
    key_types: Sequence[type]
    inner: Mapping[int, _Container]


@dataclass(frozen=True, slots=True)
class _Facts:
    """What is compared of the leaves, in their order; of tensors and of DTensors apart."""

    dtypes: Sequence[torch.dtype]
    layouts: Sequence[torch.layout]
    shapes: Sequence[torch.Size]
    requires_grad: Sequence[bool]
    specs: Sequence[Any]
    local_types: Sequence[type]
    local_shapes: Sequence[torch.Size]
    grad_enabled: bool

    def is_same(self, other: _Facts) -> bool:
        return (
            self.dtypes == other.dtypes
            and self.layouts == other.layouts
            and self.shapes == other.shapes
            and self.requires_grad == other.requires_grad
            and self.local_types == other.local_types
            and self.local_shapes == other.local_shapes
            and self.grad_enabled == other.grad_enabled
            and all(map(_lie_alike, self.specs, other.specs))
        )


class Structure:
    """A described state dict.

    plan: what this rank would write. leaves of a state dict of the same structure come from `recognise`, in the order of
    plan.names; item i of the plan is leaf plan.name[i].
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        """Describe a state dict. Raises NotDescribable, and ValueError where two leaves get the same name."""
        leaves: list[Any] = []
        paths: list[Path] = []
        self._root = _container(state, (), leaves, paths)
        rows = list(_rows(leaves))  # before anything is asked of leaves that can't be described
        self._types = list(map(type, leaves))
        self._is_tensor = [isinstance(leaf, torch.Tensor) for leaf in leaves]
        self._facts = self._facts_of(leaves)
        names = [".".join(map(str, path)) for path in paths]
        if len(set(names)) < len(names):
            doubled = next(name for index, name in enumerate(names) if name in names[:index])
            raise ValueError(f"two entries of the state dict have the same flattened name: {doubled}")
        self.plan: LocalPlan = local_plan(names, paths, rows)

    def leaves_of(self, state: Mapping[str, Any]) -> Sequence[Any]:
        """The leaves of the state dict that was described."""
        leaves: list[Any] = []
        _collect(state, self._root, leaves)
        return leaves

    def recognise(self, state: Mapping[str, Any]) -> Sequence[Any] | None:
        """The leaves of a state dict of the same structure; None for any other."""
        leaves: list[Any] = []
        if not _collect(state, self._root, leaves):
            return None
        if list(map(type, leaves)) != self._types or not self._facts.is_same(self._facts_of(leaves)):
            return None
        return leaves

    def _facts_of(self, leaves: Sequence[Any]) -> _Facts:
        tensors = list(compress(leaves, self._is_tensor))
        distributed = [leaf for leaf in tensors if type(leaf) is DTensor]
        local = list(map(_LOCAL, distributed))
        return _Facts(
            dtypes=list(map(_DTYPE, tensors)),
            layouts=list(map(_LAYOUT, tensors)),
            shapes=list(map(_SHAPE, tensors)),
            requires_grad=list(map(_REQUIRES_GRAD, tensors)),
            specs=list(map(_SPEC, distributed)),
            local_types=list(map(type, local)),
            local_shapes=list(map(_SHAPE, local)),
            grad_enabled=torch.is_grad_enabled(),
        )


def _lie_alike(one: Any, other: Any) -> bool:
    """Whether two DTensors are laid out alike, going by their specs."""
    return one is other or (one.mesh == other.mesh and one.placements == other.placements)


# -- flattening, by the rules of torch.distributed.checkpoint._nested_dict --------------------------------------------


def _container(value: Any, path: Path, leaves: list[Any], paths: list[Path]) -> _Container:
    keys = _keys(value)
    parts = [str(key) for key in keys] if isinstance(value, Mapping) else keys
    inner: dict[int, _Container] = {}
    for position, (part, entry) in enumerate(zip(parts, _values(value), strict=True)):
        if _is_container(entry):
            inner[position] = _container(entry, (*path, part), leaves, paths)
        else:
            leaves.append(entry)
            paths.append((*path, part))
    return _Container(type(value), keys, list(map(type, keys)), inner)


def _collect(value: Any, known: _Container, leaves: list[Any]) -> bool:
    """Append the leaves of a container that has the same keys as the known one, and so within; whether it has."""
    if type(value) is not known.kind:
        return False
    keys = _keys(value)
    if keys != known.keys or list(map(type, keys)) != known.key_types:  # 1 == True, and they have other names
        return False
    values = list(_values(value))
    done = 0
    for position, container in known.inner.items():
        if not _append_leaves(values[done:position], leaves) or not _collect(values[position], container, leaves):
            return False
        done = position + 1
    return _append_leaves(values[done:], leaves)


def _append_leaves(values: Sequence[Any], leaves: list[Any]) -> bool:
    """Append values that are all leaves; False where one of them has become a container."""
    kinds = set(map(type, values))
    if any(issubclass(kind, (Mapping, list)) for kind in kinds) and any(map(_is_container, values)):
        return False
    leaves.extend(values)
    return True


def _keys(value: Any) -> list[Any]:
    return list(value) if isinstance(value, Mapping) else list(range(len(value)))


def _values(value: Any) -> Any:
    return value.values() if isinstance(value, Mapping) else value


def _is_container(value: Any) -> bool:
    """Whether DCP goes into it: any mapping, and lists that hold a tensor or a mapping somewhere."""
    if isinstance(value, Mapping):
        return True
    return isinstance(value, list) and any(isinstance(entry, torch.Tensor) or _is_container(entry) for entry in value)


# -- describing --------------------------------------------------------------------------------------------------------


def _rows(leaves: Sequence[Any]) -> Iterator[Row]:
    chunk = lru_cache(maxsize=None)(_chunk)  # torch takes up to a millisecond for one; few of a model's tensors differ
    for name, leaf in enumerate(leaves):
        if type(leaf) is DTensor:
            yield from _rows_of_dtensor(name, leaf, chunk)
        elif type(leaf) in _PLAIN:
            size = tuple(leaf.shape)
            yield Row(name, Kind.TENSOR, _properties(leaf), (size, (0,) * len(size), size))
        elif isinstance(leaf, torch.Tensor) or hasattr(leaf, "__create_write_items__"):
            raise NotDescribable(f"a {type(leaf).__module__}.{type(leaf).__name__}")
        else:
            yield Row(name, Kind.OBJECT)


def _rows_of_dtensor(name: int, leaf: DTensor, chunk: Callable[..., tuple[Extent, Extent]]) -> Iterator[Row]:
    if leaf.device_mesh.get_coordinate() is None:
        return
    if any(placement.is_partial() for placement in leaf.placements):
        raise ValueError("a DTensor with partial placements has no value that could be saved: redistribute it first")
    if type(leaf._local_tensor) not in _PLAIN:
        raise NotDescribable(f"a DTensor of {type(leaf._local_tensor).__name__}")
    extent, offset = chunk(tuple(leaf.shape), leaf.device_mesh, leaf.placements)
    if extent != tuple(leaf._local_tensor.shape):
        raise NotDescribable("a DTensor whose local tensor isn't what its placements say")
    yield Row(name, Kind.SHARD, _properties(leaf.to_local()), (tuple(leaf.shape), offset, extent))


def _chunk(shape: Extent, mesh: DeviceMesh, placements: tuple[Any, ...]) -> tuple[Extent, Extent]:
    """Extent and offset of this rank's chunk."""
    extent, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
    return tuple(map(int, extent)), tuple(map(int, offset))


def _properties(tensor: torch.Tensor) -> Properties:
    return properties(tensor.dtype, tensor.layout, tensor.requires_grad, tensor.is_pinned())
