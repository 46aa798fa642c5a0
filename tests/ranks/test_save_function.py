"""`dcp_mem.save` in real runs: planned once, then recognised, with what torch's planner makes."""

import functools
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
from torch.distributed.checkpoint.state_dict import set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import dcp_mem
from dcp_mem import MemoryStorageWriter, RankFailed
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
    planned,
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
from tests.support.processes import faults
from tests.support.processes.forks import forked_ranks, in_process, on_ranks, raised_by

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


def _planned_by_torch(lines: list[str]) -> list[str]:
    """Why saves were left to torch, besides those that tests compare with."""
    return [reason for reason in why_torch_plans(lines) if TorchPlanner.__name__ not in reason]


# -- what is saved comes back ----------------------------------------------------------------------


def _saves_sharded(places: Places, prefix: str, earlier: list[str]) -> None:
    """Save every sharding as torch does; first load, resharded, what other worlds saved."""
    with places.writer(keep_memory=19) as writer:
        for name in earlier:
            sharded_state_comes_back(places, name)
        rank = dist.get_rank()
        state = {**sharded_state(full_tensor, prefix), **unsharded_items()}
        state[f"own.{rank}"] = torch.full((3,), rank)
        returned = _save(writer, state, prefix)
        by_torch = save_by_torch(state, checkpoint_id=f"{prefix}-by-torch", storage_writer=writer)
        writer.wait(f"{prefix}-by-torch", timeout=60)
        _barrier()
        for name in (prefix, f"{prefix}-by-torch"):
            _came_back(places, name, state, ROADS)
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
    forked_ranks(_saves_sharded, 2, places, "again", ["four", "two"], timeout=100)
    for name in ("two", "four", "again"):
        expected = {**unsharded_state(name, full_tensor), **unsharded_items()}
        for saved in (name, f"{name}-by-torch"):
            comes_back(places, saved, expected)


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


@pytest.mark.parametrize("world", [1, 2, 4])
@on_ranks("world")
def test_training_state_comes_back_and_is_planned_once(places: Places, world: int) -> None:
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
    assert planned(lines) == ["step-0"]


def _trains_and_resumes(places: Places, kinds: list[str]) -> None:
    """Save between steps and train on; resume from the save on every road, to the same bits."""
    with places.writer(keep_memory=9) as writer:
        for kind in kinds:
            model, optimizer = build_model(kind, seed=1)
            train_model(model, optimizer, 0, 2)
            saved = model_state(model, optimizer, 2)
            returned = _save(writer, saved, kind)
            by_torch = save_by_torch(saved, checkpoint_id="by-torch", storage_writer=writer)
            _assert_same_metadata(returned, by_torch)
            train_model(model, optimizer, 2, 2)
            for road in ROADS:
                resumed, its_optimizer = build_model(kind, seed=7)
                state = model_state(resumed, its_optimizer, 0)
                places.load(road, kind, state)
                set_state_dict(
                    resumed,
                    its_optimizer,
                    model_state_dict=state["model"],
                    optim_state_dict=state["optimizer"],
                )
                assert state["step"] == 2
                train_model(resumed, its_optimizer, 2, 2)
                assert_same(
                    model_state(model, optimizer, 4), model_state(resumed, its_optimizer, 4), road
                )


def test_fsdp_training_resumes_bit_for_bit(places: Places) -> None:
    forked_ranks(_trains_and_resumes, 2, places, ["fsdp"], timeout=100)


@pytest.mark.timeout(240)
def test_hybrid_and_tensor_parallel_training_resumes_bit_for_bit(places: Places) -> None:
    forked_ranks(_trains_and_resumes, 4, places, ["hsdp", "tensor-parallel"], timeout=200)


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
    return planned(lines)


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


@in_process
def test_tensors_that_are_not_what_their_pointers_say_are_seen_on_every_save(
    places: Places,
) -> None:
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
    assert planned(lines) == ["plain"]


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
    return planned(lines)


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
    return planned(lines)


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
    return planned(lines)


def test_a_rank_that_goes_to_and_fro_between_two_structures_is_followed_by_the_others(
    places: Places,
) -> None:
    first, second = forked_ranks(
        _saves_with_one_rank_going_to_and_fro, 2, places, env={"DCP_MEM_TIMEOUT": "20"}
    )
    assert first == second
    assert first[:2] == ["0", "1"]


# -- DTensors that change --------------------------------------------------------------------------


@on_ranks(4)
def test_meshes_of_some_of_the_ranks_come_back(places: Places) -> None:
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


# -- when a save returns ---------------------------------------------------------------------------


@on_ranks(2)
def test_a_save_returns_on_no_rank_before_the_checkpoint_is_complete(places: Places) -> None:
    found = []
    slowly = faults.at_point("complete.catalog", lambda: time.sleep(0.5))
    with places.writer(persist=False) as writer, slowly:
        for step in range(2):
            dcp_mem.save(
                {"a": rows_of_five(4), "step": step}, checkpoint_id=f"{step}", storage_writer=writer
            )
            found.append(",".join(entry.name for entry in writer.status() if entry.in_memory))
            _barrier()
    assert found == ["0", "1,0"]


# -- errors ----------------------------------------------------------------------------------------


class _Unsaveable:
    def __reduce__(self) -> Any:
        raise OSError(5, "this one can't be pickled")


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
            assert type(error).__name__ != "NoCommonPlan"
        assert isinstance(first[message], RankFailed), message


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


@in_process
def test_saves_by_other_writers_are_left_to_dcp_and_the_log_says_so_once(tmp_path: Path) -> None:
    directory = str(tmp_path)
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
    (said,) = [line for line in lines if "storage_writer" in line]
    assert said.endswith("leaves saves to dcp.save: the storage_writer isn't a MemoryStorageWriter")
