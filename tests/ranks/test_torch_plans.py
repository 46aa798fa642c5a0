"""`DCP_MEM_TORCH_PLANS=1`: nothing looks into DCP, and torch plans every save and load."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.optim import SGD

import dcp_mem
from dcp_mem import ConfigError, MemoryStorageReader, MemoryStorageWriter
from tests.support.checkpoints.models import rows_of_five
from tests.support.checkpoints.plans import logged, why_torch_plans
from tests.support.checkpoints.roundtrip import Places, State, assert_same, blank_of
from tests.support.processes import faults
from tests.support.processes.forks import on_ranks
from tests.support.processes.launch import TORCHRUN, ends, run_python

SWITCH = {"DCP_MEM_TORCH_PLANS": "1", "DCP_MEM_TIMEOUT": "20"}


@contextmanager
def _calls_of(*kinds: type) -> Iterator[list[str]]:
    """Collect which planners of torch are asked for a plan."""
    asked: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for kind in kinds:
            plan: Callable[[Any], Any] = kind.create_local_plan  # type: ignore[attr-defined]

            def counting(self: Any, plan: Callable[[Any], Any] = plan) -> Any:
                asked.append(type(self).__name__)
                return plan(self)

            patch.setattr(kind, "create_local_plan", counting)
        yield asked


def _state(step: int) -> State:
    return {"rows": rows_of_five(7, step), "w": torch.full((9,), float(step)), "step": step}


_SCRIPT = """
import sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from tests.ranks.test_torch_plans import saves_and_loads
dist.init_process_group("gloo")
print("rank", dist.get_rank(), "planned", *saves_and_loads(sys.argv[1], sys.argv[2]))
dist.destroy_process_group()
"""


def saves_and_loads(root: str, memory: str) -> list[str]:
    """Save in three ways, load in two; return which planners were asked, and how often."""
    reader = MemoryStorageReader(root, memory_root=memory)
    with (
        MemoryStorageWriter(root, memory_root=memory, keep_memory=3) as writer,
        _calls_of(dcp.DefaultSavePlanner, dcp.DefaultLoadPlanner) as asked,
    ):
        dcp.save(_state(1), checkpoint_id="1", storage_writer=writer)
        dcp_mem.save(_state(2), checkpoint_id="2", storage_writer=writer)
        saving: Any = dcp.async_save(_state(3), checkpoint_id="3", storage_writer=writer)
        getattr(saving, "upload_completion", saving).result()
        saved = len(asked)
        for step, load in ((1, dcp.load), (2, dcp_mem.load)):
            into = blank_of(_state(step))
            load(into, checkpoint_id=f"{step}", storage_reader=reader)
            assert_same(_state(step), into)
        newest = blank_of(_state(3))
        dcp.load(newest, storage_reader=reader)
        assert_same(_state(3), newest)
    return [str(saved), str(len(asked) - saved)]


def test_torch_plans_all_saves_and_loads_of_ranks_under_torchrun(
    places: Places, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT)
    run = run_python(*TORCHRUN, script, places.url, places.memory, timeout=120, env=SWITCH)
    assert ends(run, r"rank . planned 3 3") == {"rank 0 planned 3 3", "rank 1 planned 3 3"}


@on_ranks(2, env=SWITCH)
def test_the_log_says_once_that_torch_plans_and_errors_reach_all_ranks(places: Places) -> None:
    rank, model = dist.get_rank(), torch.nn.Linear(3, 3)
    with logged() as lines, places.writer(persist=False) as writer:
        for step in range(2):
            dcp.save(_state(step), checkpoint_id=f"{step}", storage_writer=writer)
        with pytest.raises(dcp.CheckpointException, match="no lost in memory"):
            places.load("memory", "lost", blank_of(_state(0)))
        faults.arm("stage.copied:raise:1" if rank == 1 else "")
        with pytest.raises(dcp.CheckpointException, match="FaultInjected"):
            dcp.save(_state(2), checkpoint_id="2", storage_writer=writer)
        unplannable = {"w": torch.empty(4, device="meta")} if rank == 1 else _state(3)
        with pytest.raises(dcp.CheckpointException):
            dcp.save(unplannable, checkpoint_id="3", storage_writer=writer)
        optimizer = SGD(model.parameters())
        saving = dcp_mem.async_save(
            _state(4), checkpoint_id="4", storage_writer=writer, overlap=optimizer
        )
    saving.result(timeout=60)  # `close` has not come into the middle of it
    assert_same(_state(4), places.load("memory", "4", blank_of(_state(4))))
    assert_same(_state(1), places.load("memory", "1", blank_of(_state(1))))
    with pytest.raises(ConfigError, match="DCP_MEM_TORCH_PLANS=1 forbids"):
        dcp_mem.serve(places.url)
    assert sum("overlap= has no effect" in line for line in lines) == 1
    saves, loads = why_torch_plans(lines), [line for line in lines if line.startswith("loads are")]
    assert saves == ["DCP_MEM_TORCH_PLANS is set"]
    assert loads == ["loads are planned by torch, which takes longer: DCP_MEM_TORCH_PLANS is set"]
