"""`dcp.save` and `dcp.load` with torch's default planners: dcp_mem plans, and nobody can tell."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import inspect
import os
import pickle
import re
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch.distributed import distributed_c10d
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, init_from_local_shards
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.remote_device import _remote_device

import dcp_mem
from dcp_mem import EntriesMissing, MemoryStorageWriter
from dcp_mem import reader as reader_module
from dcp_mem.common import faults
from dcp_mem.common import log as log_module
from dcp_mem.errors import CheckpointNotFound, RankFailed
from dcp_mem.format.metadata import read_metadata
from dcp_mem.loading import find
from dcp_mem.memory import copying
from dcp_mem.memory.job import JobMemory
from dcp_mem.planning.load_planner import LocalLoadPlanner
from dcp_mem.saving.ahead import copied
from tests.support.checkpoints import sharding
from tests.support.checkpoints.jobs import slots_of, wait_until
from tests.support.checkpoints.models import rows_of_five
from tests.support.checkpoints.plans import (
    TorchLoadPlanner,
    TorchPlanner,
    assert_same_content,
    load_by_torch,
    logged,
    planned,
    save_by_torch,
    why_torch_plans,
)
from tests.support.checkpoints.roundtrip import Places, State, assert_same, blank_of, comes_back
from tests.support.processes.forks import forked, forked_ranks, on_ranks
from tests.support.seeds import SEED

CACHING = "enable_plan_caching" in inspect.signature(dcp.DefaultSavePlanner).parameters
FROM_MEMORY = ("memory", "stock from memory")
PATIENCE = {"DCP_MEM_TIMEOUT": "20"}
RANKS = pytest.mark.parametrize("ranks", [1, 2])


# -- helpers of the ranks --------------------------------------------------------------------------


def _state(step: int) -> State:
    """Sharded, replicated and own tensors, and byte items, nested in dicts and lists."""
    rank = dist.get_rank()
    return {
        "rows": rows_of_five(7, step),
        "model": {"w": torch.full((9,), float(step)), "list": [torch.full((2,), step), "x" * step]},
        f"own.{rank}": {"t": torch.full((rank + 2,), rank + step), "note": f"rank {rank}"},
        "step": step,
    }


@contextlib.contextmanager
def _torch_plans() -> Iterator[list[str]]:
    """Collect the names of the planners of DCP that are asked for a plan of a save."""
    with _asked(DefaultSavePlanner) as asked:
        yield asked


@contextlib.contextmanager
def _torch_plans_loads() -> Iterator[list[str]]:
    """The same for loads; dcp_mem has a planner that is one of torch's, and plans in part so."""
    with _asked(DefaultLoadPlanner) as asked:
        yield asked


@contextlib.contextmanager
def _asked(kind: type[DefaultSavePlanner] | type[DefaultLoadPlanner]) -> Iterator[list[str]]:
    asked: list[str] = []
    plan: Callable[[Any], Any] = kind.create_local_plan

    def counting(self: Any) -> Any:
        if not isinstance(self, LocalLoadPlanner):
            asked.append(type(self).__name__)
        return plan(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "create_local_plan", counting)
        yield asked


def _failures_of(act: Callable[[], object]) -> dict[int, BaseException]:
    """The failures, by rank, of the CheckpointException that this raises."""
    try:
        act()
    except dcp.CheckpointException as error:
        return {rank: failure for rank, (failure, _) in error.failures.items()}
    return {}


def _load(places: Places, name: str, into: State, **options: Any) -> State:
    return places.load("memory", name, into, **options)


# -- the caller's planner --------------------------------------------------------------------------


def _seen(planner: object) -> dict[str, Any]:
    """What can be seen of a planner: its attributes, and the caches that all planners share."""
    caches = {name: dict(value) for name, value in _caches().items()}
    return {**vars(planner), **caches}


def _caches() -> Mapping[str, dict[str, Any]]:
    found = {**vars(SavePlanner), **vars(DefaultSavePlanner)}
    return {name: value for name, value in found.items() if isinstance(value, dict)}


@RANKS
@on_ranks("ranks", env=PATIENCE)
def test_a_planner_that_the_caller_passes_to_a_save_is_as_it_was(
    places: Places, tmp_path: Path, ranks: int
) -> None:
    elsewhere = str(tmp_path / "torch")
    rank = dist.get_rank()
    options: dict[str, Any] = {"enable_plan_caching": True} if CACHING else {}
    planner = DefaultSavePlanner(**options)
    before = _seen(planner)
    with places.writer(persist=False) as writer:

        def save(state: State, name: str) -> dict[int, BaseException]:
            return _failures_of(
                lambda: dcp.save(state, checkpoint_id=name, storage_writer=writer, planner=planner)
            )

        for step in range(2):
            assert not save(_state(step), f"{step}")
            assert _seen(planner) == before
        for failing in range(dist.get_world_size()):
            faults.arm("stage.copied:raise:1" if rank == failing else "")
            assert isinstance(save(_state(3), "bad").get(failing), faults.FaultInjected)
            assert _seen(planner) == before
            odd = {**_state(3), "model": {"w": torch.ones(4, *[1] * (rank == failing))}}
            assert bool(save(odd, "odd")) == (dist.get_world_size() > 1)
            assert _seen(planner) == before
            odd["model"]["w"] = torch.empty(4, device="meta")
            assert save(odd, "odd")
            assert _seen(planner) == before
    dcp.save(_state(5), storage_writer=dcp.FileSystemWriter(elsewhere), planner=planner)
    into = blank_of(_state(5))
    dcp.load(into, storage_reader=dcp.FileSystemReader(elsewhere))
    assert_same(_state(5), into)


@RANKS
@on_ranks("ranks")
def test_a_planner_that_the_caller_passes_to_a_load_is_as_it_was(
    places: Places, tmp_path: Path, ranks: int
) -> None:
    elsewhere = str(tmp_path / "torch")
    rank = dist.get_rank()
    dcp.save(_state(5), storage_writer=dcp.FileSystemWriter(elsewhere))
    with places.writer(persist=False) as writer:
        dcp.save(_state(1), checkpoint_id="1", storage_writer=writer)
    planner = DefaultLoadPlanner()
    before = dict(vars(planner))
    for failing in range(dist.get_world_size()):
        into = blank_of(_state(0))
        _load(places, "1", into, planner=planner)
        assert_same(_state(1), into)
        assert vars(planner) == before
        unfit = {**blank_of(_state(0)), **({"absent": torch.ones(2)} if rank == failing else {})}
        failures = _failures_of(partial(_load, places, "1", unfit, planner=planner))
        assert isinstance(failures.get(failing), RuntimeError)
        assert vars(planner) == before
    into = blank_of(_state(0))
    dcp.load(into, storage_reader=dcp.FileSystemReader(elsewhere), planner=planner)
    assert_same(_state(5), into)


