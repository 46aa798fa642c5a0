"""`dcp.async_save` with the process executor: the caller copies into a slot, a process seals it."""

from __future__ import annotations

import gc
import os
import random
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import dcp_mem
from dcp_mem import MemoryStorageWriter
from dcp_mem.common import faults
from dcp_mem.memory import copying
from dcp_mem.saving import private_copies
from dcp_mem.saving import saver as saver_module
from dcp_mem.saving import stage as stage_module
from dcp_mem.saving.overlap import Overlap
from tests.support.checkpoints.copies import held_copies
from tests.support.checkpoints.jobs import Job, make_state, number_of
from tests.support.processes.forks import forked_ranks

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


def _held_inodes() -> set[int]:
    """The inodes of all files that this process has open."""
    paths = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    return {path.stat().st_ino for path in paths if path.exists()}


@contextmanager
def _counted() -> Iterator[tuple[list[str], list[int]]]:
    """Who copies ("torch": torch's stager), and how many bytes each message to a process has."""
    copied_by: list[str] = []
    sent: list[int] = []
    send_bytes: Callable[..., Any] = Connection._send_bytes  # type: ignore[attr-defined]

    def counting(self: Connection, data: Any) -> None:
        sent.append(len(data))
        send_bytes(self, data)

    def copy(moves: Any) -> None:
        if moves:
            copied_by.append(threading.current_thread().name)
        copying.copy(moves)

    def copy_many(destination: Any, source: Any, nbytes: Any) -> None:
        copied_by.append(threading.current_thread().name)
        copying.copy_many(destination, source, nbytes)

    def copied(*args: Any, **options: Any) -> Any:
        copied_by.append("torch")
        return private_copies.copied(*args, **options)

    with (
        patch.object(stage_module, "copy", copy),
        patch.object(stage_module, "copy_many", copy_many),
        patch.object(saver_module, "copied", copied),
        patch.object(Connection, "_send_bytes", counting),
    ):
        yield copied_by, sent


# -- the only copy ---------------------------------------------------------------------------------


def _copies_once(job: Job) -> None:
    here = threading.current_thread().name
    ranks = dist.get_world_size()
    with job.writer(keep_memory=2) as writer:
        for step in range(6):
            state = make_state(step)
            with _counted() as (copied_by, sent):
                future = _begin(writer, state, f"step-{step}")
                _spoil(state)
                metadata = future.result(_SECONDS)
            assert metadata.state_dict_metadata
            assert _number_in(job, f"step-{step}") == step
            if step == 0:
                assert copied_by[0] == "torch"  # the ranks have no plan yet
                continue
            assert copied_by == [here], step  # all of it in one batch, by the caller
            assert sum(sent) < 32 << 10, sent
            segments = {
                path.stat().st_ino for path in (job.directory / f"step-{step}").glob("*.distcp")
            }
            assert len(segments) == ranks
            assert len(segments & _held_inodes()) == 1  # this process has filled one of them
            dist.barrier()
        # Two checkpoints, one that is staged, and the slot of the first save.
        assert len(_files(job, ".distcp", ".slot", ".sent")) <= 4 * ranks
        dist.barrier()
    dist.barrier()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_warm_save_copies_once_in_the_callers_thread(memory_job: Job, ranks: int) -> None:
    forked_ranks(_copies_once, ranks, memory_job, timeout=200)


def _several_at_once(job: Job) -> None:
    with job.writer(keep_memory=9) as writer:
        _begin(writer, make_state(0), "step-0").result(_SECONDS)
        for first in (1, 5):
            under_way = []
            for step in range(first, first + 4):
                state = make_state(step)
                with _counted() as (copied_by, _):
                    under_way.append(_begin(writer, state, f"step-{step}"))
                assert "torch" not in copied_by
                _spoil(state)
            for future in under_way:
                future.result(_SECONDS)
            for step in range(first + 4):
                assert _number_in(job, f"step-{step}") == step
            dist.barrier()


@pytest.mark.parametrize("ranks", [1, 2])
def test_several_saves_under_way_are_each_of_their_own_step(memory_job: Job, ranks: int) -> None:
    forked_ranks(_several_at_once, ranks, memory_job, timeout=200)


def _a_new_writer_for_each(job: Job) -> None:
    for step in range(4):
        writer = job.writer(keep_memory=3)
        state = make_state(step)
        with _counted() as (copied_by, _):
            _begin(writer, state, f"step-{step}").result(_SECONDS)
        assert ("torch" in copied_by) == (step == 0)
        assert _number_in(job, f"step-{step}") == step
    writer.close()


def test_what_is_known_of_a_job_is_known_to_its_next_writer(memory_job: Job) -> None:
    forked_ranks(_a_new_writer_for_each, 1, memory_job, timeout=200)


