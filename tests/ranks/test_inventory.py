"""What there is of a job, in memory and on storage, told without loading any of it."""

import inspect
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from dcp_mem import CheckpointStatus, State, StorageUnavailable
from dcp_mem.common.values import MEMORY, STORAGE
from dcp_mem.config import Settings
from dcp_mem.format import names
from dcp_mem.memory.job import JobMemory
from dcp_mem.operations.flush import promote
from dcp_mem.operations.inventory import list_checkpoints, list_jobs
from dcp_mem.options import settings
from dcp_mem.storage.retry import RetryPolicy
from tests.support.checkpoints.jobs import (
    Job,
    load_anew,
    make_state,
    save,
    save_in_two_places,
    save_one,
)
from tests.support.processes.forks import forked_ranks
from tests.support.storage.servers import StorageRoot

_IMPATIENT = RetryPolicy(tries=1, deadline_seconds=5.0)


def _of(job: Job) -> Settings:
    return settings(
        job.url, memory_root=job.memory, job=job.name, storage_options=job.storage_options
    )


def _described(found: list[CheckpointStatus]) -> list[tuple[str, State, tuple[str, ...]]]:
    return [(one.name, one.state, one.places) for one in found]


def test_checkpoints_of_both_places_are_one_list_newest_first(
    memory_root: Path, storage_root: StorageRoot
) -> None:
    job = Job(storage_root.url, str(memory_root), storage_root.storage_options)
    save_in_two_places(job)
    found = list_checkpoints(_of(job))
    assert _described(found) == [
        ("step-3", State.COMPLETE, (MEMORY,)),
        ("step-2", State.DURABLE, (MEMORY, STORAGE)),
        ("step-1", State.DURABLE, (STORAGE,)),
    ]
    assert [(one.step, dict(one.metrics)) for one in found[1:]] == [
        (2, {"loss": 0.5}),
        (1, {"loss": 1.0}),
    ]
    assert all(one.world_size == 1 and one.nbytes > 2000 and not one.problem for one in found)
    shutil.rmtree(job.directory)
    assert _described(list_checkpoints(_of(job))) == [
        ("step-2", State.DURABLE, (STORAGE,)),
        ("step-1", State.DURABLE, (STORAGE,)),
    ]


def test_job_without_url_is_listed_from_memory_alone(memory_root: Path) -> None:
    job = Job(None, str(memory_root))
    with job.writer() as writer:
        save(writer, 1)
        assert _described(list_checkpoints(_of(job))) == [("step-1", State.COMPLETE, (MEMORY,))]


def test_a_look_makes_nothing(memory_root: Path, tmp_path: Path) -> None:
    assert list_checkpoints(_of(Job(str(tmp_path / "none"), str(memory_root / "absent")))) == []
    assert list_jobs(str(memory_root / "absent")) == []
    assert list(memory_root.iterdir()) == []
    assert not (tmp_path / "none").exists()


def test_ranks_are_counted_and_a_short_or_missing_segment_is_told(job: Job) -> None:
    forked_ranks(save_one, 2, job)
    shutil.rmtree(job.directory)
    (one,) = list_checkpoints(_of(job))
    assert (one.world_size, one.problem) == (2, "")
    (segment,) = Path(job.url or "", "step-1").glob("__1_0-*.distcp")
    segment.write_bytes(segment.read_bytes()[:-1])
    assert "segment of rank 1: " in list_checkpoints(_of(job))[0].problem
    segment.unlink()
    (one,) = list_checkpoints(_of(job))
    assert (one.problem, one.is_durable) == ("segment of rank 1: missing", False)


def test_what_storage_has_lost_is_not_taken_for_durable(job: Job) -> None:
    save_in_two_places(job)
    shutil.rmtree(Path(job.url or "", "step-2"))
    (gone,) = [one for one in list_checkpoints(_of(job)) if one.name == "step-2"]
    assert (gone.state, gone.places, gone.problem, gone.error) == (
        State.COMPLETE,
        (MEMORY,),
        "",
        "storage has it no more",
    )


def test_damaged_manifest_is_a_problem_and_no_foreign_checkpoint(job: Job) -> None:
    save_in_two_places(job)
    shutil.rmtree(job.directory)
    own = Path(job.url or "", "step-2", names.OWN)
    (manifest,) = own.glob("manifest-*.json")
    whole = manifest.read_bytes()
    manifest.write_bytes(whole[:-10] + b"0123456789")
    (damaged,) = [one for one in list_checkpoints(_of(job)) if one.name == "step-2"]
    assert "damaged" in damaged.problem
    assert not damaged.is_foreign
    manifest.unlink()
    (lacking,) = [one for one in list_checkpoints(_of(job)) if one.name == "step-2"]
    assert "its manifest is missing" in lacking.problem


