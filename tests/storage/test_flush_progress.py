"""A flush's progress, how a waiting user sees it, and the cap on what the flush sends."""

import logging
import os
import pty
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import dcp_mem.runtime.session
from dcp_mem import (
    CheckpointStatus,
    ConfigError,
    MemoryBudgetExceeded,
    MemoryStorageWriter,
    State,
)
from dcp_mem.flushing.loop import FlushLoop
from dcp_mem.flushing.registration import Registration
from dcp_mem.format.history import HistoryRow, from_csv, to_csv
from dcp_mem.format.manifest import FlushRecord, NodeManifest
from dcp_mem.memory.checkpoint import LocalCheckpoint
from dcp_mem.memory.job import JobMemory
from dcp_mem.storage.posix_upload import PosixUpload
from tests.support.checkpoints.jobs import Job, save, wait_until
from tests.support.processes.forks import forked, forked_ranks, in_process
from tests.support.storage.gated import install as install_gate
from tests.support.storage.servers import StorageRoot

pytestmark = pytest.mark.timeout(120)

_MIB = 1 << 20
_HISTORY = "checkpointHistories.csv"


@pytest.fixture
def writer(job: Job) -> Iterator[MemoryStorageWriter]:
    """A writer that sends 32 MiB a second; parts are 16 MiB."""
    writer = job.writer(upload_limit="32MiB")
    yield writer
    writer.close(flush=False)


