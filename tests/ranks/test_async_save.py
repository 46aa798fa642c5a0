"""`dcp.async_save` with its thread and process executors, and writers that are pickled."""

import inspect
import os
import pickle
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dcp_mem
from dcp_mem import MemoryStorageReader, MemoryStorageWriter
from tests.support.checkpoints.jobs import wait_until
from tests.support.checkpoints.roundtrip import (
    Places,
    State,
    assert_same,
    blank_of,
    comes_back,
)
from tests.support.processes.forks import forked, in_process, on_ranks
from tests.support.variants import with_variants

_TYPES: Any = getattr(dcp.state_dict_saver, "AsyncCheckpointerType", None)
EXECUTORS = {each.value: each for each in _TYPES} if _TYPES is not None else {"thread": None}
"""By name; torch 2.6 has threads only."""
OWN = "dcp_mem.async_save"


class _Own(dcp.DefaultSavePlanner):
    """A planner that dcp_mem doesn't stand in for."""


needs_processes = pytest.mark.skipif(
    "process" not in EXECUTORS, reason=f"torch {torch.__version__} has threads only"
)


def _state(step: int) -> State:
    state: State = {
        "w": torch.full((5000,), float(step)),
        "step": step,
        "nested": {"log": "x" * step * 1000},
    }
    if dist.is_initialized():
        rank, world = dist.get_rank(), dist.get_world_size()
        state["sharded"] = distribute_tensor(
            torch.arange(30.0).reshape(10, 3) + step, init_device_mesh("cpu", (world,)), [Shard(0)]
        )
        state[f"own.{rank}"] = torch.full((9,), rank + step)
    return state


def _start(
    writer: MemoryStorageWriter, state: State, name: str, executor: str, **options: Any
) -> "Future[Any]":
    """Begin a save with one of DCP's executors, or as `OWN` does."""
    begin: Any = dcp_mem.async_save if executor == OWN else dcp.async_save
    if EXECUTORS.get(executor) is not None:
        options["async_checkpointer_type"] = EXECUTORS[executor]
    started = begin(state, checkpoint_id=name, storage_writer=writer, **options)
    future: Future[Any] = getattr(started, "upload_completion", started)
    return future


def _spoil(state: State, future: "Future[Any]", executor: str) -> None:
    """Go on training: what is being saved must not notice."""
    if "async_stager" not in inspect.signature(dcp.async_save).parameters and executor != OWN:
        future.result(timeout=60)  # torch 2.6 copies nothing that is on the CPU already
    for value in state.values():
        if isinstance(value, torch.Tensor):
            (value.to_local() if hasattr(value, "to_local") else value).fill_(-77)


def _is_there(places: Places, writer: MemoryStorageWriter, name: str, state: State) -> None:
    writer.wait(name, timeout=60)
    if dist.is_initialized():
        dist.barrier()
    comes_back(places, name, state)
    if dist.is_initialized():
        dist.barrier()


@needs_processes
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.variant), 2])
@on_ranks("ranks", timeout=100)
def test_saves_in_processes_in_threads_and_plain_ones_share_a_job(
    places: Places, ranks: int
) -> None:
    """Asynchronous saves in a row, the third followed by a plain one, all by one writer."""
    with places.writer(keep_memory=2, agent="process") as writer:
        for step, executor in enumerate(["process", "thread", "process", "process"]):
            state = _state(step)
            future = _start(writer, state, f"step-{step}", executor)
            _spoil(state, future, executor)
            future.result(timeout=60)
            _is_there(places, writer, f"step-{step}", _state(step))
            if step == 2:
                dcp.save(_state(52), checkpoint_id="plain", storage_writer=writer)
                _is_there(places, writer, "plain", _state(52))
        job = Path(places.memory, places.job)
        kept = sorted(path.name for path in job.iterdir() if path.is_dir() and path.name[0] != ".")
        assert len(kept) == 2, kept


