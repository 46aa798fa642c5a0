"""What goes wrong says what to do, on all ranks alike, and leaves what was saved before."""

import contextlib
import importlib
import logging
import os
import pickle
import re
import shutil
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from dcp_mem import (
    CheckpointNotFound,
    ConfigError,
    DcpMemError,
    JobInUse,
    MemoryBudgetExceeded,
    MemoryStorageWriter,
    RankFailed,
    State,
)
from tests.support.checkpoints.jobs import Job, agents, load_anew, make_state, save, wait_until
from tests.support.checkpoints.plans import SAVES, save_by_torch
from tests.support.processes.forks import forked, forked_ranks, forking, raised_by
from tests.support.storage.file_systems import fill, mounted_tmpfs
from tests.support.storage.servers import S3Server, StorageRoot

_UNREACHABLE = "http://127.0.0.1:9"  # the discard port, where nothing listens


# -- arguments -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("protocol", "said"),
    [
        ("gs", "'gcsfs': pip install gcsfs"),
        ("s3", "'s3fs': pip install 'dcp_mem[s3]'"),
        ("abfs", "'adlfs': pip install 'dcp_mem[azure]'"),
    ],
)
def test_missing_package_of_a_protocol_is_named(
    protocol: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.setattr(importlib.import_module("fsspec.registry"), "registry", {})
    with pytest.raises(ConfigError, match=re.escape(f"needs the Python package {said}")):
        MemoryStorageWriter(f"{protocol}://bucket/run")


# -- memory ----------------------------------------------------------------------------------------


def _fill(memory: str, on_full: Literal["wait", "skip", "raise"]) -> tuple[str, list[str], int]:
    """Save 12 MiB at a time into a tmpfs of 32.

    Returns the error, what status says of the saves, and what still loads.
    """
    writer = MemoryStorageWriter(memory_root=memory, job="job", keep_memory=4, on_full=on_full)
    state = {"a": torch.zeros(3 << 20), "step": 0}
    error: Exception | None = None
    for step in (1, 2, 3):
        state = {"a": torch.full((3 << 20,), float(step)), "step": step}
        error = raised_by(
            partial(
                save_by_torch if step == 2 else dcp.save,
                state,
                checkpoint_id=f"step-{step}",
                storage_writer=writer,
            )
        )
    with Job(None, memory).reader() as reader:
        dcp.load(state, storage_reader=reader)
    assert bool((state["a"] == state["step"]).all())  # type: ignore[attr-defined]
    names = [f"{entry.name} {entry.state.value}" for entry in writer.status()]
    writer.close()
    return f"{type(error).__name__}: {error}", names, int(state["step"])  # type: ignore[call-overload]


def test_full_tmpfs_makes_room_by_evicting_and_never_kills(memory_root: Path) -> None:
    with mounted_tmpfs(memory_root / "small", "32m") as small:
        error, names, loaded = forked(_fill, str(small), "raise")
    assert error == "NoneType: None"
    assert names[0] == "step-3 complete"
    assert loaded == 3


def test_checkpoint_larger_than_the_tmpfs_is_an_error_with_the_figures(memory_root: Path) -> None:
    with mounted_tmpfs(memory_root / "small", "8m") as small:
        error = forked(_first_error, str(small))
    assert error.startswith(MemoryBudgetExceeded.__name__)
    assert "MiB needed" in error
    assert "Raise memory_limit or the tmpfs size" in error


def _first_error(memory: str) -> str:
    with MemoryStorageWriter(memory_root=memory, job="job", on_full="raise") as writer:
        state = {"a": torch.zeros(3 << 20), "blob": b""}
        error = raised_by(lambda: dcp.save(state, checkpoint_id="step-1", storage_writer=writer))
    assert os.listdir(os.path.join(memory, "job", ".slots")) == []
    return f"{type(error).__name__}: {error}"


def _grow_a_byte_item(memory: str) -> tuple[str, int]:
    writer = MemoryStorageWriter(memory_root=memory, job="job", keep_memory=1, on_full="raise")
    dcp.save({"a": torch.ones(8), "blob": b"small"}, checkpoint_id="step-1", storage_writer=writer)
    big = {"a": torch.ones(8), "blob": os.urandom(48 << 20)}  # the plan can't tell how large it is
    error = raised_by(lambda: dcp.save(big, checkpoint_id="step-2", storage_writer=writer))
    state = {"a": torch.zeros(8), "blob": b""}
    with Job(None, memory).reader() as reader:
        dcp.load(state, storage_reader=reader)
    writer.close()
    return f"{type(error).__name__}: {error}", len(state["blob"])  # type: ignore[arg-type]


def test_byte_item_that_fills_the_tmpfs_is_an_error_and_the_last_checkpoint_stays(
    memory_root: Path,
) -> None:
    with mounted_tmpfs(memory_root / "small", "32m") as small:
        error, length = forked(_grow_a_byte_item, str(small))
    assert error.startswith(MemoryBudgetExceeded.__name__)
    assert length == len(b"small")


def _save_over_the_limit(job: Job) -> str:
    error = raised_by(lambda: save(job.writer(memory_limit="1KiB", on_full="raise"), 1))
    return f"{type(error).__name__}: {error}"


def _save_a_large_object(job: Job) -> str:
    writer = job.writer(memory_limit="16MiB", on_full="raise")
    state = {"blob": b"x" * (32 << 20)}
    error = raised_by(lambda: dcp.save(state, checkpoint_id="step-1", storage_writer=writer))
    return f"{type(error).__name__}: {error}"


def test_memory_limit_counts_byte_items_of_a_first_save(memory_root: Path) -> None:
    """No plan tells their sizes, and no earlier save does."""
    job = Job(None, str(memory_root))
    assert forked(_save_a_large_object, job).startswith(
        "MemoryBudgetExceeded: step-1: the memory limit leaves no room"
    )
    assert not list(job.directory.glob("step-1/*.distcp"))


def test_memory_limit_is_enforced_on_all_ranks_alike(memory_root: Path) -> None:
    answers = forked_ranks(_save_over_the_limit, 2, Job(None, str(memory_root)))
    assert all(
        answer.startswith("MemoryBudgetExceeded: step-1: the memory limit leaves no room")
        for answer in answers
    )


def _save_into_too_little(job: Job, limit: str) -> list[Exception | None]:
    """Two saves with the default of `on_full`, which is to wait."""
    with job.writer(memory_limit=limit, keep_memory=1, agent="thread") as writer:
        return [raised_by(partial(save, writer, number)) for number in (1, 2)]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("persists", [False, True])
def test_save_doesnt_wait_for_room_that_never_comes(
    memory_root: Path, tmp_path: Path, ranks: int, persists: bool
) -> None:
    job = Job(str(tmp_path) if persists else None, str(memory_root))
    for first, second in forked_ranks(_save_into_too_little, ranks, job, "1KiB"):
        assert isinstance(first, MemoryBudgetExceeded)
        assert isinstance(second, MemoryBudgetExceeded)
    # The newest never leaves, so that the second has no place beside the first.
    for first, second in forked_ranks(_save_into_too_little, ranks, job, f"{3 * ranks}MiB"):
        assert first is None
        assert isinstance(second, MemoryBudgetExceeded)
        assert "step-2: the memory limit leaves no room for another checkpoint" in str(second)
    assert forked(load_anew, job).number == 1


def _skip_what_doesnt_fit(memory: str) -> list[tuple[str, str, str]]:
    state = {"large": torch.zeros(3 << 20)}
    with MemoryStorageWriter(memory_root=memory, job="job", on_full="skip") as writer:
        for number, save in enumerate(SAVES.values()):
            save(state, checkpoint_id=f"step-{number}", storage_writer=writer)
        return sorted((one.name, one.state.value, one.error) for one in writer.status())


def test_save_that_doesnt_fit_into_the_tmpfs_is_skipped_on_every_rank(memory_root: Path) -> None:
    with mounted_tmpfs(memory_root / "small", "8m") as small:
        for status in forked_ranks(_skip_what_doesnt_fit, 2, str(small)):
            assert status == [
                (f"step-{number}", "skipped", "memory was full") for number in range(len(SAVES))
            ]


# -- storage ---------------------------------------------------------------------------------------


def _unreachable(memory: Path) -> Job:
    options: dict[str, Any] = {
        "key": "key",
        "secret": "secret-of-nothing",
        "endpoint_url": _UNREACHABLE,
    }
    options |= {"config_kwargs": {"connect_timeout": 1, "retries": {"max_attempts": 0}}}
    return Job("s3://bucket/run", str(memory), options)


def test_unreachable_storage_is_reported_and_memory_still_saves_and_loads(
    memory_root: Path,
) -> None:
    job = _unreachable(memory_root)
    writer = job.writer()
    for number in (1, 2, 3):
        save(writer, number)
    deadline = time.monotonic() + 60
    while not any(entry.error and entry.in_memory for entry in writer.status()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    failed = next(entry for entry in writer.status() if entry.error and entry.in_memory)
    assert failed.state is State.FAILED
    assert failed.flush_attempts >= 1
    assert "storage s3://bucket/run" in failed.error
    loaded = load_anew(job)
    assert (loaded.number, loaded.report.source) == (3, "memory")
    assert any("storage s3://bucket/run" in reason for reason in loaded.report.passed_over)
    writer.close(flush=False)


def test_load_from_nothing_but_unreachable_storage_says_so(memory_root: Path) -> None:
    error = forked(_load_error, _unreachable(memory_root))
    assert error.startswith("NoRecoverableCheckpoint")
    assert "storage s3://bucket/run is unavailable" in error


def _load_error(job: Job) -> str:
    error = raised_by(lambda: load_anew(job))
    return f"{type(error).__name__}: {error}"


def _save_where_nothing_may_be_written(url: str, memory: str) -> tuple[str, str]:
    os.chown(memory, 65534, 65534)
    os.setegid(65534)
    os.seteuid(65534)
    try:
        job = Job(url, memory)
        writer = job.writer(agent="thread")
        save(writer, 1)
        with contextlib.suppress(DcpMemError):
            writer.wait(timeout=30)
        error = writer.status()[0].error
        assert load_anew(job).number == 1
        writer.close(flush=False)
        return error, ""
    finally:
        os.seteuid(0)
        os.setegid(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming someone else takes root")
def test_directory_without_permission_fails_the_flush_and_not_the_training(
    memory_root: Path,
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as closed:
        os.chmod(closed, 0o755)
        error, _ = forked(_save_where_nothing_may_be_written, f"{closed}/run", str(memory_root))
    assert "Permission denied" in error
    assert "Check the path, and that you may write there" in error


def test_file_in_place_of_a_directory_is_a_refusal_that_wait_raises(
    memory_root: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    job = Job(str(tmp_path / "file" / "run"), str(memory_root))
    writer = job.writer()
    save(writer, 1)
    with pytest.raises(DcpMemError, match=r"'step-1' did not reach storage.*Not a directory"):
        writer.wait(timeout=30)
    writer.close(flush=False)


# -- the node's memory, full to the last page ------------------------------------------------------


def _save_into_a_full_root(memory: str) -> tuple[list[Exception | None], int, Exception | None]:
    """Two saves, two more when nothing is free, and one when there is room again."""
    with Job(None, memory).writer(keep_memory=1, on_full="raise") as writer:
        save(writer, 1)
        save(writer, 2)
        leads = not dist.is_initialized() or dist.get_rank() == 0
        if leads:
            fill(Path(memory) / "filler")
        _everyone()
        errors = [raised_by(partial(save, writer, number)) for number in (3, 4)]
        loaded = load_anew(Job(None, memory)).number
        if leads:
            (Path(memory) / "filler").unlink()
        _everyone()
        return errors, loaded, raised_by(lambda: save(writer, 5))


def _everyone() -> None:
    if dist.is_initialized():
        dist.barrier()


@pytest.mark.parametrize("ranks", [1, 2])
def test_tmpfs_without_a_free_page_fails_the_save_on_every_rank_and_nothing_else(
    memory_root: Path, ranks: int
) -> None:
    with mounted_tmpfs(memory_root / "small", "64m") as small:
        for errors, loaded, afterwards in forked_ranks(_save_into_a_full_root, ranks, str(small)):
            for error in errors:
                assert isinstance(error, (MemoryBudgetExceeded, RankFailed))
                assert "Raise memory_limit or the tmpfs size" in str(error)
            assert loaded == 2
            assert afterwards is None


def _save_unshown(job: Job) -> None:
    """As a process leaves it that was killed when the checkpoint had just become complete."""
    with job.writer() as writer:
        save(writer, 1)
    directory = job.directory / "step-1"
    for path in (directory / ".metadata", *directory.glob(".dcp_mem/metadata-*")):
        path.unlink()


def _save_beside_an_unshown_one(job: Job) -> tuple[Exception | None, int, Exception | None]:
    filler = Path(job.memory) / "filler"
    with job.writer(on_full="raise") as writer:
        writer.prepare(make_state(2)).wait(30)
        fill(filler)
        full = raised_by(lambda: save(writer, 2))
        loaded = load_anew(job).number
        filler.unlink()
        return full, loaded, raised_by(lambda: save(writer, 3))


def test_tmpfs_without_room_for_the_metadata_of_an_older_checkpoint_is_just_full(
    memory_root: Path,
) -> None:
    with mounted_tmpfs(memory_root / "small", "64m") as small:
        job = Job(None, str(small))
        forked(_save_unshown, job)
        full, loaded, afterwards = forked(_save_beside_an_unshown_one, job)
        assert isinstance(full, MemoryBudgetExceeded)
        # The save failed for its own need of memory, not while it was being prepared.
        assert "preparing" not in str(full)
        assert loaded == 1
        assert afterwards is None


def _flush_from_a_full_root(job: Job) -> tuple[str, str]:
    """Flush when the memory root has no room for a record; return the state before and after."""
    writer = job.writer()
    save(writer, 1)
    writer.wait(timeout=30)
    (agent,) = agents(job.memory)
    agent.suspend()
    save(writer, 2)
    filler = Path(job.memory) / "filler"
    fill(filler)
    agent.resume()
    wait_until((Path(job.url or "") / "step-2" / ".metadata").exists)
    before = writer.status()[0].state
    filler.unlink()
    writer.wait(timeout=30)
    assert agents(job.memory) == [agent]
    return before, writer.status()[0].state


def test_agent_outlives_a_memory_root_in_which_it_cant_write(
    memory_root: Path, tmp_path: Path
) -> None:
    with mounted_tmpfs(memory_root / "small", "64m") as small:
        # Its log lies there too: what doesn't fit is lost, and that must not end it.
        job = Job(str(tmp_path / "storage"), str(small))
        before, after = forked(_flush_from_a_full_root, job)
    assert (before, after) == (State.COMPLETE, State.DURABLE)


# -- agents that can't work ------------------------------------------------------------------------


def _save_without_an_agent(job: Job) -> tuple[list[str], str]:
    heard: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dcp_mem").addHandler(handler)
    sys.executable = "/nowhere/python"
    writer = job.writer()
    save(writer, 1)
    error = raised_by(lambda: writer.wait(timeout=0.1))
    assert load_anew(job).number == 1
    writer.close(flush=False)
    return heard, str(error)


def test_agent_that_cant_be_started_is_logged_and_training_goes_on(
    memory_root: Path, tmp_path: Path
) -> None:
    heard, error = forked(_save_without_an_agent, Job(str(tmp_path), str(memory_root)))
    assert any("the agent can't be started" in text and "agent='thread'" in text for text in heard)
    assert "step-1" in error or "the newest checkpoint is not durable yet" in error


def _save_with_foreign_options(job: Job, script: Path) -> tuple[str, int, str]:
    """Save with options of a class that only this script knows."""
    script.write_text("class Credential:\n    pass\n")
    sys.path.insert(0, str(script.parent))
    credential = importlib.import_module(script.stem).Credential()
    with job.writer() as writer:
        save(writer, 1)
        writer.wait(timeout=30)
        (agent,) = agents(job.memory)
        other = Job(f"{job.url}/other", job.memory, {"credential": credential}, "other")
        foreign = other.writer()
        save(foreign, 2)
        error = raised_by(lambda: foreign.wait(timeout=0.1))
        save(writer, 3)  # the agent goes on for those that it understands
        writer.wait(timeout=30)
        assert agents(job.memory) == [agent]
        foreign.close(flush=False)
    return str(error), load_anew(other).number, Path(writer.agent_log).read_text()


def test_options_that_the_agent_cant_read_dont_stop_it(memory_root: Path, tmp_path: Path) -> None:
    job = Job(str(tmp_path / "storage"), str(memory_root))
    error, number, log = forked(_save_with_foreign_options, job, tmp_path / "only_here.py")
    assert "is not durable yet" in error
    assert number == 2
    assert (
        "storage_options that can't be read here (ModuleNotFoundError: No module named 'only_here')"
        in log
    )


def test_options_that_cant_be_sent_to_the_agent_are_refused_at_once(tmp_path: Path) -> None:
    options = {"credential": threading.Lock()}
    with pytest.raises(
        ConfigError, match=r"storage_options can't be sent to the agent .* agent='thread'"
    ):
        MemoryStorageWriter(tmp_path, storage_options=options)
    MemoryStorageWriter(tmp_path, storage_options=options, agent="thread")
    MemoryStorageWriter(None, job="job", storage_options=options)


# -- storage that doesn't answer -------------------------------------------------------------------


def _save_and_flush(job: Job) -> None:
    with job.writer() as writer:
        save(writer, 1)
        writer.wait(timeout=30)


def _load_past_silence(job: Job) -> tuple[float, int, str, float]:
    started = time.monotonic()
    with patch("dcp_mem.loading.survey._FIRST_ANSWER_TIMEOUT", 1.0):
        loaded = load_anew(job)
    ended = time.monotonic()
    return ended - started, loaded.number, "\n".join(loaded.report.passed_over), ended


def test_load_from_memory_doesnt_wait_for_storage_that_hangs(
    s3_root: StorageRoot, moto: S3Server, memory_root: Path
) -> None:
    job = s3_root.job(memory_root)
    forked_ranks(_save_and_flush, 2, job)
    moto.pause()
    try:
        for seconds, number, passed_over, ended in forked_ranks(
            _load_past_silence, 2, job, timeout=60
        ):
            assert seconds < 30
            assert number == 1
            assert f"storage {job.url} did not answer within 1 s" in passed_over
            assert time.monotonic() - ended < 30, "the process waits for storage before it ends"
    finally:
        moto.resume()


def test_named_checkpoint_on_storage_that_is_down_says_why(memory_root: Path) -> None:
    error = forked(_named_load_error, _unreachable(memory_root))
    assert error.startswith(
        "CheckpointNotFound: checkpoint 'step-7' can't be loaded from memory (job job) and s3://bucket"
    )
    assert "(loadable, newest first: none)" in error
    assert error.count("is unavailable") == 1


def _named_load_error(job: Job) -> str:
    error = raised_by(lambda: load_anew(job, "step-7"))
    return f"{type(error).__name__}: {error}"


def test_package_that_a_protocol_of_fsspec_itself_needs_is_named() -> None:
    with pytest.raises(ConfigError, match=r"sftp:// can't be used here: .*paramiko"):
        MemoryStorageWriter("sftp://host/run")


# -- two runs of one job ---------------------------------------------------------------------------


def _hold(job: Job, mark: Path) -> None:
    with job.writer(persist=False) as writer:
        save(writer, 1)
        mark.touch()
        wait_until(lambda: not mark.exists())


def _try_to_save(job: Job) -> Exception | None:
    error = raised_by(lambda: save(job.writer(persist=False), 2))
    assert load_anew(job).number == 1  # reading is free to all
    return error


def test_job_of_another_live_run_is_refused_on_every_rank(
    memory_root: Path, tmp_path: Path
) -> None:
    job, mark = Job(str(tmp_path / "storage"), str(memory_root)), tmp_path / "held"
    with forking(_hold, 2, job, mark) as holders:
        wait_until(mark.exists)
        for error in forked_ranks(_try_to_save, 2, job):
            assert isinstance(error, (JobInUse, RankFailed))
            assert "job 'job' is in use by process" in str(error)
            assert "End that run, or give this one another job= (or path)" in str(error)
        mark.unlink()
        holders.join()
    assert forked_ranks(_save_after_all, 2, job) == [None, None]


def _save_after_all(job: Job) -> Exception | None:
    with job.writer(persist=False) as writer:
        return raised_by(lambda: save(writer, 3))


# -- names of checkpoints --------------------------------------------------------------------------


def _save_under(job: Job, names: list[Any]) -> list[Exception | None]:
    here = [name.format(rank=dist.get_rank()) if isinstance(name, str) else name for name in names]
    with job.writer(persist=False) as writer:
        return [raised_by(partial(save, writer, 1, name)) for name in here]


def test_name_that_is_none_under_the_root_is_refused_on_every_rank(
    memory_root: Path, tmp_path: Path
) -> None:
    names: list[Any] = [
        7,
        "../step-1",
        "a/b",
        ".hidden",
        "s3://elsewhere/step-1",
        "/elsewhere/step-1",
        "x" * 300,
        "step-{rank}",
    ]
    for errors in forked_ranks(_save_under, 2, Job(str(tmp_path), str(memory_root)), names):
        for name, error in zip(names[:-1], errors, strict=False):
            assert isinstance(error, ConfigError), name
            if name == 7:
                assert "checkpoint_id=7: give a text or a path, not an int" in str(error)
                continue
            assert (
                "give a plain name such as 'step-100',"
                " or a full path or URL directly under the root" in str(error)
            )
        assert isinstance(errors[-1], ConfigError)
        assert "the ranks save under different checkpoint ids: step-0, step-1" in str(errors[-1])


# -- a memory root that is full before the first save ----------------------------------------------


def _save_for_the_first_time(memory: str) -> Exception | None:
    with MemoryStorageWriter(memory_root=memory, job="job") as writer:
        return raised_by(lambda: save(writer, 1))


def test_a_root_that_is_full_before_the_first_save_is_refused_with_its_path(
    memory_root: Path,
) -> None:
    with mounted_tmpfs(memory_root / "small", "8m") as small:
        fill(small / "filler")
        error = forked(_save_for_the_first_time, str(small))
    assert isinstance(error, MemoryBudgetExceeded)
    assert str(small) in str(error)
    assert "Raise memory_limit or the tmpfs size" in str(error)


@pytest.mark.parametrize("inodes", range(2, 13))
def test_a_root_without_inodes_is_refused_with_what_it_lacks(
    memory_root: Path, inodes: int
) -> None:
    with mounted_tmpfs(memory_root / "small", f"8m,nr_inodes={inodes}") as small:
        error = forked(_save_for_the_first_time, str(small))
    assert isinstance(error, MemoryBudgetExceeded)
    assert f"no space for {small}" in str(error)
    assert "though bytes are free: its inodes or a quota are used up" in str(error)


def _wait_beside_a_full_root(root: str, memory: str) -> str:
    filler = Path(memory) / "filler"
    with MemoryStorageWriter(root, memory_root=memory, upload_limit="1KiB") as writer:
        save(writer, 1)
        filler.mkdir(0o700)
        with contextlib.suppress(OSError):
            for number in range(1000):
                (filler / str(number)).touch(0o600)
        told = str(raised_by(lambda: writer.wait("step-1", timeout=0.5)))
        shutil.rmtree(filler)
        writer.close(flush=False)
    return told


def test_a_wait_beside_a_root_that_has_become_full_says_so(
    memory_root: Path, tmp_path: Path
) -> None:
    with mounted_tmpfs(memory_root / "small", "64m,nr_inodes=500") as small:
        told = forked(_wait_beside_a_full_root, str(tmp_path / "storage"), str(small))
    assert f"no error so far, but {small} is full" in told
    assert "remove other files, or mount a larger tmpfs" in told


def test_a_name_that_was_saved_twice_is_listed_once() -> None:
    error = CheckpointNotFound("step-9", "job", ["step-2", "step-1", "step-2"], [])
    assert str(error) == "no step-9 in job (there are, newest first: step-2, step-1)"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