def test_torchs_own_checkpoint_is_listed_as_such(job: Job) -> None:
    dcp.save(make_state(1), checkpoint_id=str(Path(job.url or "", "theirs")))
    (one,) = list_checkpoints(_of(job))
    assert (one.name, one.state, one.save_id, one.is_foreign, one.problem) == (
        "theirs",
        State.DURABLE,
        "",
        True,
        "",
    )
    assert one.nbytes > 2000


def test_attempt_without_commit_is_no_checkpoint_beside_the_older_one_of_its_name(job: Job) -> None:
    with job.writer(agent="thread") as writer:
        save(writer, 1, "best")
        writer.wait("best", timeout=60)
    (first,) = list_checkpoints(_of(job))
    stored = Path(job.url or "", "best")
    metadata = (stored / ".metadata").read_bytes()
    segments = {path.name: path.read_bytes() for path in stored.glob("*.distcp")}
    described = {path.name: path.read_bytes() for path in (stored / names.OWN).iterdir()}
    with job.writer(agent="thread") as writer:
        save(writer, 2, "best")
        writer.wait("best", timeout=60)
    for name, data in segments.items():
        (stored / name).write_bytes(data)
    for name, data in described.items():
        (stored / names.OWN / name).write_bytes(data)
    (stored / ".metadata").write_bytes(metadata)  # as before the second commit
    shutil.rmtree(job.directory)
    (found,) = list_checkpoints(_of(job))
    assert found.save_id == first.save_id


def test_jobs_of_a_memory_root_say_who_lives(memory_root: Path) -> None:
    dead, live = Job(None, str(memory_root), name="dead"), Job(None, str(memory_root), name="live")
    with dead.writer() as writer:
        save(writer, 1)
    with live.writer() as writer:
        save(writer, 1)
        found = list_jobs(str(memory_root))
    assert [(one.name, one.is_live, [held.name for held in one.checkpoints]) for one in found] == [
        ("live", True, ["step-1"]),
        ("dead", False, ["step-1"]),
    ]
    assert all(one.nbytes > 2000 and one.last_use > 1e9 for one in found)


def test_storage_that_is_not_there_raises(memory_root: Path) -> None:
    options = {"endpoint_url": "http://127.0.0.1:9", "key": "a", "secret": "b"}
    with pytest.raises(StorageUnavailable):
        list_checkpoints(
            _of(Job("s3://bucket/run", str(memory_root), options)), retry_policy=_IMPATIENT
        )


def test_promoted_checkpoints_are_meant_for_storage(job: Job) -> None:
    with job.writer(persist=False, keep_memory=3) as writer:
        for number in (1, 2, 3):
            save(writer, number)
        assert promote(_of(job), newest=2) == ["step-3", "step-2"]
        assert [one.persist for one in list_checkpoints(_of(job))] == [True, True, False]
        assert promote(_of(job)) == ["step-1"]
        assert promote(_of(job)) == []
    assert not list(job.directory.rglob("*.tmp"))


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
        assert [(one.name, one.persist) for one in list_checkpoints(_of(job))] == [("best", False)]
    assert not list(job.directory.rglob("*.tmp"))


@pytest.mark.skipif(
    "use_collectives" not in inspect.signature(dcp.save).parameters,
    reason="no use_collectives here",
)
def test_ranks_that_saved_alone_have_a_line_each(job: Job) -> None:
    forked_ranks(_save_alone, 2, job)
    found = list_checkpoints(_of(job))
    assert sorted((one.name, one.scope, one.state, one.places, one.problem) for one in found) == [
        ("step-1", f"r{rank}", State.DURABLE, (MEMORY, STORAGE), "") for rank in range(2)
    ]


def _save_alone(job: Job) -> None:
    with job.writer(agent="thread") as writer:
        dcp.save(
            {"x": torch.ones(9)},
            checkpoint_id="step-1",
            storage_writer=writer,
            use_collectives=False,
        )
        dist.barrier()
        writer.wait("step-1", timeout=60)


def test_listing_needs_no_torch() -> None:
    check = (
        "import sys, dcp_mem.operations.inventory, dcp_mem.cli.ls;"
        " assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", check], check=True)
