"""Orphans on storage are removed by the next commit, by `collect_orphans`, or by a delete."""

import dataclasses
import os
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

import dcp_mem
from dcp_mem import CheckpointNotFound
from dcp_mem.common.values import Segment
from dcp_mem.flushing.orphans import (
    collect_older_attempts,
    delete_attempt,
    delete_checkpoint,
    orphans,
)
from dcp_mem.format import names
from dcp_mem.format.manifest import Manifest
from dcp_mem.storage import LEAST_PART, Storage
from dcp_mem.storage.posix import PosixStorage
from dcp_mem.storage.routes import open_storage
from tests.support.checkpoints.jobs import Job, load_anew, save_two
from tests.support.checkpoints.manifests import make_manifest
from tests.support.processes.forks import forked, raised_by
from tests.support.storage.conformance import upload
from tests.support.storage.servers import BlobServer, S3Server, StorageRoot

OURS, OTHER = "11111111", "22222222"
KEY = "0123456789abcdef"


def _manifest(save_id: str, created: float, scope: str = names.COLLECTIVE) -> Manifest:
    segments = [
        Segment(rank=rank, node="node", file=names.segment_file(rank, save_id), nbytes=4)
        for rank in range(2)
    ]
    return make_manifest(
        segments, save_id=save_id, scope=scope, created=created, world_size=2, catalog=KEY
    )


def _put_attempt(
    storage: Storage, save_id: str, *, manifest: Manifest | None = None, catalog: str = KEY
) -> None:
    for rank in range(2):
        upload(storage, f"step-1/{names.segment_file(rank, save_id)}", b"data")
    storage.put(f"step-1/{names.stored_node_manifest(save_id, 'node')}", b"{}")
    if manifest is not None:
        storage.put(f"step-1/{names.catalog_file(catalog)}", b"catalog")
        storage.put(f"step-1/{names.stored_manifest(save_id)}", manifest.to_json())


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def storage(root: Path) -> Storage:
    return PosixStorage(str(root))


def _age(root: Path, words: str, seconds: float) -> None:
    for path in root.rglob("*"):
        if words in path.name:
            os.utime(path, (time.time() - seconds,) * 2)


def _left(root: Path) -> set[str]:
    return {path.name for path in root.rglob("*") if path.is_file()}


# -- older attempts --------------------------------------------------------------------------------


def test_an_attempt_that_its_manifest_calls_older_goes(root: Path, storage: Storage) -> None:
    _put_attempt(storage, OURS, manifest=_manifest(OURS, 5.0))
    _put_attempt(storage, OTHER, manifest=_manifest(OTHER, 4.0), catalog="f" * 16)
    _age(root, "catalog-ff", 10)
    collect_older_attempts(storage, _manifest(OURS, 5.0))
    assert not [name for name in _left(root) if OTHER in name or "ff" in name]
    assert len(_left(root)) == 5


def test_a_newer_attempt_is_left_alone(root: Path, storage: Storage) -> None:
    _put_attempt(storage, OURS, manifest=_manifest(OURS, 5.0))
    _put_attempt(storage, OTHER, manifest=_manifest(OTHER, 6.0), catalog="f" * 16)
    collect_older_attempts(storage, _manifest(OURS, 5.0))
    assert len(_left(root)) == 10


@pytest.mark.parametrize("age", [-100, 0, 100])
def test_an_attempt_without_a_manifest_is_older_if_all_of_it_was_put_before_ours(
    root: Path, storage: Storage, age: int
) -> None:
    _put_attempt(storage, OURS, manifest=_manifest(OURS, 5.0))
    _put_attempt(storage, OTHER)
    _age(root, OTHER, age)
    _age(root, f"__1_0-{OTHER}", 1000)  # a part of it is old in any case
    collect_older_attempts(storage, _manifest(OURS, 5.0))
    assert any(OTHER in name for name in _left(root)) == (age < 100)


