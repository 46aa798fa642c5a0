"""Bytes that haven't changed since an earlier checkpoint aren't sent again, on any storage."""

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

import dcp_mem.flushing.reuse
import dcp_mem.flushing.upload
import dcp_mem.runtime.session
from dcp_mem import CheckpointStatus, State
from dcp_mem.common import faults
from dcp_mem.common.values import HISTORIES
from dcp_mem.format.history import from_csv
from dcp_mem.format.manifest import NodeManifest
from dcp_mem.storage.listing import committed_under, mark_rejected
from dcp_mem.storage.posix import PosixStorage
from dcp_mem.storage.s3 import Multipart
from tests.support.checkpoints.jobs import Job
from tests.support.checkpoints.roundtrip import assert_same, blank_of, through_fsspec
from tests.support.processes.forks import forked
from tests.support.storage import ways
from tests.support.storage.proxy import Exchange, s3_error
from tests.support.storage.ways import PART, Way, without_memory

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("flush_quickly")]

_ITEMS = 6
_FRAMES = 64 << 10
"""More bytes than frames and byte items take."""


def _state(versions: tuple[int, ...]) -> dict[str, Any]:
    """Tensors of a part each; each is of its version."""
    return {
        f"item-{number}": torch.arange(PART // 4, dtype=torch.int32) * (number + 3) + version
        for number, version in enumerate(versions)
    }


def _save(
    job: Job, *saves: tuple[int, ...], start: int = 1, **options: Any
) -> list[CheckpointStatus]:
    """Save states of these versions as step-1 and so on; each is durable before the next."""
    with pytest.MonkeyPatch.context() as patch:
        ways.flush_quickly(patch)
        with job.writer(agent="thread", **options) as writer:
            for number, versions in enumerate(saves, start):
                dcp.save(_state(versions), checkpoint_id=f"step-{number}", storage_writer=writer)
                writer.wait(f"step-{number}", timeout=60)
            return writer.status()


def _assert_loads(job: Job, name: str, versions: tuple[int, ...]) -> None:
    """Load by our reader and by torch's own, and compare every bit."""
    expected = _state(versions)
    readers = [
        (without_memory(job), name),
        (through_fsspec(FsspecReader, f"{job.url}/{name}", job.storage_options), None),
    ]
    if str(job.url).startswith("/"):
        readers.append((FileSystemReader(f"{job.url}/{name}"), None))
    for reader, wanted in readers:
        found = blank_of(expected)
        dcp.load(found, checkpoint_id=wanted, storage_reader=reader)
        assert_same(expected, found)


def _only_changed(number: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    first = (0,) * _ITEMS
    return first, tuple(1 if one == number else 0 for one in range(_ITEMS))


# -- directories -----------------------------------------------------------------------------------


@pytest.fixture
def directory_job(tmp_path: Path, memory_root: Path) -> Job:
    return Job(str(tmp_path / "run"), str(memory_root))


@pytest.fixture
def xfs_job(xfs: Path, memory_root: Path) -> Iterator[Job]:
    root = xfs / "run"
    yield Job(str(root), str(memory_root))
    shutil.rmtree(root, ignore_errors=True)


def _segment(job: Job, name: str) -> Path:
    (path,) = Path(str(job.url), name).glob("*.distcp")
    return path


def test_a_segment_that_has_not_changed_is_linked_and_outlives_its_source(
    directory_job: Job,
) -> None:
    versions = (0,) * _ITEMS
    status = forked(_save, directory_job, versions, versions)
    assert os.path.samefile(_segment(directory_job, "step-1"), _segment(directory_job, "step-2"))
    newest = status[0].transfer
    assert (newest.sent_nbytes, newest.reused_nbytes) == (0, newest.nbytes)
    shutil.rmtree(f"{directory_job.url}/step-1")
    _assert_loads(directory_job, "step-2", versions)


def test_where_nothing_can_be_cloned_a_segment_with_a_change_is_sent_whole(
    directory_job: Job,
) -> None:
    first, second = _only_changed(2)
    status = forked(_save, directory_job, first, second)
    transfer = status[0].transfer
    assert (transfer.sent_nbytes, transfer.reused_nbytes) == (transfer.nbytes, 0)
    assert transfer.sent_parts == transfer.parts
    shutil.rmtree(f"{directory_job.url}/step-1")
    _assert_loads(directory_job, "step-2", second)


def test_what_changed_and_then_stays_is_reused_after_one_more_save(xfs_job: Job) -> None:
    first, second = _only_changed(2)
    status = forked(_save, xfs_job, first, second, second, second)
    reused = [one.transfer.reused_nbytes for one in reversed(status)]
    nbytes = status[0].nbytes
    assert reused[0] == 0
    assert 0 < reused[1] == reused[2] < reused[3] == nbytes
    _assert_loads(xfs_job, "step-4", second)


def _free_nbytes(path: Path) -> int:
    os.sync()
    facts = os.statvfs(path)
    return facts.f_bfree * facts.f_frsize


def test_a_file_system_that_clones_takes_room_only_for_what_changed(
    xfs_job: Job, xfs: Path
) -> None:
    first, second = _only_changed(2)
    forked(_save, xfs_job, first)
    before = _free_nbytes(xfs)
    forked(_save_as_second, xfs_job, second)
    assert before - _free_nbytes(xfs) < 4 * PART
    shutil.rmtree(f"{xfs_job.url}/step-1")
    _assert_loads(xfs_job, "step-2", second)


_SAVES = st.lists(st.tuples(*[st.integers(0, 2)] * 3), min_size=2, max_size=4)


@pytest.mark.timeout(400)
@settings(max_examples=10)
@given(saves=_SAVES)
def test_any_changes_between_saves_load_as_they_were_saved(
    tmp_path_factory: pytest.TempPathFactory, saves: list[tuple[int, ...]]
) -> None:
    reused = _save_all(tmp_path_factory.mktemp("any"), saves)
    assert set(reused) <= {0, 1}
    _assert_that_what_stays_is_reused(saves, reused)


@pytest.mark.timeout(400)
@settings(max_examples=10)
@given(saves=_SAVES)
def test_any_changes_load_as_they_were_saved_where_parts_are_cloned(
    xfs: Path, saves: list[tuple[int, ...]]
) -> None:
    reused = _save_all(xfs / "any", saves)
    # A part in which one tensor ends and another begins is sent if either has changed.
    assert reused[1] > 0 or saves[0][1:] != saves[1][1:]
    _assert_that_what_stays_is_reused(saves, reused)


def _assert_that_what_stays_is_reused(saves: list[tuple[int, ...]], reused: list[float]) -> None:
    """A part that has changed and then stays is sent once more; then it has a hash."""
    assert reused[0] == 0
    for number, (before, now) in enumerate(pairwise(saves), 1):
        if before != now:
            assert reused[number] < 1
        elif number == 1 or saves[number - 2] == now:
            assert reused[number] == 1


def _save_all(root: Path, saves: list[tuple[int, ...]]) -> list[float]:
    """Save and load all of these; return which share of each save was reused."""
    job = Job(str(root / "run"), str(root / "memory"))
    os.makedirs(job.memory, 0o700)
    try:
        status = forked(_save, job, *saves)
        for number, versions in enumerate(saves, 1):
            _assert_loads(job, f"step-{number}", versions)
        found = {one.name: one.transfer.reused_nbytes / one.nbytes for one in status}
        return [found[f"step-{number}"] for number in range(1, len(saves) + 1)]
    finally:
        shutil.rmtree(root)


def _corrupt(path: Path, *, silently: bool) -> None:
    """Change a byte of a file; silently as a disk does, or as a program that writes to it."""
    facts = path.stat()
    with path.open("r+b") as stream:
        stream.seek(PART)
        byte = stream.read(1)
        stream.seek(PART)
        stream.write(bytes([byte[0] ^ 0xFF]))
    if silently:
        os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))


