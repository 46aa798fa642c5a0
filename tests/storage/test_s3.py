"""The S3 route: how it resumes, what it sends, and where its credentials come from."""

import base64
import gc
import io
import json
import logging
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import aiobotocore.session
import psutil
import pytest

from dcp_mem import CredentialsExpired, StorageKeyMissing, StorageRefused, StorageUnavailable
from dcp_mem.format.checksums import checksum
from dcp_mem.storage import LEAST_PART, Source, Upload
from dcp_mem.storage.retry import RetryingStorage
from dcp_mem.storage.routes import open_storage
from dcp_mem.storage.s3 import S3Storage
from dcp_mem.storage.streams import Body, fill
from tests.support.storage.conformance import upload
from tests.support.storage.fake_s3 import FakeS3, Request, running_fake_s3
from tests.support.storage.servers import StorageRoot

NBYTES = 4 * LEAST_PART + 7
KEY = "step-1/segment"


@pytest.fixture
def fake() -> Iterator[FakeS3]:
    with running_fake_s3() as server:
        yield server


@pytest.fixture
def storage(fake: FakeS3) -> S3Storage:
    return S3Storage("s3://bucket/job", fake.storage_options)


@pytest.fixture
def data() -> bytes:
    return b"".join(bytes([number]) * LEAST_PART for number in range(1, 5)) + b"the end"


def _send(going: Upload, number: int, data: bytes) -> bool:
    part = memoryview(data)[number * LEAST_PART :][:LEAST_PART]
    return going.put_part(number, part, checksum(part))


def _send_rest(going: Upload, data: bytes) -> list[bool]:
    sent = [_send(going, number, data) for number in range(5)]
    going.finish()
    going.close()
    return sent


# -- copies, as AWS makes them ---------------------------------------------------------------------


def _stored(storage: S3Storage, data: bytes) -> Source:
    going = storage.upload("step-0/segment", NBYTES)
    _send_rest(going, data)
    return Source("step-0/segment", NBYTES, going.etag())


def test_copied_parts_are_verified_by_the_checksum_of_the_copy(
    fake: FakeS3, storage: S3Storage, data: bytes
) -> None:
    """Encrypted, they have other ETags than the parts that they were copied from."""
    going = storage.upload(KEY, NBYTES, _stored(storage, data))
    assert [going.copy_part(number, _crc_of(number, data)) for number in range(5)] == [True] * 5
    going.finish()
    assert fake.objects["/bucket/job/step-1/segment"] == data
    assert fake.last("PUT partNumber").headers["x-amz-copy-source-if-match"] == '"whole"'


def test_a_part_that_has_rotted_at_its_source_is_not_taken(
    fake: FakeS3, storage: S3Storage, data: bytes
) -> None:
    source = _stored(storage, data)
    fake.objects["/bucket/job/step-0/segment"] = bytes([data[0] ^ 1]) + data[1:]
    going = storage.upload(KEY, NBYTES, source)
    assert not going.copy_part(0, _crc_of(0, data))
    assert going.copy_part(1, _crc_of(1, data))
    _send(going, 0, data)
    assert [going.copy_part(number, _crc_of(number, data)) for number in (2, 3, 4)] == [True] * 3
    going.finish()
    assert fake.objects["/bucket/job/step-1/segment"] == data


def test_a_source_with_another_etag_is_not_copied_from(
    fake: FakeS3, storage: S3Storage, data: bytes
) -> None:
    source = replace(_stored(storage, data), etag="stale,a,b,c,d,e")
    assert not storage.upload(KEY, NBYTES, source).copy_part(0, _crc_of(0, data))


def test_parts_that_were_copied_before_a_kill_are_not_copied_again(
    fake: FakeS3, storage: S3Storage, data: bytes
) -> None:
    source = _stored(storage, data)
    killed = storage.upload(KEY, NBYTES, source)
    for number in (0, 3):
        killed.copy_part(number, _crc_of(number, data))
    before = fake.count("PUT partNumber")
    going = storage.upload(KEY, NBYTES, source)
    assert [going.copy_part(number, _crc_of(number, data)) for number in range(5)] == [True] * 5
    assert fake.count("PUT partNumber") == before + 3
    going.finish()
    assert fake.objects["/bucket/job/step-1/segment"] == data


