"""Restarts within a process: groups are destroyed and made again, and nothing is left behind."""

import gc
import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import dcp_mem
from dcp_mem import CheckpointManager
from tests.support.checkpoints.jobs import Job, wait_for_spare_slots
from tests.support.processes.forks import forked_ranks

ROUNDS, SETTLED = 12, 3
"""Restarts, and those after which nothing may be added."""
MOST_DESCRIPTORS, MOST_MAPPINGS = 4, 12
"""What may come and go: a thread may be about to close a file, an allocator may have mapped more.

Less than one for each restart.
"""


class _Held(NamedTuple):
    """What a process holds."""

    descriptors: int
    threads: int
    mappings: int


def _held() -> _Held:
    gc.collect()
    return _Held(
        len(os.listdir("/proc/self/fd")),
        len(os.listdir("/proc/self/task")),
        len(Path("/proc/self/maps").read_text().splitlines()),
    )


def _restarts(job: Job, stores: str, is_closed: bool) -> list[_Held]:
    rank, world = dist.get_rank(), dist.get_world_size()
    held = []
    for restart in range(ROUNDS):
        dist.barrier()
        dist.destroy_process_group()
        store = dist.FileStore(f"{stores}-{restart}", world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        dist.barrier()
        _trains(job, restart, is_closed)
        wait_for_spare_slots()
        held.append(_held())
    return held


def _trains(job: Job, number: int, is_closed: bool) -> None:
    writer = job.writer(keep_memory=2)
    manager = CheckpointManager(memory_root=job.memory, job="managed", keep_memory=2)
    state: dict[str, Any] = {"w": torch.full((1000,), float(number)), "step": number}
    dcp.save(state, checkpoint_id=f"{number}-dcp", storage_writer=writer)
    dcp_mem.save(state, checkpoint_id=f"{number}", storage_writer=writer)
    future = dcp_mem.async_save(state, checkpoint_id=f"{number}-async", storage_writer=writer)
    getattr(future, "upload_completion", future).result()
    loaded: dict[str, Any] = {"w": torch.zeros(1000), "step": -1}
    dcp_mem.load(loaded, storage_reader=job.reader())
    assert loaded["step"] == number
    assert torch.equal(loaded["w"], state["w"])
    manager.save(number, state)
    if is_closed:
        manager.close()
        writer.close()


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "left as they are"])
def test_a_restart_within_the_process_leaves_nothing_behind(
    memory_job: Job, tmp_path: Path, is_closed: bool
) -> None:
    found = forked_ranks(_restarts, 2, memory_job, str(tmp_path / "store"), is_closed, timeout=200)
    for held in found:
        settled, last = held[SETTLED], held[-1]
        assert last.descriptors <= settled.descriptors + MOST_DESCRIPTORS, held
        assert last.threads <= settled.threads, held
        assert last.mappings <= settled.mappings + MOST_MAPPINGS, held