def _on_nodes(root: str, parts: int) -> None:
    copies: dict[str, Any] = {"replicas": 1} if not parts else {"redundancy": dcp_mem.parity(parts)}
    node = f"{root}/node{dist.get_rank()}"
    with MemoryStorageWriter(None, memory_root=node, job="job", keep_memory=2, **copies) as writer:
        for step in range(5):
            state = make_state(step)
            with _counted() as (copied_by, _):
                _begin(writer, state, f"step-{step}").result(_SECONDS)
            assert ("torch" in copied_by) == (step == 0)
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
def test_copies_on_other_nodes_are_made_of_what_was_received(memory_root: Path, parts: int) -> None:
    with patch.dict(os.environ, {"DCP_MEM_REPLICATION_TIMEOUT": "60"}):
        forked_ranks(_on_nodes, 1 + (parts or 1), str(memory_root), parts, timeout=200)


def _with(job: Job, options: dict[str, Any], call: dict[str, Any]) -> tuple[list[bool], int]:
    """Return which of some saves copy once, and by how many the open descriptors have grown."""
    once, before = [], 0
    call = dict(call)
    if call.pop("lowest", False):
        call["planner"] = dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    with job.writer(keep_memory=2, **options) as writer:
        for step in range(12):
            if step == 6:
                before = _open_descriptors()
            state = make_state(step)
            with _counted() as (copied_by, _):
                future = _begin(writer, state, f"step-{step}", **call)
            _spoil(state)
            future.result(_SECONDS)
            once.append("torch" not in copied_by)
            if not call.get("no_dist"):
                assert _number_in(job, f"step-{step}") == step
        return once, _open_descriptors() - before


def _open_descriptors() -> int:
    gc.collect()  # torch's tensors in shared memory may wait for it
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(
    ("options", "call", "ranks", "is_once"),
    [
        ({}, {}, 2, True),
        ({}, {"lowest": True}, 2, True),
        ({}, {"no_dist": True}, 1, True),
        ({"frozen": "replicated"}, {}, 2, True),
        ({"memory_limit": "1GiB"}, {}, 2, False),
    ],
)
def test_whatever_a_save_is_told_descriptors_stay_as_many(
    memory_job: Job, options: dict[str, Any], call: dict[str, Any], ranks: int, is_once: bool
) -> None:
    for once, grown in forked_ranks(_with, ranks, memory_job, options, call, timeout=200):
        assert once == [False] + 11 * [is_once]
        assert grown <= 2


# -- structures that change ------------------------------------------------------------------------


def _of_structure(number: int, step: int) -> dict[str, Any]:
    return make_state(step) | {f"more {one}": torch.full((7,), step) for one in range(number)}


def _changes(job: Job, structures: int) -> int:
    """Save states of so many structures in turn, three times; return how many copy once."""
    once = 0
    with job.writer(keep_memory=2) as writer:
        for step in range(3 * structures):
            state = _of_structure(step % structures, step)
            with _counted() as (copied_by, _):
                future = _begin(writer, state, f"step-{step}")
            _spoil(state)
            future.result(_SECONDS)
            once += "torch" not in copied_by
            assert _number_in(job, f"step-{step}") == step
            dist.barrier()
    return once


@pytest.mark.parametrize(("structures", "once"), [(3, 6), (6, 0)])
def test_states_of_several_structures_are_saved(
    memory_job: Job, structures: int, once: int
) -> None:
    """Of more structures than plans are kept, the process that saves has forgotten each in time."""
    assert forked_ranks(_changes, 2, memory_job, structures, timeout=200) == [once, once]


def _changes_on_one_rank(job: Job) -> None:
    with job.writer(keep_memory=3) as writer:
        for step in range(2):
            _begin(writer, make_state(step), f"step-{step}").result(_SECONDS)
        future = _begin(writer, _of_structure(dist.get_rank(), 2), "step-2")
        with pytest.raises(FAILURES, match="another structure"):
            future.result(_SECONDS)
        assert _number_in(job, None) == 1
        dist.barrier()
        for step in (3, 4):
            state = _of_structure(dist.get_rank(), step)
            _begin(writer, state, f"step-{step}").result(_SECONDS)
            assert _number_in(job, f"step-{step}") == step
            dist.barrier()


def test_a_structure_that_changes_on_one_rank_fails_once_on_all(memory_job: Job) -> None:
    forked_ranks(_changes_on_one_rank, 2, memory_job, timeout=200)


# -- copies behind the loop ------------------------------------------------------------------------


