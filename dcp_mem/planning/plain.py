"""Tensors whose data is what their pointers say: these can be copied, and read into, as bytes."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch

PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
"""Tensor types whose data is what their pointer says."""

_IS_CPU, _LAYOUT = operator.attrgetter("is_cpu"), operator.attrgetter("layout")


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
