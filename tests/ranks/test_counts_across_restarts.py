"""`persist=` counts the job's saves, not a process's: kills don't move what goes to storage."""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import dcp_mem
from dcp_mem import CheckpointManager, Persist, every_n_saves, every_n_steps
from tests.support.checkpoints.jobs import Job, committed_in, wait_until
from tests.support.processes.forks import forked, forked_ranks, in_process
from tests.support.processes.launch import run_torchrun

pytestmark = pytest.mark.timeout(300)

_SECONDS = 120.0
_LOOP = """
import os, signal, sys
import torch
import torch.distributed as dist
from dcp_mem import CheckpointManager, TrainState, every_n_saves

url, memory, killed_at = sys.argv[1], sys.argv[2], int(sys.argv[3])
dist.init_process_group("gloo")
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
manager = CheckpointManager(
    url, memory_root=memory, job="job", save_interval_steps=10, persist=every_n_saves(10),
    on_slow_storage="all",
)
state = {"app": TrainState(model, optimizer)}
last = manager.restore(state)
print(f"rank {dist.get_rank()} goes on from {last}", flush=True)
for step in range(0 if last is None else last + 1, killed_at + 10):
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    if step == killed_at and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    manager.save(step, state)
"""


@pytest.mark.parametrize(
    "planned_by", ["dcp_mem", pytest.param("torch", marks=pytest.mark.variant)]
)
def test_two_ranks_that_are_killed_again_and_again_store_steps_0_100_200(
    memory_root: Path, url: Path, tmp_path: Path, planned_by: str
) -> None:
    script = tmp_path / "loop.py"
    script.write_text(_LOOP)
    env = {"DCP_MEM_TORCH_PLANS": "1"} if planned_by == "torch" else {}

    def run(killed_at: int, **faults: str) -> str:
        ended = run_torchrun(
            script,
            str(url),
            str(memory_root),
            str(killed_at),
            timeout=_SECONDS,
            env={**env, **faults},
        )
        assert "SIGKILL" in ended.stdout, ended.stdout
        return ended.stdout

    run(43)
    assert "goes on from 40" in run(145)
    wait_until(lambda: committed_in(url) == {"step-0", "step-100"}, "step 100 to be flushed")
    # Within a save; then another time, with the memory of both ranks lost.
    assert "goes on from 140" in run(999, DCP_MEM_FAULTS="stage.copied:kill:3")
    shutil.rmtree(memory_root / "job")
    assert "goes on from 100" in run(187)
    assert "goes on from 180" in run(333)
    stored = {"step-0", "step-100", "step-200", "step-300"}
    wait_until(lambda: committed_in(url) == stored, f"{stored} to be flushed")


def _save(
    job: Job,
    steps: Sequence[int],
    policy: Persist,
    restore: int | str | None = "newest",
    **options: Any,
) -> list[int]:
    """A run that ends without flushing its newest; returns the steps that it had flushed."""
    manager = CheckpointManager(
        job.url, memory_root=job.memory, job="job", persist=policy, keep_memory=9, **options
    )
    if restore is not None:
        manager.restore({"n": 0}, step=None if isinstance(restore, str) else restore)
    chosen = [step for step in steps if manager.save(step, {"n": step}).persist]
    manager.close(persist_newest=False)
    return chosen


@pytest.mark.parametrize("policy", [every_n_saves(3), every_n_steps(30)])
def test_a_job_that_goes_back_counts_from_there(job: Job, policy: Persist) -> None:
    assert forked(_save, job, range(0, 60, 10), policy) == [0, 30]
    assert forked(_save, job, range(20, 50, 10), policy, 10) == [30]
    assert forked(_save, job, range(50, 100, 10), policy) == [60, 90]
    assert forked(_save, job, range(100, 130, 10), policy) == [120]
    assert forked(_save, job, range(0, 40, 10), policy, None) == [0, 30]


@in_process
def test_what_a_process_looks_at_moves_no_counts_and_what_it_goes_back_to_does(job: Job) -> None:
    policy = every_n_saves(3)
    with CheckpointManager(
        job.url, memory_root=job.memory, job="job", persist=policy, keep_memory=9
    ) as manager:

        def chosen(*steps: int) -> list[int]:
            return [step for step in steps if manager.save(step, {"n": step}).persist]

        found = [chosen(0, 10, 20, 30, 40)]
        manager.restore({"n": 0}, step=10)  # to evaluate it
        found.append(chosen(50, 60))
        manager.restore({"n": 0}, step=10)  # to go on from there
        found.append(chosen(20, 30, 40, 50, 60))
        assert found == [[0, 30], [60], [30, 60]]


@in_process
def test_forced_and_failed_saves_move_no_counts(job: Job) -> None:
    chosen = []
    with CheckpointManager(
        job.url, memory_root=job.memory, job="job", persist=every_n_saves(3), keep_memory=9
    ) as manager:
        for step in range(8):
            state: dict[str, Any] = {"n": step}
            if step == 4:
                state["lock"] = __import__("threading").Lock()  # can't be saved
            saved = manager.save(step, state, force_persist=step == 2)
            assert saved.outcome == ("failed" if step == 4 else "complete")
            chosen += [step] * saved.persist
    assert chosen == [0, 2, 3, 7]


