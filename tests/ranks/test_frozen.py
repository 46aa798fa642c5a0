"""What is frozen lies in memory once, and no checkpoint is stale, whatever was declared."""

import dataclasses
import gc
import inspect
import json
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import dcp_mem
from dcp_mem import CheckpointManager, MemoryStorageWriter, TrainState
from tests.support.checkpoints.frozen import (
    State,
    assert_holds,
    base_and_adapter,
    frozen_inodes,
    frozen_links,
    save,
)
from tests.support.checkpoints.held import (
    rejected_in,
    sizes_in,
    unlucky_samples,
    wait_for_comparisons,
)
from tests.support.checkpoints.jobs import Job, occupied, wait_for_spare_slots, wait_until
from tests.support.checkpoints.plans import TorchPlanner
from tests.support.command import command
from tests.support.processes import faults
from tests.support.processes.forks import forked, forked_ranks, forking, on_ranks, raised_by

pytestmark = pytest.mark.timeout(120)

BASE_NBYTES, ADAPTER_NBYTES = 6 << 20, 2 << 20


def make_state() -> State:
    """Three tensors of a base, one of them small, and an adapter."""
    return base_and_adapter(
        base_a=(1 << 20,), base_b=(512, 1000), base_c=(3,), adapter=(ADAPTER_NBYTES // 4,)
    )


def evict(job: Job, step: int) -> int:
    """Take a checkpoint out of memory; return the bytes that left with it."""
    options = ["--memory-root", job.memory, "--job", "job", "--yes", "--json"]
    result = command("rm", "-", f"step-{step}", *options)
    (removed,) = json.loads(result.stdout)["removed"]
    return int(removed["freed_bytes"])


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


PLANNERS: dict[str, Callable[[], DefaultSavePlanner | None]] = {
    "of the user's": Own,
    "with a cache": lambda: Own(enable_plan_caching=True),
    "that doesn't flatten": lambda: DefaultSavePlanner(flatten_state_dict=False),
    "that describes by itself": Describing,
}


def _saving(road: str) -> Callable[..., Any]:
    """A save on a road, or with a planner of PLANNERS."""
    if road in PLANNERS:
        return partial(save, road="dcp.save", planner=PLANNERS[road]())
    return partial(save, road=road)


# -- one copy --------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [1, 2, 3])
@pytest.mark.parametrize("road", ["dcp_mem.save", "dcp.save", *PLANNERS])
def test_checkpoints_share_one_copy(memory_job: Job, keep: int, road: str) -> None:
    state = make_state()
    save_it = _saving(road)
    with memory_job.writer(frozen="base.*", keep_memory=keep, agent="thread") as writer:
        for step in range(1, 2 * keep + 4):
            metadata = save_it(writer, state, step)
            segments = {info.relative_path[:5] for info in metadata.storage_data.values()}
            assert segments == {"__0_0", "__0_1"}
            assert_holds(memory_job, state, step)
            assert len(frozen_inodes(memory_job)) == 1
        kept = list(memory_job.directory.glob("step-*"))
        assert len(kept) == keep
        assert frozen_links(memory_job, step) == keep
        wait_for_spare_slots()
        most = BASE_NBYTES + (keep + 1) * (ADAPTER_NBYTES + (4 << 20)) + (1 << 20)
        assert occupied(memory_job.directory) <= most


def test_what_leaves_with_a_checkpoint_is_what_no_other_shares(memory_job: Job) -> None:
    state = make_state()
    with memory_job.writer(frozen="base.*", agent="thread") as writer:
        for step in (1, 2):
            save(writer, state, step)
        assert sum(sizes_in(memory_job.directory / "step-2").values()) > BASE_NBYTES
        assert evict(memory_job, 1) < BASE_NBYTES
        assert frozen_links(memory_job, 2) == 1
        assert_holds(memory_job, state, 2)
        save(writer, state, 3)
        assert_holds(memory_job, state, 3)


def test_a_segment_stays_shared_after_all_its_checkpoints_were_evicted(memory_job: Job) -> None:
    state = make_state()
    with memory_job.writer(frozen="base.*", agent="thread") as writer:
        save(writer, state, 1)
        (inode,) = frozen_inodes(memory_job)
        evict(memory_job, 1)
        save(writer, state, 2)
        assert frozen_inodes(memory_job) == {inode}
        assert_holds(memory_job, state, 2)


def test_a_restarted_process_copies_once_and_shares_again(memory_job: Job) -> None:
    state = make_state()
    for first in (1, 4):
        with memory_job.writer(frozen="base.*", agent="thread") as writer:
            for step in range(first, first + 3):
                save(writer, state, step)
            assert len(frozen_inodes(memory_job)) == 1
        assert_holds(memory_job, state, first + 2)


def test_checksums_are_carried_over_to_checkpoints_that_share(memory_job: Job) -> None:
    state = make_state()

    def has_checksums(step: int) -> bool:
        directory = memory_job.directory / f"step-{step}"
        segments = list(directory.glob("__*.distcp"))
        found = list((directory / ".dcp_mem").glob("checksums-*.json"))
        return len(segments) == 2 == len(found)

    with memory_job.writer(frozen="base.*", agent="thread", on_nonfinite="warn") as writer:
        for step in (1, 2, 3):
            save(writer, state, step)
            wait_until(lambda: has_checksums(step))  # noqa: B023
        (segment,) = (memory_job.directory / "step-3").glob("__0_1-*.distcp")
        with segment.open("r+b") as file:
            file.seek(BASE_NBYTES // 2)
            byte = file.read(1)[0]
            file.seek(BASE_NBYTES // 2)
            file.write(bytes([byte ^ 1]))
        out = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        error = raised_by(
            lambda: dcp_mem.load(
                out, checkpoint_id="step-3", storage_reader=memory_job.reader(verify=True)
            )
        )
        assert error is not None
        assert "CRC32C" in str(error)


def test_each_stored_checkpoint_is_whole_without_the_others(job: Job, tmp_path: Path) -> None:
    state = make_state()
    with job.writer(frozen="base.*", agent="thread", on_slow_storage="all") as writer:
        for step in (1, 2, 3):
            save(writer, state, step)
            writer.wait(f"step-{step}", timeout=60)
    for step in (1, 2):
        for path in (tmp_path / "run" / f"step-{step}").rglob("*"):
            if path.is_file():
                path.unlink()
    state["adapter"].fill_(3)
    assert_holds(job, state, 3, root=tmp_path / "run")


def test_async_saves_share(memory_job: Job) -> None:
    state = make_state()
    places: dict[str, Any] = {"memory_root": memory_job.memory, "job": "job", "agent": "thread"}
    with CheckpointManager(None, async_save=True, frozen="base.*", **places) as manager:
        for step in range(1, 6):
            state["adapter"].fill_(step)
            if step == 4:
                state["base.b"].data.mul_(2)
            assert manager.save(step, dict(state))
            manager.wait(state="complete")
            assert_holds(memory_job, state, step)
        assert frozen_links(memory_job, 5) == 2


# -- wrong declarations ----------------------------------------------------------------------------


def _through_data(tensor: torch.Tensor) -> None:
    tensor.data[:] = 5


def _through_a_view(tensor: torch.Tensor) -> None:
    tensor.view(-1)[: tensor.numel() // 2].add_(1)


def _through_numpy(tensor: torch.Tensor) -> None:
    tensor.numpy()[:] += 1


def _through_the_storage(tensor: torch.Tensor) -> None:
    torch.empty(0).set_(tensor.untyped_storage()).mul_(3)


def _in_another_thread(tensor: torch.Tensor) -> None:
    thread = threading.Thread(target=lambda: tensor.data.mul_(2))
    thread.start()
    thread.join()


def _one_value(tensor: torch.Tensor) -> None:
    tensor.view(-1)[7] = 9


WRITES = [
    _through_data,
    _through_a_view,
    _through_numpy,
    _through_the_storage,
    _in_another_thread,
    _one_value,
]


@pytest.mark.parametrize("write", WRITES, ids=lambda one: one.__name__)
@pytest.mark.parametrize("name", ["base.a", "base.c"])
def test_a_write_to_what_was_declared_frozen_is_in_the_next_checkpoint(
    memory_job: Job,
    write: Callable[[torch.Tensor], None],
    name: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if name == "base.c" and write is _one_value:
        pytest.skip("it has three values")
    state = make_state()
    with memory_job.writer(frozen="base.*", agent="thread", keep_memory=3) as writer:
        for step in (1, 2):
            save(writer, state, step)
        before = {key: tensor.clone() for key, tensor in state.items()}
        write(state[name])
        save(writer, state, 3)
        assert_holds(memory_job, state, 3)
        assert_holds(memory_job, before, 2)
        assert [name in line for line in caplog.messages if "declared frozen" in line] == [True]
        save(writer, state, 4)
        assert frozen_links(memory_job, 4) == 2
        assert_holds(memory_job, state, 4)


@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict_is_in_the_next_checkpoint(memory_job: Job, assign: bool) -> None:
    model = nn.Sequential(nn.Linear(1024, 512), nn.Linear(4, 4))
    with memory_job.writer(frozen=["0.*"], agent="thread") as writer:

        def save_model(step: int) -> None:
            dcp_mem.save(model.state_dict(), checkpoint_id=f"step-{step}", storage_writer=writer)

        save_model(1)
        for step in (2, 3):
            other = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
            model.load_state_dict(other, assign=assign)
            del other
            gc.collect()
            save_model(step)
            assert_holds(memory_job, dict(model.state_dict()), step)


def test_a_write_that_samples_miss_is_found_by_the_whole_comparison(
    memory_job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    state = make_state()
    options: dict[str, Any] = {"keep_memory": 10, "persist": False}
    with unlucky_samples(), memory_job.writer(frozen="base.*", agent="thread", **options) as writer:
        # Of eight that share since the last comparison, step-9 is the last, and then step-17.
        for step in range(1, 18):
            if step == 10:
                assert not rejected_in(memory_job.directory)
                state["base.a"].data[12345] = 77
            save(writer, state, step)
            wait_for_comparisons()
        stale = [f"step-{step}" for step in range(10, 18)]
        assert rejected_in(memory_job.directory) == set(stale)
        assert any(", ".join(stale) in line for line in caplog.messages)
        save(writer, state, 18)
        assert_holds(memory_job, state, 18)
        assert "step-18" not in rejected_in(memory_job.directory)


def test_checkpoints_for_storage_are_compared_in_whole(job: Job) -> None:
    state = make_state()
    with unlucky_samples(), job.writer(frozen="base.*", agent="thread") as writer:
        save(writer, state, 1)
        state["base.a"].data[12345] = 77
        save(writer, state, 2)
        wait_for_comparisons()
        (why,) = (job.directory / "step-2" / ".dcp_mem").glob("rejected-*.json")
        assert "base.a" in why.read_text()


def test_what_changes_time_and_again_counts_as_training(
    memory_job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    state = make_state()
    with memory_job.writer(frozen="base.*", agent="thread") as writer:
        for step in range(1, 8):
            state["base.b"].add_(1)
            save(writer, state, step)
            assert_holds(memory_job, state, step)
        assert frozen_links(memory_job, 7) == 2  # base.a is shared
        assert len([line for line in caplog.messages if "declared frozen" in line]) == 2


@pytest.mark.parametrize("road", ["dcp_mem.save", "of the user's"])
def test_tensors_thaw_and_freeze(memory_job: Job, road: str) -> None:
    state, frozen, save_it = make_state(), {"base.a", "base.b"}, _saving(road)
    with memory_job.writer(
        frozen=lambda name, _: name in frozen, agent="thread", keep_memory=3
    ) as writer:
        for step in range(1, 10):
            if step == 3:
                frozen.discard("base.b")
            if step > 3:
                state["base.b"].mul_(1.5) if step < 7 else None
            if step == 7:
                frozen.add("base.b")
            save_it(writer, state, step)
            assert_holds(memory_job, state, step)
        assert frozen_links(memory_job, 9) == 3


def test_a_train_state_proposes_the_parameters_that_do_not_train(memory_job: Job) -> None:
    model = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024), nn.BatchNorm1d(1024))
    model[0].requires_grad_(False)
    app = TrainState(model, torch.optim.SGD(model[1].parameters(), 0.1))
    with memory_job.writer(frozen=app.is_frozen, agent="thread") as writer:

        def saved(step: int) -> tuple[int, set[int]]:
            """Save; return the size and the inodes of the frozen segments."""
            dcp_mem.save({"app": app}, checkpoint_id=f"step-{step}", storage_writer=writer)
            sizes = sizes_in(memory_job.directory / f"step-{step}")
            (second,) = [nbytes for file, nbytes in sizes.items() if file.startswith("__0_1-")]
            return second >> 20, frozen_inodes(memory_job)

        assert saved(1)[0] == saved(2)[0] == 4
        assert len(saved(3)[1]) == 1
        model[1].requires_grad_(False)
        assert saved(4)[0] == 8
        model[0].requires_grad_(True)
        assert saved(5)[0] == 4


def test_with_parity_it_has_no_effect(memory_job: Job, caplog: pytest.LogCaptureFixture) -> None:
    state = make_state()
    with memory_job.writer(frozen="base.*", redundancy=dcp_mem.parity(2), agent="thread") as writer:
        for step in (1, 2):
            for road in ("dcp_mem.save", "dcp.save"):
                save(writer, state, 2 * step + (road == "dcp.save"), road)
        _save_as_torch_plans(writer, state)
    assert not frozen_inodes(memory_job)
    assert [line for line in caplog.messages if "frozen= has no effect" in line] == [
        "frozen= has no effect: parity is made of all bytes of a checkpoint, and anew each time"
    ]


def _save_as_torch_plans(writer: MemoryStorageWriter, state: State) -> None:
    planner = DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(state, checkpoint_id="step-9", storage_writer=writer, planner=planner)


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(["base.a", "base.b", "base.c"]),
            st.sampled_from(WRITES[:-1]),
            max_size=2,
        ),
        min_size=1,
        max_size=5,
    ),
    st.integers(1, 3),
)
def test_any_changes_between_saves_are_in_the_checkpoint(
    memory_job: Job, changes: list[dict[str, Callable[[torch.Tensor], None]]], keep: int
) -> None:
    state = make_state()
    with memory_job.writer(
        frozen="base.*", agent="thread", keep_memory=keep, overwrite=True
    ) as writer:
        save(writer, state, 1)
        for step, change in enumerate(changes, 2):
            for name, write in change.items():
                write(state[name])
            save(writer, state, step)
            assert_holds(memory_job, state, step)


# -- planners of the user --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", PLANNERS)
@pytest.mark.parametrize("past_the_counter", [False, True])
def test_a_wrong_declaration_is_found_whoever_plans(
    memory_job: Job, kind: str, past_the_counter: bool
) -> None:
    state, planner = make_state(), PLANNERS[kind]()
    with memory_job.writer(frozen="base.*", agent="thread") as writer:
        for step in range(1, 5):
            if step == 3:
                one = state["base.b"]
                (one.data if past_the_counter else one).add_(1)
            save(writer, state, step, "dcp.save", planner=planner)
            assert_holds(memory_job, state, step)
        state["base.a"] = state["base.a"] + 1  # another tensor in its place
        save(writer, state, 5, "dcp.save", planner=planner)
        assert_holds(memory_job, state, 5)


def test_roads_share_with_each_other(memory_job: Job) -> None:
    state = make_state()
    with memory_job.writer(frozen="base.*", agent="thread", keep_memory=4) as writer:
        for step, planner in enumerate((Own(), None, Own(), DefaultSavePlanner()), 1):
            save(writer, state, step, "dcp.save", planner=planner)
            assert_holds(memory_job, state, step)
        assert [frozen_links(memory_job, step) for step in range(1, 5)] == [4] * 4


def test_a_planner_that_makes_its_tensors_anew_shares_nothing_and_says_so(
    memory_job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    state = {name: value.round() for name, value in make_state().items()}
    with memory_job.writer(frozen="base.*", agent="thread") as writer:
        for step in (1, 2):
            save(writer, state, step, "dcp.save", planner=Casting())
            assert_holds(memory_job, {name: one.half() for name, one in state.items()}, step)
    assert not frozen_inodes(memory_job)
    told = [line for line in caplog.messages if "frozen= has no effect" in line]
    assert told == ["frozen= has no effect: Casting makes the tensors of each save anew"]


def test_tensors_that_are_others_each_time_count_as_training(
    memory_job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    state = {name: value.round() for name, value in make_state().items()}
    with memory_job.writer(frozen="base.*", agent="thread", persist=False) as writer:
        for step in range(1, 6):
            state["base.a"].data.add_(1)
            save(writer, state, step, "dcp.save", planner=CastingAhead())
            assert_holds(memory_job, {name: one.half() for name, one in state.items()}, step)
    assert sum("declared frozen" in line for line in caplog.messages) == 2
    assert not frozen_inodes(memory_job)


# -- ranks that save alone ------------------------------------------------------------------------

needs_no_collectives = pytest.mark.skipif(
    "use_collectives" not in inspect.signature(dcp.save).parameters,
    reason=f"torch {torch.__version__} has no use_collectives",
)


@needs_no_collectives
@on_ranks(2)
def test_ranks_that_save_alone_share_each_by_itself(memory_job: Job) -> None:
    state, rank, found = make_state(), dist.get_rank(), []
    with memory_job.writer(frozen="base.*", agent="thread") as writer:
        for step in range(1, 5):
            if step == 3 and rank:
                state["base.a"].data.add_(1)
            save(writer, state, step, "dcp.save", planner=None, use_collectives=False)
            dist.barrier()
            out = {name: torch.full_like(value, -1) for name, value in state.items()}
            dcp.load(out, checkpoint_id=f"step-{step}", storage_reader=memory_job.reader())
            found.append(all(torch.equal(out[name], state[name]) for name in state))
            dist.barrier()
        found.append([frozen_links(memory_job, step, rank) for step in (3, 4)] == [2, 2])
        dist.barrier()
    assert found == [True] * 5


@needs_no_collectives
@pytest.mark.parametrize(
    "options", [{"use_collectives": False}, {"planner": Own()}], ids=["alone", "planner"]
)
def test_copies_of_an_asynchronous_save_share_nothing_and_say_so(
    memory_job: Job, caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    state = make_state()
    with memory_job.writer(frozen="base.*", agent="thread") as writer:
        for step in (1, 2, 3):
            state["adapter"].fill_(step)
            name = f"step-{step}"
            begun = dcp.async_save(state, checkpoint_id=name, storage_writer=writer, **options)
            assert isinstance(begun, Future)
            begun.result()
            if "planner" in options:
                assert_holds(memory_job, state, step)
    assert not frozen_inodes(memory_job)
    assert [line for line in caplog.messages if "frozen" in line] == [
        "frozen= has no effect: torch plans this asynchronous save, of private copies"
    ]


# -- several ranks, kills and failures -------------------------------------------------------------


def _sharded(base: torch.Tensor) -> torch.Tensor:
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (size,))
    return DTensor.from_local(base.chunk(size)[rank].clone(), mesh, [Shard(0)])


def _save_on_ranks(job: Job, roads: tuple[str, str]) -> list[bool]:
    state = {**make_state(), "base.a": _sharded(make_state()["base.a"].repeat(2))}
    inodes, equal = [], []
    with job.writer(frozen="base.*", agent="thread") as writer:
        planner = TorchPlanner() if roads[0] == "torch's planner" else None
        writer.prepare(state, planner).wait()
        for step in range(1, 6):
            if step == 4 and dist.get_rank() == 1:
                state["base.a"].to_local().data.add_(1)  # type: ignore[attr-defined]
            save(writer, state, step, roads[step % 2])
            out = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
            dcp_mem.load(out, checkpoint_id=f"step-{step}", storage_reader=job.reader())
            equal.append(all(_is_equal(out[name], state[name]) for name in state))
            mine = list((job.directory / f"step-{step}").glob(f"__{dist.get_rank()}_1-*"))
            inodes.append([one.stat().st_ino for one in mine])
            dist.barrier()
    changed = [one != other for one, other in pairwise(inodes)]
    return [all(equal), *changed]


def _is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    here, there = (each.to_local() if isinstance(each, DTensor) else each for each in (one, other))
    return torch.equal(here, there)


@pytest.mark.parametrize("roads", [("dcp_mem.save", "dcp.save"), ("torch's planner",) * 2], ids=str)
def test_each_rank_shares_by_itself(memory_job: Job, roads: tuple[str, str]) -> None:
    first, second = forked_ranks(_save_on_ranks, 2, memory_job, roads)
    assert first == [True, False, False, False, False]
    assert second == [True, False, False, True, False]
    whole = torch.zeros(2 << 20)
    dcp.load({"base.a": whole}, checkpoint_id=str(memory_job.directory / "step-5"))
    base = make_state()["base.a"]
    assert torch.equal(whole[: 1 << 20], base)
    assert torch.equal(whole[1 << 20 :], base + 1)


POINTS = ["frozen.sealed", "stage.sealed", "complete.receipts", "complete.catalog"]


def _connections() -> set[tuple[Any, Any]]:
    """The connections of this process, by their two ends."""
    found = psutil.Process().net_connections("tcp")
    return {(one.laddr, one.raddr) for one in found if one.status == psutil.CONN_ESTABLISHED}


@pytest.mark.parametrize("road", ["dcp_mem.save", "torch's planner"])
@on_ranks(2, env={"DCP_MEM_TIMEOUT": "30"})
def test_a_save_that_fails_on_one_rank_leaves_no_link(memory_job: Job, road: str) -> None:
    state = make_state()
    state["base.a"] = _sharded(state["base.a"].repeat(2))
    outcomes = []
    with memory_job.writer(frozen="base.*", agent="thread") as writer:
        save(writer, state, 1, road)
        for number, point in enumerate(POINTS):
            save(writer, state, 10 * number + 2, road)
            if dist.get_rank() == number % 2:
                faults.arm(f"{point}:raise:1")
            before = _connections()
            failed = raised_by(lambda: save(writer, state, 10 * number + 3, road))  # noqa: B023
            faults.arm("")
            outcomes.append(failed is not None)
            if (
                "sealed" in point and road == "dcp_mem.save"
            ):  # all ranks have been told, so none has left the others
                assert before <= _connections()
            save(writer, state, 10 * number + 4, road)
            dist.barrier()
        rank = dist.get_rank()
        mine = {path.stat() for path in memory_job.directory.glob(f"step-*/__{rank}_1-*.distcp")}
        outcomes += [one.st_nlink == 2 for one in mine]
        dist.barrier()
    # The catalog's point is passed by the leader alone, on rank 0; here rank 1 is armed.
    assert outcomes[:3] == [True, True, True]
    assert all(outcomes[4:])


KILLS = ["frozen.copied", "frozen.sealed", "stage.sealed", "complete.receipts", "complete.manifest"]


def _save_until_killed(job: Job, point: str, changes: bool) -> None:
    state = make_state()
    with job.writer(frozen="base.*", agent="thread", persist=False) as writer:
        for step in (1, 2, 3):
            save(writer, state, step)
        if changes:
            state["base.a"].add_(4)
        faults.arm(f"{point}:kill:1")
        save(writer, state, 4)


def _go_on(job: Job, changes: bool) -> int:
    state = make_state()
    out = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    with job.reader() as reader:
        dcp_mem.load(out, storage_reader=reader)
    found = int(out["adapter"][0])
    if changes and found == 4:
        state["base.a"].add_(4)
    state["adapter"].fill_(found)
    assert all(torch.equal(out[name], state[name]) for name in state)
    with job.writer(frozen="base.*", agent="thread", persist=False) as writer:
        for step in (5, 6, 7, 8):
            save(writer, state, step)
            assert_holds(job, state, step)
        assert len(frozen_inodes(job)) == 1
        wait_for_spare_slots()
    return found


@pytest.mark.parametrize("changes", [False, True])
@pytest.mark.parametrize("point", KILLS)
def test_a_kill_loses_at_most_what_is_staged(memory_job: Job, point: str, changes: bool) -> None:
    if point == "frozen.copied" and not changes:
        pytest.skip("nothing is copied")
    with forking(_save_until_killed, None, memory_job, point, changes) as processes:
        process = processes._processes[0]
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
    found = forked(_go_on, memory_job, changes)
    assert found == (4 if point == "complete.manifest" else 3)
    slots = [path.stat() for path in (memory_job.directory / ".slots").iterdir()]
    assert all(one.st_nlink == 1 for one in slots)
