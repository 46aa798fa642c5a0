"""Metadata that a planner hands over only in `finish`, after the flush has committed: it counts."""

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata

import dcp_mem.runtime.session
from dcp_mem.common import faults
from dcp_mem.common.values import Outcome
from dcp_mem.flushing.flusher import JobFlusher
from dcp_mem.flushing.registration import Registration
from dcp_mem.memory.checkpoint import LocalCheckpoint
from dcp_mem.memory.job import JobMemory
from tests.support.checkpoints.jobs import Job, load_as_torch, make_state
from tests.support.processes.forks import forked

Finish = Callable[[], None]
Flush = Callable[[JobFlusher, Finish], None]


class _OwnPlanner(DefaultSavePlanner):
    """Any but torch's default: its saves are planned by torch, and `finish` is given metadata."""


@pytest.fixture
def job(tmp_path: Path, memory_root: Path) -> Job:
    return Job(str(tmp_path / "run"), str(memory_root))


def _save_with_late_metadata(job: Job, overwrite: bool, flush: Flush) -> tuple[str, str]:
    """Save step-1, of which `finish` is given other metadata; `flush` calls it.

    Returns the outcome of the flush, and its error.
    """
    url, memory = str(job.url), JobMemory(job.memory, "job")
    flusher = JobFlusher(job.memory, Registration(job="job", url=url, overwrite=overwrite))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dcp_mem.runtime.session.Session, "wake_agent", lambda *_, **__: None)
        writer = job.writer(overwrite=overwrite)
        finish = writer.finish

        def finish_late(metadata: Metadata, results: Any) -> None:
            late = dataclasses.replace(
                metadata, planner_data={**metadata.planner_data, "late": ("late",)}
            )
            flush(flusher, lambda: finish(late, results))

        patch.setattr(writer, "finish", finish_late)
        dcp.save(
            make_state(1), checkpoint_id="step-1", storage_writer=writer, planner=_OwnPlanner()
        )
        writer.close(flush=False)
    (held,) = memory.find("step-1")
    return held.flush.outcome, held.flush.error


def _assert_late(job: Job) -> None:
    stored = Path(str(job.url), "step-1")
    assert "late" in dcp.FileSystemReader(str(stored)).read_metadata().planner_data
    assert forked(load_as_torch, stored) == 1


def _break_off_the_second_commit(point: str, flusher: JobFlusher, finish: Finish) -> None:
    assert flusher.flush_next()
    assert not flusher.flush_next()
    finish()
    faults.arm(f"{point}:raise:1")
    assert flusher.flush_next()
    assert not faults.is_armed(point)
    flusher.queue.retry()
    assert flusher.flush_next()


@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("point", ["flush.started", "flush.manifest", "flush.committed"])
def test_a_second_commit_that_is_broken_off_is_made_up_for(
    job: Job, point: str, overwrite: bool
) -> None:
    found = forked(
        _save_with_late_metadata,
        job,
        overwrite,
        partial(_break_off_the_second_commit, point),
    )
    assert found == ("durable", "")
    _assert_late(job)


def _finish_as_durable_is_recorded(flusher: JobFlusher, finish: Finish) -> None:
    record_flush, left = JobMemory.record_flush, [finish]

    def record_late(memory: JobMemory, checkpoint: LocalCheckpoint, record: Any) -> None:
        if record.outcome == Outcome.DURABLE and left:
            left.pop()()
        record_flush(memory, checkpoint, record)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JobMemory, "record_flush", record_late)
        assert flusher.flush_next()
        assert not left
        assert flusher.flush_next()


def test_what_comes_as_the_flush_is_recorded_is_committed_as_well(job: Job) -> None:
    found = forked(_save_with_late_metadata, job, True, _finish_as_durable_is_recorded)
    assert found == ("durable", "")
    _assert_late(job)