@pytest.mark.parametrize("tells_steps", [True, False])
def test_saves_through_dcp_itself_are_counted(job: Job, tells_steps: bool) -> None:
    runs = [(0, 2), (2, 5), (5, 7)]
    if tells_steps:  # some loops make the checkpoint again that they have resumed from
        runs = [(0, 2), (1, 4), (3, 7)]
    found = [forked(_save_by_dcp, job, numbers, tells_steps) for numbers in runs]
    assert found == [["step-0"], ["step-3"], ["step-3"] * tells_steps + ["step-6"]]


def _save_by_dcp(job: Job, numbers: tuple[int, int], tells_steps: bool) -> list[str]:
    """What it resumes from it doesn't load through dcp_mem: its memory tells."""
    with job.writer(persist=every_n_saves(3), keep_memory=9) as writer:
        for number in range(*numbers):
            if tells_steps:
                writer.annotate_next_save(step=number)
            dcp.save(
                {"w": torch.full((4,), number)},
                checkpoint_id=f"step-{number}",
                storage_writer=writer,
            )
        made = [f"step-{number}" for number in range(*numbers)]
        there = [one for one in writer.status() if one.in_memory and one.name in made]
        return sorted(one.name for one in there if one.persist)


def _save_alone(job: Job, numbers: tuple[int, int], is_scoped: bool) -> list[str]:
    """Each rank saves for itself, under names of its own unless torch scopes what it saves."""
    rank = dist.get_rank()
    how: dict[str, Any] = {"use_collectives": False} if is_scoped else {"no_dist": True}
    prefix = "" if is_scoped else f"rank-{rank}-"
    with job.writer(persist=every_n_saves(3), keep_memory=20) as writer:
        if numbers[0]:
            dcp_mem.load(
                {"w": torch.zeros(4)},
                checkpoint_id=f"{prefix}step-{numbers[0] - 1}",
                storage_reader=job.reader(),
                no_dist=not is_scoped,
            )
        for number in range(*numbers):
            writer.annotate_next_save(step=number)
            dcp.save(
                {"w": torch.full((4,), float(number))},
                checkpoint_id=f"{prefix}step-{number}",
                storage_writer=writer,
                **how,
            )
        names = {f"{prefix}step-{number}" for number in range(*numbers)}
        scope = f"r{rank}" if is_scoped else ""
        found = sorted(
            one.name.removeprefix(prefix)
            for one in writer.status()
            if one.persist and one.name in names and one.scope == scope
        )
        dist.barrier()  # a rank that closes has the newest go to storage
        return found


@pytest.mark.parametrize("is_scoped", [True, False])
def test_ranks_that_save_alone_count_their_own_saves(job: Job, is_scoped: bool) -> None:
    if is_scoped and "use_collectives" not in inspect.signature(dcp.save).parameters:
        pytest.skip(f"torch {torch.__version__} has no use_collectives")
    found = [forked_ranks(_save_alone, 2, job, runs, is_scoped) for runs in ((0, 2), (2, 5))]
    assert found == [[["step-0"]] * 2, [["step-3"]] * 2]


def _elsewhere(job: Job, steps: Sequence[int], how: str) -> list[str]:
    options: dict[str, Any] = {"async_save": True} if how == "async" else {}
    with CheckpointManager(
        job.url,
        memory_root=job.memory,
        job="job",
        persist=every_n_saves(3),
        keep_memory=9,
        **options,
    ) as manager:
        manager.restore({"w": torch.zeros(3)})
        for step in steps:
            manager.save(step, {"w": torch.full((3,), float(step))})
        manager.close(persist_newest=False)
        names = {f"step-{step}" for step in steps}
        return sorted(one.name for one in manager.list() if one.persist and one.name in names)


def test_saves_behind_training_are_counted(job: Job) -> None:
    assert forked(_elsewhere, job, range(5), "async") == ["step-0", "step-3"]
    assert forked(_elsewhere, job, range(5, 10), "async") == ["step-6", "step-9"]


def _of_two_ranks(job: Job, steps: Sequence[int]) -> list[int]:
    return _save(job, steps, every_n_saves(3))


def test_fewer_and_more_ranks_go_on_counting(job: Job) -> None:
    assert forked_ranks(_of_two_ranks, 2, job, range(5)) == [[0, 3], [0, 3]]
    assert forked(_of_two_ranks, job, range(5, 8)) == [6]
    assert forked_ranks(_of_two_ranks, 3, job, range(8, 11)) == [[9]] * 3


def test_a_manifest_tells_the_counts_and_no_clock(job: Job) -> None:
    forked(_save, job, range(5), every_n_saves(3))
    stored = Path(job.memory, "job", "step-4", ".dcp_mem", "manifest.json")
    persisted = json.loads(stored.read_text())["body"]["persisted"]
    assert (persisted["saves"], persisted["step"]) == (1, 3)
    assert 0 <= persisted["seconds"] < 60