@needs_processes
@pytest.mark.parametrize(
    "point",
    with_variants(["stage.copied", "stage.sealed", "complete.receipts"], gate=["stage.sealed"]),
)
@on_ranks(1, timeout=100)
def test_a_kill_of_the_process_that_saves_leaves_the_checkpoint_before(
    places: Places, point: str
) -> None:
    os.environ["DCP_MEM_FAULTS"] = f"{point}:kill:2"  # of the process that torch is about to start
    with places.writer(keep_memory=3, agent="process", persist=False) as writer:
        _start(writer, _state(1), "step-1", "process").result(timeout=60)
        state = _state(2)
        with pytest.raises(BaseException):  # noqa: B017, PT011 - torch's own, of a process that is gone
            _start(writer, state, "step-2", "process").result(timeout=60)
        into = blank_of(_state(0))
        reader = MemoryStorageReader(None, memory_root=places.memory, job=places.job)
        with reader:
            dcp_mem.load(into, storage_reader=reader)
            assert reader.report().checkpoint_id == "step-1"
        assert_same(_state(1), into)


@pytest.mark.parametrize("executor", ["thread", OWN])
@in_process
def test_a_save_that_fails_before_it_calls_the_writer_holds_up_no_other(
    places: Places, executor: str
) -> None:
    set_up = dcp.state_dict_saver._storage_setup

    def fail_in_the_background(*arguments: Any, **options: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            raise LookupError("too early")
        return set_up(*arguments, **options)  # torch 2.6 calls it before it stages, too

    with places.writer(persist=False) as writer:
        for step in range(2):  # the second one copies into a slot
            _start(writer, _state(step), f"good-{step}", executor).result(timeout=60)
        slots = Path(places.memory, places.job, ".slots")
        free = len(list(slots.glob("*.slot")))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dcp.state_dict_saver, "_storage_setup", fail_in_the_background)
            failed = _start(writer, _state(-1), "bad", executor)
            error = failed.exception(timeout=60)  # and so all that it was given stays here
        assert "too early" in str(error)
        wait_until(lambda: len(list(slots.glob("*.slot"))) >= free)
        _start(writer, _state(2), "good-2", executor).result(timeout=20)
        comes_back(places, "good-2", _state(2), roads=("memory",))


def _uses_of_dcps_own_call(places: Places) -> dict[str, int]:
    """How often dcp_mem.async_save leaves a save to dcp.async_save, by how it was called."""
    used: dict[str, int] = {}

    def begin(state: State, **options: Any) -> Any:
        used[how] += 1
        return async_save(state, **options)

    async_save: Any = dcp.async_save
    with pytest.MonkeyPatch.context() as patch, places.writer(persist=False) as writer:
        patch.setattr(dcp, "async_save", begin)
        for how, options in _HOW_CALLED.items():
            used[how], name = 0, how.replace(" ", "-")
            with pytest.MonkeyPatch.context() as inner:
                if how == "a torch that saves in another way":
                    inner.setattr(dcp_mem.functional.saves, "can_save_staged", lambda: False)
                _start(writer, _state(1), name, OWN, **options).result(timeout=60)
            comes_back(places, name, _state(1), roads=("memory",))
    # A thread is kept for the next save, not one for each.
    assert len([one for one in threading.enumerate() if "async-save" in one.name]) == 1
    return used


_HOW_CALLED: dict[str, dict[str, Any]] = {
    "plainly": {},
    "with a planner": {"planner": dcp.DefaultSavePlanner()},
    "a torch that saves in another way": {},
}
if "no_dist" in inspect.signature(dcp.save).parameters:  # newer than torch 2.6
    _HOW_CALLED["alone"] = {"no_dist": True}


def test_dcps_own_call_is_used_only_where_dcp_mem_cannot_stand_in_for_it(places: Places) -> None:
    used = forked(_uses_of_dcps_own_call, places)
    assert used == {how: int(how.startswith("a torch")) for how in _HOW_CALLED}


