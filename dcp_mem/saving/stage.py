"""Second stage: this rank's items are copied into a slot, which is sealed as a segment."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, overload

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.storage import WriteResult

from dcp_mem import faults
from dcp_mem.errors import DcpMemError
from dcp_mem.format import names
from dcp_mem.format.frames import Spec
from dcp_mem.format.layout import align
from dcp_mem.memory import pinning
from dcp_mem.memory.copying import Move, copy
from dcp_mem.memory.slots import Slot
from dcp_mem.planning.plain import PLAIN
from dcp_mem.saving.plan import TAIL_ROOM
from dcp_mem.saving.values import Attempt, Caller, Items, Planned, Staged
from dcp_mem.session import PlanLayout
from dcp_mem.values import Segment

_BATCH = 256 << 20


class _OtherThanPlanned(Exception):
    """A tensor isn't what the layout expects: the plan changed under a planner that transforms tensors."""


def stage(caller: Caller, attempt: Attempt, planned: Planned) -> Staged:
    """Copy this rank's items into a slot and seal it as a segment. Raises MemoryBudgetExceeded, or what the planner raises."""
    try:
        return _stage_into_slot(caller, attempt, planned)
    except _OtherThanPlanned:
        dense = [_spec(_resolve(planned.plan, item)) for item in planned.tensors]
        learnt = caller.session.learn_layout(planned.layout.expected, dense)
        return _stage_into_slot(caller, attempt, replace(planned, layout=learnt, sources=None))


def _stage_into_slot(caller: Caller, attempt: Attempt, planned: Planned) -> Staged:
    session, layout = caller.session, planned.layout.layout
    slot = session.slots.claim(
        max(planned.nbytes, layout.nbytes) + TAIL_ROOM, planned.layout.frames, mapped=layout.nbytes
    )
    try:
        faults.point("stage.claimed")
        session.put_frames(slot, planned.layout)
        slow = _copy_tensors(slot, planned)
        faults.point("stage.copied")
        tail = tuple(_append(slot, layout.nbytes, _streams(planned.plan, slow, planned.objects)))
        segment = seal(caller, attempt, slot, planned.layout, tail)
        faults.point("stage.sealed")
    except BaseException:
        session.slots.abandon(slot)
        raise
    slow_ids = set(map(id, slow))
    dense = [item for item in planned.tensors if id(item) not in slow_ids] if slow else planned.tensors
    return Staged(
        segment,
        planned.plan,
        [*dense, *slow, *planned.objects],
        [*layout.offsets.tolist(), *(offset for offset, _ in tail)],
        [*layout.lengths.tolist(), *(nbytes for _, nbytes in tail)],
        slot,
        planned.layout,
    )


def _spec(tensor: torch.Tensor) -> Spec | None:
    """Dtype and shape of a tensor with a plain dense payload, None for one that takes the slow road."""
    if not _is_dense(tensor):
        return None
    return tensor.dtype, tensor.shape


def _is_dense(tensor: torch.Tensor) -> bool:
    plain = type(tensor) in PLAIN and tensor.layout is torch.strided and not tensor.is_quantized
    if plain and tensor.device.type == "meta":
        raise DcpMemError("a tensor on the meta device has no data to save: materialise the module first")
    return plain


def _resolve(plan: Items, item: Any) -> torch.Tensor:
    tensor = plan.resolve(item)
    if not isinstance(tensor, torch.Tensor):
        raise DcpMemError(f"the planner resolved {plan.index(item).fqn} to a {type(tensor).__name__}, not to a tensor")
    return tensor.detach()


def _copy_tensors(slot: Slot, planned: Planned) -> list[Any]:
    """Copy every dense tensor to its place; returns the items that have none. Raises _OtherThanPlanned."""
    layout = planned.layout.layout
    addresses, lengths = (slot.address + layout.payload_offsets).tolist(), layout.payload_nbytes.tolist()
    if planned.sources is None:
        places = list(zip(addresses, lengths, strict=True))
        return _copy_one_by_one(slot, places, planned)
    _copy_batch(list(zip(addresses, planned.sources, lengths, strict=True)), _Others(slot))
    return []


