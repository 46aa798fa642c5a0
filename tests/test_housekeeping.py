"""Memory of jobs that are gone is found and given back; nothing stays after close that policy doesn't keep."""

import os
from pathlib import Path

import pytest

from dcp_mem import JobInUse, Reclaimed, reclaim
from dcp_mem.files import allocated_bytes
from dcp_mem.memory.job import JobMemory
from tests.forks import forked
from tests.jobs import Job, load_anew, save


def _save_and_end(job: Job, persist: bool) -> None:
    """Save twice and leave without closing."""
    writer = job.writer(persist=persist, agent="thread")
    for number in (1, 2):
        save(writer, number)
    if persist:
        writer.wait(timeout=30)


def _reclaim(memory: str, force: bool) -> list[Reclaimed]:
    return reclaim(memory, force=force)


@pytest.fixture
def job(memory_root: Path) -> Job:
    return Job(None, str(memory_root))


def test_dead_job_is_found_and_given_back(job: Job) -> None:
    forked(_save_and_end, job, False)
    occupied = allocated_bytes(str(job.directory))
    assert reclaim(job.memory, dry_run=True) == [Reclaimed("job", occupied)]
    assert job.directory.is_dir()
    assert reclaim(job.memory) == [Reclaimed("job", occupied)]
    assert not job.directory.exists()
    assert reclaim(job.memory) == []


def test_live_job_is_left_alone_even_when_it_is_forced(job: Job) -> None:
    with job.writer() as writer:
        save(writer, 1)
        assert reclaim(job.memory, force=True) == []  # this very process holds it
        assert forked(_reclaim, job.memory, True) == []
        assert load_anew(job).number == 1


def test_what_never_reached_storage_is_only_given_up_by_force(memory_root: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no directory")
    job = Job(str(blocked / "run"), str(memory_root))
    forked(_save_without_waiting, job)
    (left,) = reclaim(job.memory)
    assert "step-2 never reached storage" in left.kept or "step-2, step-1 never reached storage" in left.kept
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


def test_directories_that_are_no_jobs_are_never_touched(memory_root: Path) -> None:
    (memory_root / "photos").mkdir(mode=0o700)
    assert reclaim(memory_root, force=True) == []
    assert (memory_root / "photos").is_dir()


def test_checkpoint_that_is_being_read_keeps_its_job(job: Job) -> None:
    forked(_save_and_end, job, False)
    reader = job.reader()
    reader.read_metadata()
    (left,) = reclaim(job.memory, force=True)
    assert "being read" in left.kept
    reader.close()
    assert reclaim(job.memory)[0].kept == ""


def test_close_leaves_what_is_kept_and_nothing_else(memory_root: Path, tmp_path: Path) -> None:
    job = Job(str(tmp_path / "run"), str(memory_root))
    with job.writer(keep=2, agent="thread") as writer:
        for number in range(1, 6):
            save(writer, number)
    memory = JobMemory(job.memory, "job")
    assert [held.name for held in memory.held()] == ["step-5", "step-4"]
    assert os.listdir(memory.slots) == []
    segments = sum(
        os.stat(held.segment_path(s.file)).st_blocks * 512 for held in memory.held() for s in held.manifest.segments
    )
    assert allocated_bytes(memory.directory) < segments + (256 << 10)


def _save_here(job: Job) -> str:
    try:
        save(job.writer(), 9)
    except BaseException as error:
        failures = getattr(error, "failures", {})
        return " ".join(f"{type(one[0]).__name__}: {one[0]}" for one in failures.values())
    return ""


def test_job_of_a_live_other_run_is_refused_with_what_to_do(job: Job) -> None:
    with job.writer() as writer:
        save(writer, 1)
        refused = forked(_save_here, job)
        assert refused.startswith(JobInUse.__name__)
        assert "End that run, or give this one another job=" in refused
    assert forked(_save_here, job) == ""
