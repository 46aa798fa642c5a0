"""A user's file that is wrong: both checkers report each marked line, and no other.

A mark says what the reports have in their text.
"""

import torch

import dcp_mem
from dcp_mem import CheckpointManager, MemoryStorageReader, MemoryStorageWriter, TrainState

model = torch.nn.Linear(2, 2)
optimizer = torch.optim.AdamW(model.parameters())
state = {"app": TrainState(model, optimizer)}

manager = CheckpointManager("/run", keep_memory=3)
CheckpointManager("/run", keep_memmory=3)  # wrong: keep_memmory
CheckpointManager("/run", max_to_keep=3)  # wrong: max_to_keep
CheckpointManager("/run", replicas="two")  # wrong: replicas|int
CheckpointManager("/run", on_error="ignore")  # wrong: "ignore"|Literal
CheckpointManager("/run", on_crash_loop="fallback")  # wrong: "fallback"|Literal
CheckpointManager("/run", async_save="yes")  # wrong: bool
CheckpointManager("/run", save_interval_steps="10")  # wrong: Auto
CheckpointManager("/run", overlap=model)  # wrong: Overlap
CheckpointManager("/run", preemption_deadline="25")  # wrong: float
CheckpointManager("/run", trackers=[print])  # wrong: Tracker
CheckpointManager("/run", verify=False)  # wrong: verify
MemoryStorageWriter("/run", on_full="sometimes")  # wrong: "sometimes"|Literal
MemoryStorageWriter("/run", agent="thraed")  # wrong: "thraed"|Literal
MemoryStorageWriter("/run", persist=10)  # wrong: Persist
MemoryStorageWriter("/run", keep_storage=[1])  # wrong: Retention
MemoryStorageWriter("/run", memory_limit=0.5)  # wrong: float
MemoryStorageWriter("/run", storage_options="key")  # wrong: Mapping
MemoryStorageWriter(3)  # wrong: int|Literal[3]
MemoryStorageReader("/run", keep_memory=3)  # wrong: keep_memory
MemoryStorageReader("/run", verify="no")  # wrong: bool
dcp_mem.serve("/run", memory_limt="64GiB")  # wrong: memory_limt
dcp_mem.serve(None)  # wrong: None
dcp_mem.follow("/run", poll=2.0)  # wrong: poll
dcp_mem.follow("/run", timeout="10")  # wrong: float
dcp_mem.keep_best("loss", mode="lowest")  # wrong: "lowest"|Literal
dcp_mem.keep_last("3")  # wrong: int
TrainState(state)  # wrong: Module
TrainState(model, optimiser=optimizer)  # wrong: optimiser
TrainState(model, "adam")  # wrong: Optimizer
manager.save(1, model)  # wrong: Mapping
manager.save(1, state, {"loss": 1.0})  # wrong: positional
manager.save(1, state, force=True)  # wrong: force
manager.restore(state, "latest")  # wrong: int
manager.wait(1, timeout="10")  # wrong: float
manager.wait(1, "done")  # wrong: "done"|Literal
dcp_mem.save(state, checkpoint="a")  # wrong: checkpoint
dcp_mem.save(state, checkpoint_id="a", storage_writer="/run")  # wrong: StorageWriter
dcp_mem.load(state, storage_reader=MemoryStorageWriter("/run"))  # wrong: StorageReader
dcp_mem.async_save(state, checkpoint_id="a").resutl()  # wrong: resutl
dcp_mem.MemoryStorgeWriter("/run")  # wrong: MemoryStorgeWriter
