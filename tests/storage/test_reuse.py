"""Bytes that haven't changed since an earlier checkpoint aren't sent again, on any storage."""

import errno
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

import dcp_mem.flushing.reuse
import dcp_mem.flushing.upload
import dcp_mem.runtime.session
import dcp_mem.storage.posix
from dcp_mem import CheckpointStatus, FlushFailed, State
from dcp_mem.cli.main import main
from dcp_mem.common import faults
from dcp_mem.common.files import open_file
from dcp_mem.common.values import HISTORIES
from dcp_mem.format.history import from_csv
from dcp_mem.format.manifest import NodeManifest
from dcp_mem.operations.inventory import on_storage
from dcp_mem.operations.verify import Verified, verify
from dcp_mem.options import settings as settings_of
from dcp_mem.storage import Source
from dcp_mem.storage.azure import AzureUpload
from dcp_mem.storage.listing import committed_under, mark_rejected
from dcp_mem.storage.posix import PosixStorage
from dcp_mem.storage.routes import open_storage
from dcp_mem.storage.s3 import Multipart
from tests.support.checkpoints.jobs import Job
from tests.support.checkpoints.roundtrip import assert_same, blank_of, through_fsspec
from tests.support.processes.forks import forked, forking, in_process
from tests.support.storage import ways
from tests.support.storage.proxy import Exchange, azure_error, s3_error
from tests.support.storage.servers import S3Server
from tests.support.storage.soundness import is_taken
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


def test_histories_say_what_was_sent_and_what_was_reused(
    directory_job: Job, tmp_path: Path
) -> None:
    status = forked(_save, directory_job, *[(0,) * _ITEMS] * 2)
    rows = from_csv(Path(str(directory_job.url), ".dcp_mem", HISTORIES).read_bytes())
    sent = [(row.sent_nbytes, row.reused_nbytes) for row in rows]
    assert sent == [(status[0].nbytes, 0), (0, status[0].nbytes)]
    (path,) = Path(str(directory_job.url), "step-2", ".dcp_mem").glob("node-*.json")
    assert NodeManifest.from_json(path.read_bytes()).transfer.reused_nbytes == status[0].nbytes
    places = [str(directory_job.url), "--memory-root", directory_job.memory, "--job", "job"]
    shown = CliRunner().invoke(main, ["show", places[0], "step-2", *places[1:]])
    assert "reused on storage" in shown.stdout, shown.output
    page = tmp_path / "report.html"
    assert CliRunner().invoke(main, ["report", *places, "-o", str(page)]).exit_code == 0
    assert " reused" in page.read_text()


@in_process
def test_what_was_put_long_ago_is_read_before_it_is_copied(directory_job: Job) -> None:
    versions = (0,) * _ITEMS
    with pytest.MonkeyPatch.context() as patch:
        ways.flush_quickly(patch)
        with directory_job.writer(agent="thread") as writer:
            for number in (1, 2):
                dcp.save(_state(versions), checkpoint_id=f"step-{number}", storage_writer=writer)
                writer.wait(f"step-{number}", timeout=60)
                _corrupt(_segment(directory_job, f"step-{number}"), silently=True)
                patch.setattr(dcp_mem.flushing.reuse, "_TRUST_SECONDS", 0.0)
            status = writer.status()
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


@pytest.fixture(params=[pytest.param("moto", marks=pytest.mark.variant), "radosgw"])
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
    with pytest.raises(AssertionError, match="SIGKILL"):
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


# -- each by itself, on every kind of storage ------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """A job on one kind of storage, as tests reach it, and past the proxy."""

    job: Job
    direct: Job

    def delete(self, name: str) -> None:
        """Delete a checkpoint as somebody's rm does."""
        fs, path = self._storage()
        fs.rm(f"{path}/{name}", recursive=True)

    def _storage(self) -> tuple[Any, str]:
        found: tuple[Any, str] = fsspec.core.url_to_fs(
            str(self.direct.url), **{**self.direct.storage_options, **_UNCACHED}
        )
        return found


