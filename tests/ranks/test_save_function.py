"""`dcp_mem.save` in real runs: planned once, then recognised, with what torch's planner makes."""

import functools
import inspect
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.utils import _DistWrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import dcp_mem
from dcp_mem import ConfigError, DcpMemError, MemoryStorageWriter, RankFailed
from dcp_mem.common import faults
from dcp_mem.common.faults import POINTS
from dcp_mem.memory.job import JobMemory
from dcp_mem.planning.plan_columns import NotDescribable
from dcp_mem.planning.state_structure import Structure
from dcp_mem.saving.values import NoCommonPlan
from tests.support.checkpoints import sharding
from tests.support.checkpoints.models import (
    build_model,
    full_tensor,
    model_state,
    rows_of_five,
    sharded_state,
    sharded_state_comes_back,
    train_model,
    unsharded_items,
    unsharded_state,
)
from tests.support.checkpoints.plans import (
    TorchPlanner,
    assert_same_content,
    logged,
    save_by_torch,
    why_torch_plans,
)
from tests.support.checkpoints.roundtrip import (
    ROADS,
    Places,
    State,
    assert_same,
    blank_of,
    comes_back,
)
from tests.support.processes.forks import forked, forked_ranks, raised_by

FROM_MEMORY = ("memory", "stock from memory")


# -- helpers of the ranks --------------------------------------------------------------------------


def _save(
    writer: MemoryStorageWriter, state: State, name: str, *, wait: bool = True, **options: Any
) -> Metadata:
    """Save, and wait until it is durable, and all ranks have it; returns what the save returned."""
    metadata = dcp_mem.save(state, checkpoint_id=name, storage_writer=writer, **options)
    _barrier()
    if wait:
        writer.wait(name, timeout=60)
        _barrier()
    return metadata


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def _came_back(
    places: Places, name: str, state: State, roads: tuple[str, ...] = FROM_MEMORY
) -> None:
    """Every rank has loaded it before any goes on."""
    comes_back(places, name, state, roads=roads)
    _barrier()


def _planned(lines: list[str]) -> list[str]:
    """Names of the checkpoints that were planned, going by the log."""
    return [
        line.split()[1] for line in lines if line.startswith("planned ") and " ranks in " in line
    ]


def _planned_by_torch(lines: list[str]) -> list[str]:
    """Why saves were left to torch, besides those that tests compare with."""
    return [reason for reason in why_torch_plans(lines) if TorchPlanner.__name__ not in reason]


# -- what is saved comes back ----------------------------------------------------------------------


def _saves_sharded(places: Places, prefix: str, earlier: list[str]) -> None:
    """Save every sharding as torch does; first load, resharded, what other worlds saved."""
    with places.writer(keep_memory=9) as writer:
        for name in earlier:
            sharded_state_comes_back(places, name, FROM_MEMORY)
        rank = dist.get_rank()
        state = {**sharded_state(full_tensor, prefix), **unsharded_items()}
        state[f"own.{rank}"] = torch.full((3,), rank)
        returned = _save(writer, state, prefix)
        _came_back(places, prefix, state, ("memory", "stock from storage"))
        by_torch = save_by_torch(state, checkpoint_id=f"{prefix}-by-torch", storage_writer=writer)
        stored = {name: places.metadata(name) for name in (prefix, f"{prefix}-by-torch")}
        _assert_same_metadata(returned, by_torch)
        _assert_same_metadata(stored[prefix], stored[f"{prefix}-by-torch"])
        assert returned == stored[prefix]  # on every rank
        _barrier()


def _assert_same_metadata(ours: Metadata, theirs: Metadata) -> None:
    assert_same_content(ours, theirs)
    assert set(ours.storage_data) == set(theirs.storage_data)
    lengths = [
        {index: info.length for index, info in each.storage_data.items()} for each in (ours, theirs)
    ]
    assert lengths[0] == lengths[1]
    assert getattr(ours, "version", None) == getattr(theirs, "version", None)


@pytest.mark.timeout(240)
def test_sharded_state_comes_back_in_any_world_size_and_its_metadata_is_that_of_torch(
    places: Places,
) -> None:
    forked_ranks(_saves_sharded, 2, places, "two", [], timeout=100)
    forked_ranks(_saves_sharded, 4, places, "four", ["two"], timeout=150)
    for name in ("two", "four"):
        expected = {**unsharded_state(name, full_tensor), **unsharded_items()}
        comes_back(places, name, expected, roads=ROADS)


class _Counter:
    """Stateful in torch's sense, with state of its own on each rank."""

    def __init__(self, count: int) -> None:
        self.count, self.history = count, torch.arange(float(count))

    def state_dict(self) -> State:
        return {
            "count": self.count,
            "history": self.history,
            "inner": {"x": torch.full((2,), self.count)},
        }

    def load_state_dict(self, state: State) -> None:
        self.count, self.history = state["count"], state["history"]


