"""Random state dicts of sharded tensors: drawn alike on all ranks; each builds its own part.

parts = draw(Random(seed), world)                   # the same everywhere
state = build(parts, rank, meshes, seed)            # what this rank has; the seed tells the values
state = build(changed(Random(seed), parts, world), rank, meshes)
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor, ShardedTensorMetadata
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from tests.support.checkpoints.roundtrip import State, random_tensor

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.complex64)
CUT_TWICE = torch.__version__ >= "2.7"
"""Whether two mesh dimensions can shard one of a tensor's: chunks of older torch collide."""

Sides = tuple[int, ...]
Meshes = Callable[[Sides], DeviceMesh]


@dataclass(frozen=True)
class Cell:
    """A chunk of a ShardedTensor and the rank that has it."""

    offset: Sides
    extent: Sides
    rank: int


@dataclass(frozen=True)
class Part:
    """One entry of the state dict.

    kind: "mesh" is a DTensor on a mesh of this shape, by placements that are dimensions to shard,
    or None to replicate; "cells" a ShardedTensor; "whole" a plain tensor and "own" one that rank
    `owner` alone has; "tuple" and "object" are byte items for DCP.
    """

    name: str
    kind: str
    size: Sides
    dtype: torch.dtype
    mesh: Sides = ()
    placements: tuple[int | None, ...] = ()
    cells: tuple[Cell, ...] = ()
    owner: int = 0
    requires_grad: bool = False


def meshes() -> Meshes:
    """Makes each mesh once, as those who train do."""
    return functools.lru_cache(maxsize=None)(lambda shape: init_device_mesh("cpu", shape))


def draw(random: Random, world: int) -> list[Part]:
    """Some entries of every kind; DTensors on meshes of one to three dimensions."""
    kinds = ["mesh"] * 5 + ["cells"] * 3 + ["whole", "own", "tuple", "object"]
    return [_part(random, f"{kind}{number}", kind, world) for number, kind in enumerate(kinds)]


def changed(random: Random, parts: Sequence[Part], world: int) -> list[Part]:
    """Remove, move, resize or reshard one entry, or change its dtype; some changes do nothing."""
    result, number = list(parts), random.randrange(len(parts))
    part = result[number]
    action = random.choice(
        ["remove", "swap", "size", "dtype", "grad", "kind", "sharding", "sharding", "sharding"]
    )
    if action == "remove":
        del result[number]
    elif action == "swap":
        other = random.randrange(len(parts))
        result[number], result[other] = result[other], result[number]
    elif action == "grad":
        result[number] = replace(
            part, requires_grad=not part.requires_grad and part.dtype.is_floating_point
        )
    elif action == "dtype":
        result[number] = replace(part, dtype=random.choice(DTYPES))
    else:
        kind = (
            random.choice(["mesh", "cells", "whole", "object"]) if action == "kind" else part.kind
        )
        size = part.size if action == "sharding" else None
        result[number] = replace(_part(random, part.name, kind, world, size), dtype=part.dtype)
    return result


def build(parts: Sequence[Part], rank: int, mesh_of: Meshes, seed: int = 0) -> State:
    """What a rank has: nested, with values that depend on name and seed alone."""
    state: State = {"step": f"step {seed}"}
    for number, part in enumerate(parts):
        inner = state.setdefault(f"group{number % 3}", {"rate": 0.5 * seed})
        if part.kind != "own" or part.owner == rank:
            inner[part.name] = _value(part, rank, mesh_of, seed)
    return state


def _value(part: Part, rank: int, mesh_of: Meshes, seed: int) -> Any:
    full = random_tensor(part.dtype, *part.size, seed=seed + sum(part.name.encode()))
    if part.kind == "mesh":
        return _distributed(part, full, mesh_of(part.mesh))
    if part.kind == "cells":
        return _sharded_tensor(part, full, rank)
    if part.kind == "object":
        return [part.name * (seed + 1), seed]
    return (full, seed) if part.kind == "tuple" else full.requires_grad_(part.requires_grad)


def _distributed(part: Part, full: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    placements = [
        Replicate() if dimension is None else Shard(dimension) for dimension in part.placements
    ]
    extent, offset = compute_local_shape_and_global_offset(full.shape, mesh, placements)
    tensor = DTensor.from_local(
        _cut(full, offset, extent),
        mesh,
        placements,
        run_check=False,
        shape=full.shape,
        stride=full.stride(),
    )
    tensor.requires_grad_(part.requires_grad)
    return tensor


def _sharded_tensor(part: Part, full: torch.Tensor, rank: int) -> ShardedTensor:
    metadata = [
        ShardMetadata(list(cell.offset), list(cell.extent), f"rank:{cell.rank}/cpu")
        for cell in part.cells
    ]
    shards = [
        LocalShard(_cut(full, cell.offset, cell.extent).requires_grad_(part.requires_grad), one)
        for cell, one in zip(part.cells, metadata, strict=True)
        if cell.rank == rank
    ]
    properties = TensorProperties(dtype=part.dtype, requires_grad=part.requires_grad)
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        shards, ShardedTensorMetadata(metadata, full.shape, properties)
    )


def _cut(full: torch.Tensor, offset: Sequence[int], extent: Sequence[int]) -> torch.Tensor:
    return full[
        tuple(slice(start, start + length) for start, length in zip(offset, extent, strict=True))
    ].clone()


def _part(random: Random, name: str, kind: str, world: int, size: Sides | None = None) -> Part:
    size = size or tuple(random.randint(1, 7) for _ in range(random.randint(1, 3)))
    part = Part(name, kind, size, random.choice(DTYPES), owner=random.randrange(world))
    if kind == "mesh":
        mesh = _mesh_shape(random, world)
        choices = [None, *range(len(size)), *range(len(size))]
        placements = [random.choice(choices) for _ in mesh]
        if not CUT_TWICE:
            placements = [
                None if each in placements[:place] else each
                for place, each in enumerate(placements)
            ]
        return replace(part, mesh=mesh, placements=tuple(placements))
    return replace(part, cells=_cells(random, size, world)) if kind == "cells" else part


def _mesh_shape(random: Random, world: int) -> Sides:
    """One to three dimensions; their product is the number of ranks."""
    shape: list[int] = []
    for _ in range(random.randint(0, 2)):
        left = world // math.prod(shape)
        shape.append(random.choice([1, *(each for each in range(2, left) if left % each == 0)]))
    return (*shape, world // math.prod(shape))


def _cells(random: Random, size: Sides, world: int) -> tuple[Cell, ...]:
    """A grid, whose cells go to any ranks: some get several, some none."""
    sides = []
    for length in size:
        cuts = sorted(random.sample(range(1, length), random.randint(0, min(2, length - 1))))
        sides.append(list(itertools.pairwise([0, *cuts, length])))
    return tuple(
        Cell(
            tuple(start for start, _ in cell),
            tuple(stop - start for start, stop in cell),
            random.randrange(world),
        )
        for cell in itertools.product(*sides)
    )