@pytest.mark.parametrize("silently", [False, True], ids=["written to", "rotted"])
def test_a_new_run_copies_nothing_from_a_damaged_segment(
    directory_job: Job, tmp_path: Path, silently: bool
) -> None:
    versions = (0,) * _ITEMS
    forked(_save, directory_job, versions)
    _corrupt(_segment(directory_job, "step-1"), silently=silently)
    other = replace(directory_job, memory=str(tmp_path / "memory"))
    os.mkdir(other.memory, 0o700)
    ((transfer),) = (one.transfer for one in forked(_save_as_second, other, versions))
    assert (transfer.sent_nbytes, transfer.reused_nbytes) == (transfer.nbytes, 0)
    _assert_loads(directory_job, "step-2", versions)


def _save_as_second(job: Job, versions: tuple[int, ...]) -> list[CheckpointStatus]:
    return _save(job, versions, start=2)


def test_a_new_run_on_another_node_copies_what_an_earlier_one_has_put(
    directory_job: Job, tmp_path: Path
) -> None:
    versions = (0,) * _ITEMS
    forked(_save, directory_job, versions)
    other = replace(directory_job, memory=str(tmp_path / "memory"))
    os.mkdir(other.memory, 0o700)
    (status,) = forked(_save_as_second, other, versions)
    assert status.transfer.sent_nbytes == 0
    assert os.path.samefile(_segment(directory_job, "step-1"), _segment(directory_job, "step-2"))


