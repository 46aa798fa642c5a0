"""Metadata that a planner hands over only in `finish`, after the flush has committed: it counts."""

import contextlib
import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

import dcp_mem
from tests.support.checkpoints.jobs import Job, load_as_torch, make_state
from tests.support.checkpoints.plans import TorchPlanner
from tests.support.processes import faults
from tests.support.processes.forks import forked

POINTS = ["flush.started", "flush.manifest", "flush.committed", "flush.recorded"]


def _save_with_late_metadata(job: Job, overwrite: bool, point: str, is_early: bool) -> None:
    """Save step-1, whose `finish` is given other metadata once it is durable, or as it becomes so.

    The commit of that is broken off at a point.
    """
    with job.writer(overwrite=overwrite, agent="thread") as writer:
        finish: Callable[..., None] = writer.finish
        may_go_on = threading.Event()

        def finish_late(metadata: Metadata, results: Any) -> None:
            known = metadata.planner_data
            late = dataclasses.replace(metadata, planner_data={**known, "late": ("late",)})
            if is_early:
                finish(late, results)
                may_go_on.set()
                return
            writer.wait("step-1", timeout=60)
            faults.arm(f"{point}:raise:1")
            finish(late, results)

        def hold() -> None:
            """Have the flush, which has committed, wait for `finish` before it records that."""
            assert may_go_on.wait(60)

        held = faults.at_point("flush.committed", hold) if is_early else contextlib.nullcontext()
        with held, pytest.MonkeyPatch.context() as patch:
            patch.setattr(writer, "finish", finish_late)
            dcp.save(
                make_state(1), checkpoint_id="step-1", storage_writer=writer, planner=TorchPlanner()
            )
    with job.writer(overwrite=overwrite, agent="thread") as writer:
        (entry,) = writer.status()
        assert (entry.state, entry.error) == (dcp_mem.State.DURABLE, "")
        assert is_early or not faults.is_armed(point)


def _assert_late(job: Job) -> None:
    stored = Path(str(job.url), "step-1")
    assert "late" in dcp.FileSystemReader(str(stored)).read_metadata().planner_data
    assert forked(load_as_torch, stored) == 1


@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("point", POINTS)
def test_a_second_commit_that_is_broken_off_is_made_up_for(
    job: Job, point: str, overwrite: bool
) -> None:
    forked(_save_with_late_metadata, job, overwrite, point, False)
    _assert_late(job)


def test_what_comes_as_the_flush_is_recorded_is_committed_as_well(job: Job) -> None:
    forked(_save_with_late_metadata, job, True, "", True)
    _assert_late(job)
