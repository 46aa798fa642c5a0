"""Retention at work, in memory and on storage: what is kept, and what must never go."""

import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from torch.distributed.checkpoint.api import CheckpointException

import dcp_mem
from dcp_mem import (
    CheckpointInUse,
    ConfigError,
    MemoryStorageWriter,
    Retention,
    State,
    StorageUnavailable,
    any_of,
    keep_best,
    keep_every,
    keep_for,
    keep_last,
)
from dcp_mem.cli.main import main
from dcp_mem.flushing.retention import Retainer
from dcp_mem.format.manifest import Manifest
from dcp_mem.loading import open as opening
from dcp_mem.storage import Storage
from dcp_mem.storage.leases import is_being_read, read_lease
from dcp_mem.storage.listing import committed_under, mark_rejected, remove_rejection
from dcp_mem.storage.posix import PosixStorage
from dcp_mem.storage.routes import open_storage
from tests.support.checkpoints.jobs import Job, load_anew, make_state, wait_until
from tests.support.processes.forks import forked
from tests.support.storage.servers import StorageRoot

LOSSES = (0.9, 0.2, 0.5, 0.1, 0.7, 0.8)


def _save(writer: MemoryStorageWriter, number: int, loss: float | None = None) -> None:
    writer.annotate_next_save(step=number * 10, metrics=None if loss is None else {"loss": loss})
    dcp_mem.save(make_state(number), checkpoint_id=f"step-{number * 10}", storage_writer=writer)


def _save_all(writer: MemoryStorageWriter, losses: Sequence[float] = LOSSES) -> None:
    for number, loss in enumerate(losses):
        _save(writer, number, loss)
        if writer.settings.url is not None:
            writer.wait(timeout=60)


def _stored(storage: Storage) -> set[str]:
    return {
        entry.name
        for entry in storage.ls("")
        if entry.is_directory and not entry.name.startswith(".")
    }


def _steps(*steps: int) -> set[str]:
    return {f"step-{step}" for step in steps}


# -- memory ----------------------------------------------------------------------------------------


def test_memory_keeps_what_the_policy_chooses(memory_root: Path) -> None:
    job = Job(None, str(memory_root))
    with job.writer(keep_memory=any_of(keep_last(2), keep_best("loss", 1))) as writer:
        _save_all(writer)
        held = {one.name for one in writer.status() if one.in_memory}
        assert held == _steps(30, 40, 50)
        slots = list((job.directory / ".slots").iterdir())
        assert len(slots) <= 1


def test_memory_keeps_no_more_than_the_policy_chooses_although_there_is_room(
    memory_root: Path,
) -> None:
    with Job(None, str(memory_root)).writer(
        keep_memory=any_of(keep_best("loss"), keep_best("loss", mode="max"))
    ) as writer:
        _save_all(writer, (0.9, 0.1, 0.5, 0.5, 0.6))
        assert {one.name for one in writer.status() if one.in_memory} == _steps(0, 10, 40)


def test_what_awaits_its_flush_stays_in_memory_although_it_is_not_chosen(job: Job) -> None:
    Path(str(job.url)).write_text("in the way")
    with job.writer(keep_memory=any_of(keep_best("loss"), keep_last(1)), agent="thread") as writer:
        # The policy chooses the newer one alone, and has room for two.
        for number, loss in enumerate((0.9, 0.1)):
            _save(writer, number, loss)
        assert {one.name for one in writer.status() if one.in_memory} == _steps(0, 10)
        Path(str(job.url)).unlink()


def test_memory_refuses_a_policy_without_bound(memory_root: Path) -> None:
    with pytest.raises(ConfigError, match="keep_storage"):
        Job(None, str(memory_root)).writer(keep_memory=any_of(keep_last(1), keep_every(10)))


