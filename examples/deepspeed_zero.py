"""Train with DeepSpeed's ZeRO 2: `save_checkpoint` and `load_checkpoint` go through memory."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import deepspeed

from dcp_mem.integrations.deepspeed import use_memory

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("root", nargs="?", default="checkpoints/deepspeed", help="or a URL")
parser.add_argument("steps", nargs="?", type=int, default=30)
parser.add_argument("--output", help="a local directory, for names of files, a few bytes each")
given = parser.parse_args()
root, beside = given.root, "checkpoints/deepspeed" if "://" in given.root else given.root
save_dir = given.output or f"{beside}-output"  # DeepSpeed itself writes there.

# On CPUs: DeepSpeed would compile this for minutes, and gloo alone does as well.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
engine, *_ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
    config={
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": {
            "stage": 2,
            "reduce_bucket_size": 100_000,
            "allgather_bucket_size": 100_000,
        },
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True},
    },
)
use_memory(engine, root, load_dir=save_dir)
found, client = engine.load_checkpoint(save_dir) if os.path.isdir(save_dir) else (None, {})
first = client["step"] + 1 if found else 0
if dist.get_rank() == 0:
    print(f"resuming after step {first - 1}" if first else "starting", flush=True)

for step in range(first, given.steps):
    inputs = torch.rand(8, 16, dtype=torch.bfloat16)
    loss = (engine(inputs) - inputs.sum(1, keepdim=True)).float().square().mean()
    engine.backward(loss)
    engine.step()
    if step % 5 == 4:
        engine.save_checkpoint(save_dir, tag=f"step-{step}", client_state={"step": step})
dist.destroy_process_group()
