"""States that are copied ahead of their save: `dcp.async_save`, with the writer as its stager.

Saves in the call copy ahead of their agreement, too: see `eager.py`.

`stage` copies a state dict straight into a slot, in the caller's thread: the only copy. The save
follows in another thread. It agrees with the other ranks, seals the slot and completes the
checkpoint. What belongs to the save travels in the state dict that DCP hands on.

A state dict of another structure than the last ones isn't part of a plan of all ranks yet, and the
ranks plan only in the save. Such a state is copied into private memory, as torch's stager does, and
from there into its slot. That is also what is done where no slot is free, and where another process
saves.
"""

from __future__ import annotations

import copy
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dcp_mem.comm.agreement import Attempted, known_to_all
from dcp_mem.common.log import log
from dcp_mem.common.sharded_tensor import Shard, ShardedTensor
from dcp_mem.common.values import SaveInfo
from dcp_mem.errors import ConfigError, DcpMemError
from dcp_mem.memory.copying import Columns, Move, moves_of
from dcp_mem.memory.device_copies import DeviceCopies
from dcp_mem.planning.wrapper_tensors import is_wrapper, rebuilt, refuse_other_class
from dcp_mem.policy.slots import growth
from dcp_mem.runtime.last_saves import GroupKey, SavedPlan
from dcp_mem.runtime.session import Session
from dcp_mem.runtime.turns import Turn
from dcp_mem.saving.frozen import give_back
from dcp_mem.saving.overlap import Overlap, OverlappedCopies
from dcp_mem.saving.own_plan import (
    CatalogOfOwnPlan,
    OwnPlans,
    catalog_source_of,
    own_plans_of,
)
from dcp_mem.saving.plan import claims_of
from dcp_mem.saving.stage import Filled, Later, fill, seal_filled
from dcp_mem.saving.values import Agreed, Planned, SaveContext, Staged

try:
    from torch.distributed.checkpoint._state_dict_stager import StateDictStager
except ImportError:  # torch 2.6
    StateDictStager = None  # type: ignore[assignment,misc]

_KEY = "staged by dcp_mem"
_REFUSED = "refused by dcp_mem"


class StagedState:
    """A state dict as it was when `stage` was called; it travels to the save as a value.

    It may be pickled, for a save in another process, where it isn't in a slot.
    """

    def __init__(
        self,
        info: SaveInfo,
        content: Attempted[AheadCopy | dict[str, Any]],
        turn: Turn | None = None,
    ) -> None:
        """Take what the save will need.

        Args:
            info: What the training loop said of the save.
            content: The copy; or why there is none, which the save raises on all ranks.
            turn: The save's turn among those of this process; None where another process saves.
        """
        self.info, self.turn = info, turn
        self._content = content

    def take(self) -> Attempted[AheadCopy | dict[str, Any]]:
        """Return the copy, and keep no hold on it.

        Whoever keeps a failed save's future or error keeps this state, and would keep the slot.
        """
        content, self._content = self._content, Attempted(({},))
        return content

    def give_back(self) -> None:
        """Give up the copy, and the save's turn: no save takes it."""
        content = self.take()
        if content.error is None and isinstance(content.value, AheadCopy):
            content.value.give_back()
        if self.turn is not None:
            self.turn.end()

    def as_state_dict(self) -> dict[str, Any]:
        """Return a state dict that stands for this one, for DCP to hand on."""
        return {_KEY: self}


def staged_in(state_dict: Mapping[str, Any]) -> StagedState | None:
    """Return the staged state that a state dict stands for; None where it is a plain one.

    Args:
        state_dict: As DCP hands it on.
    """
    staged = state_dict.get(_KEY) if len(state_dict) == 1 else None
    return staged if isinstance(staged, StagedState) else None


def stands_for_staged(value: object) -> bool:
    """Return whether a value is a state dict that stands for a staged one.

    Args:
        value: Anything.
    """
    return type(value) is dict and staged_in(value) is not None