@pytest.mark.parametrize("save", [dcp.save, dcp_mem.save])
@on_ranks(2, env=PATIENCE)
def test_no_rank_keeps_what_has_been_saved(places: Places, save: Callable[..., object]) -> None:
    """Trainers without a collector would keep it."""
    gc.disable()
    kept = []
    with places.writer(keep_memory=2, persist=False) as writer:
        for way, size, fault in (
            ("the first save of a structure", 100, ""),
            ("a warm save", 100, ""),
            ("a changed structure", 200, ""),
            ("a save that fails", 200, "stage.copied:raise:1"),
            ("a save that another rank fails", 200, "stage.copied:raise:1"),
            ("a save that torch plans", 200, ""),
        ):
            tensor = torch.rand(size)
            alive = weakref.ref(tensor)
            state = {f"own.{dist.get_rank()}": tensor, "replicated": torch.ones(3)}
            if "torch" in way:
                state["subclass"] = torch.arange(3).as_subclass(_Subclass)
            is_failing = dist.get_rank() == (1 if "another" in way else 0)
            faults.arm(fault if is_failing else "")
            with contextlib.suppress(Exception, dcp.CheckpointException):
                save(state, checkpoint_id="step", storage_writer=writer)
            faults.arm("")
            del tensor, state
            if fault:
                gc.collect()  # torch's own frames and the error refer to each other
            if alive() is not None:
                kept.append(way)
    assert kept == []


# -- options of the planner ------------------------------------------------------------------------


def _writers(metadata: Metadata) -> dict[MetadataIndex, str]:
    """Which rank wrote each item."""
    return {index: info.relative_path[:4] for index, info in metadata.storage_data.items()}


@on_ranks(2)
def test_what_all_ranks_hold_goes_to_the_lowest_rank_where_the_planner_says_so(
    places: Places,
) -> None:
    def state(step: int, names: int) -> State:
        replicated = {f"replicated.{name}": torch.full((400,), step) for name in range(names)}
        return {**replicated, f"own.{dist.get_rank()}": torch.full((3,), dist.get_rank())}

    with places.writer(keep_memory=3, persist=False) as writer, _torch_plans() as by_torch:
        step = 0
        for names in (6, 8):
            for lowest in (True, False, True, False, False, True, True):
                step += 1
                planner = DefaultSavePlanner(dedup_save_to_lowest_rank=lowest)
                returned = dcp.save(
                    state(step, names), checkpoint_id="a", storage_writer=writer, planner=planner
                )
                writers = _writers(returned)
                of_replicated = {
                    writer for index, writer in writers.items() if index.fqn.startswith("repl")
                }
                assert of_replicated == ({"__0_"} if lowest else {"__0_", "__1_"}), step
                assert {f"own.{rank}": f"__{rank}_" for rank in range(2)} == {
                    index.fqn: writer for index, writer in writers.items() if "own" in index.fqn
                }
                comes_back(places, "a", state(step, names), roads=FROM_MEMORY)
                dist.barrier()
            assert not by_torch
            planner = TorchPlanner(dedup_save_to_lowest_rank=True)
            by_torch_alone = dcp.save(
                state(step, names), checkpoint_id="torch", storage_writer=writer, planner=planner
            )
            assert _writers(by_torch_alone) == writers
            assert by_torch.pop() == TorchPlanner.__name__


def _saves_changing_plans(places: Places, options: dict[str, bool], one_planner: bool) -> None:
    """Each rank's part changes at another time; the others' stay as they were."""
    rank = dist.get_rank()
    kept = DefaultSavePlanner(**options)
    with places.writer(keep_memory=3, persist=False) as writer, _torch_plans() as by_torch:
        for step, (of_first, of_second) in enumerate(
            [(3, 3), (3, 3), (9, 3), (9, 3), (9, 4000), (2, 5), (2, 5), (0, 5), (3, 3)]
        ):
            size = (of_first, of_second)[rank]
            state = {**_state(step), f"more.{rank}": torch.full((size,), rank + step)}
            if step in (3, 6) and rank == 1:
                state["new"] = {"group": torch.full((5,), step)}
            planner = kept if one_planner else DefaultSavePlanner(**options)
            target = {"checkpoint_id": f"{step}", "storage_writer": writer}
            returned = dcp.save(state, planner=planner, **target)
            comes_back(places, f"{step}", state, roads=FROM_MEMORY)
            assert not by_torch
            target["checkpoint_id"] = "torch"
            theirs = dcp.save(state, planner=TorchPlanner(**options), **target)
            by_torch.clear()
            assert_same_content(returned, theirs)
            comes_back(places, "torch", state, roads=FROM_MEMORY)
            dist.barrier()
        assert slots_of(Path(places.memory, places.job)) <= 2 * (3 + 1)
        dist.barrier()


@pytest.mark.parametrize("one_planner", [False, True], ids=["a planner each", "one planner"])
@pytest.mark.parametrize("options", [{}, {"enable_plan_caching": True}], ids=["plain", "caching"])
def test_plans_follow_structures_that_change_on_one_rank(
    places: Places, options: dict[str, bool], one_planner: bool
) -> None:
    if options and not CACHING:
        pytest.skip(f"torch {torch.__version__} caches no plans")
    forked_ranks(_saves_changing_plans, 2, places, options, one_planner)


@RANKS
@on_ranks("ranks")
def test_a_structure_is_planned_for_once_and_then_recognised(places: Places, ranks: int) -> None:
    with places.writer(keep_memory=2, persist=False) as writer, logged() as lines:
        for step in range(6):
            more = {"more": torch.ones(3)} if step in (2, 3) else {}
            dcp.save(_state(step) | more, checkpoint_id=f"{step}", storage_writer=writer)
            comes_back(places, f"{step}", _state(step) | more, roads=FROM_MEMORY)
            dist.barrier()
    names = planned(lines)
    assert names == ["0", "2"]


# -- what travels ----------------------------------------------------------------------------------


def _counts_what_travels(places: Places, tensors: int) -> list[tuple[str, int]]:
    """Bytes of each object that a warm save and load send on torch's collectives."""
    state = {
        "model": {f"layer.{number}": rows_of_five(7, number) for number in range(tensors)},
        "step": 1,
    }
    sent: list[tuple[str, int]] = []
    what = ""
    pickled: Callable[..., Any] = distributed_c10d._object_to_tensor

    def counting(*args: Any, **options: Any) -> Any:
        data, size = pickled(*args, **options)
        sent.append((what, int(size)))
        return data, size

    with places.writer(persist=False) as writer, pytest.MonkeyPatch.context() as patch:
        for step in range(3):
            if step == 2:
                patch.setattr(distributed_c10d, "_object_to_tensor", counting)
            what = "save"
            returned = dcp.save(state, checkpoint_id=f"{step}", storage_writer=writer)
        what = "load"
        into = blank_of(state)
        _load(places, "2", into)
        assert_same(state, into)
        what = "save by torch"
        save_by_torch(state, checkpoint_id="torch", storage_writer=writer)
    assert len(returned.state_dict_metadata) == tensors + 1
    return sent