def _training_state(step: int) -> State:
    tensors = [
        torch.randn(4, 3, generator=torch.Generator().manual_seed(step + number))
        for number in range(6)
    ]
    return {
        "model": {
            "weight": tensors[0],
            "bias": torch.nn.Parameter(tensors[1]),
            "empty": torch.zeros(0, 3),
        },
        "optimizer": {
            "state": {
                0: {"exp_avg": tensors[2], "step": torch.tensor(step)},
                1: {"exp_avg": tensors[3].bfloat16()},
            },
            "param_groups": [{"lr": 0.1 / (step + 1), "betas": (0.9, 0.99), "params": [0, 1]}],
        },
        "sharded": {"rows": rows_of_five(7, first=step), "scalar": torch.tensor(True)},
        "strided": tensors[4].t(),
        "list": [tensors[5], "text" * step, [1, 2]],
        "tuple": (step, torch.full((3,), step)),
        "nothing": None,
        "deeper": {"a": {"b": {}}},
        f"of.rank.{dist.get_rank()}": {
            "seed": b"\0" * (dist.get_rank() + step),
            "own": torch.full((2,), step),
        },
    }


def _saves_training_state(places: Places) -> list[str]:
    with places.writer(keep_memory=9) as writer, logged() as lines:
        for step in range(4):  # byte items become longer
            state = {**_training_state(step), f"counter.{dist.get_rank()}": _Counter(3)}
            returned = _save(writer, state, f"step-{step}")
            assert returned == places.metadata(f"step-{step}")
            expected = {**state, f"counter.{dist.get_rank()}": _Counter(3).state_dict()}
            _came_back(places, f"step-{step}", expected, ROADS if step == 3 else FROM_MEMORY)
        by_torch = save_by_torch(state, checkpoint_id="by-torch", storage_writer=writer)
        _assert_same_metadata(returned, by_torch)
        counter = _Counter(3)
        counter.count, counter.history = 0, torch.zeros(3)
        key = f"counter.{dist.get_rank()}"
        dcp.load(
            {key: counter}, checkpoint_id="step-3", storage_reader=places.reader("memory", "step-3")
        )
        assert counter.count == 3
        assert torch.equal(counter.history, torch.arange(3.0))
        _barrier()
    assert not _planned_by_torch(lines)
    return _planned(lines)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_training_state_comes_back_and_is_planned_once(places: Places, world: int) -> None:
    assert forked_ranks(_saves_training_state, world, places) == [["step-0"]] * world


def _saves_models(places: Places, kinds: list[str]) -> None:
    with places.writer(keep_memory=9) as writer:
        for kind in kinds:
            model, optimizer = build_model(kind, seed=1)
            for step in range(2):
                train_model(model, optimizer, step, 1)
                state = model_state(model, optimizer, step)
                returned = _save(writer, state, f"{kind}-{step}")
                _came_back(places, f"{kind}-{step}", state)
            _assert_same_metadata(
                returned, save_by_torch(state, checkpoint_id="by-torch", storage_writer=writer)
            )
            _barrier()


@pytest.mark.timeout(240)
def test_models_of_every_parallelism_come_back(places: Places) -> None:
    forked_ranks(_saves_models, 4, places, ["hsdp", "tensor-parallel"], timeout=200)


def _saves_replicated(places: Places) -> list[int]:
    """Bytes of each rank's segment."""
    mesh = init_device_mesh(
        "cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard")
    )
    state: State = {f"plain.{number}": torch.full((1024,), number) for number in range(12)}
    for number in range(12):
        local = torch.full((512, 4), float(number + dist.get_rank() % 2))
        state[f"hybrid.{number}"] = DTensor.from_local(
            local, mesh, [Replicate(), Shard(0)], run_check=False
        )
    with places.writer() as writer:
        _save(writer, state, "a")
        _came_back(places, "a", state, ROADS)
        files = sorted(Path(places.url, "a").glob("*.distcp"))
        _barrier()
    return [file.stat().st_size for file in files]


def test_what_ranks_hold_alike_is_saved_once_and_by_all_of_them(places: Places) -> None:
    payload = 12 * 1024 * 8 + 12 * 1024 * 4 * 4
    for sizes in forked_ranks(_saves_replicated, 4, places):
        assert len(sizes) == 4
        assert payload <= sum(sizes) < payload * 1.2
        assert min(sizes) > payload / 4 * 0.8


def _saves_of_any_sharding(places: Places, seeds: list[int]) -> list[str]:
    """Random worlds, saved twice each, with other values, and loaded by every loader there is."""
    rank, world = dist.get_rank(), dist.get_world_size()
    with places.writer(keep_memory=2) as writer, logged() as lines:
        for seed in seeds:
            parts, mesh_of = sharding.draw(Random(seed), world), sharding.meshes()
            for step in range(2):
                name, state = f"{seed}.{step}", sharding.build(parts, rank, mesh_of, step)
                returned = _save(writer, state, name)
                blank = functools.partial(sharding.build, parts, rank, mesh_of, 99)
                comes_back(places, name, state, blank=blank, roads=FROM_MEMORY if step else ROADS)
                into = blank()
                dcp_mem.load(into, checkpoint_id=name, storage_reader=places.reader("memory", name))
                assert_same(state, into)
                _barrier()
            _assert_same_metadata(
                returned, save_by_torch(state, checkpoint_id="by-torch", storage_writer=writer)
            )
            _barrier()
    assert not _planned_by_torch(lines)
    return _planned(lines)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("world", "seeds"), [(2, [1, 2, 3]), (4, [4, 5, 6]), (8, [7])])
