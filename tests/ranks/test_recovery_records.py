"""`recoveries.jsonl`: each load adds a record in memory and on storage, and never fails for it."""

import logging
import shutil
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from dcp_mem import ConfigError
from dcp_mem.common.values import RECOVERIES
from dcp_mem.config import checkpoint_name
from dcp_mem.format.recoveries import RecoveryRecord, from_lines, merge_recoveries, to_lines
from dcp_mem.loading.finish import leave_record
from dcp_mem.memory.records import add_recovery, recoveries_in
from dcp_mem.storage import Storage
from dcp_mem.storage.posix import PosixStorage
from dcp_mem.storage.recoveries import recoveries_on
from tests.support.checkpoints.damage import flip
from tests.support.checkpoints.jobs import Job, load_anew, save, save_in_two_places
from tests.support.processes.forks import forked_ranks

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
RECORDS = st.builds(
    RecoveryRecord,
    token=st.text("0123456789abcdef", min_size=12, max_size=12),
    time=st.integers(1, 4_000_000_000).map(float) | st.just(1795205846.676303),
    name=TEXTS,
    save_id=TEXTS,
    step=st.none() | st.integers(0, 1 << 60),
    seconds=st.integers(0, 1 << 40).map(lambda number: number / 64),
    sources=st.dictionaries(
        st.sampled_from(["memory", "peers", "storage"]), st.integers(0, 1 << 60)
    ),
    passed_over=st.lists(TEXTS, max_size=3).map(tuple),
    world_size=st.integers(0, 100_000),
)


def _in_memory(job: Job) -> list[RecoveryRecord]:
    return recoveries_in(str(job.directory))


def _on_storage(job: Job) -> list[RecoveryRecord]:
    return recoveries_on(PosixStorage(job.url or ""))


# -- the file --------------------------------------------------------------------------------------


@given(st.lists(RECORDS, max_size=4))
def test_what_is_written_down_is_read_back(records: list[RecoveryRecord]) -> None:
    assert from_lines(to_lines(records)) == records


@given(st.lists(RECORDS, max_size=3), st.binary(max_size=40))
def test_damage_costs_the_damaged_line_only(records: list[RecoveryRecord], damage: bytes) -> None:
    lines = to_lines(records).splitlines()
    assert (
        from_lines(b"\n".join([damage.replace(b"\n", b"").replace(b"\r", b""), *lines])) == records
    )


_LINE = to_lines(
    [
        RecoveryRecord(
            token="token",
            time=1.0,
            name="a",
            save_id="",
            step=None,
            seconds=1.0,
            sources={"memory": 1},
        )
    ]
)


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 100_000,
        b"[]",
        b'{"token": "a"}',
        to_lines(
            [
                RecoveryRecord(
                    token="", time=1.0, name="no token", save_id="", step=None, seconds=1.0
                )
            ]
        ),
        *(
            _LINE.replace(b'"seconds": 1.0', b'"seconds": ' + figure)
            for figure in (b"-1", b"1e999", b"NaN", b"[]")
        ),
        _LINE.replace(b'"memory": 1', b'"memory": -1'),
        _LINE.replace(b"+00:00", b""),
    ],
    ids=lambda line: line[:8].decode(),
)
def test_a_line_that_is_no_record_is_passed_over(line: bytes) -> None:
    assert len(from_lines(_LINE)) == 1
    assert from_lines(line) == []


def test_of_too_many_the_last_ones_stay_each_once() -> None:
    records = [
        RecoveryRecord(
            token=f"{number:03}",
            time=float(number + 1),
            name="a",
            save_id="",
            step=None,
            seconds=1.0,
        )
        for number in range(9)
    ]
    assert merge_recoveries(records[5:], records[:7], most=4) == records[5:]


