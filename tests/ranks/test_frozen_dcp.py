"""`frozen=` where torch's planner plans: other planners, plan caching, ranks that save alone."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

import dcp_mem
from dcp_mem import MemoryStorageWriter
from tests.support.checkpoints.jobs import Job, occupied, wait_until
from tests.support.processes.forks import on_ranks

pytestmark = pytest.mark.timeout(120)

State = dict[str, Any]
_BASE = 1 << 19
"""Elements of each tensor of the base."""


class Own(DefaultSavePlanner):
    """A planner of the user's, which changes nothing."""


class Describing(DefaultSavePlanner):
    """A planner whose metadata differs with each save, so that `finish` publishes it anew."""

    saves = 0

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        Describing.saves += 1
        data = {**metadata.planner_data, f"save-{self.saves}": ("save",)}
        return plans, dataclasses.replace(metadata, planner_data=data)


class Casting(DefaultSavePlanner):
    """A planner that makes the tensors of each save anew, as they are asked for."""

    def create_local_plan(self) -> SavePlan:
        self.state_dict = {name: value.half() for name, value in self.state_dict.items()}
        return super().create_local_plan()

    def resolve_data(self, write_item: WriteItem) -> Any:
        found = super().resolve_data(write_item)
        return found.clone() if isinstance(found, torch.Tensor) else found


class CastingAhead(DefaultSavePlanner):
    """A planner that makes the tensors of each save anew, before it plans."""

    def set_up_planner(self, state_dict: State, *arguments: Any, **options: Any) -> None:
        halves = {name: value.half() for name, value in state_dict.items()}
        super().set_up_planner(halves, *arguments, **options)


PLANNERS: dict[str, Callable[[], DefaultSavePlanner]] = {
    "of the user's": Own,
    "with a cache": lambda: Own(enable_plan_caching=True),
    "that doesn't flatten": lambda: DefaultSavePlanner(flatten_state_dict=False),
    "that describes by itself": Describing,
}


def _state() -> State:
    generator = torch.Generator().manual_seed(7)
    return {
        "base.a": torch.randn(_BASE, generator=generator),
        "base.b": torch.randn(_BASE, generator=generator),
        "adapter": torch.zeros(1000),
    }


def _assert_holds(job: Job, state: State, step: int) -> None:
    """Load with torch's own reader, and with ours."""
    directory = job.directory / f"step-{step}"
    wait_until((directory / ".metadata").exists, "metadata for stock readers")
    for read in (
        lambda out: dcp.load(out, checkpoint_id=str(directory)),
        lambda out: dcp_mem.load(out, checkpoint_id=f"step-{step}", storage_reader=job.reader()),
    ):
        out = {name: torch.full_like(value, -1) for name, value in state.items()}
        read(out)
        for name, value in state.items():
            assert torch.equal(out[name], value), name


def _frozen(job: Job, rank: int = 0) -> dict[str, tuple[int, int]]:
    """Return inode and names of each checkpoint's segment of frozen tensors."""
    return {
        path.parent.name: (path.stat().st_ino, path.stat().st_nlink)
        for path in job.directory.glob(f"step-*/__{rank}_1-*.distcp")
    }


def _save(
    writer: MemoryStorageWriter, state: State, step: int, planner: Any, **options: Any
) -> Metadata:
    state["adapter"].fill_(step)
    name = f"step-{step}"
    made: Metadata = dcp.save(
        state, checkpoint_id=name, storage_writer=writer, planner=planner, **options
    )
    return made


@pytest.mark.parametrize("kind", PLANNERS)
def test_checkpoints_of_any_planner_share_one_copy(memory_job: Job, kind: str) -> None:
    state, planner = _state(), PLANNERS[kind]()
    with memory_job.writer(frozen="base.*", agent="thread", keep_memory=2) as writer:
        for step in range(1, 6):
            metadata = _save(writer, state, step, planner)
            assert {info.relative_path[:5] for info in metadata.storage_data.values()} == {
                "__0_0",
                "__0_1",
            }
            _assert_holds(memory_job, state, step)
        assert len({inode for inode, _ in _frozen(memory_job).values()}) == 1
        assert _frozen(memory_job)["step-5"][1] == 2
        assert occupied(memory_job.directory) < 8 * _BASE + (20 << 20)


@pytest.mark.parametrize("kind", PLANNERS)
@pytest.mark.parametrize("past_the_counter", [False, True])
def test_a_wrong_declaration_is_found_whoever_plans(
    memory_job: Job, kind: str, past_the_counter: bool
) -> None:
    state, planner = _state(), PLANNERS[kind]()
    with memory_job.writer(frozen="base.*", agent="thread") as writer:
        for step in range(1, 5):
            if step == 3:
                one = state["base.b"]
                (one.data if past_the_counter else one).add_(1)
            _save(writer, state, step, planner)
            _assert_holds(memory_job, state, step)
        state["base.a"] = state["base.a"] + 1  # another tensor in its place
        _save(writer, state, 5, planner)
        _assert_holds(memory_job, state, 5)


