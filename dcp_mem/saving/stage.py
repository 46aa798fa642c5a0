"""After all have agreed: this rank's items are copied into a slot, which is sealed as a segment."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import compress
from typing import Any

import numpy as np
import torch

from dcp_mem.common import faults
from dcp_mem.common.values import Segment
from dcp_mem.errors import DcpMemError
from dcp_mem.format import names
from dcp_mem.format.frames import Spec
from dcp_mem.format.layout import align
from dcp_mem.memory.copying import Move, copy, copy_many, moves_of
from dcp_mem.memory.device_copies import copy_stream
from dcp_mem.memory.slot import Slot
from dcp_mem.planning.plain_tensors import HOST, NO_MEMORY, PLAIN, lacks_memory
from dcp_mem.planning.wrapper_tensors import (
    class_name,
    detached,
    is_wrapper,
    naming,
    rebuilt,
    refuse_other_class,
)
from dcp_mem.runtime.frozen import FilledFrozen
from dcp_mem.runtime.layouts import put_frames
from dcp_mem.runtime.session import Session
from dcp_mem.saving.overlap import StagingCopies
from dcp_mem.saving.values import (
    TAIL_ROOM,
    Agreed,
    Filled,
    Items,
    Planned,
    SaveContext,
    Staged,
)

_BATCH = 256 << 20
_GATHERED = 256 << 10
"""Bytes of small streams that are written with one system call."""
_NO_DATA = "a tensor on the meta device has no data to save: materialise the module first"


class _OtherThanPlanned(Exception):
    """A tensor isn't what the layout expects: the planner transforms tensors in another way now."""


def stage(context: SaveContext, agreed: Agreed, planned: Planned) -> Staged:
    """Copy this rank's items into a slot, unless they lie in one, and seal it as a segment.

    Raises MemoryBudgetExceeded, Exception.
    """
    filled = planned.filled() if planned.filled is not None else fill(context.session, planned)
    return _sealed(context, agreed, filled)


def fill(session: Session, planned: Planned, later: StagingCopies | None = None) -> Filled:
    """Copy this rank's items into a slot.

    1. Claim a slot, one whose pages are there already if possible, and write the layout's frames
       into it.
    2. Copy the tensors to their places, in batches.
    3. Append what has no place in the layout: byte items, and tensors without a plain dense
       payload.
    4. Where some are frozen: hold on to the segment that has their bytes, or copy them to another
       slot.

    `later`: takes over copies, which its owner waits for. None: on return all have been made.
    Raises MemoryBudgetExceeded, Exception.
    """
    frozen = None
    if planned.frozen is not None:
        frozen = session.frozen.held(planned.frozen) or _fill_frozen(session, planned)
    try:
        # Without gradients DTensors hand over their local tensors themselves, not views of them.
        with torch.no_grad():
            try:
                filled = _fill(session, planned, later)
            except _OtherThanPlanned:
                dense = [_resolved(planned.items, item)[1] for item in planned.tensors]
                learnt = session.layouts.learn(planned.layout.expected, dense)
                filled = _fill(session, replace(planned, layout=learnt, sources=None), later)
            return replace(filled, frozen=frozen)
    except BaseException:
        if frozen is not None:
            frozen.give_back()
        raise


def _fill_frozen(session: Session, planned: Planned) -> FilledFrozen:
    """Copy the frozen items into a slot of their own."""
    items = planned.frozen
    assert items is not None
    identities, layout = items.identities(), items.layout
    slot, copies = session.slots.claim(layout.layout.nbytes, layout.frames), StagingCopies()
    try:
        put_frames(slot, layout)
        alone = replace(
            planned, tensors=items.rows, objects=(), layout=layout, sources=items.sources
        )
        _copy_tensors(slot, alone, copies)
        copies.finish()
        faults.point("frozen.copied")
    except BaseException:
        copies.cancel(lambda: session.slots.abandon(slot))
        raise
    return session.frozen.made(items, slot, identities)


def _fill(session: Session, planned: Planned, later: StagingCopies | None) -> Filled:
    """Copy all items but the frozen ones."""
    slots, layout, copies = session.slots, planned.layout.layout, later or StagingCopies()
    nbytes = max(planned.nbytes, layout.nbytes) + TAIL_ROOM
    slot = slots.claim(nbytes, planned.layout.frames, mapped=layout.nbytes)
    try:
        faults.point("stage.claimed")
        put_frames(slot, planned.layout)
        slow = _copy_tensors(slot, planned, copies)
        faults.point("stage.copied")
        tail = tuple(_append(slot, layout.nbytes, _streams(planned.items, slow, planned.objects)))
        copies.begin()
        if later is None:
            copies.finish()
    except BaseException:
        copies.cancel(lambda: slots.abandon(slot))
        raise
    slow_ids = set(map(id, slow))
    dense = (
        [item for item in planned.tensors if id(item) not in slow_ids] if slow else planned.tensors
    )
    return Filled(
        slot=slot,
        layout=planned.layout,
        items=planned.items,
        order=[*dense, *slow, *planned.objects],
        tail=tail,
    )


