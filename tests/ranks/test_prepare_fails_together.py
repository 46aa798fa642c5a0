"""`writer.prepare` where one rank can't plan or open its memory: all raise, and none waits."""

import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from tests.support.checkpoints.roundtrip import Places
from tests.support.processes.forks import forked_ranks, raised_by

_TIME_OUT = {"DCP_MEM_TIMEOUT": "30"}
_SOON_SECONDS = 15.0
"""Well below the time-out."""


class _Failing(DefaultSavePlanner):
    """Raises in one of its callbacks, if in any."""

    def __init__(self, failing: str) -> None:
        super().__init__()
        self._failing = failing

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        self._fail_in("set_up_planner")
        super().set_up_planner(*args, **kwargs)

    def create_local_plan(self) -> SavePlan:
        self._fail_in("create_local_plan")
        return super().create_local_plan()

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        self._fail_in("create_global_plan")
        return super().create_global_plan(all_plans)

    def _fail_in(self, callback: str) -> None:
        if callback == self._failing:
            raise OSError(f"{callback} has failed")


class _Outcome(NamedTuple):
    """What became of a `prepare` on one rank, and whether the next one succeeds."""

    error: str
    text: str
    seconds: float
    is_well_afterwards: bool


def _outcome(places: Places, spoilt: Places, state: dict[str, Any], failing: str) -> _Outcome:
    with spoilt.writer() as writer:
        dist.barrier()
        started = time.monotonic()
        error = raised_by(lambda: writer.prepare(state, _Failing(failing) if failing else None))
        seconds = time.monotonic() - started
    with places.writer() as writer:
        is_well = writer.prepare(_state()).wait(60)
    return _Outcome(type(error).__name__, str(error), seconds, is_well)


def _state() -> dict[str, Any]:
    return {"x": torch.arange(1000.0), "step": 1}


def _has_a_failing_planner(places: Places, culprit: int, callback: str) -> _Outcome:
    failing = callback if dist.get_rank() == culprit else ""
    return _outcome(places, places, _state(), failing)


@pytest.mark.parametrize(
    ("culprit", "callback"),
    [
        (0, "set_up_planner"),
        (1, "set_up_planner"),
        (0, "create_local_plan"),
        (1, "create_local_plan"),
        (0, "create_global_plan"),
    ],
)
def test_a_planner_that_raises_on_one_rank_fails_prepare_on_both(
    places: Places, culprit: int, callback: str
) -> None:
    found = forked_ranks(_has_a_failing_planner, 2, places, culprit, callback, env=_TIME_OUT)
    _failed_together(found, culprit, "OSError", f"{callback} has failed")


def _has_keys_that_collide(places: Places, culprit: int) -> _Outcome:
    state = {"a.b": torch.ones(3), "a": {"b": torch.ones(3)}}
    return _outcome(places, places, state if dist.get_rank() == culprit else _state(), "")


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_state_that_the_default_planner_refuses_on_one_rank_fails_prepare_on_both(
    places: Places, culprit: int
) -> None:
    found = forked_ranks(_has_keys_that_collide, 2, places, culprit, env=_TIME_OUT)
    _failed_together(found, culprit, "ValueError", "a.b")


def _cannot_open_its_memory(places: Places, culprit: int, file: str) -> _Outcome:
    spoilt = Places(file, places.url) if dist.get_rank() == culprit else places
    return _outcome(places, spoilt, _state(), "")


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_memory_root_that_one_rank_cannot_open_fails_prepare_on_both(
    places: Places, tmp_path: Path, culprit: int
) -> None:
    file = tmp_path / "file"
    file.write_text("no directory")
    found = forked_ranks(_cannot_open_its_memory, 2, places, culprit, str(file), env=_TIME_OUT)
    _failed_together(found, culprit, "MemoryRootRefused", "it is not a directory")


def _failed_together(found: list[_Outcome], culprit: int, error: str, text: str) -> None:
    """The culprit raises its own error, the other rank one that names rank and error; both soon."""
    assert text in found[culprit].text
    assert found[culprit].error in (error, "RankFailed")
    other = found[1 - culprit]
    assert other.error == "RankFailed"
    assert f"rank {culprit}: {error}" in other.text
    assert text in other.text
    assert max(outcome.seconds for outcome in found) < _SOON_SECONDS
    assert all(outcome.is_well_afterwards for outcome in found)