def test_nothing_travels_on_torchs_collectives(places: Places) -> None:
    # Before torch 2.6 asks the reader, it gathers the keys of the state dict.
    by_torch = {"load"} if hasattr(state_dict_loader, "_all_gather_keys") else set()
    for sent in forked_ranks(_counts_what_travels, 2, places, 500):
        assert {one for one, _ in sent} == {"save by torch"} | by_torch
        assert all(size < 100 for one, size in sent if one == "load")
        assert max(size for _, size in sent) > 40_000


# -- the metadata that a save returns --------------------------------------------------------------


def _looks_at_what_a_save_returns(places: Places) -> bytes:
    """Return the pickled metadata."""
    with places.writer(keep_memory=1, persist=False) as writer:
        unseen = dcp.save(_state(1), checkpoint_id="unseen", storage_writer=writer)
        for step in range(2):
            returned = dcp.save(_state(step), checkpoint_id="a", storage_writer=writer)
            stored = places.metadata("a")
            dist.barrier()
            assert type(stored) is Metadata
            assert isinstance(returned, Metadata)
            assert dataclasses.is_dataclass(returned)
            assert returned == stored
            assert stored == returned
            assert not returned != stored  # noqa: SIM202 (asks the other operator)
            assert returned != unseen
            assert returned != 7  # type: ignore[comparison-overlap]
            assert repr(returned) == repr(stored)
            for one in dataclasses.fields(Metadata):
                assert getattr(returned, one.name) == getattr(stored, one.name)
            for made in (
                pickle.loads(pickle.dumps(returned)),
                pickle.loads(pickle.dumps(returned, protocol=0)),
                copy.copy(returned),
                copy.deepcopy(returned),
                dataclasses.replace(returned),
                read_metadata(pickle.dumps(returned)),
            ):
                assert type(made) is Metadata
                assert made == stored
                made.planner_data = "changed"
                assert returned == stored
            deep = copy.deepcopy(returned)
            deep.state_dict_metadata.clear()
            assert returned == stored
            replaced = dataclasses.replace(returned, planner_data={})
            assert (replaced.planner_data, replaced.storage_data) == ({}, stored.storage_data)
            assert sorted(returned.planner_data) == sorted(returned.state_dict_metadata)
            assert len(returned.storage_data) == len(stored.storage_data) > 0
        theirs = save_by_torch(_state(1), checkpoint_id="torch", storage_writer=writer)
        assert_same_content(returned, theirs)
        assert set(returned.storage_data) == set(theirs.storage_data)
        for step in range(4):
            dcp.save(_state(step), checkpoint_id=f"later-{step}", storage_writer=writer)
        dist.barrier()
        assert not places.directory("memory", "a").exists()
        assert returned == stored
        # Nobody has looked at this one while its checkpoint was there.
        assert_same_content(unseen, theirs)
    assert set(unseen.storage_data) == set(theirs.storage_data)
    returned.planner_data = {"mine": 1}
    assert returned.planner_data == {"mine": 1}
    returned.planner_data = stored.planner_data
    return pickle.dumps(returned)


_READ_METADATA = """
import pickle, sys
metadata = pickle.load(open(sys.argv[1], "rb"))
assert "dcp_mem" not in sys.modules
print(type(metadata).__name__, len(metadata.storage_data) > 3)
"""


@RANKS
def test_what_dcp_save_returns_is_metadata_in_everything_on_every_rank(
    places: Places, tmp_path: Path, ranks: int
) -> None:
    first, *others = forked_ranks(_looks_at_what_a_save_returns, ranks, places)
    assert all(pickle.loads(other) == pickle.loads(first) for other in others)
    tmp_path.joinpath("metadata").write_bytes(first)
    told = subprocess.run(
        [
            sys.executable,
            "-c",
            _READ_METADATA,
            str(tmp_path / "metadata"),
        ],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        timeout=100,
    )
    assert told.stdout == "Metadata True\n"


def _saves_metadata_of_another_save(places: Places) -> None:
    with places.writer(persist=False) as writer:
        for save in (dcp.save, save_by_torch, dcp_mem.save):
            first = dcp.save(_state(1), checkpoint_id="first", storage_writer=writer)
            save({"of first": first, "t": torch.ones(2)}, checkpoint_id="2", storage_writer=writer)
            del first
            dist.barrier()


def _loads_metadata(places: Places) -> int:
    into = {"of first": None, "t": torch.zeros(2)}
    _load(places, "2", into)
    metadata: Any = into["of first"]
    assert type(metadata) is Metadata
    return len(metadata.state_dict_metadata)


def test_metadata_can_itself_be_saved_and_is_whole_in_another_process(places: Places) -> None:
    forked_ranks(_saves_metadata_of_another_save, 2, places)
    assert forked(_loads_metadata, places) == 9


class _Pickling(TorchPlanner):
    """Pickles something while DCP saves."""

    def __init__(self, what: object) -> None:
        super().__init__()
        self.what, self.pickled = what, b""

    def create_local_plan(self) -> SavePlan:
        self.pickled = pickle.dumps(self.what)
        return super().create_local_plan()


@on_ranks(2)
def test_metadata_that_is_pickled_within_another_save_is_whole(places: Places) -> None:
    with places.writer(persist=False) as writer:
        planner = _Pickling(dcp.save(_state(1), checkpoint_id="first", storage_writer=writer))
        dcp.save(_state(2), checkpoint_id="2", storage_writer=writer, planner=planner)
        pickled = planner.pickled
    assert len(pickle.loads(pickled).state_dict_metadata) == 9


@RANKS
@on_ranks("ranks")
def test_a_save_that_is_skipped_returns_empty_metadata(places: Places, ranks: int) -> None:
    with places.writer(memory_limit="1KiB", on_full="skip", persist=False) as writer:
        for save in (dcp_mem.save, dcp.save):
            assert save(_state(1), checkpoint_id="a", storage_writer=writer) == Metadata({})
        if dist.is_initialized():
            dist.barrier()  # rank 0 notes it for the node
        assert {one.state.value for one in writer.status()} == {"skipped"}
        if dist.is_initialized():
            dist.barrier()  # closing writers may remove it


# -- ranks that don't do the same ------------------------------------------------------------------


class _Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize("odd", [0, 1])
@on_ranks(2, env=PATIENCE)
def test_one_rank_that_needs_torchs_planner_takes_all_with_it_and_the_next_save_does_not(
    places: Places, odd: int
) -> None:
    torch.serialization.add_safe_globals([_Subclass])
    is_odd = dist.get_rank() == odd
    with places.writer(persist=False) as writer, logged() as lines, _torch_plans() as by_torch:
        for step, save in enumerate((dcp.save, dcp_mem.save, dcp.save)):
            planner = TorchPlanner() if is_odd else DefaultSavePlanner() if step else None
            save(_state(step), checkpoint_id="a", storage_writer=writer, planner=planner)
            assert len(by_torch) == 1
            comes_back(places, "a", _state(step), roads=FROM_MEMORY)
            by_torch.clear()
            subclass = torch.arange(3).as_subclass(_Subclass) if is_odd else torch.arange(3)
            state = {**_state(step), f"own.{dist.get_rank()}": subclass}
            save(state, checkpoint_id="b", storage_writer=writer)
            assert len(by_torch) == 1
            by_torch.clear()
            into: State = {
                **blank_of(_state(step)),
                f"own.{dist.get_rank()}": torch.zeros(3, dtype=torch.int64),
            }
            _load(places, "b", into)
            assert torch.equal(into[f"own.{dist.get_rank()}"], torch.arange(3))
            by_torch.clear()
            save(_state(step), checkpoint_id="c", storage_writer=writer)
            assert not by_torch
            comes_back(places, "c", _state(step), roads=FROM_MEMORY)
            by_torch.clear()
            dist.barrier()
    reasons = why_torch_plans(lines)
    assert any(TorchPlanner.__name__ in reason for reason in reasons)
    assert any(f"rank {odd}" in reason for reason in reasons)


