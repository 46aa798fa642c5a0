"""torch_checkpointing on dcp_mem's storage: killed in the middle of a save, and started again."""

import mmap
import os
import shutil
import subprocess
import threading
import tracemalloc
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

from dcp_mem import (
    CheckpointExists,
    CheckpointInUse,
    ConfigError,
    SegmentCorrupt,
    StorageUnavailable,
)
from tests.support import REPOSITORY
from tests.support.checkpoints.jobs import Job, committed_in
from tests.support.command import command, reject
from tests.support.docs import blocks
from tests.support.processes.forks import forked, in_process, on_ranks, raised_by
from tests.support.processes.launch import ends, run_torchrun

pytest.importorskip("torch_checkpointing")

from torch_checkpointing.checkpoint_layout import JsonSerialization, LayoutInfo
from torch_checkpointing.checkpoint_manager import CheckpointManager
from torch_checkpointing.config import SyncCheckpointSaverConfig
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.schema import ItemSpec
from torch_checkpointing.storage.base_storage import ReadArgs

from dcp_mem.integrations.torch_checkpointing import (
    MemoryStorage,
    MemoryStorageConfig,
    in_memory,
)
from dcp_mem.integrations.torch_checkpointing import storage as storing

_SECONDS = 120
_IN_THE_THIRD_SAVE = {"DCP_MEM_FAULTS": "stage.copied:kill:3"}
_END = r"rank \d ends with [0-9a-f]{64}"
_JOB = REPOSITORY / "tests" / "support" / "frameworks" / "torch_checkpointing_job.py"


def _manager(job: Job, items: dict[str, ItemSpec] | None = None, **options: Any) -> Any:
    return CheckpointManager(
        CheckpointManager.Config(
            items=items or {}, save=SyncCheckpointSaverConfig(), **_places(job, **options)
        )
    )


def _places(job: Job, **options: Any) -> dict[str, Any]:
    return in_memory(job.url, memory_root=job.memory, job=job.name, agent="thread", **options)


def _config(job: Job) -> MemoryStorageConfig:
    options = {"memory_root": job.memory, "job": job.name, "agent": "thread"}
    return MemoryStorageConfig(job.url, options)


def _storage(job: Job) -> MemoryStorage:
    return _config(job).create_storage()


def _state(number: int) -> dict[str, Any]:
    return {
        "model": {"w": torch.arange(1000.0) + number, "b": torch.full((3,), float(number))},
        "bytes": f"bytes {number}".encode(),
        "step": number,
    }


def _load(manager: Any, name: str) -> int:
    state = _state(-1)
    loaded = manager.load(name, into=state)
    number = int(loaded["step"])
    for key, tensor in _state(number)["model"].items():
        assert torch.equal(state["model"][key], tensor)
    assert loaded["bytes"] == f"bytes {number}".encode()
    return number


# -- a training that is killed ---------------------------------------------------------------------


