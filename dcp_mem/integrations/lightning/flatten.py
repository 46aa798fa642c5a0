"""Split Lightning's checkpoint into tensors, which DCP saves one by one, and a rest; and join them.

DCP saves the rest as one item.
"""

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
"""The entry with the number of optimizers; only checkpoints to resume from have it."""

_CONTAINERS = (dict, OrderedDict, list)


def split(checkpoint: Mapping[str, Any], wanted: Wanted = lambda path: True) -> dict[str, Any]:
    """Split a checkpoint into a state dict for DCP: tensors under text keys, and the rest.

    What `join` makes of it is the same to the bit, whatever the keys are. The checkpoint itself
    isn't changed.

    `wanted`: tells by its path whether a tensor is split off; others stay in the rest, as do
    tensors of which two would have the same name.
    """
    tensors = dict[Path, torch.Tensor]()
    rest = _without_tensors(dict(checkpoint), (), tensors, wanted, set())
    state = dict[str, Any]()
    for path, tensor in tensors.items():
        *parents, last = map(str, path)
        functools.reduce(lambda inner, key: inner.setdefault(key, {}), parents, state)[last] = (
            tensor
        )
    return state | entries_of(rest, list(tensors), checkpoint.get("optimizer_states"))


def entries_of(
    rest: Mapping[str, Any], paths: Sequence[Path], optimizers: Sequence[Any] | None
) -> dict[str, Any]:
    """Return the entries besides the tensors; without optimizers, weights alone are saved."""
    # A tuple is one item for DCP, whatever is in it.
    state: dict[str, Any] = {REST: (rest, list(paths))}
    return state if optimizers is None else state | {OPTIMIZERS: (len(optimizers),)}


def join(state: Mapping[str, Any]) -> dict[str, Any]:
    """Join what `split` has split; return the checkpoint."""
    rest, paths = state[REST]
    for path in paths:
        *parents, last = path
        tensor = functools.reduce(operator.getitem, map(str, path), state)
        functools.reduce(operator.getitem, parents, rest)[last] = tensor
    return rest  # type: ignore[no-any-return]


def _without_tensors(
    value: Any, path: Path, tensors: dict[Path, torch.Tensor], wanted: Wanted, names: set[str]
) -> Any:
    """Return the value with None in place of tensors, which are put into `tensors`."""
    if _is_plain_tensor(value):
        name = ".".join(map(str, path))
        if name in names or path[0] in (REST, OPTIMIZERS) or not wanted(path):
            return value
        names.add(name)
        tensors[path] = value
        return None
    if type(value) not in _CONTAINERS or (
        isinstance(value, dict) and len(set(map(str, value))) < len(value)
    ):
        return value
    emptied = copy.copy(value)  # with the attributes that modules give their state dicts
    for key, inner in enumerate(value) if isinstance(value, list) else value.items():
        emptied[key] = _without_tensors(inner, (*path, key), tensors, wanted, names)
    return emptied


def _is_plain_tensor(value: Any) -> bool:
    return (
        type(value) is torch.Tensor
        and value.layout is torch.strided
        and not value.is_quantized
        and not value.requires_grad
        and not value.is_meta
    )
