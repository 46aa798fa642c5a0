"""What there is of a job, in memory and on storage, told without loading any of it."""

import inspect
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.support.checkpoints.jobs import (
    Job,
    make_state,
    save,
    save_in_two_places,
    save_one,
)
from tests.support.command import command
from tests.support.processes.forks import forked_ranks
from tests.support.shell import Shell
from tests.support.storage.servers import StorageRoot


def _jobs(memory_root: Path, code: int = 0) -> list[dict[str, Any]]:
    result = command("ls", "--memory-root", str(memory_root), "--json")
    assert result.exit_code == code, result.output
    found: list[dict[str, Any]] = json.loads(result.stdout)["jobs"]
    return found


def _described(job: Job) -> list[tuple[str, str, list[str]]]:
    return [(one["name"], one["state"], one["places"]) for one in Shell(job).listed()]


def test_checkpoints_of_both_places_are_one_list_newest_first(
    memory_root: Path, storage_root: StorageRoot
) -> None:
    job = Job(storage_root.url, str(memory_root), storage_root.storage_options)
    save_in_two_places(job)
    answer = Shell(job).json("ls")
    assert (answer["job"], answer["root"]) == (job.name, job.url)
    found = answer["checkpoints"]
    assert [one["persist"] for one in found] == [False, True, True]
    assert _described(job) == [
        ("step-3", "complete", ["memory"]),
        ("step-2", "durable", ["memory", "storage"]),
        ("step-1", "durable", ["storage"]),
    ]
    assert [(one["step"], one["metrics"]) for one in found[1:]] == [
        (2, {"loss": 0.5}),
        (1, {"loss": 1.0}),
    ]
    assert all(one["world_size"] == 1 and one["bytes"] > 2000 for one in found)
    assert not any(one["problem"] for one in found)
    shutil.rmtree(job.directory)
    assert _described(job) == [
        ("step-2", "durable", ["storage"]),
        ("step-1", "durable", ["storage"]),
    ]


def test_a_look_makes_nothing(memory_root: Path, tmp_path: Path) -> None:
    assert Shell(Job(str(tmp_path / "none"), str(memory_root / "absent"))).listed(code=1) == []
    assert _jobs(memory_root / "absent", code=1) == []
    assert list(memory_root.iterdir()) == []
    assert not (tmp_path / "none").exists()


def test_ranks_are_counted_and_a_short_or_missing_segment_is_told(job: Job) -> None:
    forked_ranks(save_one, 2, job)
    shutil.rmtree(job.directory)
    (one,) = Shell(job).listed()
    assert (one["world_size"], one["problem"]) == (2, "")
    (segment,) = Path(job.url or "", "step-1").glob("__1_0-*.distcp")
    segment.write_bytes(segment.read_bytes()[:-1])
    assert "segment of rank 1: " in Shell(job).listed(code=1)[0]["problem"]
    segment.unlink()
    assert Shell(job).listed(code=1)[0]["problem"] == "segment of rank 1: missing"


def test_what_storage_has_lost_is_not_taken_for_durable(job: Job) -> None:
    save_in_two_places(job)
    shutil.rmtree(Path(job.url or "", "step-2"))
    (gone,) = (one for one in Shell(job).listed() if one["name"] == "step-2")
    assert (gone["state"], gone["places"]) == ("complete", ["memory"])
    assert (gone["problem"], gone["error"]) == ("", "storage has it no more")


def test_damaged_manifest_is_a_problem_and_no_foreign_checkpoint(job: Job) -> None:
    save_in_two_places(job)
    shutil.rmtree(job.directory)
    own = Path(job.url or "", "step-2", ".dcp_mem")
    (manifest,) = own.glob("manifest-*.json")
    whole = manifest.read_bytes()
    manifest.write_bytes(whole[:-10] + b"0123456789")
    (damaged,) = (one for one in Shell(job).listed(code=1) if one["name"] == "step-2")
    assert "damaged" in damaged["problem"]
    assert not damaged["is_foreign"]
    manifest.unlink()
    (lacking,) = (one for one in Shell(job).listed(code=1) if one["name"] == "step-2")
    assert "its manifest is missing" in lacking["problem"]


