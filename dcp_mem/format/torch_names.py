"""Torch's dtypes, layouts and memory formats by the names that torch prints and catalogs hold."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TypeVar

import torch

from dcp_mem.common.sendable import sendable_as
from dcp_mem.errors import ManifestInvalid
from dcp_mem.format.catalog import Properties

T = TypeVar("T")


def _by_name(kind: type[T]) -> Mapping[str, T]:
    return {str(value): value for value in vars(torch).values() if isinstance(value, kind)}


_DTYPES, _LAYOUTS = _by_name(torch.dtype), _by_name(torch.layout)
_MEMORY_FORMATS = _by_name(torch.memory_format)


@lru_cache(maxsize=256)
def properties(
    dtype: torch.dtype,
    layout: torch.layout,
    requires_grad: bool,
    pin_memory: bool,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> Properties:
    """Return what DCP records of a tensor besides its shape; equal properties are one object."""
    return Properties(
        dtype=str(dtype),
        layout=str(layout),
        requires_grad=requires_grad,
        pin_memory=pin_memory,
        memory_format=str(memory_format),
    )


def dtype_named(name: str) -> torch.dtype:
    """Return the dtype of this name.

    Raises ManifestInvalid.
    """
    return _known(_DTYPES, name)


def layout_named(name: str) -> torch.layout:
    """Return the layout of this name.

    Raises ManifestInvalid.
    """
    return _known(_LAYOUTS, name)


def memory_format_named(name: str) -> torch.memory_format:
    """Return the memory format of this name.

    Raises ManifestInvalid.
    """
    return _known(_MEMORY_FORMATS, name)


def _known(things: Mapping[str, T], name: str) -> T:
    if name not in things:
        raise ManifestInvalid(
            f"a catalog that has {name}, which this torch doesn't: use a newer one"
        )
    return things[name]


sendable_as(torch.Size, tuple, lambda *sizes: torch.Size(sizes))
for _kind, _named in (
    (torch.dtype, dtype_named),
    (torch.layout, layout_named),
    (torch.memory_format, memory_format_named),
):
    sendable_as(_kind, lambda value: (str(value),), _named)