def _crc_of(number: int, data: bytes) -> int:
    return checksum(memoryview(data)[number * LEAST_PART :][:LEAST_PART])


# -- after a kill ----------------------------------------------------------------------------------


def test_a_new_process_sends_only_the_parts_that_are_missing(fake: FakeS3, data: bytes) -> None:
    killed = S3Storage("s3://bucket/job", fake.storage_options).upload(KEY, NBYTES)
    for number in (0, 2, 4):
        _send(killed, number, data)
    going = S3Storage("s3://bucket/job", fake.storage_options).upload(KEY, NBYTES)
    assert _send_rest(going, data) == [False, True, False, True, False]
    assert fake.count("PUT partNumber") == 5
    assert fake.objects["/bucket/job/step-1/segment"] == data
    assert not fake.uploads


@pytest.mark.parametrize("server", ["moto", "radosgw"])
@pytest.mark.servers
def test_parts_are_known_by_their_md5_where_storage_lists_no_checksums(
    request: pytest.FixtureRequest, server: str, data: bytes
) -> None:
    with request.getfixturevalue(server).fresh_root() as root:
        url = f"{root.url}/job"
        killed = S3Storage(url, root.storage_options).upload(KEY, NBYTES)
        _send(killed, 0, data)
        _send(killed, 4, data)
        storage = S3Storage(url, root.storage_options)
        assert _send_rest(storage.upload(KEY, NBYTES), data) == [False, True, True, True, False]
        assert storage.get(KEY) == data
        assert storage.unfinished("") == []


def test_a_part_of_other_bytes_is_sent_again(fake: FakeS3, storage: S3Storage, data: bytes) -> None:
    killed = storage.upload(KEY, NBYTES)
    _send(killed, 0, bytes(NBYTES))
    _send(killed, 1, data)
    killed.put_part(4, memoryview(b"the"), checksum(b"the"))
    assert _send_rest(storage.upload(KEY, NBYTES), data) == [True, False, True, True, True]
    assert fake.objects["/bucket/job/step-1/segment"] == data


def test_the_newest_upload_of_that_very_key_is_gone_on_with(
    fake: FakeS3, storage: S3Storage, data: bytes
) -> None:
    fake.uploads = {
        f"upload-{number}": ("/bucket/job/step-1/segment", {}) for number in (1001, 1003, 1002)
    }
    fake.uploads["upload-1004"] = ("/bucket/job/step-1/segment-2", {})
    going = storage.upload(KEY, NBYTES)
    _send(going, 0, data)
    assert fake.last("PUT partNumber").query["uploadId"] == "upload-1003"
    assert fake.count("POST uploads") == 0


def test_an_upload_that_expects_other_checksums_is_left_alone(
    s3_root: StorageRoot, data: bytes
) -> None:
    plain = {
        **s3_root.storage_options,
        "config_kwargs": {"request_checksum_calculation": "when_required"},
    }
    storage = S3Storage(s3_root.url, s3_root.storage_options)
    _send(storage.upload(KEY, NBYTES), 0, data)
    assert _send(S3Storage(s3_root.url, plain).upload(KEY, NBYTES), 0, data)
    assert not _send(storage.upload(KEY, NBYTES), 0, data)
    assert [one.key for one in storage.unfinished("")] == [KEY, KEY]


@pytest.mark.parametrize(("status", "code"), [(403, "AccessDenied"), (501, "NotImplemented")])
def test_who_may_not_list_uploads_may_still_upload(
    fake: FakeS3, storage: S3Storage, data: bytes, status: int, code: str
) -> None:
    fake.refuse.append(("GET uploads", status, code))
    assert _send_rest(storage.upload(KEY, NBYTES), data) == [True] * 5
    assert fake.objects["/bucket/job/step-1/segment"] == data


