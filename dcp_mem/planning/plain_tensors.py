"""Plain tensors: contiguous CPU tensors, fully described by address and size.

They can be copied, and read into, as bytes. Contiguous tensors on CUDA devices can be copied like
that, too, by the device.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from itertools import compress, repeat
from typing import Any

import torch

from dcp_mem.common.value_class import value_class

PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
"""Types of tensors that may be plain."""

BLOCK = 1024
"""Tensors per block: later loops over a block find it in the processor's cache."""

_IS_CPU, _IS_CUDA, _LAYOUT, _DTYPE = map(
    operator.attrgetter, ("is_cpu", "is_cuda", "layout", "dtype")
)


HOST = -1
"""The number of a CPU tensor's device, as torch has it."""
_DEVICE = torch.Tensor.get_device


class Where(Enum):
    """The memory of tensors that can be copied as bytes."""

    HOST = "all of them in CPU memory"
    DEVICES = "some of them on CUDA devices, the others in CPU memory"


def where(tensors: Sequence[torch.Tensor]) -> Where | None:
    """Return where tensors lie; None where they can't be copied as bytes."""
    return _where(tensors, may_be_conj=True) if _are_strided(tensors) else None


def _are_strided(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether all of these are strided, and of the types in `PLAIN`."""
    return PLAIN.issuperset(map(type, tensors)) and {torch.strided}.issuperset(
        map(_LAYOUT, tensors)
    )


def _where(tensors: Sequence[torch.Tensor], *, may_be_conj: bool) -> Where | None:
    """Return where strided tensors of the types in `PLAIN` lie, as `where` does."""
    kind = torch.Tensor
    # A real tensor can't be conjugated, but it can be negated: the imaginary part of a conjugated
    # tensor is.
    if (
        not all(map(kind.is_contiguous, tensors))
        or any(map(kind.is_neg, tensors))
        or (may_be_conj and any(map(kind.is_conj, tensors)))
    ):
        return None
    if all(map(_IS_CPU, tensors)):
        return Where.HOST
    is_copied = map(operator.or_, map(_IS_CPU, tensors), map(_IS_CUDA, tensors))
    return Where.DEVICES if all(is_copied) else None


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is plain."""
    return where((tensor,)) is Where.HOST and not lacks_memory(tensor)


def lacks_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor of a type in `PLAIN` has elements, and no memory that holds them.

    So it is with tensors whose storage was resized to nothing, as FSDP does with what it has
    gathered, and within some transformations of torch.
    """
    return tensor.data_ptr() == 0 and tensor.numel() > 0 and not tensor.is_meta


NO_MEMORY = (
    "the tensor has no memory (its storage was freed, as FSDP does with what it has gathered, or "
    "a transformation such as functionalization stands in for it)"
)
"""What to say of one that lacks it."""


@value_class(kw_only=True)
class Sources:
    """Contiguous tensors that can be copied as bytes."""

    tensors: Sequence[torch.Tensor]
    addresses: Sequence[int]
    # of each, the number of the CUDA device that it lies on, or `HOST`; None where none lies on a
    # device
    devices: Sequence[int] | None = None

    def only(self, is_wanted: Sequence[bool]) -> Sources:
        """Return some of them."""
        devices = self.devices
        return Sources(
            tensors=list(compress(self.tensors, is_wanted)),
            addresses=list(compress(self.addresses, is_wanted)),
            devices=None if devices is None else list(compress(devices, is_wanted)),
        )


def sources_of(tensors: Sequence[torch.Tensor], *, may_be_conj: bool = True) -> Sources | None:
    """Return tensors as sources of copies; None where one of them can't be copied as bytes.

    `may_be_conj`: whether any is complex; others are never conjugated.
    """
    if not _are_strided(tensors):
        return None
    sources = SourcesByBlock([True] * len(tensors), may_be_conj)
    for start in range(0, len(tensors), BLOCK):
        sources.look_at(start, tensors[start : start + BLOCK])
    return sources.found


class SourcesByBlock:
    """Collects tensors as sources of copies, as long as all of them can be copied as bytes.

    The tensors must be of the types in `PLAIN`, and strided.

    `may_be_conj`: whether any is complex; others are never conjugated.
    """

    def __init__(self, is_wanted: Sequence[bool], may_be_conj: bool) -> None:
        self._is_wanted, self._may_be_conj = is_wanted, may_be_conj
        self._tensors: list[torch.Tensor] = []
        self._addresses: list[int] = []
        self._found: Where | None = Where.HOST

    def look_at(
        self, start: int, block: Sequence[torch.Tensor], known: Where | None = None
    ) -> None:
        """Visit a block of tensors.

        `start`: index of its first tensor; blocks come in order. `known`: where they are known to
        lie, and needn't be asked; None where that isn't known.
        """
        if self._found is None:
            return
        wanted = list(compress(block, self._is_wanted[start : start + len(block)]))
        lie = known or _where(wanted, may_be_conj=self._may_be_conj)
        if lie is not Where.HOST:
            self._found = lie
        addresses = list(map(torch.Tensor.data_ptr, wanted)) if lie is not None else []
        if 0 in addresses and any(map(lacks_memory, wanted)):
            self._found = None
        self._tensors += wanted
        self._addresses += addresses

    @property
    def found(self) -> Sources | None:
        """The wanted tensors visited so far; None once one of them can't be copied as bytes."""
        if self._found is None:
            return None
        has_devices = self._found is Where.DEVICES
        return Sources(
            tensors=self._tensors,
            addresses=self._addresses,
            devices=list(map(_DEVICE, self._tensors)) if has_devices else None,
        )


def facts_of(
    tensors: Sequence[torch.Tensor], requires_grad: Iterable[bool]
) -> Iterator[tuple[Any, ...]]:
    """Yield the arguments of `torch_names.properties`, and the shape, of each tensor."""
    # Without an accelerator nothing can be pinned, and asking takes as long as all the rest.
    pinned = (
        map(torch.Tensor.is_pinned, tensors)
        if torch.accelerator.is_available()
        else repeat(False, len(tensors))
    )
    # One tensor after the other, as the processor's cache may not hold all of them.
    return zip(
        map(_DTYPE, tensors),
        map(_LAYOUT, tensors),
        requires_grad,
        pinned,
        map(torch.Tensor.size, tensors),
        strict=True,
    )