def test_random_shardings_are_planned_once_and_come_back(
    places: Places, world: int, seeds: list[int]
) -> None:
    once = [f"{seed}.0" for seed in seeds]
    assert forked_ranks(_saves_of_any_sharding, world, places, seeds, timeout=200) == [once] * world


def _tensors_that_lie_oddly() -> State:
    """Make tensors that look like plain ones, but whose values aren't those in their memory."""
    values = torch.complex(torch.arange(12.0), torch.arange(12.0) + 1).view(3, 4)
    return {
        "conjugated": {"complex": values.conj()},
        "negated": {"real": torch._neg_view(torch.arange(12.0).view(3, 4))},
        "imaginary part": {"real": values.conj().imag},
        "transposed": {"real": torch.arange(12.0).view(4, 3).t()},
        "expanded": {"real": torch.arange(4.0).expand(3, 4)},
    }


def _saves_odd_tensors(places: Places) -> list[str]:
    plain = {
        "complex": torch.ones(3, 4, dtype=torch.complex64),
        "real": torch.ones(3, 4),
        "step": 1,
    }
    with places.writer() as writer, logged() as lines:
        _save(writer, plain, "plain")
        for number, odd in enumerate(_tensors_that_lie_oddly().values()):
            for state in ({**plain, **odd}, plain):
                _save(writer, state, f"odd-{number}")
                _came_back(places, f"odd-{number}", state)
    return _planned(lines)


def test_tensors_that_are_not_what_their_pointers_say_are_seen_on_every_save(
    places: Places,
) -> None:
    assert forked(_saves_odd_tensors, places) == ["plain"]


# -- changes between saves -------------------------------------------------------------------------


def _saves_with_changes(places: Places) -> list[str]:
    """One rank's part changes at a time."""
    rank = dist.get_rank()

    def base(step: int) -> State:
        return {
            "sharded": rows_of_five(9, first=step),
            "shared": torch.full((17,), float(step)),
            "log": "x" * (step * 1000),
            f"own.{rank}": {"t": torch.full((rank + 2,), step), "b": [step, "y" * (step * rank)]},
        }

    def change(state: State, step: int) -> State:
        own = state[f"own.{rank}"]
        if step in (2, 3) and rank == 1:
            own["new"] = torch.zeros(3)
        elif step == 4 and rank == 0:
            own["t"] = own["t"].double()
        elif step == 5 and rank == 1:
            own["b"] = [torch.ones(2), "now of a tensor"]
        elif step == 6 and rank == 0:
            del state["log"]
        elif step == 7 and rank == 1:
            state = dict(reversed(state.items()))
        elif step == 8 and rank == 0:
            own["t"] = torch.nn.Parameter(own["t"].float())
        elif step in (9, 10):
            state["sharded"] = rows_of_five(8, first=step)
        return state

    with places.writer(keep_memory=2) as writer, logged() as lines:
        for step in range(11):
            state = change(base(step), step)
            returned = _save(writer, state, f"{step}")
            assert returned == places.metadata(f"{step}")
            _came_back(places, f"{step}", state, ROADS if step == 10 else FROM_MEMORY)
    assert not _planned_by_torch(lines)
    return _planned(lines)


def test_a_change_on_one_rank_makes_all_plan_anew(places: Places) -> None:
    first, second = forked_ranks(_saves_with_changes, 2, places)
    assert first == second == ["0", "2", "4", "5", "6", "7", "8", "9"]


def _saves_models_in_turn(places: Places, models: int) -> list[str]:
    with places.writer(keep_memory=models + 1, persist=False) as writer, logged() as lines:
        for step in range(3):
            for model in range(models):
                state = {
                    f"w{model}": rows_of_five(5 + model, first=step),
                    "step": "x" * step,
                    "t": torch.full((3,), model),
                }
                name = f"model-{model}-{step}"
                dcp_mem.save(state, checkpoint_id=name, storage_writer=writer)
                _barrier()
                _came_back(places, name, state, ("memory",))
    return _planned(lines)


@pytest.mark.parametrize("models", [2, 4])
def test_models_saved_in_turn_are_planned_once_each(places: Places, models: int) -> None:
    once = [f"model-{model}-0" for model in range(models)]
    assert forked_ranks(_saves_models_in_turn, 2, places, models) == [once] * 2


def test_more_models_in_turn_than_plans_are_kept_come_back(places: Places) -> None:
    first, second = forked_ranks(_saves_models_in_turn, 2, places, 6)
    assert first == second
    assert set(first) >= {f"model-{model}-0" for model in range(6)}


