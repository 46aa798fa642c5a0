"""Train with Hugging Face Accelerate: save and restore all that the Accelerator has prepared."""

import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dcp_mem.integrations.accelerate import AcceleratorCheckpoints

root = sys.argv[1] if len(sys.argv) > 1 else "checkpoints/accelerate"
steps = int(sys.argv[2]) if len(sys.argv) > 2 else 30

torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
model = nn.Linear(16, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(TensorDataset(torch.rand(80, 16)), batch_size=8)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

with AcceleratorCheckpoints(accelerator, root, save_interval_steps=5) as checkpoints:
    last = checkpoints.restore()
    accelerator.print("starting" if last is None else f"resuming after step {last}", flush=True)
    step = 0 if last is None else last + 1
    while step < steps:
        for (inputs,) in checkpoints.skip_first_batches(loader, step % len(loader)):
            loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            checkpoints.save(step, metrics={"loss": loss.item()})
            step += 1
            if step == steps:
                break
accelerator.end_training()
