"""A Megatron training as people write them, for torchrun: it goes on where the last run left off.

    torchrun --nproc-per-node 2 -m tests.support.frameworks.megatron_training ROOT MEMORY ANSWER
    [POINT]

ANSWER: a file for what rank 0 finds. POINT: a fault point at which rank 1 ends itself, as in
DCP_MEM_FAULTS.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dcp_mem import every_n_saves
from dcp_mem.common import faults
from dcp_mem.integrations.megatron import MemoryCheckpointing
from tests.support.frameworks.megatron_cpu import Training, do_without_gpu

STEPS = 6


def _train(training: Training, dist_checkpointing: MemoryCheckpointing, root: str) -> list[float]:
    """Train up to the last step, with a save after each; the losses."""
    iteration = dist_checkpointing.latest(root)
    if iteration >= 0:
        _load(training, dist_checkpointing, root, iteration)
    losses = []
    while training.step < STEPS:
        losses.append(training.train())
        _save(training, dist_checkpointing, root, training.step, "dp_reshardable")
    return losses


def _save(
    training: Training,
    dist_checkpointing: MemoryCheckpointing,
    root: str,
    iteration: int,
    kind: str,
) -> None:
    dist_checkpointing.save(
        training.state(kind), _directory(root, iteration), content_metadata={"kind": kind}
    )


def _load(
    training: Training, dist_checkpointing: MemoryCheckpointing, root: str, iteration: int
) -> None:
    directory = _directory(root, iteration)
    metadata = dist_checkpointing.load_content_metadata(directory)
    assert metadata is not None
    state = dist_checkpointing.load(training.state(metadata["kind"], is_loading=True), directory)
    training.load_state_dict(state)


def _directory(root: str, iteration: int) -> str:
    return os.path.join(root, f"iter_{iteration:07d}")


def _is_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[key], expected[key]) for key in expected
    )


def _resumed(dist_checkpointing: MemoryCheckpointing, root: str) -> dict[str, Any]:
    alone = Training(2, 1)
    reference = [alone.train() for _ in range(STEPS)]
    found: dict[str, Any] = {"latest": dist_checkpointing.latest(root), "reference": reference}
    training = Training(2, 1, seed=2)
    found["losses"] = _train(training, dist_checkpointing, root)
    found["source"] = dist_checkpointing.report().source
    values = training.values()
    found["same end"] = _is_same(values, alone.values())
    _save(training, dist_checkpointing, root, STEPS + 1, "fully_reshardable")
    for tensor, pipeline in ((1, 1), (1, 2)):
        other = Training(tensor, pipeline, seed=3)
        _load(other, dist_checkpointing, root, STEPS + 1)
        found[f"same with TP{tensor} PP{pipeline}"] = _is_same(other.values(), values)
    return found


def main(root: str, memory: str, answer: str) -> None:
    warnings.filterwarnings("error", module=r"dcp_mem(\.|$)")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    do_without_gpu()
    dist_checkpointing = MemoryCheckpointing(memory_root=memory, persist=every_n_saves(2))
    if len(sys.argv) > 4:
        faults.arm(sys.argv[4] if dist.get_rank() == 1 else "")
        _train(Training(2, 1), dist_checkpointing, root)
    else:
        found = _resumed(dist_checkpointing, root)
        if dist.get_rank() == 0:
            Path(answer).write_text(json.dumps(found))
    dist_checkpointing.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:4])