_UNCACHED = {"use_listings_cache": False, "skip_instance_cache": True}


@pytest.fixture(
    params=[
        "directory",
        "xfs",
        pytest.param("s3", marks=pytest.mark.servers),
        pytest.param("abfs", marks=pytest.mark.servers),
    ]
)
def place(request: pytest.FixtureRequest, memory_root: Path) -> Place:
    """A job on each kind of storage in turn."""
    if request.param in ("directory", "xfs"):
        job: Job = request.getfixturevalue(f"{request.param}_job")
        return Place(job, job)
    way: Way = request.getfixturevalue(f"{request.param}_way")
    return Place(way.job(memory_root), way.job(memory_root, way.direct))


class _Unobserved:
    """Nobody watches."""

    def expect(self, what: str, nbytes: int) -> None:
        return

    def add(self, nbytes: int) -> None:
        return


def _verified(job: Job, name: str) -> Verified:
    """Read all bytes of a stored checkpoint, as `dcp-mem verify` does."""
    chosen = settings_of(str(job.url), storage_options=job.storage_options)
    storage = open_storage(str(job.url), job.storage_options)
    (status,) = [one for one in on_storage(storage) if one.name == name]
    (found,) = verify(chosen, storage, status, _Unobserved())
    return found


def _assert_whole_without(place: Place, others: Sequence[str], name: str, versions: Any) -> None:
    for other in others:
        place.delete(other)
    found = _verified(place.direct, name)
    assert (found.damages, found.unchecked_nbytes) == ((), 0)
    assert found.checked_nbytes > 0
    _assert_loads(place.direct, name, versions)


_A, _B = (0,) * _ITEMS, (0, 0, 1, 0, 0, 0)


@pytest.mark.parametrize("survivor", [2, 5])
def test_each_checkpoint_is_whole_after_all_others_were_deleted(
    place: Place, survivor: int
) -> None:
    saves = [_A, _B, _B, _B, _A]
    status = forked(_save, place.job, *saves)
    assert any(one.transfer.reused_nbytes for one in status)
    others = [f"step-{number}" for number in range(1, 6) if number != survivor]
    _assert_whole_without(place, others, f"step-{survivor}", saves[survivor - 1])


def _save_frozen(job: Job, count: int) -> list[CheckpointStatus]:
    state = _state((0,) * _ITEMS)
    with pytest.MonkeyPatch.context() as patch:
        ways.flush_quickly(patch)
        with job.writer(agent="thread", frozen="item-[1-5]") as writer:
            for number in range(1, count + 1):
                state["item-0"].add_(number != 1)
                dcp_mem.save(state, checkpoint_id=f"step-{number}", storage_writer=writer)
                writer.wait(f"step-{number}", timeout=60)
            return writer.status()


def test_a_frozen_segment_is_sent_once_and_each_checkpoint_is_whole(place: Place) -> None:
    status = {one.name: one.transfer for one in forked(_save_frozen, place.job, 3)}
    for name in ("step-2", "step-3"):
        assert status[name].reused_nbytes >= 5 * PART
        assert status[name].sent_nbytes < 1.1 * PART + _FRAMES
    _assert_whole_without(place, ["step-1", "step-3"], "step-2", (1, *_A[1:]))


