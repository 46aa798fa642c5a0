"""States that are copied ahead of their save: `dcp.async_save`, with the writer as its stager.

`stage` copies a state dict straight into a slot, in the caller's thread: the only copy. The save
follows in another thread. It agrees with the other ranks, seals the slot and completes the
checkpoint. What belongs to the save travels in the state dict that DCP hands on.

A state dict of another structure than the last ones isn't part of a plan of all ranks yet, and the
ranks plan only in the save. Such a state is copied into private memory, as torch's stager does, and
from there into its slot. That is also what is done where no slot is free. What another process
saves is a plain state dict, a copy in memory that processes share.
"""

from __future__ import annotations

import copy
import os
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dcp_mem.comm.agreement import Attempted
from dcp_mem.common.sharded_tensor import Shard, ShardedTensor
from dcp_mem.common.values import SaveInfo
from dcp_mem.errors import ConfigError, DcpMemError
from dcp_mem.planning.flatten import leaves_of
from dcp_mem.planning.plain_tensors import NO_MEMORY, PLAIN, lacks_memory
from dcp_mem.planning.shard_marks import FIELDS, METHODS, fields_of, set_fields
from dcp_mem.planning.wrapper_tensors import is_wrapper, rebuilt, refuse_other_class
from dcp_mem.policy.slots import growth
from dcp_mem.runtime.last_saves import GroupKey
from dcp_mem.runtime.session import Session
from dcp_mem.runtime.turns import Turn
from dcp_mem.saving.overlap import Overlap, StagingCopies
from dcp_mem.saving.own_plans import OwnPlans, own_plans_of
from dcp_mem.saving.stage import fill
from dcp_mem.saving.values import Filled, NoCommonPlan, Planned, SaveContext

_KEY = "staged by dcp_mem"


class StagedState:
    """A state dict as it was when `stage` was called; it travels to the save as a value."""

    def __init__(
        self,
        info: SaveInfo,
        content: Attempted[AheadCopy | dict[str, Any]],
        turn: Turn | None = None,
    ) -> None:
        """Take what the save will need.

        `content`: the copy; or why there is none, which the save raises on all ranks. `turn`: the
        save's turn among those of this process.
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

    def end_with(self, saving: Future[Any]) -> None:
        """Give up the copy and the turn when the save is over, should it not have taken them.

        `dcp.save` may fail before it calls the writer, and its error keep this state.
        """
        if self.turn is not None:
            self.turn.hand_over()
        saving.add_done_callback(partial(_give_up_state, weakref.ref(self)))

    def as_state_dict(self) -> dict[str, Any]:
        """Return a state dict that stands for this one, for DCP to hand on."""
        return {_KEY: self}


def stands_for_another(value: object) -> bool:
    """Return whether a value is a state dict that stands for a staged one, or for an error."""
    return type(value) is dict and len(value) == 1 and _KEY in value


def staged_in(state_dict: Mapping[str, Any]) -> StagedState | None:
    """Return the staged state that a state dict stands for; None where it doesn't."""
    found = state_dict[_KEY] if stands_for_another(state_dict) else None
    return found if isinstance(found, StagedState) else None


def refused_state(error: Exception) -> dict[str, Any]:
    """Return a state dict that stands for one that this rank couldn't make.

    The writer stages the error in its place, and the save raises it on all ranks.
    """
    return {_KEY: error}


def not_refused(state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a state dict; raise the error that it stands for, if it does."""
    if stands_for_another(state_dict) and isinstance(state_dict[_KEY], Exception):
        raise state_dict[_KEY]
    return state_dict


def copy_ahead(context: SaveContext, planned: Planned, overlap: Overlap | None) -> AheadCopy | None:
    """Copy a state into a slot, by the plan that all ranks have saved such a state with.

    `planned`: what to copy, as `OwnPlans.recognised` found it in the state dict. `overlap`: which
    copies needn't be made at once; None for none of them. Returns None where there is no slot, or
    what is planned can't be copied ahead.
    """
    session = context.session
    if not _has_room(context, planned):
        return None
    session.prefaulting.stop()
    copies = StagingCopies(overlap, planned, session.last_saves.warn_once, are_left=True)
    filled = fill(session, planned, copies)
    return AheadCopy(context, planned, filled, copies)


def _has_room(context: SaveContext, planned: Planned) -> bool:
    """Tell whether slots are free, or may be made, whatever the other ranks agree to later.

    Within a memory limit none are made: other ranks might make theirs at the same time.
    """
    session, limit = context.session, context.settings.memory_limit
    free = session.slots.free()
    if limit is not None:
        free = [one for one in free if one.is_held]
    grows = growth(planned.claims, free)
    return not grows or (limit is None and session.memory.free_bytes() > grows)


class AheadCopy:
    """A state dict that lies in a slot, by a plan of all ranks, for one save.

    A copy that no save takes gives its slot back.
    """

    def __init__(
        self, context: SaveContext, planned: Planned, filled: Filled, copies: StagingCopies
    ) -> None:
        """Take a slot that has been filled, but for copies that are made later.

        `context`: of the save to come, as far as it was known.
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
        )
        self._filled: Filled = replace(filled, items=items)
        self._copies = copies
        self._unused = weakref.finalize(
            self, _give_back, os.getpid(), context.session, filled, copies
        )

    def plan(self, context: SaveContext) -> Planned:
        """Return the part of the plan that the slot was filled by."""
        if context.group != self._group:
            raise ConfigError("a state was copied for other ranks than those that save it")
        # Not kept here: it holds on to this copy, which would go by the cycle collector alone.
        return replace(self._planned, filled=partial(self._take, context.name))

    def find_common_plan(self, context: SaveContext, reason: NoCommonPlan) -> bool:
        """Refuse: the bytes lie as the old plan has them, and the state dict has gone on.

        Raises DcpMemError.
        """
        self._plans.forget(self._planned.plan_id)
        raise reason.refusal(context.name) from None

    def _take(self, name: str) -> Filled:
        """Hand over the slot, once all of it has been copied."""
        try:
            self._copies.finish()
        except BaseException:
            self.give_back()
            raise
        if self._unused.detach() is None:
            raise DcpMemError(f"{name} was copied, and given up by a later save")
        return self._filled

    def give_back(self) -> None:
        """Give the slot back, unless it has been sealed: its save has failed."""
        self._unused()