def test_an_upload_that_another_process_finished_is_finished(
    fake: FakeS3, storage: S3Storage, data: bytes
) -> None:
    going, other = storage.upload(KEY, NBYTES), storage.upload(KEY, NBYTES)
    _send(going, 0, data)
    _send_rest(other, data)
    assert not _send(going, 1, data)
    going.finish()
    other.finish()
    assert fake.objects["/bucket/job/step-1/segment"] == data
    assert fake.count("POST uploadId") == 1


# S3 may answer 200 before it knows the result, to keep the connection.
@pytest.mark.parametrize("status", [500, 200])
def test_an_answer_to_finish_that_got_lost_is_asked_for_again(
    fake: FakeS3, storage: S3Storage, data: bytes, status: int
) -> None:
    going = storage.upload(KEY, NBYTES)
    for number in range(5):
        _send(going, number, data)
    fake.refuse.append(("POST uploadId", status, "InternalError"))
    with pytest.raises(StorageUnavailable, match="InternalError"):
        going.finish()
    (upload_id,) = fake.uploads
    fake.objects[fake.uploads.pop(upload_id)[0]] = data
    going.finish()


def test_an_upload_that_was_dropped_meanwhile_is_unavailable(
    fake: FakeS3, storage: S3Storage, data: bytes
) -> None:
    going = storage.upload(KEY, NBYTES)
    for number in range(5):
        _send(going, number, data)
    storage.drop_unfinished(KEY)
    fake.objects["/bucket/job/step-1/segment"] = data[:-1]
    for act in (lambda: _send(going, 0, data), going.finish):
        with pytest.raises(StorageUnavailable, match="was dropped meanwhile"):
            act()


def test_encrypted_parts_that_another_process_sent_again_are_taken(
    fake: FakeS3, storage: S3Storage, data: bytes
) -> None:
    going, other = storage.upload(KEY, NBYTES), storage.upload(KEY, NBYTES)
    for number in range(5):
        _send(going, number, data)
    _send(other, 2, data)
    with pytest.raises(StorageUnavailable, match="another process was sending parts"):
        going.finish()
    going.finish()
    assert fake.objects["/bucket/job/step-1/segment"] == data


def test_unfinished_uploads_are_found_at_any_depth_and_dropped_by_their_key(
    fake: FakeS3, storage: S3Storage
) -> None:
    keys = [
        "step-1/segment",
        "step-1/segment",
        "step-1/segment-2",
        "step-1/.dcp_mem/catalog",
        "step-10/segment",
    ]
    fake.uploads = {
        f"upload-000{number}": (f"/bucket/job/{key}", {}) for number, key in enumerate(keys)
    }
    assert [one.key for one in storage.unfinished("step-1")] == keys[:4]
    assert [one.key for one in storage.unfinished("")] == keys
    begun = datetime(2026, 1, 1, 0, 4, tzinfo=timezone.utc).timestamp()
    assert storage.unfinished("")[4].begun == begun
    storage.drop_unfinished("step-1/segment")
    assert [one.key for one in storage.unfinished("step-1")] == keys[2:4]


# -- bytes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [7, NBYTES], ids=["one part", "several parts"])
def test_bytes_that_changed_on_their_way_are_refused_by_the_server(
    fake: FakeS3, storage: S3Storage, data: bytes, nbytes: int
) -> None:
    going = storage.upload(KEY, nbytes)
    part = memoryview(data)[:nbytes][:LEAST_PART]
    with pytest.raises(StorageUnavailable, match="BadDigest"):
        going.put_part(0, part, checksum(part) ^ 1)
    assert not fake.objects
    assert going.put_part(0, part, checksum(part))


def test_a_put_carries_its_checksum(fake: FakeS3, storage: S3Storage) -> None:
    storage.put("step-1/.metadata", b"123456789", create=True)
    headers = fake.last("PUT").headers
    # The checksum is that of RFC 3720's example.
    assert base64.b64decode(headers["x-amz-checksum-crc32c"]).hex() == "e3069283"
    assert headers["if-none-match"] == "*"
    assert not re.search("sha256:", str(headers))


