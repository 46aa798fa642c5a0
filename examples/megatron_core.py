"""Save and load a sharded state with Megatron-core's `dist_checkpointing`, through memory."""

import sys

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor

from dcp_mem import every_n_saves
from dcp_mem.integrations.megatron import MemoryCheckpointing

root = sys.argv[1] if len(sys.argv) > 1 else "checkpoints/megatron"
steps = int(sys.argv[2]) if len(sys.argv) > 2 else 30

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
weight = torch.zeros(4)  # This rank's rows of a weight that all ranks share.


def sharded_state_dict(iteration):
    """Describe this rank's state as Megatron's modules do."""
    shard = ShardedTensor.from_rank_offsets("weight", weight, (0, rank, size))
    return {"model": {"weight": shard}, "iteration": iteration}


dist_checkpointing = MemoryCheckpointing(persist=every_n_saves(2))
last = dist_checkpointing.latest(root)  # -1 if there is no checkpoint yet.
if last >= 0:
    loaded = dist_checkpointing.load(sharded_state_dict(0), f"{root}/iter_{last:07d}")
    weight.copy_(loaded["model"]["weight"])
if rank == 0:
    print(f"resuming after step {last}" if last >= 0 else "starting", flush=True)

for iteration in range(last + 1, steps):
    weight += 0.1 * (iteration - weight)  # The training step.
    if iteration % 5 == 4:
        dist_checkpointing.save(sharded_state_dict(iteration), f"{root}/iter_{iteration:07d}")
dist_checkpointing.close()
dist.destroy_process_group()