def _sealed(context: SaveContext, agreed: Agreed, filled: Filled) -> Staged:
    """Seal a slot as this rank's segment: from here on nothing writes into it any more."""
    session, slot, tail, frozen = context.session, filled.slot, filled.tail, filled.frozen
    memory, file = session.memory, names.segment_file(context.rank, agreed.save_id)

    def add(directory: str) -> None:
        session.slots.seal(slot, os.path.join(directory, file))

    try:
        if frozen is not None:
            frozen.seal(memory, context.rank, agreed.save_id, context.name)
            faults.point("frozen.sealed")
        memory.add_segment(context.name, add)
        faults.point("stage.sealed")
    except BaseException:
        session.slots.abandon(slot)
        if frozen is not None:
            frozen.give_back()
        raise
    segment = Segment(
        rank=context.rank,
        node=memory.node,
        file=file,
        nbytes=tail[-1][0] + tail[-1][1] if tail else filled.layout.layout.nbytes,
        layout=filled.layout.described.key,
        tail=tail,
    )
    return Staged(
        slot=slot,
        layout=filled.layout,
        items=filled.items,
        order=filled.order,
        tail=tail,
        frozen=frozen,
        segment=segment,
    )


def _spec(tensor: torch.Tensor) -> Spec | None:
    """Return dtype and shape of a tensor with a plain dense payload; None for any other."""
    if type(tensor) not in PLAIN or tensor.layout is not torch.strided or tensor.is_quantized:
        return None
    if tensor.device.type == "meta":
        raise DcpMemError(_NO_DATA)
    if lacks_memory(tensor):
        raise DcpMemError(f"{NO_MEMORY}: save it while it has")
    return tensor.dtype, tensor.shape


def _resolved(items: Items, item: Any) -> tuple[torch.Tensor, Spec | None]:
    """Return a tensor, and dtype and shape if it has a plain dense payload."""
    tensor = _resolve(items, item)
    try:
        return tensor, _spec(tensor)
    except DcpMemError as error:
        raise DcpMemError(f"{items.index(item).fqn}: {error}") from None


def _resolve(items: Items, item: Any) -> torch.Tensor:
    tensor = items.resolve(item)
    if type(tensor) in PLAIN:
        return tensor.detach()  # type: ignore[no-any-return]
    name = items.index(item).fqn
    if not isinstance(tensor, torch.Tensor):
        raise DcpMemError(
            f"the planner resolved {name} to a {type(tensor).__name__}, not to a tensor"
        )
    with naming(name):
        return detached(tensor)


def _copy_tensors(slot: Slot, planned: Planned, copies: StagingCopies) -> list[Any]:
    """Copy dense tensors to their places, or have `copies` do it; return the others' items.

    Raises _OtherThanPlanned.
    """
    layout, sources = planned.layout.layout, planned.sources
    targets, nbytes = slot.address + layout.payload_offsets, layout.payload_nbytes
    if sources is None:
        places = list(zip(targets.tolist(), nbytes.tolist(), strict=True))
        return _copy_one_by_one(slot, places, planned, copies)
    addresses = np.array(sources.addresses, np.int64)
    is_here = np.ones(len(addresses), bool)
    if sources.devices is not None:
        is_here = np.array(sources.devices) == HOST
        is_there = ~is_here & (nbytes > 0)
        there = list(compress(sources.tensors, is_there.tolist()))
        copies.take_from_devices(targets[is_there], there)
    is_here[is_here] = copies.take(targets[is_here], addresses[is_here], nbytes[is_here])
    here = targets[is_here], addresses[is_here], nbytes[is_here]
    if faults.is_armed("stage.copying"):
        _copy_moves(moves_of(*here))
    else:
        copy_many(*here)
    return []


def _copy_one_by_one(
    slot: Slot, places: Sequence[tuple[int, int]], planned: Planned, copies: StagingCopies
) -> list[Any]:
    """Copy tensors of any kind, as the planner resolves them.

    In batches: tensors may be made just for us, by the planner or because they aren't contiguous,
    and all of them at once might not fit. Only what doesn't take memory, or not much, is left to
    `copies`.
    """
    batch, slow, place = TensorBatch(slot), [], iter(places)
    for item, spec in zip(planned.tensors, planned.layout.dense, strict=True):
        tensor, found = _resolved(planned.items, item)
        if found != spec:
            raise _OtherThanPlanned
        if spec is None:
            slow.append(item)
            continue
        address, nbytes = next(place)
        if nbytes:
            batch.add(tensor, address, nbytes)
            if tensor.is_cpu:
                copies.pass_over(tensor)
        # What isn't waited for is copied from the state dict, by no planner.
        if (batch.made_nbytes if copies.are_left else batch.nbytes) >= _BATCH:
            own = StagingCopies()
            try:
                batch.copy(own)
            finally:
                own.finish()
            batch = TensorBatch(slot)
    batch.copy(copies)
    return slow


