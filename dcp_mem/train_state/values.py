"""Values of any shape: their tensors apart, which DCP has to see, and all else as one value.

DCP takes dicts and lists apart, turns their keys into texts, and expects checkpoint and fresh
object to have the same keys. It saves a tuple as a whole.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dcp_mem.errors import DcpMemError
from dcp_mem.planning.plain_tensors import PLAIN
from dcp_mem.planning.shard_marks import mark_of

Tensors = dict[str, torch.Tensor] | torch.Tensor | None
"""The tensors of a value by name, the value itself where it is a tensor; None where it has none."""


def as_tuple(value: Any) -> tuple[Any]:
    return (value,)


def is_fixed(tensor: torch.Tensor) -> bool:
    """Tell whether only whoever has a tensor can make one like it: of a class, or a shard."""
    return type(tensor) not in PLAIN or bool(mark_of(tensor))


def on_cpu(value: Any) -> Any:
    """Return a value that can be unpickled where there are other devices."""
    return _Mapping(lambda _, tensor: tensor.cpu()).of(value)


def taken_apart(value: Any) -> tuple[dict[str, Any], Tensors]:
    """Return what is saved of a value as a whole, and its tensors."""
    if isinstance(value, torch.Tensor):
        return {"form": _mark(), "fixed": [""] * is_fixed(value)}, value
    tensors: dict[str, torch.Tensor] = {}

    def take(name: str, tensor: torch.Tensor) -> torch.Tensor:
        tensors[name] = tensor
        return _mark()

    form = _Mapping(take).of(value)
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
    return _Mapping(find).of(saved["form"])


def _mark() -> torch.Tensor:
    """Return what stands for a tensor in a form; no meta tensor, which torch would make real."""
    return torch.empty(0, dtype=torch.uint8)


class _Mapping:
    """Values with another in place of each tensor; what is there twice stays one object."""

    def __init__(self, act: Callable[[str, torch.Tensor], Any]) -> None:
        self._act = act
        self._names: set[str] = set()
        self._done: dict[int, tuple[Any, Any]] = {}  # with the value, whose id is taken as long

    def of(self, value: Any, prefix: str = "") -> Any:
        """Return a value; containers without tensors stay themselves."""
        if not isinstance(value, (torch.Tensor, dict, list, tuple)):
            return value
        if id(value) in self._done:
            return self._done[id(value)][1]
        if isinstance(value, torch.Tensor):
            result = self._act(self._name(prefix), value)
        else:
            parts = list(value.items() if isinstance(value, dict) else enumerate(value))
            made = [
                self.of(one, f"{prefix}.{part}" if prefix else str(part)) for part, one in parts
            ]
            is_same = all(one is new for (_, one), new in zip(parts, made, strict=True))
            result = value if is_same else _like(value, [part for part, _ in parts], made)
        self._done[id(value)] = value, result
        return result

    def _name(self, name: str) -> str:
        while name in self._names:  # two paths may make one, as "a.b" and "a" with "b" below
            name += "'"
        self._names.add(name)
        return name


def _like(value: Any, keys: Sequence[Any], values: Sequence[Any]) -> Any:
    """Return a container of the same kind."""
    if isinstance(value, dict):
        result: Any = copy.copy(value)  # with its attributes, as the versions of a model's modules
        for key, one in zip(keys, values, strict=True):
            result[key] = one
        return result
    if isinstance(value, list):
        return list(values)
    return type(value)(*values) if hasattr(value, "_fields") else tuple(values)
