"""Memory of jobs that have ended is found and freed; after close only kept checkpoints stay."""

import fcntl
import os
import re
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist

from dcp_mem import MemoryRootRefused, Reclaimed, reclaim
from dcp_mem.format import names
from dcp_mem.memory import checksumming
from dcp_mem.memory.job import JobMemory
from tests.support.checkpoints.held import names_in
from tests.support.checkpoints.jobs import Job, load_anew, occupied, save, wait_until
from tests.support.processes.forks import forked, forked_ranks, forking, raised_by


def _save_and_end(job: Job, persist: bool) -> None:
    """Save twice and leave without closing."""
    writer = job.writer(persist=persist, agent="thread")
    for number in (1, 2):
        save(writer, number)
    if persist:
        writer.wait(timeout=30)


def _reclaim(memory: str, force: bool) -> list[Reclaimed]:
    return reclaim(memory, force=force)


def test_dead_job_is_found_and_given_back(memory_job: Job) -> None:
    forked(_save_and_end, memory_job, False)
    nbytes = occupied(memory_job.directory)
    assert reclaim(memory_job.memory, dry_run=True) == [Reclaimed("job", nbytes)]
    assert memory_job.directory.is_dir()
    assert reclaim(memory_job.memory) == [Reclaimed("job", nbytes)]
    assert not memory_job.directory.exists()
    assert reclaim(memory_job.memory) == []


def test_who_looks_at_memory_that_was_reclaimed_finds_nothing(memory_job: Job) -> None:
    """A follower, or `dcp-mem watch`, may look at that moment."""
    forked(_save_and_end, memory_job, False)
    memory = JobMemory(memory_job.memory, memory_job.name or "")
    assert len(memory.checkpoints()) == 2
    reclaim(memory_job.memory)
    assert memory.checkpoints() == []
    assert memory.manifests() == []
    assert memory.damaged_manifests(names.COLLECTIVE) == {}


def test_live_job_is_left_alone_even_when_it_is_forced(memory_job: Job) -> None:
    with memory_job.writer() as writer:
        save(writer, 1)
        assert reclaim(memory_job.memory, force=True) == []  # this very process holds it
        assert forked(_reclaim, memory_job.memory, True) == []
        assert load_anew(memory_job).number == 1