class TensorBatch:
    """Tensors to copy into a mapped slot, each as its kind needs."""

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self.nbytes = 0
        self.made_nbytes = 0  # of device memory, for copies that are waiting
        self._moves: list[Move] = []
        self._alive: list[torch.Tensor] = []
        self._targets: list[int] = []
        self._sources: list[torch.Tensor] = []

    def add(self, tensor: torch.Tensor, address: int, nbytes: int) -> None:
        self.nbytes += nbytes
        self._alive.append(tensor)
        if (
            tensor.is_cpu
            and tensor.is_contiguous()
            and not (tensor.is_neg() or tensor.is_conj())
            and (source_address := tensor.data_ptr())  # torch refuses one without memory
        ):
            self._moves.append((address, source_address, nbytes))
        elif copy_stream(tensor.device) is not None:
            source = tensor.detach().resolve_conj().resolve_neg().contiguous()
            if source.data_ptr() != tensor.data_ptr():
                self.made_nbytes += nbytes
            self._targets.append(address)
            self._sources.append(source)
        else:
            assert self._slot.mapping is not None
            buffer, start = self._slot.mapping.buffer, self._slot.address
            offset = address - start
            place = torch.frombuffer(buffer, dtype=torch.uint8, count=nbytes, offset=offset)
            place.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())

    def copy(self, copies: StagingCopies) -> None:
        """Copy what was added, or have `copies` do it."""
        if self._sources:
            copies.take_from_devices(np.array(self._targets, np.int64), self._sources)
        _copy_moves(self._moves)


def _copy_moves(moves: Sequence[Move]) -> None:
    if faults.is_armed("stage.copying"):
        middle = len(moves) // 2
        copy(moves[:middle])
        faults.point("stage.copying")
        moves = moves[middle:]
    copy(moves)


def _streams(items: Items, slow: Sequence[Any], objects: Sequence[Any]) -> Iterator[memoryview]:
    """Yield the bytes of each item that goes to the tail."""
    for item in slow:
        stream, name = io.BytesIO(), items.index(item).fqn
        tensor = _to_pickle(_resolve(items, item), name)
        try:
            torch.save(tensor, stream)
        except Exception as error:
            what = f"{class_name(tensor)} that can't be pickled"
            raise DcpMemError(f"{name} is {what} ({error}): save its values") from error
        yield stream.getbuffer()
    for item in objects:
        data = items.resolve(item)
        if not isinstance(data, io.BytesIO):
            raise DcpMemError(
                f"the planner resolved {items.index(item).fqn} to a {type(data).__name__}, "
                f"not to io.BytesIO"
            )
        yield data.getbuffer()


def _to_pickle(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Return a tensor on the CPU, of the same class, that brings no more than its values along."""
    if tensor.device.type == "meta":
        raise DcpMemError(_NO_DATA)
    if is_wrapper(tensor):
        with naming(name):
            return rebuilt(tensor, lambda part: _to_pickle(detached(part), name))
    here = tensor.cpu()
    if here.layout is torch.strided and here.untyped_storage().nbytes() != here.nbytes:
        here = here.clone()  # torch.save would write all of the storage behind the view
    with naming(name):
        refuse_other_class(here, tensor, "is moved to the CPU")
    return here


def _append(slot: Slot, offset: int, streams: Iterator[memoryview]) -> Iterator[tuple[int, int]]:
    """Write streams one behind the other from `offset` on; yield where each lies.

    Small ones are gathered: a system call for each takes longer than their bytes.
    """
    gathered = bytearray()
    for data in streams:
        # An empty item has a place of its own, too: readers find it by that.
        following = align(offset + max(len(data), 1))
        zeros = bytes(following - offset - len(data))
        if len(gathered) + len(data) > _GATHERED:
            _write(slot, offset - len(gathered), gathered)
            gathered = bytearray()
        if len(data) > _GATHERED:
            _write(slot, offset, data)
            _write(slot, offset + len(data), zeros)
        else:
            gathered += data
            gathered += zeros
        yield offset, len(data)
        offset = following
    _write(slot, offset - len(gathered), gathered)


def _write(slot: Slot, offset: int, data: bytes | bytearray | memoryview) -> None:
    slot.reserve(offset + len(data))
    slot.write_at(offset, data)
