"""After all have agreed: this rank's items are copied into a slot, which is sealed as a segment."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, overload

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.storage import WriteResult

from dcp_mem.common import faults
from dcp_mem.common.values import Segment
from dcp_mem.errors import DcpMemError
from dcp_mem.format import names
from dcp_mem.format.frames import Spec
from dcp_mem.format.layout import align
from dcp_mem.memory import pinning
from dcp_mem.memory.copying import Move, copy
from dcp_mem.memory.slots import Slot
from dcp_mem.planning.plain_tensors import PLAIN
from dcp_mem.runtime.layouts import PlanLayout, put_frames
from dcp_mem.saving.plan import TAIL_ROOM
from dcp_mem.saving.values import Agreed, Items, Planned, SaveContext, Staged

_BATCH = 256 << 20


class _OtherThanPlanned(Exception):
    """A tensor isn't what the layout expects: the planner transforms tensors in another way now."""


def stage(context: SaveContext, agreed: Agreed, planned: Planned) -> Staged:
    """Copy this rank's items into a slot and seal it as a segment.

    1. Claim a slot, one whose pages are there already if possible, and write the layout's frames
       into it.
    2. Copy the tensors to their places, in batches.
    3. Append what has no place in the layout: byte items, and tensors without a plain dense
       payload.
    4. Seal the slot: from here on it is the segment, and nothing writes into it any more.

    Args:
        context: Of the save.
        agreed: What all ranks agreed on.
        planned: This rank's part of the plan.

    Raises:
        MemoryBudgetExceeded: The file system of the memory root is full.
        Exception: What the planner raises.
    """
    try:
        return _stage_into_slot(context, agreed, planned)
    except _OtherThanPlanned:
        dense = [_spec(_resolve(planned.items, item)) for item in planned.tensors]
        learnt = context.session.layouts.learn(planned.layout.expected, dense)
        return _stage_into_slot(context, agreed, replace(planned, layout=learnt, sources=None))


def _stage_into_slot(context: SaveContext, agreed: Agreed, planned: Planned) -> Staged:
    slots, layout = context.session.slots, planned.layout.layout
    nbytes = max(planned.nbytes, layout.nbytes) + TAIL_ROOM
    slot = slots.claim(nbytes, planned.layout.frames, mapped=layout.nbytes)
    try:
        faults.point("stage.claimed")
        put_frames(slot, planned.layout)
        slow = _copy_tensors(slot, planned)
        faults.point("stage.copied")
        tail = tuple(_append(slot, layout.nbytes, _streams(planned.items, slow, planned.objects)))
        segment = seal(context, agreed, slot, planned.layout, tail)
        faults.point("stage.sealed")
    except BaseException:
        slots.abandon(slot)
        raise
    slow_ids = set(map(id, slow))
    dense = (
        [item for item in planned.tensors if id(item) not in slow_ids] if slow else planned.tensors
    )
    return Staged(
        segment=segment,
        items=planned.items,
        order=[*dense, *slow, *planned.objects],
        offsets=[*layout.offsets.tolist(), *(offset for offset, _ in tail)],
        lengths=[*layout.lengths.tolist(), *(nbytes for _, nbytes in tail)],
        slot=slot,
        layout=planned.layout,
    )


def _spec(tensor: torch.Tensor) -> Spec | None:
    """Return dtype and shape of a tensor with a plain dense payload; None for any other."""
    if not _is_dense(tensor):
        return None
    return tensor.dtype, tensor.shape


def _is_dense(tensor: torch.Tensor) -> bool:
    plain = type(tensor) in PLAIN and tensor.layout is torch.strided and not tensor.is_quantized
    if plain and tensor.device.type == "meta":
        raise DcpMemError(
            "a tensor on the meta device has no data to save: materialise the module first"
        )
    return plain


def _resolve(items: Items, item: Any) -> torch.Tensor:
    tensor = items.resolve(item)
    if not isinstance(tensor, torch.Tensor):
        raise DcpMemError(
            f"the planner resolved {items.index(item).fqn} to a {type(tensor).__name__}, "
            f"not to a tensor"
        )
    return tensor.detach()


def _copy_tensors(slot: Slot, planned: Planned) -> list[Any]:
    """Copy dense tensors to their places; return the others' items. Raises _OtherThanPlanned."""
    layout = planned.layout.layout
    addresses = (slot.address + layout.payload_offsets).tolist()
    lengths = layout.payload_nbytes.tolist()
    if planned.sources is None:
        places = list(zip(addresses, lengths, strict=True))
        return _copy_one_by_one(slot, places, planned)
    moves = list(zip(addresses, planned.sources, lengths, strict=True))
    _copy_batch(moves, _OtherCopies(slot))
    return []


def _copy_one_by_one(slot: Slot, places: Sequence[tuple[int, int]], planned: Planned) -> list[Any]:
    """Copy tensors of any kind, as the planner resolves them.

    In batches: the planner may make the tensors just for us, and all of them at once might not fit.
    """
    others, slow, place = _OtherCopies(slot), [], iter(places)
    moves: list[Move] = []
    alive: list[torch.Tensor] = []
    waiting = 0
    for item, spec in zip(planned.tensors, planned.layout.dense, strict=True):
        tensor = _resolve(planned.items, item)
        if _spec(tensor) != spec:
            raise _OtherThanPlanned
        if spec is None:
            slow.append(item)
            continue
        address, nbytes = next(place)
        if not nbytes:
            continue
        if (
            tensor.is_cpu
            and tensor.is_contiguous()
            and not tensor.is_neg()
            and not tensor.is_conj()
        ):
            moves.append((address, tensor.data_ptr(), nbytes))
        else:
            others.copy(tensor, address, nbytes)
        alive.append(tensor)
        waiting += nbytes
        if waiting >= _BATCH:
            _copy_batch(moves, others)
            moves, alive, waiting = [], [], 0
    _copy_batch(moves, others)
    return slow


