"""The Azure route: resumed uploads, no copies, credentials of any kind, real directories."""

import asyncio
import base64
import datetime as dt
import errno
import gzip
import io
import logging
import os
import re
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import azure.identity
import fsspec
import pytest
import requests.adapters
import urllib3
from azure.core.credentials import AccessToken, AzureSasCredential
from azure.core.exceptions import ClientAuthenticationError
from azure.storage.blob import (
    BlobServiceClient,
    ContainerSasPermissions,
    ContentSettings,
    generate_container_sas,
)

from dcp_mem import (
    CheckpointExists,
    CredentialsExpired,
    StorageKeyMissing,
    StorageRefused,
    StorageUnavailable,
)
from dcp_mem.format.checksums import checksum
from dcp_mem.storage import LEAST_PART, Storage
from dcp_mem.storage import azure as azure_route
from dcp_mem.storage.azure import AzureStorage
from dcp_mem.storage.fsspec_route import FsspecStorage
from dcp_mem.storage.retry import RetryingStorage, RetryPolicy
from dcp_mem.storage.routes import open_storage
from tests.support.storage.conformance import StorageConformance, upload
from tests.support.storage.fake_azure import (
    CONTAINER,
    Answer,
    Asked,
    Endpoint,
    HierarchicalAccount,
    answering,
    refusal,
)
from tests.support.storage.servers import BlobServer, StorageRoot