class _RaisesTheSecondTime:
    """A stateful object that answers dcp_mem.save, and fails in the dcp.save that follows."""

    calls = 0

    def state_dict(self) -> State:
        self.calls += 1
        if self.calls == 2:
            raise ValueError("asked twice")
        return {"own": torch.arange(3).as_subclass(_Subclass)}

    def load_state_dict(self, state: State) -> None:
        raise NotImplementedError


def _saves_after_a_save_that_was_left_to_torch_and_failed(places: Places) -> list[object]:
    with places.writer(persist=False) as writer, _torch_plans() as by_torch:
        writer.annotate_next_save(step=7)
        bad = {**_state(0), "object": _RaisesTheSecondTime()}
        with pytest.raises(ValueError, match="asked twice"):
            dcp_mem.save(bad, checkpoint_id="bad", storage_writer=writer)
        dcp.save(_state(1), checkpoint_id="good", storage_writer=writer)
        comes_back(places, "good", _state(1), roads=FROM_MEMORY)
        return [by_torch, [entry.step for entry in writer.status()]]


def test_what_is_known_of_a_save_that_torch_plans_ends_with_it(places: Places) -> None:
    [found] = forked_ranks(_saves_after_a_save_that_was_left_to_torch_and_failed, 1, places)
    assert found == [[], [None]]


@pytest.mark.parametrize("odd", [0, 1])
@on_ranks(2, env=PATIENCE)
def test_ranks_may_load_with_different_planners(places: Places, odd: int) -> None:
    is_odd = dist.get_rank() == odd
    with places.writer(persist=False) as writer:
        dcp.save(_state(1), checkpoint_id="a", storage_writer=writer)
    reader = places.reader("memory", "a")
    for _ in range(2):
        for planner in (TorchLoadPlanner() if is_odd else None, None):
            with _torch_plans_loads() as by_torch:
                into = blank_of(_state(0))
                dcp.load(into, checkpoint_id="a", storage_reader=reader, planner=planner)
                assert_same(_state(1), into)
            assert by_torch == ([TorchLoadPlanner.__name__] if planner is not None else [])


@pytest.mark.parametrize("load", [dcp.load, dcp_mem.load])
@pytest.mark.parametrize("failing", [0, 1])
@on_ranks(2, env=PATIENCE)
def test_a_rank_that_cannot_plan_a_load_fails_it_on_all(
    places: Places, failing: int, load: Any
) -> None:
    with places.writer(persist=False) as writer:
        dcp.save(_state(1), checkpoint_id="a", storage_writer=writer)
    reader = places.reader("memory", "a")
    for _ in range(2):
        into = blank_of(_state(0))
        if dist.get_rank() == failing:
            into["there is none"] = torch.zeros(3)
        failures = _failures_of(partial(load, into, checkpoint_id="a", storage_reader=reader))
        is_own = dist.get_rank() == failing or load is dcp.load
        assert isinstance(failures[failing], RuntimeError if is_own else RankFailed)
        assert "Missing key in checkpoint state_dict: there is none" in str(failures[failing])
        for rank, error in failures.items():
            assert rank == failing or f"rank {failing}: EntriesMissing" in str(error)
        into = blank_of(_state(0))
        load(into, checkpoint_id="a", storage_reader=reader)
        assert_same(_state(1), into)


def _loads_of_which_one_rank_is_interrupted(
    places: Places, interrupted: int, where: str
) -> list[str]:
    with places.writer(persist=False) as writer:
        dcp.save(_state(1), checkpoint_id="a", storage_writer=writer)
    if dist.get_rank() == interrupted:
        patch, open_newest = pytest.MonkeyPatch(), find.open_newest

        def interrupt(*arguments: Any, **_: object) -> None:
            if where == "opened":
                open_newest(*arguments)  # the other ranks go on
            raise KeyboardInterrupt

        if where == "planning":
            patch.setattr(LocalLoadPlanner, "plan", interrupt)
        else:
            patch.setattr(reader_module, "open_newest", interrupt)
    failures = _failures_of(
        lambda: dcp.load(
            blank_of(_state(0)), checkpoint_id="a", storage_reader=places.reader("memory", "a")
        )
    )
    return [f"{rank} {type(error).__name__}" for rank, error in failures.items()]


@pytest.mark.parametrize("where", ["opening", "opened", "planning"])
@pytest.mark.parametrize("interrupted", [0, 1])
def test_an_interrupt_of_one_rank_leaves_no_rank_waiting_in_a_load(
    places: Places, interrupted: int, where: str
) -> None:
    found = forked_ranks(
        _loads_of_which_one_rank_is_interrupted, 2, places, interrupted, where, env=PATIENCE
    )
    assert found[interrupted] == [f"{interrupted} KeyboardInterrupt"]
    assert found[1 - interrupted] == [f"{interrupted} RankFailed"]