# -- storage ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_storage_keeps_what_the_policy_chooses(
    memory_root: Path, storage_root: StorageRoot
) -> None:
    job = Job(storage_root.url, str(memory_root), storage_root.storage_options)
    storage = open_storage(storage_root.url, storage_root.storage_options)
    policy = any_of(keep_last(1), keep_every(40), keep_best("loss", 1))
    with job.writer(keep_storage=policy) as writer:
        _save_all(writer)
        wait_until(lambda: _stored(storage) == _steps(0, 30, 40, 50), "retention")
        wait_until(lambda: State.DELETED in {one.state for one in writer.status()}, "the history")
    assert not storage.unfinished("")
    deleted = {one.name for one in job.writer().status() if one.state is State.DELETED}
    assert deleted <= _steps(10, 20)
    assert load_anew(job, "step-30").number == 3
    assert not is_being_read(storage, "step-30")


def _save_by_a_clock(url: str, memory: str, ahead: float, numbers: list[int]) -> None:
    """Save as a node whose clock is `ahead`, each checkpoint at the hour of its number."""
    clock = time.time
    policy = any_of(keep_for("20h"), keep_every("300d"))
    with Job(url, memory).writer(keep_storage=policy) as writer:
        for number in numbers:
            time.time = lambda: clock() + ahead + number * 3600.0  # noqa: B023
            _save(writer, number)
            writer.wait(timeout=60)


def test_storage_keeps_what_is_young_and_one_of_each_period(
    memory_root: Path, tmp_path: Path
) -> None:
    url = str(tmp_path / "storage")
    base = 25_000 * 86400 - time.time()  # nothing here begins anew for 300 days
    forked(_save_by_a_clock, url, str(memory_root / "a"), base, [0, 1, 2, 20, 21])

    def stored() -> set[str]:
        return _stored(PosixStorage(url))

    wait_until(lambda: stored() == _steps(0, 20, 200, 210), "retention")
    # Another node goes on, with a clock that is months behind: its own hours count.
    forked(_save_by_a_clock, url, str(memory_root / "b"), base - 5e6, [22, 23, 24])
    wait_until(lambda: stored() == _steps(0, 200, 210, 220, 230, 240), "retention")
    forked(_save_by_a_clock, url, str(memory_root / "b"), base - 5e6, [43])
    wait_until(lambda: stored() == _steps(0, 220, 240, 430), "retention")


def test_what_storage_has_deleted_is_not_called_durable_when_it_leaves_memory(job: Job) -> None:
    def state_of(name: str) -> State:
        return next(one.state for one in writer.status() if one.name == name)

    with job.writer(keep_storage=1, keep_memory=2, agent="thread") as writer:
        _save_all(writer, LOSSES[:2])
        wait_until(lambda: _stored(PosixStorage(job.url or "")) == _steps(10), "retention")
        _save(writer, 2)
        writer.wait(timeout=60)
        wait_until(lambda: state_of("step-0") is State.DELETED, "the history")


def test_others_checkpoints_and_files_are_left_alone(job: Job) -> None:
    url = Path(str(job.url))
    dcp.save(make_state(1), checkpoint_id=url / "by-torch")
    (url / "notes").mkdir()
    (url / "notes" / "read.me").write_text("mine")
    with job.writer(keep_storage=1) as writer:
        _save_all(writer)
        wait_until(
            lambda: _stored(PosixStorage(str(url))) == {"by-torch", "notes", "step-50"}, "retention"
        )
    assert (url / "notes" / "read.me").read_text() == "mine"
    dcp.load(make_state(0), checkpoint_id=url / "by-torch")


def test_what_was_moved_or_copied_stays_and_is_loaded_by_its_new_name(job: Job) -> None:
    url = Path(str(job.url))
    with job.writer(keep_storage=2, keep_memory=1) as writer:
        _save_all(writer, LOSSES[:3])
        (url / "step-10").rename(url / "moved")
        shutil.copytree(url / "step-20", url / "copied")
        _save_all(writer)
        wait_until(lambda: "step-30" not in _stored(PosixStorage(str(url))), "retention")
    assert _stored(PosixStorage(str(url))) == {"moved", "copied", *_steps(40, 50)}
    assert load_anew(job, "moved").number == 1
    assert load_anew(job, "copied").number == 2


