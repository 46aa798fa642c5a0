"""What checkpoints share in memory is counted once: by limits, leases, commands and retention."""

import fcntl
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dcp_mem
from dcp_mem import CheckpointManager
from tests.support.checkpoints.frozen import State, assert_holds, frozen_file, frozen_links, save
from tests.support.checkpoints.held import names_in, rejected_in, wait_for_comparisons
from tests.support.checkpoints.jobs import Job, occupied, wait_for_spare_slots, wait_until
from tests.support.command import command
from tests.support.processes import faults
from tests.support.processes.forks import forked, forked_ranks, forking, in_process, raised_by

pytestmark = pytest.mark.timeout(120)

MIB = 1 << 20
BASE, ADAPTER = 16 * MIB, MIB
SLOT = 4 * MIB
"""The most that the slot of an adapter takes: it has room for a tail."""
UNIT = 64 << 10
"""By so much a slot may be longer than what it is for."""


def _state() -> State:
    return {
        "base.a": torch.arange(float(BASE // 8)),
        "base.b": torch.arange(float(BASE // 8)) * 3,
        "adapter": torch.zeros(ADAPTER // 4),
    }


# -- limits ----------------------------------------------------------------------------------------


@in_process
def test_a_memory_limit_counts_a_shared_base_once(memory_job: Job) -> None:
    nbytes, state, kept = BASE + 6 * SLOT, _state(), []
    options: dict[str, Any] = {"memory_limit": nbytes, "on_full": "raise", "keep_memory": 4}
    with memory_job.writer(frozen="base.*", agent="thread", **options) as writer:
        for step in range(1, 9):
            save(writer, state, step)
            assert_holds(memory_job, state, step)
            kept.append(len(names_in(memory_job.directory)))
            wait_for_spare_slots()
            assert occupied(memory_job.directory) <= nbytes
    assert kept[-4:] == [4, 4, 4, 4]


def _used_with(job: Job, state: State) -> int:
    with job.writer(frozen="base.*", agent="thread", keep_memory=2, persist=False) as writer:
        for step in range(1, 5):
            save(writer, state, step)
            wait_for_spare_slots()
        return occupied(job.directory)


def test_two_checkpoints_take_a_base_once_and_what_trains_three_times(memory_job: Job) -> None:
    base, trained = BASE + 123 * 4, 5 * ADAPTER + 77 * 4
    state = {"base.a": torch.zeros(base // 4), "adapter": torch.zeros(trained // 4)}
    used = forked(_used_with, memory_job, state)
    tail, small_files = MIB, 256 << 10
    assert used < base + 3 * (trained + tail) + small_files + 4 * UNIT


# -- leases ----------------------------------------------------------------------------------------


def test_who_reads_a_shared_segment_keeps_its_bytes_whatever_is_saved(memory_job: Job) -> None:
    state = _state()
    with memory_job.writer(frozen="base.*", agent="thread", keep_memory=1) as writer:
        for step in (1, 2):
            save(writer, state, step)
        path = frozen_file(memory_job, 2)
        before, descriptor = path.read_bytes(), os.open(path, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_SH)  # as readers do
        try:
            for step in range(3, 9):
                state["base.a" if step % 2 else "base.b"].data.add_(step)
                save(writer, state, step)
                assert_holds(memory_job, state, step)
            assert os.pread(descriptor, len(before) + 1, 0) == before
        finally:
            os.close(descriptor)
        for step in range(9, 12):
            save(writer, state, step)
            assert_holds(memory_job, state, step)


def _read_slowly(job: Job, step: int) -> bool:
    """Load a checkpoint that leaves memory meanwhile, with what other ones share."""
    out = {name: torch.zeros_like(tensor) for name, tensor in _state().items()}
    dcp_mem.load(out, checkpoint_id=f"step-{step}", storage_reader=job.reader())
    return all(
        torch.equal(out[name], tensor)
        for name, tensor in _state().items()
        if name.startswith("base")
    )


def test_a_checkpoint_is_loaded_while_others_that_share_its_base_come_and_go(
    memory_job: Job,
) -> None:
    state = _state()
    with memory_job.writer(frozen="base.*", agent="thread", keep_memory=2) as writer:
        for step in (1, 2):
            save(writer, state, step)
        with forking(_read_slowly, None, memory_job, 2) as reading:
            for step in range(3, 13):
                if "step-2" in names_in(memory_job.directory):
                    save(writer, state, step)
                    assert_holds(memory_job, state, step)
            # It has loaded it, or it was gone before it began: never a mix.
            error = raised_by(reading.join)
            assert error is None or "step-2" in str(error)


# -- commands --------------------------------------------------------------------------------------


def _save_four(job: Job) -> None:
    state = _state()
    with job.writer(frozen="base.*", agent="thread", keep_memory=4, persist=False) as writer:
        for step in (1, 2, 3, 4):
            save(writer, state, step)
        wait_for_spare_slots()


def test_reclaiming_a_dead_job_counts_what_is_shared_once(memory_job: Job) -> None:
    forked(_save_four, memory_job)
    result = command("gc", "--memory-root", memory_job.memory, "--yes", "--json")
    (reclaimed,) = json.loads(result.stdout)["memory"]
    assert BASE < reclaimed["bytes"] <= BASE + 6 * SLOT
    assert not memory_job.directory.exists()


# -- the comparison of all bytes -------------------------------------------------------------------


def _save_with(job: Job, armed: str) -> None:
    state = _state()
    with job.writer(frozen="base.*", agent="thread", keep_memory=3) as writer:
        for step in (1, 2, 3):
            if step == 2:
                faults.arm(armed)
            save(writer, state, step)
            wait_for_comparisons()
        faults.arm("")
        save(writer, state, 4)
        assert_holds(job, state, 4)
        assert not rejected_in(job.directory)
        assert frozen_links(job, 4) == 3


def test_a_comparison_that_fails_fails_no_save(job: Job) -> None:
    forked(_save_with, job, "frozen.compared:raise:1")


def test_a_kill_behind_a_comparison_loses_nothing(job: Job) -> None:
    with forking(_save_with, None, job, "frozen.compared:kill:1") as processes:
        process = processes._processes[0]
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
    assert names_in(job.directory)[0] == "step-2"
    out = {name: torch.full_like(tensor, -1) for name, tensor in _state().items()}
    dcp_mem.load(out, storage_reader=job.reader())  # the kill may have come before .metadata
    expected = {**_state(), "adapter": torch.full_like(out["adapter"], 2)}
    assert all(torch.equal(out[name], tensor) for name, tensor in expected.items())
    forked(_save_with, Job(job.url, job.memory), "")


# -- values that aren't finite ---------------------------------------------------------------------


def test_each_checkpoint_that_shares_values_that_are_not_finite_is_rejected(
    memory_job: Job,
) -> None:
    state = _state()
    state["base.b"][5] = float("nan")
    options: dict[str, Any] = {"on_nonfinite": "reject", "keep_memory": 3}
    with memory_job.writer(frozen="base.*", agent="thread", **options) as writer:
        for step in (1, 2, 3):
            save(writer, state, step)
            wait_until(
                lambda step=step: f"step-{step}" in rejected_in(memory_job.directory),  # type: ignore[misc]
                f"step-{step} to be rejected",
            )
        state["base.b"][5] = 0
        save(writer, state, 4)
        assert_holds(memory_job, state, 4)


# -- recovery --------------------------------------------------------------------------------------


def _save_to_storage(job: Job) -> None:
    state = _state()
    with CheckpointManager(
        job.url, memory_root=job.memory, job="job", agent="thread", frozen="base.*"
    ) as manager:
        for step in (1, 2):
            state["adapter"].fill_(step)
            manager.save(step, dict(state))
            manager.wait()


def _load_and_count(job: Job, skip: str | None) -> int:
    preadv, asked = os.preadv, list[int]()

    def counted(descriptor: int, buffers: Any, offset: int) -> int:
        nbytes = preadv(descriptor, buffers, offset)
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        asked.append(nbytes if path.startswith(str(job.url)) and path.endswith(".distcp") else 0)
        return nbytes

    out = {name: torch.zeros_like(tensor) for name, tensor in _state().items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", counted)
        dcp_mem.load(out, storage_reader=job.reader(), skip=skip)
        dist.barrier()
    expected = _state()
    for name in ("base.a", "base.b"):
        assert torch.equal(out[name], expected[name] if skip is None else out[name] * 0)
    assert bool((out["adapter"] == 2).all())
    return sum(asked)


@pytest.mark.parametrize(("skip", "nbytes"), [(None, BASE + ADAPTER), ("base.*", ADAPTER)])
def test_a_node_that_recovers_reads_a_shared_segment_once_or_not_at_all(
    job: Job, memory_root: Path, skip: str | None, nbytes: int
) -> None:
    forked(_save_to_storage, job)
    empty = Job(job.url, str(memory_root / "empty"))
    asked = forked_ranks(_load_and_count, 2, empty, skip)
    assert 0.98 * nbytes < sum(asked) < nbytes + 3 * MIB
