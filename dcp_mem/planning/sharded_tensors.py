"""Sharded tensors: which chunks of each a rank holds.

DTensors are described by thousands at once, as most of them share mesh and placements.
ShardedTensors, which FSDP1 and older code use, may have several shards on a rank, or none.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from dcp_mem.common.sharded_tensor import ShardedTensor
from dcp_mem.format.torch_names import properties
from dcp_mem.planning.plain_tensors import PLAIN, facts_of
from dcp_mem.planning.plan_columns import ItemGroup, ItemKind, Look, NotDescribable, numbered
from dcp_mem.planning.shard_marks import are_marked

_SPEC, _LOCAL = operator.attrgetter("_spec"), operator.attrgetter("_local_tensor")
_MESH, _PLACEMENTS = operator.attrgetter("mesh"), operator.attrgetter("placements")
_DIMENSION, _REQUIRES_GRAD = operator.attrgetter("dim"), operator.attrgetter("requires_grad")
Extent = tuple[int, ...]


def dtensors_group(numbers: Sequence[int], tensors: Sequence[DTensor]) -> ItemGroup:
    """Return the chunks of those DTensors whose mesh this rank is in; chunks may be empty.

    Raises NotDescribable, ValueError.
    """
    specs = list(map(_SPEC, tensors))
    ways = _ways(specs) if specs else []
    spec_of = dict(zip(ways, specs, strict=True))
    elsewhere = {way for way, spec in spec_of.items() if spec.mesh.get_coordinate() is None}
    if elsewhere:
        here = [number for number, way in enumerate(ways) if way not in elsewhere]
        return dtensors_group([numbers[one] for one in here], [tensors[one] for one in here])
    if any(placement.is_partial() for spec in spec_of.values() for placement in spec.placements):
        raise ValueError(
            "a DTensor with partial placements has no value that could be saved: "
            "redistribute it first"
        )
    local = list(map(_LOCAL, tensors))
    for kind in set(map(type, local)) - PLAIN:
        raise NotDescribable(f"a DTensor of {kind.__name__}")
    # As their to_local() would have it, without making an autograd node for each.
    needs_grad = map(_REQUIRES_GRAD, tensors if torch.is_grad_enabled() else local)
    sizes = map(torch.Tensor.size, tensors)
    look, facts = numbered(zip(facts_of(local, needs_grad), sizes, ways, strict=True))
    looks = list[Look]()
    for (*known, held), size, way in facts:
        extent, offset = local_chunk(size, spec_of[way].mesh, spec_of[way].placements)
        if extent != held:
            raise NotDescribable("a DTensor whose local tensor isn't what its placements say")
        looks.append((properties(*known), size, offset, extent))
    return ItemGroup(name=numbers, kind=ItemKind.SHARD, look=look, looks=looks)


def are_alike(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Return whether two DTensors' placements are the same.

    Types are compared, too: in torch 2.6 a strided shard equals a plain one.
    """
    return one is other or (one == other and list(map(type, one)) == list(map(type, other)))


def _ways(specs: Sequence[Any]) -> list[int]:
    """Return a number for each one's mesh and placements."""
    meshes, placements = map(id, map(_MESH, specs)), list(map(_PLACEMENTS, specs))
    columns = list(zip(*placements, strict=True)) if len(set(map(len, placements))) == 1 else []
    kinds = [set(map(type, column)) for column in columns]
    if columns and all(kind in ({Shard}, {Replicate}) for kind in kinds):
        # As in most models. Torch's own hash of each placement takes five times as long.
        cuts = [
            map(_DIMENSION, column)
            for kind, column in zip(kinds, columns, strict=True)
            if kind == {Shard}
        ]
        return numbered(zip(meshes, *cuts, strict=True))[0]
    alike = [(one, *map(type, one)) for one in placements]
    return numbered(zip(meshes, alike, strict=True))[0]


def local_chunk(
    shape: torch.Size, mesh: DeviceMesh, placements: tuple[Any, ...]
) -> tuple[Extent, Extent]:
    """Return extent and offset of this rank's chunk."""
    coordinate = mesh.get_coordinate()
    if coordinate is None or not _are_plain(placements, len(shape)):
        # Its tensors and loops take milliseconds for what takes microseconds below.
        extent, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
        return tuple(map(int, extent)), tuple(map(int, offset))
    extents, offsets = list(map(int, shape)), [0] * len(shape)
    for placement, count, number in zip(placements, mesh.shape, coordinate, strict=True):
        if type(placement) is Shard:
            size = extents[placement.dim]
            largest = -(-size // count)
            offsets[placement.dim] = start = min(number * largest, size)
            extents[placement.dim] = min(largest, size - start)
    return tuple(extents), tuple(offsets)


def _are_plain(placements: Sequence[Any], dimensions: int) -> bool:
    """Return whether each dimension is cut at most once, and as `torch.chunk` cuts it."""
    if {type(one) for one in placements} - {Shard, Replicate}:
        return False
    cut = [one.dim for one in placements if type(one) is Shard]
    return len(set(cut)) == len(cut) and all(0 <= one < dimensions for one in cut)


# -- ShardedTensors -------------------------------------------------------------------------------


def sharded_tensor_group(number: int, tensor: ShardedTensor) -> ItemGroup:
    """Return the local shards of a ShardedTensor.

    Raises NotDescribable.
    """
    whole, shards = tensor.metadata(), tensor.local_shards()
    known = whole.tensor_properties
    if known.memory_format != torch.contiguous_format:
        raise NotDescribable(f"a ShardedTensor in {known.memory_format}")
    described = properties(known.dtype, known.layout, known.requires_grad, known.pin_memory)
    for shard in shards:
        local, extent = shard.tensor, tuple(shard.metadata.shard_sizes)
        if type(local) not in PLAIN or are_marked((local,)):
            # Torch flattens a ShardedTensor of ShardedTensors.
            raise NotDescribable(f"a ShardedTensor of {type(local).__name__}")
        looks = local.dtype, local.layout, tuple(local.shape)
        if looks != (known.dtype, known.layout, extent):
            raise NotDescribable("a ShardedTensor whose local shard isn't what its metadata says")
    boxes = [(one.metadata.shard_offsets, one.metadata.shard_sizes) for one in shards]
    return ItemGroup(
        name=[number] * len(shards),
        kind=ItemKind.SHARD,
        look=range(len(shards)),
        looks=[(described, whole.size, *box) for box in boxes],
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
