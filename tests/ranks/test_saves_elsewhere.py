"""`dcp.async_save` with the process executor: a copy goes to a process, which saves it."""

from __future__ import annotations

import gc
import os
import random
import signal
import socket
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import dcp_mem
from dcp_mem import MemoryStorageWriter
from tests.support.checkpoints.jobs import Job, make_state, number_of
from tests.support.processes.forks import forked_ranks, on_ranks

_TYPES: Any = getattr(dcp.state_dict_saver, "AsyncCheckpointerType", None)
_SECONDS = 100.0

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(_TYPES is None, reason=f"torch {torch.__version__} has threads only"),
]

FAILURES = (Exception, dcp.CheckpointException)


def _free_port() -> int:
    """A port that Linux gives to nobody who asks for any.

    torch's is of those, and may be taken by the time its other process has started.
    """
    for _ in range(100):
        port = random.SystemRandom().randrange(15_000, 30_000)
        with socket.socket() as tried, suppress(OSError):
            tried.bind(("", port))
            return port
    raise AssertionError("no free port")


def _begin(writer: MemoryStorageWriter, state: Any, name: str, **options: Any) -> Future[Any]:
    with patch("torch.distributed.checkpoint._async_process_executor.get_free_port", _free_port):
        begun: Any = dcp_mem.async_save(
            state,
            checkpoint_id=name,
            storage_writer=writer,
            async_checkpointer_type=_TYPES.PROCESS,
            **options,
        )
    future: Future[Any] = getattr(begun, "upload_completion", begun)
    return future


def _saved(writer: MemoryStorageWriter, step: int, **options: Any) -> None:
    """Save a step's state, which training changes as soon as the call has returned."""
    state = make_state(step)
    future = _begin(writer, state, f"step-{step}", **options)
    _spoil(state)
    assert future.result(_SECONDS).state_dict_metadata


def _number_in(job: Job, name: str | None) -> int:
    state = make_state(-1)
    with job.reader() as reader:
        dcp.load(state, checkpoint_id=name, storage_reader=reader)
    return number_of(state)


def _spoil(state: dict[str, Any]) -> None:
    for value in state.values():
        if isinstance(value, dict):
            _spoil(value)
        elif isinstance(value, torch.Tensor):
            (value.to_local() if hasattr(value, "to_local") else value).fill_(-77)


def _files(job: Job, *suffixes: str) -> list[Path]:
    return [path for path in job.directory.rglob("*") if path.suffix in suffixes]


# -- what is saved comes back ----------------------------------------------------------------------


@on_ranks(1, timeout=200)
def test_each_save_may_be_of_a_writer_of_its_own(memory_job: Job) -> None:
    for step in range(4):
        writer = memory_job.writer(keep_memory=3)
        _saved(writer, step)
        assert _number_in(memory_job, f"step-{step}") == step
    writer.close()


def _on_nodes(root: str, parts: int) -> None:
    copies: dict[str, Any] = {"replicas": 1} if not parts else {"redundancy": dcp_mem.parity(parts)}
    node = f"{root}/node{dist.get_rank()}"
    with MemoryStorageWriter(None, memory_root=node, job="job", keep_memory=2, **copies) as writer:
        for step in range(5):
            _saved(writer, step)
            writer.wait(f"step-{step}", "replicated", timeout=_SECONDS)
            dist.barrier()
        found = make_state(-1)
        # As a node that has lost its memory has it: all of the segment comes from elsewhere.
        dist.barrier()
        if dist.get_rank() == 1:
            node = f"{root}/new"
        with dcp_mem.MemoryStorageReader(None, memory_root=node, job="job") as reader:
            dcp.load(found, storage_reader=reader)
        assert number_of(found) == 4
        dist.barrier()


@pytest.mark.parametrize("parts", [0, 2])
def test_copies_on_other_nodes_are_made_of_it(memory_root: Path, parts: int) -> None:
    with patch.dict(os.environ, {"DCP_MEM_REPLICATION_TIMEOUT": "60"}):
        forked_ranks(_on_nodes, 1 + (parts or 1), str(memory_root), parts, timeout=200)


def _open_descriptors() -> int:
    gc.collect()  # torch's tensors in shared memory may wait for it
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(
    ("options", "call", "ranks"),
    [
        ({}, {}, 2),
        ({}, {"lowest": True}, 2),
        ({}, {"no_dist": True}, 1),
        ({"frozen": "replicated"}, {}, 2),
        ({"memory_limit": "1GiB"}, {}, 2),
    ],
)
@on_ranks("ranks", timeout=200)
def test_whatever_a_save_is_told_it_is_whole_and_slots_and_descriptors_stay_as_many(
    memory_job: Job, options: dict[str, Any], call: dict[str, Any], ranks: int
) -> None:
    before, call = 0, dict(call)
    if call.pop("lowest", False):
        call["planner"] = dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    with memory_job.writer(keep_memory=2, **options) as writer:
        for step in range(8):
            if step == 4:
                before = _open_descriptors()
            _saved(writer, step, **call)
            if not call.get("no_dist"):
                assert _number_in(memory_job, f"step-{step}") == step
                dist.barrier()
        assert len(_files(memory_job, ".distcp", ".slot")) <= 4 * dist.get_world_size()
        dist.barrier()
        grown = _open_descriptors() - before
    assert grown <= 2


def _of_structure(number: int, step: int) -> dict[str, Any]:
    return make_state(step) | {f"more {one}": torch.full((7,), step) for one in range(number)}


