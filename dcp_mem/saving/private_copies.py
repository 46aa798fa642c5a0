"""Private copies of state dicts, in CPU memory.

For states that can't be copied straight into a slot: those whose structure is new, and those that
find no slot.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dcp_mem.common.sharded_tensor import Shard, ShardedTensor
from dcp_mem.errors import DcpMemError
from dcp_mem.planning.flatten import leaves_of
from dcp_mem.planning.plain_tensors import NO_MEMORY, PLAIN, lacks_memory
from dcp_mem.planning.shard_marks import FIELDS, METHODS, fields_of, set_fields
from dcp_mem.planning.wrapper_tensors import is_wrapper, rebuilt, refuse_other_class


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
