"""From memory to storage and back: each save gets there by itself, whole, despite failures."""

import base64
import contextlib
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

import dcp_mem.flushing.agent
import dcp_mem.flushing.agent_handle
import dcp_mem.flushing.flusher
import dcp_mem.flushing.loop
import dcp_mem.runtime.session
import dcp_mem.saving.agree
from dcp_mem import (
    CheckpointExists,
    CheckpointStatus,
    ConfigError,
    FlushFailed,
    MemoryBudgetExceeded,
    MemoryStorageWriter,
    Persist,
    State,
    StorageUnavailable,
    WaitTimeout,
    every_n_saves,
    every_seconds,
)
from dcp_mem.flushing.registration import Registration
from dcp_mem.memory.job import JobMemory
from dcp_mem.storage import Storage
from dcp_mem.storage.listing import checkpoint_names
from dcp_mem.storage.routes import open_storage
from tests.support.checkpoints.jobs import (
    Job,
    agents,
    load,
    load_anew,
    make_state,
    save,
    wait_until,
)
from tests.support.checkpoints.roundtrip import through_fsspec
from tests.support.processes.forks import forked, forked_ranks, forking, raised_by
from tests.support.processes.launch import TETHER
from tests.support.storage.gated import install as install_gate
from tests.support.storage.servers import S3Server, StorageRoot

pytestmark = pytest.mark.timeout(120)


def _save_and_wait(job: Job, *numbers: int, **options: Any) -> None:
    with job.writer(**options) as writer:
        for number in numbers:
            save(writer, number)
            writer.wait(f"step-{number}", timeout=60)


def _load_with_torch(url: str, options: Mapping[str, Any]) -> int:
    return load(through_fsspec(FsspecReader, url, options))


def _save_with_torch(url: str, options: Mapping[str, Any], number: int) -> None:
    dcp.save(
        make_state(number),
        storage_writer=through_fsspec(partial(FsspecWriter, sync_files=False), url, options),
    )


def test_a_saved_checkpoint_outlives_the_memory_and_torch_reads_it_too(
    storage_root: StorageRoot, memory_root: Path
) -> None:
    job = storage_root.job(memory_root)
    forked(_save_and_wait, job, 1, 2)
    shutil.rmtree(job.directory)
    loaded = forked(load_anew, job)
    assert (loaded.number, loaded.report.checkpoint_id, loaded.report.source) == (
        2,
        "step-2",
        "storage",
    )
    assert forked(load_anew, job, "step-1").number == 1
    assert forked(_load_with_torch, f"{job.url}/step-2", job.storage_options) == 2


def test_what_several_ranks_saved_outlives_the_memory(
    storage_root: StorageRoot, memory_root: Path
) -> None:
    job = storage_root.job(memory_root)
    forked_ranks(_save_and_wait, 2, job, 1, 2)
    shutil.rmtree(job.directory)
    assert [loaded.number for loaded in forked_ranks(load_anew, 2, job)] == [2, 2]
    assert forked(load_anew, job).number == 2
    assert forked_ranks(_load_with_torch, 2, f"{job.url}/step-2", job.storage_options) == [2, 2]


def test_memory_does_not_stand_for_what_torch_has_overwritten_on_storage(
    storage_root: StorageRoot, memory_root: Path
) -> None:
    job = storage_root.job(memory_root)
    path = f"{job.url}/step-1"
    forked(_save_and_wait, job, 1)
    forked(_save_with_torch, path, job.storage_options, 7)
    loaded = forked(load_anew, job)
    assert (loaded.number, loaded.report.source) == (7, "storage")
    assert "another checkpoint of that name is in its place now" in loaded.report.passed_over[0]
    assert [loaded.number for loaded in forked_ranks(load_anew, 2, job, "step-1")] == [7, 7]
    elsewhere = replace(job, memory=str(memory_root / "elsewhere"))
    assert forked(load_anew, elsewhere, "step-1").number == 7
    forked(_save_and_wait, job, 1)
    assert forked(load_anew, job, "step-1").report.source == "memory"
    assert forked(_load_with_torch, path, job.storage_options) == 1


def test_what_torch_wrote_is_loaded_by_name_and_as_the_newest(
    storage_root: StorageRoot, memory_root: Path
) -> None:
    job = storage_root.job(memory_root)
    for number in (1, 2):
        forked(_save_with_torch, f"{job.url}/step-{number}", job.storage_options, number)
    assert forked(load_anew, job).number == 2
    assert forked(load_anew, job, "step-1").number == 1
    assert [loaded.number for loaded in forked_ranks(load_anew, 2, job)] == [2, 2]


# -- the same name again ---------------------------------------------------------------------------


def _save_twice(job: Job) -> None:
    with job.writer() as writer:
        for number in (1, 2):
            save(writer, number, "latest")
            writer.wait("latest", timeout=60)


def test_saving_a_name_again_replaces_it_everywhere(
    storage_root: StorageRoot, memory_root: Path
) -> None:
    job = storage_root.job(memory_root)
    forked(_save_twice, job)
    assert forked(load_anew, job).report.source == "memory"
    shutil.rmtree(job.directory)
    assert forked(load_anew, job, "latest").number == 2
    segments = [name for name in storage_root.names() if name.endswith(".distcp")]
    manifests = [name for name in storage_root.names() if "/manifest-" in name]
    assert (len(segments), len(manifests)) == (1, 1), "the first attempt's files are still there"


