"""Values of any shape: their tensors apart, which DCP has to see, and all else as one value.

DCP takes dicts and lists apart, turns their keys into texts, and expects checkpoint and fresh
object to have the same keys. It saves a tuple as a whole.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch

from dcp_mem.errors import DcpMemError
from dcp_mem.planning.plain_tensors import PLAIN
from dcp_mem.planning.shard_marks import mark_of

Tensors = dict[str, torch.Tensor] | torch.Tensor | None
"""The tensors of a value by name, the value itself where it is a tensor; None where it has none."""


def as_tuple(value: Any) -> tuple[Any]:
    return (value,)


def has_tensors(value: Any) -> bool:
    """Return whether a value is a tensor or a container with one in it."""
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return False
    return any(map(has_tensors, value))


def is_fixed(tensor: torch.Tensor) -> bool:
    """Tell whether only whoever has a tensor can make one like it: of a class, or a shard."""
    return type(tensor) not in PLAIN or bool(mark_of(tensor))


def tensors_in(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    _mapped(value, lambda _, tensor: found.append(tensor), "", set())
    return found


def on_cpu(value: Any) -> Any:
    """Return a value that can be unpickled where there are other devices."""
    return _mapped(value, lambda _, tensor: tensor.cpu(), "", set())


def taken_apart(value: Any) -> tuple[dict[str, Any], Tensors]:
    """Return what is saved of a value as a whole, and its tensors."""
    if isinstance(value, torch.Tensor):
        return {"form": _mark(value), "fixed": [""] * is_fixed(value)}, value
    tensors: dict[str, torch.Tensor] = {}

    def take(name: str, tensor: torch.Tensor) -> torch.Tensor:
        tensors[name] = tensor
        return _mark(tensor)

    form = _mapped(value, take, "", set())
    fixed = [name for name, tensor in tensors.items() if is_fixed(tensor)]
    return {"form": form, "fixed": fixed}, tensors or None


def put_together(saved: Mapping[str, Any], tensors: Tensors, known: Tensors, what: str) -> Any:
    """Return a value of what was saved of it and its loaded tensors.

    Tensors that only the object can make (sharded ones, and other classes) must be `known`.
    """

    def of(these: Tensors, name: str) -> torch.Tensor | None:
        if isinstance(these, Mapping):
            return these.get(name)
        return None if name else these

    def find(name: str, _: torch.Tensor) -> torch.Tensor:
        found = of(tensors, name)
        if found is None:
            raise DcpMemError(
                f"{what}: its tensor {name or 'itself'} is in the checkpoint and wasn't loaded, as "
                "the object to load into lacks it: load with dcp_mem.load"
            )
        if name in saved["fixed"] and of(known, name) is None:
            raise DcpMemError(
                f"{what}: its tensor {name or 'itself'} was sharded, or of a class of its own, and "
                "the object to load into lacks it: make it before the load"
            )
        return found

    if isinstance(saved["form"], torch.Tensor):
        return find("", saved["form"])
    return _mapped(saved["form"], find, "", set())


def _mark(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _mapped(
    value: Any, act: Callable[[str, torch.Tensor], Any], prefix: str, names: set[str]
) -> Any:
    """Return a value with another in place of each tensor; containers with none stay."""
    if not has_tensors(value):
        return value
    if isinstance(value, torch.Tensor):
        name = prefix
        while name in names:  # two paths may make one name, as "a.b" and "a" with "b" below
            name += "'"
        names.add(name)
        return act(name, value)
    parts = value.items() if isinstance(value, dict) else enumerate(value)
    items = [
        (part, _mapped(one, act, f"{prefix}.{part}" if prefix else str(part), names))
        for part, one in parts
    ]
    if isinstance(value, dict):
        result: Any = copy.copy(value)  # with its attributes, as the versions of a model's modules
        result.update(items)
        return result
    made = [one for _, one in items]
    if isinstance(value, list):
        return made
    return type(value)(*made) if hasattr(value, "_fields") else tuple(made)