def _saves_with_one_rank_going_to_and_fro(places: Places) -> list[str]:
    """Rank 0 can't tell by its own state which plan of the two it is."""
    rank = dist.get_rank()
    with places.writer(persist=False) as writer, logged() as lines:
        for step in range(6):
            state: State = {"rows": rows_of_five(5, first=step), "step": "x" * step}
            if rank == 1:
                state["own"] = {"t": torch.full((step % 2 + 1,), step)}
            dcp_mem.save(state, checkpoint_id=f"{step}", storage_writer=writer)
            _barrier()
            _came_back(places, f"{step}", state)
    assert not _planned_by_torch(lines)
    return _planned(lines)


def test_a_rank_that_goes_to_and_fro_between_two_structures_is_followed_by_the_others(
    places: Places,
) -> None:
    first, second = forked_ranks(
        _saves_with_one_rank_going_to_and_fro, 2, places, env={"DCP_MEM_TIMEOUT": "20"}
    )
    assert first == second
    assert first[:2] == ["0", "1"]


def _saves_by_two_writers(places: Places, other: Places) -> list[str]:
    with places.writer() as one, other.writer() as two, logged() as lines:
        for step in range(3):
            state = {"a": rows_of_five(5, first=step), "step": step}
            _save(one, state, f"{step}")
            _save(two, {**state, "b": torch.ones(step + 1)}, f"{step}")
            _came_back(places, f"{step}", state)
            _came_back(other, f"{step}", {**state, "b": torch.ones(step + 1)})
    return _planned(lines)


def test_jobs_saved_in_turn_have_plans_of_their_own(places: Places, tmp_path: Path) -> None:
    other = Places(places.memory, str(tmp_path / "other"), "other-job")
    assert forked_ranks(_saves_by_two_writers, 2, places, other) == [["0", "0", "1", "2"]] * 2


def _saves_on_both_roads_in_turn(places: Places) -> list[str]:
    with places.writer() as writer, logged() as lines:
        for step in range(6):
            state = {
                "a": rows_of_five(5, first=step),
                "step": "x" * step,
                "t": torch.full((step // 4 + 1,), step),
            }
            if step % 2:
                places.save(writer, state, "latest", planner=TorchPlanner())
                _barrier()
            else:
                _save(writer, state, "latest")
            _came_back(places, "latest", state, ROADS)
    return _planned(lines)


def test_one_writer_serves_both_roads(places: Places) -> None:
    assert forked_ranks(_saves_on_both_roads_in_turn, 2, places) == [["latest"] * 2] * 2


def _saves_with_new_writers(places: Places) -> list[str]:
    with logged() as lines:
        for step in range(3):
            with places.writer() as writer:
                state = {"a": rows_of_five(5, first=step), "step": "x" * step}
                _save(writer, state, f"{step}")
                _came_back(places, f"{step}", state)
            if step == 0:
                _barrier()
    return _planned(lines)


def test_a_closed_writer_is_followed_by_another(places: Places) -> None:
    first, second = forked_ranks(_saves_with_new_writers, 2, places)
    assert first == second


# -- DTensors that change --------------------------------------------------------------------------


def _compares_structures_of_dtensors() -> None:
    rank = dist.get_rank()
    flat, other = (
        init_device_mesh("cpu", (2,)),
        init_device_mesh("cpu", (2,), mesh_dim_names=("x",)),
    )
    grid = init_device_mesh("cpu", (1, 2))

    def sharded(
        *shape: int, mesh: Any = flat, placements: Any = None, dtype: Any = torch.float32
    ) -> State:
        local = torch.rand(shape).to(dtype)
        return {
            "a": {"b": DTensor.from_local(local, mesh, placements or [Shard(0)], run_check=False)}
        }

    structure = Structure(sharded(4, 4))
    again = sharded(4, 4)
    assert structure.recognise(again) == [again["a"]["b"]]
    assert structure.plan.offset.tolist() == [[4 * rank, 0]]
    for changed in (
        sharded(4, 4, placements=[Shard(1)]),
        sharded(4, 4, placements=[Replicate()]),
        sharded(4, 4, dtype=torch.float64),
        sharded(3, 4),
        {"a": {"b": torch.rand(8, 4)}},
        {"a": {"b": torch.rand(4, 4)}},
        {"a": {"b": 1}},
    ):
        assert structure.recognise(changed) is None
        assert not Structure(changed).plan.is_same(structure.plan)
        assert Structure(changed).recognise(again) is None
    for same in (
        sharded(4, 4, mesh=grid, placements=[Replicate(), Shard(0)]),
        sharded(4, 4, mesh=other),
        sharded(4, 4, placements=[Shard(-2)]),
    ):
        leaves = structure.recognise(same)
        assert Structure(same).plan.is_same(structure.plan)
        assert leaves is None or leaves == [same["a"]["b"]]
    needs_grad = sharded(4, 4)
    needs_grad["a"]["b"].requires_grad_()
    assert structure.recognise(needs_grad) is None
    assert Structure(needs_grad).plan.table[0].requires_grad
    size = torch.Size((7, 4))
    uneven = DTensor.from_local(
        torch.rand(4, 4), flat, [Shard(0)], run_check=False, shape=size, stride=(4, 1)
    )
    if rank == 1:
        assert structure.recognise({"a": {"b": uneven}}) is None
        assert isinstance(raised_by(lambda: Structure({"a": {"b": uneven}})), NotDescribable)
    partial = DTensor.from_local(torch.rand(4, 4), flat, [Partial()], run_check=False)
    assert isinstance(raised_by(lambda: Structure({"a": {"b": partial}})), ValueError)
    assert structure.recognise({"a": {"b": partial}}) is None


def test_every_change_of_a_dtensor_is_noticed() -> None:
    forked_ranks(_compares_structures_of_dtensors, 2)


def _saves_on_a_mesh_of_some(places: Places) -> None:
    rank = dist.get_rank()
    with places.writer() as writer:
        for step in range(2):
            world = init_device_mesh("cpu", (4,))
            pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))["inner"]
            local = torch.full((2, 3), float(rank + step))
            of_pair = DTensor.from_local(local, pairs, [Shard(0)], run_check=False)
            state = {
                f"pair{rank // 2}": of_pair,
                "all": DTensor.from_local(local, world, [Shard(1)], run_check=False),
            }
            returned = _save(writer, state, f"{step}")
            _came_back(places, f"{step}", state)
        _assert_same_metadata(
            returned, save_by_torch(state, checkpoint_id="by-torch", storage_writer=writer)
        )
        _barrier()


