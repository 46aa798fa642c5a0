"""A rank that fails anywhere in a save: on every road all raise, and what was saved stays."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import dcp_mem
from dcp_mem import CheckpointExists, CheckpointNotFound, ConfigError, MemoryBudgetExceeded
from tests.support.checkpoints.jobs import barrier, own_rank, slots_of
from tests.support.checkpoints.models import rows_of_five
from tests.support.checkpoints.plans import save_by
from tests.support.checkpoints.roundtrip import Places, State, assert_same, blank_of, comes_back
from tests.support.processes import faults
from tests.support.processes.forks import forked, forked_ranks, raised_by

FROM_MEMORY = ("memory", "stock from memory")
PATIENCE = {"DCP_MEM_TIMEOUT": "30"}
ROADS = ("dcp.save", "dcp_mem.save", "torch's planner", "async", "async by dcp", "overlapped")

POINTS = [one for one in faults.POINTS if one.startswith(("save.", "stage.", "complete."))]
OVERLAP_POINTS = [one for one in faults.POINTS if one.startswith("overlap.")]
AFTER_THE_VOTE = ("complete.evicted", "save.finished")
"""Points where every rank knows that it is complete: only who fails there need raise."""
OF_LEADERS = ("complete.catalog", "complete.manifest", *AFTER_THE_VOTE)
COMPLETE = ("complete.manifest", *AFTER_THE_VOTE)
OTHERS = {
    "name": "is no name under",
    "names": "different checkpoint ids: of-0, of-1",
    "root": "does not exist",
    "value": "no state today",
    "object": "no state today",
    "planner": "no data today",
    "catalog": "fault injected at complete.catalog",
}
"""Where else a rank fails, and what is said of it."""
OF_ROAD = {
    "dcp.save": ("name", "names", "root", "value", "catalog"),
    "dcp_mem.save": ("name", "names", "root", "value", "object", "catalog"),
    "torch's planner": ("names", "root"),
    "async": ("root", "value", "object", "planner"),
    "async by dcp": ("root", "value", "planner"),
    "overlapped": (),
}


class _Unpicklable:
    def __reduce__(self) -> Any:
        raise OSError(5, "no state today")


class _Refusing:
    def state_dict(self) -> State:
        raise KeyError("no state today")

    def load_state_dict(self, state: State) -> None:
        raise AssertionError


class _FailingPlanner(dcp.DefaultSavePlanner):
    def __init__(self, is_failing: bool) -> None:
        super().__init__()
        self.is_failing = is_failing

    def resolve_data(self, write_item: Any) -> Any:
        if self.is_failing:
            raise LookupError("no data today")
        return super().resolve_data(write_item)


class _Case(NamedTuple):
    where: str
    failing: int


class _Outcome(NamedTuple):
    """How a save has ended on one rank: what it raised, and whether its fault point was passed."""

    kind: str
    text: str
    is_fired: bool


def _state(step: int) -> State:
    """What a rank saves; where there is no process group, nothing is sharded."""
    rank = own_rank()
    rows: Any = rows_of_five(7, step) if dist.is_initialized() else torch.arange(35.0) + step
    return {
        "rows": rows,
        "model": {"w": torch.full((50,), float(step)), "log": "x" * step},
        f"own.{rank}": {"t": torch.full((32, 9), step + rank / 8), "note": f"rank {rank}"},
        "step": step,
    }


@contextmanager
def _failing(
    case: _Case, places: Places, number: int
) -> Iterator[tuple[State, dict[str, Any], Callable[[Any], Any]]]:
    """Have this rank fail, if it is the one; yields what a save is given, and its writer."""
    where, is_failing = case.where, own_rank() == case.failing
    options: dict[str, Any] = {"name": "bad"}
    state, use = _state(number), lambda writer: writer
    if where in faults.POINTS or where == "catalog":
        point = "complete.catalog" if where == "catalog" else where
        faults.arm(f"{point}:raise:1" if is_failing else "")
        if where == "catalog":
            state[f"new.{number}"] = 1  # a known structure has a catalog that nobody puts again
    elif where == "names":
        options["name"] = f"of-{own_rank()}"
    elif where == "planner":
        options["planner"] = _FailingPlanner(is_failing)
    elif not is_failing:
        state |= {"object": {"x": torch.ones(1)}} if where == "object" else {}
    elif where == "name":
        options["name"] = "../bad"
    elif where == "root":
        elsewhere = replace(places, memory=f"{places.memory}/no/root")
        use = lambda _: elsewhere.writer(persist=False)  # noqa: E731
    elif where == "value":
        state[f"own.{own_rank()}"]["note"] = _Unpicklable()
    elif where == "object":
        state["object"] = _Refusing()
    try:
        yield state, options, use
    finally:
        faults.arm("")


def _fails_and_saves_on(places: Places, road: str, cases: Sequence[_Case]) -> dict[_Case, _Outcome]:
    """Fail in each case between two saves that work, and look at what memory has meanwhile."""
    found, good, bad = dict[_Case, _Outcome](), 0, 0
    save = _overlapped() if road == "overlapped" else functools.partial(save_by, road)
    with places.writer(keep_memory=2, persist=False) as writer:

        def save_well() -> None:
            nonlocal good
            good = bad + 1
            refused = raised_by(lambda: save(writer, _state(good), f"good-{good}"))
            if refused is not None:  # one rank's state was another one: once on all of them
                assert road.startswith("async"), refused
                assert "The next save plans anew" in str(refused)
                save(writer, _state(good), f"good-{good}")
            barrier()

        def check(newest: set[int]) -> None:
            comes_back(places, f"good-{good}", _state(good), roads=FROM_MEMORY)
            into = blank_of(_state(0))
            dcp.load(into, storage_reader=places.reader("memory", ""))
            assert into["step"] in newest, (case, into["step"], newest)
            assert_same(_state(into["step"]), into)
            barrier()

        for case in cases:
            if good or case.where != cases[0].where:  # one fails as the very first thing
                save_well()
            for _ in range(3 if case.where == "catalog" else 2 if case.where == "name" else 1):
                bad = good + 1
                with _failing(case, places, bad) as (state, options, use):
                    error = raised_by(functools.partial(save, use(writer), state, **options))
                    is_fired = case.where in faults.POINTS and not faults.is_armed(case.where)
                found[case] = _Outcome(type(error).__name__, str(error or ""), is_fired)
                barrier()
                if good and case.where != "catalog":
                    check(_newest(case, error is not None, good, bad))
        for _ in range(2):
            save_well()
        check({good})
        job = Path(places.memory, places.job)
        assert slots_of(job) <= (4 if road.startswith(("async", "over")) else 3) * 2
        barrier()
        assert len([one for one in job.iterdir() if one.is_dir() and one.name[0] != "."]) == 2
        barrier()
    return found


def _overlapped() -> Callable[..., object]:
    """Return what saves a state of which an optimizer trains a tensor, behind the loop."""
    parameter = torch.nn.Parameter(torch.zeros(32, 9))
    optimizer = torch.optim.SGD([parameter])

    def save(writer: Any, state: State, name: str) -> None:
        own = state[f"own.{own_rank()}"]
        with torch.no_grad():
            parameter.copy_(own["t"])
        own["t"] = parameter.detach()
        save_by("async", writer, state, name, overlap=optimizer)

    return save


def _newest(case: _Case, has_failed: bool, good: int, bad: int) -> set[int]:
    """The steps of which one has to be the newest in memory after a failure."""
    if not has_failed or case.where in COMPLETE:
        return {bad}
    # What rank 1 meets with after it has told that it sealed may come too late.
    return {good, bad} if case.where in ("complete.receipts", "complete.catalog") else {good}


def _check(case: _Case, of_ranks: Sequence[_Outcome]) -> None:
    """Check what all ranks have raised."""
    failed = of_ranks[case.failing]
    if case.where in faults.POINTS:
        if not failed.is_fired:  # the leader alone passes it, or nothing is copied by half
            is_leaders = case.failing == 1 and case.where in OF_LEADERS
            assert is_leaders or case.where == "stage.copying", (case, of_ranks)
            assert all(one.kind == "NoneType" for one in of_ranks), (case, of_ranks)
            return
        said = f"fault injected at {case.where}"
    else:
        said = OTHERS[case.where]
    assert said in failed.text, (case, of_ranks)
    for rank, other in enumerate(of_ranks):
        if rank == case.failing or case.where in AFTER_THE_VOTE:
            continue
        assert said in other.text, (case, of_ranks)
        is_own = case.where == "names" or other.kind == failed.kind
        assert is_own or f"rank {case.failing}: " in other.text, (case, of_ranks)


def _cases(road: str, ranks: int) -> list[_Case]:
    points = [*POINTS, *OVERLAP_POINTS] if road == "overlapped" else POINTS
    wheres = [*(OF_ROAD[road] if ranks == 2 else ()), *points]
    return [
        _Case(where, failing)
        for where in wheres
        for failing in range(1 if where in ("names", "catalog") else ranks)
    ]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rank_that_fails_anywhere_fails_the_save_on_all_and_harms_no_other(
    places: Places, road: str, ranks: int
) -> None:
    cases = _cases(road, ranks)
    if ranks == 1:
        found = [forked(_fails_and_saves_on, places, road, cases, env=PATIENCE, timeout=250)]
    else:
        found = forked_ranks(
            _fails_and_saves_on, ranks, places, road, cases, env=PATIENCE, timeout=250
        )
    for case in cases:
        _check(case, [of_rank[case] for of_rank in found])


# -- calls that can't work -------------------------------------------------------------------------


def _calls_wrongly(places: Places, save: Any, load: Any) -> list[tuple[str, str]]:
    """What wrong saves and loads raise: its type and its text."""
    state, rank = {"a": rows_of_five(4), "step": 1}, dist.get_rank()
    options = {"keep_memory": 1, "overwrite": False, "on_full": "raise", "persist": False}
    with places.writer(memory_limit="32MiB", **options) as writer:
        save(state, checkpoint_id="good", storage_writer=writer)
        large, of_this_rank = {"b": torch.zeros(16 << 20)}, ("good", "other")[rank]
        calls = [
            functools.partial(save, state, storage_writer=writer),
            functools.partial(save, state, checkpoint_id="../x", storage_writer=writer),
            functools.partial(save, state, checkpoint_id=of_this_rank, storage_writer=writer),
            functools.partial(save, state, checkpoint_id="good", storage_writer=writer),
            functools.partial(save, large, checkpoint_id="large", storage_writer=writer),
        ]
        for name in (of_this_rank, ("good", ".x")[rank], "absent"):
            reader = places.reader("memory", "")
            calls.append(
                functools.partial(load, blank_of(state), checkpoint_id=name, storage_reader=reader)
            )
        found = [raised_by(call) for call in calls]
        comes_back(places, "good", state, roads=FROM_MEMORY)
        barrier()
    return [(type(error).__name__, str(error)) for error in found]


@pytest.mark.parametrize(("save", "load"), [(dcp.save, dcp.load), (dcp_mem.save, dcp_mem.load)])
def test_calls_that_cannot_work_raise_the_same_on_all_ranks(
    places: Places, save: Any, load: Any
) -> None:
    expected = [
        (ConfigError, "checkpoint_id="),
        (ConfigError, "'../x' is no name under"),
        (ConfigError, "different checkpoint ids: good, other"),
        (CheckpointExists, "good"),
        (MemoryBudgetExceeded, "large"),
        (ConfigError, "load different checkpoint ids: good, other"),
        (ConfigError, "'.x' is no name under"),
        (CheckpointNotFound, "no absent in memory"),
    ]
    for of_rank in forked_ranks(_calls_wrongly, 2, places, save, load, env=PATIENCE):
        for (kind, text), (wanted, said) in zip(of_rank, expected, strict=True):
            assert kind in (wanted.__name__, "RankFailed"), (kind, text)
            assert said in text
        assert "newest first: good" in of_rank[-1][1]