def _give_back(process: int, session: Session, filled: Filled, copies: StagingCopies) -> None:
    """Give a copy's slot back."""
    if process != os.getpid():  # a forked child, which has no part in the save
        return

    def abandon() -> None:
        session.slots.abandon(filled.slot)
        if filled.frozen is not None:
            filled.frozen.give_back()

    copies.cancel(abandon)


def _give_up_state(state: weakref.ref[StagedState], _: Future[Any]) -> None:
    if (kept := state()) is not None:
        kept.give_back()


# -- private copies -------------------------------------------------------------------------------


def copied(state: Mapping[str, Any], *, is_shared: bool = False) -> dict[str, Any]:
    """Return a copy of a state dict in private CPU memory, or in memory that processes share.

    Raises DcpMemError.
    """
    _refuse_what_copies_lose(state)
    if is_shared and FIELDS:
        _refuse_fields(state)
    copier = _Copier(is_shared)
    return {key: copier.copied(value) for key, value in state.items()}


def _refuse_what_copies_lose(state: Mapping[str, Any]) -> None:
    leaves = leaves_of(state)
    for name, leaf in zip(leaves.names, leaves.values, strict=True):
        for part in (leaf, leaf._local_tensor) if type(leaf) is DTensor else (leaf,):
            if type(part) in PLAIN and part.layout is torch.strided and lacks_memory(part):
                raise DcpMemError(f"{name}: {NO_MEMORY}: save it while it has")
            attributes = getattr(part, "__dict__", {})
            method = next((method for method in METHODS if method in attributes), "")
            if method:
                raise DcpMemError(
                    f"{name} has a {method} of its own, which an asynchronous save can't copy: "
                    f"define it in a class, or save in the call"
                )


class _Copier:
    """Copies values, whatever their tensors' kind; what is the same memory twice is copied once."""

    def __init__(self, is_shared: bool) -> None:
        self._is_shared = is_shared
        self._known: dict[tuple[Any, ...], torch.Tensor] = {}

    def copied(self, value: Any) -> Any:
        if isinstance(value, dict):
            result = copy.copy(value)  # of its own kind: the next state is recognised by that
            result.update({key: self.copied(inner) for key, inner in value.items()})
            return result
        if type(value) in (list, tuple):
            return type(value)(map(self.copied, value))
        if isinstance(value, ShardedTensor):
            return _with_shards(value, self.copied)
        if type(value) is DTensor:
            local = self.copied(value._local_tensor)
            return DTensor(local, value._spec, requires_grad=value.requires_grad)
        if isinstance(value, torch.Tensor) and is_wrapper(value):
            return set_fields(rebuilt(value, self.copied), fields_of(value))
        if isinstance(value, torch.Tensor):
            return _of_its_kind(self._copied_tensor(value), value)
        made = copy.deepcopy(value)
        if self._is_shared:  # sending it would fail on this rank alone, and the others would wait
            ForkingPickler.dumps(made)
        return made

    def _copied_tensor(self, value: torch.Tensor) -> torch.Tensor:
        is_plain = type(value) in PLAIN and value.layout is torch.strided and value.numel() > 0
        where = (value.device, value.data_ptr(), value.shape, value.stride()) if is_plain else None
        what = (where, value.dtype, value.is_conj(), value.is_neg())
        if where is not None and what in self._known:
            return self._known[what].detach()
        tensor = value.detach().to("cpu", copy=True)
        if not isinstance(value, torch.nn.Parameter):
            refuse_other_class(tensor, value, "is copied for an asynchronous save")
        if self._is_shared and tensor.layout is torch.strided:
            tensor.share_memory_()
        self._known[what] = tensor.detach()
        return tensor


def _refuse_fields(state: Mapping[str, Any]) -> None:
    """Raise for shards that would arrive in another process without what makes them shards."""
    leaves = leaves_of(state)
    for name, leaf in zip(leaves.names, leaves.values, strict=True):
        if fields_of(leaf):
            raise DcpMemError(
                f"{name} is a CheckpointableTensor, which torch sends to another process without "
                f"what makes it one: save in a thread"
            )


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


def _of_its_kind(copied: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy as a parameter, as a shard, or requiring gradients, as the tensor is or does.

    The ranks plan by the copy, and recognise the next state by its tensors' kinds.
    """
    if type(tensor) is torch.nn.Parameter:
        made: torch.Tensor = torch.nn.Parameter(copied, requires_grad=tensor.requires_grad)
    else:
        made = copied.requires_grad_(tensor.requires_grad)
    return set_fields(made, fields_of(tensor))
