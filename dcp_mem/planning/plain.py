"""Tensors whose data is what their pointers say: these can be copied, and read into, as bytes."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from itertools import compress, repeat

import torch

from dcp_mem.format.catalog import Properties
from dcp_mem.format.torch_names import properties

PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
"""Tensor types whose data is what their pointer says."""

BLOCK = 1024
"""Tensors are looked at in blocks: what the first loop over one brings into the cache, the next ones find there."""

_IS_CPU, _LAYOUT, _DTYPE = map(operator.attrgetter, ("is_cpu", "layout", "dtype"))


def are_plain(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all of these are contiguous CPU memory that their pointers tell all of."""
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
    """The same of one."""
    return are_plain((tensor,))


class Addresses:
    """Where tensors' data lies, as long as all of it is contiguous CPU memory that addresses tell all of.

    found: of the wanted among the tensors that were looked at; None once one of those isn't plain. Of plain types and
    strided they have to be. may_be_conj: whether any is complex, as others are never conjugated.
    """

    def __init__(self, is_wanted: Sequence[bool], may_be_conj: bool) -> None:
        self.found: list[int] | None = []
        self._is_wanted, self._may_be_conj = is_wanted, may_be_conj

    def look_at(self, start: int, block: Sequence[torch.Tensor]) -> None:
        """Look at the tensors whose first is number `start`. Blocks come in order."""
        if self.found is None:
            return
        kind, wanted = torch.Tensor, list(compress(block, self._is_wanted[start : start + len(block)]))
        # Real tensors can't be conjugated, but negated, as the imaginary part of a conjugated one is.
        if (
            all(map(_IS_CPU, wanted))
            and all(map(kind.is_contiguous, wanted))
            and not any(map(kind.is_neg, wanted))
            and not (self._may_be_conj and any(map(kind.is_conj, wanted)))
        ):
            self.found += map(kind.data_ptr, wanted)
        else:
            self.found = None


def addresses_of(tensors: Sequence[torch.Tensor], may_be_conj: bool) -> list[int] | None:
    """Where the data of strided tensors lies; None where one of them isn't plain. may_be_conj: as in Addresses."""
    if not PLAIN.issuperset(map(type, tensors)):
        return None
    addresses = Addresses([True] * len(tensors), may_be_conj)
    for start in range(0, len(tensors), BLOCK):
        addresses.look_at(start, tensors[start : start + BLOCK])
    return addresses.found


def properties_of(tensors: Sequence[torch.Tensor], requires_grad: Iterable[bool]) -> list[Properties]:
    """What DCP writes down of each of these tensors; equal ones are one object."""
    # Without an accelerator nothing can be pinned, and to ask takes as long as all the rest.
    pinned = map(torch.Tensor.is_pinned, tensors) if torch.accelerator.is_available() else repeat(False, len(tensors))
    facts = list(zip(map(_DTYPE, tensors), map(_LAYOUT, tensors), requires_grad, pinned, strict=True))
    known = {fact: properties(*fact) for fact in dict.fromkeys(facts)}
    return list(map(known.__getitem__, facts))
