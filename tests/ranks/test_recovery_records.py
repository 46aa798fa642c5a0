"""`recoveries.jsonl`: each load adds a record in memory and on storage, and never fails for it."""

import json
import logging
import os
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

import dcp_mem
from tests.support.checkpoints.damage import flip
from tests.support.checkpoints.jobs import Job, load_anew, save, save_in_two_places, wait_until
from tests.support.processes.forks import forked_ranks

_FILE = "recoveries.jsonl"
_MOST = 1000
_GOOD: dict[str, Any] = {
    "token": "0123456789ab",
    "time": "2026-11-28T10:00:00.000000+00:00",
    "name": "step-0",
    "save_id": "",
    "step": None,
    "seconds": 1.0,
    "sources": {"memory": 1},
    "passed_over": [],
    "world_size": 1,
}


def _lines_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _in_memory(job: Job) -> list[dict[str, Any]]:
    return _lines_in(job.directory / _FILE)


def _on_storage(job: Job) -> list[dict[str, Any]]:
    return _lines_in(Path(job.url or "", ".dcp_mem", _FILE))


# -- the file --------------------------------------------------------------------------------------


def test_damaged_lines_are_passed_over_and_the_others_are_kept(job: Job) -> None:
    save_in_two_places(job)
    good, bad = json.dumps(_GOOD).encode(), list[bytes]()
    bad += [b"[" * 100_000, b"[]", b'{"token": "a"}', b"\xff\x00", good[:-20]]
    bad += [json.dumps({**_GOOD, "token": ""}).encode(), good.replace(b"+00:00", b"")]
    bad += [good.replace(b'"memory": 1', b'"memory": -1')]
    for figure in (b"-1", b"1e999", b"NaN", b"[]"):
        bad.append(good.replace(b'"seconds": 1.0', b'"seconds": ' + figure))
    path = job.directory / _FILE
    path.touch(mode=0o600)
    path.write_bytes(b"\n".join([*bad, good]))  # its last line was cut off, or edited
    load_anew(job)
    earlier, record = _on_storage(job)
    assert earlier == _GOOD
    assert (record["name"], record["world_size"]) == ("step-3", 1)


def test_of_too_many_the_last_ones_stay_each_once(job: Job) -> None:
    save_in_two_places(job)
    path = job.directory / _FILE
    path.touch(mode=0o600)
    path.write_bytes(b"no record\n" * (_MOST - 1) + json.dumps(_GOOD).encode())
    for _ in range(3):
        load_anew(job)
    lines = path.read_bytes().splitlines()
    assert len(lines) == _MOST
    assert [json.loads(line)["name"] for line in lines[-4:]] == ["step-0"] + ["step-3"] * 3
    assert [one["name"] for one in _on_storage(job)] == ["step-0"] + ["step-3"] * 3


def test_no_checkpoint_takes_the_name_of_the_file(job: Job) -> None:
    state = {"w": torch.ones(1)}
    with job.writer() as writer, pytest.raises(CheckpointException, match="is no name"):
        dcp_mem.save(state, checkpoint_id=_FILE, storage_writer=writer)


# -- loads -----------------------------------------------------------------------------------------


def test_each_load_leaves_a_line_in_both_places(job: Job) -> None:
    save_in_two_places(job)
    newest = load_anew(job).report
    stored = load_anew(job, "step-1").report
    records = _on_storage(job)
    assert records == _in_memory(job)
    for record, report in zip(records, (newest, stored), strict=True):
        told = report.checkpoint_id, report.save_id, report.step
        assert (record["name"], record["save_id"], record["step"]) == told
        assert record["sources"] == report.sources
        assert record["seconds"] == pytest.approx(report.seconds, abs=1e-6)
        assert record["world_size"] == 1
    assert [list(record["sources"]) for record in records] == [["memory"], ["storage"]]
    assert all(
        2466 < record["sources"][kind] < 12_000
        for record, kind in zip(records, ("memory", "storage"), strict=True)
    )


def test_a_job_in_memory_only_has_its_lines_there(memory_root: Path) -> None:
    job = Job(None, str(memory_root))
    with job.writer() as writer:
        save(writer, 1)
    load_anew(job)
    assert [record["name"] for record in _in_memory(job)] == ["step-1"]