def _save_mib(writer: MemoryStorageWriter, mib: int, name: str) -> None:
    dcp.save({"weights": torch.zeros(mib * _MIB // 4)}, checkpoint_id=name, storage_writer=writer)


def _stored(job: Job) -> list[HistoryRow]:
    return from_csv(Path(str(job.url), ".dcp_mem", _HISTORY).read_bytes())


# -- figures ---------------------------------------------------------------------------------------


def test_a_running_flush_shows_how_far_it_is_and_keeps_to_its_limit(
    job: Job, writer: MemoryStorageWriter
) -> None:
    _save_mib(writer, 48, "step-1")
    under_way: list[CheckpointStatus] = []

    def is_durable() -> bool:
        (status,) = writer.status()
        if 0 < status.transfer.stored_nbytes < status.transfer.nbytes:
            under_way.append(status)
        return status.state is State.DURABLE

    wait_until(is_durable)
    assert {(one.state, one.flush_stage, one.flush_attempts, one.error) for one in under_way} == {
        (State.COMPLETE, "segments", 0, "")
    }
    assert all(one.transfer.parts == 4 and one.transfer.segments_seconds > 0 for one in under_way)
    (status,) = writer.status()
    found = status.transfer
    assert (found.nbytes, found.stored_nbytes, found.sent_nbytes) == (status.nbytes,) * 3
    assert (found.parts, found.sent_parts, found.retries, found.waiting_seconds) == (4, 4, 0, 0.0)
    assert 0.9 < found.segments_seconds <= status.flush_seconds
    assert 0 < found.commit_seconds < status.flush_seconds
    assert found.throughput < 54 * _MIB
    assert (status.flush_stage, status.flush_attempts) == ("", 1)


def test_every_node_says_on_storage_what_its_upload_took(job: Job) -> None:
    forked(_save_and_wait, job)
    (path,) = Path(str(job.url), "step-1", ".dcp_mem").glob("node-*.json")
    transfer = NodeManifest.from_json(path.read_bytes()).transfer
    assert transfer.nbytes == transfer.stored_nbytes == transfer.sent_nbytes > 600 * 4
    assert (transfer.parts, transfer.sent_parts) == (1, 1)
    assert transfer.segments_seconds > 0


def _save_and_wait(job: Job, *numbers: int) -> list[CheckpointStatus]:
    with job.writer() as writer:
        for number in numbers or (1,):
            save(writer, number)
            writer.wait(timeout=60)
        return writer.status()


def _save_where_storage_fails(memory: str) -> list[CheckpointStatus]:
    gate = install_gate()
    gate.failure = RuntimeError("the disk in the cloud is full")
    writer = Job("gated://bucket/run", memory).writer(agent="thread")
    save(writer, 1)
    wait_until(lambda: writer.status()[0].state is State.FAILED)
    (failed,) = writer.status()
    gate.failure = None
    writer.close()
    return [failed, *writer.status()]


def test_a_failed_flush_tells_when_it_is_tried_again_and_what_it_has_cost(
    memory_root: Path,
) -> None:
    started = time.time()
    failed, durable = forked(_save_where_storage_fails, str(memory_root))
    assert started < failed.flush_again < started + 60
    assert failed.flush_attempts == 1
    assert failed.transfer.retries == 3  # each request is tried four times
    assert durable.state is State.DURABLE
    assert (durable.flush_again, durable.error) == (0.0, "")
    assert durable.flush_attempts >= 2
    assert durable.transfer.retries >= 3
    assert durable.flush_seconds > failed.flush_seconds > 0


def _save_on_nodes(job: Job) -> tuple[str, CheckpointStatus, CheckpointStatus]:
    """Save on two nodes, of which one flushes late; return the committing node's two statuses.

    The first is taken while it waits, the second at the end.
    """
    late, wake = dist.get_rank() == 1, dcp_mem.runtime.session.Session.wake_agent
    root = f"{job.memory}/node{dist.get_rank()}"
    with Job(job.url, root).writer(agent="thread") as writer, pytest.MonkeyPatch.context() as patch:
        if late:
            patch.setattr(dcp_mem.runtime.session.Session, "wake_agent", lambda *_, **__: None)
        save(writer, 1)
        if not late:
            wait_until(lambda: writer.status()[0].flush_stage == "waiting")
        (waiting,) = writer.status()
        dist.barrier()
        patch.setattr(dcp_mem.runtime.session.Session, "wake_agent", wake)
        writer.wait(timeout=60)
        return JobMemory(root, "job").node, waiting, writer.status()[0]


def test_a_node_that_waits_for_others_says_so_and_the_committing_one_tells_storage(
    job: Job,
) -> None:
    (_, waiting, durable), _ = forked_ranks(_save_on_nodes, 2, job)
    assert (waiting.state, waiting.flush_attempts) == (State.COMPLETE, 0)
    assert waiting.transfer.stored_nbytes == waiting.transfer.nbytes > 0
    assert 0 < waiting.transfer.nbytes < waiting.nbytes
    assert durable.transfer.waiting_seconds > 0
    assert (durable.flush_stage, durable.flush_attempts) == ("", 1)
    (line,) = _stored(job)
    assert (line.name, line.world_size, line.nodes, line.nbytes) == ("step-1", 2, 2, durable.nbytes)


def _save_where_nothing_can_be_shown(job: Job) -> tuple[State, int]:
    refused = 0
    record_flush = JobMemory.record_flush

    def refuse(memory: JobMemory, held: LocalCheckpoint, record: FlushRecord) -> None:
        nonlocal refused
        if record.stage:
            refused += 1
            raise MemoryBudgetExceeded(1, 0, "no space")
        record_flush(memory, held, record)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JobMemory, "record_flush", refuse)
        with job.writer(agent="thread", upload_limit="32MiB") as writer:
            _save_mib(writer, 48, "step-1")
            writer.wait(timeout=60)
            return writer.status()[0].state, refused


def test_a_flush_that_has_no_room_to_show_how_far_it_is_succeeds(job: Job) -> None:
    state, refused = forked(_save_where_nothing_can_be_shown, job)
    assert state is State.DURABLE
    assert refused > 0


# -- the history -----------------------------------------------------------------------------------


def test_memory_and_storage_have_a_line_of_each_checkpoint(
    storage_root: StorageRoot, memory_root: Path
) -> None:
    job = storage_root.job(memory_root)
    status = forked(_save_and_wait, job, 1, 2, 3, 4)
    lines = from_csv(storage_root.read(f"run/.dcp_mem/{_HISTORY}"))
    assert [line.name for line in lines] == ["step-1", "step-2", "step-3", "step-4"]
    assert from_csv((job.directory / _HISTORY).read_bytes()) == lines
    for line, one in zip(lines, reversed(status), strict=True):
        assert (line.save_id, line.nbytes, line.outcome, line.attempts) == (
            one.save_id,
            one.nbytes,
            "durable",
            1,
        )
        assert (line.world_size, line.nodes, line.parts) == (1, 1, 1)
        assert line.created < line.durable == pytest.approx(one.durable, abs=1e-5)
        assert line.throughput_mib_s > 0
        assert 0 < line.flush_seconds == pytest.approx(one.flush_seconds, abs=1e-5)


def test_what_was_never_meant_for_storage_has_a_line_once_it_leaves_memory(job: Job) -> None:
    with job.writer(persist=False, keep_memory=1) as writer:
        for number in (1, 2, 3):
            save(writer, number)
        assert not (job.directory / "step-1").exists()
        lines = JobMemory(job.memory, "job").history.rows()
        states = {one.name: (one.state, one.persist) for one in writer.status()}
    assert [(line.name, line.outcome, line.error) for line in lines] == [
        ("step-1", "evicted", ""),
        ("step-2", "evicted", ""),
    ]
    assert states == {
        "step-3": (State.COMPLETE, False),
        "step-2": (State.EVICTED, False),
        "step-1": (State.EVICTED, False),
    }


def test_a_history_on_storage_outlives_memory_and_one_that_is_damaged_is_made_anew(
    job: Job, memory_root: Path
) -> None:
    path = Path(str(job.url), ".dcp_mem", _HISTORY)
    forked(_save_and_wait, job, 1, 2)
    path.write_bytes(
        to_csv([HistoryRow(name="older", save_id="00000000", created=1.0, outcome="durable")])
    )
    elsewhere = Job(job.url, str(memory_root / "elsewhere"))
    (memory_root / "elsewhere").mkdir(0o700)
    forked(_save_and_wait, elsewhere, 3)
    assert [line.name for line in _stored(job)] == ["older", "step-3"]
    path.write_bytes(b"\0" * 1000)
    forked(_save_and_wait, job, 4)
    assert [line.name for line in _stored(job)] == ["step-1", "step-2", "step-4"]


def _save_with_a_log(job: Job) -> tuple[State, list[str]]:
    texts: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dcp_mem").addHandler(handler)
    with job.writer(agent="thread") as writer:
        save(writer, 1)
        writer.wait(timeout=60)
        return writer.status()[0].state, texts


def test_a_history_that_cant_be_put_fails_no_flush(job: Job) -> None:
    Path(str(job.url), ".dcp_mem", _HISTORY).mkdir(parents=True)
    state, texts = forked(_save_with_a_log, job)
    assert state is State.DURABLE
    (text,) = texts
    assert text.startswith(f"step-1 is durable, but {_HISTORY} in {job.url} doesn't tell: storage ")


def test_no_checkpoint_can_have_the_name_of_the_history(
    job: Job, writer: MemoryStorageWriter
) -> None:
    with pytest.raises(ConfigError, match=_HISTORY):
        writer.wait(_HISTORY)


# -- the limit -------------------------------------------------------------------------------------


def _seconds_of_a_flush(job: Job, mib: int) -> float:
    with job.writer() as writer:
        _save_mib(writer, mib, "step-1")
        writer.wait(timeout=60)
        return writer.status()[0].transfer.segments_seconds


def test_the_limit_may_come_from_the_environment(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCP_MEM_UPLOAD_LIMIT", "32MiB")
    assert forked(_seconds_of_a_flush, job, 48) > 0.9


@in_process
def test_what_storage_has_already_doesnt_count(job: Job) -> None:
    put_part = PosixUpload.put_part

    def put_what_is_there(upload: PosixUpload, number: int, data: memoryview, crc32c: int) -> bool:
        put_part(upload, number, data, crc32c)
        return False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PosixUpload, "put_part", put_what_is_there)
        with job.writer(agent="thread", upload_limit="1MiB") as writer:
            _save_mib(writer, 48, "step-1")
            writer.wait(timeout=40)  # each part that was sent would take 16 seconds
            found = writer.status()[0].transfer
    assert found.stored_nbytes == found.nbytes > 48 * _MIB
    assert (found.parts, found.sent_parts, found.sent_nbytes, found.throughput) == (4, 0, 0, 0.0)


def _flush_by_one_flusher(slow: Job, quick: Job) -> list[CheckpointStatus]:
    """A byte a second lets one small checkpoint through, and the next after an hour."""
    flusher = FlushLoop(slow.memory)

    def registration(job: Job, limit: int | None) -> Registration:
        return Registration(
            job=job.name or "", url=job.url or "", overwrite=True, upload_limit=limit
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dcp_mem.runtime.session.Session, "wake_agent", lambda *_, **__: None)
        writers = slow.writer(agent="thread"), quick.writer(agent="thread")
        flusher.register(registration(slow, 1))
        flusher.register(registration(quick, None))
        for writer in writers:
            save(writer, 1)
        assert flusher.flush_next()
        assert flusher.flush_next()
        flusher.register(registration(slow, None))
        save(writers[0], 2)
        assert flusher.flush_next()
        found = [one for writer in writers for one in writer.status()]
        for writer in writers:
            writer.close(flush=False)
        return found


def test_each_job_has_a_limit_of_its_own_which_it_may_change(job: Job, tmp_path: Path) -> None:
    found = forked(
        _flush_by_one_flusher, job, Job(str(tmp_path / "other"), job.memory, name="other")
    )
    assert [(one.name, one.state) for one in found] == [
        ("step-2", State.DURABLE),
        ("step-1", State.DURABLE),
        ("step-1", State.DURABLE),
    ]


# -- the bar ---------------------------------------------------------------------------------------

_SCRIPT = """
import sys, torch, torch.distributed.checkpoint as dcp
from dcp_mem import MemoryStorageWriter
with MemoryStorageWriter(sys.argv[1], memory_root=sys.argv[2], job="job", \
upload_limit="32MiB") as writer:
    dcp.save({"weights": torch.zeros(12 << 20)}, checkpoint_id="step-1", storage_writer=writer)
    getattr(writer, sys.argv[3])(progress=True)
    assert writer.status()[0].state.value == "durable"
"""


def _on_a_terminal(command: list[str]) -> str:
    """What the command's standard error shows on a terminal of 100 columns."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        command, stderr=theirs, env={**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    ) as process:
        os.close(theirs)
        shown = b"".join(iter(lambda: _read(ours), b""))
        os.close(ours)
    assert process.returncode == 0, shown.decode()
    return shown.decode()


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 4096)
    except OSError:  # the other end is closed
        return b""


@pytest.mark.parametrize("method", ["wait", pytest.param("close", marks=pytest.mark.variant)])
def test_a_bar_shows_name_bytes_and_the_end_on_a_terminal(job: Job, method: str) -> None:
    shown = _on_a_terminal(
        [sys.executable, "-W", "ignore", "-c", _SCRIPT, str(job.url), job.memory, method]
    )
    assert "step-1" in shown
    assert "/48.0 MiB" in shown
    assert "durable" in shown


@pytest.mark.parametrize("method", [pytest.param("wait", marks=pytest.mark.variant), "close"])
def test_a_bar_says_nothing_where_there_is_no_terminal(job: Job, method: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", _SCRIPT, str(job.url), job.memory, method]
    result = subprocess.run(command, check=True, capture_output=True)
    assert (result.stdout, result.stderr) == (b"", b"")
