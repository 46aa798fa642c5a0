"""Train with FSDP2; save every second step into memory, and every fifth of those to storage."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dcp_mem import CheckpointManager, TrainState, every_n_saves, keep_last

root = sys.argv[1] if len(sys.argv) > 1 else "checkpoints/fsdp2"
steps = int(sys.argv[2]) if len(sys.argv) > 2 else 30

dist.init_process_group("gloo")  # On GPUs: "cpu:gloo,cuda:nccl".
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))  # On GPUs: "cuda".
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

with CheckpointManager(
    root, save_interval_steps=2, persist=every_n_saves(5), keep_storage=keep_last(2)
) as manager:
    state = {"app": TrainState(model, optimizer)}
    last = manager.restore(state)
    if dist.get_rank() == 0:
        print("starting" if last is None else f"resuming after step {last}", flush=True)
    for step in range(0 if last is None else last + 1, steps):
        inputs = torch.rand(8, 16)  # On GPUs: device="cuda".
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        manager.save(step, state, metrics={"loss": loss.item()})
dist.destroy_process_group()