def test_without_a_policy_everything_stays(job: Job) -> None:
    with job.writer() as writer:
        _save_all(writer)
    assert _stored(PosixStorage(str(job.url))) == _steps(0, 10, 20, 30, 40, 50)


def test_a_failed_retention_is_made_up_for_after_the_next_commit(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot_tell(storage: Storage, name: str) -> bool:
        raise StorageUnavailable(storage.url, "nobody can tell who reads")

    with job.writer(keep_storage=1, agent="thread") as writer:
        _save(writer, 0)
        writer.wait(timeout=60)
        monkeypatch.setattr(dcp_mem.flushing.retention, "is_being_read", cannot_tell)
        _save(writer, 1)
        writer.wait(timeout=60)
        time.sleep(0.5)
        assert "step-0" in _stored(PosixStorage(str(job.url)))
        monkeypatch.undo()
        _save(writer, 2)
        wait_until(lambda: _stored(PosixStorage(str(job.url))) == _steps(20), "retention")


# -- what must not go ------------------------------------------------------------------------------


@dataclass
class _Meddling:
    """A storage on which something happens just before a key is deleted or removed."""

    storage: Storage
    suffix: str
    act: Callable[[], Any]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.storage, name)

    def delete(self, key: str) -> None:
        if key.endswith(self.suffix):
            self.act()
        self.storage.delete(key)

    def remove(self, key: str, old: bytes) -> bool:
        if key.endswith(self.suffix):
            self.act()
        return self.storage.remove(key, old)


@pytest.fixture
def storage(job: Job) -> Storage:
    """Three checkpoints, nobody at work any more."""
    with job.writer() as writer:
        _save_all(writer, (0.3, 0.2, 0.1))
    return PosixStorage(str(job.url))


def _newest(storage: Storage) -> Manifest:
    [entry] = [one for one in storage.ls("step-20/.dcp_mem") if one.name.startswith("manifest-")]
    return Manifest.from_json(storage.get(f"step-20/.dcp_mem/{entry.name}"))


def _apply(storage: Any, policy: Retention, retainer: Retainer | None = None) -> list[str]:
    return (retainer or Retainer()).apply(storage, policy, _newest(storage))


def test_what_is_being_read_stays_until_it_is_read(job: Job, storage: Storage) -> None:
    lease = read_lease(storage, "step-0")
    assert lease is not None
    retainer = Retainer()
    assert _apply(storage, keep_last(1), retainer) == ["step-10"]
    assert load_anew(job, "step-0").number == 0
    lease.close()
    assert _apply(storage, keep_last(1), retainer) == ["step-0"]
    assert _stored(storage) == _steps(20)


def test_what_was_rejected_since_the_last_look_does_not_count(storage: Storage) -> None:
    retainer = Retainer()
    assert _apply(storage, keep_last(3), retainer) == []  # it knows all three
    (stored,) = committed_under(storage, "step-10")
    assert stored.manifest is not None
    mark_rejected(storage, stored.manifest, "the loss is NaN")
    assert _apply(storage, keep_last(2), retainer) == []
    remove_rejection(storage, stored.manifest)
    assert _apply(storage, keep_last(2), retainer) == ["step-0"]


def test_a_reader_who_comes_in_the_middle_of_it_has_it_back(job: Job, storage: Storage) -> None:
    meddling = _Meddling(storage, "step-0/.metadata", lambda: read_lease(storage, "step-0"))
    assert _apply(meddling, keep_last(1)) == ["step-10"]
    assert load_anew(job, "step-0").number == 0


def test_a_reader_who_was_killed_long_ago_reads_no_more(storage: Storage) -> None:
    assert read_lease(storage, "step-0") is not None
    [left] = Path(storage.url, ".dcp_mem").glob("reader-*")
    os.utime(left, (time.time() - 90_000,) * 2)
    assert _apply(storage, keep_last(1)) == ["step-0", "step-10"]
    assert not left.exists()


