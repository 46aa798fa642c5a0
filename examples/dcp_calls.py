"""Save and load with DCP's own calls: the writer and the reader are all that changes."""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from dcp_mem import MemoryStorageReader, MemoryStorageWriter, NoRecoverableCheckpoint

root = sys.argv[1] if len(sys.argv) > 1 else "checkpoints/dcp_calls"
steps = int(sys.argv[2]) if len(sys.argv) > 2 else 30

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)

first = 0
model_state, optimizer_state = get_state_dict(model, optimizer)
state = {"model": model_state, "optimizer": optimizer_state, "step": 0}
try:
    dcp.load(state, storage_reader=MemoryStorageReader(root))  # The newest whole checkpoint.
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    first = state["step"] + 1
except CheckpointException as error:
    if not all(isinstance(one[0], NoRecoverableCheckpoint) for one in error.failures.values()):
        raise
    optimizer.state.clear()  # get_state_dict has taken an empty step to make the state.
if dist.get_rank() == 0:
    print(f"resuming after step {first - 1}" if first else "starting", flush=True)

with MemoryStorageWriter(root) as writer:
    for step in range(first, steps):
        inputs = torch.rand(8, 16)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 4:
            model_state, optimizer_state = get_state_dict(model, optimizer)
            state = {"model": model_state, "optimizer": optimizer_state, "step": step}
            dcp.save(state, checkpoint_id=f"step-{step}", storage_writer=writer)
dist.destroy_process_group()
