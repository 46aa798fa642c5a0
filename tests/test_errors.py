"""What goes wrong says what to do, on all ranks alike, and leaves what was saved before."""

import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from dcp_mem import ConfigError, MemoryBudgetExceeded, MemoryStorageWriter, RankFailed, State, every, interval
from dcp_mem.errors import DcpMemError
from tests.forks import forked, forked_ranks, raised_by
from tests.jobs import Job, load_anew, save

_UNREACHABLE = "http://127.0.0.1:9"  # the discard port, where nothing listens


# -- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"path": "sx3://bucket/run"}, r"fsspec knows no protocol 'sx3' \(is it a typing error\?\)"),
        ({"path": "s3://"}, "a bucket, container or directory is missing"),
        ({"path": " "}, "give a directory, an fsspec URL"),
        ({"path": None}, r"give job='my-run'"),
        ({"path": "run", "job": "../other"}, "up to 128 letters"),
        ({"path": "run", "keep": 0}, "at least 1 complete checkpoint"),
        ({"path": "run", "memory_limit": "lots"}, "give bytes, or a text such as '64GiB'"),
        ({"path": "run", "on_full": "panic"}, "choose 'wait', 'skip' or 'raise'"),
        ({"path": "run", "agent": "fork"}, "choose 'process' or 'thread'"),
        ({"path": "run", "persist": 10}, r"give True, False, every\(n\) or interval\(seconds\)"),
    ],
)
def test_bad_arguments_are_refused_at_once_with_what_to_give(arguments: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        MemoryStorageWriter(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [lambda: every(0), lambda: every(True), lambda: interval(0), lambda: interval(-1)])
def test_bad_policies_are_refused(make: object) -> None:
    with pytest.raises(ConfigError):
        make()  # type: ignore[operator]


def test_replicas_are_announced_and_not_there() -> None:
    with pytest.raises(NotImplementedError, match="use 0"):
        MemoryStorageWriter("run", replicas=1)


def test_missing_package_of_a_protocol_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="needs the Python package 'gcsfs': pip install gcsfs"):
        MemoryStorageWriter("gs://bucket/run")


def _save_without_a_name(job: Job) -> str:
    import torch
    import torch.distributed.checkpoint as dcp

    error = raised_by(lambda: dcp.save({"a": torch.ones(1)}, storage_writer=job.writer()))
    return f"{type(error).__name__}: {error}"


def test_save_without_a_checkpoint_id_says_what_path_is(memory_root: Path) -> None:
    answers = forked_ranks(_save_without_a_name, 2, Job(None, str(memory_root)))
    assert all(answer.startswith("ConfigError: pass checkpoint_id= to dcp.save") for answer in answers)


# -- memory ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _tmpfs(directory: Path, size: str) -> Iterator[Path]:
    directory.mkdir(mode=0o700)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "tmpfs", str(directory)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a tmpfs takes root")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


def _fill(memory: str, on_full: str) -> tuple[str, list[str], int]:
    """Save 12 MiB at a time into a tmpfs of 32: the error, what status says of the saves, and what still loads."""
    import torch
    import torch.distributed.checkpoint as dcp

    writer = MemoryStorageWriter(memory=memory, job="job", keep=4, on_full=on_full)
    state = {"a": torch.zeros(3 << 20), "step": 0}
    error: Exception | None = None
    for step in (1, 2, 3):
        state = {"a": torch.full((3 << 20,), float(step)), "step": step}
        error = raised_by(partial(dcp.save, state, checkpoint_id=f"step-{step}", storage_writer=writer))
    with Job(None, memory).reader() as reader:
        dcp.load(state, storage_reader=reader)
    assert bool((state["a"] == state["step"]).all())  # type: ignore[attr-defined]
    names = [f"{entry.name} {entry.state.value}" for entry in writer.status()]
    writer.close()
    return f"{type(error).__name__}: {error}", names, int(state["step"])  # type: ignore[call-overload]


def test_full_tmpfs_makes_room_by_evicting_and_never_kills(memory_root: Path) -> None:
    with _tmpfs(memory_root / "small", "32m") as small:
        error, names, loaded = forked(_fill, str(small), "raise")
    assert error == "NoneType: None"
    assert names[0] == "step-3 complete"
    assert loaded == 3


def test_checkpoint_larger_than_the_tmpfs_is_an_error_with_the_figures(memory_root: Path) -> None:
    with _tmpfs(memory_root / "small", "8m") as small:
        error = forked(_first_error, str(small))
    assert error.startswith(MemoryBudgetExceeded.__name__)
    assert "MiB needed" in error
    assert "Raise memory_limit or the tmpfs size" in error


