"""What a job takes of a tmpfs stays within `memory_limit`, whatever sizes its saves have."""

import os
import random
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dcp_mem
from dcp_mem import MemoryBudgetExceeded, MemoryStorageWriter
from tests.support.checkpoints.jobs import Job, occupied, wait_for_spare_slots, wait_until
from tests.support.processes.forks import forked, forked_ranks, forking
from tests.support.storage.file_systems import mounted_tmpfs

pytestmark = pytest.mark.timeout(180)

MIB = 1 << 20
BASE = 6 * MIB
BESIDE_THE_JOB = 64 << 10
"""Bytes of the memory root's own files, which belong to no job."""


class _Watch:
    """The most that was ever used of a file system, looked at for as long as it is watched."""

    def __init__(self, path: Path) -> None:
        self.most = 0
        self._path, self._has_ended = path, threading.Event()
        self._thread = threading.Thread(target=self._look)

    def _look(self) -> None:
        while not self._has_ended.wait(0.0002):
            facts = os.statvfs(self._path)
            self.most = max(self.most, (facts.f_blocks - facts.f_bfree) * facts.f_frsize)


@contextmanager
def _watching(path: Path) -> Iterator[_Watch]:
    watch = _Watch(path)
    watch._thread.start()
    try:
        yield watch
    finally:
        watch._has_ended.set()
        watch._thread.join()


def _save(writer: MemoryStorageWriter, state: dict[str, Any], step: int, road: str) -> None:
    if road == "dcp_mem.save":
        dcp_mem.save(state, checkpoint_id=f"step-{step}", storage_writer=writer)
    else:
        dcp_mem.async_save(state, checkpoint_id=f"step-{step}", storage_writer=writer).result()