def _save_a_name_twice(job: Job) -> Exception | None:
    with job.writer(overwrite=False) as writer:
        save(writer, 1)
        return raised_by(lambda: save(writer, 2, "step-1"))


@pytest.mark.parametrize("ranks", [1, 2])
def test_without_overwrite_a_name_in_memory_is_refused_on_every_rank(
    local_root: StorageRoot, memory_root: Path, ranks: int
) -> None:
    job = local_root.job(memory_root)
    for error in forked_ranks(_save_a_name_twice, ranks, job):
        assert isinstance(error, CheckpointExists)
        assert isinstance(error, FileExistsError)
        assert "Checkpoint already exists" in str(error), "torch's own words"
        assert (
            "'step-1' exists already in memory and overwrite=False: choose another checkpoint_id"
            in str(error)
        )
    assert forked(load_anew, job, "step-1").number == 1


def _save_what_storage_has(job: Job) -> tuple[Exception | None, CheckpointStatus]:
    writer = job.writer(overwrite=False)
    save(writer, 2, "step-1")
    error = raised_by(lambda: writer.wait(timeout=60))
    (status,) = writer.status()
    writer.close(flush=False)
    return error, status


def _of_checkpoints(root: StorageRoot) -> list[str]:
    return [name for name in root.names() if not name.startswith("run/.dcp_mem/")]


def test_without_overwrite_a_name_on_storage_is_reported_and_left_alone(
    storage_root: StorageRoot, memory_root: Path
) -> None:
    job = storage_root.job(memory_root)
    forked(_save_and_wait, job, 1)
    there = _of_checkpoints(storage_root)
    shutil.rmtree(job.directory)
    error, status = forked(_save_what_storage_has, job)
    assert isinstance(error, FlushFailed)
    assert f"'step-1' exists already in {job.url} and overwrite=False" in str(error)
    assert (status.state, status.in_memory) == (State.FAILED, True)
    assert f"'step-1' exists already in {job.url}" in status.error
    assert _of_checkpoints(storage_root) == there, "segments of a save that was refused"
    shutil.rmtree(job.directory)
    assert forked(load_anew, job).number == 1


def _registration(job: Job, run: str) -> Registration:
    return Registration(job=job.name or "", url=job.url or "", overwrite=True, run=run)


def _flush_by_an_earlier_registration(job: Job) -> list[str]:
    """Save what storage has, where the node's flusher knows an earlier run alone."""
    flusher = dcp_mem.flushing.loop.FlushLoop(job.memory)
    flusher.register(_registration(job, "earlier"))
    writer = job.writer(overwrite=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dcp_mem.runtime.session.Session, "wake_agent", lambda *_, **__: None)
        save(writer, 2, "step-1")
        found = ["flushed" if flusher.flush_next() else "held back"]
        (checkpoint,) = JobMemory(job.memory, job.name or "").checkpoints()
        own = replace(_registration(job, checkpoint.manifest.run), overwrite=False)
        flusher.register(own)
        found.append("flushed" if flusher.flush_next() else "held back")
        found.append(writer.status()[0].error)
        writer.close(flush=False)
    return found


def test_a_flusher_waits_for_the_registration_of_a_run_that_lives(
    local_root: StorageRoot, memory_root: Path
) -> None:
    job = local_root.job(memory_root)
    forked(_save_and_wait, job, 1)
    for agent in agents(memory_root):  # it would flush what a dead run has left
        agent.kill()
        agent.wait()
    there = _of_checkpoints(local_root)
    shutil.rmtree(job.directory)
    first, second, error = forked(_flush_by_an_earlier_registration, job)
    assert (first, second) == ("held back", "flushed")
    assert f"'step-1' exists already in {job.url} and overwrite=False" in error
    assert _of_checkpoints(local_root) == there


def _save_without_flusher(job: Job) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dcp_mem.runtime.session.Session, "wake_agent", lambda *_, **__: None)
        writer = job.writer()
        save(writer, 1)
        writer.close(flush=False)


def test_another_runs_registration_flushes_what_a_dead_run_has_left(
    local_root: StorageRoot, memory_root: Path
) -> None:
    job = local_root.job(memory_root)
    forked(_save_without_flusher, job)
    flusher = dcp_mem.flushing.loop.FlushLoop(job.memory)
    flusher.register(_registration(job, "later"))
    assert flusher.flush_next()
    assert "run/step-1/.metadata" in local_root.names()


def _reject_newest(job: Job) -> None:
    memory = JobMemory(job.memory, job.name or "")
    memory.reject(memory.checkpoints()[0], "a test")


def _marks_that_fail(job: Job) -> tuple[list[int], int]:
    """Reject the newest of three, which alone is on storage, where no mark can be put.

    Returns:
        How many are on storage at each try to mark it; how often storage is opened by two seconds
        of looks when all are there.
    """
    opened: list[object] = []
    tried: list[int] = []

    def note(*given: Any) -> Storage:
        opened.append(given)
        return open_storage(*given)

    def fail(storage: Storage, *_: object) -> None:
        tried.append(len(checkpoint_names(storage)))
        raise StorageUnavailable(storage.url, "no room")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dcp_mem.runtime.session.Session, "wake_agent", lambda *_, **__: None)
        patch.setattr(dcp_mem.flushing.flusher, "open_storage", note)
        patch.setattr(dcp_mem.flushing.flusher, "mark_rejected", fail)
        writer = job.writer(keep_memory=3)
        for number in range(3):
            save(writer, number)
        flusher = dcp_mem.flushing.loop.FlushLoop(job.memory)
        flusher.register(_registration(job, ""))
        assert flusher.flush_next()
        _reject_newest(job)
        assert flusher.flush_next()
        flusher.retry()
        assert flusher.flush_next()
        opened.clear()
        until = time.monotonic() + 2
        while time.monotonic() < until:
            assert not flusher.flush_next()
            time.sleep(0.05)
        writer.close(flush=False)
    return tried, len(opened)


