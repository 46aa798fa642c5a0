"""`dcp_mem.load(..., skip=)`: what a rank has already isn't loaded, and needn't be there."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

import dcp_mem
from dcp_mem import CheckpointManager, TrainState
from tests.support.checkpoints.jobs import Job
from tests.support.processes.forks import forked_ranks, on_ranks, raised_by

_NAMES = ("base.a", "base.b", "adapter.a")


def _state(number: float) -> dict[str, Any]:
    tensors = {name: torch.full((300,), float(number)) for name in _NAMES}
    return {"model": tensors, "step": int(number)}


def _values(state: dict[str, Any]) -> list[float]:
    return [float(tensor.mean()) for tensor in state["model"].values()] + [state["step"]]


def _save(job: Job, state: dict[str, Any]) -> None:
    with job.writer() as writer:
        dcp_mem.save(state, checkpoint_id="step-1", storage_writer=writer)


@pytest.mark.parametrize(
    ("skip", "expected"),
    [
        ("model.base.*", [0, 0, 1, 1]),
        (["model.base.a", "model.adapter.?"], [0, 1, 0, 1]),
        (lambda name, tensor: tensor.numel() == 300 and "base" in name, [0, 0, 1, 1]),
        ("step", [1, 1, 1, 1]),  # no tensor
        ("nothing", [1, 1, 1, 1]),
        ([], [1, 1, 1, 1]),
    ],
    ids=["pattern", "names", "function", "no tensor", "nothing", "none"],
)
def test_what_is_skipped_stays_as_it_is(memory_job: Job, skip: Any, expected: list[int]) -> None:
    _save(memory_job, _state(1))
    state = _state(0)
    dcp_mem.load(state, storage_reader=memory_job.reader(), skip=skip)
    assert _values(state) == expected


def test_what_is_skipped_need_not_be_there(memory_job: Job) -> None:
    _save(memory_job, {"model": {"adapter.a": torch.ones(300)}, "step": 1})
    state = _state(0)
    missing = raised_by(lambda: dcp_mem.load(state, storage_reader=memory_job.reader()))
    assert "model.base.a" in str(missing)
    dcp_mem.load(state, storage_reader=memory_job.reader(), skip="model.base.*")
    assert _values(state) == [0, 0, 1, 1]


def test_readers_of_torch_skip_too(tmp_path: Path) -> None:
    dcp.save(_state(1), storage_writer=FileSystemWriter(str(tmp_path / "one")))
    state = _state(0)
    reader = FileSystemReader(str(tmp_path / "one"))
    dcp_mem.load(state, storage_reader=reader, skip="model.base.*")
    assert _values(state) == [0, 0, 1, 1]


def test_a_manager_restores_all_but_a_frozen_base(memory_job: Job) -> None:
    def model(value: float) -> nn.Module:
        made = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        for parameter in made.parameters():
            nn.init.constant_(parameter, value)
        made[0].requires_grad_(False)
        return made

    places: dict[str, Any] = {"memory_root": memory_job.memory, "job": "job", "agent": "thread"}
    with CheckpointManager(None, **places) as manager:
        manager.save(1, {"app": TrainState(model(1))})
    with CheckpointManager(None, **places) as manager:
        started = model(2)
        app = TrainState(started)
        assert manager.restore({"app": app}, skip=app.is_frozen) == 1
    assert [float(one.detach().mean()) for one in started.parameters()] == [2, 2, 1, 1]


def _skip_on_rank_1(job: Job) -> list[float]:
    _save(job, _state(1))
    state = _state(0)
    skip = "model.base.*" if dist.get_rank() == 1 else None
    dcp_mem.load(state, storage_reader=job.reader(), skip=skip)
    return _values(state)


def test_each_rank_skips_by_itself(memory_job: Job) -> None:
    assert forked_ranks(_skip_on_rank_1, 2, memory_job) == [[1, 1, 1, 1], [0, 0, 1, 1]]


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ("kind", "skip=7: give names, patterns, or a function"),
        ("planner", "skip= needs dcp_mem's planner or torch's default one"),
        ("function", "division by zero"),
    ],
)
@on_ranks(2, env={"DCP_MEM_TIMEOUT": "30"})
def test_a_wrong_skip_on_one_rank_fails_on_all(memory_job: Job, wrong: str, expected: str) -> None:
    _save(memory_job, _state(1))
    given: dict[str, Any] = {}
    if wrong == "planner":
        given = {"planner": type("Own", (DefaultLoadPlanner,), {})()}
        given |= {"skip": "model.base.*"} if dist.get_rank() == 1 else {}
    elif dist.get_rank() == 1:
        given = {"skip": 7 if wrong == "kind" else lambda *_: 1 / 0}
    state = _state(0)
    error = raised_by(lambda: dcp_mem.load(state, storage_reader=memory_job.reader(), **given))
    assert _values(state) == [0, 0, 0, 0]
    text = f"{type(error).__name__}: {error}"
    assert expected in text