def test_a_node_without_memory_of_the_job_is_given_none_by_a_load(job: Job) -> None:
    save_in_two_places(job)
    shutil.rmtree(job.directory)
    load_anew(job)
    assert [record["name"] for record in _on_storage(job)] == ["step-2"]
    assert not job.directory.exists()


def test_of_several_ranks_one_tells_for_all(job: Job) -> None:
    forked_ranks(save_in_two_places, 2, job)
    reports = [loaded.report for loaded in forked_ranks(load_anew, 2, job)]
    [record] = _on_storage(job)
    assert [record] == _in_memory(job)
    assert record["world_size"] == 2
    assert record["sources"] == reports[0].sources == reports[1].sources
    # The sharded tensor is read once, the replicated one on each rank.
    assert record["sources"]["memory"] > 2400 + 2 * 66


def _save_on_nodes(memory: str) -> None:
    with Job(None, f"{memory}/node{dist.get_rank()}").writer() as writer:
        save(writer, 1)


def _load_on_other_nodes(memory: str) -> Mapping[str, int]:
    return load_anew(Job(None, f"{memory}/node{1 - dist.get_rank()}")).report.sources


def test_bytes_of_other_nodes_count_as_peers(memory_root: Path) -> None:
    forked_ranks(_save_on_nodes, 2, str(memory_root))
    found = forked_ranks(_load_on_other_nodes, 2, str(memory_root))
    [record] = _in_memory(Job(None, f"{memory_root}/node1"))  # of rank 0
    assert _in_memory(Job(None, f"{memory_root}/node0")) == []
    assert record["sources"] == found[0] == found[1]
    assert record["sources"]["peers"] >= 2400  # each rank's shard lies on the other's node
    assert record["sources"].keys() == {"memory", "peers"}


def test_what_was_passed_over_is_in_the_line_with_the_reason(job: Job) -> None:
    save_in_two_places(job)
    shutil.rmtree(job.directory)
    (segment,) = Path(job.url or "", "step-2").glob("__0_0-*.distcp")
    flip(segment, 900)
    assert load_anew(job).number == 1
    [record] = _on_storage(job)
    assert record["name"] == "step-1"
    assert "step-2" in record["passed_over"][0]


def test_whoever_only_looks_leaves_no_line(job: Job) -> None:
    save_in_two_places(job)
    load_anew(job, record=False)
    assert _in_memory(job) == _on_storage(job) == []


@pytest.mark.parametrize("place", ["memory", "storage"])
def test_a_line_that_cannot_be_written_fails_no_load_and_storage_gets_it_later(
    job: Job, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    save_in_two_places(job)
    in_the_way = (job.directory if place == "memory" else Path(job.url or "", ".dcp_mem")) / _FILE
    in_the_way.mkdir()
    with caplog.at_level(logging.INFO):
        assert load_anew(job).number == 3
    assert "that step-3 was loaded" in caplog.text
    assert f"in {'memory' if place == 'memory' else job.url}" in caplog.text
    in_the_way.rmdir()
    load_anew(job, "step-2")
    expected = ["step-3", "step-2"]
    assert [record["name"] for record in _on_storage(job)] == expected
    assert [record["name"] for record in _in_memory(job)] == expected[place == "memory" :]


def test_training_goes_on_while_storage_is_silent(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_in_two_places(job)
    on_storage, may_answer, opened = (
        Path(job.url or "", ".dcp_mem", _FILE),
        threading.Event(),
        os.open,
    )

    def open_late(path: Any, *args: Any, **options: Any) -> int:
        if str(path).endswith(f"/{_FILE}") and not str(path).startswith(job.memory):
            may_answer.wait(60)
        return opened(path, *args, **options)

    on_storage.parent.mkdir(exist_ok=True)
    on_storage.write_text(json.dumps(_GOOD) + "\n")
    monkeypatch.setattr(os, "open", open_late)
    load_anew(job)
    assert _on_storage(job) == [_GOOD]
    may_answer.set()
    wait_until(lambda: len(_on_storage(job)) == 2)
