"""Several ranks: sharded state of every kind, other world sizes, groups, and ranks that fail."""

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.state_dict import set_state_dict
from torch.distributed.checkpoint.utils import _DistWrapper

from dcp_mem import MemoryStorageWriter
from tests.support.checkpoints.models import (
    build_model,
    full_tensor,
    model_state,
    sharded_state,
    sharded_state_comes_back,
    train_model,
    unsharded_items,
    unsharded_state,
)
from tests.support.checkpoints.plans import SAVES, TorchPlanner
from tests.support.checkpoints.roundtrip import (
    ROADS,
    Places,
    State,
    assert_same,
    blank_of,
    comes_back,
)
from tests.support.private import private_directory
from tests.support.processes import faults
from tests.support.processes.faults import POINTS
from tests.support.processes.forks import forked_ranks, raised_by

# -- sharded state ---------------------------------------------------------------------------------


def _saves_sharded(places: Places, prefix: str, earlier: list[str]) -> None:
    """Save every sharding; first load, resharded, what smaller or larger worlds have saved."""
    with places.writer(keep_memory=9) as writer:
        for name in earlier:
            sharded_state_comes_back(places, name)
        state = {**sharded_state(full_tensor, prefix), **unsharded_items()}
        state[f"own.{dist.get_rank()}"] = torch.full((3,), dist.get_rank())
        _save(places, writer, state, prefix, planner=TorchPlanner())
        comes_back(places, prefix, state)


def _save(
    places: Places, writer: MemoryStorageWriter, state: State, name: str, **options: Any
) -> None:
    places.save(writer, state, name, **options)
    # From here on it is durable for all ranks; and no rank saves before all have loaded.
    dist.barrier(options.get("process_group"))


def _in_turn(step: int) -> dcp.DefaultSavePlanner | None:
    """The planner of a save: dcp_mem plans in turn with torch."""
    return TorchPlanner() if step % 2 else None


@pytest.mark.timeout(240)
def test_sharded_state_comes_back_in_any_world_size_from_every_road(places: Places) -> None:
    forked_ranks(_saves_sharded, 2, places, "two", [], timeout=100)
    forked_ranks(_saves_sharded, 4, places, "four", ["two"], timeout=150)
    forked_ranks(_saves_sharded, 2, places, "again", ["four", "two"], timeout=100)
    for name in ("two", "four", "again"):
        expected = {**unsharded_state(name, full_tensor), **unsharded_items()}
        comes_back(places, name, expected)


def _saves_sharded_tensors(places: Places) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()

    def sharded(value: float) -> Any:
        spec = ChunkShardingSpec(dim=0, placements=[f"rank:{each}/cpu" for each in range(world)])
        tensor = sharded_tensor.full(spec, (10, 3), value)
        for shard in tensor.local_shards():
            shard.tensor += rank
        return tensor

    state = {"table": sharded(5.0), "plain": torch.arange(4.0)}
    with places.writer() as writer:
        for step in range(2):
            _save(places, writer, state, f"step-{step}", planner=_in_turn(step))
            comes_back(
                places,
                f"step-{step}",
                state,
                blank=lambda: {"table": sharded(0.0), "plain": torch.zeros(4)},
            )
            dist.barrier()


def test_sharded_tensors_survive(places: Places) -> None:
    forked_ranks(_saves_sharded_tensors, 2, places)
    rows = torch.arange(10).reshape(10, 1).ge(5).float().expand(10, 3) + 5
    comes_back(places, "step-1", {"table": rows, "plain": torch.arange(4.0)})


def _saves_replicated(places: Places) -> list[list[int]]:
    """Bytes of the two segments under each way to remove duplicates, on both roads."""
    state = {f"t{i}": torch.full((4096,), float(i)) for i in range(8)} | {"step": 1}
    sizes = []
    with places.writer(keep_memory=5) as writer:
        for name, planner in (
            ("balanced", dcp.DefaultSavePlanner()),
            ("balanced-by-torch", TorchPlanner()),
            ("lowest", dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True)),
            ("lowest-by-torch", TorchPlanner(dedup_save_to_lowest_rank=True)),
        ):
            _save(places, writer, state, name, planner=planner)
            comes_back(places, name, state)
            found = dcp.FileSystemReader(places.shown(name)).read_metadata().storage_data
            segments = dict.fromkeys(f"__{rank}_" for rank in range(2))
            sizes.append(
                [
                    sum(one.length for one in found.values() if one.relative_path.startswith(file))
                    for file in segments
                ]
            )
            dist.barrier()
    return sizes


