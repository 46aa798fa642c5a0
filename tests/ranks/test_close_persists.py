"""What is saved last goes to storage as the job ends, whichever saves the policy has chosen."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from dcp_mem import (
    CheckpointManager,
    FlushFailed,
    MemoryStorageWriter,
    RankFailed,
    every_n_saves,
)
from dcp_mem.common.values import Outcome
from dcp_mem.format.manifest import FlushRecord
from dcp_mem.manager import removal
from dcp_mem.memory.job import JobMemory
from dcp_mem.memory.locks import open_leased
from dcp_mem.options import settings
from dcp_mem.runtime import states
from tests.support.checkpoints.jobs import agents, committed_in, wait_until
from tests.support.processes.forks import forked_ranks


def _manager(root: str | Path, url: str | Path, **options: object) -> CheckpointManager:
    chosen = {"persist": every_n_saves(10), **options}
    return CheckpointManager(url, memory_root=root, job="job", **chosen)  # type: ignore[arg-type]


def _saved(manager: CheckpointManager, steps: int) -> None:
    for step in range(steps):
        assert manager.save(step, {"n": step})


def test_close_persists_the_newest_checkpoint(memory_root: Path, url: Path) -> None:
    with _manager(memory_root, url) as manager:
        _saved(manager, 5)
    assert committed_in(url) == {"step-0", "step-4"}
    state = {"n": 0}
    assert _manager(memory_root / "lost", url).restore(state) == 4 == state["n"]


def test_close_leaves_the_newest_checkpoint_in_memory_when_told_to(
    memory_root: Path, url: Path
) -> None:
    manager = _manager(memory_root, url)
    _saved(manager, 3)
    manager.close(persist_newest=False)
    assert committed_in(url) == {"step-0"}


def test_persist_false_keeps_all_in_memory(memory_root: Path, url: Path) -> None:
    with _manager(memory_root, url, persist=False) as manager:
        _saved(manager, 3)
    assert committed_in(url) == set()


def test_a_loop_that_ends_in_an_error_has_its_newest_checkpoint_flushed_behind_it(
    memory_root: Path, url: Path
) -> None:
    manager = _manager(memory_root, url)
    _saved(manager, 3)
    manager.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
    wait_until(lambda: committed_in(url) == {"step-0", "step-2"}, "the newest to be flushed")


def test_a_writer_that_has_saved_nothing_persists_nothing(memory_root: Path, url: Path) -> None:
    manager = _manager(memory_root, url)
    _saved(manager, 3)
    manager.wait(0)
    with MemoryStorageWriter(url, memory_root=memory_root / "another", job="job"):
        pass
    manager.close(persist_newest=False)
    with MemoryStorageWriter(url, memory_root=memory_root, job="job"):
        pass
    assert committed_in(url) == {"step-0"}


def _saves_and_closes(root: str, url: str) -> None:
    with MemoryStorageWriter(
        url,
        memory_root=f"{root}/{torch.distributed.get_rank()}",
        job="job",
        persist=every_n_saves(9),
    ) as writer:
        for step in range(3):
            dcp.save(
                {"x": torch.full((8,), float(step))},
                checkpoint_id=f"step-{step}",
                storage_writer=writer,
            )


def test_the_newest_checkpoint_of_several_nodes_is_persisted(memory_root: Path, url: Path) -> None:
    forked_ranks(_saves_and_closes, 2, str(memory_root), str(url))
    assert committed_in(url) == {"step-0", "step-2"}


def test_a_newest_checkpoint_whose_other_part_never_comes_is_given_up(
    memory_root: Path, url: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = _manager(memory_root, url)
    _saved(manager, 2)
    manager.wait(0)
    for agent in agents(memory_root):  # it would flush what is promoted
        agent.kill()
        agent.wait()
    chosen = settings(url, memory_root=memory_root, job="job")
    promoted = states.promote_newest(chosen)
    memory = JobMemory(str(memory_root), "job")
    [newest] = [one for one in memory.checkpoints() if one.manifest.save_id in promoted]
    failed = FlushRecord(
        save_id=newest.manifest.save_id, outcome=Outcome.FAILED, error="the part of another node"
    )
    memory.record_flush(newest, failed)
    monkeypatch.setenv("DCP_MEM_TIMEOUT", "1")
    with pytest.raises(FlushFailed, match="the part of another node"):
        states.wait_for_all(chosen, lambda now: "", promoted=promoted)
    manager.close()


def _delete_what_one_node_reads(root: str, url: str) -> tuple[list[str], list[str]]:
    """Delete the newest checkpoint while rank 1 reads it; close, and say what became of it."""
    manager = _manager(f"{root}/{dist.get_rank()}", url)
    _saved(manager, 2)
    manager.wait(0)
    with pytest.MonkeyPatch.context() as patch, ExitStack() as reading:
        patch.setattr(removal, "_BUSY_SECONDS", 0.2)
        if dist.get_rank() == 1:
            (newest,) = JobMemory(f"{root}/1", "job").find("step-1")
            reading.callback(os.close, open_leased(newest.manifest_path))
        with pytest.raises(RankFailed, match="it is being read or flushed"):
            manager.delete(1)
    manager.close()
    return sorted(committed_in(Path(url))), [one.name for one in manager.status() if one.in_memory]


def test_what_could_be_deleted_on_some_nodes_only_is_waited_for_by_nobody(
    memory_root: Path, url: Path
) -> None:
    said = forked_ranks(_delete_what_one_node_reads, 2, str(memory_root), str(url))
    assert said == [(["step-0"], ["step-0"])] * 2
