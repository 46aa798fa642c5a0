"""Which tensors of a state dict a user means: by names, patterns, or a function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dcp_mem.errors import ConfigError

TensorChoice = str | Iterable[str] | Callable[[str, torch.Tensor], bool]
"""A name or pattern, several, or a function of name and tensor; names as DCP flattens them."""
TensorRule = Callable[[str, torch.Tensor], bool]


def tensor_rule(argument: str, given: TensorChoice | None) -> TensorRule | None:
    """Return what tells whether a tensor is meant; None where none is.

    Raises ConfigError.
    """
    if given is None or callable(given):
        return given
    several: Any = [given] if isinstance(given, str) else given
    patterns: list[Any] = list(several) if isinstance(several, Iterable) else [None]
    if not all(isinstance(one, str) for one in patterns):
        raise ConfigError(f"{argument}={given!r}: give names, patterns, or a function")
    known = {one for one in patterns if not set(one) & set("*?[")}
    globs = [one for one in patterns if one not in known]
    return lambda name, _: name in known or any(fnmatchcase(name, one) for one in globs)


def repeatable(given: TensorChoice | None) -> TensorChoice | None:
    """Return the same choice for several calls of `tensor_rule`, which use an iterator up."""
    return list(given) if isinstance(given, Iterator) else given


def chosen_names(
    rule: TensorRule | None, names: Iterable[str], leaves: Iterable[object]
) -> set[str]:
    """Return the names of the tensors that are meant.

    `leaves`: its values; of a DTensor, the function is given this rank's part.
    """
    if rule is None:
        return set()
    return {
        name
        for name, leaf in zip(names, leaves, strict=True)
        if isinstance(leaf, torch.Tensor)
        and rule(name, leaf._local_tensor if type(leaf) is DTensor else leaf)
    }
