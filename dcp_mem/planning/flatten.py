"""State dicts taken apart into leaves, by the rules of torch.distributed.checkpoint._nested_dict."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor

from dcp_mem.format.catalog import Path
from dcp_mem.planning.plain import PLAIN

_NO_CONTAINERS = frozenset({*PLAIN, DTensor, ShardedTensor, type(None), bool, int, float, str, bytes, tuple})


@dataclass(frozen=True, slots=True)
class Container:
    """What a mapping or list looked like. keys: of a mapping. inner: its values that are containers themselves."""

    kind: type[Any]
    length: int
    keys: Sequence[Any] | None
    key_types: Sequence[type]
    inner: Mapping[int, Container]


@dataclass(frozen=True, slots=True)
class Leaves:
    """The leaves of a state dict, in order, with the flattened name and the path of each."""

    values: list[Any]
    names: list[str]
    paths: list[Path]


def flatten(state: Mapping[str, Any]) -> tuple[Container, Leaves]:
    """Take a state dict apart. Raises ValueError where two leaves get the same name."""
    leaves = Leaves([], [], [])
    root = _flatten(state, (), "", leaves)
    if len(set(leaves.names)) < len(leaves.names):
        doubled = next(name for index, name in enumerate(leaves.names) if name in leaves.names[:index])
        raise ValueError(f"two entries of the state dict have the same flattened name: {doubled}")
    return root, leaves


def _flatten(value: Any, path: Path, prefix: str, leaves: Leaves) -> Container:
    """Append the leaves of a container. prefix: of their names."""
    keys = list(value) if isinstance(value, Mapping) else None
    parts: Sequence[str | int] = range(len(value)) if keys is None else list(map(str, keys))
    names = list(map(prefix.__add__, map(str, parts)))
    values = _values(value, keys is not None)
    inner: dict[int, Container] = {}
    done = 0
    for position in _containers(values):
        _append(leaves, values, names, parts, path, done, position)
        inner[position] = _flatten(values[position], (*path, parts[position]), f"{names[position]}.", leaves)
        done = position + 1
    _append(leaves, values, names, parts, path, done, len(values))
    return Container(type(value), len(value), keys, list(map(type, keys or ())), inner)


def _append(
    leaves: Leaves,
    values: Sequence[Any],
    names: Sequence[str],
    parts: Sequence[str | int],
    path: Path,
    start: int,
    stop: int,
) -> None:
    leaves.values.extend(values[start:stop])
    leaves.names.extend(names[start:stop])
    leaves.paths.extend([(*path, part) for part in parts[start:stop]])


def collect(value: Any, known: Container, leaves: list[Any]) -> bool:
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
        if not collect(values[position], container, leaves):
            return False
        done = position + 1
    leaves.extend(values[done:])
    return True


def may_be_container(kind: type) -> bool:
    """Whether a value of this type may be one that DCP goes into."""
    return kind not in _NO_CONTAINERS


def is_container(value: Any) -> bool:
    """Whether DCP goes into it: any mapping, and lists that hold a tensor or a mapping somewhere."""
    if type(value) in _NO_CONTAINERS:
        return False
    if isinstance(value, Mapping):
        return True
    return isinstance(value, list) and any(isinstance(entry, torch.Tensor) or is_container(entry) for entry in value)


def _containers(values: Sequence[Any]) -> list[int]:
    if _NO_CONTAINERS.issuperset(map(type, values)):
        return []
    return [position for position, value in enumerate(values) if is_container(value)]


def _values(value: Any, is_mapping: bool) -> list[Any]:
    return list(value.values()) if is_mapping else list(value)