def test_parts_are_signed_without_hashing_them(
    fake: FakeS3, storage: S3Storage, data: bytes
) -> None:
    _send(storage.upload(KEY, NBYTES), 0, data)
    assert fake.last("PUT partNumber").headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"


def test_who_wants_parts_hashed_gets_it(fake: FakeS3) -> None:
    options = {**fake.storage_options, "config_kwargs": {"s3": {"payload_signing_enabled": True}}}
    upload(S3Storage("s3://bucket/job", options), KEY, b"12345")
    assert re.fullmatch("[0-9a-f]{64}", fake.last("PUT").headers["x-amz-content-sha256"])


def test_a_body_is_read_piece_by_piece_by_whoever_hashes_it(data: bytes) -> None:
    body, read = Body(memoryview(data)), bytearray()
    while piece := body.read(10_007):
        read += piece
    assert read == data
    body.seek(0)
    # The AWS CRT, with which botocore signs if it is installed, reads in this way.
    into = bytearray(len(data) + 1)
    assert body.readinto(into) == len(data)
    assert into[:-1] == data


def test_stores_that_take_no_checksums_get_none(fake: FakeS3, data: bytes) -> None:
    options = {
        **fake.storage_options,
        "config_kwargs": {"request_checksum_calculation": "when_required"},
    }
    storage = S3Storage("s3://bucket/job", options)
    storage.put("step-1/.metadata", b"1")
    going = storage.upload(KEY, NBYTES)
    _send(going, 0, data)
    assert not any("checksum" in name for request in fake.requests for name in request.headers)


def test_only_the_first_request_waits_for_a_go_ahead(fake: FakeS3, storage: S3Storage) -> None:
    fake.gives_go_ahead = False
    upload(storage, KEY, b"12345")
    assert fake.last("PUT").headers["expect"] == "100-continue"
    upload(storage, KEY, b"123456")
    assert "expect" not in fake.last("PUT").headers
    assert fake.objects["/bucket/job/step-1/segment"] == b"123456"


def test_a_part_may_take_longer_than_connecting_may(fake: FakeS3) -> None:
    options = {**fake.storage_options, "config_kwargs": {"connect_timeout": 3}}
    storage = S3Storage("s3://bucket/job", options)
    storage.ls("")
    fake.seconds_per_mib = 0.25  # of which a send takes 2
    data = bytes(16 << 20)
    with ThreadPoolExecutor(2) as pool:  # of two, one has to connect
        list(pool.map(lambda key: upload(storage, key, data), ("a", "b")))
    assert fake.objects == {"/bucket/job/a": data, "/bucket/job/b": data}


@pytest.mark.parametrize("cut", [0, 3, 99_999])
def test_a_body_that_breaks_off_is_unavailable_and_the_next_one_whole(
    fake: FakeS3, storage: S3Storage, cut: int
) -> None:
    data = bytes(range(250)) * 400
    fake.objects["/bucket/job/key"] = data
    buffers = [memoryview(bytearray(60_000)), memoryview(bytearray(60_000))]
    fake.cut = cut
    with pytest.raises(StorageUnavailable, match=rf"broke off after {cut} of 100000 bytes"):
        storage.read_into("key", 0, buffers)
    with pytest.raises(StorageUnavailable):
        storage.get("key")
    fake.cut = -1
    assert storage.read_into("key", 0, buffers) == len(data)
    assert b"".join(buffers)[: len(data)] == data


def test_reads_go_over_one_connection(fake: FakeS3, storage: S3Storage) -> None:
    fake.objects["/bucket/job/key"] = bytes(100_000)
    for offset in range(10):
        assert storage.read_into("key", offset, [memoryview(bytearray(50_000))]) == 50_000
    assert len(_connections(fake)) == 1


def test_no_connection_outlives_its_storage(fake: FakeS3) -> None:
    storage = S3Storage("s3://bucket/job", fake.storage_options)
    storage.put("key", b"1")
    assert _connections(fake)
    del storage
    gc.collect()
    assert not _connections(fake)


