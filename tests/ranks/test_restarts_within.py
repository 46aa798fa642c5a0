"""Restarts within a process: groups are destroyed and made again, and nothing is left behind."""

from __future__ import annotations

import gc
import mmap
import os
import resource
import shutil
import socket
from contextlib import nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import dcp_mem
from dcp_mem import CheckpointManager, MemoryStorageReader, MemoryStorageWriter, State
from dcp_mem.common import faults
from dcp_mem.common.files import allocated_bytes
from dcp_mem.config import AgentKind
from dcp_mem.memory.locks import is_leased, job_is_live
from dcp_mem.memory.slot import Slot
from dcp_mem.runtime import session
from tests.support.checkpoints.jobs import Job, wait_for_spare_slots, wait_until
from tests.support.processes.forks import forked, forked_ranks, in_process
from tests.support.storage.servers import free_port

pytestmark = pytest.mark.timeout(500)

RESTARTS, SETTLED = 100, 5
"""Restarts, and those after which nothing may be added."""
MORE = (4, 2, 12, 0, 4 << 20)
"""What may come and go: a thread may be about to close a file, an allocator may have mapped more,
a slot may be about to leave. Less than one for each restart.
"""


_LARGE_NBYTES = 64 << 20


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
    nbytes = allocated_bytes(root)
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


def _restarts(places: _Places, is_closed: bool, agent: AgentKind) -> list[_Held]:
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


def _trains(places: _Places, number: int, is_closed: bool, agent: AgentKind) -> None:
    """Save in every way, with copies in the other rank's memory and on storage, and load."""
    rank, group = dist.get_rank(), dist.new_group()  # for saves beside the training's collectives
    own: dict[str, Any] = {"memory_root": f"{places.memory}/{rank}", "job": "copied"}
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


@pytest.mark.variant
@pytest.mark.slow
@pytest.mark.parametrize(
    ("is_closed", "agent"),
    [
        pytest.param(True, "thread", id="closed", marks=pytest.mark.variant),
        pytest.param(True, "process", id="closed, agents"),
        pytest.param(False, "thread", id="left as they are", marks=pytest.mark.variant),
    ],
)
def test_a_hundred_restarts_within_the_process_leave_nothing_behind(
    memory_root: Path, tmp_path: Path, is_closed: bool, agent: AgentKind
) -> None:
    places = _Places(str(memory_root), str(tmp_path / "storage"), str(tmp_path / "store"))
    for held in forked_ranks(_restarts, 2, places, is_closed, agent, timeout=450):
        settled = [max(column) for column in zip(*held[SETTLED : 2 * SETTLED], strict=True)]
        for most, last, more in zip(settled, held[-1], _Held(*MORE), strict=True):
            assert last <= most + more, held


# -- a store that rank 0 serves --------------------------------------------------------------------


def _all_come(store: dist.Store, what: str, world: int) -> None:
    store.add(what, 1)
    wait_until(lambda: store.add(what, 0) >= world, what)


def _restarts_at_one_address(places: _Places, port: int, is_closed: bool) -> list[bool]:
    """Groups are made at one address again and again; whether it is served between them."""
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    kept, served = [], []
    for number in range(5):
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=20),
        )
        writer = MemoryStorageWriter(memory_root=f"{places.memory}/{rank}", job="j", replicas=1)
        kept.append(writer)
        state: dict[str, Any] = {"w": torch.full((9000,), float(number)), f"of {rank}": number}
        dcp_mem.save(state, checkpoint_id=f"{number}", storage_writer=writer)
        writer.wait(f"{number}", "replicated", timeout=60)
        if is_closed:
            writer.close()
        dist.barrier()
        dist.destroy_process_group()
        gc.collect()
        between = dist.FileStore(f"{places.stores}-{number}", world)
        _all_come(between, "gone", world)
        with socket.socket() as asking:
            served.append(asking.connect_ex(("127.0.0.1", port)) == 0)
        _all_come(between, "asked", world)
    _meet(places.stores, RESTARTS, rank, world)
    dist.barrier()  # a rank that is gone would be missed by one that still connects
    return served


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "left as they are"])
def test_a_store_that_rank_0_serves_ends_with_its_group(
    memory_root: Path, tmp_path: Path, is_closed: bool
) -> None:
    """Else the next group has the store of before, with the addresses of before."""
    places = _Places(str(memory_root), str(tmp_path / "storage"), str(tmp_path / "store"))
    answers = forked_ranks(_restarts_at_one_address, 2, places, free_port(), is_closed, timeout=120)
    assert answers == [[False] * 5] * 2


# -- mappings --------------------------------------------------------------------------------------


class _Lost(Exception):
    """What an in-process restart is for."""


class _Mapped(NamedTuple):
    """Mappings of slots, and the page faults of a save."""

    ranges: frozenset[tuple[str, str]]
    faults: int