def _trained(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    _step(model, optimizer)
    return model, optimizer


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(4, 32)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _overlaps(job: Job, breaks_the_rule: bool) -> None:
    model, optimizer = _trained(dist.get_rank())
    weight = model.get_parameter("0.weight")
    overlap = Overlap(optimizer, validate=True)

    def state(step: int) -> dict[str, Any]:
        own = f"model {dist.get_rank()}"
        return {own: dict(model.state_dict()), "rng": torch.full((16,), step)}

    with job.writer(keep_memory=3) as writer:
        for step in range(4):
            expected = {
                key: value.clone() for key, value in state(step)[f"model {dist.get_rank()}"].items()
            }
            with held_copies() as may_go_on:
                future = _begin(writer, state(step), f"step-{step}", overlap=overlap)
                if breaks_the_rule and step == 3 and dist.get_rank() == 0:
                    with torch.no_grad():
                        weight.add_(1)
                may_go_on.set()
            _step(model, optimizer)
            if breaks_the_rule and step == 3:
                with pytest.raises(FAILURES, match=r"0\.weight"):
                    future.result(_SECONDS)
                break
            future.result(_SECONDS)
            found = {
                f"model {dist.get_rank()}": {
                    key: torch.zeros_like(one) for key, one in expected.items()
                }
            }
            with job.reader() as reader:
                dcp.load(found, checkpoint_id=f"step-{step}", storage_reader=reader)
            for key, value in expected.items():
                assert torch.equal(value, found[f"model {dist.get_rank()}"][key]), (step, key)
            dist.barrier()
        dist.barrier()
        last = "step-2" if breaks_the_rule else "step-3"
        assert last in [one.name for one in writer.status()]
        assert "step-3" not in [one.name for one in writer.status()] or not breaks_the_rule
        dist.barrier()


@pytest.mark.parametrize("breaks_the_rule", [False, True])
def test_copies_behind_the_loop_are_waited_for_before_the_slot_is_sent(
    memory_job: Job, breaks_the_rule: bool
) -> None:
    forked_ranks(_overlaps, 2, memory_job, breaks_the_rule, timeout=200)


# -- the end ---------------------------------------------------------------------------------------


def _closes_at_once(job: Job) -> None:
    writer = job.writer(keep_memory=2)
    for step in range(2):
        _begin(writer, make_state(step), f"step-{step}").result(_SECONDS)
    future = _begin(writer, make_state(2), "step-2")
    writer.close()
    why = future.exception(_SECONDS)
    assert why is None or "given back" in str(why), why
    assert _number_in(job, None) == (2 if why is None else 1)
    with job.writer(keep_memory=2) as another:
        for step in range(3, 6):
            _begin(another, make_state(step), f"step-{step}").result(_SECONDS)
            assert _number_in(job, None) == step
    assert not _files(job, ".sent")


def test_a_close_during_a_save_harms_no_other(memory_job: Job) -> None:
    """It knows of the saves of its own process alone."""
    forked_ranks(_closes_at_once, 1, memory_job, timeout=200)


def _is_killed(job: Job, point: str) -> None:
    model, optimizer = _trained(0)
    writer = job.writer(keep_memory=2)

    def save(step: int) -> None:
        state = make_state(step) | {"model": dict(model.state_dict())}
        _begin(writer, state, f"step-{step}", overlap=optimizer).result(_SECONDS)

    for step in range(2):
        save(step)
    faults.arm(f"{point}:kill:1")
    save(2)


def _goes_on(job: Job, ranks: int) -> int:
    newest = _number_in(job, None)
    with job.writer(keep_memory=2) as writer:
        for step in range(3, 7):
            _begin(writer, make_state(step), f"step-{step}").result(_SECONDS)
            assert _number_in(job, None) == step
        assert len(_files(job, ".distcp", ".slot")) <= 4 * ranks
        assert not _files(job, ".sent", ".new")
    return newest


@pytest.mark.parametrize(
    "point", ["stage.claimed", "stage.copied", "overlap.begun", "overlap.copied", "send.sent"]
)
def test_a_kill_of_the_process_that_copies_leaves_the_checkpoint_before(
    memory_job: Job, point: str
) -> None:
    with pytest.raises(AssertionError, match="exit code -9"):
        forked_ranks(_is_killed, 1, memory_job, point, timeout=100)
    [newest] = forked_ranks(_goes_on, 1, memory_job, 1, timeout=100)
    assert newest == 1


def _fails_to_send(job: Job) -> None:
    with job.writer(keep_memory=2) as writer:
        for step in range(2):
            _begin(writer, make_state(step), f"step-{step}").result(_SECONDS)
        faults.arm("send.sent:raise:1")
        future = _begin(writer, make_state(2), "step-2")
        with pytest.raises(FAILURES, match=r"send\.sent"):
            future.result(_SECONDS)
        faults.arm("")
        assert _number_in(job, None) == 1
        dist.barrier()
        for step in range(3, 6):
            state = make_state(step)
            with _counted() as (copied_by, _):
                _begin(writer, state, f"step-{step}").result(_SECONDS)
            assert "torch" not in copied_by
            assert _number_in(job, f"step-{step}") == step
            dist.barrier()
        dist.barrier()
        assert future.exception() is not None  # kept, and doesn't keep the slot
        assert not _files(job, ".sent")
        dist.barrier()


def test_a_copy_that_cannot_be_sent_fails_on_all_ranks(memory_job: Job) -> None:
    forked_ranks(_fails_to_send, 2, memory_job, timeout=200)