def test_meshes_of_some_of_the_ranks_come_back(places: Places) -> None:
    forked_ranks(_saves_on_a_mesh_of_some, 4, places)


# -- when a save returns ---------------------------------------------------------------------------


def _saves_with_a_slow_leader(places: Places) -> list[str]:
    """What each rank finds in memory right after its save."""
    publish = JobMemory.publish

    def slow(*args: Any, **kwargs: Any) -> None:
        time.sleep(0.5)
        publish(*args, **kwargs)

    JobMemory.publish = slow  # type: ignore[method-assign]
    found = []
    with places.writer(persist=False) as writer:
        for step in range(2):
            dcp_mem.save(
                {"a": rows_of_five(4), "step": step}, checkpoint_id=f"{step}", storage_writer=writer
            )
            found.append(",".join(entry.name for entry in writer.status() if entry.in_memory))
            _barrier()
    return found


def test_a_save_returns_on_no_rank_before_the_checkpoint_is_complete(places: Places) -> None:
    assert forked_ranks(_saves_with_a_slow_leader, 2, places) == [["0", "1,0"]] * 2


def _fails_at_every_point(places: Places) -> dict[str, Exception | None]:
    """Raise at each named point of a save, on either rank; save well before and after each."""
    rank, errors = dist.get_rank(), {}

    def state(step: int) -> State:
        return {
            "rows": rows_of_five(4, first=step),
            f"own.{rank}": torch.full((9,), rank + step),
            "step": step,
        }

    with places.writer(keep_memory=2, persist=False) as writer:
        for good, (point, failing) in enumerate(
            (point, failing) for point in FAILING_POINTS for failing in (0, 1)
        ):
            _save(writer, state(good), f"good-{good}", wait=False)
            if rank == failing:
                faults.arm(f"{point}:raise:1")
            error = raised_by(
                lambda: dcp_mem.save(state(-1), checkpoint_id="bad", storage_writer=writer)
            )
            errors[f"{point} on rank {failing}"] = error
            faults.arm("")
            _barrier()
            _came_back(places, f"good-{good}", state(good))
        _save(writer, state(99), "last", wait=False)
        _came_back(places, "last", state(99))
        job = Path(places.memory, places.job)
        assert len([*job.rglob("*.slot"), *job.rglob("*.distcp")]) <= 2 * (2 + 1), (
            "failed saves have kept their slots"
        )
        _barrier()
    return errors


FAILING_POINTS = [
    point
    for point in POINTS
    if point.partition(".")[0] in ("save", "stage", "complete")
    and point
    not in ("complete.manifest", "complete.evicted", "save.finished")  # it is complete then
]


def test_an_error_at_any_point_before_it_is_complete_fails_the_save_on_every_rank(
    places: Places,
) -> None:
    first, second = forked_ranks(_fails_at_every_point, 2, places, env={"DCP_MEM_TIMEOUT": "30"})
    passed_by_leaders_only = {"complete.catalog on rank 1"}
    silent = {name for name in first if first[name] is None or second[name] is None}
    assert silent == passed_by_leaders_only
    for name in first.keys() - passed_by_leaders_only:
        failing, other = (first, second) if name.endswith("0") else (second, first)
        assert isinstance(failing[name], faults.FaultInjected), name
        assert isinstance(other[name], RankFailed), name


# -- errors ----------------------------------------------------------------------------------------


class _Unsaveable:
    def __reduce__(self) -> Any:
        raise OSError(5, "this one can't be pickled")


class _Raising:
    def state_dict(self) -> State:
        raise KeyError("no state today")

    def load_state_dict(self, state: State) -> None:
        raise AssertionError