def test_replicated_tensors_are_saved_once_by_the_rank_that_the_planner_chose(
    places: Places,
) -> None:
    of_one_rank, of_other_rank = forked_ranks(_saves_replicated, 2, places)
    assert of_one_rank == of_other_rank
    payload = 8 * 4096 * 4
    for balanced in of_one_rank[:2]:
        assert payload <= sum(balanced) < payload * 1.15
        assert min(balanced) > payload * 0.4
    for lowest in of_one_rank[2:]:
        assert lowest[1] == 0
        assert payload <= lowest[0] < payload * 1.15


# -- real models -----------------------------------------------------------------------------------


def _trains_and_resumes(places: Places, kinds: list[str]) -> None:
    """Save between steps and train on; resume from the save on every road, to the same bits."""
    with places.writer(keep_memory=9) as writer:
        for kind in kinds:
            model, optimizer = build_model(kind, seed=1)
            train_model(model, optimizer, 0, 2)
            _save(places, writer, model_state(model, optimizer, 2), kind)
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


# -- which ranks save together ---------------------------------------------------------------------


def _saves_in_a_sub_group(places: Places, members: list[int]) -> str:
    group, rank = dist.new_group(members), dist.get_rank()
    if rank not in members:
        return "stood aside"
    state = {"w": torch.randn(10).fill_(3), f"own.{rank}": torch.full((5,), rank)}
    for given in (None, group):
        with places.writer(process_group=given) as writer:
            for step in range(2):
                options = {"process_group": group, "planner": _in_turn(step)}
                _save(places, writer, state, f"step-{step}", **options)
                for road in ROADS[:2]:
                    into = blank_of(state)
                    reader = places.reader(road, f"step-{step}", process_group=given)
                    dcp.load(
                        into,
                        checkpoint_id=f"step-{step}",
                        storage_reader=reader,
                        process_group=group,
                    )
                    assert_same(state, into, road)
                for road in ROADS[2:]:
                    assert_same(
                        state,
                        places.load(road, f"step-{step}", blank_of(state), process_group=group),
                    )
                dist.barrier(group)
    return "saved"


@pytest.mark.parametrize("members", [[0, 2], [1, 2]], ids=str)
def test_a_sub_group_saves_and_loads_while_other_ranks_stand_aside(
    places: Places, members: list[int]
) -> None:
    if 0 not in members and not hasattr(_DistWrapper(None, False, 0), "global_coordinator_rank"):
        pytest.skip(f"torch {torch.__version__} wants rank 0 in every group that saves")
    outcomes = forked_ranks(_saves_in_a_sub_group, 3, places, members, timeout=100)
    assert outcomes == ["saved" if rank in members else "stood aside" for rank in range(3)]
    files = sorted(path.name[:4] for path in places.directory("storage", "step-1").glob("*.distcp"))
    assert files == ["__0_", "__1_"]
    comes_back(places, "step-1", {f"own.{rank}": torch.full((5,), rank) for rank in members})


def _saves_with_another_group_than_its_own(places: Places) -> list[str]:
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    state, errors = {"w": torch.arange(4.0)}, []
    with places.writer(process_group=alone) as writer:
        errors.append(_error_of(lambda: dcp.save(state, checkpoint_id="a", storage_writer=writer)))
    with places.writer() as writer:
        _save(places, writer, state, "b")
        comes_back(places, "b", state)
        reader = places.reader("memory", "b", process_group=alone)
        errors.append(
            _error_of(lambda: dcp.load(blank_of(state), checkpoint_id="b", storage_reader=reader))
        )
        comes_back(places, "b", state)
    return errors


