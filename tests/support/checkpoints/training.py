"""A small state that jobs on several nodes train on, in common shardings; any of them loads it.

All of it follows from one number, to the bit: a mix of two saves can't pass.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import dcp_mem
from dcp_mem.reader import RecoveryReport
from tests.support.checkpoints.jobs import Job
from tests.support.checkpoints.roundtrip import State, assert_same, blank_of
from tests.support.checkpoints.sharding import Part, Sides, build, meshes

needs_fsdp_on_cpu = pytest.mark.skipif(
    torch.__version__ < "2.7", reason="torch 2.6 runs fully_shard's forward on accelerators only"
)

Placements = tuple[int | None, ...]
Sharding = tuple[Sides, Placements]

_mesh_of = meshes()


def _fsdp(world: int) -> Sharding:
    return (world,), (0,)


def _tp(world: int) -> Sharding:
    return (world,), (1,)


def _hsdp(world: int) -> Sharding:
    replicas = 2 if world % 2 == 0 else 1
    return (replicas, world // replicas), (None, 0)


SHARDINGS: dict[str, Callable[[int], Sharding]] = {"fsdp": _fsdp, "tp": _tp, "hsdp": _hsdp}
"""By world size: the mesh's shape, and for each of its dimensions the tensor dimension that it
shards (None: it replicates)."""

_SHARDED = (
    Part("weight", "mesh", (96, 2048), torch.float32),
    Part("odd", "mesh", (33, 7), torch.bfloat16),
    Part("count", "mesh", (11, 13), torch.int64),
)
_OTHERS = (
    Part("bias", "whole", (4099,), torch.float32),
    Part("log", "object", (1,), torch.float32),
)


def state_of(number: int, sharding: str) -> State:
    """This rank's part of the state of that number."""
    mesh, placements = SHARDINGS[sharding](dist.get_world_size())
    sharded = [replace(part, mesh=mesh, placements=placements) for part in _SHARDED]
    return build([*sharded, *_OTHERS], dist.get_rank(), _mesh_of, number)


def load_newest(job: Job, sharding: str) -> tuple[int, RecoveryReport]:
    """Load the newest checkpoint; return the number of its state, and the reader's report."""
    state = blank_of(state_of(0, sharding))
    with job.reader() as reader:
        dcp_mem.load(state, storage_reader=reader)
        number = int(str(state["step"]).removeprefix("step "))
        assert_same(state_of(number, sharding), state)
        return number, reader.report()


def save(writer: dcp_mem.MemoryStorageWriter, number: int, sharding: str = "fsdp") -> str:
    """Save the state of that number; returns the checkpoint's name."""
    name = f"step-{number}"
    dcp_mem.save(state_of(number, sharding), checkpoint_id=name, storage_writer=writer)
    return name
