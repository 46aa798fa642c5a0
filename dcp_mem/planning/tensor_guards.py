"""Whether thousands of tensors look as they did before, asked with one call.

torch.compile asks that before each call of what it has compiled. Its guards compare everything that
is said of a tensor but its address and its values, in one loop of compiled code. Attribute by
attribute the same takes six times as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from dcp_mem.planning.plain_tensors import where

try:
    from torch._C._dynamo.guards import TensorGuards
except ImportError:  # a future torch
    TensorGuards = None  # type: ignore[assignment,misc]


class Guards:
    """What tensors look like; it holds none of them.

    `where`: where they lie, if they can be copied as bytes; None also where `hold` can't tell.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._guards = _made(tensors) if _notice_everything() else None
        self.where = where(tensors) if self._guards is not None else None

    def hold(self, tensors: Sequence[Any]) -> bool:
        """Return whether as many tensors look the same, one by one.

        That is: class, dtype, layout, device, shape, strides, gradients, and whether it is the
        conjugate or the negative of what its memory has. False may also mean that nobody can tell.
        """
        if self._guards is None:
            return False
        with torch.enable_grad():  # without it, nobody looks whether a tensor requires gradients
            return bool(self._guards.check(*tensors))


def _made(tensors: Sequence[torch.Tensor]) -> Any:
    """Return torch's guards of tensors; None where it has none for one of them."""
    try:
        with torch.enable_grad():
            return TensorGuards(
                *tensors,
                dynamic_dims_sizes=[list(one.shape) for one in tensors],  # type: ignore[misc]
                dynamic_dims_strides=[list(one.stride()) for one in tensors],  # type: ignore[misc]
            )
    except Exception:
        return None


@cache
def _notice_everything() -> bool:
    """Return whether this torch's guards are there, and notice all that they are asked for."""
    if TensorGuards is None:
        return False
    one, complex_one = torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.cfloat)
    pairs: list[tuple[torch.Tensor, Any]] = [
        (one, torch.zeros(2, 4)),
        (one, torch.zeros(2, 3, 1)),
        (one, torch.zeros(3, 2).t()),
        (one, one.double()),
        (one, one.to_sparse()),
        (one, torch.zeros(2, 3, device="meta")),
        (one, torch.zeros(2, 3, requires_grad=True)),
        (one, torch.nn.Parameter(one, requires_grad=False)),
        (complex_one, complex_one.conj()),
        (complex_one.imag, complex_one.conj().imag),
        (one, "no tensor"),
    ]
    try:
        return all(_tell_apart(before, after) for before, after in pairs)
    except Exception:  # of a torch that wants to be asked otherwise
        return False


def _tell_apart(before: torch.Tensor, after: Any) -> bool:
    guards = _made((before,))
    with torch.enable_grad():
        return bool(guards.check(before.detach())) and not guards.check(after)
