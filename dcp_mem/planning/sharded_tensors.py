"""ShardedTensors, which FSDP1 and older code use: which shards of one a rank holds.

Unlike a DTensor, a ShardedTensor may have several shards on a rank, or none.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dcp_mem.common.sharded_tensor import ShardedTensor
from dcp_mem.format.torch_names import properties
from dcp_mem.planning.plain_tensors import PLAIN
from dcp_mem.planning.plan_columns import ItemKind, ItemRow, NotDescribable
from dcp_mem.planning.shard_marks import are_marked


def rows_of(name: int, tensor: ShardedTensor) -> Iterator[ItemRow]:
    """Yield a row for each local shard.

    Raises NotDescribable.
    """
    whole = tensor.metadata()
    known = whole.tensor_properties
    if known.memory_format != torch.contiguous_format:
        raise NotDescribable(f"a ShardedTensor in {known.memory_format}")
    described = properties(known.dtype, known.layout, known.requires_grad, known.pin_memory)
    for shard in tensor.local_shards():
        local, offset, extent = (
            shard.tensor,
            shard.metadata.shard_offsets,
            shard.metadata.shard_sizes,
        )
        if type(local) not in PLAIN or are_marked((local,)):
            # Torch flattens a ShardedTensor of ShardedTensors.
            raise NotDescribable(f"a ShardedTensor of {type(local).__name__}")
        if (local.dtype, local.layout, tuple(local.shape)) != (
            known.dtype,
            known.layout,
            tuple(extent),
        ):
            raise NotDescribable("a ShardedTensor whose local shard isn't what its metadata says")
        yield ItemRow(
            name, ItemKind.SHARD, described, (tuple(whole.size), tuple(offset), tuple(extent))
        )


def local_tensors(tensor: ShardedTensor) -> list[torch.Tensor]:
    """Return the local shards' tensors, in the order of the rows."""
    return [shard.tensor for shard in tensor.local_shards()]


def sharding_of(tensor: ShardedTensor) -> tuple[object, ...]:
    """Return a value that two ShardedTensors with the same rows have in common.

    The local shards' dtypes and shapes are compared elsewhere. Other ranks' shards don't count:
    those ranks have rows of their own.
    """
    whole = tensor.metadata()
    known = whole.tensor_properties
    return (
        tuple(whole.size),
        (known.dtype, known.layout, known.requires_grad, known.memory_format, known.pin_memory),
        [
            (
                tuple(shard.metadata.shard_offsets),
                tuple(shard.metadata.shard_sizes),
                type(shard.tensor),
            )
            for shard in tensor.local_shards()
        ],
    )
