"""Buckets that are mounted as directories: s3fs over moto, and rclone without a cache of files."""

import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dcp_mem import CheckpointExists, FlushFailed, State
from tests.support.checkpoints.jobs import Job, save, wait_until
from tests.support.command import command
from tests.support.processes.forks import forked
from tests.support.storage import ways
from tests.support.storage.conformance import StorageConformance
from tests.support.storage.file_systems import mounted_rclone, mounted_s3fs, needs_root
from tests.support.storage.servers import S3Server, StorageRoot
from tests.support.storage.ways import LARGE, load_state, put_into, serve, without_memory

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.servers,
    pytest.mark.usefixtures("flush_quickly"),
    needs_root,
]


@pytest.fixture
def bucket(moto: S3Server) -> Iterator[StorageRoot]:
    with moto.fresh_root() as root:
        yield root


@pytest.fixture
def mount(
    tmp_path: Path, bucket: StorageRoot
) -> Callable[[], "contextlib.AbstractContextManager[int]"]:
    """Mounts the bucket on tmp_path/bucket; yields the process of s3fs."""

    @contextlib.contextmanager
    def mounted() -> Iterator[int]:
        directory = tmp_path / "bucket"
        with mounted_s3fs(
            directory, bucket.url.removeprefix("s3://"), bucket.storage_options
        ) as pid:
            yield pid
        directory.rmdir()

    return mounted


Mounted = Callable[[], "contextlib.AbstractContextManager[int]"]


@pytest.mark.variant
class TestMountedBucket(StorageConformance):
    @pytest.fixture
    def opened(self, mount: Mounted, tmp_path: Path) -> Iterator[Callable[[], Any]]:
        with mount():
            yield StorageRoot(str(tmp_path / "bucket" / "run")).storage

    @pytest.mark.skip("s3fs 1.90 dies where a file is removed that is open and was written to")
    def test_an_upload_that_was_given_up_leaves_nothing_to_pay_for(self) -> None: ...  # type: ignore[override]


def test_a_flush_into_a_mounted_bucket_is_whole_there_and_for_s3(
    mount: Mounted, tmp_path: Path, bucket: StorageRoot, memory_root: Path, large: Path
) -> None:
    put_into(memory_root, large)
    job = Job(str(tmp_path / "bucket" / "run"), str(memory_root))
    with mount():
        with ways.writing(job) as writer:
            writer.wait(timeout=120)
        load_state(without_memory(job), 1, LARGE)
    native = replace(job, url=f"{bucket.url}/run", storage_options=bucket.storage_options)
    load_state(without_memory(native), 1, LARGE)
    assert not [name for name in bucket.names() if name.endswith((".part", ".tmp", ".new"))]


def test_an_agent_killed_on_a_mounted_bucket_is_followed_by_one_that_ends_it(
    mount: Mounted, tmp_path: Path, memory_root: Path, large: Path
) -> None:
    put_into(memory_root, large)
    job = Job(str(tmp_path / "bucket" / "run"), str(memory_root))
    with mount():
        with pytest.raises(AssertionError, match="SIGKILL"):
            forked(serve, job, "flush.part:kill:2")
        assert isinstance(without_memory(job).recoverable(), list)
        assert forked(serve, job) == "durable"
        load_state(without_memory(job), 1, LARGE)


def test_a_mount_that_dies_in_a_flush_fails_it_until_it_is_mounted_again(
    mount: Mounted, tmp_path: Path, memory_root: Path, small: Path
) -> None:
    put_into(memory_root, small)
    job = Job(str(tmp_path / "bucket" / "run"), str(memory_root))
    with mount() as pid, ways.writing(job) as writer:
        os.kill(pid, signal.SIGKILL)
        ways.start(writer)
        wait_until(lambda: ways.status_of(writer).error != "")
        assert ways.status_of(writer).state is not State.DURABLE
    with mount(), ways.writing(job) as writer:
        writer.wait(timeout=120)
        load_state(without_memory(job), 1)


def test_a_mounted_bucket_promises_no_conditions_and_keeps_what_has_a_name(
    mount: Mounted, tmp_path: Path
) -> None:
    with mount():
        storage = StorageRoot(str(tmp_path / "bucket" / "run")).storage()
        storage.put("step-1/.metadata", b"one", create=True)
        with pytest.raises(CheckpointExists):
            storage.put("step-1/.metadata", b"two", create=True)
        assert storage.get("step-1/.metadata") == b"one"
        assert not storage.has_conditions()


def test_the_doctor_names_the_mount_and_the_url_to_use_instead(
    mount: Mounted, tmp_path: Path, memory_root: Path
) -> None:
    with mount():
        root = str(tmp_path / "bucket" / "run")
        told = command("doctor", root, "--memory-root", str(memory_root), "--json")
    checks = {one["name"]: one for one in json.loads(told.stdout)["checks"]}
    assert checks["storage mount"]["found"] == f"fuse.s3fs at {tmp_path / 'bucket'}"
    assert "s3://BUCKET/run" in checks["storage mount"]["advice"]
    assert checks["storage: conditions"]["found"].startswith("none")


def test_a_mount_that_takes_no_parts_in_any_order_is_refused_with_what_to_use_instead(
    tmp_path: Path, memory_root: Path
) -> None:
    below = tmp_path / "below"
    below.mkdir()
    job = Job(str(tmp_path / "mounted" / "run"), str(memory_root))
    with mounted_rclone(tmp_path / "mounted", below), ways.writing(job) as writer:
        save(writer, 1)
        with pytest.raises(FlushFailed, match=r"rclone.*the store's own URL"):
            writer.wait(timeout=60)
    # rclone removes behind what it has answered
    wait_until(lambda: not any(map(Path.is_file, below.rglob("*"))), "the trial to be removed")
