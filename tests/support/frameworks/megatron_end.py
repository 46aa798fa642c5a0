"""A Megatron training that ends without `close`, as Megatron-LM's scripts do, for torchrun.

    torchrun --nproc-per-node 2 -m tests.support.frameworks.megatron_end ROOT MEMORY [FAILS]

FAILS: with any text here, it ends with an exception.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from dcp_mem import every_n_saves
from dcp_mem.integrations.megatron import MemoryCheckpointing
from tests.support.frameworks.megatron_cpu import Training, do_without_gpu


def main(root: str, memory: str, *fails: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    do_without_gpu()
    dist_checkpointing = MemoryCheckpointing(memory_root=memory, persist=every_n_saves(10))
    training = Training(2, 1)
    for _ in range(2):
        training.train()
        dist_checkpointing.save(
            training.state("dp_reshardable"), f"{root}/iter_{training.step:07d}"
        )
    dist_checkpointing.writer(root).wait("iter_0000001", timeout=60)
    dist.barrier()
    dist.destroy_process_group()
    if fails:
        raise RuntimeError("as training does")


if __name__ == "__main__":
    main(*sys.argv[1:])