def _train(
    root: Path, how: str, faults: dict[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    return run_torchrun(_JOB, root, "14", how, timeout=_SECONDS, env=faults)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("how", [pytest.param("sync", marks=pytest.mark.variant), "async"])
def test_a_killed_training_goes_on_from_memory_and_from_storage_to_the_bit(
    how: str, memory_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DCP_MEM_ROOT", str(memory_root / "first"))
    undisturbed = ends(_train(tmp_path / "undisturbed", how), _END)
    root = tmp_path / "run"
    killed = _train(root, how, _IN_THE_THIRD_SAVE)
    assert killed.returncode != 0, killed.stdout
    again = _train(root, how)
    assert "rank 0 goes on from 6" in again.stdout, again.stdout
    assert ends(again, _END) == undisturbed
    with (
        MemoryStorageConfig(str(root))
        .create_storage()
        .stream_read(Path("step-12/table_1.pt")) as file
    ):
        assert torch.load(file)[0, 0] == 1 + sum(range(13))  # type: ignore[arg-type]
    MemoryStorageConfig(str(root)).flush(timeout=60)
    assert {f"step-{step}" for step in (3, 6, 9, 12)} == committed_in(root)
    monkeypatch.setenv("DCP_MEM_ROOT", str(memory_root / "second"))
    elsewhere = _train(root, how)
    assert "rank 1 goes on from 12" in elsewhere.stdout, elsewhere.stdout
    assert ends(elsewhere, _END) == undisturbed


# -- one process -----------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["memory", "storage"])
@in_process
def test_what_was_saved_is_loaded(where: str, job: Job, memory_job: Job) -> None:
    job = job if where == "storage" else memory_job
    manager = _manager(job)
    for number in (1, 2):
        manager.save(f"step-{number}", _state(number))
    assert [_load(manager, f"step-{number}") for number in (2, 1)] == [2, 1]
    if job.url is not None:
        assert _load(manager, f"{job.url}/step-2") == 2
    manager.close()


def _loads_all(job: Job) -> list[int]:
    manager = _manager(job)
    return [_load(manager, f"step-{number}") for number in (1, 2)]


def test_another_process_loads_from_memory_and_without_it_from_storage(job: Job) -> None:
    forked(_saves_and_flushes, job)
    assert job.url is not None
    stored = Path(job.url).rename(Path(f"{job.url}-away"))
    assert forked(_loads_all, job) == [1, 2]
    stored.rename(job.url)
    shutil.rmtree(job.directory)
    assert forked(_loads_all, job) == [1, 2]


def _saves_and_flushes(job: Job) -> None:
    manager = _manager(job)
    for number in (1, 2):
        manager.save(f"step-{number}", _state(number))
    _config(job).flush(timeout=60)
    manager.close()


def _reads_what_is_damaged(job: Job) -> None:
    assert _loads_all(job) == [1, 2]
    segments = [*job.directory.glob("step-1/*.distcp")]
    for segment in segments:
        _flip(segment)
    assert _loads_all(job) == [1, 2]
    assert job.url is not None
    for segment in Path(job.url).glob("step-1/*.distcp"):
        _flip(segment)
    error = raised_by(lambda: _loads_all(job))
    assert isinstance(error, SegmentCorrupt), repr(error)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.write(data)


def test_what_is_damaged_in_memory_is_read_from_storage_or_refused(job: Job) -> None:
    forked(_saves_and_flushes, job)
    forked(_reads_what_is_damaged, job)


def _reads_while_storage_is_silent(job: Job) -> None:
    def committed_under(storage: Any, name: str) -> NoReturn:
        raise StorageUnavailable(storage.url, "an outage")

    storing.committed_under = committed_under  # type: ignore[attr-defined]
    assert _loads_all(job) == [1, 2]
    missing = raised_by(lambda: _storage(job).read(Path("step-3/model_0.pt")))
    assert isinstance(missing, StorageUnavailable), repr(missing)


def test_what_memory_has_is_read_while_storage_is_silent(job: Job) -> None:
    forked(_saves_and_flushes, job)
    forked(_reads_while_storage_is_silent, job)


_LONG = 160 << 20
_AT_ONCE = ReadArgs(pre_read_full_file=False)


def _reads_a_long_file(job: Job) -> int:
    storage = _storage(job)
    storage.write(Path("step-1/long"), bytes(range(256)) * (_LONG >> 8))
    storage.complete("step-1")
    _config(job).flush(timeout=60)
    storage.close()
    shutil.rmtree(job.directory)
    into = mmap.mmap(-1, _LONG)
    tracemalloc.start()
    with _storage(job).stream_read(Path("step-1/long"), _AT_ONCE) as stream:
        assert stream.readinto(into) == _LONG
    assert into[:256] == into[-256:] == bytes(range(256))
    return tracemalloc.get_traced_memory()[1]


def test_a_long_read_from_storage_takes_little_memory_beside_its_own(job: Job) -> None:
    assert forked(_reads_a_long_file, job) < _LONG // 2


@in_process
def test_a_closed_file_is_not_read(memory_job: Job) -> None:
    storage = _storage(memory_job)
    storage.write(Path("step-1/a"), b"a")
    storage.complete("step-1")
    file = storage.stream_read(Path("step-1/a"), _AT_ONCE)
    file.close()
    uses = (lambda: file.readinto(bytearray(1)), file.readall, lambda: file.seek(1))
    assert [type(raised_by(use)).__name__ for use in uses] == ["ValueError"] * 3


def test_a_config_shows_no_options() -> None:
    options = {"storage_options": {"secret": "s3cr3t"}}
    assert "s3cr3t" not in repr(MemoryStorageConfig("s3://bucket/run", options))


@in_process
def test_a_name_that_is_there_is_refused_unless_it_may_be_replaced(memory_job: Job) -> None:
    manager = _manager(memory_job)
    manager.save("step-1", _state(1))
    assert isinstance(raised_by(lambda: manager.save("step-1", _state(2))), CheckpointExists)
    assert _load(manager, "step-1") == 1
    manager.close()
    manager = _manager(memory_job, overwrite=True)
    manager.save("step-1", _state(3))
    assert _load(manager, "step-1") == 3


@in_process
def test_layouts_directories_and_ranges(memory_job: Job) -> None:
    config = LayoutInfo("deep/down/config.json", JsonSerialization())
    items = {
        "config": ItemSpec(layout=config),
        "big": ItemSpec(resharder=DefaultResharder()),
    }
    manager = _manager(memory_job, items)
    big = {"t": torch.arange(3_000_000.0)}
    manager.save("step-1", {"config": {"lr": 0.1}, "big": big})
    into = {"config": {"lr": 0.0}, "big": {"t": torch.zeros(3_000_000)}}
    assert manager.load("step-1", into=into)["config"] == {"lr": 0.1}
    assert torch.equal(into["big"]["t"], big["t"])  # type: ignore[index]
    storage = _storage(memory_job)
    assert storage.ls(Path(".")) == ["step-1"]
    assert {"big_0.pt", "deep"} <= set(storage.ls(Path("step-1")))
    assert storage.ls(Path("step-1/deep")) == ["down"]
    assert storage.isdir(Path("step-1/deep"))
    assert not storage.isdir(Path("step-1/deep/down/config.json"))
    assert storage.exists(Path("step-1/deep/down/config.json"))
    assert not storage.exists(Path("step-1/deep/down/other.json"))
    assert not storage.exists(Path("step-2"))
    assert storage.glob("step-1/big_*") == ["step-1/big_0.pt"]
    whole = storage.read(Path("step-1/big_0.pt"))
    assert storage.getsize(Path("step-1/big_0.pt")) == len(whole)
    with storage.stream_read(Path("step-1/big_0.pt"), _AT_ONCE) as file:
        assert (file.read(10), file.read(), file.read()) == (whole[:10], whole[10:], b"")
        for start, count in ((5_000_001, 70_003), (3, 9), (len(whole) - 5, 10)):
            assert file.seek(start) == start
            assert file.read(count) == whole[start : start + count]
    storage.rmdir(Path("step-1"))
    assert not storage.exists(Path("step-1"))
    assert isinstance(raised_by(lambda: storage.read(Path("step-1/big_0.pt"))), FileNotFoundError)


@in_process
def test_what_is_read_from_memory_is_not_removed_from_storage_either(job: Job) -> None:
    _saves_and_flushes(job)
    storage = _storage(job)
    with _storage(job).stream_read(Path("step-1/model_0.pt"), _AT_ONCE):
        error = raised_by(lambda: storage.rmdir(Path("step-1")))
        assert isinstance(error, CheckpointInUse), repr(error)
    assert committed_in(Path(str(job.url))) == {"step-1", "step-2"}
    assert storage.ls(Path(".")) == ["step-2", "step-1"]
    storage.rmdir(Path("step-1"))
    assert committed_in(Path(str(job.url))) == {"step-2"}
    assert storage.ls(Path(".")) == ["step-2"]


def _reads_a_rejected_one(job: Job) -> None:
    storage = _storage(job)
    reject(job, "step-2")
    for is_on_storage_alone in (False, True):
        if is_on_storage_alone:
            shutil.rmtree(job.directory)
        assert storage.ls(Path(".")) == ["step-1"]
        assert _loads_all(job) == [1, 2]


def test_a_rejected_checkpoint_is_not_listed_and_is_loaded_by_its_name(job: Job) -> None:
    forked(_saves_and_flushes, job)
    forked(_reads_a_rejected_one, job)


@in_process
def test_only_whole_files_of_the_last_attempt_become_a_checkpoint(memory_job: Job) -> None:
    storage = _storage(memory_job)
    storage.mkdir(Path("tmp_step-1"))
    storage.write(Path("tmp_step-1/a"), b"old")
    storage.mkdir(Path("tmp_step-1"))  # the next attempt
    with storage.stream_write(Path("tmp_step-1/b")) as file:
        file.write(b"new")

    def fails() -> None:
        with storage.stream_write(Path("tmp_step-1/c")) as file:
            file.write(b"half")
            raise KeyError("c")

    assert isinstance(raised_by(fails), KeyError)
    assert _storage(memory_job).ls(Path(".")) == []
    assert isinstance(raised_by(lambda: storage.read(Path("step-1/b"))), FileNotFoundError)
    storage.rename(Path("tmp_step-1"), Path("step-1"), is_directory=True)
    storage.complete("step-1")
    assert _storage(memory_job).ls(Path("step-1")) == ["b"]
    assert storage.read(Path("step-1/b")) == b"new"
    for refused in (
        lambda: storage.rename(Path("step-1"), Path("step-2")),
        lambda: storage.delete(Path("step-1/b")),
        lambda: storage.read(Path("/elsewhere/step-1/b")),
        lambda: storage.write(Path("step-1"), b""),
    ):
        assert isinstance(raised_by(refused), ConfigError)


@in_process
def test_what_a_failed_save_left_is_discarded_by_the_next_one(memory_job: Job) -> None:
    storage = _storage(memory_job)
    storage.write(Path("tmp_step-1/a"), b"left")
    left = storage._pending["tmp_step-1"]._slot
    assert left is not None
    storage.write(Path("tmp_step-2/a"), b"new")
    new = storage._pending["tmp_step-2"]._slot
    assert new is not None
    assert new.path == left.path  # given back, and taken again
    assert [*storage._pending] == ["tmp_step-2"]
    storage.complete("step-2")
    storage.write(Path("tmp_step-3/a"), b"left")
    assert raised_by(lambda: storage.complete("step-4")) is not None  # nothing was written for it
    assert not storage._pending
    assert storage.read(Path("step-2/a")) == b"new"


@in_process
def test_two_files_that_a_thread_writes_at_once_are_refused(memory_job: Job) -> None:
    storage = _storage(memory_job)
    first, second = (storage.stream_write(Path(f"step-1/{name}")) for name in "ab")
    first.write(b"first")
    for refused in (
        lambda: second.write(b"second"),
        second.close,
        lambda: storage.mkdir(Path("step-1")),
        lambda: storage.rename(Path("step-1"), Path("step-2")),
        lambda: storage.complete("step-1"),
    ):
        error = raised_by(refused)
        assert isinstance(error, ConfigError)
        assert "close the file" in str(error)
    first.close()
    second.write(b"second")
    second.close()
    storage.complete("step-1")
    assert storage.read(Path("step-1/a")) == b"first"
    assert storage.read(Path("step-1/b")) == b"second"


@in_process
def test_a_file_that_was_never_closed_holds_up_no_other(memory_job: Job) -> None:
    storage = _storage(memory_job)
    left = []

    def begin() -> None:
        left.append(storage.stream_write(Path("step-1/a")))
        left[0].write(b"half")

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    left.clear()  # discarded in this thread
    storage.write(Path("step-1/b"), b"whole")
    storage.complete("step-1")
    assert _storage(memory_job).ls(Path("step-1")) == ["b"]


@in_process
def test_what_cannot_work_is_refused_at_once(job: Job) -> None:
    assert isinstance(raised_by(lambda: in_memory(job.url, nonsense=1)), TypeError)  # type: ignore[call-arg]
    os.environ.update(WORLD_SIZE="2", RANK="0")
    error = raised_by(lambda: in_memory(job.url))
    assert isinstance(error, ConfigError)
    assert "init_process_group" in str(error)


def _exports(job: Job, target: Path) -> None:
    _saves_and_flushes(job)
    exported = command("export", str(job.url), "step-2", str(target), "--format", "files")
    assert exported.exit_code == 0, exported.output
    manager = CheckpointManager(CheckpointManager.Config(save=SyncCheckpointSaverConfig()))
    assert _load(manager, str(target)) == 2


def test_exported_files_are_loaded_without_dcp_mem(job: Job, tmp_path: Path) -> None:
    forked(_exports, job, tmp_path / "files", env={"DCP_MEM_ROOT": job.memory})


# -- several ranks ---------------------------------------------------------------------------------


_NOBODY_MEETS = {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
"""Only processes that write behind training connect."""


@on_ranks(2, env=_NOBODY_MEETS)
def test_all_ranks_have_one_checkpoint_and_the_same_errors(job: Job) -> None:
    rank = dist.get_rank()
    manager = _manager(job)
    manager.save("step-1", {f"own-{rank}": torch.full((4,), float(rank)), "both": rank})
    errors = [raised_by(lambda: manager.save("step-1", {"both": rank}))]
    state: dict[str, Any] = {f"own-{rank}": torch.zeros(4), "both": -1}
    assert manager.load("step-1", into=state)["both"] == rank
    assert state[f"own-{rank}"].tolist() == [rank] * 4
    other = 1 - rank
    file = Path(f"step-1/own-{other}_{other}.pt")
    with _storage(job).stream_read(file) as stream:
        assert torch.load(stream).tolist() == [other] * 4  # type: ignore[arg-type]
    manager.close()
    assert [type(error).__name__ for error in errors] == ["CheckpointExists"]


def _runs_the_page(text: str, url: str) -> None:
    exec(text.replace("/mnt/ckpts/run-42", url), {"__name__": "__main__"})


def test_the_page_runs(job: Job) -> None:
    text = blocks("python")["docs/torch-checkpointing.md 1"]
    forked(_runs_the_page, text, str(job.url), env={"DCP_MEM_ROOT": job.memory})
    assert committed_in(Path(str(job.url))) == {"step-100"}