def test_in_memory_the_last_ones_stay_whatever_the_others_are(
    memory_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dcp_mem.memory.records.MOST_RECOVERIES", 4)
    job = Job(None, str(memory_root))
    job.directory.mkdir(mode=0o700)
    path = job.directory / RECOVERIES
    path.touch(mode=0o600)
    path.write_bytes(b"no record\n" * 5 + _LINE.rstrip())  # the last line was cut off, or edited
    known = from_lines(_LINE)
    for number in range(3):
        one = replace(known[0], token=f"new-{number}", time=known[0].time + 1 + number)
        add_recovery(str(job.directory), one)
        known.append(one)
        assert _in_memory(job) == known
    assert path.read_bytes().count(b"\n") == 4


def test_no_checkpoint_takes_the_name_of_the_file() -> None:
    with pytest.raises(ConfigError, match="is no name"):
        checkpoint_name(None, RECOVERIES)


# -- loads -----------------------------------------------------------------------------------------


def test_each_load_leaves_a_line_in_both_places(job: Job) -> None:
    save_in_two_places(job)
    newest = load_anew(job).report
    stored = load_anew(job, "step-1").report
    records = _on_storage(job)
    assert records == _in_memory(job)
    for record, report in zip(records, (newest, stored), strict=True):
        assert (record.name, record.save_id, record.step) == (
            report.checkpoint_id,
            report.save_id,
            report.step,
        )
        assert record.sources == report.sources
        assert record.seconds == pytest.approx(report.seconds, abs=1e-6)
        assert record.world_size == 1
    assert [list(record.sources) for record in records] == [["memory"], ["storage"]]
    assert all(
        2466 < record.sources[kind] < 12_000
        for record, kind in zip(records, ("memory", "storage"), strict=True)
    )


def test_a_job_in_memory_only_has_its_lines_there(memory_root: Path) -> None:
    job = Job(None, str(memory_root))
    with job.writer() as writer:
        save(writer, 1)
    load_anew(job)
    assert [record.name for record in _in_memory(job)] == ["step-1"]


def test_a_node_without_memory_of_the_job_is_given_none_by_a_load(job: Job) -> None:
    save_in_two_places(job)
    shutil.rmtree(job.directory)
    load_anew(job)
    assert [record.name for record in _on_storage(job)] == ["step-2"]
    assert not job.directory.exists()


def test_of_several_ranks_one_tells_for_all(job: Job) -> None:
    forked_ranks(save_in_two_places, 2, job)
    reports = [loaded.report for loaded in forked_ranks(load_anew, 2, job)]
    [record] = _on_storage(job)
    assert [record] == _in_memory(job)
    assert record.world_size == 2
    assert record.sources == reports[0].sources == reports[1].sources
    # The sharded tensor is read once, the replicated one on each rank.
    assert record.sources["memory"] > 2400 + 2 * 66


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
    assert record.sources == found[0] == found[1]
    assert record.sources["peers"] >= 2400  # each rank's shard lies on the other's node
    assert record.sources.keys() == {"memory", "peers"}


def test_what_was_passed_over_is_in_the_line_with_the_reason(job: Job) -> None:
    save_in_two_places(job)
    shutil.rmtree(job.directory)
    (segment,) = Path(job.url or "", "step-2").glob("__0_0-*.distcp")
    flip(segment, 900)
    assert load_anew(job).number == 1
    [record] = _on_storage(job)
    assert record.name == "step-1"
    assert "step-2" in record.passed_over[0]


def test_whoever_only_looks_leaves_no_line(job: Job) -> None:
    save_in_two_places(job)
    load_anew(job, record=False)
    assert _in_memory(job) == _on_storage(job) == []


@pytest.mark.parametrize("place", ["memory", "storage"])
def test_a_line_that_cannot_be_written_fails_no_load_and_storage_gets_it_later(
    job: Job, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    save_in_two_places(job)
    in_the_way = (
        job.directory if place == "memory" else Path(job.url or "", ".dcp_mem")
    ) / RECOVERIES
    in_the_way.mkdir()
    with caplog.at_level(logging.INFO):
        assert load_anew(job).number == 3
    assert "that step-3 was loaded" in caplog.text
    assert f"in {'memory' if place == 'memory' else job.url}" in caplog.text
    in_the_way.rmdir()
    load_anew(job, "step-2")
    expected = ["step-3", "step-2"]
    assert [record.name for record in _on_storage(job)] == expected
    assert [record.name for record in _in_memory(job)] == expected[place == "memory" :]


class _Silent(PosixStorage):
    """A storage that answers nothing until it is told to."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.may_answer, self.has_answered = threading.Event(), threading.Event()

    def get(self, key: str) -> bytes:
        self.may_answer.wait(60)
        return super().get(key)

    def put(self, key: str, data: bytes, *, create: bool = False) -> None:
        super().put(key, data, create=create)
        self.has_answered.set()


def test_training_goes_on_while_storage_is_silent(tmp_path: Path) -> None:
    storage = _Silent(str(tmp_path))
    of_its_kind: Storage = storage
    record = RecoveryRecord(token="token", time=1.0, name="step-1", save_id="", step=1, seconds=1.0)
    leave_record(record, None, of_its_kind)
    assert not storage.has_answered.is_set()
    storage.may_answer.set()
    assert storage.has_answered.wait(60)
    assert recoveries_on(storage) == [record]