def test_a_group_that_is_not_the_one_of_the_call_is_an_error_on_every_rank(places: Places) -> None:
    for errors in forked_ranks(_saves_with_another_group_than_its_own, 2, places):
        assert len(errors) == 2
        assert all("same process_group" in error for error in errors), errors


def _error_of(act: Callable[[], object]) -> str:
    try:
        act()
    except dcp.CheckpointException as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _saves_each_rank_alone(places: Places) -> None:
    rank = dist.get_rank()
    with places.writer(keep_memory=8) as writer:
        for step in range(3):
            name = f"rank-{rank}-step-{step}"
            state = {"w": torch.full((7,), rank * 10.0 + step), "rank": rank}
            places.save(writer, state, name, no_dist=True, planner=_in_turn(step))
            for road in ROADS:
                assert_same(state, places.load(road, name, blank_of(state), no_dist=True), road)
        dist.barrier()
        for other in range(dist.get_world_size()):
            expected = {"w": torch.full((7,), other * 10.0 + 2), "rank": other}
            assert_same(
                expected,
                places.load("memory", f"rank-{other}-step-2", blank_of(expected), no_dist=True),
                "of another",
            )
        dist.barrier()


@pytest.mark.skipif(
    "no_dist" not in inspect.signature(dcp.save).parameters, reason="no no_dist here"
)
def test_ranks_save_each_on_its_own_without_dist(places: Places) -> None:
    forked_ranks(_saves_each_rank_alone, 2, places)


def _saves_without_collectives(places: Places, steps: int) -> None:
    rank = dist.get_rank()
    with places.writer(keep_memory=2) as writer:
        for step in range(steps):
            state = {
                "w": torch.full((7 + rank,), rank * 10.0 + step),
                "rank": rank,
                f"only.{rank}": torch.arange(3),
            }
            dcp.save(
                state, checkpoint_id=f"step-{step}", storage_writer=writer, use_collectives=False
            )
            writer.wait(f"step-{step}", timeout=60)
            dist.barrier()
            for road in ROADS:
                assert_same(state, places.load(road, f"step-{step}", blank_of(state)), road)
            newest = dcp_load_newest(places, blank_of(state))
            assert_same(state, newest)
            dist.barrier()


def dcp_load_newest(places: Places, into: State) -> State:
    dcp.load(into, storage_reader=places.reader("memory", ""))
    return into


needs_no_collectives = pytest.mark.skipif(
    "use_collectives" not in inspect.signature(dcp.save).parameters,
    reason=f"torch {torch.__version__} has no use_collectives",
)


@needs_no_collectives
def test_ranks_save_without_collectives_and_each_loads_its_own(places: Places) -> None:
    forked_ranks(_saves_without_collectives, 2, places, 4)
    assert len(list(Path(places.memory).rglob("*.distcp"))) == 2 * 2
    assert not list(Path(places.memory).rglob("*.slot"))


def _saves_alone_in_a_world_of_one(places: Places) -> None:
    state = {"w": torch.randn(5), "step": 1}
    with places.writer() as writer:
        for step in range(2):
            _save(places, writer, state, f"{step}")
            comes_back(places, f"{step}", state)


def test_a_world_of_one_survives(places: Places) -> None:
    forked_ranks(_saves_alone_in_a_world_of_one, 1, places)


def _saves_on_in_a_new_world(places: Places, stores: Path) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    with places.writer() as writer:
        for step in range(3):
            state = {"w": torch.full((5,), float(step)), f"own.{rank}": torch.full((2,), rank)}
            _save(places, writer, state, f"{step}")
            comes_back(places, f"{step}", state)
            dist.barrier()
            dist.destroy_process_group()
            store = dist.FileStore(str(stores / f"store-{step}"), world)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
            dist.barrier()  # who is quick must not end while another one still connects


def test_ranks_that_form_a_new_process_group_save_on(places: Places, tmp_path: Path) -> None:
    forked_ranks(_saves_on_in_a_new_world, 2, places, tmp_path)