def test_torchs_own_checkpoint_is_listed_as_such(job: Job) -> None:
    dcp.save(make_state(1), checkpoint_id=str(Path(job.url or "", "theirs")))
    (one,) = Shell(job).listed()
    assert (one["name"], one["state"], one["save_id"]) == ("theirs", "durable", "")
    assert (one["is_foreign"], one["problem"]) == (True, "")
    assert one["bytes"] > 2000


def test_attempt_without_commit_is_no_checkpoint_beside_the_older_one_of_its_name(job: Job) -> None:
    with job.writer(agent="thread") as writer:
        save(writer, 1, "best")
        writer.wait("best", timeout=60)
    (first,) = Shell(job).listed()
    stored = Path(job.url or "", "best")
    metadata = (stored / ".metadata").read_bytes()
    segments = {path.name: path.read_bytes() for path in stored.glob("*.distcp")}
    described = {path.name: path.read_bytes() for path in (stored / ".dcp_mem").iterdir()}
    with job.writer(agent="thread") as writer:
        save(writer, 2, "best")
        writer.wait("best", timeout=60)
    for name, data in segments.items():
        (stored / name).write_bytes(data)
    for name, data in described.items():
        (stored / ".dcp_mem" / name).write_bytes(data)
    (stored / ".metadata").write_bytes(metadata)  # as before the second commit
    shutil.rmtree(job.directory)
    (found,) = Shell(job).listed()
    assert found["save_id"] == first["save_id"]


def test_jobs_of_a_memory_root_say_who_lives(memory_root: Path) -> None:
    dead, live = Job(None, str(memory_root), name="dead"), Job(None, str(memory_root), name="live")
    with dead.writer() as writer:
        save(writer, 1)
    with live.writer() as writer:
        save(writer, 1)
        found = _jobs(memory_root)
    assert [(one["name"], one["is_live"]) for one in found] == [("live", True), ("dead", False)]
    assert [[held["name"] for held in one["checkpoints"]] for one in found] == [["step-1"]] * 2
    assert all(one["bytes"] > 2000 and one["last_use"] > 1e9 for one in found)


def test_a_file_that_vanishes_meanwhile_makes_no_job_look_unused(memory_root: Path) -> None:
    job, is_over = Job(None, str(memory_root)), threading.Event()
    with job.writer() as writer:
        save(writer, 1)
    passing = [job.directory / f"{number}.tmp" for number in range(400)]

    def make_and_remove() -> None:
        while not is_over.is_set():
            for path in passing:
                path.touch()
            for path in passing:
                path.unlink()

    thread = threading.Thread(target=make_and_remove)
    thread.start()
    try:
        found = [one["last_use"] for _ in range(20) for one in _jobs(memory_root)]
    finally:
        is_over.set()
        thread.join()
    assert len(found) == 20
    assert min(found) > 1e9


def test_promoted_checkpoints_are_meant_for_storage(job: Job) -> None:
    with job.writer(persist=False, keep_memory=3) as writer:
        for number in (1, 2, 3):
            save(writer, number)
        assert Shell(job).json("flush", "--all", "--newest", "2")["promoted"] == [
            "step-3",
            "step-2",
        ]
        assert [one["persist"] for one in Shell(job).listed()] == [True, True, False]
        assert Shell(job).json("flush", "--all")["promoted"] == ["step-1"]
        assert Shell(job).json("flush", "--all")["promoted"] == []
    assert not list(job.directory.rglob("*.tmp"))


@pytest.mark.skipif(
    "use_collectives" not in inspect.signature(dcp.save).parameters,
    reason="no use_collectives here",
)
def test_ranks_that_saved_alone_have_a_line_each(job: Job) -> None:
    forked_ranks(_save_alone, 2, job)
    assert _described(job) == [("step-1", "durable", ["memory", "storage"])] * 2
    found = Shell(job).listed()
    assert sorted((one["scope"], one["problem"]) for one in found) == [("r0", ""), ("r1", "")]


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
