"""State dicts taken apart into leaves, as torch.distributed.checkpoint._nested_dict does it."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, groupby
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dcp_mem.common.sharded_tensor import ShardedTensor
from dcp_mem.common.value_class import value_class
from dcp_mem.format.catalog import Path
from dcp_mem.planning.plain_tensors import PLAIN

_NO_CONTAINERS = frozenset(
    {*PLAIN, DTensor, ShardedTensor, type(None), bool, int, float, str, bytes, tuple}
)

_TEXT = frozenset({str})


@value_class(kw_only=True)
class Container:
    """The structure of a mapping or list."""

    kind: type[Any]
    length: int
    keys: Sequence[Any] | None  # of a mapping; None for a list
    key_types: Sequence[type]
    inner: Mapping[int, Container]  # those of its values that are containers, by position
    dicts: Dicts | None = None  # its values, if all are dicts of leaves; `inner` is empty then


@value_class
class Dicts:
    """The structures of dicts of leaves, as one: optimizers have thousands of small ones."""

    lengths: Sequence[int]
    keys: Sequence[Any]  # of one dict behind those of the other
    key_types: Sequence[type]


@value_class
class Leaves:
    """The leaves of a state dict, in order, with the flattened name and the path of each."""

    values: list[Any]
    names: list[str]
    paths: list[Path]


def flatten(state: Mapping[str, Any]) -> tuple[Container, Leaves]:
    """Take a state dict apart.

    Returns its structure, and its leaves. Raises ValueError.
    """
    leaves = Leaves([], [], [])
    root = _flatten(state, (), "", leaves)
    if len(set(leaves.names)) < len(leaves.names):
        doubled = next(
            name for index, name in enumerate(leaves.names) if name in leaves.names[:index]
        )
        raise ValueError(f"two entries of the state dict have the same flattened name: {doubled}")
    return root, leaves


def leaves_of(state: Mapping[str, Any]) -> Leaves:
    """Return the leaves of a state dict, where two of them may have the same flattened name."""
    leaves = Leaves([], [], [])
    _flatten(state, (), "", leaves)
    return leaves


def _flatten(value: Any, path: Path, prefix: str, leaves: Leaves) -> Container:
    """Append the leaves of a container, whose names begin with `prefix`; return its structure."""
    keys = list(value) if isinstance(value, Mapping) else None
    parts: Sequence[str | int] = range(len(value)) if keys is None else list(map(str, keys))
    names = list(map(prefix.__add__, map(str, parts)))
    values = _values(value, keys is not None)
    inner: dict[int, Container] = {}
    done = 0
    for keys_alike, start, stop in _runs(values):
        _append(leaves, values, names, parts, path, done, start)
        done = stop
        if keys_alike is not None:
            _append_alike(leaves, values[start:stop], names[start:stop], keys_alike)
            leaves.paths.extend(
                [(*path, part, key) for part in parts[start:stop] for key in keys_alike]
            )
            alike = _container(dict, keys_alike, len(keys_alike), {})
            inner.update(dict.fromkeys(range(start, stop), alike))
            continue
        for position in range(start, stop):
            inner[position] = _flatten(
                values[position], (*path, parts[position]), f"{names[position]}.", leaves
            )
    _append(leaves, values, names, parts, path, done, len(values))
    if inner and len(inner) == len(values) and all(map(_is_dict_of_leaves, inner.values())):
        return _container(type(value), keys, len(value), {}, _joined(list(inner.values())))
    return _container(type(value), keys, len(value), inner)


def _container(
    kind: type,
    keys: Sequence[Any] | None,
    length: int,
    inner: Mapping[int, Container],
    dicts: Dicts | None = None,
) -> Container:
    types = list(map(type, keys or ()))
    return Container(kind=kind, length=length, keys=keys, key_types=types, inner=inner, dicts=dicts)


def _is_dict_of_leaves(known: Container) -> bool:
    return known.kind is dict and not known.inner and known.dicts is None


def _joined(dicts: Sequence[Container]) -> Dicts:
    return Dicts(
        [one.length for one in dicts],
        list(chain.from_iterable(one.keys or () for one in dicts)),
        list(chain.from_iterable(one.key_types for one in dicts)),
    )


def _runs(values: Sequence[Any]) -> Iterator[tuple[list[str] | None, int, int]]:
    """Yield the keys, first position and end of neighbouring containers that are alike.

    Such are dicts of leaves, as an optimizer has one for each parameter: to take them apart one by
    one takes four times as long. The keys are None for other containers.
    """

    def look(numbered: tuple[int, int]) -> tuple[int, list[str] | None]:
        number, position = numbered
        return position - number, _keys_of_leaves(values[position])

    for (before, keys), run in groupby(enumerate(_containers(values)), look):
        numbers = [number for number, _ in run]
        yield keys, before + numbers[0], before + numbers[-1] + 1


def _keys_of_leaves(value: Any) -> list[str] | None:
    """Return the keys of a dict whose keys are texts and whose values are leaves; else None."""
    if (
        type(value) is dict
        and _TEXT.issuperset(map(type, value))
        and _NO_CONTAINERS.issuperset(map(type, value.values()))
    ):
        return list(value)
    return None


def _append_alike(
    leaves: Leaves, dicts: Sequence[dict[str, Any]], names: Sequence[str], keys: Sequence[str]
) -> None:
    suffixes = [f".{key}" for key in keys]
    leaves.values.extend(chain.from_iterable(map(dict.values, dicts)))
    leaves.names.extend([name + suffix for name in names for suffix in suffixes])


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


def collect_leaves(value: Any, known: Container, leaves: list[Any]) -> bool:
    """Append the leaves of a container that has the same structure as a known one.

    `value`: the container. A container in place of a leaf is appended as a leaf. Returns whether it
    has the same keys, and so have all containers in it. If not, `leaves` is partial.
    """
    if type(value) is not known.kind or len(value) != known.length:
        return False
    if known.keys is not None and not _are_same(list(value), known.keys, known.key_types):
        return False
    values = _values(value, known.keys is not None)
    if known.dicts is not None:
        return _collect_of_dicts(values, known.dicts, leaves)
    done = 0
    for position, container in known.inner.items():
        if done < position:
            leaves.extend(values[done:position])
        if not collect_leaves(values[position], container, leaves):
            return False
        done = position + 1
    leaves.extend(values[done:] if done else values)
    return True


def _collect_of_dicts(values: Sequence[Any], known: Dicts, leaves: list[Any]) -> bool:
    if {*map(type, values)} != {dict} or list(map(len, values)) != known.lengths:
        return False
    if not _are_same(list(chain.from_iterable(values)), known.keys, known.key_types):
        return False
    leaves.extend(chain.from_iterable(map(dict.values, values)))
    return True


def _are_same(keys: Sequence[Any], known: Sequence[Any], types: Sequence[type]) -> bool:
    # Mostly the same objects. Equal keys may have different names, as 1 and True have.
    return all(map(operator.is_, keys, known)) or (keys == known and list(map(type, keys)) == types)


def may_be_container(kind: type) -> bool:
    """Return whether a value of this type may be a container to DCP."""
    return kind not in _NO_CONTAINERS


def is_container(value: Any) -> bool:
    """Return whether DCP takes it apart: a mapping, or a list with a tensor or mapping inside."""
    if type(value) in _NO_CONTAINERS:
        return False
    if isinstance(value, Mapping):
        return True
    return isinstance(value, list) and any(
        isinstance(entry, torch.Tensor) or is_container(entry) for entry in value
    )


def _containers(values: Sequence[Any]) -> list[int]:
    if _NO_CONTAINERS.issuperset(map(type, values)):
        return []
    return [
        position
        for position, value in enumerate(values)
        if type(value) is dict or is_container(value)
    ]


def _values(value: Any, is_mapping: bool) -> list[Any]:
    return list(value.values()) if is_mapping else list(value)