def _bad_parts() -> dict[str, State]:
    """What rank 1 alone adds to its state, by a part of the message."""
    return {
        "same flattened name": {"a": {"b": 1}, "a.b": 2},
        "can't be pickled": {"bad": _Unsaveable()},
        "partial placements": {
            "bad": DTensor.from_local(
                torch.ones(2), init_device_mesh("cpu", (2,)), [Partial()], run_check=False
            )
        },
        "cover 10 of 20": {"gap": rows_of_five(4)},
        "overlapping": {"shared": _overlapping()},
        "meta device": {"bad": torch.empty(3, device="meta")},
        "sharded on one rank and not on another": {"t": rows_of_five(4)},
    }


def _overlapping() -> DTensor:
    mesh = init_device_mesh("cpu", (2, 1))
    return DTensor.from_local(torch.ones(4, 5), mesh, [Replicate(), Shard(0)], run_check=False)


def _saves_what_fails_on_one_rank(places: Places) -> dict[str, Exception | None]:
    """Each error between two saves that work."""
    rank, errors = dist.get_rank(), {}
    parts = _bad_parts()
    with places.writer(keep_memory=2) as writer:
        for step, (message, part) in enumerate(parts.items()):
            state = {
                "rows": rows_of_five(6, first=step),
                "shared": rows_of_five(4),
                "t": torch.full((4,), step),
                "step": step,
            }
            _save(writer, state, f"good-{step}")
            bad = {**state, **part} if rank == 1 else state
            save = functools.partial(dcp_mem.save, bad, checkpoint_id="bad", storage_writer=writer)
            errors[message] = raised_by(save)
            _barrier()
            _came_back(places, f"good-{step}", state)
            assert (
                next(entry.name for entry in writer.status() if entry.in_memory) == f"good-{step}"
            )
            _barrier()
    return errors


def test_what_fails_on_one_rank_fails_on_all_and_harms_no_other_save(places: Places) -> None:
    first, second = forked_ranks(
        _saves_what_fails_on_one_rank, 2, places, env={"DCP_MEM_TIMEOUT": "20"}
    )
    assert first.keys() == second.keys()
    for message in first:
        for error in (first[message], second[message]):
            assert error is not None, message
            assert message in str(error)
            assert not isinstance(error, NoCommonPlan)
        assert isinstance(first[message], RankFailed), message


def _saves_raising_objects(places: Places) -> Exception | None:
    state = {"a": rows_of_five(4), "step": 1}
    with places.writer() as writer:
        _save(writer, state, "good")
        bad = {**state, "object": _Raising() if dist.get_rank() == 1 else _Counter(1)}
        error = raised_by(lambda: dcp_mem.save(bad, checkpoint_id="bad", storage_writer=writer))
        _barrier()
        _came_back(places, "good", state)
        _save(writer, state, "after")
        _came_back(places, "after", state)
    return error


def test_an_object_whose_state_dict_raises_on_one_rank_fails_the_save_on_all(
    places: Places,
) -> None:
    first, second = forked_ranks(_saves_raising_objects, 2, places, env={"DCP_MEM_TIMEOUT": "30"})
    assert isinstance(second, KeyError)
    assert isinstance(first, RankFailed)
    assert [rank for rank, _ in first.failures] == [1]
    assert "no state today" in str(first)


def _opens_on_one_rank_only(places: Places, refused: str) -> Exception | None:
    """Open a second writer whose memory root is refused on rank 1, after a good save."""
    state = {"a": rows_of_five(4), "step": 1}
    with places.writer() as writer:
        _save(writer, state, "good")
    _barrier()
    root = refused if dist.get_rank() == 1 else places.memory
    writer = MemoryStorageWriter(places.url, memory_root=root, job=places.job, agent="thread")
    error = raised_by(lambda: dcp_mem.save(state, checkpoint_id="bad", storage_writer=writer))
    _barrier()
    _came_back(places, "good", state)
    with places.writer() as writer:
        _save(writer, state, "after")
        _came_back(places, "after", state)
    return error


def test_memory_that_one_rank_can_not_open_later_on_fails_the_save_on_all(
    places: Places, tmp_path: Path
) -> None:
    refused = tmp_path / "open to all"
    refused.mkdir()
    refused.chmod(0o777)
    first, second = forked_ranks(
        _opens_on_one_rank_only, 2, places, str(refused), env={"DCP_MEM_TIMEOUT": "30"}
    )
    assert isinstance(second, DcpMemError)
    assert not isinstance(second, RankFailed)
    assert isinstance(first, RankFailed)
    assert [rank for rank, _ in first.failures] == [1]


def _calls_wrongly(places: Places) -> list[Exception | None]:
    rank, state = dist.get_rank(), {"a": rows_of_five(4), "step": 1}
    with places.writer(
        keep_memory=1, overwrite=False, memory_limit="32MiB", on_full="raise"
    ) as writer:
        _save(writer, state, "good")
        errors = [
            raised_by(lambda: dcp_mem.save(state, storage_writer=writer)),
            raised_by(lambda: dcp_mem.save(state, checkpoint_id="../x", storage_writer=writer)),
            raised_by(
                lambda: dcp_mem.save(state, checkpoint_id=f"of-{rank}", storage_writer=writer)
            ),
            raised_by(lambda: dcp_mem.save(state, checkpoint_id="good", storage_writer=writer)),
            raised_by(
                lambda: dcp_mem.save(
                    {"b": torch.zeros(16 << 20)}, checkpoint_id="large", storage_writer=writer
                )
            ),
        ]
        _barrier()
        _came_back(places, "good", state)
        _save(writer, state, "after")
        _came_back(places, "after", state)
    return errors


