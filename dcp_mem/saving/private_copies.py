"""Private copies of state dicts, made as torch's stager makes them.

For states that can't be copied straight into a slot: those whose structure is new, and those that
find no slot.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dcp_mem.common.sharded_tensor import Shard, ShardedTensor
from dcp_mem.errors import DcpMemError
from dcp_mem.planning.flatten import leaves_of
from dcp_mem.planning.plain_tensors import NO_MEMORY, PLAIN, lacks_memory
from dcp_mem.planning.shard_marks import FIELDS, METHODS, fields_of, set_fields
from dcp_mem.planning.wrapper_tensors import is_wrapper, rebuilt, refuse_other_class

try:
    from torch.distributed.checkpoint._state_dict_stager import StateDictStager
except ImportError:  # torch 2.6
    StateDictStager = None  # type: ignore[assignment,misc]


def copied(state: Mapping[str, Any], *, is_shared: bool = False) -> dict[str, Any]:
    """Return a copy of a state dict in private CPU memory, made as torch's stager makes it.

    Raises DcpMemError.
    """
    _refuse_what_copies_lose(state)
    plain = dict(state)
    if StateDictStager is not None:
        stager = _Stager(pin_memory=False, share_memory=is_shared)
        result: dict[str, Any] = stager.stage(plain)
        return result
    return {key: _copied_value(value, is_shared) for key, value in plain.items()}


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
        copied = rebuilt(value, lambda part: _copied_value(part, is_shared))
        return set_fields(copied, fields_of(value))
    if isinstance(value, torch.Tensor):
        tensor = value.detach().to("cpu", copy=True)
        if not isinstance(value, torch.nn.Parameter):
            refuse_other_class(tensor, value, "is copied for an asynchronous save")
        return _of_its_kind(tensor.share_memory_() if is_shared else tensor, value)
    return copy.deepcopy(value)


def fields_in(state: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return, of each leaf, what makes a shard of it; nothing if no leaf is such a shard.

    Processes send each other tensors without attributes, so these go beside them.
    """
    fields = list(map(fields_of, leaves_of(state).values)) if FIELDS else []
    return fields if any(fields) else ()


def refuse_fields(state: Mapping[str, Any]) -> None:
    """Raise for shards that torch would send to another process, where they would be none."""
    for name, fields in zip(leaves_of(state).names, fields_in(state), strict=False):
        if fields:
            raise DcpMemError(
                f"{name} is a CheckpointableTensor, which torch sends to another process without "
                f"what makes it one: save in a thread, or with collectives"
            )


def set_fields_in(state: Mapping[str, Any], fields: Sequence[Mapping[str, Any]]) -> None:
    """Give the leaves of a state dict these fields again, as `fields_in` has found them."""
    if fields:
        for leaf, own in zip(leaves_of(state).values, fields, strict=True):
            set_fields(leaf, own)


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
            # torch takes the address of a part behind another one for that of a real storage. That
            # is also why it can't send one to another process.
            part = x._local_tensor
            if self.share_memory and part.storage_offset():
                local = part.detach().cpu().clone().share_memory_()
            else:
                local = self.deepcopy_with_tensor_offload(part, memo)
            copied = DTensor(local, x._spec, requires_grad=x.requires_grad)
        elif is_wrapper(x):
            # torch would ask the class for an empty tensor, which may be of another class.
            copied = rebuilt(x, lambda part: self.deepcopy_with_tensor_offload(part, memo))
            set_fields(copied, fields_of(x))
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
    """Return a copy as a parameter, as a shard, or requiring gradients, as the tensor is or does.

    The ranks plan by the copy, and recognise the next state by its tensors' kinds.
    """
    if type(tensor) is torch.nn.Parameter:
        made: torch.Tensor = torch.nn.Parameter(copied, requires_grad=tensor.requires_grad)
    else:
        made = copied.requires_grad_(tensor.requires_grad)
    return set_fields(made, fields_of(tensor))