def _first_error(memory: str) -> str:
    import torch
    import torch.distributed.checkpoint as dcp

    with MemoryStorageWriter(memory=memory, job="job", on_full="raise") as writer:
        state = {"a": torch.zeros(3 << 20), "blob": b""}
        error = raised_by(lambda: dcp.save(state, checkpoint_id="step-1", storage_writer=writer))
    assert os.listdir(os.path.join(memory, "job", ".slots")) == []
    return f"{type(error).__name__}: {error}"


def _grow_a_byte_item(memory: str) -> tuple[str, int]:
    import torch
    import torch.distributed.checkpoint as dcp

    writer = MemoryStorageWriter(memory=memory, job="job", keep=1, on_full="raise")
    dcp.save({"a": torch.ones(8), "blob": b"small"}, checkpoint_id="step-1", storage_writer=writer)
    big = {"a": torch.ones(8), "blob": os.urandom(48 << 20)}  # the plan can't tell how large it is
    error = raised_by(lambda: dcp.save(big, checkpoint_id="step-2", storage_writer=writer))
    state = {"a": torch.zeros(8), "blob": b""}
    with Job(None, memory).reader() as reader:
        dcp.load(state, storage_reader=reader)
    writer.close()
    return f"{type(error).__name__}: {error}", len(state["blob"])  # type: ignore[arg-type]


def test_byte_item_that_fills_the_tmpfs_is_an_error_and_the_last_checkpoint_stays(memory_root: Path) -> None:
    with _tmpfs(memory_root / "small", "32m") as small:
        error, length = forked(_grow_a_byte_item, str(small))
    assert error.startswith(MemoryBudgetExceeded.__name__)
    assert length == len(b"small")


def _save_over_the_limit(job: Job) -> str:
    error = raised_by(lambda: save(job.writer(memory_limit="1KiB", on_full="raise"), 1))
    return f"{type(error).__name__}: {error}"


def test_memory_limit_is_enforced_on_all_ranks_alike(memory_root: Path) -> None:
    answers = forked_ranks(_save_over_the_limit, 2, Job(None, str(memory_root)))
    assert all(answer.startswith("MemoryBudgetExceeded: step-1: the memory limit leaves no room") for answer in answers)


def _root_of_one_rank_is_missing(memory: str) -> tuple[str, str]:
    missing = dist.get_rank() == 1
    broken = Job(None, f"{memory}/missing/root" if missing else memory)
    error = raised_by(lambda: save(broken.writer(), 1))
    whole = Job(None, memory)
    save(whole.writer(), 2)
    assert load_anew(whole).number == 2
    return type(error).__name__, str(error)


def test_failure_of_one_rank_is_raised_on_all_and_the_next_save_works(memory_root: Path) -> None:
    (kind0, text0), (kind1, text1) = forked_ranks(_root_of_one_rank_is_missing, 2, str(memory_root))
    assert kind1 == "MemoryUnavailable"
    assert kind0 in {kind1, RankFailed.__name__}
    assert "missing does not exist" in text0
    assert "missing does not exist" in text1


# -- storage ---------------------------------------------------------------------------------------------------------


def _unreachable(memory: Path) -> Job:
    options: dict[str, Any] = {"key": "key", "secret": "secret-of-nothing", "endpoint_url": _UNREACHABLE}
    options |= {"config_kwargs": {"connect_timeout": 1, "retries": {"max_attempts": 0}}}
    return Job("s3://bucket/run", str(memory), options)


def test_unreachable_storage_is_reported_and_memory_still_saves_and_loads(memory_root: Path) -> None:
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
def test_directory_without_permission_fails_the_flush_and_not_the_training(memory_root: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as closed:
        os.chmod(closed, 0o755)
        error, _ = forked(_save_where_nothing_may_be_written, f"{closed}/run", str(memory_root))
    assert "Permission denied" in error
    assert "Check the path, and that you may write there" in error


def test_file_in_place_of_a_directory_is_a_refusal_that_wait_raises(memory_root: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    job = Job(str(tmp_path / "file" / "run"), str(memory_root))
    writer = job.writer()
    save(writer, 1)
    with pytest.raises(DcpMemError, match=r"'step-1' did not reach storage.*Not a directory"):
        writer.wait(timeout=30)
    writer.close(flush=False)
