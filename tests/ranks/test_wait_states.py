"""`writer.wait(state=...)` takes a State or its text, and refuses states that never come."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from dcp_mem import ConfigError, MemoryStorageWriter, State
from tests.support.checkpoints.jobs import Job
from tests.support.checkpoints.roundtrip import Places
from tests.support.processes.forks import on_ranks, raised_by


@pytest.mark.parametrize("state", [State.COMPLETE, State.DURABLE, "complete", "durable"])
def test_a_state_and_its_text_are_waited_for_alike(places: Places, state: Any) -> None:
    with places.writer() as writer:
        places.save(writer, {"x": torch.arange(10.0)}, "step-1")
        writer.wait("step-1", state, timeout=60)
        found = writer.status()[0].state
    assert found is State.DURABLE or (state == State.COMPLETE and found is State.COMPLETE)


@pytest.mark.parametrize("state", [State.REPLICATED, "replicated"])
def test_copies_that_were_not_asked_for_are_not_waited_for(places: Places, state: Any) -> None:
    with places.writer() as writer, pytest.raises(ConfigError, match="nothing is replicated"):
        writer.wait(state=state)


@pytest.mark.parametrize(
    ("state", "text"), [(State.FAILED, "failed"), (State.STAGING, "staging"), ("done", "done")]
)
def test_a_state_that_is_not_an_aim_is_refused_by_its_text(
    places: Places, state: Any, text: str
) -> None:
    expected = f"state='{text}': wait for 'complete', 'replicated' or 'durable'"
    with places.writer() as writer, pytest.raises(ConfigError, match=expected):
        writer.wait(state=state)


def test_what_never_reaches_storage_is_not_waited_for(memory_root: Path) -> None:
    with (
        MemoryStorageWriter(memory_root=str(memory_root), job="job") as writer,
        pytest.raises(ConfigError, match="nothing becomes durable"),
    ):
        writer.wait()


@pytest.mark.skipif(
    "use_collectives" not in inspect.signature(dcp.save).parameters,
    reason="no use_collectives here",
)
@on_ranks(2)
def test_what_ranks_saved_alone_under_one_name_is_waited_for_on_all_of_them(job: Job) -> None:
    """Storage refuses rank 1's save."""
    in_the_way = Path(str(job.url), "step-1", "__1.metadata")
    with job.writer(agent="thread") as writer:
        if dist.get_rank() == 0:
            in_the_way.mkdir(parents=True)
        dist.barrier()
        state = {"x": torch.arange(10.0)}
        dcp.save(state, checkpoint_id="step-1", storage_writer=writer, use_collectives=False)
        dist.barrier()
        error = raised_by(lambda: writer.wait("step-1", timeout=60))
        dist.barrier()
        if dist.get_rank() == 0:
            in_the_way.rmdir()
        dist.barrier()
        writer.wait("step-1", timeout=60)
        stored = sum(path.is_file() for path in in_the_way.parent.glob("*.metadata"))
        dist.barrier()
    assert (type(error).__name__, stored) == ("FlushFailed", 2)