def _saves_two_jobs_in_turn(places: Places, other: Places) -> None:
    rank = dist.get_rank()
    with places.writer() as one, other.writer() as two:
        for step in range(3):
            state = {"w": torch.full((5,), float(step)), f"own.{rank}": torch.full((2,), rank)}
            _save(places, one, state, f"{step}")
            _save(other, two, {"w": -state["w"]}, f"{step}")
            comes_back(places, f"{step}", state)
            comes_back(other, f"{step}", {"w": -state["w"]})
            dist.barrier()


def test_two_jobs_saved_in_turn_stay_apart(places: Places, tmp_path: Path) -> None:
    forked_ranks(
        _saves_two_jobs_in_turn,
        2,
        places,
        Places(places.memory, str(tmp_path / "other"), "other-job"),
    )


# -- over and over ---------------------------------------------------------------------------------


def _saves_many_times(places: Places, saves: int) -> dict[str, int]:
    rank = dist.get_rank()
    most = descriptors = 0
    with places.writer(keep_memory=2) as writer:
        for step in range(saves):
            state = {
                "w": torch.full((4096,), float(step)),
                f"own.{rank}": torch.full((64,), rank + step),
                "step": step,
            }
            dcp.save(
                state, checkpoint_id=f"step-{step}", storage_writer=writer, planner=_in_turn(step)
            )
            if step == 20:
                writer.wait()  # what is being flushed is open for a while
                descriptors = len(os.listdir("/proc/self/fd"))
            dist.barrier()
            job = Path(places.memory, places.job)
            most = max(most, len([*job.rglob("*.slot"), *job.rglob("*.distcp")]))
            dist.barrier()
        writer.wait()
        growth = len(os.listdir("/proc/self/fd")) - descriptors
        dist.barrier()
        comes_back(places, f"step-{saves - 1}", state)
        dist.barrier()
    return {"segments and slots": most, "more descriptors": growth}


def test_a_hundred_saves_by_two_ranks_leave_nothing_behind(places: Places) -> None:
    for found in forked_ranks(_saves_many_times, 2, places, 120, timeout=100):
        assert found["segments and slots"] <= 2 * (2 + 1)
        assert found["more descriptors"] <= 4


def _saves_changing_plans(places: Places, caching: bool) -> None:
    """Each rank's part changes at another time; the others' stay as they were."""
    rank = dist.get_rank()
    options: dict[str, Any] = {"enable_plan_caching": True} if caching else {}
    sizes = [
        (3, 3),
        (3, 3),
        (9, 3),
        (9, 3),
        (9, 40_000),
        (9, 40_000),
        (2, 5),
        (2, 5),
        (0, 5),
        (0, 0),
    ]
    with places.writer() as writer:
        for step, of_ranks in enumerate(sizes):
            state = {
                "w": torch.full((17,), float(step)),
                f"own.{rank}": torch.full((of_ranks[rank],), rank + step),
                f"log.{rank}": "x" * of_ranks[rank],
                "step": step,
            }
            if step in (3, 6) and rank == 1:
                state["new"] = {"group": torch.full((5,), step)}
            if step == 5:
                state = {f"other.{rank}": torch.full((17,), -1.0), "w": torch.full((17,), 5.0)}
            _save(places, writer, state, f"{step}", planner=TorchPlanner(**options))
            comes_back(places, f"{step}", state)
            dist.barrier()


@pytest.mark.parametrize("caching", [False, True], ids=["plain", "caching"])
def test_plans_that_change_on_one_rank_only_survive(places: Places, caching: bool) -> None:
    if (
        caching
        and "enable_plan_caching" not in inspect.signature(dcp.DefaultSavePlanner).parameters
    ):
        pytest.skip(f"torch {torch.__version__} caches no plans")
    forked_ranks(_saves_changing_plans, 2, places, caching)


