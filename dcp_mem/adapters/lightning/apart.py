"""Lightning's checkpoint taken apart into tensors, which DCP saves, and a rest, which it saves as one item; and put together."""

from __future__ import annotations

import copy
import functools
import operator
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

Path = tuple[Any, ...]
Wanted = Callable[[Path], bool]

REST = "lightning"
"""The entry of the state dict that holds all but the tensors."""

OPTIMIZERS = "optimizers"
"""The entry that only checkpoints have from which training can go on: how many optimizers it has."""

_CONTAINERS = (dict, OrderedDict, list)


def taken_apart(checkpoint: Mapping[str, Any], wanted: Wanted = lambda path: True) -> dict[str, Any]:
    """A state dict for DCP: tensors, nested under texts as keys, and the rest with their paths.

    wanted: which tensors, by path; others stay in the rest, as do tensors of which two would have the same name. What comes
    together again is the same to the bit, whatever its keys are; the checkpoint itself isn't changed.
    """
    tensors = dict[Path, torch.Tensor]()
    rest = _without_tensors(dict(checkpoint), (), tensors, wanted, set())
    state = dict[str, Any]()
    for path, tensor in tensors.items():
        *parents, last = map(str, path)
        functools.reduce(lambda inner, key: inner.setdefault(key, {}), parents, state)[last] = tensor
    return state | entries_of(rest, list(tensors), checkpoint.get("optimizer_states"))


def entries_of(rest: Mapping[str, Any], paths: Sequence[Path], optimizers: Sequence[Any] | None) -> dict[str, Any]:
    """What a state dict has besides the tensors. optimizers: None where weights alone are saved."""
    state: dict[str, Any] = {REST: (rest, list(paths))}  # a tuple is one item, whatever is in it
    return state if optimizers is None else state | {OPTIMIZERS: (len(optimizers),)}


def put_together(state: Mapping[str, Any]) -> dict[str, Any]:
    """What `taken_apart` was given."""
    rest, paths = state[REST]
    for path in paths:
        *parents, last = path
        tensor = functools.reduce(operator.getitem, map(str, path), state)
        functools.reduce(operator.getitem, parents, rest)[last] = tensor
    return rest  # type: ignore[no-any-return]


def _without_tensors(value: Any, path: Path, tensors: dict[Path, torch.Tensor], wanted: Wanted, names: set[str]) -> Any:
    """The value with None in place of tensors, which are put into `tensors`."""
    if _is_plain_tensor(value):
        name = ".".join(map(str, path))
        if name in names or path[0] in (REST, OPTIMIZERS) or not wanted(path):
            return value
        names.add(name)
        tensors[path] = value
        return None
    if type(value) not in _CONTAINERS or (isinstance(value, dict) and len(set(map(str, value))) < len(value)):
        return value
    emptied = copy.copy(value)  # with the attributes that modules give their state dicts
    for key, inner in enumerate(value) if isinstance(value, list) else value.items():
        emptied[key] = _without_tensors(inner, (*path, key), tensors, wanted, names)
    return emptied


def _is_plain_tensor(value: Any) -> bool:
    return (
        type(value) is torch.Tensor and value.layout is torch.strided and not value.requires_grad and not value.is_meta
    )