def _copy_one_by_one(slot: Slot, places: Sequence[tuple[int, int]], planned: Planned) -> list[Any]:
    """Copy tensors of any kind, as the planner resolves them, in batches: it may make them just for us."""
    others, slow, place = _Others(slot), [], iter(places)
    moves: list[Move] = []
    alive: list[torch.Tensor] = []
    waiting = 0
    for item, spec in zip(planned.tensors, planned.layout.dense, strict=True):
        tensor = _resolve(planned.plan, item)
        if _spec(tensor) != spec:
            raise _OtherThanPlanned
        if spec is None:
            slow.append(item)
            continue
        address, nbytes = next(place)
        if not nbytes:
            continue
        if tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj():
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


def _copy_batch(moves: Sequence[Move], others: _Others) -> None:
    if faults.is_armed("stage.copying"):
        middle = len(moves) // 2
        copy(moves[:middle])
        faults.point("stage.copying")
        moves = moves[middle:]
    others.start()
    copy(moves)
    others.finish()


class _Others:
    """Copies of tensors that aren't plain CPU memory: strided ones, and those on devices, on a side stream each."""

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self._waiting: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._streams: list[torch.cuda.Stream] = []

    def copy(self, tensor: torch.Tensor, address: int, nbytes: int) -> None:
        assert self._slot.mapping is not None
        buffer, start = self._slot.mapping.buffer, self._slot.address
        place = torch.frombuffer(buffer, dtype=torch.uint8, count=nbytes, offset=address - start)
        target = place.view(tensor.dtype).view(tensor.shape)
        if tensor.device.type != "cuda":
            target.copy_(tensor.detach())
            return
        self._waiting.setdefault(tensor.device, []).append((target, tensor.detach()))

    def start(self) -> None:
        """Send off the copies from devices, behind whatever makes their sources: a planner may have launched it just now."""
        for device, copies in self._waiting.items():
            stream = pinning.side_stream(device)
            self._streams.append(stream)
            with torch.cuda.stream(stream):
                for target, source in copies:
                    # Resolved here: torch would conjugate or negate the target while the copy is still under way.
                    target.copy_(source.resolve_conj().resolve_neg(), non_blocking=True)

    def finish(self) -> None:
        for stream in self._streams:
            stream.synchronize()
        self._streams.clear()
        self._waiting.clear()


def _streams(plan: Items, slow: Sequence[Any], objects: Sequence[Any]) -> Iterator[memoryview]:
    """The bytes of what goes to the tail, one item at a time."""
    for item in slow:
        stream = io.BytesIO()
        tensor = _resolve(plan, item).cpu()
        if tensor.layout is torch.strided and tensor.untyped_storage().nbytes() != tensor.nbytes:
            tensor = tensor.clone()  # torch.save would write all of the storage that it is a view of
        torch.save(tensor, stream)
        yield stream.getbuffer()
    for item in objects:
        data = plan.resolve(item)
        if not isinstance(data, io.BytesIO):
            raise DcpMemError(
                f"the planner resolved {plan.index(item).fqn} to a {type(data).__name__}, not to io.BytesIO"
            )
        yield data.getbuffer()


def _append(slot: Slot, offset: int, streams: Iterator[memoryview]) -> Iterator[tuple[int, int]]:
    """Write streams behind each other from `offset` on; yields where each lies."""
    for data in streams:
        slot.reserve(offset + len(data))
        slot.write_at(offset, data)
        yield offset, len(data)
        offset = align(offset + max(len(data), 1))  # an empty item has a place of its own, by which it is found


def seal(
    caller: Caller, attempt: Attempt, slot: Slot, plan_layout: PlanLayout, tail: tuple[tuple[int, int], ...]
) -> Segment:
    """Make a slot this rank's segment. tail: where the items behind the layout lie."""
    memory, layout = caller.session.memory, plan_layout.layout
    file = names.segment_file(caller.rank, attempt.save_id)
    nbytes = tail[-1][0] + tail[-1][1] if tail else layout.nbytes

    def add(directory: str) -> None:
        caller.session.slots.seal(slot, os.path.join(directory, file))

    memory.add_segment(caller.name, add)
    return Segment(caller.rank, memory.node, file, nbytes, plan_layout.described.key, tail)


class Results(Sequence[WriteResult]):
    """What DCP wants to know of every item, made when it is looked at."""

    def __init__(self, staged: Staged) -> None:
        self._file = staged.segment.file
        self._indexes = list(map(staged.plan.index, staged.items))
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
