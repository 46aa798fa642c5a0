"""State dicts taken apart into a structure, which is small, and the bytes of their tensors.

The structure is the state dict with a place in the stead of each tensor. It travels as
`torch.save` writes it, and is unpickled with the restrictions of `weights_only`.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map, tree_map_only

from dcp_mem.errors import DcpMemError, UntrustedObject
from dcp_mem.format.layout import align
from dcp_mem.format.saved_streams import why_refused
from dcp_mem.planning.plain_tensors import PLAIN


class Place(NamedTuple):
    """Stands for a tensor in a structure."""

    number: int
    spec: Any  # how a DTensor, whose part on this rank the tensor is, is sharded; else None


torch.serialization.add_safe_globals([Place])


@dataclass(frozen=True, slots=True)
class Parts:
    """A state dict, taken apart."""

    structure: bytes
    # dense ones, on any device; they share memory with the state dict
    tensors: Sequence[torch.Tensor]


class Kind(NamedTuple):
    """What there is to know of a tensor before its bytes are there."""

    dtype: torch.dtype
    shape: torch.Size

    @property
    def nbytes(self) -> int:
        """The tensor's bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def taken_apart(state: Any) -> Parts:
    """Take a state dict apart. Raises DcpMemError."""
    tensors: list[torch.Tensor] = []
    numbers: dict[int, int] = {}  # a tensor that occurs twice is sent once

    def place_of(tensor: torch.Tensor) -> Any:
        spec = tensor._spec if isinstance(tensor, DTensor) else None
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        if not _is_dense(local):
            return tensor.detach()  # pickled with the structure
        if id(local) not in numbers:
            numbers[id(local)] = len(tensors)
            tensors.append(local.detach())
        return Place(numbers[id(local)], spec)

    structure = tree_map_only(torch.Tensor, place_of, state)
    kinds = [(tensor.dtype, tensor.shape) for tensor in tensors]
    stream = io.BytesIO()
    try:
        torch.save((structure, kinds), stream)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise DcpMemError(
            f"the state can't be sent to another replica, since a part of it can't be pickled: "
            f"{error}"
        ) from error
    return Parts(stream.getvalue(), tensors)


def _is_dense(tensor: torch.Tensor) -> bool:
    if tensor.device.type == "meta":
        raise DcpMemError(
            "a tensor on the meta device has no data to send: materialise the module first"
        )
    return type(tensor) in PLAIN and tensor.layout is torch.strided and not tensor.is_quantized


def unpickled(structure: bytes, *, weights_only: bool) -> tuple[Any, list[Kind]]:
    """Return a structure, and the kinds of the tensors that belong to it."""
    try:
        state, kinds = torch.load(
            io.BytesIO(structure), map_location="cpu", weights_only=weights_only
        )
    except pickle.UnpicklingError as error:
        if not weights_only:
            raise
        raise UntrustedObject("the state of the other replica", why_refused(error)) from None
    return state, [Kind(dtype, torch.Size(shape)) for dtype, shape in kinds]


def put_together(structure: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Return the state dict of a structure."""

    def tensor_at(place: Place) -> torch.Tensor:
        tensor = tensors[place.number]
        if place.spec is None:
            return tensor
        return DTensor(tensor, place.spec, requires_grad=False)

    return tree_map(
        lambda leaf: tensor_at(leaf) if isinstance(leaf, Place) else leaf,
        structure,
        is_leaf=lambda one: isinstance(one, Place),
    )


def offsets_of(lengths: Sequence[int]) -> tuple[list[int], int]:
    """Return where each tensor lies, and the bytes of all of them."""
    offsets, end = [], 0
    for nbytes in lengths:
        offsets.append(end)
        end = align(end + nbytes)
    return offsets, end