def test_roads_share_with_each_other(memory_job: Job) -> None:
    state = _state()
    with memory_job.writer(frozen="base.*", agent="thread", keep_memory=4) as writer:
        for step, planner in enumerate((Own(), None, Own(), DefaultSavePlanner()), 1):
            _save(writer, state, step, planner)
            _assert_holds(memory_job, state, step)
        assert {names for _, names in _frozen(memory_job).values()} == {4}


def test_tensors_thaw_under_a_planner_of_the_users(memory_job: Job) -> None:
    state, frozen, planner = _state(), {"base.a", "base.b"}, Own()
    with memory_job.writer(frozen=lambda name, _: name in frozen, agent="thread") as writer:
        for step in range(1, 6):
            if step == 3:
                frozen.discard("base.b")
            if step > 3:
                state["base.b"].add_(1)
            _save(writer, state, step, planner)
            _assert_holds(memory_job, state, step)
        newest = dcp.FileSystemReader(str(memory_job.directory / "step-5")).read_metadata()
        places = newest.storage_data.values()
        frozen_nbytes = sum(one.length for one in places if one.relative_path[:5] == "__0_1")
        assert frozen_nbytes >> 20 == 4 * _BASE >> 20


def test_a_planner_that_makes_its_tensors_anew_shares_nothing_and_says_so(
    memory_job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    state = {name: value.round() for name, value in _state().items()}
    with memory_job.writer(frozen="base.*", agent="thread") as writer:
        for step in (1, 2):
            _save(writer, state, step, Casting())
            _assert_holds(memory_job, {name: one.half() for name, one in state.items()}, step)
    assert not _frozen(memory_job)
    told = [line for line in caplog.messages if "frozen= has no effect" in line]
    assert told == ["frozen= has no effect: Casting makes the tensors of each save anew"]


def test_tensors_that_are_others_each_time_count_as_training(
    memory_job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    state = {name: value.round() for name, value in _state().items()}
    with memory_job.writer(frozen="base.*", agent="thread", persist=False) as writer:
        for step in range(1, 6):
            state["base.a"].data.add_(1)
            _save(writer, state, step, CastingAhead())
            _assert_holds(memory_job, {name: one.half() for name, one in state.items()}, step)
    assert sum("declared frozen" in line for line in caplog.messages) == 2
    assert _frozen(memory_job) == {}


# -- ranks that save alone ------------------------------------------------------------------------

needs_no_collectives = pytest.mark.skipif(
    "use_collectives" not in inspect.signature(dcp.save).parameters,
    reason=f"torch {torch.__version__} has no use_collectives",
)


@needs_no_collectives
@on_ranks(2)
def test_ranks_that_save_alone_share_each_by_itself(memory_job: Job) -> None:
    state, rank, found = _state(), dist.get_rank(), []
    with memory_job.writer(frozen="base.*", agent="thread") as writer:
        for step in range(1, 5):
            if step == 3 and rank:
                state["base.a"].data.add_(1)
            _save(writer, state, step, None, use_collectives=False)
            dist.barrier()
            out = {name: torch.full_like(value, -1) for name, value in state.items()}
            dcp.load(out, checkpoint_id=f"step-{step}", storage_reader=memory_job.reader())
            found.append(all(torch.equal(out[name], state[name]) for name in state))
            dist.barrier()
        found.append({names for _, names in _frozen(memory_job, rank).values()} == {2})
        dist.barrier()
    assert found == [True] * 5


@needs_no_collectives
@pytest.mark.parametrize(
    "options", [{"use_collectives": False}, {"planner": Own()}], ids=["alone", "planner"]
)
def test_copies_of_an_asynchronous_save_share_nothing_and_say_so(
    memory_job: Job, caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    state = _state()
    with memory_job.writer(frozen="base.*", agent="thread") as writer:
        for step in (1, 2, 3):
            state["adapter"].fill_(step)
            name = f"step-{step}"
            begun = dcp.async_save(state, checkpoint_id=name, storage_writer=writer, **options)
            assert isinstance(begun, Future)
            begun.result()
            if "planner" in options:
                _assert_holds(memory_job, state, step)
    assert not _frozen(memory_job)
    assert [line for line in caplog.messages if "frozen" in line] == [
        "frozen= has no effect: torch plans this asynchronous save, of private copies"
    ]