def test_what_dcp_mem_leaves_to_dcp_is_logged_once(
    places: Places,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(log_module, "_said", set())
    state = {"a": torch.ones(3)}
    with caplog.at_level("INFO", "dcp_mem"):
        for step in range(2):
            stock = str(tmp_path / str(step))
            dcp_mem.save(state, storage_writer=dcp.FileSystemWriter(stock))
            dcp_mem.load(state, storage_reader=dcp.FileSystemReader(stock))
    said = [one.message for one in caplog.records if " leaves " in one.message]
    assert said == [
        "dcp_mem.save leaves saves to dcp.save: the storage_writer isn't a MemoryStorageWriter",
        "dcp_mem.load leaves loads to dcp.load: the storage_reader isn't a MemoryStorageReader",
    ]


def test_why_torch_plans_a_load_is_logged_once(
    places: Places, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_module, "_said", set())
    with places.writer(persist=False) as writer:
        dcp.save({"a": torch.ones(3)}, checkpoint_id="a", storage_writer=writer)
    with caplog.at_level("INFO", "dcp_mem"):
        for _ in range(2):
            _load(places, "a", {"a": torch.zeros(3)}, planner=TorchLoadPlanner())
            _load(places, "a", {"a": torch.zeros(3)})
    said = [one.message for one in caplog.records if "left to torch's planner" in one.message]
    assert len(said) == 1
    assert "a planner of its own, TorchLoadPlanner" in said[0]


# -- the order of DCP's contract -------------------------------------------------------------------


def _looks_before_anything_is_written(places: Places) -> list[str]:
    """The saves on whose entry into `write_data` everything was as before the save."""
    seen: list[str] = []
    name = ""
    write_data: Callable[..., Any] = MemoryStorageWriter.write_data

    def looking(self: MemoryStorageWriter, *args: Any) -> Any:
        memory = JobMemory(places.memory, places.job)
        assert not memory.find(name), name
        assert name not in [one.name for one in self.status()]
        own = places.directory("memory", name)
        assert not [*own.rglob("manifest*"), *own.rglob(".metadata")], name
        seen.append(name)
        return write_data(self, *args)

    def save_behind(state: State, **options: Any) -> None:
        begun: Any = dcp.async_save(state, **options)
        getattr(begun, "upload_completion", begun).result(60)

    with (
        places.writer(keep_memory=20, persist=False) as writer,
        pytest.MonkeyPatch.context() as changed,
    ):
        changed.setattr(MemoryStorageWriter, "write_data", looking)
        for road, save in (("ours", dcp.save), ("torch", save_by_torch), ("async", save_behind)):
            for step in range(3):
                name = f"{road}-{step}"
                save(_state(step), checkpoint_id=name, storage_writer=writer)
                assert JobMemory(places.memory, places.job).find(name)
                dist.barrier()
    return seen


@RANKS
def test_nothing_is_complete_before_dcp_has_called_write_data(places: Places, ranks: int) -> None:
    for seen in forked_ranks(_looks_before_anything_is_written, ranks, places):
        assert seen == [
            f"{road}-{step}" for road in ("ours", "torch", "async") for step in range(3)
        ]


# -- loads -----------------------------------------------------------------------------------------


class _MetadataMade(Exception):
    """DCP's metadata of an entry was made, or unpickled."""


_MOST_SPECIMENS = 50  # torch is asked about a few entries of each new state dict


@contextlib.contextmanager
def _no_metadata_is_made() -> Iterator[None]:
    """Refuse entries of DCP's metadata, but for a few, whoever makes or unpickles them."""
    made = []

    def refuse(*_: object, **__: object) -> None:
        raise _MetadataMade

    def counted(make: Callable[..., None]) -> Callable[..., None]:
        def make_few(*args: Any, **options: Any) -> None:
            made.append(1)
            if len(made) > _MOST_SPECIMENS:
                raise _MetadataMade
            make(*args, **options)

        return make_few

    with pytest.MonkeyPatch.context() as patch:
        for kind in (Metadata, TensorStorageMetadata, ChunkStorageMetadata):
            patch.setattr(kind, "__init__", counted(kind.__init__))
            patch.setattr(kind, "__setstate__", refuse, raising=False)
        yield


@contextlib.contextmanager
def _counted_reads() -> Iterator[list[int]]:
    """Count the system calls that read segments."""
    calls: list[int] = []

    def counting(read: Callable[..., int]) -> Callable[..., int]:
        def counted(*args: Any) -> int:
            calls.append(1)
            return read(*args)

        return counted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", counting(os.preadv))
        patch.setattr(copying, "_preadv", counting(copying._preadv))
        patch.setattr(copying, "_pread", counting(copying._pread))
        yield calls


@RANKS
@on_ranks("ranks")
def test_many_small_tensors_load_with_few_reads_and_without_dcps_metadata(
    places: Places, ranks: int
) -> None:
    state = {"model": {f"layer.{number}": torch.full((70,), number) for number in range(2000)}}
    with places.writer(persist=False) as writer:
        dcp.save(state, checkpoint_id="a", storage_writer=writer)
        own = places.directory("memory", "a") / ".dcp_mem"
        wait_until(
            lambda: len([*own.glob("checksums-*.json")]) == dist.get_world_size(),
            "checksums to be made",
        )
        dist.barrier()
    counts = []
    for verify in (True, False):
        into, reader = blank_of(state), places.reader("memory", "a", verify=verify)
        with _counted_reads() as calls, _no_metadata_is_made(), _torch_plans_loads() as by_torch:
            dcp.load(into, checkpoint_id="a", storage_reader=reader)
        assert not by_torch
        assert_same(state, into)
        counts.append(len(calls))
    with _no_metadata_is_made():
        reader = places.reader("memory", "a")
        assert _failures_of(lambda: load_by_torch(into, checkpoint_id="a", storage_reader=reader))
    assert 0 < min(counts) <= max(counts) < 60, counts  # of 2,000 payloads


@RANKS
@on_ranks("ranks")
def test_a_state_dict_that_does_not_fit_gets_torchs_own_error(places: Places, ranks: int) -> None:
    with places.writer(persist=False) as writer:
        dcp.save(_state(1), checkpoint_id="a", storage_writer=writer)
    unfit: list[State] = [
        {**_state(0), "absent": torch.zeros(3)},
        {**_state(0), "absent": "text"},
        {**_state(0), "model": {"w": torch.zeros(10)}},
        {**_state(0), "model": {"w": torch.zeros(3, 3)}},
        {**_state(0), "model": {"w": "text"}},
        {**_state(0), "rows": rows_of_five(8)},
    ]
    for state in unfit:
        theirs, *both = (
            _failures_of(
                partial(load, copy.copy(state), storage_reader=places.reader("memory", "a"))
            )
            for load in (load_by_torch, dcp.load, dcp_mem.load)
        )
        by_dcp, by_dcp_mem = both
        assert theirs.keys() == by_dcp.keys() == set(range(dist.get_world_size()))
        me = dist.get_rank()  # dcp_mem.load has a rank's own error, and a word of the others'
        for ours in (by_dcp, {me: by_dcp_mem[me]}):
            for rank, error in ours.items():
                if isinstance(error, EntriesMissing):  # torch names the first of them
                    assert error.missing == ("absent",)
                    assert isinstance(theirs[rank], RuntimeError)
                    assert str(error).startswith(f"{theirs[rank]} ")
                else:
                    assert repr(error) == repr(theirs[rank])
    of_all: list[State] = []
    for load in (load_by_torch, dcp.load, dcp_mem.load):
        other = {**blank_of(_state(0)), "step": torch.zeros(3)}
        load(other, storage_reader=places.reader("memory", "a"))
        of_all.append(other)
    assert_same(of_all[0], of_all[1])
    assert_same(of_all[0], of_all[2])
    for load in (dcp.load, dcp_mem.load):
        reader = places.reader("memory", "absent")
        absent = _failures_of(
            partial(load, _state(0), checkpoint_id="absent", storage_reader=reader)
        )
        assert all(isinstance(error, CheckpointNotFound) for error in absent.values())
        assert absent
    assert_same(_state(1), _load(places, "a", blank_of(_state(0))))


@RANKS
@on_ranks("ranks")
def test_a_part_of_a_checkpoint_loads_as_by_torch(places: Places, ranks: int) -> None:
    state = _state(1)
    with places.writer(persist=False) as writer:
        dcp.save(state, checkpoint_id="a", storage_writer=writer)
    with _torch_plans_loads() as by_torch:
        for load in (dcp.load, dcp_mem.load):
            from_memory: Any = {
                "checkpoint_id": "a",
                "storage_reader": places.reader("memory", "a"),
            }
            into = {**blank_of(state), "absent": torch.full((3,), 7.0), "missing": "text"}
            load(into, planner=DefaultLoadPlanner(allow_partial_load=True), **from_memory)
            assert_same({**state, "absent": torch.full((3,), 7.0), "missing": "text"}, into)
            into = {"model": blank_of(state["model"])}
            load(into, **from_memory)
            assert_same({"model": state["model"]}, into)
            nothing: State = {}
            load(nothing, **from_memory)
            assert not nothing
        assert not by_torch
    for keys in ({"model"}, {"step"}, {"model.w"}, "step", None):
        ours, theirs = (
            state_dict_loader._load_state_dict_from_keys(
                keys,
                checkpoint_id=None if road.startswith("stock") else "a",
                storage_reader=places.reader(road, "a"),
            )
            for road in FROM_MEMORY
        )
        assert ours.keys() == theirs.keys()
        assert_same(ours, theirs)
        assert ours or keys != {"model"}


@dataclasses.dataclass
class _Settings:
    """What only free unpickling brings back."""

    rate: float


class _Noting(dict[str, Any]):
    """A dict that notes what is put into it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.noted: list[str] = []

    def __setitem__(self, key: str, value: Any) -> None:
        self.noted.append(key)
        super().__setitem__(key, value)


@RANKS
@on_ranks("ranks")
def test_a_load_fills_the_callers_dicts_tensors_and_lists_as_torch_does(
    places: Places, ranks: int
) -> None:
    """Places that the caller refers to otherwise, too, are filled, and not replaced."""
    state: State = {
        "settings": _Settings(0.5),
        "nested": {"deep": [torch.arange(3.0), {"deeper": (1, 2)}, [torch.ones(2)]], "n": 3},
        "meta": torch.arange(4.0),
        "t": torch.arange(6.0).view(2, 3),
    }
    with places.writer(persist=False) as writer:
        dcp.save(state, checkpoint_id="a", storage_writer=writer)
    found: list[list[Any]] = []
    for load in (load_by_torch, dcp.load):
        tensor, inner = torch.zeros(3), _Noting({"deeper": None})
        nested = _Noting({"deep": [tensor, inner, [torch.zeros(2)]], "n": 0})
        into = _Noting({"settings": None, "nested": nested, "t": torch.zeros(2, 3)})
        load(into, checkpoint_id="a", storage_reader=places.reader("memory", "a"))
        assert into["settings"] == _Settings(0.5)
        assert into["nested"] is nested
        assert nested["deep"][0] is tensor
        assert nested["deep"][1] is inner
        assert torch.equal(tensor, torch.arange(3.0))
        assert torch.equal(nested["deep"][2][0], torch.ones(2))
        assert (nested["n"], inner["deeper"]) == (3, (1, 2))
        assert torch.equal(into["t"], state["t"])
        # Newer torch sets some items twice, and containers that it has filled.
        found.append([sorted(set(each.noted) - {"deep"}) for each in (into, nested, inner)])
        parameter = torch.nn.Parameter(torch.zeros(2, 3))
        meta: State = {"meta": torch.empty(4, device="meta"), "t": parameter}
        load(meta, checkpoint_id="a", storage_reader=places.reader("memory", "a"))
        assert meta["t"] is parameter
        assert parameter.requires_grad
        found.append([str(meta["meta"].device), meta["meta"].tolist()])
    assert found[:2] == found[2:]
    assert found[1] == ["cpu", [0.0, 1.0, 2.0, 3.0]]


@RANKS
@on_ranks("ranks")
def test_one_reader_loads_over_and_over(places: Places, ranks: int) -> None:
    with places.writer(keep_memory=3, persist=False) as writer:
        for step in range(3):
            dcp.save(_state(step), checkpoint_id=f"{step}", storage_writer=writer)
        with places.reader("memory", "") as reader:  # type: ignore[attr-defined]
            for load in (dcp.load, load_by_torch, dcp_mem.load, dcp.load):
                for step in (1, 2, 0):
                    into = blank_of(_state(0))
                    load(into, checkpoint_id=f"{step}", storage_reader=reader)
                    assert_same(_state(step), into)
                    assert reader.report().checkpoint_id == f"{step}"
                unfit = {**blank_of(_state(0)), "absent": 1}
                assert _failures_of(partial(dcp.load, unfit, storage_reader=reader))
                into = blank_of(_state(0))
                load(into, storage_reader=reader)
                assert_same(_state(2), into)
        assert_same(
            _state(1), _load(places, "1", blank_of(_state(0)), planner=DefaultLoadPlanner())
        )


# -- drivers of other torches ----------------------------------------------------------------------

Change = Callable[[str], str]


def _instead(*replacements: tuple[str, str]) -> Change:
    """A change of a driver's text; each replacement has to change it."""

    def change(text: str) -> str:
        for pattern, replacement in replacements:
            text, count = re.subn(pattern, replacement, text, flags=re.MULTILINE)
            assert count, f"{pattern} isn't in {text}"
        return text

    return change


def _with_another_planner_variable(text: str) -> str:
    head, wrapper, body = text.partition("    distW = _DistWrapper(")
    assert wrapper
    body, count = re.subn(r"(?<![\w.\"])planner\b(?!=)", "chosen", body)
    assert count > 5
    return f"{head}    chosen = planner\n{wrapper}{body}"


_ASKED = r"^( +)storage_meta = storage_writer\.storage_meta\(\)$"
_PLANNED = r"^( +)(local_plan = planner\.create_local_plan\(\))$"
_PREPARED = r"^( +)(local_plan = storage_writer\.prepare_local_plan\(local_plan\))$"
_ASK = r"\1storage_writer.storage_meta()\n\1\2"
_NOT_ASKED = (_ASKED, r"\1storage_meta = None")
_READ = r"^( +)metadata = storage_reader\.read_metadata\(\)$"
_SET_UP = r"planner\.set_up_planner\(state_dict, metadata, distW\.is_coordinator\)"

SAVE_DRIVERS: dict[str, tuple[Change, bool]] = {
    "asks after set_up_storage_writer": (_instead(_NOT_ASKED, (_PLANNED, _ASK)), False),
    "asks after create_local_plan": (_instead(_NOT_ASKED, (_PREPARED, _ASK)), False),
    "asks twice": (_instead((_ASKED, r"\1storage_writer.storage_meta()\n\g<0>")), False),
    "asks after set_up_planner": (
        _instead(
            _NOT_ASKED,
            (r"^( +)(if \(\n +\"kwargs\"\n|if \"kwargs\" in|storage_writer\.set_up_)", _ASK),
        ),
        False,
    ),
    "never asks": (_instead(_NOT_ASKED), False),
    "names its step otherwise": (_instead((r"\blocal_step\b", "first_step")), False),
    "names its planner otherwise": (_with_another_planner_variable, False),
    "is torch's": (lambda text: text, True),
}
"""How a driver differs, and whether dcp_mem has to plan under it."""

LOAD_DRIVERS: dict[str, tuple[Change, bool]] = {
    "reads after set_up_planner": (
        _instead(
            (_SET_UP, "planner.metadata = metadata"),
            (_READ, r"\1planner.set_up_planner(state_dict, None, distW.is_coordinator)\n\g<0>"),
        ),
        False,
    ),
    "reads twice": (_instead((_READ, r"\1storage_reader.read_metadata()\n\g<0>")), False),
    "names its step otherwise": (_instead((r"\blocal_step\b", "first_step")), False),
    "names its planner otherwise": (_with_another_planner_variable, False),
    "is torch's": (lambda text: text, True),
}


@contextlib.contextmanager
def _driver(module: Any, name: str, change: Change) -> Iterator[None]:
    """Drive with a changed text of torch's driver."""
    made: dict[str, Any] = {}
    text = change(textwrap.dedent(inspect.getsource(getattr(module, name))))
    exec(compile(text, f"<another {name}>", "exec"), vars(module), made)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, made[name])
        yield


