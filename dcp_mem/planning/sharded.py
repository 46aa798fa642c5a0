"""ShardedTensors, by which FSDP's first version and older code shard: what a rank holds of one, and what is compared of it.

Unlike a DTensor, one has any number of shards on a rank, or none.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor

from dcp_mem.format.torch_names import properties
from dcp_mem.planning.columns import Kind, NotDescribable, Row
from dcp_mem.planning.plain import PLAIN


def rows_of(name: int, tensor: ShardedTensor) -> Iterator[Row]:
    """A row for each local shard. Raises NotDescribable where one isn't a tensor of a plain type, as the metadata says."""
    whole = tensor.metadata()
    known = whole.tensor_properties
    if known.memory_format != torch.contiguous_format:
        raise NotDescribable(f"a ShardedTensor in {known.memory_format}")
    described = properties(known.dtype, known.layout, known.requires_grad, known.pin_memory)
    for shard in tensor.local_shards():
        local, offset, extent = shard.tensor, shard.metadata.shard_offsets, shard.metadata.shard_sizes
        if type(local) not in PLAIN:
            raise NotDescribable(f"a ShardedTensor of {type(local).__name__}")  # torch flattens those of ShardedTensors
        if (local.dtype, local.layout, tuple(local.shape)) != (known.dtype, known.layout, tuple(extent)):
            raise NotDescribable("a ShardedTensor whose local shard isn't what its metadata says")
        yield Row(name, Kind.SHARD, described, (tuple(whole.size), tuple(offset), tuple(extent)))


def parts_of(tensor: ShardedTensor) -> list[torch.Tensor]:
    """The local shards' tensors, in the order of the rows."""
    return [shard.tensor for shard in tensor.local_shards()]


def sharding_of(tensor: ShardedTensor) -> tuple[object, ...]:
    """What equals that of another with the same rows, as long as the local shards' dtypes and shapes are the same.

    Other ranks' shards don't count: those ranks have rows of their own.
    """
    whole = tensor.metadata()
    known = whole.tensor_properties
    return (
        tuple(whole.size),
        (known.dtype, known.layout, known.requires_grad, known.memory_format, known.pin_memory),
        [
            (tuple(shard.metadata.shard_offsets), tuple(shard.metadata.shard_sizes), type(shard.tensor))
            for shard in tensor.local_shards()
        ],
    )