def _save_second_within(job: Job, versions: tuple[int, ...]) -> list[CheckpointStatus]:
    return _save(job, versions, start=2, upload_limit=PART // 64)


def test_what_is_copied_passes_an_upload_limit_by(place: Place) -> None:
    forked(_save, place.job, _A)
    status = forked(_save_second_within, place.job, _A)  # to be sent, it would take six minutes
    assert status[0].transfer.reused_nbytes > 5 * PART
    _assert_whole_without(place, ["step-1"], "step-2", _A)


def test_a_kill_after_a_copied_object_of_one_part(s3_way: Way, memory_root: Path) -> None:
    job, direct = s3_way.job(memory_root), s3_way.job(memory_root, s3_way.direct)
    forked(_save, job, (0,))
    with pytest.raises(AssertionError, match="SIGKILL"):
        forked(_save_armed, job, (0,), "reuse.part:kill:1")
    assert {one.state for one in forked(_flush_rest, job)} == {State.DURABLE}
    _assert_whole_without(Place(job, direct), ["step-1"], "step-2", (0,))


# -- sources that vanish ---------------------------------------------------------------------------


def _unlink(path: str) -> None:
    os.unlink(path)


def _truncate(path: str) -> None:
    os.truncate(path, PART // 2)


def _remove_all(path: str) -> None:
    shutil.rmtree(os.path.dirname(path))


def _save_while_a_file_goes(
    job: Job, go: Callable[[str], None], versions: tuple[int, ...]
) -> list[CheckpointStatus]:
    """Save step-2; what it is copied from goes once the upload has begun."""
    begin = PosixStorage.upload

    def begun(storage: PosixStorage, key: str, nbytes: int, source: Source | None = None) -> Any:
        upload = begin(storage, key, nbytes, source)
        if source is not None:
            go(f"{storage.url}/{source.key}")
        return upload

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PosixStorage, "upload", begun)
        return _save_as_second(job, versions)


@pytest.mark.parametrize("go", [_unlink, _truncate, _remove_all])
@pytest.mark.parametrize("kind", ["directory_job", "xfs_job"])
def test_a_file_that_goes_while_it_is_copied_harms_nothing(
    request: pytest.FixtureRequest, kind: str, go: Callable[[str], None]
) -> None:
    job: Job = request.getfixturevalue(kind)
    forked(_save, job, _A)
    (newest, *_) = forked(_save_while_a_file_goes, job, go, _A)
    assert newest.state is State.DURABLE
    found = _verified(job, "step-2")
    assert (found.damages, found.unchecked_nbytes) == ((), 0)
    _assert_loads(job, "step-2", _A)


def _save_while_files_are_denied(
    job: Job, number: int, versions: tuple[int, ...]
) -> list[CheckpointStatus]:
    def denied(path: str, *more: int) -> int:
        if path.endswith(".distcp"):
            raise OSError(number, os.strerror(number), path)
        return open_file(path, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dcp_mem.storage.posix, "open_file", denied)
        return _save_as_second(job, versions)


@pytest.mark.parametrize("number", [errno.EACCES, errno.ESTALE, errno.EIO, errno.ENOENT])
def test_a_file_that_may_not_be_read_is_sent_again(directory_job: Job, number: int) -> None:
    forked(_save, directory_job, _A)
    (newest, *_) = forked(_save_while_files_are_denied, directory_job, number, _A)
    assert (newest.state, newest.transfer.reused_nbytes) == (State.DURABLE, 0)
    _assert_loads(directory_job, "step-2", _A)


def _save_while_a_blob_goes(job: Job, versions: tuple[int, ...]) -> list[CheckpointStatus]:
    copy_whole = AzureUpload.copy_whole

    def gone(upload: AzureUpload) -> bool:
        assert upload.source is not None
        upload.source[0].delete_blob()
        return copy_whole(upload)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AzureUpload, "copy_whole", gone)
        return _save_as_second(job, versions)


@pytest.mark.servers
def test_a_blob_that_vanishes_before_it_is_copied_is_sent(abfs_way: Way, memory_root: Path) -> None:
    job = abfs_way.job(memory_root)
    forked(_save, job, _A)
    (newest, *_) = forked(_save_while_a_blob_goes, job, _A)
    assert (newest.state, newest.transfer.reused_nbytes) == (State.DURABLE, 0)
    _delete(abfs_way, "step-1")
    _assert_loads(abfs_way.job(memory_root, abfs_way.direct), "step-2", _A)