def _without_hashes(job: Job) -> None:
    (path,) = Path(str(job.url), "step-1", ".dcp_mem").glob("node-*.json")
    path.write_bytes(replace(NodeManifest.from_json(path.read_bytes()), parts={}).to_json())


def _reject(job: Job) -> None:
    storage = PosixStorage(str(job.url))
    (found,) = committed_under(storage, "step-1")
    assert found.manifest is not None
    mark_rejected(storage, found.manifest, "its loss is NaN")


def _uncommit(job: Job) -> None:
    Path(str(job.url), "step-1", ".metadata").unlink()


@pytest.mark.parametrize("spoil", [_without_hashes, _reject, _uncommit])
def test_what_has_no_hashes_or_is_rejected_or_not_committed_is_not_copied_from(
    directory_job: Job, tmp_path: Path, spoil: Callable[[Job], None]
) -> None:
    versions = (0,) * _ITEMS
    forked(_save, directory_job, versions)
    spoil(directory_job)
    other = replace(directory_job, memory=str(tmp_path / "memory"))
    os.mkdir(other.memory, 0o700)
    (status,) = forked(_save_as_second, other, versions)
    assert status.transfer.reused_nbytes == 0
    _assert_loads(directory_job, "step-2", versions)


def _save_without_reuse(job: Job, versions: tuple[int, ...]) -> list[CheckpointStatus]:
    return _save(job, versions, versions, reuse_stored=False)


def test_reuse_can_be_turned_off(directory_job: Job) -> None:
    status = forked(_save_without_reuse, directory_job, (0,) * _ITEMS)
    assert [one.transfer.reused_nbytes for one in status] == [0, 0]
    (path,) = Path(str(directory_job.url), "step-2", ".dcp_mem").glob("node-*.json")
    assert NodeManifest.from_json(path.read_bytes()).parts == {}


def test_histories_say_what_was_sent_and_what_was_reused(directory_job: Job) -> None:
    status = forked(_save, directory_job, *[(0,) * _ITEMS] * 2)
    rows = from_csv(Path(str(directory_job.url), HISTORIES).read_bytes())
    sent = [(row.sent_nbytes, row.reused_nbytes) for row in rows]
    assert sent == [(status[0].nbytes, 0), (0, status[0].nbytes)]
    (path,) = Path(str(directory_job.url), "step-2", ".dcp_mem").glob("node-*.json")
    assert NodeManifest.from_json(path.read_bytes()).transfer.reused_nbytes == status[0].nbytes


def _save_after_a_day(job: Job, versions: tuple[int, ...]) -> list[CheckpointStatus]:
    """Save twice; the segment rots in between, and a day passes."""
    with pytest.MonkeyPatch.context() as patch:
        ways.flush_quickly(patch)
        with job.writer(agent="thread") as writer:
            for number in (1, 2):
                dcp.save(_state(versions), checkpoint_id=f"step-{number}", storage_writer=writer)
                writer.wait(f"step-{number}", timeout=60)
                _corrupt(_segment(job, f"step-{number}"), silently=True)
                patch.setattr(dcp_mem.flushing.reuse, "_TRUST_SECONDS", 0.0)
            return writer.status()


def test_what_was_put_long_ago_is_read_before_it_is_copied(directory_job: Job) -> None:
    status = forked(_save_after_a_day, directory_job, (0,) * _ITEMS)
    assert [one.transfer.reused_nbytes for one in status] == [0, 0]


