"""Run a script that was written for Azure ML's Nebula: only the two lines of `install` are new."""

import sys

import dcp_mem.integrations.nebula

dcp_mem.integrations.nebula.install()

import nebulaml as nm
import torch

root = sys.argv[1] if len(sys.argv) > 1 else "checkpoints/nebula"
steps = int(sys.argv[2]) if len(sys.argv) > 2 else 30

torch.manual_seed(0)
model = torch.nn.Linear(16, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

nm.init(persistent_storage_path=root, persistent_time_interval=100)
checkpoint = nm.get_latest_checkpoint()
first = 0
if checkpoint.tag:
    state = checkpoint.load("state")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    first = state["step"] + 1
print(f"resuming after step {first - 1}" if first else "starting", flush=True)

for step in range(first, steps):
    inputs = torch.rand(8, 16)
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 5 == 4:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        checkpoint = nm.Checkpoint(f"step{step}", 1)
        checkpoint.save("state", state)
nm.flush_persistence()