def _copy_batch(moves: Sequence[Move], others: _OtherCopies) -> None:
    if faults.is_armed("stage.copying"):
        middle = len(moves) // 2
        copy(moves[:middle])
        faults.point("stage.copying")
        moves = moves[middle:]
    others.start()
    copy(moves)
    others.finish()


class _OtherCopies:
    """Copies of tensors that aren't plain CPU memory: strided ones, and those on devices.

    Each device copies on a stream of its own.
    """

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self._waiting: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._streams: list[torch.cuda.Stream] = []

    def copy(self, tensor: torch.Tensor, address: int, nbytes: int) -> None:
        """Copy a tensor to an address in the slot, now; from a device, when `start` is called."""
        assert self._slot.mapping is not None
        buffer, start = self._slot.mapping.buffer, self._slot.address
        place = torch.frombuffer(buffer, dtype=torch.uint8, count=nbytes, offset=address - start)
        target = place.view(tensor.dtype).view(tensor.shape)
        if tensor.device.type != "cuda":
            target.copy_(tensor.detach())
            return
        self._waiting.setdefault(tensor.device, []).append((target, tensor.detach()))

    def start(self) -> None:
        """Launch the copies from devices, behind what the planner may have launched just now."""
        for device, copies in self._waiting.items():
            stream = pinning.side_stream(device)
            self._streams.append(stream)
            with torch.cuda.stream(stream):
                for target, source in copies:
                    # Resolved here: torch would conjugate or negate the target while the copy is
                    # still under way.
                    target.copy_(source.resolve_conj().resolve_neg(), non_blocking=True)

    def finish(self) -> None:
        """Wait for the copies from devices."""
        for stream in self._streams:
            stream.synchronize()
        self._streams.clear()
        self._waiting.clear()


def _streams(items: Items, slow: Sequence[Any], objects: Sequence[Any]) -> Iterator[memoryview]:
    """Yield the bytes of each item that goes to the tail."""
    for item in slow:
        stream = io.BytesIO()
        tensor = _resolve(items, item).cpu()
        if tensor.layout is torch.strided and tensor.untyped_storage().nbytes() != tensor.nbytes:
            tensor = tensor.clone()  # torch.save would write all of the storage behind the view
        torch.save(tensor, stream)
        yield stream.getbuffer()
    for item in objects:
        data = items.resolve(item)
        if not isinstance(data, io.BytesIO):
            raise DcpMemError(
                f"the planner resolved {items.index(item).fqn} to a {type(data).__name__}, "
                f"not to io.BytesIO"
            )
        yield data.getbuffer()


def _append(slot: Slot, offset: int, streams: Iterator[memoryview]) -> Iterator[tuple[int, int]]:
    """Write streams one behind the other from `offset` on; yield where each lies."""
    for data in streams:
        slot.reserve(offset + len(data))
        slot.write_at(offset, data)
        yield offset, len(data)
        # An empty item has a place of its own, too: readers find it by that.
        offset = align(offset + max(len(data), 1))


def seal(
    context: SaveContext,
    agreed: Agreed,
    slot: Slot,
    plan_layout: PlanLayout,
    tail: tuple[tuple[int, int], ...],
) -> Segment:
    """Make a slot this rank's segment.

    Args:
        context: Of the save.
        agreed: What all ranks agreed on.
        slot: Holds the items; not to be written to any more.
        plan_layout: Where the dense tensors lie.
        tail: (offset, bytes) of each item behind them.
    """
    memory, slots, layout = context.session.memory, context.session.slots, plan_layout.layout
    file = names.segment_file(context.rank, agreed.save_id)
    nbytes = tail[-1][0] + tail[-1][1] if tail else layout.nbytes

    def add(directory: str) -> None:
        slots.seal(slot, os.path.join(directory, file))

    memory.add_segment(context.name, add)
    return Segment(
        rank=context.rank,
        node=memory.node,
        file=file,
        nbytes=nbytes,
        layout=plan_layout.described.key,
        tail=tail,
    )


class Results(Sequence[WriteResult]):
    """The write results of all items, for DCP; each is made when it is looked at.

    Args:
        staged: This rank's sealed segment.
    """

    def __init__(self, staged: Staged) -> None:
        self._file = staged.segment.file
        self._indexes = list(map(staged.items.index, staged.order))
        self._offsets, self._lengths = staged.offsets, staged.lengths

    def __len__(self) -> int:
        return len(self._indexes)

    @overload
    def __getitem__(self, number: int) -> WriteResult: ...

    @overload
    def __getitem__(self, number: slice) -> list[WriteResult]: ...

    def __getitem__(self, number: int | slice) -> WriteResult | list[WriteResult]:
        if isinstance(number, slice):
            return [self[one] for one in range(*number.indices(len(self)))]
        offset, length = self._offsets[number], self._lengths[number]
        return WriteResult(self._indexes[number], length, _StorageInfo(self._file, offset, length))