def refused_state(error: Exception) -> dict[str, Any]:
    """Return a state dict that stands for one that this rank couldn't make.

    The writer stages the error in its place, and the save raises it on all ranks.

    Args:
        error: Why there is none.
    """
    return {_REFUSED: error}


def raise_if_refused(state_dict: Mapping[str, Any]) -> None:
    """Raise the error that a state dict stands for; return for a plain one.

    Args:
        state_dict: As given to `stage`.
    """
    error = state_dict.get(_REFUSED) if len(state_dict) == 1 else None
    if isinstance(error, Exception):
        raise error


def copy_ahead(
    context: SaveContext,
    state: Mapping[str, Any],
    overlap: Overlap | None,
    *,
    to_lowest_rank: bool,
) -> AheadCopy | None:
    """Copy a state dict into a slot, by the plan that all ranks have saved such a state with.

    Args:
        context: Of the save to come.
        state: The state dict.
        overlap: Which copies needn't be made at once; None for none of them.
        to_lowest_rank: As `OwnPlans.plan_together` was told.

    Returns:
        None where there is no such plan, or no slot.
    """
    session = context.session
    plans = own_plans_of(session)
    planned = plans.recognised(context, state, to_lowest_rank=to_lowest_rank)
    if planned is None or not _has_room(context, planned):
        return None
    session.prefaulting.stop()
    later: Later | None = None
    if overlap is None:
        later = _HeldDevices() if _has_devices(planned) else None
    else:
        later = OverlappedCopies(overlap, planned, partial(_warn_once, session))
        if planned.sources is None and _has_cpu_tensors(planned):
            _warn_once(
                session,
                "overlap= has no effect on tensors in CPU memory: not all of what is saved is "
                "dense, contiguous memory",
            )
    return AheadCopy(context, planned, fill(session, planned, later), later)


class _HeldDevices:
    """Copies what the host has at once, and has devices copy the rest: a `Later`.

    The caller goes on; what it launches on a device from now on is done after the copies.
    """

    def __init__(self) -> None:
        self._copies = DeviceCopies()

    def take(self, destination: Columns, source: Columns, nbytes: Columns) -> Sequence[Move]:
        """Return all copies."""
        return moves_of(destination, source, nbytes)

    def take_from_devices(self, targets: Columns, sources: Sequence[torch.Tensor]) -> None:
        """Have the devices make all copies before anything else."""
        self._copies.begin(targets, sources)
        self._copies.hold_devices()

    def begin(self) -> None:
        """Do nothing: the copies have begun."""

    def finish(self) -> None:
        """Return once all copies have been made."""
        self._copies.finish()

    def cancel(self) -> None:
        """Return once no copy is being made."""
        self._copies.finish()


def copied(state: Mapping[str, Any], *, is_shared: bool = False) -> dict[str, Any]:
    """Return a copy of a state dict in private CPU memory, made as torch's stager makes it.

    Args:
        state: The state dict.
        is_shared: Have tensors lie in memory that other processes can map.
    """
    plain = dict(state)
    if StateDictStager is not None:
        stager = _Stager(pin_memory=False, share_memory=is_shared)
        result: dict[str, Any] = stager.stage(plain)
        return result
    return {key: _copied_value(value, is_shared) for key, value in plain.items()}


def _copied_value(value: Any, is_shared: bool) -> Any:
    """Return a copy of a value of a state dict, whatever its tensors' kind.

    What torch 2.6 has for this leaves a DTensor, or a ShardedTensor, as it is: it would change with
    the training.
    """
    if isinstance(value, dict):
        result = copy.copy(value)  # of its own kind: the next state is recognised by that
        result.update({key: _copied_value(inner, is_shared) for key, inner in value.items()})
        return result
    if type(value) in (list, tuple):
        return type(value)(_copied_value(inner, is_shared) for inner in value)
    if isinstance(value, ShardedTensor):
        return _with_shards(value, lambda tensor: _copied_value(tensor, is_shared))
    if type(value) is DTensor:
        local = _copied_value(value._local_tensor, is_shared)
        return DTensor(local, value._spec, requires_grad=value.requires_grad)
    if isinstance(value, torch.Tensor) and is_wrapper(value):
        return rebuilt(value, lambda part: _copied_value(part, is_shared))
    if isinstance(value, torch.Tensor):
        tensor = value.detach().to("cpu", copy=True)
        if not isinstance(value, torch.nn.Parameter):
            refuse_other_class(tensor, value, "is copied for an asynchronous save")
        return _of_its_kind(tensor.share_memory_() if is_shared else tensor, value)
    return copy.deepcopy(value)