def _save_sizes(
    job: Job, seed: int, frozen: str | None, options: dict[str, Any], road: str = "dcp_mem.save"
) -> int:
    """Save states whose sizes change, and the base now and then; return how many were saved."""
    chance = random.Random(seed)
    base, saved = torch.zeros(BASE // 4), 0
    with job.writer(frozen=frozen, agent="thread", persist=False, **options) as writer:
        for step in range(20):
            if chance.random() < 0.15:
                base.add_(1)
            state = {
                "base": base,
                "trained": torch.full((chance.randrange(1, 8 * MIB) // 4,), float(step)),
                "object": b"x" * chance.choice([1, 1, 1000, 3 * MIB]),
            }
            before = {one.name for one in writer.status()}
            _save(writer, state, step, road)
            after = {one.name for one in writer.status() if one.state.value == "complete"}
            saved += f"step-{step}" in after - before
            if chance.random() < 0.5:
                wait_for_spare_slots()
    return saved


def _assert_stays_within(
    memory_root: Path, ranks: int, keep: int, frozen: str | None, seed: int, *args: Any
) -> None:
    limit = ranks * (BASE + (keep + 1) * 14 * MIB)
    options = {"keep_memory": keep, "memory_limit": limit, "on_full": "skip"}
    with mounted_tmpfs(memory_root / "small", "200m") as small, _watching(small) as watch:
        job = Job(None, str(small))
        saved = forked_ranks(_save_sizes, ranks, job, seed, frozen, options, *args)
    assert watch.most <= limit + BESIDE_THE_JOB
    assert min(saved) > 12


@pytest.mark.parametrize("frozen", [None, "base"])
@pytest.mark.parametrize("keep", [1, 2, 3])
@pytest.mark.parametrize(("ranks", "seed"), [(1, 1), (1, 2), (2, 3)])
def test_saves_whose_sizes_change_never_take_more_than_the_memory_limit(
    memory_root: Path, ranks: int, keep: int, frozen: str | None, seed: int
) -> None:
    _assert_stays_within(memory_root, ranks, keep, frozen, seed)


@pytest.mark.parametrize("seed", [1, 2])
def test_states_that_are_copied_ahead_never_take_more_than_the_memory_limit(
    memory_root: Path, seed: int
) -> None:
    _assert_stays_within(memory_root, 2, 2, "base", seed, "dcp_mem.async_save")


# -- a job that starts again -----------------------------------------------------------------------


def _save_alike(job: Job, nbytes: int, limit: int, steps: list[int]) -> list[str]:
    options: dict[str, Any] = {"keep_memory": 2, "memory_limit": limit, "on_full": "skip"}
    with job.writer(agent="thread", persist=False, **options) as writer:
        for step in steps:
            state = {"trained": torch.full((nbytes // 4,), float(step))}
            dcp_mem.save(state, checkpoint_id=f"step-{step}", storage_writer=writer)
            wait_for_spare_slots()
        return sorted(one.name for one in writer.status() if one.state.value == "complete")


def test_ranks_that_start_again_do_not_count_the_same_slots_twice(memory_root: Path) -> None:
    limit = 2 * 3 * 6 * MIB + MIB
    with mounted_tmpfs(memory_root / "small", "200m") as small, _watching(small) as watch:
        job = Job(None, str(small))
        forked_ranks(_save_alike, 2, job, 4 * MIB, limit, [1, 2, 3])
        for nbytes, steps in ((6 * MIB, [4]), (2 * MIB, [5, 6]), (9 * MIB, [7, 8])):
            for names in forked_ranks(_save_alike, 2, job, nbytes, limit, steps):
                assert names[-1] == f"step-{steps[-1]}"
    assert watch.most <= limit + BESIDE_THE_JOB


def _save_and_leave_a_child(job: Job, told: Path) -> None:
    writer = job.writer(agent="thread", persist=False, keep_memory=1)
    for step in (1, 2):
        state = {"trained": torch.full((MIB,), float(step))}
        dcp_mem.save(state, checkpoint_id=f"step-{step}", storage_writer=writer)
        wait_for_spare_slots()
    child = os.fork()
    if not child:
        while True:
            signal.pause()
    told.write_text(f"{child} ")
    signal.pause()


def _save_within(job: Job, limit: int) -> set[int]:
    """Save once more, within the limit; return the inodes of the segments."""
    writer = job.writer(agent="thread", persist=False, keep_memory=1, memory_limit=limit)
    state = {"trained": torch.full((MIB,), 3.0)}
    dcp_mem.save(state, checkpoint_id="step-3", storage_writer=writer)
    return {path.stat().st_ino for path in job.directory.glob("step-3/*.distcp")}


def test_a_child_that_outlives_its_killed_trainer_keeps_none_of_the_jobs_memory(
    memory_root: Path, tmp_path: Path
) -> None:
    job, told = Job(None, str(memory_root)), tmp_path / "child"
    with forking(_save_and_leave_a_child, None, job, told) as ranks:
        wait_until(lambda: told.exists() and told.read_text().endswith(" "))
        child = int(told.read_text())
        try:
            ranks.kill()
            slots = [*job.directory.glob(".slots/*"), *job.directory.glob("step-*/*.distcp")]
            before = {path.stat().st_ino for path in slots}
            limit = occupied(job.directory) + 2 * MIB
            assert forked(_save_within, job, limit) <= before, "a slot was made anew"
        finally:
            os.kill(child, signal.SIGKILL)


def test_memory_of_a_deleted_slot_is_back_although_somebody_still_has_it_open(
    memory_root: Path,
) -> None:
    with mounted_tmpfs(memory_root / "small", "64m") as small:
        job = Job(None, str(small))
        writer = job.writer(agent="thread", persist=False, keep_memory=1)
        for step in range(3):
            state = {"a": torch.full((2 * MIB,), float(step))}
            dcp_mem.save(state, checkpoint_id=f"step-{step}", storage_writer=writer)
            wait_for_spare_slots()
        slot = max(job.directory.glob(".slots/*"), key=lambda path: path.stat().st_size)
        with slot.open("rb", 0) as summed_up:  # without a lease, as checksums are made
            assert os.fstat(summed_up.fileno()).st_blocks
            writer.close()
            assert not slot.exists()
            assert not os.fstat(summed_up.fileno()).st_blocks


# -- slots that are made ready ---------------------------------------------------------------------


def _free_slots(job: Job) -> list[int]:
    return sorted(path.stat().st_blocks * 512 // MIB for path in job.directory.glob(".slots/*"))


def _prepared(job: Job, options: dict[str, Any], frozen: str | None = None) -> list[int] | str:
    """Return the slots that are ready, in MiB; or the error."""
    rank = dist.get_rank()  # no rank writes what another one has, too
    base, trained = torch.zeros(BASE // 4), torch.zeros(3 * MIB // 4)
    state = {f"base.{rank}": base, f"trained.{rank}": trained, "step": 1}
    with job.writer(frozen=frozen, agent="thread", persist=False, **options) as writer:
        try:
            writer.prepare(state).wait(60)
        except MemoryBudgetExceeded as error:
            return str(error)
        dist.barrier()
        ready = _free_slots(job)
        dist.barrier()
        if frozen:
            files = {path.stat().st_ino for path in job.directory.glob(".slots/*")}
            for step in (1, 2, 3, 4):
                trained.fill_(step)
                dcp_mem.save(state, checkpoint_id=f"step-{step}", storage_writer=writer)
            left = {path.stat().st_ino for path in job.directory.rglob("*.distcp")}
            dist.barrier()
            assert left <= files, "a slot was made anew"
        return ready


@pytest.mark.parametrize(("count", "ready"), [(1, 1), (2, 2), (3, 3), (4, 3)])
def test_preparing_makes_as_many_slots_as_the_memory_limit_has_room_for(
    memory_root: Path, count: int, ready: int
) -> None:
    limit = 2 * count * 12 * MIB + MIB
    with mounted_tmpfs(memory_root / "small", "200m") as small, _watching(small) as watch:
        options = {"keep_memory": 2, "memory_limit": limit}
        found = forked_ranks(_prepared, 2, Job(None, str(small)), options)
    assert watch.most <= limit + BESIDE_THE_JOB
    assert found == [[10] * 2 * ready] * 2


def test_preparing_for_what_the_memory_limit_has_no_room_for_says_what_to_do(
    memory_root: Path,
) -> None:
    options = {"keep_memory": 2, "memory_limit": 2 * 8 * MIB}
    for error in forked_ranks(_prepared, 2, Job(None, str(memory_root)), options):
        assert str(error).startswith("a checkpoint of this state can't be prepared for: the memory")
        assert "Raise memory_limit or the tmpfs size, lower keep_memory=" in str(error)
    assert _free_slots(Job(None, str(memory_root))) == []


@pytest.mark.parametrize("keep", [1, 3])
def test_preparing_with_frozen_tensors_makes_one_slot_for_them_and_small_ones_for_the_others(
    memory_root: Path, keep: int
) -> None:
    job = Job(None, str(memory_root))
    (ready,) = forked_ranks(_prepared, 1, job, {"keep_memory": keep}, "base.*")
    assert ready == [4] * (keep + 1) + [6]