@on_ranks(2)
def test_training_goes_on_with_its_collectives_while_a_thread_saves(places: Places) -> None:
    """Collectives of the training go on in the main thread while saves run beside it."""
    group = dist.new_group(backend="gloo")  # for the saves; async_save must not share the trainer's
    with places.writer() as writer:
        for step in range(6):
            future = _start(writer, _state(step), f"step-{step}", "thread", process_group=group)
            total = torch.zeros(())
            for _ in range(50):
                total += 1
                dist.all_reduce(total)
                total /= dist.get_world_size()
            assert total == 50
            future.result(timeout=60)
        writer.wait("step-5", timeout=60)
        dist.barrier()
        comes_back(places, "step-5", _state(5))
        dist.barrier()


@pytest.mark.parametrize("call", [dcp_mem.save, dcp_mem.async_save])
@on_ranks(2)
def test_a_save_without_a_process_group_is_of_the_ranks_of_the_writer(
    places: Places, call: Any
) -> None:
    alone = [dist.new_group([rank], backend="gloo") for rank in range(2)][dist.get_rank()]
    if dist.get_rank() == 0:  # the other rank saves nothing, and nobody waits for it
        with places.writer(process_group=alone) as writer:
            for step, options in enumerate([{}, {}, {"planner": _Own()}]):
                state = {"w": torch.full((5000,), float(step))}
                saved = call(state, checkpoint_id=f"step-{step}", storage_writer=writer, **options)
                state["w"] = torch.zeros(5000)
                if isinstance(saved, Future):
                    saved.result(timeout=60)
        with MemoryStorageReader(None, memory_root=places.memory, job=places.job) as reader:
            dcp_mem.load(state, storage_reader=reader, no_dist=True)
            assert reader.report().checkpoint_id == "step-2"
        assert state["w"].min() == 2
    dist.barrier()


def test_each_pickled_copy_of_a_writer_saves_on(places: Places) -> None:
    with places.writer(keep_memory=3) as writer:
        for step in range(6):
            state = {"w": torch.full((50,), float(step)), "step": step}
            places.save(writer, state, f"step-{step}")
            comes_back(places, f"step-{step}", state)
            writer = pickle.loads(pickle.dumps(writer))
        assert [entry.name for entry in writer.status() if entry.in_memory] == [
            "step-5",
            "step-4",
            "step-3",
        ]


def _saves_pickled(places: Places, pickled: bytes, step: int) -> None:
    with pickle.loads(pickled) as writer:
        places.save(writer, {"w": torch.full((50,), float(step))}, f"step-{step}")


def test_a_pickled_writer_saves_in_another_process_while_the_first_lives(places: Places) -> None:
    with places.writer() as writer:
        places.save(writer, {"w": torch.full((50,), 0.0)}, "step-0")
        forked(_saves_pickled, places, pickle.dumps(writer), 1)
        comes_back(places, "step-1", {"w": torch.full((50,), 1.0)})
        places.save(writer, {"w": torch.full((50,), 2.0)}, "step-2")
        for step in (1, 2):
            comes_back(places, f"step-{step}", {"w": torch.full((50,), float(step))})


def test_a_pickled_writer_holds_no_state_of_the_process(places: Places) -> None:
    with places.writer() as writer:
        empty = len(pickle.dumps(writer))
        places.save(writer, {f"t{i}": torch.randn(10) for i in range(300)}, "step-0")
        assert len(pickle.dumps(writer)) <= empty + 200


def test_storage_options_travel_with_a_pickled_writer(places: Places) -> None:
    writer = MemoryStorageWriter(
        "memory://bucket",
        memory_root=places.memory,
        job="job",
        storage_options={"secret": "value"},
        agent="thread",
    )
    assert pickle.loads(pickle.dumps(writer)).settings == writer.settings