def _with_shards(
    sharded: ShardedTensor, made_of: Callable[[torch.Tensor], torch.Tensor]
) -> ShardedTensor:
    """Return a ShardedTensor like this one, whose shards are made of the tensors of its shards."""
    whole = sharded.metadata()
    known = whole.tensor_properties
    made: ShardedTensor = torch.Tensor._make_wrapper_subclass(
        type(sharded),
        whole.size,
        dtype=known.dtype,
        layout=known.layout,
        requires_grad=known.requires_grad,
    )
    made.__dict__.update(sharded.__dict__)
    made.__dict__.pop("_sharded_tensor_id", None)  # it would be given back twice
    made._local_shards = [
        _shard_of(made_of(shard.tensor), shard.metadata) for shard in sharded.local_shards()
    ]
    return made


def _shard_of(tensor: torch.Tensor, like: Any) -> Shard:
    """Return a tensor as a shard with this metadata, but for the device, which is the tensor's."""
    placement = like.placement
    if placement is not None and placement.device() != tensor.device:
        worker = placement.worker_name() or f"rank:{placement.rank()}"
        like = type(like)(
            shard_offsets=like.shard_offsets,
            shard_sizes=like.shard_sizes,
            placement=f"{worker}/{tensor.device}",
        )
    return Shard(tensor, like)


class _Stager(StateDictStager or object):  # type: ignore[misc]
    """torch's stager, for tensors that it copies wrongly or not at all as well (torch 2.13)."""

    def _offload_tensor(self, x: Any, memo: dict[int, Any], non_blocking: bool = False) -> Any:
        if isinstance(x, ShardedTensor):
            # torch asks it for what a ShardedTensor doesn't know.
            copied: torch.Tensor = _with_shards(
                x, lambda part: self.deepcopy_with_tensor_offload(part, memo)
            )
        elif type(x) is DTensor:
            # torch takes the address of a part behind another one for that of a real storage.
            local = self.deepcopy_with_tensor_offload(x._local_tensor, memo)
            copied = DTensor(local, x._spec, requires_grad=x.requires_grad)
        elif is_wrapper(x):
            # torch would ask the class for an empty tensor, which may be of another class.
            copied = rebuilt(x, lambda part: self.deepcopy_with_tensor_offload(part, memo))
        elif x.layout is not torch.strided or x.is_quantized or x.is_conj() or x.is_neg():
            # torch would fail, or lose what isn't in the storage.
            copied = _of_its_kind(x.detach().clone().cpu(), x)
        else:
            copied = _of_its_kind(super()._offload_tensor(x, memo, non_blocking=non_blocking), x)
            if not isinstance(x, torch.nn.Parameter):
                refuse_other_class(copied, x, "is copied for an asynchronous save")
        memo[id(x)] = copied
        return copied


