"""Which ranks save together: all, some, each by itself, one, in new groups; on every road."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.utils import _DistWrapper

from dcp_mem import MemoryStorageWriter
from tests.support.checkpoints.jobs import barrier, own_rank, slots_of
from tests.support.checkpoints.models import rows_of_five
from tests.support.checkpoints.plans import begin_save, logged, planned, why_torch_plans
from tests.support.checkpoints.roundtrip import (
    ROADS,
    Places,
    State,
    assert_same,
    blank_of,
    comes_back,
)
from tests.support.processes.forks import forked, forked_ranks, on_ranks, raised_by

pytestmark = pytest.mark.timeout(240)

SAVES = ("dcp.save", "dcp_mem.save", "torch's planner", "async", "async by dcp")
ASYNC_BY_DCP_COPIES = "async_stager" in inspect.signature(dcp.async_save).parameters
"""torch 2.6 copies nothing that is on the CPU already."""


def _state(step: int, *, is_sharded: bool = False) -> State:
    rank = own_rank()
    state = {
        "w": torch.full((50,), float(step)),
        f"own.{rank}": {"t": torch.tensor([rank, step]), "note": f"rank {rank}"},
        "nested": {"empty": torch.ones(2, 0), "log": "x" * step},
    }
    return state | ({"rows": rows_of_five(7, step)} if is_sharded else {})


def _save(
    writer: MemoryStorageWriter,
    road: str,
    name: str,
    step: int,
    *,
    is_sharded: bool = False,
    **options: Any,
) -> State:
    """Save, train on at once where the save goes on behind, and wait; returns what was saved."""
    state = _state(step, is_sharded=is_sharded)
    begun = begin_save(road, writer, state, name, **options)
    if road.startswith("async"):
        if road == "async" or ASYNC_BY_DCP_COPIES:
            state["w"].fill_(-77)
            state[f"own.{own_rank()}"]["t"].fill_(-77)
        getattr(begun, "upload_completion", begun).result(60)
    writer.wait(name, timeout=60)
    return _state(step, is_sharded=is_sharded)


def _back(places: Places, name: str, state: State, **options: Any) -> None:
    for road in ROADS:
        assert_same(state, places.load(road, name, blank_of(state), **options), road)


def _all(places: Places, road: str) -> None:
    """All ranks, or a process without a group."""
    with places.writer() as writer, logged() as lines:
        for step in range(4):
            state = _save(writer, road, f"{step}", step)
            barrier()
            comes_back(places, f"{step}", state)
            barrier()
    by_dcp_mem = ["0"] if road != "torch's planner" else []
    assert planned(lines) == by_dcp_mem, "a structure is planned once"


def _some(places: Places, road: str, members: list[int]) -> None:
    group, rank = dist.new_group(members, backend="gloo"), own_rank()
    if rank not in members:
        return
    for given in (None, group):
        with places.writer(process_group=given) as writer:
            is_said = given is not None and road == "dcp_mem.save"  # it takes the writer's group
            options = {} if is_said else {"process_group": group}
            for step in range(2):
                state = _save(writer, road, f"{step}", step, **options)
                dist.barrier(group)
                for back in ROADS:
                    into = blank_of(state)
                    dcp.load(
                        into,
                        checkpoint_id=f"{step}" if back in ROADS[:2] else None,
                        storage_reader=places.reader(back, f"{step}", process_group=given),
                        process_group=group,
                    )
                    assert_same(state, into, back)
                dist.barrier(group)
    files = sorted(path.name[:4] for path in places.directory("storage", "1").glob("*.distcp"))
    assert files == ["__0_", "__1_"]


def _each_alone(places: Places, road: str) -> None:
    rank = own_rank()
    with places.writer(keep_memory=8) as writer:
        for step in range(3):
            name = f"rank-{rank}-step-{step}"
            _back(places, name, _save(writer, road, name, step, no_dist=True), no_dist=True)
        barrier()
        for other in range(2):
            expected = {f"own.{other}": {"t": torch.tensor([other, 2]), "note": f"rank {other}"}}
            into = blank_of(expected)
            places.load("memory", f"rank-{other}-step-2", into, no_dist=True)
            assert_same(expected, into)
        barrier()
        together = _save(writer, road, "together", 5, is_sharded=True)
        barrier()
        comes_back(places, "together", together)
        barrier()


def _without_collectives(places: Places, road: str) -> None:
    with places.writer(keep_memory=2) as writer, logged() as lines:
        for step in range(4):
            state = _save(writer, road, f"{step}", step, use_collectives=False)
            barrier()
            _back(places, f"{step}", state)
            newest = blank_of(state)
            dcp.load(newest, storage_reader=places.reader("memory", ""))
            assert_same(state, newest)
            barrier()
    if road == "dcp_mem.save":
        assert why_torch_plans(lines) == ["use_collectives=False"]
    barrier()
    job = Path(places.memory, places.job)
    assert (slots_of(job), list(job.rglob("*.slot"))) == (2 * 2, [])


def _in_new_groups(places: Places, road: str) -> None:
    """A group is left, and another one is made of the same ranks; the writer stays."""
    rank, world = own_rank(), dist.get_world_size()
    with places.writer() as writer:
        for step in range(3):
            state = _save(writer, road, f"{step}", step, is_sharded=True)
            barrier()
            comes_back(places, f"{step}", state)
            barrier()
            dist.destroy_process_group()
            store = dist.FileStore(f"{places.url}-store-{step}", world)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
            barrier()  # who is quick must not end while another one still connects


def _two_jobs(places: Places, road: str) -> None:
    """Two jobs, saved in turn, each with plans of its own."""
    other = Places(places.memory, f"{places.url}-other", "other-job")
    with places.writer() as one, other.writer() as two, logged() as lines:
        for step in range(3):
            state = _save(one, road, f"{step}", step, is_sharded=True)
            others = {"more": torch.ones(step + 1), "step": step}
            begun = begin_save(road, two, others, f"{step}")
            getattr(getattr(begun, "upload_completion", begun), "result", lambda: None)()
            two.wait(f"{step}", timeout=60)
            barrier()
            comes_back(places, f"{step}", state)
            comes_back(other, f"{step}", others)
            barrier()
    if road != "torch's planner":
        assert planned(lines) == ["0", "0", "1", "2"]


def _a_writer_each(places: Places, road: str) -> None:
    for step in range(3):
        with places.writer() as writer:
            state = _save(writer, road, f"{step}", step, is_sharded=True)
            barrier()
            comes_back(places, f"{step}", state)
            barrier()


WAYS: dict[str, tuple[int | None, Callable[[Places, str], None]]] = {
    "no process group": (None, _all),
    "a world of one": (1, _all),
    "two ranks": (2, _all),
    "two of three": (3, partial(_some, members=[0, 2])),
    "two of three without the first": (3, partial(_some, members=[1, 2])),
    "each alone": (2, _each_alone),
    "each without collectives": (2, _without_collectives),
    "new groups": (2, _in_new_groups),
    "two jobs in turn": (2, _two_jobs),
    "a writer for each save": (2, _a_writer_each),
}
PARAMETERS = inspect.signature(dcp.save).parameters


@pytest.mark.parametrize("road", SAVES)
@pytest.mark.parametrize("way", list(WAYS))
def test_whoever_saves_together_has_it_back_on_every_road(
    places: Places, way: str, road: str
) -> None:
    if way == "each alone" and "no_dist" not in PARAMETERS:
        pytest.skip("no no_dist here")
    if way == "each without collectives" and (
        "use_collectives" not in PARAMETERS or road == "async"
    ):
        pytest.skip("no use_collectives here")
    if "without the first" in way and not hasattr(
        _DistWrapper(None, False, 0), "global_coordinator_rank"
    ):
        pytest.skip(f"torch {torch.__version__} wants rank 0 in every group that saves")
    world, act = WAYS[way]
    if world is None:
        forked(act, places, road)
    else:
        forked_ranks(act, world, places, road, timeout=100)
    if "two of three" in way:
        members = [0, 2] if "first" not in way else [1, 2]
        owns = {f"own.{one}": {"t": torch.tensor([one, 1])} for one in members}
        comes_back(places, "1", {"w": torch.full((50,), 1.0), **owns})


def _on_every_road_in_turn(places: Places) -> None:
    """One writer serves all roads, whatever was saved before."""
    with places.writer(keep_memory=2) as writer:
        for step in range(10):
            road = SAVES[step * 3 % 5]
            state = _save(writer, road, "latest", step // 4, is_sharded=dist.is_initialized())
            barrier()
            comes_back(places, "latest", state)
            barrier()
            plain = _save(writer, SAVES[step % 5], f"{step}", step)
            barrier()
            comes_back(places, f"{step}", plain)
            barrier()
        job = Path(places.memory, places.job)
        kept = [one.name for one in job.iterdir() if one.is_dir() and one.name[0] != "."]
        assert sorted(kept) == ["9", "latest"]
        barrier()


@pytest.mark.parametrize("ranks", [None, 2])
def test_one_writer_serves_every_road(places: Places, ranks: int | None) -> None:
    if ranks is None:
        forked(_on_every_road_in_turn, places, timeout=100)
    else:
        forked_ranks(_on_every_road_in_turn, ranks, places, timeout=150)


@on_ranks(2)
def test_a_group_that_is_not_the_one_of_the_call_is_an_error_on_every_rank(places: Places) -> None:
    alone = [dist.new_group([rank]) for rank in range(2)][own_rank()]
    state = {"w": torch.arange(4.0)}
    with places.writer(process_group=alone) as writer:
        saving = raised_by(partial(dcp.save, state, checkpoint_id="a", storage_writer=writer))
    with places.writer() as writer:
        dcp.save(state, checkpoint_id="b", storage_writer=writer)
        reader = places.reader("memory", "b", process_group=alone)
        loading = raised_by(
            partial(dcp.load, blank_of(state), checkpoint_id="b", storage_reader=reader)
        )
        comes_back(places, "b", state, roads=("memory",))
    errors = [str(saving), str(loading)]
    assert all("same process_group" in error for error in errors), errors