def test_calls_that_can_not_work_raise_the_same_on_all_ranks(places: Places) -> None:
    for errors in forked_ranks(_calls_wrongly, 2, places, env={"DCP_MEM_TIMEOUT": "20"}):
        assert list(map(type, errors)) == [
            ConfigError,
            ConfigError,
            ConfigError,
            dcp_mem.CheckpointExists,
            dcp_mem.MemoryBudgetExceeded,
        ]
        assert "checkpoint_id=" in str(errors[0])


def _saves_without_a_name(places: Places) -> Exception | None:
    with places.writer() as writer:
        return raised_by(lambda: dcp_mem.save({"a": torch.ones(2)}, storage_writer=writer))


def test_a_checkpoint_id_is_needed(places: Places) -> None:
    assert isinstance(forked(_saves_without_a_name, places), ConfigError)
    for error in forked_ranks(_saves_without_a_name, 2, places, env={"DCP_MEM_TIMEOUT": "20"}):
        assert isinstance(error, DcpMemError)
        assert "checkpoint_id=" in str(error)


def _skips(places: Places) -> None:
    state = {"a": rows_of_five(4), "step": 1}
    with places.writer(keep_memory=1, memory_limit="32MiB", on_full="skip") as writer:
        _save(writer, state, "good")
        skipped = dcp_mem.save(
            {"b": torch.zeros(16 << 20)}, checkpoint_id="large", storage_writer=writer
        )
        assert skipped == Metadata({})
        _barrier()
        _came_back(places, "good", state)


def test_a_save_that_is_skipped_returns_empty_metadata(places: Places) -> None:
    forked_ranks(_skips, 2, places)


# -- what is left to torch's planner ---------------------------------------------------------------


class _Subclass(torch.Tensor):
    pass


class _Planner(dcp.DefaultSavePlanner):
    pass


def _saves_by_torch(places: Places) -> list[list[str]]:
    """Reasons, of saves by torch's planner that lie between saves by ours."""
    # An item of a subclass is pickled with its type, and readers restrict types.
    torch.serialization.add_safe_globals([_Subclass])
    rank, reasons = dist.get_rank(), []
    mine = {"t": torch.arange(4.0), "own": torch.arange(3)}
    subclass = {
        **mine,
        "own": torch.arange(3).as_subclass(_Subclass) if rank == 1 else torch.arange(3),
    }
    cases: list[tuple[State, Callable[[], State] | None, dict[str, Any]]] = [
        (subclass, lambda: blank_of(mine), {}),
        (mine, None, {"planner": _Planner()}),
        (mine, None, {"planner": dcp.DefaultSavePlanner(flatten_state_dict=False)}),
        (mine, None, {"planner": dcp.DefaultSavePlanner()}),
    ]
    with places.writer() as writer, logged() as lines:
        for number, (state, blank, options) in enumerate(cases):
            for step in range(2):
                _save(writer, {"rows": rows_of_five(6), "step": step}, "latest")
                _came_back(places, "latest", {"rows": rows_of_five(6), "step": step})
                lines.clear()
                _save(writer, state, f"{number}-{step}", **options)
                reasons.append(_planned_by_torch(lines))
                expected = mine if state is subclass else state
                comes_back(places, f"{number}-{step}", expected, blank=blank, roads=FROM_MEMORY)
                _barrier()
    return reasons


def test_what_only_torch_can_plan_goes_to_torch_on_all_ranks_and_the_log_says_why(
    places: Places,
) -> None:
    first, second = forked_ranks(_saves_by_torch, 2, places, env={"DCP_MEM_TIMEOUT": "20"})
    assert first == second
    assert [len(reasons) for reasons in first] == [1, 0] * 3 + [0, 0]  # each reason once
    texts = [reasons[0] for reasons in first[:6:2]]
    for text, part in zip(texts, ["rank 1 has a", "_Planner", "doesn't flatten"], strict=True):
        assert part in text
    assert "_Subclass" in texts[0]


def _saves_without_collectives(places: Places) -> list[str]:
    rank = dist.get_rank()
    with places.writer() as writer, logged() as lines:
        for step in range(2):
            state = {"w": torch.full((7 + rank,), rank + step), f"only.{rank}": torch.arange(3)}
            dcp_mem.save(
                state, checkpoint_id=f"{step}", storage_writer=writer, use_collectives=False
            )
            _barrier()
            assert_same(state, places.load("memory", f"{step}", blank_of(state)))
            _barrier()
    return _planned_by_torch(lines)