def test_a_mark_that_storage_doesn_t_take_is_tried_again_behind_the_flush_and_after_a_pause(
    local_root: StorageRoot, memory_root: Path
) -> None:
    tried, opened = forked(_marks_that_fail, local_root.job(memory_root))
    assert tried[:2] == [1, 3], "before the second flush, and behind the third"
    assert opened <= 1
    assert len(tried) <= 3


def test_what_storage_has_in_the_place_of_a_rejected_save_is_not_marked(
    local_root: StorageRoot, memory_root: Path
) -> None:
    job = local_root.job(memory_root)
    forked(_save_without_flusher, job)
    flusher = dcp_mem.flushing.loop.FlushLoop(job.memory)
    flusher.register(_registration(job, ""))
    assert flusher.flush_next()
    stored = Path(job.url or "", "step-1")
    shutil.rmtree(stored)
    stored.mkdir()
    stored.joinpath(".metadata").write_bytes(b"of another save")
    _reject_newest(job)
    assert not flusher.flush_next()
    assert [path.name for path in stored.rglob("*")] == [".metadata"]


def _attempts_at_two_that_fail(job: Job) -> list[int]:
    """Save twice, and try four times with both due; return the attempts at each save."""

    def fail(_flush: object) -> bool:
        raise StorageUnavailable(str(job.url), "no answer")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dcp_mem.runtime.session.Session, "wake_agent", lambda *_, **__: None)
        patch.setattr(dcp_mem.flushing.flusher, "flush", fail)
        with job.writer(keep_memory=2) as writer:
            save(writer, 1)
            save(writer, 2)
            flusher = dcp_mem.flushing.loop.FlushLoop(job.memory)
            flusher.register(_registration(job, ""))
            for _ in range(4):
                flusher.flush_next()
                flusher.retry()
            memory = JobMemory(job.memory, job.name or "")
            attempts = [one.flush.attempts for one in memory.checkpoints()]
            writer.close(flush=False)
    return attempts


def test_a_flush_that_keeps_failing_takes_no_other_ones_turn(
    local_root: StorageRoot, memory_root: Path
) -> None:
    assert forked(_attempts_at_two_that_fail, local_root.job(memory_root)) == [2, 2]


def _order_of_first_saves(job: Job) -> list[str]:
    order: list[str] = []
    session, publish = dcp_mem.runtime.session.Session, JobMemory.publish
    wake = session.wake_agent

    def note_wake(*given: Any, **options: Any) -> None:
        order.append("registered")
        wake(*given, **options)

    def note_publication(*given: Any, **options: Any) -> None:
        order.append("published")
        publish(*given, **options)

    with pytest.MonkeyPatch.context() as patch, job.writer(agent="thread") as writer:
        patch.setattr(session, "wake_agent", note_wake)
        patch.setattr(JobMemory, "publish", note_publication)
        save(writer, 1)
        save(writer, 2)
        return list(order)


def test_a_run_registers_before_its_first_checkpoint_is_there(
    local_root: StorageRoot, memory_root: Path
) -> None:
    order = forked(_order_of_first_saves, local_root.job(memory_root))
    assert order[:2] == ["registered", "published"]
    assert order[2:] == ["registered", "published", "registered"], "once is enough"


# -- what is flushed -------------------------------------------------------------------------------


def _save_five(job: Job, persist: bool | Persist) -> list[CheckpointStatus]:
    with job.writer(persist=persist, agent="thread", keep_memory=5) as writer:
        for number in range(1, 6):
            save(writer, number)
        writer.close(persist_newest=False)
        return writer.status()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("persist", "expected"),
    [
        pytest.param(True, [1, 2, 3, 4, 5], id="True"),
        pytest.param(False, [], id="False"),
        pytest.param(every_n_saves(2), [1, 3, 5], id="every 2"),
        pytest.param(every_seconds(3600), [1], id="every hour"),
        pytest.param(every_seconds(1e-9), [1, 2, 3, 4, 5], id="every instant"),
    ],
)
def test_the_policy_chooses_what_is_flushed(
    local_root: StorageRoot,
    memory_root: Path,
    persist: bool | Persist,
    expected: list[int],
    ranks: int,
) -> None:
    job = local_root.job(memory_root)
    status = forked_ranks(_save_five, ranks, job, persist)[0]
    assert [one.name for one in status if one.state is State.DURABLE] == [
        f"step-{n}" for n in reversed(expected)
    ]
    assert [one.name for one in status if one.persist] == [f"step-{n}" for n in reversed(expected)]
    stored = {name.split("/")[1] for name in local_root.names()} - {".dcp_mem"}
    assert sorted(stored) == [f"step-{n}" for n in expected]


def _save_unflushed(job: Job) -> list[Exception | None]:
    with job.writer(persist=False) as writer:
        save(writer, 1)
        writer.wait("step-1", "complete", timeout=1)
        return [
            raised_by(lambda: writer.wait(timeout=1)),
            raised_by(lambda: writer.wait("step-1", timeout=1)),
        ]