def _prepares_and_saves(places: Places) -> list[int]:
    rank = dist.get_rank()
    state = {f"own.{rank}": torch.full((1 << 18,), float(rank)), "w": torch.ones(5)}
    with places.writer(keep_memory=2) as writer:
        assert writer.prepare(state).wait(30)
        dist.barrier()
        job = Path(places.memory, places.job)
        before = {path.stat().st_ino for path in job.rglob("*.slot")}
        dist.barrier()
        for step in range(3):
            _save(places, writer, state, f"{step}")
            comes_back(places, f"{step}", state)
            dist.barrier()
        after = {path.stat().st_ino for path in [*job.rglob("*.slot"), *job.rglob("*.distcp")]}
        dist.barrier()
    return [len(before), len(after - before)]


def test_prepared_ranks_find_their_slots_ready(places: Places) -> None:
    for prepared, made_later in forked_ranks(_prepares_and_saves, 2, places):
        assert prepared == 2 * 3
        assert made_later == 0


# -- ranks that fail -------------------------------------------------------------------------------


class _Failing(dcp.DefaultSavePlanner):
    """Fails on one rank, where it is told to."""

    def __init__(self, where: str, rank: int) -> None:
        super().__init__()
        self._where = where if dist.get_rank() == rank else ""

    def create_local_plan(self) -> SavePlan:
        self._fail("create_local_plan")
        return super().create_local_plan()

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        self._fail("finish_plan")
        return super().finish_plan(new_plan)

    def resolve_data(self, write_item: WriteItem) -> Any:
        self._fail("resolve_data")
        return super().resolve_data(write_item)

    def _fail(self, where: str) -> None:
        if where == self._where:
            raise LookupError(f"no data in {where}")


Failures = dict[str, str]
"""The error of each failing save, on one rank."""


def _fails_and_saves_on(places: Places) -> Failures:
    """Fail saves, each between two good ones; load the last good checkpoint after each."""
    rank = dist.get_rank()
    errors: Failures = {}
    good = 0

    def state(step: int) -> State:
        return {
            "w": torch.full((50,), float(step)),
            f"own.{rank}": torch.full((9,), rank + step),
            "step": step,
        }

    def save_well() -> None:
        nonlocal good
        good += 1
        _save(places, writer, state(good), f"good-{good}")
        comes_back(places, f"good-{good}", state(good))
        dist.barrier()

    def note(what: str, name: str, **options: Any) -> None:
        errors[what] = _error_of(
            lambda: dcp.save(state(-1), checkpoint_id=name, storage_writer=writer, **options)
        )
        dist.barrier()
        comes_back(places, f"good-{good}", state(good), roads=("memory", "stock from memory"))
        newest = dcp_load_newest(places, blank_of(state(0)))
        assert newest["step"] == good, what
        dist.barrier()
        save_well()

    with places.writer(keep_memory=2) as writer:
        for where in ("resolve_data", "create_local_plan", "finish_plan"):
            for failing in (1, 0):  # also as the very first thing
                note_first = good == 0
                if note_first:
                    errors["first"] = _error_of(
                        lambda: dcp.save(
                            state(-1),
                            checkpoint_id="bad",
                            storage_writer=writer,
                            planner=_Failing("resolve_data", 1),
                        )
                    )
                    save_well()
                note(f"{where} on rank {failing}", "bad", planner=_Failing(where, failing))
        note("other ids", f"rank-{rank}")
        note("other ids, by torch", f"rank-{rank}", planner=TorchPlanner())
        note("an impossible id on one rank", "odd" if rank == 0 else "../odd")

        def load(name: str) -> None:
            dcp.load(
                blank_of(state(0)), checkpoint_id=name, storage_reader=places.reader("memory", "")
            )

        errors["load of other ids"] = _error_of(lambda: load(f"good-{good - rank}"))
        errors["load of an impossible id on one rank"] = _error_of(
            lambda: load(f"good-{good}" if rank == 0 else ".x")
        )
        errors["load of what isn't there"] = _error_of(lambda: load("absent"))
        save_well()
        for _ in range(5):
            note("again", f"good-{good}", planner=_Failing("resolve_data", 1))
        job = Path(places.memory, places.job)
        dist.barrier()
        errors["files"] = str(len([*job.rglob("*.slot"), *job.rglob("*.distcp")]))
        errors["directories"] = ",".join(
            sorted(path.name for path in job.iterdir() if path.is_dir() and path.name[0] != ".")
        )
        dist.barrier()
    return errors


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Failures, Failures]]:
    with private_directory("root") as root:
        places = Places(str(root), str(tmp_path_factory.mktemp("failures") / "storage"))
        first, second = forked_ranks(
            _fails_and_saves_on, 2, places, env={"DCP_MEM_TIMEOUT": "2"}, timeout=110
        )
        yield first, second