@pytest.mark.skipif(
    "use_collectives" not in inspect.signature(dcp.save).parameters,
    reason="no use_collectives here",
)
def test_saves_without_collectives_are_left_to_torch(places: Places) -> None:
    assert forked_ranks(_saves_without_collectives, 2, places) == [["use_collectives=False"]] * 2


def _saves_by_another_writer(directory: str) -> list[str]:
    state = {"a": torch.arange(3.0), "step": 1}
    with logged() as lines:
        dcp_mem.save(state, checkpoint_id=f"{directory}/a")
        dcp_mem.save(
            state,
            checkpoint_id=f"{directory}/b",
            storage_writer=dcp.FileSystemWriter(f"{directory}/b"),
        )
    for name in "ab":
        into = blank_of(state)
        dcp.load(into, storage_reader=dcp.FileSystemReader(f"{directory}/{name}"))
        assert_same(state, into)
    return [line for line in lines if "storage_writer" in line]


def test_saves_by_other_writers_are_left_to_dcp_and_the_log_says_so_once(tmp_path: Path) -> None:
    (said,) = forked(_saves_by_another_writer, str(tmp_path))
    assert said.endswith("leaves saves to dcp.save: the storage_writer isn't a MemoryStorageWriter")


# -- which ranks save together ---------------------------------------------------------------------


def _saves_alone(places: Places) -> list[str]:
    with places.writer() as writer, logged() as lines:
        for step in range(3):
            state = {
                "w": torch.full((5,), step),
                "nested": {"t": torch.ones(2, 0)},
                "step": "x" * step,
            }
            returned = _save(writer, state, f"{step}")
            _came_back(places, f"{step}", state, ROADS)
        _assert_same_metadata(
            returned, save_by_torch(state, checkpoint_id="by-torch", storage_writer=writer)
        )
    return _planned(lines)


def test_a_process_without_a_group_saves(places: Places) -> None:
    assert forked(_saves_alone, places) == ["0"]


def test_a_world_of_one_saves(places: Places) -> None:
    assert forked_ranks(_saves_alone, 1, places) == [["0"]]


def _saves_each_rank_alone(places: Places) -> list[str]:
    rank = dist.get_rank()
    with places.writer(keep_memory=8) as writer, logged() as lines:
        for step in range(3):
            name = f"rank-{rank}-step-{step}"
            state = {
                "w": torch.full((7,), rank * 10.0 + step),
                "rank": rank,
                f"own.{rank}": {"part": rows_of_five(6)},
            }
            dcp_mem.save(state, checkpoint_id=name, storage_writer=writer, no_dist=True)
            writer.wait(name, timeout=60)
            for road in ROADS:
                assert_same(state, places.load(road, name, blank_of(state), no_dist=True), road)
        _barrier()
        other = {"w": torch.full((7,), (1 - rank) * 10.0 + 2), "rank": 1 - rank}
        assert_same(
            other, places.load("memory", f"rank-{1 - rank}-step-2", blank_of(other), no_dist=True)
        )
        _barrier()
        together = {"all": rows_of_five(5), "step": 1}
        _save(writer, together, "together")
        _came_back(places, "together", together)
    return _planned(lines)


@pytest.mark.skipif(
    "no_dist" not in inspect.signature(dcp.save).parameters, reason="no no_dist here"
)
def test_ranks_save_each_on_its_own_without_dist(places: Places) -> None:
    for rank, planned in enumerate(forked_ranks(_saves_each_rank_alone, 2, places)):
        assert planned == [f"rank-{rank}-step-0", "together"]


def _saves_in_a_sub_group(places: Places, members: list[int]) -> list[str]:
    group, rank = dist.new_group(members), dist.get_rank()
    if rank not in members:
        return ["stood aside"]
    state = {"w": torch.full((10,), 3.0), f"own.{rank}": torch.full((5,), rank)}
    with logged() as lines:
        for given in (None, group):
            with places.writer(process_group=given) as writer:
                for step in range(2):
                    options = {"process_group": group} if given is None else {}
                    dcp_mem.save(
                        state, checkpoint_id=f"step-{step}", storage_writer=writer, **options
                    )
                    dist.barrier(group)
                    writer.wait(f"step-{step}", timeout=60)
                    dist.barrier(group)
                    for road in FROM_MEMORY:
                        assert_same(
                            state,
                            places.load(road, f"step-{step}", blank_of(state), process_group=group),
                        )
                    dist.barrier(group)
    return _planned(lines)


@pytest.mark.parametrize("members", [[0, 2], [1, 2]], ids=str)
def test_a_sub_group_saves_while_other_ranks_stand_aside(
    places: Places, members: list[int]
) -> None:
    if 0 not in members and not hasattr(_DistWrapper(None, False, 0), "global_coordinator_rank"):
        pytest.skip(f"torch {torch.__version__} wants rank 0 in every group that loads")
    outcomes = forked_ranks(_saves_in_a_sub_group, 3, places, members)
    for rank, planned in enumerate(outcomes):
        assert planned[:1] == (["step-0"] if rank in members else ["stood aside"])
    comes_back(
        places,
        "step-1",
        {"w": torch.full((10,), 3.0), **{f"own.{r}": torch.full((5,), r) for r in members}},
    )
