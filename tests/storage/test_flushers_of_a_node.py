"""Two flushers of one node, as two ranks' threads are: one uploads, the other one waits for it."""

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import dcp_mem.flushing.flusher
from dcp_mem.common.values import Outcome
from dcp_mem.flushing.flusher import JobFlusher
from dcp_mem.flushing.registration import Registration
from dcp_mem.format.manifest import FlushRecord
from dcp_mem.memory.checkpoint import LocalCheckpoint
from dcp_mem.memory.job import JobMemory
from dcp_mem.storage.posix import PosixStorage
from tests.support.checkpoints.jobs import load_as_torch
from tests.support.processes.forks import forked
from tests.support.storage.ways import save_two_unflushed

_PATIENCE_SECONDS = 30.0


@pytest.fixture
def memory(memory_root: Path) -> JobMemory:
    """A node's memory with step-1 and step-2, of which nothing is flushed yet."""
    forked(save_two_unflushed, str(memory_root))
    return JobMemory(str(memory_root), "job")


def _flusher(memory_root: Path, url: Path, *, persists_all: bool = False) -> JobFlusher:
    registration = Registration(
        job="job", url=str(url), overwrite=True, persists_all=persists_all, reuse_stored=False
    )
    return JobFlusher(str(memory_root), registration)


def _held(memory: JobMemory, name: str) -> LocalCheckpoint:
    (held,) = memory.find(name)
    return held


def _record(memory: JobMemory, name: str) -> FlushRecord:
    return _held(memory, name).flush


@contextlib.contextmanager
def _uploading_until_told(flusher: JobFlusher, memory: JobMemory) -> Iterator[Callable[[], None]]:
    """Have a flusher hang in the upload of step-1; yields what has that fail for a moment."""
    at_work, go_on, upload = threading.Event(), threading.Event(), PosixStorage.upload

    def fail_once(storage: PosixStorage, key: str, *rest: Any) -> Any:
        if "step-1" in key and not go_on.is_set():
            at_work.set()
            assert go_on.wait(_PATIENCE_SECONDS)
            raise ConnectionError("the way to storage is broken")
        return upload(storage, key, *rest)

    flusher.queue.state(_held(memory, "step-2")).due = math.inf
    working = threading.Thread(target=flusher.flush_next)

    def let_fail() -> None:
        go_on.set()
        working.join()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PosixStorage, "upload", fail_once)
        working.start()
        try:
            assert at_work.wait(_PATIENCE_SECONDS)
            yield let_fail
        finally:
            let_fail()


@pytest.mark.parametrize("persists_all", [False, True])
def test_who_waited_for_a_flush_that_fails_takes_it_up(
    memory: JobMemory, memory_root: Path, tmp_path: Path, persists_all: bool
) -> None:
    first, second = (_flusher(memory_root, tmp_path, persists_all=persists_all) for _ in range(2))
    with _uploading_until_told(first, memory) as let_fail:
        assert second.flush_next()
        assert _record(memory, "step-2").outcome == Outcome.DURABLE
        assert second.flush_next()  # step-1, at which the first one is
        assert not second.flush_next()
        let_fail()
        assert _record(memory, "step-1").outcome == Outcome.FAILED
        second.queue.retry()
        assert second.flush_next()
    record = _record(memory, "step-1")
    assert (record.outcome, record.error) == (Outcome.DURABLE, "")
    assert forked(load_as_torch, tmp_path / "step-1") == 1


def test_who_only_waits_for_another_flusher_records_nothing(
    memory: JobMemory, memory_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for grace in ("_PEER_GRACE", "_PEER_LAG"):
        monkeypatch.setattr(dcp_mem.flushing.flusher, grace, -1.0)
    first, second = (_flusher(memory_root, tmp_path) for _ in range(2))
    with _uploading_until_told(first, memory):
        assert second.flush_next()
        before = _record(memory, "step-1")
        for _ in range(3):
            second.queue.retry()
            assert second.flush_next()
        assert _record(memory, "step-1") == before
        assert before.outcome == ""