@pytest.mark.parametrize("where", ["resolve_data", "create_local_plan", "finish_plan"])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_fails_the_save_on_every_rank_and_nothing_else(
    failures: tuple[Failures, Failures], where: str, failing: int
) -> None:
    for rank, errors in enumerate(failures):
        assert "no data in" in errors[f"{where} on rank {failing}"], (rank, errors)


def test_a_rank_that_fails_in_the_very_first_save_does_no_harm(
    failures: tuple[Failures, Failures],
) -> None:
    assert all("no data in resolve_data" in errors["first"] for errors in failures)


def test_ranks_that_give_different_checkpoint_ids_all_fail(
    failures: tuple[Failures, Failures],
) -> None:
    for errors in failures:
        for what in ("other ids", "other ids, by torch"):
            assert "different checkpoint ids: rank-0, rank-1" in errors[what]


def test_an_id_that_is_refused_on_one_rank_fails_on_all_and_does_not_hang_the_others(
    failures: tuple[Failures, Failures],
) -> None:
    for errors in failures:
        assert "'../odd' is no name under" in errors["an impossible id on one rank"]
        assert "'.x' is no name under" in errors["load of an impossible id on one rank"]


def test_ranks_that_load_different_checkpoint_ids_all_fail(
    failures: tuple[Failures, Failures],
) -> None:
    for errors in failures:
        assert "load different checkpoint ids: good-" in errors["load of other ids"]


def test_a_checkpoint_that_is_not_there_is_an_error_on_every_rank_that_lists_what_is(
    failures: tuple[Failures, Failures],
) -> None:
    for errors in failures:
        assert "no absent in memory" in errors["load of what isn't there"]
        assert "newest first: good-" in errors["load of what isn't there"]


def test_failed_saves_leave_nothing_in_memory(failures: tuple[Failures, Failures]) -> None:
    for errors in failures:
        assert int(errors["files"]) <= 2 * (2 + 1)
        assert errors["directories"].count(",") == 1