def test_uploads_that_a_killed_agent_of_ours_broke_off_go_with_the_commit(
    root: Path, storage: Storage
) -> None:
    _put_attempt(storage, OURS, manifest=_manifest(OURS, 5.0))
    going = storage.upload(f"step-1/{names.segment_file(0, OURS)}", 3 * LEAST_PART)
    going.put_part(0, memoryview(bytes(LEAST_PART)), 0)
    assert storage.unfinished("step-1")
    collect_older_attempts(storage, _manifest(OURS, 5.0))
    assert storage.unfinished("step-1") == []
    assert len(_left(root)) == 5


def test_a_rank_that_saved_alone_collects_nothing_of_other_ranks(
    root: Path, storage: Storage
) -> None:
    _put_attempt(storage, OTHER)
    upload(storage, f"step-1/{names.segment_file(0, OURS)}", b"data")
    _age(root, OTHER, 100)
    collect_older_attempts(storage, _manifest(OURS, 5.0, scope=names.rank_scope(0)))
    assert {name for name in _left(root) if OTHER in name} == {
        names.segment_file(1, OTHER),
        names.stored_node_manifest(OTHER, "node").rpartition("/")[2],
    }


# -- what never became durable ---------------------------------------------------------------------


def test_leftovers_are_old_and_ours_and_of_no_committed_checkpoint(
    root: Path, storage: Storage
) -> None:
    _put_attempt(storage, OTHER)
    storage.put("step-1/notes.txt", b"somebody's")
    storage.put("step-2/.metadata", b"committed")
    upload(storage, f"step-2/{names.segment_file(0, OURS)}", b"data")
    storage.put("elsewhere/data.bin", b"somebody's")
    assert orphans(storage, 50) == []
    _age(root, "", 100)
    found = orphans(storage, 50)
    assert {one.key for one in found} == {
        f"step-1/{names.segment_file(0, OTHER)}",
        f"step-1/{names.segment_file(1, OTHER)}",
        f"step-1/{names.stored_node_manifest(OTHER, 'node')}",
    }
    for one in found:
        one.remove(storage)
    assert _left(root) == {"notes.txt", ".metadata", names.segment_file(0, OURS), "data.bin"}


def test_an_attempt_that_goes_on_is_no_leftover(root: Path, storage: Storage) -> None:
    _put_attempt(storage, OTHER)
    _age(root, "", 100)
    upload(storage, f"step-1/{names.segment_file(2, OTHER)}", b"data")
    assert orphans(storage, 50) == []


def _killed_puts(root: Path) -> None:
    """Leave what puts that were killed leave: of an attempt, its metadata and a root's own file."""
    own = root / "step-1" / names.OWN
    own.mkdir(parents=True, exist_ok=True)
    manifest = names.stored_manifest(OTHER)
    for file in (
        f"step-1/{manifest}.0123abcd.tmp",
        f"step-1/{manifest}.0123abcd.new",
        "step-1/.metadata.0123abcd.new.4567cdef.tmp",
        "step-1/notes.txt.0123abcd.tmp",
        "checkpointHistories.csv.0123abcd.tmp",
    ):
        (root / file).write_bytes(b"half")


@pytest.mark.parametrize("is_committed", [False, True])
def test_puts_that_were_killed_are_orphans_once_they_are_old(
    root: Path, storage: Storage, is_committed: bool
) -> None:
    if is_committed:
        storage.put("step-1/.metadata", b"committed")
    _killed_puts(root)
    assert orphans(storage, 50) == []
    _age(root, "", 100)
    found = orphans(storage, 50)
    assert {(one.key, one.is_unfinished) for one in found} == {
        (f"step-1/{names.stored_manifest(OTHER)}", True),
        ("step-1/.metadata", True),
    }
    for one in found:
        one.remove(storage)
    others = {"notes.txt.0123abcd.tmp", "checkpointHistories.csv.0123abcd.tmp"}
    assert _left(root) == (others | {".metadata"} if is_committed else others)
    assert not (root / "step-1" / names.OWN).exists()


