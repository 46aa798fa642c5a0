"""`dcp_mem.save` and `dcp_mem.load` under code that was written for DCP's: errors, and dicts."""

import importlib
import inspect
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

import dcp_mem
from dcp_mem import (
    CheckpointNotFound,
    ConfigError,
    DcpMemError,
    NoRecoverableCheckpoint,
    RankFailed,
)
from tests.support.checkpoints.jobs import Job, make_state, number_of
from tests.support.processes.forks import forked_ranks


class _Stateful:
    """A stateful object that raises `error` in the method of that name."""

    def __init__(self, raising: str = "", error: BaseException | None = None) -> None:
        self._raising, self._error = raising, error
        self.loaded: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        if self._raising == "state_dict" and self._error is not None:
            raise self._error
        return {"value": torch.ones(2)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._raising == "load_state_dict" and self._error is not None:
            raise self._error
        self.loaded = state


class _Watched(dict[str, Any]):
    """A dict that keeps what is put into it, in order."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.put: list[str] = []

    def __setitem__(self, key: str, value: Any) -> None:
        self.put.append(key)
        super().__setitem__(key, value)


def _outcome(act: Callable[[], object]) -> list[tuple[int, str]] | str:
    """The failures by rank, or what was raised without a CheckpointException."""
    try:
        act()
    except dcp.CheckpointException as error:
        return [
            (rank, f"{type(cause).__name__}: {cause}")
            for rank, (cause, _) in error.failures.items()
        ]
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return ""


# -- errors on one rank ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "name"),
    [
        pytest.param({"a": torch.ones(2), "more": torch.ones(1)}, None, id="missing key"),
        pytest.param({"a": torch.ones(3)}, None, id="another size"),
        pytest.param({"a": torch.ones(2)}, "step-9", id="no such checkpoint"),
        pytest.param({"a": torch.ones(2)}, "../x", id="a name that can't be"),
        pytest.param(
            {"a": _Stateful("state_dict", KeyError("no state today"))}, None, id="state_dict raises"
        ),
        pytest.param(
            {"one": _Stateful("load_state_dict", KeyError("no use"))}, None, id="cannot be loaded"
        ),
        pytest.param({"one": _Stateful("state_dict", KeyboardInterrupt())}, None, id="interrupted"),
    ],
)
def test_a_load_raises_what_dcp_raises(
    memory_job: Job, state: dict[str, Any], name: str | None
) -> None:
    with memory_job.writer(agent="thread") as writer:
        dcp.save(
            {"a": torch.ones(2), "one": _Stateful()}, checkpoint_id="step-1", storage_writer=writer
        )
    theirs, ours = (
        _outcome(partial(load, dict(state), checkpoint_id=name, storage_reader=memory_job.reader()))
        for load in (dcp.load, dcp_mem.load)
    )
    assert theirs
    if name is None:
        assert ours == theirs
    else:  # DCP tells in its own words that it has no metadata.
        assert isinstance(ours, list)
        assert [rank for rank, _ in ours] == [0]


@pytest.mark.parametrize(
    ("state", "name"),
    [
        pytest.param({"a": torch.ones(2)}, None, id="no name"),
        pytest.param({"a": torch.ones(2)}, "../x", id="a name that can't be"),
        pytest.param({"a": lambda: 0}, "step-1", id="what can't be pickled"),
        pytest.param(
            {"a": _Stateful("state_dict", KeyError("no state today"))},
            "step-1",
            id="state_dict raises",
        ),
        pytest.param(
            {"one": _Stateful("state_dict", SystemExit(3))}, "step-1", id="the process is to end"
        ),
    ],
)
def test_a_save_raises_what_dcp_raises(
    memory_job: Job, state: dict[str, Any], name: str | None
) -> None:
    with memory_job.writer(agent="thread") as writer:
        theirs, ours = (
            _outcome(partial(save, state, checkpoint_id=name, storage_writer=writer))
            for save in (dcp.save, dcp_mem.save)
        )
    assert theirs
    assert ours == theirs


def test_the_error_itself_is_among_the_failures_and_is_the_cause(memory_job: Job) -> None:
    with pytest.raises(dcp.CheckpointException) as failure:
        dcp_mem.load({"a": torch.ones(1)}, storage_reader=memory_job.reader())
    [(rank, (cause, trace))] = failure.value.failures.items()
    assert rank == 0
    assert isinstance(trace, traceback.StackSummary)
    assert isinstance(cause, NoRecoverableCheckpoint)
    assert failure.value.__cause__ is cause
    with pytest.raises(dcp.CheckpointException) as failure:
        dcp_mem.load(
            {"a": torch.ones(1)}, checkpoint_id="step-9", storage_reader=memory_job.reader()
        )
    assert isinstance(failure.value.failures[0][0], CheckpointNotFound)


def test_an_option_that_this_torch_lacks_is_no_failure_of_the_checkpoint(
    memory_job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(state_dict: Any, *, checkpoint_id: Any, storage_writer: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(dcp, "save", save)
    with (
        memory_job.writer(agent="thread") as writer,
        pytest.raises(ConfigError, match="newer torch"),
    ):
        dcp_mem.save({}, checkpoint_id="step-1", storage_writer=writer, use_collectives=False)


# -- errors on one of two ranks --------------------------------------------------------------------


def _fails_on_rank_1(job: Job) -> list[tuple[list[tuple[int, str]] | str, type | None]]:
    rank = dist.get_rank()
    found: list[tuple[list[tuple[int, str]] | str, type | None]] = []

    def outcome(act: Callable[[], object]) -> None:
        try:
            act()
        except dcp.CheckpointException as error:
            failures = {number: type(cause) for number, (cause, _) in error.failures.items()}
            found.append(([(n, kind.__name__) for n, kind in failures.items()], failures.get(1)))
        except Exception as error:
            found.append((type(error).__name__, None))

    with job.writer() as writer:
        save = partial(dcp_mem.save, checkpoint_id="step-1", storage_writer=writer)
        save(make_state(1))
        raising = _Stateful("state_dict", KeyError("no state today"))
        outcome(partial(save, {"a": raising if rank == 1 else _Stateful()}))
        outcome(partial(save, {"a": (lambda: 0) if rank == 1 else 3}))
    state = make_state(0)
    if rank == 1:
        state["one more"] = torch.zeros(3)
    outcome(partial(dcp_mem.load, state, storage_reader=job.reader()))
    # A step that is on no rank.
    outcome(
        partial(dcp_mem.load, make_state(0), checkpoint_id="step-9", storage_reader=job.reader())
    )
    return found


def test_failures_are_by_rank_with_the_own_error_and_what_is_known_of_the_others(
    memory_job: Job,
) -> None:
    first, second = forked_ranks(_fails_on_rank_1, 2, memory_job, env={"DCP_MEM_TIMEOUT": "30"})
    assert first[:3] == [([(1, "RankFailed")], RankFailed)] * 3
    assert second[0] == ("KeyError", None)
    assert [names for names, _ in second[1:3]] == [[(1, "AttributeError")], [(1, "EntriesMissing")]]
    assert first[3][0] == [(0, "CheckpointNotFound")]
    assert second[3][0] == [(1, "CheckpointNotFound")]


# -- who wants the errors themselves ---------------------------------------------------------------


def test_the_manager_raises_errors_as_they_are(memory_job: Job) -> None:
    with dcp_mem.CheckpointManager(
        None, memory_root=memory_job.memory, job=memory_job.name, agent="thread", on_error="raise"
    ) as manager:
        with pytest.raises(Exception, match="pickle") as failure:
            manager.save(1, {"a": lambda: 0})
        assert not isinstance(failure.value, DcpMemError)
        with pytest.raises(CheckpointNotFound):
            manager.restore({"a": torch.ones(1)}, step=1)


# -- signatures, and what is returned --------------------------------------------------------------


@pytest.mark.parametrize("name", ["save", "async_save", "load"])
def test_a_function_takes_all_that_dcps_takes_in_the_same_way(name: str) -> None:
    theirs, ours = (inspect.signature(getattr(of, name)).parameters for of in (dcp, dcp_mem))
    assert theirs.keys() <= ours.keys()
    assert [each.name for each in ours.values() if each.kind is each.POSITIONAL_OR_KEYWORD] == [
        each.name for each in theirs.values() if each.kind is each.POSITIONAL_OR_KEYWORD
    ]
    for each in theirs.values():
        other = ours[each.name]
        assert other.kind is each.kind, each
        # Older torch has no type of executor to name as the default.
        is_own = each.name == "async_checkpointer_type"
        assert other.default == (None if is_own else each.default), each
    added = ours.keys() - theirs.keys()
    assert all(ours[each].default is not inspect.Parameter.empty for each in added)


def _stagers() -> dict[str, Callable[[], Any]]:
    """By name, what makes an argument `async_stager`; None for none."""
    made: dict[str, Callable[[], Any]] = {"the writer": lambda: None}
    staging = importlib.import_module("torch.distributed.checkpoint.staging")
    if hasattr(staging, "DefaultStager"):  # newer than torch 2.6
        for name, behind in (("one that blocks", False), ("one that returns a future", True)):
            options = staging.StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=False,
                use_async_staging=behind,
                use_non_blocking_copy=False,
            )
            made[name] = partial(staging.DefaultStager, options)
    return made


@pytest.mark.parametrize("stager", _stagers())
def test_an_asynchronous_save_returns_what_dcps_returns(memory_job: Job, stager: str) -> None:
    kinds = []
    with memory_job.writer(agent="thread", keep_memory=3) as writer:
        for step, save in enumerate((dcp.async_save, dcp_mem.async_save)):
            made = _stagers()[stager]()
            options = {} if made is None else {"async_stager": made}
            begun: Any = save(
                make_state(step), checkpoint_id=f"{step}", storage_writer=writer, **options
            )
            futures = [begun] if isinstance(begun, Future) else list(vars(begun).values())
            results = [each.result(60) for each in futures]
            kinds.append((type(begun), [isinstance(each, Metadata) for each in results]))
            if made is not None:
                made.close()
            state = make_state(-1)
            dcp_mem.load(state, checkpoint_id=f"{step}", storage_reader=memory_job.reader())
            assert number_of(state) == step
    assert kinds[0] == kinds[1]
    assert any(kinds[0][1])


# -- dicts with methods of their own ---------------------------------------------------------------


def test_what_is_loaded_is_put_into_the_dict_item_by_item_as_dcp_does(memory_job: Job) -> None:
    with memory_job.writer(agent="thread") as writer:
        state = {**make_state(1), "one": _Stateful()}
        dcp_mem.save(state, checkpoint_id="step-1", storage_writer=writer)
    seen = []
    for load in (dcp.load, dcp_mem.load):
        one = _Stateful()
        watched = _Watched({"one": one, **make_state(0)})
        load(watched, storage_reader=memory_job.reader())
        assert watched["one"] is one
        assert number_of({key: watched[key] for key in make_state(0)}) == 1
        assert torch.equal(one.loaded["value"], torch.ones(2))
        seen.append(watched.put)
    # torch 2.6 goes through a set of keys, in any order.
    assert sorted(seen[0]) == seen[1] == sorted(make_state(0))