@on_ranks(2, timeout=200)
def test_states_of_several_structures_are_saved(memory_job: Job) -> None:
    """Save states of six structures in turn, twice: more than plans are kept."""
    with memory_job.writer(keep_memory=2) as writer:
        for step in range(12):
            state = _of_structure(step % 6, step)
            future = _begin(writer, state, f"step-{step}")
            _spoil(state)
            future.result(_SECONDS)
            assert _number_in(memory_job, f"step-{step}") == step
            dist.barrier()


@on_ranks(2, timeout=200)
def test_a_structure_that_changes_on_one_rank_alone_is_saved(memory_job: Job) -> None:
    with memory_job.writer(keep_memory=3) as writer:
        for step in range(5):
            state = _of_structure(dist.get_rank() * (step > 1), step)
            _begin(writer, state, f"step-{step}").result(_SECONDS)
            assert _number_in(memory_job, f"step-{step}") == step
            dist.barrier()


@on_ranks(2, timeout=200)
def test_a_save_that_is_told_to_overlap_is_of_the_state_at_the_call(memory_job: Job) -> None:
    """Train on right after each call, as with threads."""
    torch.manual_seed(dist.get_rank())
    model, own = torch.nn.Linear(32, 64), f"model {dist.get_rank()}"
    optimizer = torch.optim.AdamW(model.parameters())
    with memory_job.writer(keep_memory=3) as writer:
        for step in range(3):
            expected = {key: value.clone() for key, value in model.state_dict().items()}
            future = _begin(writer, {own: model.state_dict()}, f"step-{step}", overlap=optimizer)
            model(torch.randn(4, 32)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            future.result(_SECONDS)
            found = {own: {key: torch.zeros_like(one) for key, one in expected.items()}}
            with memory_job.reader() as reader:
                dcp.load(found, checkpoint_id=f"step-{step}", storage_reader=reader)
            for key, value in expected.items():
                assert torch.equal(value, found[own][key]), (step, key)
            dist.barrier()


# -- failures, and the end -------------------------------------------------------------------------


class _Refused:
    """Fails where it is sent to another process, or written."""

    def __deepcopy__(self, _: Any) -> _Refused:
        return self

    def __reduce__(self) -> Any:
        raise LookupError("not to be sent")


def _one_of_several_fails(job: Job) -> None:
    """The second of three saves that are under way fails, because of rank 1."""
    with job.writer(keep_memory=9) as writer:
        for first in (0, 3):
            futures = []
            for step in range(first, first + 3):
                state = make_state(step) | {"log": step}
                if step == first + 1 and dist.get_rank() == 1:
                    state["log"] = _Refused()
                futures.append(_begin(writer, state, f"step-{step}"))
                _spoil(state)
            with pytest.raises(FAILURES, match="not to be sent"):
                futures[1].result(_SECONDS)
            for step in (first, first + 2):
                futures[step - first].result(_SECONDS)
                assert _number_in(job, f"step-{step}") == step
                dist.barrier()
        assert sorted(one.name for one in writer.status()) == [
            f"step-{step}" for step in (0, 2, 3, 5)
        ]
        dist.barrier()


def test_each_of_several_futures_has_the_error_of_its_own_save_on_all_ranks(
    memory_job: Job,
) -> None:
    with patch.dict(os.environ, {"DCP_MEM_TIMEOUT": "60"}):
        forked_ranks(_one_of_several_fails, 2, memory_job, timeout=200)


@on_ranks(1, timeout=200)
def test_a_close_during_a_save_harms_neither_it_nor_another(memory_job: Job) -> None:
    """It knows of the saves of its own process alone."""
    writer = memory_job.writer(keep_memory=2)
    for step in range(2):
        _saved(writer, step)
    future = _begin(writer, make_state(2), "step-2")
    writer.close()
    future.result(_SECONDS)
    assert _number_in(memory_job, None) == 2
    with memory_job.writer(keep_memory=2) as another:
        for step in range(3, 6):
            _saved(another, step)
            assert _number_in(memory_job, None) == step


class _Kills(_Refused):
    def __reduce__(self) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


def _is_killed_as_it_sends(job: Job) -> None:
    writer = job.writer(keep_memory=2)
    for step in range(2):
        _begin(writer, make_state(step) | {"log": step}, f"step-{step}").result(_SECONDS)
    _begin(writer, make_state(2) | {"log": _Kills()}, "step-2").result(_SECONDS)


def _is_killed_after_the_call(job: Job) -> None:
    writer = job.writer(keep_memory=2)
    for step in range(2):
        _saved(writer, step)
    _begin(writer, make_state(2), "step-2")
    os.kill(os.getpid(), signal.SIGKILL)


def _goes_on(job: Job) -> int:
    newest = _number_in(job, None)
    with job.writer(keep_memory=2) as writer:
        for step in range(3, 7):
            _saved(writer, step)
            assert _number_in(job, None) == step
        assert len(_files(job, ".distcp", ".slot")) <= 4
        assert not _files(job, ".new")
    return newest


@pytest.mark.parametrize(
    ("killed", "newest"), [(_is_killed_as_it_sends, {1}), (_is_killed_after_the_call, {1, 2})]
)
def test_a_kill_of_the_process_that_copies_leaves_whole_checkpoints(
    memory_job: Job, killed: Callable[[Job], None], newest: set[int]
) -> None:
    with pytest.raises(AssertionError, match="SIGKILL"):
        forked_ranks(killed, 1, memory_job, timeout=100)
    assert set(forked_ranks(_goes_on, 1, memory_job, timeout=100)) <= newest