def _mapped(directory: Path) -> frozenset[tuple[str, str]]:
    """Addresses and inodes of the job's slots that this process has mapped, free or as segments.

    Catalogs aren't among them: a load maps one, and lets it go when its objects are collected.
    """
    lines = Path("/proc/self/maps").read_text().splitlines()
    return frozenset(
        (line.split()[0], line.split()[4])
        for line in lines
        if f" {directory}/" in line and (".slot" in line or ".distcp" in line)
    )


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _saves_over_restarts(job: Job, how: str, restarts: int) -> list[_Mapped]:
    state: dict[str, Any] = {"w": torch.zeros(_LARGE_NBYTES // 4), "step": 0}
    found, step = [], 0
    for _ in range(restarts):
        writer = job.writer(keep_memory=1)
        with suppress(_Lost), writer if how == "exception" else nullcontext():
            for _ in range(3):
                step += 1
                state["w"].fill_(step)
                before = _faults()
                dcp_mem.save(state, checkpoint_id=f"{step}", storage_writer=writer)
                count = _faults() - before
                wait_for_spare_slots()
            found.append(_Mapped(_mapped(job.directory), count))
            raise _Lost
        if how == "close":
            writer.close(flush=False, keep_slots=True)
        loaded: dict[str, Any] = {"w": torch.ones(_LARGE_NBYTES // 4), "step": 0}
        dcp_mem.load(loaded, storage_reader=job.reader())
        assert torch.equal(loaded["w"], state["w"])
    return found


@pytest.mark.parametrize("how", ["left open", "close", "exception"])
def test_what_was_mapped_is_adopted_again_without_faulting(memory_job: Job, how: str) -> None:
    first, *later = forked(_saves_over_restarts, memory_job, how, 5)
    assert first.ranges
    for mapped in later:
        assert mapped.ranges == first.ranges
        assert mapped.faults < _LARGE_NBYTES // mmap.PAGESIZE // 8


@in_process
def test_a_plain_close_gives_back_mappings_and_free_slots(memory_job: Job) -> None:
    with memory_job.writer(keep_memory=1) as writer:
        for step in range(3):
            dcp_mem.save({"w": torch.ones(9000)}, checkpoint_id=f"{step}", storage_writer=writer)
        wait_for_spare_slots()
    assert (
        len(_mapped(memory_job.directory)),
        len(os.listdir(memory_job.directory / ".slots")),
    ) == (0, 0)


@in_process
def test_saves_that_break_off_leave_no_slots_behind(memory_job: Job) -> None:
    counts = []
    for restart in range(6):
        with suppress(CheckpointException), memory_job.writer(keep_memory=1) as writer:
            for step in range(2):
                name = f"{restart}-{step}"
                dcp_mem.save({"w": torch.ones(9000)}, checkpoint_id=name, storage_writer=writer)
            wait_for_spare_slots()
            faults.arm("stage.copied:raise:1")
            dcp_mem.save({"w": torch.ones(9000)}, checkpoint_id="broken", storage_writer=writer)
        counts.append(len(os.listdir(memory_job.directory / ".slots")))
    assert max(counts) <= counts[0], counts


# -- closes that are broken off --------------------------------------------------------------------


def _saved(job: Job, *steps: int) -> MemoryStorageWriter:
    writer = job.writer(keep_memory=1, agent="thread", persist=False)
    for step in steps:
        dcp_mem.save({"w": torch.ones(9000)}, checkpoint_id=f"{step}", storage_writer=writer)
        wait_for_spare_slots()
    return writer


def _inodes(job: Job) -> set[int]:
    files = (*job.directory.glob(".slots/*"), *job.directory.glob("*/*.distcp"))
    return {path.stat().st_ino for path in files}


def _is_given_back(job: Job) -> bool:
    """Whether this process holds nothing of the job any more."""
    files = [*job.directory.glob(".slots/*"), *job.directory.glob("*/*.distcp")]
    is_held = any(is_leased(str(path)) for path in files) or job_is_live(str(job.directory))
    return not is_held and not _mapped(job.directory) and not session._sessions


def _interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("keep_slots", [True, False])
@in_process
def test_a_close_that_is_interrupted_while_threads_work_can_be_made_again(
    memory_job: Job, keep_slots: bool
) -> None:
    writer = _saved(memory_job, 1, 2)
    (held,) = session._sessions.values()
    before = _inodes(memory_job)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(held.replicator, "wait", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            writer.close(flush=False, keep_slots=keep_slots)
    assert list(session._sessions.values()) == [held]
    again = _saved(memory_job, 3, 4)
    assert _inodes(memory_job) == before, "slots were made anew"
    again.close()
    assert _is_given_back(memory_job)


@pytest.mark.parametrize(
    ("part", "step"),
    [("agent", "stop"), ("memory", "sweep"), ("memory", "drop_free_slots"), ("catalogs", "clear")],
)
@in_process
def test_a_close_that_is_interrupted_later_gives_everything_back(
    memory_job: Job, part: str, step: str
) -> None:
    writer = _saved(memory_job, 1, 2)
    (held,) = session._sessions.values()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(getattr(held, part), step, _interrupt)
        with pytest.raises(KeyboardInterrupt):
            writer.close(flush=False)
    assert _is_given_back(memory_job)
    _saved(memory_job, 3).close()
    assert _is_given_back(memory_job)


@in_process
def test_a_close_that_is_interrupted_at_one_slot_gives_all_of_them_back(memory_job: Job) -> None:
    writer = _saved(memory_job, 1, 2)
    interrupts = iter([KeyboardInterrupt()])
    give_back = Slot.give_back

    def interrupted(slot: Slot) -> None:
        for error in interrupts:
            raise error
        give_back(slot)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Slot, "give_back", interrupted)
        with pytest.raises(KeyboardInterrupt):
            writer.close(flush=False)
    assert _is_given_back(memory_job)


@pytest.mark.parametrize("keep_slots", [True, False])
@in_process
def test_a_writer_whose_directory_is_gone_can_be_closed(memory_job: Job, keep_slots: bool) -> None:
    writer = _saved(memory_job, 1, 2)
    shutil.rmtree(memory_job.directory)
    writer.close(keep_slots=keep_slots)
    assert not session._sessions
    again = _saved(memory_job, 3)
    assert len(list(memory_job.directory.glob("3/*.distcp"))) == 1
    again.close()
    assert _is_given_back(memory_job)