@pytest.mark.servers
@pytest.mark.parametrize(
    ("status", "code"),
    [
        (401, "CannotVerifyCopySource"),
        (403, "CannotVerifyCopySource"),
        (403, "AuthenticationFailed"),
        (404, "CannotVerifyCopySource"),
        (409, "PendingCopyOperation"),
        (412, "SourceConditionNotMet"),
        (500, "InternalError"),
        (501, "NotImplemented"),
    ],
)
def test_an_account_that_does_not_copy_is_sent_everything(
    abfs_way: Way, memory_root: Path, status: int, code: str
) -> None:
    job = abfs_way.job(memory_root)
    forked(_save, job, _A)
    abfs_way.proxy.fail(
        lambda request: "x-ms-copy-source" in request.headers,
        azure_error(status, code),
        times=1000,
    )
    (newest, *_) = forked(_save_as_second, job, _A)
    assert newest.state is State.DURABLE
    assert (newest.transfer.sent_nbytes, newest.transfer.reused_nbytes) == (newest.nbytes, 0)
    _assert_loads(abfs_way.job(memory_root, abfs_way.direct), "step-2", _A)


# -- several runs ----------------------------------------------------------------------------------


def _save_numbers(job: Job, numbers: Sequence[int], keep: int | None) -> str:
    """Be a run that saves these; return why it had to stop, if it had to."""
    with pytest.MonkeyPatch.context() as patch:
        ways.flush_quickly(patch)
        writer = job.writer(agent="thread", keep_storage=keep)
        try:
            for number in numbers:
                versions = _A if number % 3 else _B
                dcp.save(_state(versions), checkpoint_id=f"step-{number}", storage_writer=writer)
                writer.wait(f"step-{number}", timeout=60)
        except FlushFailed as error:
            return str(error)
        finally:
            writer.close(flush=False)
    return ""


@pytest.mark.parametrize("keep", [1, None])
def test_runs_that_share_a_root_copy_from_each_other_and_harm_nothing(
    place: Place, tmp_path: Path, keep: int | None
) -> None:
    """One lives, saves and deletes beside the other; one of them has the root in the end."""
    other = replace(place.job, memory=f"{place.job.memory}/other")
    os.mkdir(other.memory, 0o700)
    forked(_save_numbers, place.job, [1], None)
    with (
        forking(_save_numbers, None, place.job, [2, 4, 6, 8], keep) as first,
        forking(_save_numbers, None, other, [3, 5, 7, 9], keep) as second,
    ):
        said = [*first.join(90), *second.join(90)]
    assert "" in said
    assert all(not one or is_taken(one) for one in said)
    storage = open_storage(str(place.direct.url), place.direct.storage_options)
    found = [one.name for one in on_storage(storage)]
    assert found
    for name in found:
        number = int(name.removeprefix("step-"))
        _assert_loads(place.direct, name, _A if number % 3 else _B)
        assert not _verified(place.direct, name).damages


@pytest.mark.servers
@pytest.mark.timeout(400)
@settings(max_examples=5)
@given(saves=_SAVES)
def test_any_changes_load_as_they_were_saved_on_s3(
    moto: S3Server, tmp_path_factory: pytest.TempPathFactory, saves: list[tuple[int, ...]]
) -> None:
    memory = tmp_path_factory.mktemp("memory")
    memory.chmod(0o700)
    with moto.fresh_root() as root:
        job = Job(f"{root.url}/run", str(memory), root.storage_options)
        status = forked(_save, job, *saves)
        for number, versions in enumerate(saves, 1):
            _assert_loads(job, f"step-{number}", versions)
    found = {one.name: one.transfer.reused_nbytes / one.nbytes for one in status}
    _assert_that_what_stays_is_reused(
        saves, [found[f"step-{number}"] for number in range(1, len(saves) + 1)]
    )
    shutil.rmtree(memory)