R = TypeVar("R")


def _with_each(
    act: Callable[[Places, str], R], drivers: Sequence[str], places: Places
) -> dict[str, R]:
    """Return what this returns under each driver, in jobs of their own."""
    return {
        which: act(dataclasses.replace(places, job=f"job-{number}"), which)
        for number, which in enumerate(drivers)
    }


def _saves_by_another_driver(places: Places, which: str) -> list[str]:
    change, is_own = SAVE_DRIVERS[which]
    with places.writer(persist=False) as writer, logged() as lines:
        for step in range(4):
            with _driver(state_dict_saver, "_save_state_dict", change), _torch_plans() as by_torch:
                returned = dcp.save(_state(step), checkpoint_id="a", storage_writer=writer)
            assert len(by_torch) == (0 if is_own else min(len(by_torch), 1))
            comes_back(places, "a", _state(step), roads=FROM_MEMORY)
            dist.barrier()
            with _torch_plans() as by_torch:
                usual = dcp.save(_state(step), checkpoint_id="b", storage_writer=writer)
            assert not by_torch
            assert_same_content(returned, usual)
            comes_back(places, "b", _state(step), roads=FROM_MEMORY)
            dist.barrier()
    return why_torch_plans(lines)


@RANKS
def test_a_torch_that_drives_its_writers_in_another_way_saves_well(
    places: Places, ranks: int
) -> None:
    said = "this torch drives its writers in another way"
    unknown = ("never", "names", "asks after set_up_storage", "asks after create")
    act = partial(_with_each, _saves_by_another_driver, list(SAVE_DRIVERS))
    for found in forked_ranks(act, ranks, places, env=PATIENCE, timeout=200):
        for which, reasons in found.items():
            assert reasons.count(said) == which.startswith(unknown), (which, reasons)


