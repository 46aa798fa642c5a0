"""Storage fails in the middle of a flush: the status says what to fix, then the flush goes on."""

import time
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from azure.storage.blob import AccountSasPermissions, ResourceTypes, generate_account_sas

from dcp_mem import FlushFailed, State
from tests.support.checkpoints.jobs import Job, wait_until
from tests.support.storage import ways
from tests.support.storage.file_systems import fill, mounted_tmpfs, needs_root
from tests.support.storage.proxy import Delay
from tests.support.storage.servers import StorageRoot
from tests.support.storage.ways import (
    LARGE,
    NAME,
    Way,
    assert_absent,
    assert_whole,
    load_state,
    put_into,
    start,
    status_of,
    without_memory,
    writing,
)

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("flush_quickly")]


def _has_taken_a_part(way: Way) -> bool:
    return any(one.status in (200, 201) for one in way.asked("part"))


@pytest.mark.parametrize("overwrite", [True, False])
def test_a_bucket_that_is_removed_midway_is_to_be_made_again(
    way: Way, memory_root: Path, large: Path, overwrite: bool
) -> None:
    put_into(memory_root, large)
    fs, bucket = way.direct.filesystem()
    way.proxy.fail(way.steps["part"], Delay(5.0), times=2, after=1)
    with writing(way.job(memory_root), overwrite=overwrite) as writer:
        start(writer)
        wait_until(lambda: _has_taken_a_part(way))
        for path in fs.find(bucket):  # the run's claim
            fs.rm_file(path)
        fs.rmdir(bucket)
        wait_until(lambda: status_of(writer).error)
        status = status_of(writer)
        assert (status.state, status.in_memory) == (State.FAILED, True)
        advice = "there is no such bucket or container. Create it, or correct the URL."
        assert status.error == f"storage {way.root.url}/run refused: {advice}"
        with pytest.raises(FlushFailed, match="Create it, or correct the URL"):
            writer.wait(timeout=30)
        fs.call_s3("create_bucket", Bucket=bucket) if hasattr(fs, "call_s3") else fs.mkdir(bucket)
        writer.wait(timeout=30)
    assert_whole(way, memory_root, 1, LARGE)


@pytest.mark.parametrize(
    ("status", "code"),
    [(400, "ExpiredToken"), (403, "ExpiredToken"), (400, "TokenRefreshRequired")],
)
def test_credentials_that_expire_midway_are_waited_for(
    s3_way: Way, memory_root: Path, large: Path, status: int, code: str
) -> None:
    put_into(memory_root, large)
    s3_way.proxy.fail(s3_way.steps["part"], s3_way.error(status, code), times=1_000_000, after=1)
    with writing(s3_way.job(memory_root)) as writer:
        start(writer)
        wait_until(lambda: status_of(writer).flush_attempts >= 2)
        told = status_of(writer)
        assert told.state is State.FAILED
        assert (
            "the credentials have expired. Renew them where they come from:"
            " the next try takes the new ones" in told.error
        )
        assert code in told.error
        assert_absent(s3_way, memory_root)
        stored = {one.target for one in s3_way.asked("part") if one.status == 200}
        s3_way.proxy.reset()
        writer.wait(timeout=30)
    assert len(stored) == 1
    assert len(s3_way.asked("part")) == 2, "the part that was up was sent again"
    assert_whole(s3_way, memory_root, 1, LARGE)


def _with_sas(root: StorageRoot, seconds: float) -> StorageRoot:
    """The root by way of a token that holds for so long."""
    parts = dict(
        part.split("=", 1) for part in root.storage_options["connection_string"].split(";")
    )
    token = generate_account_sas(
        account_name=parts["AccountName"],
        account_key=parts["AccountKey"],
        resource_types=ResourceTypes(service=True, container=True, object=True),
        permission=AccountSasPermissions(
            read=True, write=True, delete=True, list=True, add=True, create=True
        ),
        expiry=datetime.now(timezone.utc) + timedelta(seconds=seconds),
    )
    options = {
        "connection_string": f"BlobEndpoint={parts['BlobEndpoint']};SharedAccessSignature={token}"
    }
    return replace(root, storage_options=options)


def test_a_token_that_expires_midway_is_renewed_by_the_trainer(
    abfs_way: Way, memory_root: Path, large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_into(memory_root, large)
    # An attempt with the old token that ends after the new one was given would be taken for a
    # refusal of the new one.
    ways.flush_quickly(monkeypatch, longest_pause=60.0)
    held = 6.0
    old = abfs_way.job(memory_root, _with_sas(abfs_way.root, held))
    expired = time.monotonic() + held + 1  # Azurite counts in whole seconds
    abfs_way.proxy.fail(abfs_way.steps["part"], Delay(held + 2), times=2, after=1)
    with writing(old) as writer:
        start(writer)
        wait_until(lambda: _has_taken_a_part(abfs_way))
        assert time.monotonic() < expired, "the token was to hold for the first part"
        wait_until(lambda: status_of(writer).error)
        told = status_of(writer)
        assert (told.state, told.in_memory) == (State.FAILED, True)
        assert "credentials" in told.error
        assert "sig=" not in told.error
        stored = {
            one.target.partition("&se=")[0] for one in abfs_way.asked("part") if one.status == 201
        }
        abfs_way.proxy.reset()
        with writing(abfs_way.job(memory_root, _with_sas(abfs_way.root, 60))) as renewed:
            renewed.wait(timeout=30)
            assert status_of(renewed).error == ""
    assert len(stored) == 1
    assert len(abfs_way.asked("part")) == 2, "the part that was up was sent again"
    assert_whole(abfs_way, memory_root, 1, LARGE)


@needs_root
@pytest.mark.parametrize(
    "spare", [0, LARGE // 2, LARGE + 1000], ids=["at once", "in the segment", "behind the segment"]
)
def test_a_disk_that_fills_up_takes_the_checkpoint_once_there_is_room(
    memory_root: Path, tmp_path: Path, large: Path, spare: int
) -> None:
    put_into(memory_root, large)
    with mounted_tmpfs(tmp_path / "disk", "32m") as disk:
        job = Job(str(disk / "run"), str(memory_root))
        fill(disk / "others", spare)
        with writing(job) as writer:
            start(writer)
            wait_until(lambda: status_of(writer).flush_attempts >= 2)
            status = status_of(writer)
            assert (status.state, status.in_memory) == (State.FAILED, True)
            assert (
                "no space is left there. Free some, or raise the quota; the flush is tried again."
                in status.error
            )
            assert not (disk / "run" / NAME / ".metadata").exists()
            (disk / "others").unlink()
            wait_until(lambda: status_of(writer).state is State.DURABLE)
        load_state(without_memory(job), 1, LARGE)
        names = {
            path.name.partition("-")[0] for path in (disk / "run").rglob("*") if path.is_file()
        }
        assert names == {
            ".metadata",
            "__0_0",
            "catalog",
            "generation",
            "lock",
            "manifest",
            "node",
            "ticket",
            "checkpointHistories.csv",
            "recoveries.jsonl",
        }