def test_what_has_been_saved_anew_under_the_name_stays(job: Job, storage: Storage) -> None:
    retainer = Retainer()
    assert _apply(storage, keep_last(9), retainer) == []
    with job.writer() as writer:
        _save(writer, 0, 0.05)
    assert _apply(storage, keep_last(1), retainer) == ["step-10"]
    assert load_anew(job, "step-0").number == 0


def test_what_another_process_has_saved_anew_goes_in_its_turn(job: Job, storage: Storage) -> None:
    retainer = Retainer()
    assert _apply(storage, keep_last(9), retainer) == []
    with job.writer() as writer:
        _save(writer, 0, 0.05)
        _save(writer, 2, 0.04)
    assert _apply(storage, keep_last(1), retainer) == ["step-10", "step-0"]


def test_what_another_attempt_is_putting_meanwhile_stays(storage: Storage) -> None:
    theirs = ["step-0/__0_0-99999999.distcp", "step-0/.dcp_mem/node-99999999-other.json"]
    for key in theirs:
        storage.put(key, b"data")
    assert _apply(storage, keep_last(1)) == ["step-0", "step-10"]
    assert all(storage.get(key) == b"data" for key in theirs)
    assert not [entry for entry in storage.ls("step-0") if entry.name == ".metadata"]


def test_a_torn_checkpoint_counts_for_nothing(storage: Storage) -> None:
    [segment] = [entry.name for entry in storage.ls("step-20") if entry.name.endswith(".distcp")]
    Path(storage.url, "step-20", segment).unlink()
    [entry] = [one for one in storage.ls("step-10/.dcp_mem") if one.name.startswith("manifest-")]
    with_older = Manifest.from_json(storage.get(f"step-10/.dcp_mem/{entry.name}"))
    assert Retainer().apply(storage, keep_last(1), with_older) == ["step-0"]
    assert _stored(storage) == _steps(10, 20)


def test_a_load_from_storage_says_that_it_reads(
    job: Job, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    original = PosixStorage.read_into

    def read_into(self: PosixStorage, key: str, offset: int, buffers: Sequence[memoryview]) -> int:
        if key.endswith(".distcp"):
            seen.append(is_being_read(self, "step-0"))
        return original(self, key, offset, buffers)

    monkeypatch.setattr(PosixStorage, "read_into", read_into)
    dcp_mem.load(make_state(9), checkpoint_id="step-0", storage_reader=job.reader())
    assert seen
    assert all(seen)
    assert not is_being_read(storage, "step-0")


@pytest.mark.parametrize("error", [OSError("no device"), StorageUnavailable("s3://b", "down")])
def test_a_load_that_fails_reads_no_more(
    job: Job, storage: Storage, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    seen = []

    def fail(*_: object) -> None:
        seen.append(is_being_read(storage, "step-0"))
        raise error

    monkeypatch.setattr(opening, "_locate_stored", fail)
    with pytest.raises(CheckpointException, match=str(error)):
        load_anew(job, "step-0")
    assert seen == [True]
    assert not is_being_read(storage, "step-0")


def test_nobody_deletes_what_somebody_reads_unless_forced_to(job: Job, storage: Storage) -> None:
    lease = read_lease(storage, "step-0")
    with pytest.raises(CheckpointInUse, match=r"step-0.*force=True"):
        dcp_mem.delete(storage.url, "step-0")
    command = ["rm", storage.url, "step-0", "--yes", "--memory-root", job.memory, "--job", "job"]
    refused = CliRunner().invoke(main, command)
    assert refused.exit_code == 1
    assert "step-0 stays" in refused.output
    assert lease is not None
    assert load_anew(job, "step-0").number == 0
    assert CliRunner().invoke(main, [*command, "--force"]).exit_code == 0
    assert _stored(storage) == _steps(10, 20)


def test_where_a_reader_may_not_write_it_reads_all_the_same(job: Job, storage: Storage) -> None:
    shutil.rmtree(Path(storage.url, ".dcp_mem"))
    Path(storage.url, ".dcp_mem").write_text("in the way")
    assert load_anew(job, "step-0").number == 0