def test_what_never_reached_storage_is_only_given_up_by_force(
    memory_root: Path, tmp_path: Path
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no directory")
    job = Job(str(blocked / "run"), str(memory_root))
    forked(_save_without_waiting, job)
    (left,) = reclaim(job.memory)
    assert (
        "step-2 never reached storage" in left.kept
        or "step-2, step-1 never reached storage" in left.kept
    )
    assert job.directory.is_dir()
    (gone,) = reclaim(job.memory, force=True)
    assert gone.kept == ""
    assert not job.directory.exists()


def _save_without_waiting(job: Job) -> None:
    writer = job.writer()
    for number in (1, 2):
        save(writer, number)


def test_only_the_named_job_of_enough_age_is_reclaimed(memory_root: Path) -> None:
    one, two = (Job(None, str(memory_root), name=name) for name in ("one", "two"))
    for job in (one, two):
        forked(_save_and_end, job, False)
    assert reclaim(memory_root, older_than=3600) == []
    assert [found.job for found in reclaim(memory_root, job="two")] == ["two"]
    assert one.directory.is_dir()


def test_checkpoint_that_is_being_read_keeps_its_job(memory_job: Job) -> None:
    forked(_save_and_end, memory_job, False)
    reader = memory_job.reader()
    reader.read_metadata()
    (left,) = reclaim(memory_job.memory, force=True)
    assert "being read" in left.kept
    reader.close()
    assert reclaim(memory_job.memory)[0].kept == ""


# -- what a close leaves, by name ------------------------------------------------------------------


def _live(job: Job, persist: bool, keep: int) -> None:
    with (
        # On a busy machine checksums take long, and rest for 20 times as long after each.
        patch.object(checksumming, "_REST", 0),
        job.writer(persist=persist, keep_memory=keep) as writer,
    ):
        for number in range(1, 5):
            save(writer, number)
            if not persist:
                _wait_for_checksums(job.directory / f"step-{number}" / ".dcp_mem")


def _wait_for_checksums(own: Path) -> None:
    """A checkpoint whose checksums are being made would be kept in place of another."""
    made = f"checksums-__{dist.get_rank() if dist.is_initialized() else 0}_0-*"
    wait_until(lambda: list(own.glob(made)), "checksums")


def _left(job: Job) -> list[str]:
    """Everything in the job's directory, with ids taken out of the names.

    Checksums are left out: they are made behind training, and a close doesn't wait for an agent's.
    """
    found = (
        str(path.relative_to(job.directory))
        for path in job.directory.rglob("*")
        if not path.name.startswith("checksums-")
    )
    return sorted(re.sub(r"[0-9a-f]{8,}", "#", name) for name in found)


_OF_THE_JOB = [".catalogs", ".lock", ".owner.json", ".slots", "checkpointHistories.csv"]


def _of_a_checkpoint(number: int, ranks: int, flushed: bool) -> list[str]:
    own = [
        "manifest.json",
        "metadata-#-#",
        "catalog-#",
        *(["flush.json", "flushing-#"] if flushed else []),
    ]
    files = [".metadata", ".dcp_mem", *(f".dcp_mem/{name}" for name in own)]
    return [
        f"step-{number}",
        *(f"step-{number}/{file}" for file in files + [f"__{r}_0-#.distcp" for r in range(ranks)]),
    ]


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("flushed", [False, True], ids=["memory only", "flushed"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_close_leaves_the_kept_checkpoints_and_not_a_file_more(
    memory_root: Path, tmp_path: Path, ranks: int, flushed: bool, keep: int
) -> None:
    job = Job(str(tmp_path / "run") if flushed else None, str(memory_root))
    forked_ranks(_live, ranks, job, flushed, keep)
    kept = [
        name
        for number in range(4, 4 - keep, -1)
        for name in _of_a_checkpoint(number, ranks, flushed)
    ]
    of_the_job = [*_OF_THE_JOB, *([".generations.json"] if flushed else [])]
    assert _left(job) == sorted(of_the_job + kept)


def _save_three(job: Job) -> None:
    writer = job.writer(keep_memory=3, persist=False)
    for number in (1, 2, 3):
        save(writer, number)


def _save_one_more(job: Job, number: int) -> None:
    save(job.writer(keep_memory=2, persist=False), number)


@pytest.mark.parametrize("held", ["read", "taken out"])
def test_a_checkpoint_that_another_rank_takes_out_of_memory_costs_no_newer_one(
    memory_job: Job, held: str
) -> None:
    """One that is read counts as one of those that are kept."""
    forked(_save_three, memory_job)
    oldest = memory_job.directory / "step-1" / ".dcp_mem" / "manifest.json"
    descriptor = os.open(oldest, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH if held == "read" else fcntl.LOCK_EX)
    forked(_save_one_more, memory_job, 4)
    os.close(descriptor)
    left = ["step-4", "step-1"] if held == "read" else ["step-4", "step-3", "step-1"]
    assert names_in(memory_job.directory) == left
    forked(_save_one_more, memory_job, 5)
    assert names_in(memory_job.directory) == ["step-5", "step-4"]


@dataclass(frozen=True)
class _FailingScript:
    job: Job

    def __call__(self) -> None:
        with self.job.writer() as writer:
            save(writer, 1)
            raise LookupError("the training script fails")


def test_close_after_an_error_keeps_the_checkpoint_and_lets_the_agent_go_on(
    memory_root: Path, tmp_path: Path
) -> None:
    job = Job(str(tmp_path / "run"), str(memory_root))
    assert isinstance(forked(raised_by, _FailingScript(job)), LookupError)
    assert forked(load_anew, job).number == 1
    wait_until((tmp_path / "run" / "step-1" / ".metadata").exists, "the agent flushes by itself")


# -- reclaiming ------------------------------------------------------------------------------------


def _save_and_stay(job: Job, marks: Path) -> None:
    writer = job.writer(persist=False)
    for number in (1, 2, 3):
        save(writer, number)
    (marks / f"rank {dist.get_rank() if dist.is_initialized() else 0}").touch()
    wait_until(lambda: False)


def test_memory_of_a_killed_job_is_found_and_all_of_it_freed(
    memory_root: Path, tmp_path: Path
) -> None:
    job = Job(None, str(memory_root))
    before = occupied(memory_root)
    with forking(_save_and_stay, 2, job, tmp_path) as ranks:
        wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
        assert reclaim(memory_root) == []
        ranks.kill(0)
        assert reclaim(memory_root) == [], "one rank lives"
        ranks.kill(1)
    (found,) = reclaim(memory_root)
    assert (found.job, found.kept) == ("job", "")
    assert found.nbytes > 2 << 20
    assert occupied(memory_root) <= before + 4096  # what names the node


def test_files_of_others_in_the_memory_root_are_left_alone(memory_root: Path) -> None:
    for directory in (memory_root / "photos", memory_root / "photos" / "2026"):
        directory.mkdir(mode=0o700)
    (memory_root / "photos" / "2026" / "sea.jpg").touch(mode=0o600)
    forked(_save_and_end, Job(None, str(memory_root)), False)
    assert [found.job for found in reclaim(memory_root, force=True)] == ["job"]
    assert (memory_root / "photos" / "2026" / "sea.jpg").exists()


def test_job_that_somebody_takes_up_at_that_moment_is_left_to_him(
    memory_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(None, str(memory_root))
    with forking(_save_and_stay, None, job, tmp_path):
        wait_until(lambda: list(tmp_path.iterdir()))
        monkeypatch.setattr("dcp_mem.operations.housekeeping.job_is_live", lambda _: False)
        (found,) = reclaim(memory_root)
        assert "is in use by process" in found.kept
        assert load_anew(job).number == 3


def test_a_look_changes_nothing(memory_root: Path) -> None:
    job = Job(None, str(memory_root))
    forked(_save_and_end, job, False)
    before = {path: path.stat().st_mtime_ns for path in memory_root.rglob("*")}
    assert [found.job for found in reclaim(memory_root, dry_run=True)] == ["job"]
    assert {path: path.stat().st_mtime_ns for path in memory_root.rglob("*")} == before


def test_where_nothing_is_nothing_is_found(memory_root: Path) -> None:
    assert reclaim(memory_root / "absent") == []
    assert not (memory_root / "absent").exists()


def test_unsafe_memory_root_is_not_cleaned(memory_root: Path) -> None:
    (memory_root / "open").mkdir()
    (memory_root / "open").chmod(0o777)
    with pytest.raises(MemoryRootRefused):
        reclaim(memory_root / "open", force=True)
    (memory_root / "open").rmdir()


def test_what_a_flush_notes_of_a_checkpoint_that_leaves_meanwhile_keeps_no_directory(
    memory_root: Path, tmp_path: Path
) -> None:
    forked(_save_and_end, Job(str(tmp_path / "storage"), str(memory_root)), False)
    memory = JobMemory(str(memory_root), "job")
    held = memory.checkpoints()[0]
    os.unlink(held.manifest_path)
    for segment in held.manifest.segments:
        os.unlink(held.segment_path(segment.file))
    memory.record_flush(held, held.flush)
    assert not os.path.exists(held.directory)


def test_promotion_never_brings_back_what_was_replaced_or_evicted_meanwhile(job: Job) -> None:
    memory = JobMemory(job.memory, job.name or "")
    with job.writer(persist=False, keep_memory=3) as writer:
        save(writer, 1, "best")
        save(writer, 1, "gone")
        gone, best = memory.checkpoints()
        save(writer, 2, "best")
        assert memory.evict(gone)
        assert not memory.promote(best)
        assert not memory.promote(gone)
        assert load_anew(job, "best").number == 2
        present = [one for one in writer.status() if one.in_memory]
        assert [(one.name, one.persist) for one in present] == [("best", False)]
    assert not list(job.directory.rglob("*.tmp"))