def _save_keeping_one(job: Job, *saves: tuple[int, ...]) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        ways.flush_quickly(patch)
        with job.writer(agent="thread", keep_storage=1) as writer:
            for number, versions in enumerate(saves, 1):
                dcp.save(_state(versions), checkpoint_id=f"step-{number}", storage_writer=writer)
                writer.wait(f"step-{number}", timeout=60)
        return [f"{one.name} {one.transfer.reused_nbytes > 0}" for one in writer.status()]


def test_retention_deletes_what_later_checkpoints_were_copied_from(directory_job: Job) -> None:
    versions = (0,) * _ITEMS
    status = forked(_save_keeping_one, directory_job, *[versions] * 4)
    assert status[:3] == ["step-4 True", "step-3 True", "step-2 True"]
    kept = [path.name for path in Path(str(directory_job.url)).glob("step-*")]
    assert kept == ["step-4"]
    assert _segment(directory_job, "step-4").stat().st_nlink == 1
    _assert_loads(directory_job, "step-4", versions)


# -- S3 --------------------------------------------------------------------------------------------


@pytest.fixture(params=["moto", "radosgw"])
def s3(request: pytest.FixtureRequest) -> Iterator[Way]:
    with ways.s3_way(request.getfixturevalue(request.param)) as way:
        yield way


def _is_copy(one: Exchange, segment: str = ".distcp") -> bool:
    """A part without a body: it is a copy's."""
    return one.method == "PUT" and segment in one.target and not one.sent_bytes


@pytest.mark.servers
def test_over_the_wire_goes_only_what_changed(s3: Way, memory_root: Path) -> None:
    job, (first, second) = s3.job(memory_root), _only_changed(2)
    forked(_save, job, first)
    s3.proxy.reset()
    (newest, *_) = forked(_save_as_second, job, second)
    sent = sum(one.sent_bytes for one in s3.proxy.requests)
    transfer = newest.transfer
    assert sum(_is_copy(one) for one in s3.proxy.requests) >= _ITEMS - 3
    assert sent < 3 * PART + _FRAMES
    assert 0 < transfer.sent_nbytes <= sent
    assert transfer.sent_nbytes + transfer.reused_nbytes == transfer.nbytes
    _delete(s3, "step-1")
    _assert_loads(s3.job(memory_root, s3.direct), "step-2", second)


def _delete(way: Way, name: str) -> None:
    fs, path = way.direct.filesystem()
    fs.rm(f"{path}/run/{name}", recursive=True)


@pytest.mark.servers
def test_a_segment_of_one_part_is_copied_as_an_object(s3: Way, memory_root: Path) -> None:
    job = s3.job(memory_root)
    forked(_save, job, (0,))
    s3.proxy.reset()
    (newest, *_) = forked(_save_as_second, job, (0,))
    assert sum(one.sent_bytes for one in s3.proxy.requests) < PART
    assert newest.transfer.reused_nbytes > 0
    _delete(s3, "step-1")
    _assert_loads(s3.job(memory_root, s3.direct), "step-2", (0,))


def _save_while_the_source_vanishes(job: Job, versions: tuple[int, ...]) -> list[CheckpointStatus]:
    copy_part, copied = Multipart.copy_part, []

    def delete_source(upload: Multipart, number: int, crc32c: int) -> bool:
        is_copied = copy_part(upload, number, crc32c)
        assert upload._source is not None
        upload._client.call("delete_object", Key=upload._source.path)
        copied.append(is_copied)
        return is_copied

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Multipart, "copy_part", delete_source)
        patch.setattr(dcp_mem.flushing.upload, "parts_at_once", lambda: 1)
        status = _save_as_second(job, versions)
    assert copied == [True, False]
    return status


@pytest.mark.servers
def test_what_vanishes_while_it_is_copied_is_sent(s3: Way, memory_root: Path) -> None:
    job, versions = s3.job(memory_root), (0,) * _ITEMS
    forked(_save, job, versions)
    (newest, *_) = forked(_save_while_the_source_vanishes, job, versions)
    assert newest.transfer.reused_nbytes == PART
    _delete(s3, "step-1")
    _assert_loads(s3.job(memory_root, s3.direct), "step-2", versions)