def _fails_at_every_point(places: Places) -> dict[str, str]:
    """Pass each named point of a save with an error, on either rank, and save well after each."""
    rank = dist.get_rank()
    errors: dict[str, str] = {}
    good = 0

    def state(step: int) -> State:
        return {
            "w": torch.full((50,), float(step)),
            f"own.{rank}": torch.full((9,), rank + step),
            "step": step,
        }

    with places.writer(keep_memory=2, persist=False) as writer:
        for point in (
            point for point in POINTS if point.partition(".")[0] in ("save", "stage", "complete")
        ):
            for failing in (0, 1):
                good += 1
                dcp.save(state(good), checkpoint_id=f"good-{good}", storage_writer=writer)
                dist.barrier()
                if rank == failing:
                    faults.arm(f"{point}:raise:1")
                name = f"{point}-{failing}"
                planner = _in_turn(good // 2 + failing)
                errors[name] = _error_of(
                    lambda planner=planner: dcp.save(  # type: ignore[misc]
                        state(-1), checkpoint_id="bad", storage_writer=writer, planner=planner
                    )
                )
                faults.arm("")
                dist.barrier()
                comes_back(
                    places, f"good-{good}", state(good), roads=("memory", "stock from memory")
                )
                step = dcp_load_newest(places, blank_of(state(0)))["step"]
                assert step in (good, -1), (name, step)
                dist.barrier()
        job = Path(places.memory, places.job)
        for _ in range(5):  # the others have no word of it until DCP's own
            if rank == 0:
                faults.arm("complete.catalog:raise:1")
            errors["leader"] = _error_of(
                lambda: dcp.save(state(-1), checkpoint_id="bad", storage_writer=writer)
            )
        good += 1
        for _ in range(2):
            dcp.save(state(good), checkpoint_id=f"good-{good}", storage_writer=writer)
        dist.barrier()
        errors["files"] = str(len([*job.rglob("*.slot"), *job.rglob("*.distcp")]))
        comes_back(places, f"good-{good}", state(good), roads=("memory", "stock from memory"))
        dist.barrier()
    return errors


# Points that only a node's leader or the coordinator passes, and those after which a checkpoint is
# complete.
LEADERS = {"complete.catalog-1", "complete.manifest-1", "complete.evicted-1", "save.finished-1"}
COMPLETE = {"complete.evicted-0", "save.finished-0"}
"""Where every rank knows that the checkpoint is complete: only the failing one need raise."""


def test_an_error_at_any_point_fails_the_save_on_every_rank_and_nothing_else(
    places: Places,
) -> None:
    first, second = forked_ranks(
        _fails_at_every_point, 2, places, env={"DCP_MEM_TIMEOUT": "2"}, timeout=110
    )
    for name in first:
        if name == "files":
            assert int(first[name]) <= 2 * (2 + 1), "failed saves have kept their slots"
        elif name in LEADERS or name.startswith("stage.copying"):
            continue
        else:
            assert "fault injected" in first[name], name
            assert "fault injected" in second[name] or name in COMPLETE, name


# -- nodes -----------------------------------------------------------------------------------------


def _saves_on_two_nodes(places: Places) -> None:
    """Each rank with a memory root of its own, which makes it a node of its own."""
    rank = dist.get_rank()
    mine = Places(f"{places.memory}/node-{rank}", places.url)
    with contextlib.suppress(FileExistsError):
        os.mkdir(mine.memory, 0o700)
    state = {"w": torch.arange(20.0), f"own.{rank}": torch.full((9,), rank)}
    with mine.writer() as writer:
        for step in range(3):
            state["w"] += 1
            _save(mine, writer, state, f"{step}", planner=_in_turn(step))
            comes_back(mine, f"{step}", state, roads=("storage", "stock from storage"))
            reader = places.reader("storage", "")
            into = blank_of(state)
            dcp.load(into, storage_reader=reader)
            assert_same(state, into)
            dist.barrier()
        for held in ("0", "1", "2")[1:]:
            assert len(list(mine.directory("memory", held).glob("*.distcp"))) == 1


def test_two_nodes_make_a_checkpoint_durable_together(places: Places) -> None:
    forked_ranks(_saves_on_two_nodes, 2, places)
    comes_back(
        places, "2", {"own.0": torch.full((9,), 0), "own.1": torch.full((9,), 1)}, roads=ROADS[1::2]
    )


def _saves_while_a_node_has_no_room_for_the_catalog(places: Places) -> list[str]:
    rank = dist.get_rank()
    mine = Places(f"{places.memory}/node-{rank}", places.url)
    os.mkdir(mine.memory, 0o700)
    errors, catalogs = [], Path(mine.memory, mine.job, ".catalogs")
    with mine.writer(persist=False) as writer:
        dcp.save({"a": 1}, checkpoint_id="first", storage_writer=writer)
        for road, save in SAVES.items():
            # Another structure each time: a known one has a catalog that nobody puts again.
            state = {road: torch.arange(20.0), f"own.{rank}": torch.full((9,), rank)}
            if rank == 1:
                catalogs.rename(f"{catalogs}.aside")
                catalogs.touch()
            bad = raised_by(
                functools.partial(save, state, checkpoint_id="bad", storage_writer=writer)
            )
            if rank == 1:
                catalogs.unlink()
                Path(f"{catalogs}.aside").rename(catalogs)
            errors.append(str(bad))
            save(state, checkpoint_id="good", storage_writer=writer)
            assert mine.directory("memory", "good").is_dir()
    return errors


def test_a_node_that_has_no_room_for_the_catalog_fails_the_save_on_every_rank(
    places: Places,
) -> None:
    for errors in forked_ranks(
        _saves_while_a_node_has_no_room_for_the_catalog, 2, places, timeout=60
    ):
        assert all("Not a directory" in error for error in errors)