def test_orphans_take_their_directories_with_them(root: Path, storage: Storage) -> None:
    _put_attempt(storage, OTHER, manifest=_manifest(OTHER, 4.0))
    _killed_puts(root)
    (root / "step-1" / "notes.txt.0123abcd.tmp").unlink()
    _age(root, "", 100)
    for one in orphans(storage, 50):
        one.remove(storage)
    assert not (root / "step-1").exists()


def test_deleting_an_attempt_removes_what_its_killed_puts_left(
    root: Path, storage: Storage
) -> None:
    _put_attempt(storage, OTHER, manifest=_manifest(OTHER, 4.0))
    _killed_puts(root)
    (root / "step-1" / "notes.txt.0123abcd.tmp").unlink()
    delete_attempt(storage, "step-1", OTHER)
    assert not (root / "step-1").exists()


def _break_off(options: StorageRoot) -> None:
    storage = open_storage(f"{options.url}/run", options.storage_options)
    with closing(storage.upload(f"step-1/{names.segment_file(0, OURS)}", 3 * LEAST_PART)) as going:
        going.put_part(0, memoryview(bytes(LEAST_PART)), 0)


@pytest.mark.parametrize("server", ["radosgw", "azurite"])  # moto dates all uploads back by years
@pytest.mark.servers
def test_uploads_that_nobody_finished_are_found_and_freed(
    server: str, request: pytest.FixtureRequest
) -> None:
    running: S3Server | BlobServer = request.getfixturevalue(server)
    with running.fresh_root() as place:
        _check_that_broken_off_uploads_are_freed(place)


def _check_that_broken_off_uploads_are_freed(place: StorageRoot) -> None:
    _break_off(place)
    url, options = f"{place.url}/run", place.storage_options
    assert dcp_mem.collect_orphans(url, storage_options=options) == []
    time.sleep(1.1)
    found = dcp_mem.collect_orphans(url, older_than=0, storage_options=options, dry_run=True)
    assert [(one.key, one.is_unfinished) for one in found] == [
        (f"step-1/{names.segment_file(0, OURS)}", True)
    ]
    assert dcp_mem.collect_orphans(url, older_than=0, storage_options=options) == found
    assert dcp_mem.collect_orphans(url, older_than=0, storage_options=options) == []


# -- deleting --------------------------------------------------------------------------------------


def _delete(job: Job, name: str) -> int:
    assert job.url is not None
    return dcp_mem.delete(job.url, name, storage_options=job.storage_options)


def _refused(job: Job, name: str) -> Exception | None:
    return raised_by(lambda: _delete(job, name))


def test_a_deleted_checkpoint_is_gone_and_the_others_are_not(
    storage_root: StorageRoot, memory_root: Path
) -> None:
    job = storage_root.job(memory_root)
    forked(save_two, job, "process")
    assert forked(_delete, job, "step-2") > 2400
    assert not [
        name for name in storage_root.names() if "step-2" in name and not name.endswith(".csv")
    ]
    job = dataclasses.replace(job, memory=str(memory_root / "other"))
    assert forked(load_anew, job).number == 1
    error = forked(_refused, job, "step-2")
    assert isinstance(error, CheckpointNotFound)
    assert "step-2" in str(error)
    assert error.available == ("step-1",)


def test_what_makes_it_a_checkpoint_goes_first(
    root: Path, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    _put_attempt(storage, OURS, manifest=_manifest(OURS, 5.0))
    storage.put("step-1/.metadata", b"committed")
    deleted: list[str] = []
    delete: Callable[[PosixStorage, str], None] = PosixStorage.delete

    def noted(storage: PosixStorage, key: str) -> None:
        deleted.append(key)
        delete(storage, key)

    monkeypatch.setattr(PosixStorage, "delete", noted)
    nbytes = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
    assert delete_checkpoint(storage, "step-1") == nbytes
    assert deleted[0] == "step-1/.metadata"
    assert not list(root.iterdir())
