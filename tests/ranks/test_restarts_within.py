"""Restarts within a process: groups are destroyed and made again, and nothing is left behind."""

from __future__ import annotations

import gc
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import dcp_mem
from dcp_mem import CheckpointManager, MemoryStorageReader, MemoryStorageWriter, State
from tests.support.checkpoints.jobs import wait_for_spare_slots
from tests.support.processes.forks import forked_ranks

pytestmark = pytest.mark.timeout(500)

RESTARTS, SETTLED = 100, 5
"""Restarts, and those after which nothing may be added."""
MOST_DESCRIPTORS, MOST_MAPPINGS, MOST_TMPFS = 4, 12, 4 << 20
"""What may come and go: a thread may be about to close a file, an allocator may have mapped more,
a slot may be about to leave. Less than one for each restart.
"""


class _Held(NamedTuple):
    """What a process holds, and what lies in memory."""

    descriptors: int
    threads: int
    mappings: int
    children: int
    tmpfs_nbytes: int


class _Places(NamedTuple):
    """Where everything lies."""

    memory: str
    storage: str
    stores: str


def _held(root: str) -> _Held:
    gc.collect()
    nbytes = 0
    for directory, _, files in os.walk(root):
        for file in files:
            try:
                nbytes += os.lstat(os.path.join(directory, file)).st_blocks * 512
            except FileNotFoundError:  # it has just been recycled
                continue
    tasks = os.listdir("/proc/self/task")
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return _Held(
        len(os.listdir("/proc/self/fd")),
        len(tasks),
        len(Path("/proc/self/maps").read_text().splitlines()),
        len(children),
        nbytes,
    )


def _meet(stores: str, number: int, rank: int, world: int) -> None:
    """Leave the groups, and make them anew."""
    if dist.is_initialized():
        dist.destroy_process_group()
    store = dist.FileStore(f"{stores}-{number}", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)


def _restarts(places: _Places, is_closed: bool, agent: str) -> list[_Held]:
    rank, world = dist.get_rank(), dist.get_world_size()
    held = []
    for number in range(RESTARTS):
        dist.barrier()
        _meet(places.stores, number, rank, world)
        _trains(places, number, is_closed, agent)
        wait_for_spare_slots()
        dist.barrier()
        held.append(_held(places.memory))
    return held


def _trains(places: _Places, number: int, is_closed: bool, agent: str) -> None:
    """Save in every way, with copies in the other rank's memory and on storage, and load."""
    rank, group = dist.get_rank(), dist.new_group()  # for saves beside the training's collectives
    own = {"memory_root": f"{places.memory}/{rank}", "job": "copied"}
    writer, reader = MemoryStorageWriter(replicas=1, **own), MemoryStorageReader(**own)
    manager = CheckpointManager(
        places.storage,
        memory_root=f"{places.memory}/shared",
        job="flushed",
        keep_storage=2,
        agent=agent,
        async_save=True,
        process_group=group,
    )
    state: dict[str, Any] = {"w": torch.full((9000,), float(number)), f"of {rank}": number}
    dcp.save(state, checkpoint_id=f"{number}-dcp", storage_writer=writer)
    dcp_mem.save(state, checkpoint_id=f"{number}", storage_writer=writer)
    begun: Any = dcp_mem.async_save(
        state, checkpoint_id=f"{number}-last", storage_writer=writer, process_group=group
    )
    getattr(begun, "upload_completion", begun).result()
    writer.wait(f"{number}-last", "replicated", timeout=60)
    loaded: dict[str, Any] = {"w": torch.zeros(9000), f"of {rank}": -1}
    dcp_mem.load(loaded, storage_reader=reader)
    assert loaded[f"of {rank}"] == number
    assert torch.equal(loaded["w"], state["w"])
    manager.save(number, state)
    manager.wait(number, State.COMPLETE, timeout=60)
    if is_closed:
        manager.close(flush=number % 10 == 0)
        writer.close()
        reader.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("is_closed", "agent"),
    [(True, "thread"), (True, "process"), (False, "thread")],
    ids=["closed", "closed, agents", "left as they are"],
)
def test_a_hundred_restarts_within_the_process_leave_nothing_behind(
    memory_root: Path, tmp_path: Path, is_closed: bool, agent: str
) -> None:
    places = _Places(str(memory_root), str(tmp_path / "storage"), str(tmp_path / "store"))
    for held in forked_ranks(_restarts, 2, places, is_closed, agent, timeout=450):
        settled, last = held[SETTLED:-1], held[-1]
        for before in (min(settled), settled[0]):
            print(before)
        assert last.descriptors <= settled[0].descriptors + MOST_DESCRIPTORS, held
        assert last.threads <= max(settled).threads, held
        assert last.mappings <= settled[0].mappings + MOST_MAPPINGS, held
        assert last.children <= settled[0].children, held
        assert last.tmpfs_nbytes <= settled[0].tmpfs_nbytes + MOST_TMPFS, held
        print(held[::10], held[-1])