def test_waiting_for_what_is_never_flushed_says_so(
    local_root: StorageRoot, memory_root: Path
) -> None:
    newest, named = forked(_save_unflushed, local_root.job(memory_root))
    assert isinstance(newest, ConfigError)
    assert "nothing becomes durable: the writer has no path, or persist=False" in str(newest)
    assert isinstance(named, FlushFailed)
    assert "persist=" in str(named)


def _save_into_this_process(memory: str) -> tuple[int, str, CheckpointStatus]:
    job = Job("memory://bucket/run", memory)
    with job.writer(agent="thread") as writer:
        save(writer, 1)
        writer.wait(timeout=60)
        (status,) = writer.status()
    shutil.rmtree(job.directory)
    loaded = load_anew(job)
    return loaded.number, loaded.report.source, status


def test_a_thread_flushes_into_a_file_system_that_lives_in_the_process(memory_root: Path) -> None:
    number, source, status = forked(_save_into_this_process, str(memory_root))
    assert (number, source) == (1, "storage")
    assert status.state is State.DURABLE
    assert status.created < status.durable
    assert status.nbytes > 600 * 4
    assert 0 < status.flush_seconds < status.durable - status.created + 1
    assert (status.flush_attempts, status.error) == (1, "")
    assert agents(memory_root) == []


# -- storage that is slower than the saves ---------------------------------------------------------


def _save_while_the_first_is_stuck(memory: str) -> tuple[list[CheckpointStatus], list[str]]:
    gate = install_gate()
    gate.close()
    with Job("gated://bucket/run", memory).writer(agent="thread", keep_memory=2) as writer:
        save(writer, 1)
        gate.wait_for_arrival()
        for number in (2, 3, 4, 5):
            save(writer, number)
        gate.open()
        writer.wait(timeout=60)
        return writer.status(), gate.arrived


def test_the_newest_wins_when_flushing_is_slower_than_saving(memory_root: Path) -> None:
    status, uploads = forked(_save_while_the_first_is_stuck, str(memory_root))
    assert [(one.name, one.state) for one in status] == [
        ("step-5", State.DURABLE),
        ("step-4", State.SKIPPED),
        ("step-3", State.SKIPPED),
        ("step-2", State.SKIPPED),
        ("step-1", State.DURABLE),
    ]
    assert {one.error for one in status if one.state is State.SKIPPED} == {
        "superseded by a newer checkpoint"
    }
    assert [path.split("/")[-2] for path in uploads] == ["step-1", "step-5"], (
        "a skipped one was uploaded"
    )


def _wait_for_skipped(memory: str) -> Exception | None:
    gate = install_gate()
    gate.close()
    with Job("gated://bucket/run", memory).writer(agent="thread", keep_memory=2) as writer:
        save(writer, 1)
        gate.wait_for_arrival()
        for number in (2, 3, 4, 5):
            save(writer, number)
        error = raised_by(lambda: writer.wait("step-3", timeout=30))
        gate.open()
        return error


def test_waiting_for_a_skipped_checkpoint_says_why_it_never_comes(memory_root: Path) -> None:
    error = forked(_wait_for_skipped, str(memory_root))
    assert isinstance(error, FlushFailed)
    assert (
        str(error) == "checkpoint 'step-3' did not reach storage: superseded by a newer checkpoint"
    )


def _save_all_while_the_first_is_stuck(memory: str) -> tuple[bool, list[CheckpointStatus]]:
    gate = install_gate()
    gate.close()
    job = Job("gated://bucket/run", memory)
    with job.writer(agent="thread", keep_memory=2, on_slow_storage="all") as writer:
        save(writer, 1)
        gate.wait_for_arrival()
        for number in (2, 3):
            save(writer, number)

        def save_more() -> None:
            for number in (4, 5):
                save(writer, number)

        saving = threading.Thread(target=save_more)
        saving.start()
        saving.join(1.0)
        has_waited = saving.is_alive()
        gate.open()
        saving.join(60)
        writer.close()
        return has_waited, writer.status()


def test_saves_wait_for_flushes_where_all_are_to_reach_storage(memory_root: Path) -> None:
    has_waited, status = forked(_save_all_while_the_first_is_stuck, str(memory_root))
    assert has_waited
    assert [(one.name, one.state) for one in status] == [
        (f"step-{number}", State.DURABLE) for number in (5, 4, 3, 2, 1)
    ]