def _connections(fake: FakeS3) -> list[Any]:
    port = int(fake.endpoint.rpartition(":")[2])
    connections = psutil.Process().net_connections("tcp")
    return [
        one
        for one in connections
        if one.raddr and one.raddr.port == port and one.status == "ESTABLISHED"
    ]


def test_bytes_from_elsewhere_in_the_object_are_not_taken(fake: FakeS3, storage: S3Storage) -> None:
    fake.objects["/bucket/job/key"], fake.ignores_ranges = b"0123456789", True
    buffer = memoryview(bytearray(4))
    with pytest.raises(StorageUnavailable, match="bytes from 3 on were asked for, others came"):
        storage.read_into("key", 3, [buffer])
    assert storage.read_into("key", 0, [buffer]) == 4
    assert bytes(buffer) == b"0123"


def test_a_body_of_an_unknown_kind_is_read_all_the_same() -> None:
    buffers = [bytearray(3), bytearray(0), bytearray(4)]
    assert fill(io.BytesIO(b"0123456789"), [memoryview(buffer) for buffer in buffers], 6) == 6
    assert buffers == [b"012", b"", b"345\0"]
    assert fill(io.BytesIO(b"01"), [memoryview(bytearray(4))], 4) == 2


_UPLOAD_256_MIB = """
    import mmap, sys, threading
    from concurrent.futures import ThreadPoolExecutor
    from dcp_mem.storage import LEAST_PART
    from dcp_mem.storage.s3 import S3Storage

    def anonymous():
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) << 10

    def watch():
        global most
        while not done.wait(0.005):
            most = max(most, anonymous())

    storage = S3Storage("s3://bucket/job", {"key": "k", "secret": "s", "endpoint_url": sys.argv[2]})
    with open(sys.argv[1], "rb") as file:
        memory = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
    storage.put("first", b"1")
    going = storage.upload("segment", len(memory))
    before = most = anonymous()
    done = threading.Event()
    watching = threading.Thread(target=watch)
    watching.start()
    with ThreadPoolExecutor(8) as pool:
        parts = range(0, len(memory), LEAST_PART)
        list(pool.map(lambda at: going.put_part(at // LEAST_PART, memory[at : at + LEAST_PART], \
0xC8E11F2D), parts))
    done.set()
    watching.join()
    print(most - before)
"""


def test_an_upload_takes_no_memory(fake: FakeS3, memory_root: Path) -> None:
    segment = memory_root / "segment"
    segment.touch(0o600)
    with segment.open("wb") as file:
        file.truncate(256 << 20)
    part = memoryview(bytes(LEAST_PART))
    script = textwrap.dedent(_UPLOAD_256_MIB).replace("0xC8E11F2D", str(checksum(part)))
    command = [sys.executable, "-c", script, str(segment), fake.endpoint]
    grown = int(
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    )
    assert fake.count("PUT partNumber") == 16
    assert grown < 64 << 20


# -- where requests go, and who signs them ---------------------------------------------------------


def _signer(request: Request) -> str:
    """The key that a request was signed with, "" for none."""
    match = re.search(r"Credential=([^/]*)/", request.headers.get("authorization", ""))
    return match[1] if match else ""


