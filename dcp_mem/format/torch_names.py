"""Torch's dtypes, layouts and memory formats by the names that torch prints and catalogs hold."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TypeVar

import torch

from dcp_mem.common.sendable import sendable_as
from dcp_mem.errors import ManifestInvalid
from dcp_mem.format.catalog import Properties

T = TypeVar("T")


def _named(kind: type[T]) -> Callable[[str], T]:
    """Return the function from a name to the thing, which raises ManifestInvalid."""
    known = {str(value): value for value in vars(torch).values() if isinstance(value, kind)}

    def named(name: str) -> T:
        if name not in known:
            raise ManifestInvalid(
                f"a catalog that has {name}, which this torch doesn't: use a newer one"
            )
        return known[name]

    return named


dtype_named, layout_named = _named(torch.dtype), _named(torch.layout)
memory_format_named = _named(torch.memory_format)


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


sendable_as(torch.Size, tuple, lambda *sizes: torch.Size(sizes))
for _kind, _read in (
    (torch.dtype, dtype_named),
    (torch.layout, layout_named),
    (torch.memory_format, memory_format_named),
):
    sendable_as(_kind, lambda value: (str(value),), _read)