def _begun(state: State, name: str, writer: MemoryStorageWriter) -> Future[Any]:
    saving = dcp.async_save(state, checkpoint_id=name, storage_writer=writer)
    assert isinstance(saving, Future)
    return saving


def _async_saves_by_another_driver(places: Places, which: str) -> list[str]:
    """Save after two usual saves, whose plan the writer stages by; return what went wrong."""
    change, _ = SAVE_DRIVERS[which]
    failures = []
    with places.writer(persist=False) as writer:
        for step in range(2):
            _begun(_state(step), "a", writer).result()
        for step in range(2, 5):
            with _driver(state_dict_saver, "_save_state_dict", change):
                saving = _begun(_state(step), "b", writer)
                try:
                    saving.result()
                except dcp.CheckpointException as error:  # a BaseException
                    failures.append(str(error))
                else:
                    comes_back(places, "b", _state(step), roads=FROM_MEMORY)
            dist.barrier()
        _begun(_state(9), "c", writer).result()
        comes_back(places, "c", _state(9), roads=FROM_MEMORY)
    return failures


@RANKS
def test_a_torch_that_drives_its_writers_in_another_way_saves_what_is_staged_or_refuses_it_once(
    places: Places, ranks: int
) -> None:
    act = partial(_with_each, _async_saves_by_another_driver, list(SAVE_DRIVERS))
    for found in forked_ranks(act, ranks, places, env=PATIENCE, timeout=200):
        for which, failures in found.items():
            assert len(failures) <= 1, (which, failures)
            assert all("DefaultStager" in failure for failure in failures), (which, failures)


def _loads_by_another_driver(places: Places, which: str) -> None:
    change, is_own = LOAD_DRIVERS[which]
    with places.writer(persist=False) as writer:
        for step in range(2):
            dcp.save(_state(step), checkpoint_id=f"{step}", storage_writer=writer)
    reader = places.reader("memory", "")
    # Only the first look at the metadata goes by the name.
    steps: list[int | None] = [None] * 2 if which == "reads twice" else [1, 0, 1]
    for wanted in steps:
        into = blank_of(_state(0))
        with _driver(state_dict_loader, "_load_state_dict", change), _torch_plans_loads() as asked:
            dcp.load(
                into, checkpoint_id=None if wanted is None else f"{wanted}", storage_reader=reader
            )
            assert len(asked) <= (0 if is_own else 1)
        assert_same(_state(1 if wanted is None else wanted), into)


@RANKS
def test_a_torch_that_drives_its_readers_in_another_way_loads_well(
    places: Places, ranks: int
) -> None:
    act = partial(_with_each, _loads_by_another_driver, list(LOAD_DRIVERS))
    forked_ranks(act, ranks, places, env=PATIENCE, timeout=200)


# -- copies of ShardedTensors ----------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Please use DTensor instead:FutureWarning")
@on_ranks(1)
def test_shards_that_lie_on_a_device_are_copied_to_the_host(places: Places) -> None:
    tensor = torch.arange(12.0).reshape(4, 3)
    metadata = ShardMetadata(shard_offsets=[0, 0], shard_sizes=[4, 3], placement="rank:0/cpu")
    sharded = init_from_local_shards([Shard(tensor, metadata)], 4, 3)
    metadata.placement = _remote_device("rank:0/cuda:0")  # what is copied lies on the host
    found = copied({"sharded": sharded})["sharded"]
    (shard,) = found.local_shards()
    assert str(shard.metadata.placement) == "rank:0/cpu"
    assert str(metadata.placement) == "rank:0/cuda:0"
    assert torch.equal(shard.tensor, tensor)
    assert shard.tensor.data_ptr() != tensor.data_ptr()
    assert found.metadata() == sharded.metadata()


# -- what can't be staged --------------------------------------------------------------------------


class _CannotBeCopied:
    def __deepcopy__(self, memo: Any) -> Any:
        raise OSError(5, "no copy today")


