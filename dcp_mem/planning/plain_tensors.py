"""Plain tensors: contiguous CPU tensors, fully described by address and size.

They can be copied, and read into, as bytes.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from itertools import compress, repeat

import torch

from dcp_mem.format.catalog import Properties
from dcp_mem.format.torch_names import properties

PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
"""Types of tensors that may be plain."""

BLOCK = 1024
"""Tensors per block: later loops over a block find it in the processor's cache."""

_IS_CPU, _LAYOUT, _DTYPE = map(operator.attrgetter, ("is_cpu", "layout", "dtype"))


def are_plain(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether all of these are plain.

    Args:
        tensors: May be none; then the answer is True.
    """
    kind = torch.Tensor
    return (
        PLAIN.issuperset(map(type, tensors))
        and all(map(_IS_CPU, tensors))
        and {torch.strided}.issuperset(map(_LAYOUT, tensors))
        and all(map(kind.is_contiguous, tensors))
        and not any(map(kind.is_neg, tensors))
        and not any(map(kind.is_conj, tensors))
    )


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is plain.

    Args:
        tensor: Of any class, on any device.
    """
    return are_plain((tensor,))


class Addresses:
    """Collects the addresses of tensors, as long as all of them are plain.

    The tensors must be of the types in `PLAIN`, and strided.

    Args:
        is_wanted: For each tensor, whether its address is wanted.
        may_be_conj: Whether any is complex; others are never conjugated.

    Attributes:
        found: Addresses of the wanted tensors visited so far; None once one of them isn't plain.
    """

    def __init__(self, is_wanted: Sequence[bool], may_be_conj: bool) -> None:
        self.found: list[int] | None = []
        self._is_wanted, self._may_be_conj = is_wanted, may_be_conj

    def look_at(self, start: int, block: Sequence[torch.Tensor], are_plain: bool = False) -> None:
        """Visit a block of tensors.

        Args:
            start: Index of its first tensor; blocks come in order.
            block: The tensors.
            are_plain: Whether they are known to be plain, and needn't be asked.
        """
        if self.found is None:
            return
        kind, wanted = (
            torch.Tensor,
            list(compress(block, self._is_wanted[start : start + len(block)])),
        )
        # A real tensor can't be conjugated, but it can be negated: the imaginary part of a
        # conjugated tensor is.
        if are_plain or (
            all(map(_IS_CPU, wanted))
            and all(map(kind.is_contiguous, wanted))
            and not any(map(kind.is_neg, wanted))
            and not (self._may_be_conj and any(map(kind.is_conj, wanted)))
        ):
            self.found += map(kind.data_ptr, wanted)
        else:
            self.found = None


def addresses_of(tensors: Sequence[torch.Tensor], may_be_conj: bool) -> list[int] | None:
    """Return the addresses of strided tensors; None where one of them isn't plain.

    Args:
        tensors: The tensors.
        may_be_conj: Whether any is complex; others are never conjugated.
    """
    if not PLAIN.issuperset(map(type, tensors)):
        return None
    addresses = Addresses([True] * len(tensors), may_be_conj)
    for start in range(0, len(tensors), BLOCK):
        addresses.look_at(start, tensors[start : start + BLOCK])
    return addresses.found


def properties_of(
    tensors: Sequence[torch.Tensor], requires_grad: Iterable[bool]
) -> list[Properties]:
    """Return what DCP records of each tensor besides its shape; equal properties are one object.

    Args:
        tensors: The tensors.
        requires_grad: Of each.
    """
    # Without an accelerator nothing can be pinned, and asking takes as long as all the rest.
    pinned = (
        map(torch.Tensor.is_pinned, tensors)
        if torch.accelerator.is_available()
        else repeat(False, len(tensors))
    )
    facts = list(
        zip(map(_DTYPE, tensors), map(_LAYOUT, tensors), requires_grad, pinned, strict=True)
    )
    known = {fact: properties(*fact) for fact in dict.fromkeys(facts)}
    return list(map(known.__getitem__, facts))
