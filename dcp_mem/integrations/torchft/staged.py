"""A state dict copied into node memory, from where other replicas get it while training goes on.

It is taken apart into a structure, which is small, and the bytes of its tensors. The structure is
the state dict with a place in the stead of each tensor. It travels as `torch.save` writes it, and
is unpickled with the restrictions of `weights_only`.
"""

from __future__ import annotations

import io
import math
import pickle
import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map, tree_map_only

from dcp_mem.comm.transfer import CHUNK, OutgoingChunk
from dcp_mem.common import faults
from dcp_mem.common.value_class import value_class
from dcp_mem.errors import DcpMemError, UntrustedObject
from dcp_mem.format.checksums import BlockChecksums, Blocks, Crcs, blocks_of, checksum
from dcp_mem.format.layout import ALIGNMENT, align
from dcp_mem.format.saved_streams import why_refused
from dcp_mem.memory import pinning
from dcp_mem.memory.slot import nameless_slot
from dcp_mem.memory.views import view_of
from dcp_mem.planning.plain_tensors import PLAIN
from dcp_mem.saving.overlap import StagingCopies
from dcp_mem.saving.stage import TensorBatch

MARK_NBYTES = ALIGNMENT
"""Random bytes at the beginning of a slot, by which a reader knows it has opened the right file."""


class StagedState:
    """A state dict in a slot of its own; its memory is given back once nobody reads it any more."""

    def __init__(self, step: int, state: Any, directory: str) -> None:
        """Copy a state dict; it may change as soon as this has returned."""
        parts = taken_apart(state)
        self.step, self.structure = step, parts.structure
        self.mark = secrets.token_bytes(MARK_NBYTES)
        lengths = [tensor.nbytes for tensor in parts.tensors]
        self._offsets, self.nbytes = offsets_of(lengths)
        self._lengths = lengths
        self._guard = threading.Condition()
        self._readers, self._is_dropped = 0, False
        self._summing = threading.Lock()
        self._slot = nameless_slot(directory)
        try:
            self._fill(parts)
        except BaseException:
            self._give_back()
            raise

    def _fill(self, parts: Parts) -> None:
        slot = self._slot
        slot.map(MARK_NBYTES + self.nbytes, MARK_NBYTES + self.nbytes)
        pinning.pin(slot)
        _wait_for_devices(parts)
        view_of(slot.address, MARK_NBYTES)[:] = self.mark
        batch, copies = TensorBatch(slot), StagingCopies()
        first = slot.address + MARK_NBYTES
        for tensor, offset in zip(parts.tensors, self._offsets, strict=True):
            if tensor.nbytes:
                batch.add(tensor, first + offset, tensor.nbytes)
        try:
            batch.copy(copies)
        finally:
            copies.finish()
        faults.point("torchft.staged")

    @property
    def descriptor(self) -> int:
        """Of the slot, for as long as it is read."""
        return self._slot.descriptor

    @property
    def inode(self) -> int:
        """Of the slot's file."""
        return self._slot.inode

    @contextmanager
    def read(self) -> Iterator[bool]:
        """Keep the memory for the length of a context; yields whether it is still there."""
        with self._guard:
            is_there = not self._is_dropped
            self._readers += is_there
        try:
            yield is_there
        finally:
            with self._guard:
                self._readers -= is_there
                self._end_if_unused()

    def drop(self) -> None:
        """Give the memory back as soon as nobody reads it any more."""
        with self._guard:
            self._is_dropped = True
            self._end_if_unused()

    def _end_if_unused(self) -> None:
        if self._is_dropped and not self._readers and self._slot.descriptor >= 0:
            self._give_back()

    def _give_back(self) -> None:
        self._slot.give_back()
        self._slot.close()

    def chunks(self) -> Iterator[OutgoingChunk]:
        """Yield the bytes in the chunks in which they go to another node."""
        for start in range(0, self.nbytes, CHUNK):
            chunk = self._view(start, min(CHUNK, self.nbytes - start))
            yield OutgoingChunk(chunk, partial(checksum, chunk))

    @cached_property
    def _blocks(self) -> Blocks:
        offsets = np.array(self._offsets, np.int64) + MARK_NBYTES
        return blocks_of(offsets, np.array(self._lengths, np.int64))

    def checksums(self) -> Crcs:
        """Return the CRC32C of each block of the tensors; they are made when first asked for."""
        with self._summing:
            return self._checksums

    @cached_property
    def _checksums(self) -> Crcs:
        sums = BlockChecksums(self._blocks)
        for offset, nbytes in zip(self._offsets, self._lengths, strict=True):
            sums.add(MARK_NBYTES + offset, self._view(offset, nbytes))
        return sums.result()

    def _view(self, offset: int, nbytes: int) -> memoryview:
        assert self._slot.mapping is not None
        start = MARK_NBYTES + offset  # the mapping stays for as long as the view is used
        return memoryview(self._slot.mapping.buffer).cast("B")[start : start + nbytes]


def _wait_for_devices(parts: Parts) -> None:
    """Wait for what devices have been told to compute: the optimizer's last step may be going on.

    torchft sends a state in another thread, and in a stream that knows nothing of that.
    """
    devices = {tensor.device for tensor in parts.tensors if tensor.device.type == "cuda"}
    for device in devices:
        torch.cuda.synchronize(device)


# -- taken apart, and put together -----------------------------------------------------------------


class Place(NamedTuple):
    """Stands for a tensor in a structure."""

    number: int
    spec: Any  # how a DTensor, whose part on this rank the tensor is, is sharded; else None


torch.serialization.add_safe_globals([Place])


@value_class
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
