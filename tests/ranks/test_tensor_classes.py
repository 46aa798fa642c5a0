"""Tensors of other classes than torch's own: what is saved of them loads again, or is refused."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

import dcp_mem
from dcp_mem import CheckpointManager, RankFailed, UntrustedObject
from tests.support.checkpoints.jobs import Job
from tests.support.processes.forks import forked_ranks, raised_by

pytestmark = pytest.mark.timeout(120)

_ERRORS = (UntrustedObject.__name__, RankFailed.__name__)


class Marked(torch.Tensor):
    """A class that torch doesn't know, and so doesn't unpickle unless it is told to."""


class _Planner(DefaultLoadPlanner):
    """A planner of the caller's own."""


# -- weights_only ----------------------------------------------------------------------------------


def _marked(number: int) -> dict[str, Any]:
    return {"w": torch.arange(6.0), "marked": (torch.arange(8) + number).as_subclass(Marked)}


def _blank(kind: type[torch.Tensor]) -> dict[str, Any]:
    return {"w": torch.zeros(6), "marked": torch.zeros(8, dtype=torch.int64).as_subclass(kind)}


def _loads_of_marked(job: Job, kind: type[torch.Tensor], place: str) -> list[str]:
    """Load a class that torch doesn't know by every way, as it is allowed; return the errors."""
    with job.writer() as writer:
        dcp_mem.save(_marked(0), checkpoint_id="step-0", storage_writer=writer)
        writer.wait("step-0")
    source = job if place == "memory" else Job(job.url, f"{job.memory}/elsewhere")

    def load(**options: Any) -> None:
        state = _blank(kind)
        dcp_mem.load(state, checkpoint_id="step-0", storage_reader=source.reader(), **options)
        found = state["marked"]
        assert type(found) is kind
        assert torch.equal(found.as_subclass(torch.Tensor), torch.arange(8))
        assert torch.equal(state["w"], torch.arange(6.0))

    def load_by_dcp() -> None:
        dcp.load(_blank(kind), checkpoint_id="step-0", storage_reader=source.reader())

    refused = [load, lambda: load(planner=_Planner()), load_by_dcp]
    errors = [f"{type(error).__name__}: {error}" for error in map(raised_by, refused)]
    load(weights_only=False)
    load(weights_only=False, planner=DefaultLoadPlanner())
    load(weights_only=False, planner=_Planner())
    errors += [f"{type(error).__name__}: {error}" for error in map(raised_by, refused)]
    dist.barrier()
    torch.serialization.add_safe_globals([Marked])
    load()
    return errors


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("place", ["memory", "storage"])
@pytest.mark.parametrize("kind", [Marked, torch.Tensor])
def test_a_tensor_of_an_unknown_class_is_refused_by_name_unless_asked_for(
    memory_root: Any, tmp_path: Any, kind: type[torch.Tensor], place: str, ranks: int
) -> None:
    job = Job(str(tmp_path / "root"), str(memory_root))
    every = forked_ranks(_loads_of_marked, ranks, job, kind, place, env={"DCP_MEM_TIMEOUT": "30"})
    for errors in every:
        assert len(errors) == 6
        for error in errors:
            assert error.startswith(_ERRORS), error
            assert "marked isn't loaded" in error
            assert "weights_only=False" in error
            assert "Marked" in error


def _restores_of_marked(job: Job) -> str:
    with CheckpointManager(job.url, memory_root=job.memory, job=job.name) as manager:
        manager.save(1, _marked(3))
        error = raised_by(lambda: manager.restore(_blank(Marked)))
        state = _blank(torch.Tensor)
        assert manager.restore(state, weights_only=False) == 1
        assert torch.equal(state["marked"], torch.arange(8) + 3)
    return f"{type(error).__name__}: {error}"


def test_the_manager_restores_an_unknown_class_where_it_is_told_to(memory_job: Job) -> None:
    (error,) = forked_ranks(_restores_of_marked, 1, memory_job)
    assert error.startswith(UntrustedObject.__name__)
    assert "marked isn't loaded" in error
