"""A checkpoint that lacks something: all of it is named, and `strict=False` loads the rest."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import dcp_mem
from dcp_mem import CheckpointManager, ConfigError, EntriesMissing, RankFailed, TrainState
from tests.support.checkpoints.jobs import Job
from tests.support.processes.forks import forked, forked_ranks, on_ranks, raised_by

pytestmark = pytest.mark.timeout(240)

_PLANNED = pytest.mark.parametrize(
    "env", [{}, {"DCP_MEM_TORCH_PLANS": "1"}], ids=["dcp_mem", "torch"]
)


def _manager(job: Job) -> CheckpointManager:
    return CheckpointManager(
        job.url, memory_root=job.memory, job="job", agent="thread", keep_memory=4
    )


def _trained(seed: int, **extra: Any) -> tuple[nn.Module, torch.optim.Optimizer, TrainState]:
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    return model, optimizer, TrainState(model, optimizer, **extra)


def _bits(values: Any) -> bytes:
    return pickle.dumps([torch.as_tensor(one).detach().numpy().tobytes() for one in values])


def _state_bits(optimizer: torch.optim.Optimizer) -> bytes:
    return _bits(one for of in optimizer.state.values() for one in of.values())


def _restore_a_model_alone(job: Job, is_fresh: bool) -> None:
    saved, _, _ = _trained(1)
    with _manager(job) as manager:
        manager.save(7, {"app": TrainState(saved, extra={"tokens": 5}), "old.name": torch.ones(1)})
    with _manager(job) as manager:
        model, optimizer, app = _trained(2, extra={"tokens": 0, "average": 3})
        if is_fresh:
            optimizer = torch.optim.AdamW(model.parameters())
            app = TrainState(model, optimizer, extra={"tokens": 0, "average": 3})
        before = _bits(model.parameters()), _state_bits(optimizer), optimizer.param_groups[0]["lr"]
        state = {"app": app, "new.name": torch.full((2,), 4.0)}
        error = raised_by(lambda: manager.restore(state))
        assert isinstance(error, EntriesMissing), error
        assert error.missing == ("app.values.average", "new.name")
        assert "old.name" in error.left_out
        assert "Missing key in checkpoint state_dict: app.values.average, new.name." in str(error)
        assert "Did you mean old.name in place of new.name?" in str(error)
        assert "strict=False" in str(error)
        assert _bits(model.parameters()) == before[0]

        assert manager.restore(state, strict=False) == 7
        report = manager.report()
        optimizers = [one for one in report.missing if one.startswith("app.optimizer.")]
        assert {one.split(".")[2] for one in optimizers} == {"state", "groups"}
        assert len(optimizers) == 2 * 3 + 1
        assert set(report.missing) - set(optimizers) == {"app.values.average", "new.name"}
        assert report.left_out == ("old.name",)
        assert _bits(model.parameters()) == _bits(saved.parameters())
        assert (_state_bits(optimizer), optimizer.param_groups[0]["lr"]) == before[1:]
        assert len(optimizer.state) == (0 if is_fresh else 2)
        assert app.extra == {"tokens": 5, "average": 3}
        assert state["new.name"].tolist() == [4.0, 4.0]  # type: ignore[attr-defined]
        model(torch.ones(3)).sum().backward()
        optimizer.step()


@_PLANNED
@pytest.mark.parametrize("is_fresh", [True, False])
def test_a_checkpoint_without_optimizers_restores_the_model_and_names_what_it_lacks(
    job: Job, env: Mapping[str, str], is_fresh: bool
) -> None:
    forked(_restore_a_model_alone, job, is_fresh, env=env)


def _ask_for_more_on_one_rank(job: Job) -> tuple[str, str, tuple[str, ...], tuple[str, ...]]:
    rank = dist.get_rank()
    saved = {f"layer-{number}": torch.full((2,), 5.0) for number in range(3)}
    with _manager(job) as manager:
        manager.save(1, {"model": saved})
        into = {"model": {f"layer-{rank}": torch.zeros(2)}}
        if rank == 1:
            into["model"] |= {"more": torch.full((2,), 8.0), "and more": torch.full((2,), 9.0)}
        error = raised_by(lambda: manager.restore(into))
        assert into["model"][f"layer-{rank}"].tolist() == [0, 0]
        assert manager.restore(into, strict=False) == 1
        assert into["model"][f"layer-{rank}"].tolist() == [5, 5]
        if rank == 1:
            assert into["model"]["more"].tolist() == [8, 8]
        report = manager.report()
        return type(error).__name__, str(error), report.missing, report.left_out


@_PLANNED
def test_all_ranks_raise_or_report_what_one_of_them_lacks(job: Job, env: Mapping[str, str]) -> None:
    (name, text, *report), (lacking, why, *other) = forked_ranks(
        _ask_for_more_on_one_rank, 2, job, env=env
    )
    assert (name, lacking) == (RankFailed.__name__, EntriesMissing.__name__)
    assert "model.and more, model.more" in why
    assert "model.and more, model.more" in text
    assert report == other == [("model.and more", "model.more"), ("model.layer-2",)]


@pytest.mark.parametrize("reads", ["dcp_mem", "torch"])
def test_a_load_says_once_what_it_casts_and_how_much(
    job: Job, tmp_path: Path, caplog: pytest.LogCaptureFixture, reads: str
) -> None:
    state = {f"w{number:02}": torch.full((4,), float(number)) for number in range(20)}
    reader: Any = dcp.FileSystemReader(tmp_path / "torchs")
    if reads == "torch":
        dcp.save(state, checkpoint_id=tmp_path / "torchs")
    else:
        with job.writer(agent="thread") as writer:
            dcp_mem.save(state, checkpoint_id="step-1", storage_writer=writer)
        reader = job.reader()
    caplog.clear()
    into = {name: torch.zeros(4, dtype=torch.bfloat16) for name in state}
    into["w00"] = torch.zeros(4)
    dcp_mem.load(into, storage_reader=reader)
    assert torch.equal(into["w19"], torch.full((4,), 19.0, dtype=torch.bfloat16))
    lines = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    [line] = [one for one in lines if "cast" in one]
    assert "w01 (float32 to bfloat16), w02 (float32 to bfloat16)" in line
    assert "(19 in all)" in line
    caplog.clear()
    dcp_mem.load({name: torch.zeros(4) for name in state}, storage_reader=reader)
    assert not [one for one in caplog.records if "cast" in one.getMessage()]


@on_ranks(2)
def test_rank_0_says_what_other_ranks_cast(job: Job) -> None:
    rank = dist.get_rank()
    with job.writer(agent="thread") as writer:
        dcp_mem.save(
            {f"w{number}": torch.ones(2) for number in range(2)},
            checkpoint_id="step-1",
            storage_writer=writer,
        )
        found: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("dcp_mem").addHandler(handler)
        dcp_mem.load(
            {f"w{rank}": torch.zeros(2, dtype=torch.float64 if rank else torch.float32)},
            storage_reader=job.reader(),
        )
        casts = [one for one in found if "cast" in one]
        assert len(casts) == (rank == 0), casts
        assert all("w1 (float32 to float64)" in one for one in casts)
        dist.barrier()


def test_what_another_planner_plans_cant_be_loaded_in_part(job: Job) -> None:
    class Own(dcp.DefaultLoadPlanner):
        pass

    with job.writer(agent="thread") as writer:
        dcp_mem.save({"a": torch.ones(2)}, checkpoint_id="step-1", storage_writer=writer)
    error = raised_by(
        lambda: dcp_mem.load(
            {"a": torch.zeros(2)}, storage_reader=job.reader(), planner=Own(), strict=False
        )
    )
    assert isinstance(error, ConfigError)
    assert "strict=False" in str(error)


def test_torchs_reader_loads_in_part_as_well(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(2), "b": torch.ones(2)}, checkpoint_id=tmp_path)
    into = {"a": torch.zeros(2), "c": torch.full((2,), 3.0)}
    error = raised_by(
        lambda: dcp_mem.load(dict(into), storage_reader=dcp.FileSystemReader(tmp_path))
    )
    assert isinstance(error, EntriesMissing), error
    assert (error.missing, error.left_out) == (("c",), ("b",))
    dcp_mem.load(into, storage_reader=dcp.FileSystemReader(tmp_path), strict=False)
    assert (into["a"].tolist(), into["c"].tolist()) == ([1, 1], [3, 3])


def test_a_size_that_differs_is_an_error_all_the_same(job: Job) -> None:
    with job.writer(agent="thread") as writer:
        dcp_mem.save({"a": torch.ones(2)}, checkpoint_id="step-1", storage_writer=writer)
    error = raised_by(
        lambda: dcp_mem.load({"a": torch.zeros(3)}, storage_reader=job.reader(), strict=False)
    )
    assert "ize mismatch" in str(error)
