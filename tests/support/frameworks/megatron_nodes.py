"""A Megatron job over nodes, which has its checkpoints in their memory only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor

from dcp_mem.integrations.megatron import MemoryCheckpointing
from dcp_mem.memory.records import recoveries_in
from dcp_mem.runtime.states import job_memory

_ROOT = "/nowhere/ckpts"
_DIRECTORY = f"{_ROOT}/iter_0000002"


def _state(number: int) -> dict[str, Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    weight = torch.arange(48.0).view(8, 6).chunk(size)[rank] + number
    return {
        "weight": ShardedTensor.from_rank_offsets("weight", weight, (0, rank, size)),
        "iteration": number,
    }


def save(saved: Path) -> None:
    """Save, and have it copied to other nodes."""
    checkpointing = MemoryCheckpointing(replicas=1, persist=False)
    checkpointing.save(_state(2), _DIRECTORY)
    checkpointing.writer(_ROOT).wait("iter_0000002", "replicated", timeout=100)
    dist.barrier()
    saved.touch()


def load() -> tuple[int, int, bool, set[str]]:
    """Load the newest checkpoint.

    Returns the latest iteration, the common state's iteration, whether the weight is the saved one,
    and the sources.
    """
    checkpointing = MemoryCheckpointing(replicas=1, persist=False)
    latest = checkpointing.latest(_ROOT)
    loaded = checkpointing.load(_state(0), _DIRECTORY)
    is_same = torch.equal(loaded["weight"], _state(2)["weight"].data)
    memory = job_memory(checkpointing.writer(_ROOT).settings)
    assert memory is not None
    # Two loads, of the common state and of the tensors, if this rank is the one that records them.
    loads = recoveries_in(memory.directory)
    return latest, loaded["iteration"], is_same, {place for one in loads for place in one.sources}