@pytest.mark.skipif(
    not hasattr(dcp.state_dict_saver, "AsyncCheckpointerType"), reason="torch 2.6 doesn't stage"
)
@pytest.mark.parametrize("failing", [0, 1])
@on_ranks(2, env=PATIENCE)
def test_what_cannot_be_copied_for_an_asynchronous_save_fails_it_whoever_plans(
    places: Places, failing: int
) -> None:
    is_failing = dist.get_rank() == failing
    with places.writer(persist=False) as writer:
        for planner in (None, TorchPlanner(), DefaultSavePlanner(flatten_sharded_tensors=False)):
            for call in (dcp.async_save, dcp_mem.async_save):
                state: State = _state(1)
                if is_failing:
                    state["held"] = _CannotBeCopied()
                saving: Any = call(
                    state, checkpoint_id="bad", storage_writer=writer, planner=planner
                )
                failures = _failures_of(partial(saving.result, 60))
                assert "no copy today" in str(failures[failing])
                assert not writer.status()
        _begun(_state(2), "good", writer).result(60)
        comes_back(places, "good", _state(2), roads=FROM_MEMORY)
        dist.barrier()


# -- both roads, at random -------------------------------------------------------------------------

PLANNERS: dict[str, dict[str, bool]] = {
    "torch's default": {},
    "saving to the lowest rank": {"dedup_save_to_lowest_rank": True},
    # With one of the two, torch's planner loses byte items: it loads into a copy of the dict.
    "not flattening": {"flatten_state_dict": False, "flatten_sharded_tensors": False},
    "keeping sharded tensors": {"flatten_sharded_tensors": False},
}
"""Options of torch's default planner, of saves and of loads."""

if CACHING:
    PLANNERS["caching"] = {"enable_plan_caching": True}


def _saves_at_random_on_both_roads(places: Places, seed: int) -> None:
    random = Random(seed)
    world = dist.get_world_size()
    parts, mesh_of = sharding.draw(random, world), sharding.meshes()
    kinds = random.sample(sorted(PLANNERS), 2)
    with places.writer(keep_memory=3, persist=False) as writer:
        for step in range(5):
            if step not in (0, 3):
                parts = sharding.changed(random, parts, world)
            kind = random.choice(kinds)
            print(f"step {step}: a planner that is {kind}")
            make = partial(_built, parts, mesh_of, PLANNERS[kind])
            _saves_on_both_roads(places, writer, make(step), partial(make, 99), PLANNERS[kind])


def _built(
    parts: Sequence[sharding.Part], mesh_of: sharding.Meshes, options: dict[str, bool], seed: int
) -> State:
    state = sharding.build(parts, dist.get_rank(), mesh_of, seed)
    return state if options.get("flatten_state_dict", True) else _flat(state)


def _flat(state: State) -> State:
    """The same, with nothing nested: as a planner needs it that doesn't flatten."""
    nested = {key: value for key, value in state.items() if isinstance(value, dict)}
    inner = {f"{key}/{name}": value for key, of in nested.items() for name, value in of.items()}
    return {**{key: value for key, value in state.items() if key not in nested}, **inner}


def _saves_on_both_roads(
    places: Places,
    writer: MemoryStorageWriter,
    state: State,
    blank: Callable[[], State],
    options: dict[str, bool],
) -> None:
    """Save by dcp_mem's plan, by torch's, and by dcp_mem's again."""
    flattens = {key: value for key, value in options.items() if key.startswith("flatten")}
    # Torch's cached plans don't notice a tensor of another dtype, or with gradients now.
    uncached = {key: value for key, value in options.items() if key != "enable_plan_caching"}
    roads = {"ours": DefaultSavePlanner, "torch": TorchPlanner, "again": DefaultSavePlanner}
    returned = {}
    with _torch_plans() as by_torch:
        for name, kind in roads.items():
            planner = kind(**(uncached if kind is TorchPlanner else options))
            returned[name] = dcp.save(
                state, checkpoint_id=name, storage_writer=writer, planner=planner
            )
    left_to_torch = [kind.__name__ for kind in roads.values() if flattens or kind is TorchPlanner]
    assert by_torch == left_to_torch
    for name, kind in roads.items():
        assert_same_content(returned[name], returned["torch"])
        assert set(returned[name].storage_data) == set(returned["torch"].storage_data)
        stored = places.metadata(name)
        assert_same_content(returned[name], stored)
        assert kind.__name__ in left_to_torch or returned[name] == stored
        comes_back(
            places,
            name,
            state,
            blank=blank,
            roads=FROM_MEMORY,
            load_planner=lambda: DefaultLoadPlanner(**flattens),
        )
    items = {name: _items(places, name, returned[name]) for name in roads}
    assert items["ours"] == items["torch"]
    assert items["again"] == items["torch"]
    if "dedup_save_to_lowest_rank" in options:
        assert _writers(returned["ours"]) == _writers(returned["torch"])
    if dist.get_world_size() == 1:
        written = {name: _written(places, name, returned[name]) for name in roads}
        assert written["ours"] == written["torch"]
        assert written["again"] == written["torch"]
    dist.barrier()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    calls: dict[str, Callable[..., Any]] = {
        "dcp_mem.save": dcp_mem.save,
        "dcp.async_save": dcp.async_save,
        "overlapped": partial(dcp_mem.async_save, overlap=optimizer),
    }
    for name, call in calls.items():
        planner = DefaultSavePlanner(**options)
        begun = call(state, checkpoint_id=name, storage_writer=writer, planner=planner)
        if call is not dcp_mem.save:
            getattr(begun, "upload_completion", begun).result(60)
        stored = places.metadata(name)
        assert_same_content(stored, returned["torch"])
        assert _items(places, name, stored) == items["torch"]
        dist.barrier()


def _items(places: Places, name: str, metadata: Metadata) -> dict[MetadataIndex, bytes]:
    """The bytes of each item, whichever rank wrote it: torch balances the writers otherwise."""
    files = {info.relative_path for info in metadata.storage_data.values()}
    data = {file: places.directory("memory", name).joinpath(file).read_bytes() for file in files}
    return {
        index: data[info.relative_path][info.offset : info.offset + info.length]
        for index, info in metadata.storage_data.items()
    }


def _written(places: Places, name: str, metadata: Metadata) -> dict[int, bytes]:
    """The bytes of the segment, by offset; between items, and behind the last, lies anything."""
    (path,) = places.directory("memory", name).glob("*.distcp")
    data = path.read_bytes()
    return {
        info.offset: data[info.offset : info.offset + info.length]
        for info in metadata.storage_data.values()
    }


@pytest.mark.timeout(240)
@settings(
    max_examples=8,
    phases=(Phase.explicit, Phase.generate),  # each example starts processes
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(world=st.integers(1, 4), seed=st.integers(0, 1 << 32))
def test_both_roads_in_turn_save_the_same(places: Places, world: int, seed: int) -> None:
    print(f"seed {seed} of {SEED}")
    mine = dataclasses.replace(places, job=f"job-{world}-{seed}")
    forked_ranks(_saves_at_random_on_both_roads, world, mine, seed, timeout=100)


def test_segments_of_both_roads_are_equal_to_the_byte_on_one_rank(places: Places) -> None:
    forked_ranks(_saves_at_random_on_both_roads, 1, places, SEED)