def test_saves_dont_wait_for_storage_that_refuses(memory_root: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    job = Job(str(tmp_path / "file" / "run"), str(memory_root))
    writer = job.writer(agent="thread", keep_memory=1, on_slow_storage="all")
    for number in range(6):
        save(writer, number)
        wait_until(
            lambda: any(one.flush_attempts for one in writer.status() if one.in_memory),
            "storage has refused",
        )
    assert load(job.reader()) == 5
    writer.close(flush=False)


@dataclass
class _Full:
    """A save for which memory had no room: its error, the log, and the checkpoints afterwards."""

    error: Exception | None
    logged: list[str]
    status: list[CheckpointStatus]


class _Listener(logging.Handler):
    """Keeps what dcp_mem logs, and tells of it."""

    def __init__(self, heard: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._heard = heard
        self.texts: list[str] = []
        logging.getLogger("dcp_mem").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        self._heard(record.getMessage())


def _save_into_full_memory(memory: str, on_full: str) -> _Full:
    gate = install_gate()
    gate.close()
    dcp_mem.saving.agree._COMPLAIN_EVERY = 0.0  # so that a save that waits says so at once
    listener = _Listener(lambda text: gate.open() if "has waited" in text else None)
    leads = not dist.is_initialized() or dist.get_rank() == 0
    with Job("gated://bucket/run", memory).writer(
        agent="thread", keep_memory=1, on_full=on_full
    ) as writer:
        save(writer, 1)
        if leads:
            gate.wait_for_arrival()
        save(writer, 2)
        error = raised_by(lambda: save(writer, 3))
        gate.open()
        wait_until(
            lambda: all(one.state in (State.DURABLE, State.SKIPPED) for one in writer.status())
        )
        save(writer, 4)
        wait_until(lambda: writer.status()[0].state is State.DURABLE)
        return _Full(error, listener.texts, writer.status())


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_save_waits_for_room_and_says_so(memory_root: Path, ranks: int) -> None:
    for full in forked_ranks(_save_into_full_memory, ranks, str(memory_root), "wait"):
        assert full.error is None
        assert any(
            "step-3 has waited 0 s for room in memory: 2 checkpoints are in memory" in t
            for t in full.logged
        )
        states = {one.name: one.state for one in full.status}
        assert list(states) == ["step-4", "step-3", "step-2", "step-1"]
        # Step 3 may be complete before the flusher comes to step 2, which it supersedes then.
        assert states.pop("step-2") in (State.DURABLE, State.SKIPPED)
        assert set(states.values()) == {State.DURABLE}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_save_is_skipped_where_there_is_no_room(memory_root: Path, ranks: int) -> None:
    for full in forked_ranks(_save_into_full_memory, ranks, str(memory_root), "skip"):
        assert full.error is None
        assert any("step-3 is skipped: 2 checkpoints are in memory" in text for text in full.logged)
        assert [(one.name, one.state) for one in full.status] == [
            ("step-4", State.DURABLE),
            ("step-3", State.SKIPPED),
            ("step-2", State.DURABLE),
            ("step-1", State.DURABLE),
        ]
        assert full.status[1].error == "memory was full"


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_save_fails_on_every_rank_where_there_is_no_room(memory_root: Path, ranks: int) -> None:
    for full in forked_ranks(_save_into_full_memory, ranks, str(memory_root), "raise"):
        assert isinstance(full.error, MemoryBudgetExceeded)
        assert isinstance(full.error, MemoryError)
        assert "Storage takes them more slowly than they come" in str(full.error)
        assert [one.name for one in full.status] == ["step-4", "step-2", "step-1"]


# -- storage that fails ----------------------------------------------------------------------------

_ONCE = {
    "config_kwargs": {"retries": {"total_max_attempts": 1}, "connect_timeout": 2, "read_timeout": 2}
}
"""Has botocore give up at once; the flush is what tries again."""


class _Moto:
    """A moto server that can be stopped and started on its port; it then has lost everything.

    But for the bucket, which is there before the server answers: the agent tries again meanwhile.
    """

    _SERVE = (
        "import sys; from moto.backends import get_backend; from moto.server import main; "
        "backend = get_backend('s3')['123456789012']['aws']; "
        "backend.create_bucket('bucket', 'us-east-1'); main(sys.argv[1:])"
    )

    def __init__(self, resources: contextlib.ExitStack) -> None:
        self._resources = resources
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        options = S3Server(self.endpoint, None).storage_options  # type: ignore[arg-type]
        self.root = StorageRoot("s3://bucket", {**_ONCE, **options})

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [
            *TETHER,
            sys.executable,
            "-c",
            self._SERVE,
            "-H",
            "127.0.0.1",
            "-p",
            str(self.port),
        ]
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._resources.callback(self.stop)
        wait_until(self._has_bucket, "moto answers")

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def _has_bucket(self) -> bool:
        try:
            urllib.request.urlopen(f"{self.endpoint}/bucket", timeout=5).close()
        except OSError:
            return False
        return True


@pytest.fixture
def restartable() -> Iterator[_Moto]:
    with contextlib.ExitStack() as resources:
        yield _Moto(resources)


@pytest.fixture
def writing() -> Iterator[Callable[..., MemoryStorageWriter]]:
    """Makes writers in this very process; closed at the end."""
    with contextlib.ExitStack() as opened:

        def make(job: Job, **options: Any) -> MemoryStorageWriter:
            writer = job.writer(**options)
            opened.callback(writer.close, flush=False)
            return writer

        yield make


def _state_of(writer: MemoryStorageWriter, name: str) -> State:
    return next(one.state for one in writer.status() if one.name == name)


@pytest.mark.servers
def test_a_flush_that_failed_is_reported_and_done_when_the_server_is_back(
    restartable: _Moto, memory_root: Path, writing: Callable[..., MemoryStorageWriter]
) -> None:
    job = restartable.root.job(memory_root)
    writer = writing(job)
    restartable.start()
    save(writer, 1)
    writer.wait(timeout=60)
    restartable.stop()

    save(writer, 2)
    wait_until(lambda: _state_of(writer, "step-2") is State.FAILED)
    failed = writer.status()[0]
    assert f"storage {job.url} is unavailable: " in failed.error
    assert restartable.endpoint in failed.error
    assert "\n" not in failed.error
    assert failed.flush_attempts >= 1
    with pytest.raises(
        WaitTimeout, match=r"step-2: storage .* is unavailable: .* \(the agent's log: .*agent.log\)"
    ):
        writer.wait("step-2", timeout=0.1)
    save(writer, 3)  # training goes on
    assert load(job.reader(), "step-3") == 3

    restartable.start()
    writer.wait(timeout=60)
    assert (writer.status()[0].name, writer.status()[0].state, writer.status()[0].error) == (
        "step-3",
        State.DURABLE,
        "",
    )
    writer.close()
    shutil.rmtree(job.directory)
    assert load_anew(job).number == 3
    log = Path(writer.agent_log).read_text()
    assert "step-1 is durable in s3://bucket/run" in log
    assert "WARNING flush of step-2 failed, next try in " in log


def test_waiting_for_what_storage_refuses_ends_and_renewed_options_help(
    abfs_root: StorageRoot, memory_root: Path, writing: Callable[..., MemoryStorageWriter]
) -> None:
    right = abfs_root.job(memory_root)
    options = {"connection_string": _with_wrong_key(abfs_root.storage_options["connection_string"])}
    wrong = replace(right, storage_options=options)
    writer = writing(wrong)
    save(writer, 1)
    for _ in range(2):
        with pytest.raises(
            FlushFailed, match=r"'step-1' did not reach storage: .* refused: .* credentials"
        ):
            writer.wait(timeout=60)
    save(writer, 2)
    with pytest.raises(FlushFailed, match="'step-2'") as remaining:
        writer.close()
    assert "2 checkpoints stay in this node's memory (step-2, step-1; " in str(remaining.value)
    command = f"dcp-mem flush {wrong.url} --job job --memory-root {memory_root}"
    assert str(remaining.value).endswith(command)
    (agent,) = agents(memory_root)

    writer = writing(right)
    writer.wait(timeout=60)
    assert {one.name for one in writer.status() if one.is_durable} >= {"step-2"}
    assert agents(memory_root) == [agent], "the agent was to get them while it runs"


def test_renewed_variables_reach_the_running_agent(
    abfs_root: StorageRoot,
    memory_root: Path,
    writing: Callable[..., MemoryStorageWriter],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = abfs_root.storage_options["connection_string"]
    writer = writing(Job(f"{abfs_root.url}/run", str(memory_root)))
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", _with_wrong_key(given))
    save(writer, 1)
    with pytest.raises(FlushFailed):
        writer.wait(timeout=60)
    (agent,) = agents(memory_root)
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", given)
    writer.wait(timeout=60)
    assert agents(memory_root) == [agent]
    assert load_anew(Job(f"{abfs_root.url}/run", str(memory_root / "other"))).number == 1


def _with_wrong_key(connection_string: str) -> str:
    key = base64.b64encode(
        b"a key that nobody gave out, long enough for Azure to take it so."
    ).decode()
    return re.sub("AccountKey=[^;]*", f"AccountKey={key}", connection_string)


def _fail_then_succeed(memory: str) -> tuple[list[CheckpointStatus], list[str]]:
    gate = install_gate()
    gate.failure = RuntimeError("the disk in the cloud is full")
    with Job("gated://bucket/run", memory).writer(agent="thread", keep_memory=2) as writer:
        for number in (1, 2, 3, 4):
            save(writer, number)
            wait_until(lambda n=number: _state_of(writer, f"step-{n}") is State.FAILED)  # type: ignore[misc]
        failed = writer.status()
        gate.failure = None
        writer.close()
        return [*failed, *writer.status()], gate.arrived


def test_failed_flushes_give_way_to_newer_saves(memory_root: Path) -> None:
    status, _ = forked(_fail_then_succeed, str(memory_root))
    before, after = status[:4], status[4:]
    # Which of the older ones went depends on which was being tried again when room was needed.
    assert [one.name for one in before] == ["step-4", "step-3", "step-2", "step-1"]
    assert before[0].state is State.FAILED
    assert sorted(one.state.value for one in before[1:]) == ["failed", "skipped", "skipped"]
    assert all("the disk in the cloud is full" in one.error for one in before)
    assert {one.name for one in after if one.state is State.DURABLE} == {
        one.name for one in before if one.state is State.FAILED
    }


# -- agents ----------------------------------------------------------------------------------------


def test_a_stopped_agent_makes_a_wait_time_out_and_goes_on_later(
    local_root: StorageRoot, memory_root: Path, writing: Callable[..., MemoryStorageWriter]
) -> None:
    writer = writing(local_root.job(memory_root))
    save(writer, 1)
    writer.wait(timeout=60)
    (agent,) = agents(memory_root)
    agent.suspend()
    started = time.monotonic()
    save(writer, 2)
    assert time.monotonic() - started < 30, "training waits for the agent"
    with pytest.raises(
        WaitTimeout, match=r"step-2 is not durable yet after 0.2 s; no error so far"
    ):
        writer.wait("step-2", timeout=0.2)
    assert isinstance(writer.status()[0].state, State)
    agent.resume()
    writer.wait("step-2", timeout=60)
    assert agents(memory_root) == [agent]


def test_a_killed_agent_is_replaced_and_its_work_taken_up(
    local_root: StorageRoot, memory_root: Path, writing: Callable[..., MemoryStorageWriter]
) -> None:
    writer = writing(local_root.job(memory_root))
    save(writer, 1)
    writer.wait(timeout=60)
    (agent,) = agents(memory_root)
    agent.suspend()
    save(writer, 2)
    agent.kill()
    writer.wait("step-2", timeout=60)
    (successor,) = agents(memory_root)
    assert successor != agent


def _save_and_leave(job: Job, number: int) -> float:
    writer = job.writer()
    save(writer, number)
    started = time.monotonic()
    writer.close(flush=False)
    return time.monotonic() - started


def test_the_agent_flushes_after_the_trainer_and_then_ends(
    local_root: StorageRoot, memory_root: Path
) -> None:
    assert forked(_save_and_leave, local_root.job(memory_root), 1) < 20
    wait_until(lambda: "run/step-1/.metadata" in local_root.names(), "the agent flushes by itself")
    (agent,) = agents(memory_root)
    assert agent.nice() > 0
    assert agent.ppid() == 1 or agent.ppid() != os.getpid()
    wait_until(lambda: agents(memory_root) == [], "an idle agent ends", timeout=30)
    lines = (memory_root / ".agent" / "agent.log").read_text().splitlines()
    told = [line.split(" INFO ")[1] for line in lines if " belongs to run " not in line]
    assert told[0] == f"agent {agent.pid} serves {memory_root}"
    assert re.fullmatch(
        rf"step-1 is durable in {re.escape(local_root.url)}/run \(\d+\.\d s\)", told[1]
    )
    assert told[2] == f"agent {agent.pid} ends: nothing is left to flush and no trainer lives"


def _serve_impatiently(memory: str, job: Job) -> None:
    assert job.url is not None
    dcp_mem.flushing.agent._LINGER = dcp_mem.flushing.agent._LOOK = 0.1
    os.makedirs(f"{memory}/.agent", mode=0o700, exist_ok=True)
    dcp_mem.flushing.agent.run(
        memory, Registration(job=job.name or "", url=job.url, overwrite=True)
    )


def test_an_agent_stays_as_long_as_a_trainer_lives(
    local_root: StorageRoot, memory_root: Path, writing: Callable[..., MemoryStorageWriter]
) -> None:
    job = local_root.job(memory_root)
    writer = writing(job, persist=every_n_saves(2))
    (memory_root / ".agent").mkdir(mode=0o700)
    with forking(_serve_impatiently, None, str(memory_root), job) as agent:
        wait_until(lambda: dcp_mem.flushing.agent_handle.is_alive(str(memory_root)))
        save(writer, 1)
        writer.wait(timeout=60)
        # The one that was forked does it; one that a late answer has started ends at once.
        wait_until(lambda: agents(memory_root) == [])
        idle = time.monotonic()
        # A ping of the agent waits for an answer for a fifth of this time.
        while time.monotonic() < idle + 5 * dcp_mem.flushing.agent_handle._ANSWER_SECONDS:
            save(writer, 2)
            assert psutil.pid_exists(agent.pid())
        writer.close()
        agent.join(30)


def _save_two_jobs(first: Job, second: Job) -> None:
    with first.writer() as one, second.writer() as two:
        save(one, 1)
        save(two, 2)
        one.wait(timeout=60)
        two.wait(timeout=60)


def test_two_jobs_share_an_agent(
    local_root: StorageRoot, s3_root: StorageRoot, memory_root: Path
) -> None:
    first = replace(local_root.job(memory_root), name="first")
    second = replace(s3_root.job(memory_root), name="second")
    forked(_save_two_jobs, first, second)
    assert len(agents(memory_root)) == 1
    for job in (first, second):
        shutil.rmtree(job.directory)
    assert [forked(load_anew, job).number for job in (first, second)] == [1, 2]


def _save_and_list_agents(job: Job) -> list[str]:
    with job.writer() as writer:
        save(writer, 1)
        writer.wait(timeout=60)
        wait_until(lambda: len(agents(job.memory)) == 1, "surplus agents end")
        found = [str(agent.pid) for agent in agents(job.memory)]
        dist.barrier()
        return found


def test_the_ranks_of_a_node_share_an_agent(local_root: StorageRoot, memory_root: Path) -> None:
    one, other = forked_ranks(_save_and_list_agents, 2, local_root.job(memory_root))
    assert one == other


def _save_on_nodes(job: Job) -> list[tuple[str, State]]:
    dcp_mem.flushing.flusher._PEER_LAG = 1.0
    root = f"{job.memory}/node{dist.get_rank()}"
    with replace(job, memory=root).writer(agent="thread") as writer:
        save(writer, 0)
        writer.wait(timeout=60)
        for number in range(1, 31):
            save(writer, number)
        writer.close()
        return [(one.name, one.state) for one in writer.status() if one.in_memory]


def test_nodes_that_are_at_different_checkpoints_dont_wait_for_each_other(
    local_root: StorageRoot, memory_root: Path
) -> None:
    job = local_root.job(memory_root)
    for status in forked_ranks(_save_on_nodes, 2, job):
        assert status[0] == ("step-30", State.DURABLE)
    assert forked(load_anew, replace(job, memory=f"{memory_root}/other")).number == 30


def _save_and_drop_a_part(job: Job) -> list[tuple[str, State, str]]:
    """Save on two nodes, of which one drops the older checkpoint before either flushes it."""
    dcp_mem.flushing.flusher._PEER_LAG = 0.2
    root = f"{job.memory}/node{dist.get_rank()}"
    with replace(job, memory=root).writer(agent="thread", keep_memory=3) as writer:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dcp_mem.runtime.session.Session, "wake_agent", lambda *_, **__: None)
            for number in (1, 2):
                save(writer, number)
        if dist.get_rank() == 1:
            memory = JobMemory(root, job.name or "")
            assert all(memory.evict(held, "no room") for held in memory.find("step-1"))
        dist.barrier()
        writer.close()
        dist.barrier()  # the other's thread may still be at it
        return [(one.name, one.state, one.error) for one in writer.status()]


def test_what_another_node_dropped_is_given_up_once_a_newer_one_is_durable(
    local_root: StorageRoot, memory_root: Path
) -> None:
    kept, dropped = forked_ranks(_save_and_drop_a_part, 2, local_root.job(memory_root))
    assert kept[0] == dropped[0] == ("step-2", State.DURABLE, "")
    assert dropped[1] == ("step-1", State.SKIPPED, "no room")
    assert kept[1][:2] == ("step-1", State.SKIPPED)
    assert re.fullmatch(
        "[0-9a-f]+ of 2 nodes have not put their segments yet; a newer one is durable", kept[1][2]
    )


def _renew_variables_during_a_flush(memory: str) -> dict[str, str | None]:
    gate = install_gate()
    gate.close()
    os.environ["AWS_PROFILE"] = "old"
    with Job("gated://bucket/run", memory).writer(agent="thread") as writer:
        save(writer, 1)
        gate.wait_for_arrival()
        save(writer, 2)
        os.environ["AWS_PROFILE"] = "new"
        os.environ["AWS_REGION"] = "here"
        gate.open()
    return {name: os.environ.get(name) for name in ("AWS_PROFILE", "AWS_REGION")}


def test_a_flush_thread_leaves_the_trainers_variables_alone(memory_root: Path) -> None:
    found = forked(_renew_variables_during_a_flush, str(memory_root))
    assert found == {"AWS_PROFILE": "new", "AWS_REGION": "here"}


# -- several jobs, and the end of a process --------------------------------------------------------


def _save_busily(first: Job, second: Job) -> list[str]:
    """Have one job always something new to flush; what the flusher flushes, in order."""
    install_gate()
    flusher = dcp_mem.flushing.loop.FlushLoop(first.memory)
    order: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dcp_mem.runtime.session.Session, "wake_agent", lambda *_, **__: None)
        busy, patient = (
            first.writer(agent="thread", keep_memory=9),
            second.writer(agent="thread", keep_memory=9),
        )
        for job in (first, second):
            flusher.register(Registration(job=job.name or "", url=job.url or "", overwrite=True))
        save(patient, 100)
        for number in range(1, 5):
            save(busy, number)
            assert flusher.flush_next()
            order.append(next(one.name for one in _durable(busy, patient) if one.name not in order))
        for writer in (busy, patient):
            writer.close(flush=False)
    return order


def _durable(*writers: MemoryStorageWriter) -> list[CheckpointStatus]:
    return [one for writer in writers for one in writer.status() if one.state is State.DURABLE]


def test_a_job_that_saves_all_the_time_doesnt_keep_another_from_being_flushed(
    memory_root: Path,
) -> None:
    first = Job("gated://bucket/first", str(memory_root), name="first")
    second = Job("gated://bucket/second", str(memory_root), name="second")
    order = forked(_save_busily, first, second)
    assert order.index("step-100") <= 1


def _end_with_a_refused_flush(memory: str) -> float:
    gate = install_gate()
    gate.failure = PermissionError("not yours")
    writer = Job("gated://bucket/run", memory).writer(agent="thread")
    save(writer, 1)
    wait_until(lambda: _state_of(writer, "step-1") is State.FAILED)
    return time.monotonic()


def _end_while_the_flush_is_under_way(memory: str, directory: str) -> float:
    save(Job(directory, memory).writer(agent="thread"), 1)
    return time.monotonic()


def test_a_process_whose_flush_was_refused_ends_soon(memory_root: Path) -> None:
    ended = forked(_end_with_a_refused_flush, str(memory_root), timeout=40)
    assert time.monotonic() - ended < 20


def test_a_process_ends_after_the_flush_that_is_under_way(
    memory_root: Path, tmp_path: Path
) -> None:
    forked(_end_while_the_flush_is_under_way, str(memory_root), str(tmp_path / "run"))
    assert (tmp_path / "run" / "step-1" / ".metadata").exists()


def test_a_line_of_the_history_that_was_damaged_does_no_harm(
    local_root: StorageRoot, memory_root: Path, writing: Callable[..., MemoryStorageWriter]
) -> None:
    job = local_root.job(memory_root)
    writer = writing(job, keep_memory=1)
    for number in (1, 2, 3):
        save(writer, number)
        writer.wait(timeout=60)
    history = job.directory / "checkpointHistories.csv"
    head, first, second, _ = history.read_bytes().splitlines(keepends=True)
    history.write_bytes(head + second[:20] + b"\r\n[]\r\n{}\r\n" + first + second[:-9])
    assert [(one.name, one.state) for one in writer.status()] == [
        ("step-3", State.DURABLE),
        ("step-1", State.DURABLE),
    ]
    writer.wait("step-1", timeout=1)
    save(writer, 4)
    writer.wait(timeout=60)
    writer.close()
    assert [(one.name, one.in_memory) for one in writer.status()] == [
        ("step-4", True),
        ("step-3", False),
        ("step-1", False),
    ]


def test_the_agent_runs_without_torch() -> None:
    check = (
        "import sys, dcp_mem.flushing.agent, dcp_mem.flushing.commit,"
        " dcp_mem.format.metadata_template; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", check], check=True)
