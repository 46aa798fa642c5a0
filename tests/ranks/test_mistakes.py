"""Ordinary mistakes: each is refused, at once and in words that show the right call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dcp_mem
from dcp_mem import (
    CheckpointManager,
    ConfigError,
    MemoryStorageReader,
    MemoryStorageWriter,
    RankFailed,
    TrainState,
)
from tests.support.processes.forks import forked_ranks, raised_by

# -- what is wrong in a call -----------------------------------------------------------------------


def _no_dicts() -> list[Any]:
    model = nn.Linear(2, 2)
    return [model, TrainState(model), [("model", model)], model.state_dict, "latest", None]


@pytest.mark.parametrize("is_async", [False, True], ids=["save", "async_save"])
def test_a_state_that_is_no_dict_raises_from_each_call_of_a_manager(
    memory_root: Path, is_async: bool
) -> None:
    options: dict[str, Any] = {"memory_root": memory_root, "job": "job", "on_error": "warn"}
    with CheckpointManager(async_save=is_async, save_interval_steps=5, **options) as manager:
        for state in _no_dicts():
            match = rf"state: give a dict such as .*TrainState.*, not a {type(state).__name__}$"
            with pytest.raises(ConfigError, match=match):
                manager.restore(state)
            with pytest.raises(ConfigError, match=match):
                manager.save(1, state)
        manager.save(1, {"n": 1})
        for state in _no_dicts():
            with pytest.raises(ConfigError, match="state: give a dict"):
                manager.save(2, state)  # no save is due
            with pytest.raises(ConfigError, match="state: give a dict"):
                manager.restore(state)
        with pytest.raises(ConfigError, match="step is a dict: give the number"):
            manager.save({"n": 1}, 5)  # type: ignore[arg-type]
        assert manager.latest() == 1


def test_a_state_that_is_no_dict_raises_from_each_function(memory_root: Path) -> None:
    writer = MemoryStorageWriter(memory_root=memory_root, job="job")
    reader = MemoryStorageReader(memory_root=memory_root, job="job")
    model: Any = nn.Linear(2, 2)
    calls = [
        lambda: dcp_mem.save(model, checkpoint_id="a", storage_writer=writer),
        lambda: dcp_mem.async_save(model, checkpoint_id="a", storage_writer=writer),
        lambda: dcp_mem.load(model, storage_reader=reader),
        lambda: writer.prepare(model),
    ]
    with writer:
        assert [str(raised_by(call)) for call in calls] == [
            'state: give a dict such as {"app": TrainState(model, optimizer)}, not a Linear'
        ] * len(calls)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("/ckpts/run", "is '/ckpts/run'"),
        (Path("/ckpts/run"), "is a PosixPath"),
        (MemoryStorageWriter, "is the class MemoryStorageWriter"),
        (MemoryStorageReader, "is the class MemoryStorageReader"),
    ],
)
def test_a_path_is_no_writer_and_no_reader(given: Any, text: str) -> None:
    state = {"n": 1}
    for save in (dcp_mem.save, dcp_mem.async_save):
        with pytest.raises(ConfigError, match=rf"storage_writer {text}: .*MemoryStorageWriter\(pa"):
            save(state, checkpoint_id="a", storage_writer=given)
    with pytest.raises(ConfigError, match=rf"storage_reader {text}: .*MemoryStorageReader\(path\)"):
        dcp_mem.load(state, storage_reader=given)


def _wrong_on_rank_1(root: str) -> list[str]:
    rank, found = dist.get_rank(), []
    with CheckpointManager(memory_root=root, job="job") as manager:
        state: Any = nn.Linear(2, 2) if rank else {"x": torch.ones(2)}
        for act in (lambda: manager.restore(state), lambda: manager.save(1, state)):
            error = raised_by(act)
            found.append(type(error).__name__ if error is not None else "")
        assert manager.save(2, {"x": torch.ones(2)})
    return found


def test_a_call_that_is_wrong_on_one_rank_raises_there_and_leaves_nobody_waiting(
    memory_root: Path,
) -> None:
    assert forked_ranks(_wrong_on_rank_1, 2, str(memory_root)) == [
        [RankFailed.__name__, ""],  # a manager warns of a save that failed elsewhere
        [ConfigError.__name__] * 2,
    ]