@pytest.mark.servers
@pytest.mark.parametrize(
    ("status", "code"), [(403, "AccessDenied"), (501, "NotImplemented"), (500, "InternalError")]
)
def test_a_store_that_does_not_copy_is_sent_everything(
    s3: Way, memory_root: Path, status: int, code: str
) -> None:
    job, versions = s3.job(memory_root), (0,) * _ITEMS
    forked(_save, job, versions)
    s3.proxy.reset()
    s3.proxy.fail(
        lambda request: "x-amz-copy-source" in request.headers, s3_error(status, code), times=1000
    )
    (newest, *_) = forked(_save_as_second, job, versions)
    assert newest.state is State.DURABLE
    assert (newest.transfer.sent_nbytes, newest.transfer.reused_nbytes) == (newest.nbytes, 0)
    _assert_loads(s3.job(memory_root, s3.direct), "step-2", versions)


# -- kills -----------------------------------------------------------------------------------------


def _save_armed(job: Job, versions: tuple[int, ...], armed: str) -> None:
    faults.arm(armed)
    _save_as_second(job, versions)


def _flush_rest(job: Job) -> list[CheckpointStatus]:
    with pytest.MonkeyPatch.context() as patch:
        ways.flush_quickly(patch)
        with job.writer(agent="thread") as writer:
            writer.wait(timeout=60)
            return writer.status()


def _assert_that_a_killed_flush_goes_on(job: Job, armed: str, direct: Job) -> None:
    first, second = ((0,) * _ITEMS,) * 2 if "whole" in armed else _only_changed(5)
    forked(_save, job, first)
    with pytest.raises(AssertionError, match="exit code -9"):
        forked(_save_armed, job, second, armed)
    status = {one.name: one.state for one in forked(_flush_rest, job)}
    assert status == {"step-1": State.DURABLE, "step-2": State.DURABLE}
    _assert_loads(direct, "step-1", first)
    _assert_loads(direct, "step-2", second)


def test_a_flush_killed_after_a_link_goes_on(directory_job: Job) -> None:
    _assert_that_a_killed_flush_goes_on(directory_job, "reuse.whole:kill:1", directory_job)


def test_a_flush_killed_after_a_clone_goes_on(xfs_job: Job) -> None:
    _assert_that_a_killed_flush_goes_on(xfs_job, "reuse.part:kill:2", xfs_job)


@pytest.mark.servers
def test_a_flush_killed_after_a_copy_goes_on(s3: Way, memory_root: Path) -> None:
    direct = s3.job(memory_root, s3.direct)
    _assert_that_a_killed_flush_goes_on(s3.job(memory_root), "reuse.part:kill:2", direct)


# -- Azure -----------------------------------------------------------------------------------------


@pytest.mark.servers
def test_a_blob_that_has_not_changed_is_copied_whole(abfs_way: Way, memory_root: Path) -> None:
    job, versions = abfs_way.job(memory_root), (0,) * _ITEMS
    forked(_save, job, versions)
    abfs_way.proxy.reset()
    (newest, *_) = forked(_save_as_second, job, versions)
    assert sum(one.sent_bytes for one in abfs_way.proxy.requests) < PART
    assert newest.transfer.reused_nbytes == newest.nbytes
    _delete(abfs_way, "step-1")
    _assert_loads(abfs_way.job(memory_root, abfs_way.direct), "step-2", versions)


@pytest.mark.servers
def test_a_blob_with_a_change_is_sent(abfs_way: Way, memory_root: Path) -> None:
    job, (first, second) = abfs_way.job(memory_root), _only_changed(2)
    forked(_save, job, first)
    (newest, *_) = forked(_save_as_second, job, second)
    assert (newest.transfer.sent_nbytes, newest.transfer.reused_nbytes) == (newest.nbytes, 0)
    _delete(abfs_way, "step-1")
    _assert_loads(abfs_way.job(memory_root, abfs_way.direct), "step-2", second)


@pytest.mark.servers
def test_a_flush_killed_after_a_copied_blob_goes_on(abfs_way: Way, memory_root: Path) -> None:
    direct = abfs_way.job(memory_root, abfs_way.direct)
    _assert_that_a_killed_flush_goes_on(abfs_way.job(memory_root), "reuse.whole:kill:1", direct)
