"""Wrapper tensors: tensors of classes that keep their values in other tensors, as torchao's do.

torch calls them wrapper subclasses. Such a class tells by `__tensor_flatten__` which tensors it
holds, its parts, and makes one of given parts by `__tensor_unflatten__`. Nothing else of it is used
here where that can be avoided: what an operation of such a class returns, or copies, is its own
affair, and may well be the values in another precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dcp_mem.errors import DcpMemError
from dcp_mem.planning.plain_tensors import PLAIN

_UNKNOWN = (0, -1)


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's values lie in other tensors. A DTensor isn't meant here."""
    kind = type(tensor)
    if kind in PLAIN or kind is DTensor:
        return False
    return hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__")


def has_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's values lie in memory of its own; a wrapper's do not."""
    kind = type(tensor)
    return kind in PLAIN or kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor apart from autograd, and a wrapper as it is.

    Raises DcpMemError.
    """
    if is_wrapper(tensor):
        return tensor
    apart = tensor.detach()
    # A class with operations of its own may return a copy, and in another precision.
    if not has_memory(tensor):
        refuse_other_class(apart, tensor, "is detached")
    return apart


def rebuilt(tensor: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return a tensor of the same class and structure, of other parts.

    `change`: returns what takes a part's place; for a part that is a wrapper itself, too. Raises
    DcpMemError.
    """
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    parts = {name: change(getattr(tensor, name)) for name in names}
    made: torch.Tensor = type(tensor).__tensor_unflatten__(  # type: ignore[attr-defined]
        parts, context, tensor.size(), tensor.stride()
    )
    refuse_other_class(made, tensor, "is put together from its parts")
    if made.requires_grad != tensor.requires_grad:
        made.requires_grad_(tensor.requires_grad)
    return made


def refuse_other_class(result: torch.Tensor, tensor: torch.Tensor, what: str) -> None:
    """Raise where an operation has turned a tensor into one of another class.

    Raises DcpMemError.
    """
    if type(result) is not type(tensor):
        raise DcpMemError(
            f"{class_name(tensor)} becomes {class_name(result)} when it {what}, so dcp_mem can "
            "neither save nor load it: have the state dict hold what it is made of, or its values "
            "as a plain tensor"
        )


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Have errors of this module say which tensor they are about.

    Raises DcpMemError.
    """
    try:
        yield
    except DcpMemError as error:
        if str(error).startswith(f"{name}: "):
            raise
        raise DcpMemError(f"{name}: {error}") from error.__cause__


def class_name(tensor: object) -> str:
    """Return the name of a tensor's class with its module, for people."""
    kind = type(tensor)
    return f"a {kind.__module__}.{kind.__qualname__}"


def copy_values(target: torch.Tensor, values: torch.Tensor) -> None:
    """Copy into a tensor: part by part where both are wrappers that are built alike.

    Otherwise the classes decide what a copy is, as they would for torch. One that copies nothing is
    refused.

    `values`: of any class, and of the target's shape. Raises DcpMemError.
    """
    if type(target) in PLAIN and type(values) in PLAIN:
        target.copy_(values)
    elif is_wrapper(target) and _are_built_alike(target, values):
        for name in target.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
            copy_values(detached(getattr(target, name)), getattr(values, name))
    else:
        _copy_as_classes_do(target, values)


def _are_built_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors differ in nothing but the values of their parts."""
    if type(one) is not type(other):
        return False
    if not is_wrapper(one):
        return (one.shape, one.dtype, one.layout) == (other.shape, other.dtype, other.layout)
    (names, context), (others, other_context) = (
        tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        for tensor in (one, other)
    )
    return (
        list(names) == list(others)
        and _are_equal(context, other_context)
        and all(_are_built_alike(getattr(one, name), getattr(other, name)) for name in names)
    )


def _are_equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except Exception:  # of values whose comparison has no single answer
        return False


def _copy_as_classes_do(target: torch.Tensor, values: torch.Tensor) -> None:
    kinds = f"{class_name(values)} was saved, which can't be loaded into {class_name(target)}"
    advice = "load into a state dict that is made as the saved one was"
    before = _written(target)
    try:
        target.copy_(values)
    except Exception as error:
        why = f"{type(error).__name__}: {str(error).strip().split(chr(10))[0]}"
        raise DcpMemError(f"{kinds} ({why}): {advice}") from error
    if target.numel() and _written(target) == before and _UNKNOWN not in before:
        raise DcpMemError(f"{kinds} (a copy changes nothing): {advice}")


def _written(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Return what changes when a tensor is written to, or is given other parts."""
    if not is_wrapper(tensor):
        return [_UNKNOWN if tensor.is_inference() else (id(tensor), tensor._version)]
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return [one for name in names for one in _written(getattr(tensor, name))]
