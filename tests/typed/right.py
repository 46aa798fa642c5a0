"""A user's file that is right: mypy --strict and basedpyright find nothing in it."""

from __future__ import annotations

from concurrent.futures import Future

import torch
from torch.distributed.checkpoint.metadata import Metadata

import dcp_mem
from dcp_mem import (
    CheckpointManager,
    ConfigError,
    ManagerOptions,
    MemoryStorageReader,
    MemoryStorageWriter,
    Saved,
    State,
    TrainState,
    WriterOptions,
    any_of,
    auto,
    every_n_saves,
    keep_best,
    keep_every,
    keep_last,
    parity,
)

model = torch.nn.Linear(2, 2)
optimizer = torch.optim.AdamW(model.parameters())
state = {"app": TrainState(model, optimizer, rng=False, extra={"tokens": 0})}

shared: WriterOptions = {"memory_limit": "64GiB", "on_full": "skip"}
for_loops: ManagerOptions = {
    "memory_limit": "64GiB",
    "on_error": "raise",
    "save_interval_steps": auto("12h"),
}


def train(path: str) -> int:
    kept = any_of(keep_last(2), keep_every(1000), keep_best("loss", mode="min"))
    with CheckpointManager(path, keep_memory=3, keep_storage=kept, overlap=optimizer) as manager:
        start = manager.restore(state) or 0
        for step in range(start, start + 3):
            saved: Saved = manager.save(step, state, metrics={"loss": 0.3})
            if saved:
                print(saved.outcome, saved.seconds, manager.latest())
        manager.wait(state=State.DURABLE, timeout=60.0)
        manager.wait(state="durable")
        print([one.name for one in manager.list() if one.metrics], manager.report().source)
    return start


def with_dcp(path: str) -> None:
    writer = MemoryStorageWriter(path, persist=every_n_saves(10), redundancy=parity(2))
    reader = MemoryStorageReader(path, verify=True, broadcast=False, job="run")
    _ = MemoryStorageWriter(path, **shared)
    _ = MemoryStorageWriter(None, job="run", frozen=["base.*"], storage_options={"key": "k"})
    begun: Future[Metadata] = dcp_mem.async_save(
        {"x": torch.ones(2)}, checkpoint_id="step-1", storage_writer=writer, overlap=[optimizer]
    )
    print(list(begun.result().state_dict_metadata))
    dcp_mem.save({"x": torch.ones(2)}, checkpoint_id="step-2", storage_writer=writer)
    dcp_mem.load({"x": torch.ones(2)}, storage_reader=reader, skip="base.*")
    try:
        writer.wait("step-2", "complete", timeout=None)
    except ConfigError as error:
        print(error)
    writer.close(flush=False, progress=True)


def around(path: str) -> None:
    with dcp_mem.serve(path, flush_seconds=3, verify=False, on_slow_storage="all") as served:
        print(served.root, served.writer.status()[0].state is State.DURABLE)
    for checkpoint in dcp_mem.follow(path, {"x": torch.ones(2)}, poll_seconds=2, timeout=None):
        print(checkpoint.step)
    manager = CheckpointManager(path, **for_loops)
    print(manager.advice("12h", recovery_seconds=60).interval_seconds)