def test_a_profile_is_taken_from_the_files_of_the_environment(
    fake: FakeS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, credentials = tmp_path / "config", tmp_path / "credentials"
    config.write_text(f"[profile training]\nregion = eu-west-7\nendpoint_url = {fake.endpoint}\n")
    credentials.write_text(
        "[training]\naws_access_key_id = AKIDPROFILE\naws_secret_access_key = s\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    storage = S3Storage("s3://bucket/job", {"profile": "training"})
    monkeypatch.undo()  # an agent lends a job its environment only now and then
    config.unlink()
    credentials.unlink()
    storage.put("key", b"1")
    assert _signer(fake.last("PUT")) == "AKIDPROFILE"
    assert "/eu-west-7/s3/" in fake.last("PUT").headers["authorization"]


def test_a_profile_that_nobody_wrote_is_refused_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(StorageRefused, match=r"config profile .training. could not be found"):
        S3Storage("s3://bucket/job", {"profile": "training"})


def test_a_token_file_that_is_missing_is_no_missing_object(
    fake: FakeS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(variable, raising=False)
    for variable in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(variable, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/training")
    options = {"endpoint_url": fake.endpoint, "client_kwargs": {"region_name": "eu-west-1"}}
    with pytest.raises(StorageRefused, match=str(tmp_path / "token")):
        S3Storage("s3://bucket/job", options).get("step-1/key")


def test_credentials_that_expire_are_asked_for_again(
    fake: FakeS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # botocore renews credentials this long before they expire.
    soon = (datetime.now(timezone.utc) + timedelta(minutes=2)).isoformat()
    given = {"Version": 1, "SecretAccessKey": "s", "SessionToken": "t", "Expiration": soon}
    helper = tmp_path / "helper.py"
    helper.write_text(
        f"from pathlib import Path\nimport json\ncalls = Path({str(tmp_path / 'calls')!r})\n"
        "count = len(calls.read_text()) + 1 if calls.exists() else 1\n"
        "calls.write_text('x' * count)\n"
        f"print(json.dumps({{**{json.dumps(given)}, 'AccessKeyId': f'AKID{{count}}'}}))\n"
    )
    config = tmp_path / "config"
    config.write_text(f"[default]\ncredential_process = {sys.executable} {helper}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    storage = S3Storage("s3://bucket/job", {"endpoint_url": fake.endpoint})
    monkeypatch.undo()
    for _ in range(2):
        storage.put("key", b"1")
    first, second = (_signer(request) for request in fake.requests)
    assert first != second
    assert int(second.removeprefix("AKID")) > int(first.removeprefix("AKID"))
    assert fake.last("PUT").headers["x-amz-security-token"] == "t"


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"key": "AKIDUNUSED", "secret": "s"},
        {"client_kwargs": {"aws_access_key_id": "AKIDUNUSED"}},
    ],
)
def test_anonymous_requests_are_not_signed(fake: FakeS3, keys: dict[str, Any]) -> None:
    S3Storage("s3://bucket/job", {"anon": True, "endpoint_url": fake.endpoint, **keys}).put(
        "key", b"1"
    )
    assert _signer(fake.last("PUT")) == ""


@pytest.mark.parametrize(
    "where", ["endpoint_url", "client_kwargs", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"]
)
def test_the_endpoint_is_found_where_s3fs_finds_it(
    fake: FakeS3, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    options: dict[str, Any] = {
        "client_kwargs": {"aws_access_key_id": "AKIDNESTED", "aws_secret_access_key": "s"}
    }
    if where == "endpoint_url":
        options[where] = fake.endpoint
    elif where == "client_kwargs":
        options[where]["endpoint_url"] = fake.endpoint
    else:
        monkeypatch.setenv(where, fake.endpoint)
    storage = S3Storage("s3a://bucket/job", options)
    monkeypatch.undo()
    storage.put("key", b"1")
    assert fake.objects == {"/bucket/job/key": b"1"}
    assert _signer(fake.last("PUT")) == "AKIDNESTED"


def test_extra_arguments_go_with_the_requests_that_take_them(fake: FakeS3, data: bytes) -> None:
    extra = {
        "ServerSideEncryption": "aws:kms",
        "SSEKMSKeyId": "arn:key",
        "ACL": "bucket-owner-full-control",
    }
    options = {**fake.storage_options, "s3_additional_kwargs": extra, "requester_pays": True}
    storage = S3Storage("s3://bucket/job", options)
    storage.put("key", b"1")
    storage.get("key")
    storage.ls("")
    _send(storage.upload(KEY, NBYTES), 0, data)
    for operation in ("PUT", "POST uploads"):
        headers = fake.last(operation).headers
        assert headers["x-amz-server-side-encryption-aws-kms-key-id"] == "arn:key"
        assert headers["x-amz-acl"] == "bucket-owner-full-control"
    assert all(request.headers["x-amz-request-payer"] == "requester" for request in fake.requests)
    assert "x-amz-acl" not in fake.last("PUT partNumber").headers


def test_a_first_put_follows_its_bucket_into_another_region(
    fake: FakeS3, storage: S3Storage
) -> None:
    fake.redirects_to = "eu-west-7"
    # Retry: on a busy machine the redirect may take longer than botocore waits.
    patient = RetryingStorage(storage)
    upload(patient, KEY, b"12345")
    upload(patient, KEY, b"123456")
    assert fake.objects["/bucket/job/step-1/segment"] == b"123456"


@pytest.mark.parametrize(
    ("url", "bucket", "path"),
    [
        ("s3://bucket", "bucket", "key"),
        ("s3://bucket/a/b/", "bucket", "a/b/key"),
        ("s3://bucket//a", "bucket", "/a/key"),
        ("s3://fast--use1-az4--x-s3/a", "fast--use1-az4--x-s3", "a/key"),
        (
            "s3://arn:aws:s3:us-west-2:123456789012:accesspoint/mine/a/b",
            "arn:aws:s3:us-west-2:123456789012:accesspoint/mine",
            "a/b/key",
        ),
    ],
)
def test_urls_name_what_they_name_to_s3fs(fake: FakeS3, url: str, bucket: str, path: str) -> None:
    storage = S3Storage(url, fake.storage_options)
    assert (storage._client.bucket, storage._path("key")) == (bucket, path)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"session": aiobotocore.session.AioSession()}, "a session= of aiobotocore's"),
        (
            {"config_kwargs": {"connector_args": {"keepalive_timeout": 5}}},
            "config_kwargs: .*connector_args",
        ),
    ],
)
def test_what_only_s3fs_can_use_goes_through_s3fs(
    fake: FakeS3, caplog: pytest.LogCaptureFixture, options: dict[str, Any], reason: str
) -> None:
    caplog.set_level(logging.INFO, "dcp_mem")
    storage = open_storage("s3://bucket/job", {**fake.storage_options, **options})
    storage.put("key", b"1")
    assert fake.objects == {"/bucket/job/key": b"1"}
    assert re.search(f"goes through fsspec.*{reason}", caplog.text)


# -- what goes wrong -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "code", "kind", "advice"),
    [
        (400, "ExpiredToken", CredentialsExpired, "Renew them where they come from"),
        (
            403,
            "InvalidAccessKeyId",
            StorageRefused,
            "that the credentials may read and write there",
        ),
        (
            403,
            "SignatureDoesNotMatch",
            StorageRefused,
            "that the credentials may read and write there",
        ),
        (403, "RequestTimeTooSkewed", StorageRefused, "Set this machine's clock"),
        (403, "QuotaExceeded", StorageRefused, "Raise the quota"),
        (404, "NoSuchBucket", StorageRefused, "Create it, or correct the URL"),
        (501, "NotImplemented", StorageRefused, "request_checksum_calculation"),
        (409, "ConditionalRequestConflict", StorageUnavailable, "ConditionalRequestConflict"),
        (503, "SlowDown", StorageUnavailable, "SlowDown"),
    ],
)
def test_refusals_say_what_to_do(
    fake: FakeS3, storage: S3Storage, status: int, code: str, kind: type[Exception], advice: str
) -> None:
    fake.refuse += [("PUT", status, code), ("GET", status, code)]
    with pytest.raises(kind, match=advice) as failure:
        storage.put("key", b"1", create=True)
    assert type(failure.value) is kind
    with pytest.raises(kind, match=advice):
        storage.read_into("key", 0, [memoryview(bytearray(4))])
    with pytest.raises(StorageKeyMissing):
        storage.get("key")


def test_a_marker_of_a_directory_is_no_file_in_it(s3_root: StorageRoot) -> None:
    storage = S3Storage(s3_root.url, s3_root.storage_options)
    with closing(storage.upload("step-1/", 0)) as going:
        going.put_part(0, memoryview(b""), 0)
    storage.put("step-1/.metadata", b"1")
    assert [(entry.name, entry.is_directory) for entry in storage.ls("step-1")] == [
        (".metadata", False)
    ]
    assert [(entry.name, entry.is_directory) for entry in storage.ls("")] == [("step-1", True)]