def _of_its_kind(copied: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy as a parameter, or requiring gradients, where the tensor does.

    The ranks plan by the copy, and recognise the next state by its tensors' kinds.
    """
    if type(tensor) is torch.nn.Parameter:
        return torch.nn.Parameter(copied, requires_grad=tensor.requires_grad)
    return copied.requires_grad_(tensor.requires_grad)


def _warn_once(session: Session, text: str) -> None:
    if session.last_saves.is_first_warning(text):
        log.warning("%s", text)


def _has_devices(planned: Planned) -> bool:
    """Return whether a plan may have tensors on devices."""
    return planned.sources is None or planned.sources.devices is not None


def _has_cpu_tensors(planned: Planned) -> bool:
    """Return whether a plan has tensors in CPU memory, other than single numbers."""
    tensors = planned.items.tensors(planned.tensors)  # type: ignore[attr-defined]
    return any(one.is_cpu and one.dim() for one in tensors)


def _has_room(context: SaveContext, planned: Planned) -> bool:
    """Tell whether slots are free, or may be made, whatever the other ranks agree to later.

    Within a memory limit none are made: other ranks might make theirs at the same time.
    """
    session, limit = context.session, context.settings.memory_limit
    free = session.slots.free()
    if limit is not None:
        free = [one for one in free if one.is_held]
    grows = growth(claims_of(planned), free)
    return not grows or (limit is None and session.memory.free_bytes() > grows)


class AheadCopy:
    """A state dict that lies in a slot, by a plan of all ranks: an ItemProvider for one save.

    A copy that no save takes gives its slot back.
    """

    def __init__(
        self, context: SaveContext, planned: Planned, filled: Filled, later: Later | None
    ) -> None:
        """Take a slot that has been filled, but for copies that are made later.

        Args:
            context: Of the save to come, as far as it was known.
            planned: This rank's part of the plan.
            filled: The slot.
            later: Makes those copies that weren't made at once.
        """
        self._group: GroupKey = context.group
        self._plans: OwnPlans = own_plans_of(context.session)
        items = planned.items.without_values()  # type: ignore[attr-defined]
        end = max((offset + nbytes for offset, nbytes in filled.tail), default=0)
        self._planned = replace(
            planned,
            items=items,
            sources=None,
            nbytes=max(planned.layout.layout.nbytes, end),
            is_written=True,
        )
        self._filled: Filled = replace(filled, items=items)
        self._later = later
        self._unused = weakref.finalize(
            self, _give_back, os.getpid(), context.session, filled, later
        )

    def plan(self, context: SaveContext) -> Planned:
        """Return the part of the plan that the slot was filled by."""
        if context.group != self._group:
            raise ConfigError("a state was copied for other ranks than those that save it")
        return self._planned

    def find_common_plan(self, context: SaveContext, why_not: str, in_common: str) -> bool:
        """Refuse: the bytes lie as the old plan has them, and the state dict has gone on.

        Raises:
            DcpMemError: On all ranks.
        """
        why = (
            f"{context.name} isn't saved: the state dict of some ranks has another structure than "
            f"that of the last save, and that of rank {context.rank} hasn't. The next save plans "
            f"anew"
        )
        self._plans.forget(self._planned.plan_id)
        if not why_not:
            self._plans.refuse_to_plan(context, why)
        raise known_to_all(DcpMemError(why))

    def stage(self, context: SaveContext, agreed: Agreed, planned: Planned) -> Staged:
        """Seal the slot, once all of it has been copied."""
        try:
            if self._later is not None:
                self._later.finish()
        except BaseException:
            self.give_back()
            raise
        if self._unused.detach() is None:
            raise DcpMemError(f"{context.name} was copied, and given up by a later save")
        return seal_filled(context, agreed, self._filled)

    @property
    def is_there(self) -> bool:
        """True until the slot is sealed, or given back."""
        return self._unused.alive

    def give_back(self) -> None:
        """Give the slot back, unless it has been sealed: its save has failed."""
        self._unused()

    def has_changed(self, saved: SavedPlan | None) -> bool:
        """Return False: the plan was there before."""
        return False

    def catalog_source(self, planned: Planned) -> CatalogOfOwnPlan:
        """Return what makes a catalog of the global plan and the ranks' rows."""
        return catalog_source_of(planned)

    def settle(self, saved: SavedPlan) -> None:
        """Do nothing: the plan is kept already."""

    def __reduce__(self) -> Any:
        raise TypeError("what lies in a slot can't be sent to another process")


def _give_back(process: int, session: Session, filled: Filled, later: Later | None) -> None:
    if process != os.getpid():  # a forked child, which has no part in the save
        return
    try:
        if later is not None:
            later.cancel()
    finally:
        session.slots.abandon(filled.slot)
        if filled.frozen is not None:
            give_back(session, filled.frozen)