PARTS = 3
DATA = secrets.token_bytes(251) * ((PARTS - 1) * LEAST_PART // 251 + 7)
assert (PARTS - 1) * LEAST_PART < len(DATA) < PARTS * LEAST_PART


@pytest.fixture(scope="module")
def container(azurite: BlobServer) -> Iterator[StorageRoot]:
    with azurite.fresh_root() as root:
        yield root


@pytest.fixture
def root(container: StorageRoot) -> StorageRoot:
    return StorageRoot(f"{container.url}/{secrets.token_hex(8)}", container.storage_options)


@pytest.fixture
def storage(root: StorageRoot) -> AzureStorage:
    return AzureStorage(root.url, root.storage_options)


def _part(number: int, data: bytes = DATA) -> memoryview:
    return memoryview(data)[number * LEAST_PART : (number + 1) * LEAST_PART]


def _put(storage: Storage, *numbers: int, data: bytes = DATA, finish: bool = False) -> list[bool]:
    """Which of these parts were sent, by an upload of its own."""
    with closing(storage.upload("step-1/segment", len(data))) as going:
        sent = [
            going.put_part(number, _part(number, data), checksum(_part(number, data)))
            for number in numbers
        ]
        if finish:
            going.finish()
    return sent


# -- uploads ---------------------------------------------------------------------------------------


@pytest.mark.servers
def test_whoever_goes_on_with_an_upload_sends_what_is_missing(root: StorageRoot) -> None:
    assert _put(AzureStorage(root.url, root.storage_options), 2, 0) == [True, True]
    later = AzureStorage(root.url, root.storage_options)
    assert _put(later, 0, 1, 2, finish=True) == [False, True, False]
    assert later.get("step-1/segment") == DATA


def test_an_upload_whose_commit_was_answered_to_nobody_is_not_sent_again(
    storage: AzureStorage,
) -> None:
    _put(storage, 0, 1, 2, finish=True)
    assert _put(storage, 0, 1, 2, finish=True) == [False] * PARTS
    assert storage.get("step-1/segment") == DATA


def test_a_part_with_other_bytes_is_not_taken_for_the_one_that_is_there(
    storage: AzureStorage,
) -> None:
    other = b"other" + DATA[5:]
    _put(storage, 0, 1, 2, data=other)
    assert _put(storage, 0, 1, 2, finish=True) == [True, False, False]
    assert storage.get("step-1/segment") == DATA


def test_an_upload_whose_parts_were_dropped_meanwhile_can_be_begun_again(
    storage: AzureStorage,
) -> None:
    going = storage.upload("step-1/segment", len(DATA))
    for number in range(PARTS):
        going.put_part(number, _part(number), checksum(_part(number)))
    storage.drop_unfinished("step-1/segment")
    with pytest.raises(StorageUnavailable, match="InvalidBlockList"):
        going.finish()
    assert _put(storage, 0, 1, 2, finish=True) == [True] * PARTS


def test_unfinished_uploads_are_told_from_objects_empty_ones_too(storage: AzureStorage) -> None:
    storage.put("step-1/empty", b"")
    storage.put("step-1/.dcp_mem/full", b"1")
    _put(storage, 0)
    with closing(storage.upload("step-10/segment", len(DATA))) as going:  # no part of step-1
        going.put_part(0, _part(0), 0)
    assert [left.key for left in storage.unfinished("step-1")] == ["step-1/segment"]
    assert sorted(left.key for left in storage.unfinished("")) == [
        "step-1/segment",
        "step-10/segment",
    ]
    storage.drop_unfinished("step-1/segment")
    assert [left.key for left in storage.unfinished("")] == ["step-10/segment"]
    assert sorted(entry.name for entry in storage.ls("step-1")) == [".dcp_mem", "empty"]


def test_dropping_keeps_an_object_that_parts_were_put_for_again(storage: AzureStorage) -> None:
    storage.put("step-1/segment", b"whole")
    _put(storage, 0)
    storage.drop_unfinished("step-1/segment")
    assert storage.get("step-1/segment") == b"whole"


_MEASURED = """
import mmap, re, sys
from concurrent.futures import ThreadPoolExecutor
from dcp_mem.storage.azure import AzureStorage

def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10

NBYTES = 256 << 20
shared = memoryview(mmap.mmap(-1, NBYTES))  # not anonymous: it counts as RssShmem
shared[:: mmap.PAGESIZE] = b"x" * (NBYTES // mmap.PAGESIZE)
storage = AzureStorage(sys.argv[1], {"connection_string": sys.argv[2]})
storage.put("warm", b"1")
before, peak = anonymous(), 0

def note(_):
    global peak
    peak = max(peak, anonymous() - before)

going = storage.upload("large", NBYTES)
part = going.part_nbytes
def put(number):
    note(going.put_part(number, shared[number * part : (number + 1) * part], number))
def get(number):
    note(storage.read_into("large", number * part, [shared[number * part : (number + 1) * part]]))

with ThreadPoolExecutor(4) as pool:
    list(pool.map(put, range(NBYTES // part)))
    going.finish()
    print(peak)
    list(pool.map(get, range(NBYTES // part)))
print(peak, bytes(shared[: mmap.PAGESIZE + 1]) == b"x" + bytes(mmap.PAGESIZE - 1) + b"x")
"""


def test_neither_parts_nor_ranges_are_copied(root: StorageRoot) -> None:
    command = [sys.executable, "-c", _MEASURED, root.url, root.storage_options["connection_string"]]
    uploaded, both, is_same = subprocess.run(
        command, check=True, capture_output=True, text=True
    ).stdout.split()
    assert int(uploaded) < 64 << 20
    assert int(both) < 64 << 20
    assert is_same == "True"


_SENDING: dict[str, Callable[[Storage], object]] = {
    "upload": lambda storage: upload(storage, "step-1/segment", DATA[:LEAST_PART]),
    "put": lambda storage: storage.put("step-1/segment", DATA[:LEAST_PART]),
}


@pytest.mark.parametrize("send", _SENDING.values(), ids=_SENDING)
def test_sending_may_take_longer_than_connecting(send: Callable[[Storage], object]) -> None:
    with answering(lambda _: Answer(201), pause=0.15) as endpoint:
        options = {**endpoint.storage_options, "connection_timeout": 1}
        storage, start = AzureStorage(f"abfs://{CONTAINER}/job", options), time.monotonic()
        send(storage)
        assert time.monotonic() - start > 2


@pytest.mark.parametrize("there", [b"small", DATA], ids=["small", "large"])
def test_a_large_object_is_created_once(storage: AzureStorage, there: bytes) -> None:
    storage.put("step-1/.metadata", there, create=True)
    with pytest.raises(CheckpointExists):
        storage.put("step-1/.metadata", b"other" + DATA, create=True)
    assert storage.get("step-1/.metadata") == there
    storage.put("step-1/.metadata", DATA[1:])
    assert storage.get("step-1/.metadata") == DATA[1:]


# -- reading ---------------------------------------------------------------------------------------


def test_what_was_stored_as_compressed_is_read_as_it_lies_there(
    storage: AzureStorage, root: StorageRoot
) -> None:
    data = gzip.compress(b"0123456789")
    client = BlobServiceClient.from_connection_string(root.storage_options["connection_string"])
    name, _, prefix = root.url.removeprefix("abfs://").partition("/")
    with client:
        blob = client.get_blob_client(name, f"{prefix}/step-1/key")
        blob.upload_blob(data, content_settings=ContentSettings(content_encoding="gzip"))
    buffer = bytearray(100)
    assert storage.get("step-1/key") == data
    assert storage.read_into("step-1/key", 0, [memoryview(buffer)]) == len(data)
    assert buffer[: len(data)] == data


def _answering_reads(answer: Answer) -> Callable[[Asked], Answer]:
    return lambda _: answer


@pytest.mark.parametrize(
    "answer",
    [
        Answer(206, b"01234", {"Content-Range": "bytes 2-11/20"}, announced=10),
        Answer(206, b"0123456789", {"Content-Range": "bytes 3-12/20"}),
        Answer(200, b"0123456789"),
        Answer(206, b"0123", {"Content-Range": "bytes 2-11/20"}),
    ],
    ids=["cut off", "another range", "no range", "shorter than said"],
)
def test_an_answer_that_is_not_what_was_asked_for_is_an_error(answer: Answer) -> None:
    with answering(_answering_reads(answer)) as endpoint:
        storage = AzureStorage(f"abfs://{CONTAINER}/job", endpoint.storage_options)
        with pytest.raises(StorageUnavailable):
            storage.read_into("step-1/key", 2, [memoryview(bytearray(10))])


def test_an_object_that_breaks_off_is_an_error() -> None:
    with answering(_answering_reads(Answer(200, b"01234", announced=10))) as endpoint:
        storage = AzureStorage(f"abfs://{CONTAINER}/job", endpoint.storage_options)
        with pytest.raises(StorageUnavailable):
            storage.get("step-1/key")


def test_reads_use_their_connection_again(
    storage: AzureStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.put("key", b"0123456789" * 1000)
    made: list[object] = []
    connect = socket.create_connection

    def counted(*arguments: Any, **options: Any) -> socket.socket:
        made.append(arguments)
        return connect(*arguments, **options)

    monkeypatch.setattr("urllib3.util.connection.create_connection", counted)
    for _ in range(5):
        assert (
            storage.read_into("key", 5, [memoryview(bytearray(5000)), memoryview(bytearray(9000))])
            == 9995
        )
        assert storage.read_into("key", 5, [memoryview(bytearray(50))]) == 50
    assert made == []


def test_as_many_connections_are_kept_as_parts_are_in_flight(
    storage: AzureStorage, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "urllib3"), ThreadPoolExecutor(32) as pool:
        list(pool.map(lambda number: storage.put(f"key-{number}", b"1"), range(128)))
    assert caplog.records == []


class TestWithoutTheOperationBeneath(StorageConformance):
    """Reading where the SDK has become another."""

    @pytest.fixture
    def opened(self, root: StorageRoot, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Storage]:
        monkeypatch.setattr(azure_route, "_operation", lambda _: None)
        return lambda: AzureStorage(root.url, root.storage_options)


# -- accounts with a hierarchical namespace --------------------------------------------------------


@pytest.fixture
def account() -> HierarchicalAccount:
    return HierarchicalAccount()


@pytest.fixture
def hierarchical(account: HierarchicalAccount) -> Iterator[Endpoint]:
    with answering(account) as endpoint:
        yield endpoint


class TestHierarchicalAccount(StorageConformance):
    @pytest.fixture
    def opened(self, hierarchical: Endpoint) -> Callable[[], Storage]:
        return lambda: AzureStorage(f"abfs://{CONTAINER}/job", hierarchical.storage_options)


@pytest.fixture
def directories(hierarchical: Endpoint) -> AzureStorage:
    storage = AzureStorage(f"abfs://{CONTAINER}/job", hierarchical.storage_options)
    storage.put("step-1/.metadata", b"1")
    storage.put("step-1/.dcp_mem/manifest", b"1")
    storage.put("step-2/.metadata", b"2")
    return storage


def test_directories_go_with_the_last_file_in_them(
    directories: AzureStorage, account: HierarchicalAccount
) -> None:
    directories.delete("step-1/.metadata")
    directories.delete("step-1/.dcp_mem/manifest")
    assert account.directories == {"job", "job/step-2"}
    assert [entry.name for entry in directories.ls("")] == ["step-2"]
    directories.delete("step-2/.metadata")
    directories.delete("step-2/.metadata")
    assert directories.ls("") == []
    assert account.directories == {"job"}


def test_deleting_where_no_directory_is_says_nothing_of_the_account(
    hierarchical: Endpoint, account: HierarchicalAccount
) -> None:
    storage = AzureStorage(f"abfs://{CONTAINER}/job", hierarchical.storage_options)
    storage.delete("step-9/never")
    storage.put("step-1/a", b"1")
    storage.delete("step-1/a")
    assert account.directories == {"job"}


def test_deleting_a_directory_removes_nothing(
    directories: AzureStorage, account: HierarchicalAccount
) -> None:
    before = (set(account.files), set(account.directories))
    with pytest.raises(
        StorageRefused, match=r"OperationNotSupportedOnDirectory.*It is a directory"
    ):
        directories.delete("step-1")
    assert (set(account.files), set(account.directories)) == before


@pytest.mark.parametrize("create", [False, True])
def test_a_directory_in_the_way_is_refused(directories: AzureStorage, create: bool) -> None:
    with pytest.raises(StorageRefused, match=r"ResourceTypeMismatch.*There is a directory"):
        directories.put("step-1", b"1", create=create)
    with pytest.raises(StorageRefused, match="There is a directory"):
        upload(directories, "step-1", b"1")


def test_directories_are_no_unfinished_uploads(directories: AzureStorage) -> None:
    _put(directories, 0)
    (left,) = directories.unfinished("")
    assert left.key == "step-1/segment"
    # Azure tells no time of an upload, so an upload there never counts as old.
    assert abs(left.begun - time.time()) < 60


def test_in_a_flat_account_one_delete_asks_for_directories(
    storage: AzureStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    send = requests.adapters.HTTPAdapter.send

    def noted(self: Any, request: Any, **options: Any) -> Any:
        asked.append(request.method)
        return send(self, request, **options)

    for name in "ab":
        storage.put(f"step-1/{name}", b"1")
    monkeypatch.setattr(requests.adapters.HTTPAdapter, "send", noted)
    for name in "ab":
        storage.delete(f"step-1/{name}")
    assert asked == ["DELETE", "HEAD", "DELETE"]


def test_placeholders_of_directories_are_directories(
    storage: AzureStorage, root: StorageRoot
) -> None:
    name, _, prefix = root.url.removeprefix("abfs://").partition("/")
    with BlobServiceClient.from_connection_string(
        root.storage_options["connection_string"]
    ) as client:
        container = client.get_container_client(name)
        for marker in ("step-1", "step-1/.dcp_mem", "step-2"):
            container.upload_blob(f"{prefix}/{marker}", b"", metadata={"hdi_isfolder": "true"})
        container.upload_blob(f"{prefix}/step-3", b"")
        container.upload_blob(f"{prefix}/step-4/", b"")
    for key in ("step-1/a", "step-3/a", "step-4/a"):
        storage.put(key, b"1")
    listed = [(entry.name, entry.is_directory) for entry in storage.ls("")]
    assert sorted(listed) == [
        ("step-1", True),
        ("step-2", True),
        ("step-3", True),
        ("step-4", True),
    ]
    assert sorted(entry.name for entry in storage.ls("step-1")) == [".dcp_mem", "a"]
    assert [entry.name for entry in storage.ls("step-4")] == ["a"]


# -- credentials -----------------------------------------------------------------------------------


KEY = base64.b64encode(b"a key that nobody gave out").decode()
SAS = "sv=2024-11-04&sr=c&sp=racwdl&sig=aSignature%2Bof%2FsomeLength%3D"
HOST = "https://account.blob.core.windows.net"


class _Token:
    """A credential whose tokens last for no more than a request."""

    def __init__(self) -> None:
        self.given = 0

    def get_token(self, *scopes: str, **_: Any) -> AccessToken:
        assert scopes == ("https://storage.azure.com/.default",)
        self.given += 1
        return AccessToken(f"token-{self.given}", int(time.time()) + 1)


class _AwaitedToken(_Token):
    async def get_token(self, *scopes: str, **options: Any) -> AccessToken:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().get_token(*scopes, **options)

    async def close(self) -> None:
        return


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[requests.PreparedRequest]:
    """What goes out, to nobody: all keys are missing there."""
    out: list[requests.PreparedRequest] = []

    def send(_: Any, request: requests.PreparedRequest, **__: Any) -> requests.Response:
        out.append(request)
        response = requests.Response()
        response.status_code, response.request, response.url = 404, request, str(request.url)
        response.headers["x-ms-error-code"] = "BlobNotFound"
        response.raw = urllib3.HTTPResponse(io.BytesIO(), preload_content=False)
        return response

    monkeypatch.setattr(requests.adapters.HTTPAdapter, "send", send)
    return out


def _sent_by(
    sent: list[requests.PreparedRequest], options: dict[str, Any], url: str = "abfs://container/job"
) -> tuple[str, str]:
    """The URL and the Authorization of two requests; the same URL, the last Authorization."""
    storage = AzureStorage(url, options)
    for _ in range(2):
        with pytest.raises(StorageKeyMissing):
            storage.read_into("step-1/key", 0, [memoryview(bytearray(4))])
    assert len(sent) == 2
    assert sent[0].url == sent[1].url
    return str(sent[1].url), str(sent[1].headers.get("Authorization", ""))


@pytest.mark.parametrize(
    "options",
    [
        {"account_name": "account", "account_key": KEY},
        {"connection_string": f"AccountName=account;AccountKey={KEY}"},
    ],
    ids=["key", "connection string"],
)
def test_a_key_signs(sent: list[requests.PreparedRequest], options: dict[str, Any]) -> None:
    url, authorization = _sent_by(sent, options)
    assert url == f"{HOST}/container/job/step-1/key"
    assert authorization.startswith("SharedKey account:")


@pytest.mark.parametrize(
    "url",
    [
        "abfss://container@account.dfs.core.windows.net/job",
        "abfs://container@account.blob.core.windows.net/job",
    ],
)
def test_the_account_may_be_in_the_url(sent: list[requests.PreparedRequest], url: str) -> None:
    assert _sent_by(sent, {"account_key": KEY}, url)[0] == f"{HOST}/container/job/step-1/key"


def test_what_is_missing_is_taken_from_the_environment_once(
    sent: list[requests.PreparedRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as environment:
        environment.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
        environment.setenv("AZURE_STORAGE_ACCOUNT_KEY", KEY)
        storage = AzureStorage("az://container/job", {})
    with pytest.raises(StorageKeyMissing):
        storage.get("step-1/key")
    assert str(sent[0].headers["Authorization"]).startswith("SharedKey account:")


def test_another_host_serves_the_account(sent: list[requests.PreparedRequest]) -> None:
    options = {
        "account_name": "account",
        "account_key": KEY,
        "account_host": "account.blob.core.example",
    }
    assert _sent_by(sent, options)[0].startswith("https://account.blob.core.example/container/job/")


@pytest.mark.parametrize("token", [SAS, f"?{SAS}"])
def test_a_sas_token_goes_with_the_url(sent: list[requests.PreparedRequest], token: str) -> None:
    url, authorization = _sent_by(sent, {"account_name": "account", "sas_token": token})
    assert url == f"{HOST}/container/job/step-1/key?{SAS}"
    assert authorization == ""


@pytest.mark.parametrize("kind", [_Token, _AwaitedToken])
def test_a_credential_object_is_asked_again_when_its_token_is_over(
    sent: list[requests.PreparedRequest], kind: type[_Token]
) -> None:
    credential = kind()
    assert (
        _sent_by(sent, {"account_name": "account", "credential": credential})[1] == "Bearer token-2"
    )
    assert credential.given == 2


class _NoFile(_Token):
    """A credential whose token is read from a file that is missing."""

    def get_token(self, *_: str, **__: Any) -> AccessToken:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "/var/run/secrets/token")


class _NoIdentity(_Token):
    """A credential whose service knows no such identity, and says so by status 404."""

    def get_token(self, *_: str, **__: Any) -> AccessToken:
        error = ClientAuthenticationError("Identity not found")
        error.status_code = 404
        raise error


_ASKING: dict[str, Callable[[Storage], object]] = {
    "ls": lambda storage: storage.ls(""),
    "ls below": lambda storage: storage.ls("step-1"),
    "get": lambda storage: storage.get("step-1/key"),
    "read_into": lambda storage: storage.read_into("step-1/key", 0, [memoryview(bytearray(4))]),
    "delete": lambda storage: storage.delete("step-1/key"),
    "upload": lambda storage: storage.upload("step-1/key", len(DATA)),
}


@pytest.mark.parametrize("operation", _ASKING.values(), ids=_ASKING)
@pytest.mark.parametrize(
    ("kind", "said"), [(_NoFile, "/var/run/secrets/token"), (_NoIdentity, "Identity not found")]
)
def test_credentials_that_are_missing_are_no_missing_objects(
    kind: type[_Token], said: str, operation: Callable[[Storage], object]
) -> None:
    options = {"account_name": "account", "credential": kind()}
    storage = AzureStorage("abfs://container/job", options)
    with pytest.raises(StorageRefused, match=said):
        operation(storage)


def test_a_client_secret_makes_a_credential(
    sent: list[requests.PreparedRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def get_token_info(self: Any, *_: Any, **__: Any) -> AccessToken:
        asked.append(self)
        return AccessToken("of-the-client", int(time.time()) + 3600)

    monkeypatch.setattr(azure.identity.ClientSecretCredential, "get_token_info", get_token_info)
    monkeypatch.setattr(azure.identity.ClientSecretCredential, "get_token", get_token_info)
    options = {
        "account_name": "account",
        "client_id": "client",
        "client_secret": "secret",
        "tenant_id": "tenant",
    }
    assert _sent_by(sent, options)[1] == "Bearer of-the-client"
    assert len(asked) == 1


def test_anonymous_requests_are_not_signed(sent: list[requests.PreparedRequest]) -> None:
    assert _sent_by(sent, {"account_name": "account", "anon": True}) == (
        f"{HOST}/container/job/step-1/key",
        "",
    )


def test_requests_may_go_to_the_secondary_location(sent: list[requests.PreparedRequest]) -> None:
    options = {"account_name": "account", "account_key": KEY, "location_mode": "secondary"}
    assert _sent_by(sent, options)[0].startswith("https://account-secondary.blob.core.windows.net/")


class _Unlike(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """Serves the protocol, and is none of adlfs."""

    protocol = "abfs"
    cachable = False

    def cat_file(self, path: str, *_: Any, **__: Any) -> bytes:
        return path.encode()


def test_what_no_client_can_be_made_from_is_reached_through_fsspec(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules["fsspec.registry"].__dict__["_registry"], "abfs", _Unlike)
    with caplog.at_level(logging.INFO, "dcp_mem"):
        storage = open_storage("abfs://container/job", {})
    assert isinstance(storage._storage, FsspecStorage)
    assert storage.get("key") == b"container/job/key"
    assert "goes through fsspec, which takes more CPU and memory: _Unlike" in caplog.text


# -- errors ----------------------------------------------------------------------------------------


def _signed(container: StorageRoot, hours: float) -> str:
    client = BlobServiceClient.from_connection_string(
        container.storage_options["connection_string"]
    )
    with client:
        return generate_container_sas(
            str(client.account_name),
            container.url.removeprefix("abfs://"),
            account_key=client.credential.account_key,
            permission=ContainerSasPermissions(
                read=True, write=True, create=True, delete=True, list=True
            ),
            expiry=dt.datetime.now(dt.timezone.utc) + dt.timedelta(hours=hours),
        )


def _with_token(container: StorageRoot, token: str) -> dict[str, Any]:
    (endpoint,) = re.findall("BlobEndpoint=([^;]*)", container.storage_options["connection_string"])
    return {"connection_string": f"BlobEndpoint={endpoint};SharedAccessSignature={token}"}


def test_a_sas_token_serves_for_everything(container: StorageRoot) -> None:
    storage = AzureStorage(f"{container.url}/signed", _with_token(container, _signed(container, 1)))
    _put(storage, 0, 1, 2, finish=True)
    assert storage.get("step-1/segment") == DATA
    assert [entry.name for entry in storage.ls("step-1")] == ["segment"]
    assert storage.unfinished("") == []
    storage.delete("step-1/segment")


def test_a_sas_token_that_is_over_is_refused_by_a_server(container: StorageRoot) -> None:
    token = _signed(container, -1)
    storage = AzureStorage(f"{container.url}/signed", _with_token(container, token))
    with pytest.raises(StorageRefused) as failure:  # Azurite doesn't say that it is
        storage.get("step-1/key")
    assert token.rpartition("sig=")[2] not in str(failure.value)


_OPERATIONS: dict[str, Callable[[Storage], object]] = {
    "put": lambda storage: storage.put("step-1/key", b"1"),
    "create": lambda storage: storage.put("step-1/key", b"1", create=True),
    "upload": lambda storage: upload(storage, "step-1/key", b"1"),
    "get": lambda storage: storage.get("step-1/key"),
    "read_into": lambda storage: storage.read_into("step-1/key", 0, [memoryview(bytearray(4))]),
    "ls": lambda storage: storage.ls(""),
    "delete": lambda storage: storage.delete("step-1/key"),
    "unfinished": lambda storage: storage.unfinished(""),
    "drop_unfinished": lambda storage: storage.drop_unfinished("step-1/key"),
}
each_operation = pytest.mark.parametrize("operation", _OPERATIONS.values(), ids=_OPERATIONS)
_OVER = "Signature not valid in the specified time frame: Start [x] - Expiry [y] - Current [z]"


@each_operation
def test_credentials_that_are_over_are_told_from_wrong_ones(
    operation: Callable[[Storage], object],
) -> None:
    over = refusal(403, "AuthenticationFailed", "Server failed to authenticate the request.", _OVER)
    with (
        answering(lambda _: over) as endpoint,
        pytest.raises(CredentialsExpired, match="have expired"),
    ):
        operation(AzureStorage(f"abfs://{CONTAINER}/job", endpoint.storage_options))


@each_operation
@pytest.mark.parametrize("status", [500, 503])
def test_a_route_tries_once(operation: Callable[[Storage], object], status: int) -> None:
    busy = refusal(status, "ServerBusy")
    busy = Answer(busy.status, busy.body, {**busy.headers, "Retry-After": "7"})
    with answering(lambda _: busy) as endpoint:
        with pytest.raises(StorageUnavailable, match="ServerBusy") as failure:
            operation(AzureStorage(f"abfs://{CONTAINER}/job", endpoint.storage_options))
        assert failure.value.retry_after == 7
        assert len(endpoint.asked) == 1


@each_operation
def test_a_missing_role_is_named(operation: Callable[[Storage], object]) -> None:
    answer = refusal(403, "AuthorizationPermissionMismatch", "This request is not authorized.")
    with (
        answering(lambda _: answer) as endpoint,
        pytest.raises(StorageRefused, match="Give the identity a role"),
    ):
        operation(AzureStorage(f"abfs://{CONTAINER}/job", endpoint.storage_options))


def test_a_put_whose_answer_was_lost_can_be_repeated(account: HierarchicalAccount) -> None:
    lost = [True]

    def answer(asked: Asked) -> Answer:
        given = account(asked)
        if asked.query.get("comp") == "blocklist" and asked.method == "PUT" and lost:
            lost.clear()
            return Answer(500)
        return given

    with answering(answer) as endpoint:
        route = AzureStorage(f"abfs://{CONTAINER}/job", endpoint.storage_options)
        storage = RetryingStorage(
            route, RetryPolicy(first_pause_seconds=0.01, longest_pause_seconds=0.01)
        )
        _put(storage, 0, 1, 2, finish=True)
        assert storage.retries == 1
        assert storage.get("step-1/segment") == DATA


@pytest.mark.parametrize("given", ["option", "environment", "object"])
@each_operation
def test_a_signature_is_in_no_text(
    given: str, operation: Callable[[Storage], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        options: dict[str, Any] = {
            "account_name": "account",
            "account_host": f"127.0.0.1:{taken.getsockname()[1]}",
        }
        if given == "environment":
            monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", SAS)
        else:
            options |= (
                {"sas_token": SAS} if given == "option" else {"credential": AzureSasCredential(SAS)}
            )
        with pytest.raises(StorageUnavailable) as failure:
            operation(AzureStorage(f"abfs://{CONTAINER}/job", options))
    assert "aSignature" not in str(failure.value)
    assert "Connection refused" in str(failure.value)
