"""Every route keeps the promises of `Storage`; each names storage that is missing or closed."""

import base64
import builtins
import copy
import errno
import os
import re
import secrets
import shutil
import socket
import stat
import sys
import traceback
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import fsspec
import pytest

from dcp_mem import (
    CheckpointExists,
    DcpMemError,
    StorageKeyMissing,
    StorageRefused,
    StorageUnavailable,
)
from dcp_mem.storage import LEAST_PART, Storage, part_count, part_nbytes
from dcp_mem.storage.azure import AzureStorage
from dcp_mem.storage.fsspec_route import FsspecStorage
from dcp_mem.storage.listing import checkpoint_names
from dcp_mem.storage.posix import PosixStorage
from dcp_mem.storage.retry import RetryingStorage
from dcp_mem.storage.routes import open_storage
from dcp_mem.storage.s3 import S3Storage
from tests.support.storage.conformance import StorageConformance, upload
from tests.support.storage.file_systems import fill, mounted_tmpfs
from tests.support.storage.servers import BlobServer, GoogleServer, S3Server, StorageRoot

# What adlfs hands to aiohttp; it is the flush's own thread that waits.
pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning")


class TestLocalDirectory(StorageConformance):
    @pytest.fixture
    def opened(self, tmp_path: Path) -> Callable[[], Storage]:
        return lambda: PosixStorage(str(tmp_path / "absent" / "root"))


class TestFileSystemThatClones(StorageConformance):
    @pytest.fixture
    def opened(self, xfs: Path) -> Iterator[Callable[[], Storage]]:
        root = str(xfs / secrets.token_hex(8))
        yield lambda: PosixStorage(root)
        shutil.rmtree(root, ignore_errors=True)  # it is small


@pytest.fixture(scope="module")
def container(azurite: BlobServer) -> Iterator[StorageRoot]:
    """A container for all tests of this file: making one takes longer than most of them."""
    with azurite.fresh_root() as root:
        yield root


@pytest.fixture(scope="module")
def bucket(moto: S3Server) -> Iterator[StorageRoot]:
    """A bucket for all tests of this file."""
    with moto.fresh_root() as root:
        yield root


@pytest.fixture(scope="module")
def ceph_bucket(radosgw: S3Server) -> Iterator[StorageRoot]:
    """A bucket for all tests of this file, on radosgw."""
    with radosgw.fresh_root() as root:
        yield root


class TestAzureBlob(StorageConformance):
    @pytest.fixture
    def opened(self, container: StorageRoot) -> Callable[[], Storage]:
        url = f"{container.url}/{secrets.token_hex(8)}"
        return lambda: FsspecStorage(url, container.storage_options)


class TestAzureRoute(StorageConformance):
    @pytest.fixture
    def opened(self, container: StorageRoot) -> Callable[[], Storage]:
        url = f"{container.url}/{secrets.token_hex(8)}"
        return lambda: AzureStorage(url, container.storage_options)


class TestS3(StorageConformance):
    @pytest.fixture
    def opened(self, bucket: StorageRoot) -> Callable[[], Storage]:
        url = f"{bucket.url}/{secrets.token_hex(8)}"
        return lambda: FsspecStorage(url, bucket.storage_options)


class TestRadosgw(StorageConformance):
    @pytest.fixture
    def opened(self, ceph_bucket: StorageRoot) -> Callable[[], Storage]:
        url = f"{ceph_bucket.url}/{secrets.token_hex(8)}"
        return lambda: FsspecStorage(url, ceph_bucket.storage_options)


class TestS3Route(StorageConformance):
    tells_when_uploads_began = False  # moto says 2010, of each

    @pytest.fixture
    def opened(self, bucket: StorageRoot) -> Callable[[], Storage]:
        url = f"{bucket.url}/{secrets.token_hex(8)}"
        # No retries here: moto answers 500 when one part comes twice at once.
        return lambda: open_storage(url, bucket.storage_options)


class TestRadosgwRoute(StorageConformance):
    @pytest.fixture
    def opened(self, ceph_bucket: StorageRoot) -> Callable[[], Storage]:
        url = f"{ceph_bucket.url}/{secrets.token_hex(8)}"
        return lambda: S3Storage(url, ceph_bucket.storage_options)


@pytest.fixture(scope="module")
def gs_bucket(google: GoogleServer) -> Iterator[StorageRoot]:
    """A bucket for all tests of this file, in Google's dialect."""
    with google.fresh_root() as root:
        yield root


class TestGoogleRoute(StorageConformance):
    tells_when_uploads_began = False  # moto says 2010, of each

    @pytest.fixture
    def opened(self, gs_bucket: StorageRoot) -> Callable[[], Storage]:
        url = f"{gs_bucket.url}/{secrets.token_hex(8)}"
        return lambda: open_storage(url, gs_bucket.storage_options)


class TestMemoryFileSystem(StorageConformance):
    @pytest.fixture
    def opened(self) -> Iterator[Callable[[], Storage]]:
        root = f"memory://{secrets.token_hex(8)}"
        yield lambda: FsspecStorage(f"{root}/job", {})
        fs, path = fsspec.url_to_fs(root)
        if fs.exists(path):
            fs.rm(path, recursive=True)


# -- parts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nbytes", "of_part", "count"),
    [
        (0, 16 << 20, 1),
        (1, 16 << 20, 1),
        (16 << 20, 16 << 20, 1),
        ((16 << 20) + 1, 16 << 20, 2),
        (256 << 20, 32 << 20, 8),
        (1 << 30, 64 << 20, 16),
        (500 << 30, 64 << 20, 8000),
        (1 << 40, 117 << 20, 8963),
    ],
)
def test_parts_are_few_enough_for_any_store_and_enough_for_several_threads(
    nbytes: int, of_part: int, count: int
) -> None:
    assert part_nbytes(nbytes) == of_part
    assert part_count(nbytes, of_part) == count


# -- what goes wrong -------------------------------------------------------------------------------


OPERATIONS: dict[str, Callable[[Storage], object]] = {
    "put": lambda storage: storage.put("step-1/key", b"12345"),
    "create": lambda storage: storage.put("step-1/key", b"12345", create=True),
    "upload": lambda storage: upload(storage, "step-1/key", b"12345"),
    "get": lambda storage: storage.get("step-1/key"),
    "read_into": lambda storage: storage.read_into("step-1/key", 0, [memoryview(bytearray(5))]),
    "ls": lambda storage: storage.ls(""),
    "delete": lambda storage: storage.delete("step-1/key"),
}
SECRET = "and+this/is+no+secret"
WRITING = ("put", "create", "upload")

each_operation = pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)


def _failure(act: Callable[[], object], kind: type[DcpMemError], *secrets_of_it: str) -> str:
    """Return the text of the error that `act` raises; check that it holds no secret."""
    with pytest.raises(kind) as failure:
        act()
    shown = [str(failure.value), repr(failure.value), *traceback.format_exception(failure.value)]
    for secret in secrets_of_it:
        assert not any(secret in text for text in shown)
    return str(failure.value)


@pytest.fixture(params=[pytest.param("container", id="abfs"), pytest.param("bucket", id="s3")])
def remote_root(request: pytest.FixtureRequest) -> StorageRoot:
    root: StorageRoot = request.getfixturevalue(request.param)
    return root


@each_operation
@pytest.mark.servers
def test_a_missing_bucket_or_container_is_refused(
    remote_root: StorageRoot, operation: Callable[[Storage], object]
) -> None:
    protocol = remote_root.url.partition("://")[0]
    storage = open_storage(f"{protocol}://no-such-place/job", remote_root.storage_options)
    text = _failure(lambda: operation(storage), StorageRefused)
    assert f"{protocol}://no-such-place/job" in text
    assert "there is no such bucket or container. Create it" in text


@each_operation
def test_a_wrong_azure_key_is_refused(
    container: StorageRoot, operation: Callable[[Storage], object]
) -> None:
    key = base64.b64encode(
        b"a key that nobody gave out, long enough for Azure to take it so."
    ).decode()
    given = container.storage_options["connection_string"]
    options = {"connection_string": re.sub("AccountKey=[^;]*", f"AccountKey={key}", given)}
    text = _failure(
        lambda: operation(open_storage(f"{container.url}/job", options)), StorageRefused, key
    )
    assert "Check the URL, and that the credentials may read and write there" in text
    assert "\n" not in text


@pytest.fixture
def strict_moto(moto: S3Server, bucket: StorageRoot) -> Iterator[StorageRoot]:
    """A bucket that asks for credentials, which moto does only when told to."""
    _set_unchecked_actions(moto, "0")
    yield bucket
    _set_unchecked_actions(moto, "inf")


def _set_unchecked_actions(moto: S3Server, count: str) -> None:
    headers = {"Content-Type": "application/octet-stream"}
    url = f"{moto.endpoint}/moto-api/reset-auth"
    urllib.request.urlopen(
        urllib.request.Request(url, count.encode(), headers, method="POST")
    ).close()


@each_operation
def test_a_wrong_s3_key_is_refused(
    strict_moto: StorageRoot, operation: Callable[[Storage], object]
) -> None:
    options = {**strict_moto.storage_options, "key": "AKIANOBODYKNOWSIT", "secret": SECRET}
    text = _failure(
        lambda: operation(open_storage(f"{strict_moto.url}/job", options)), StorageRefused, SECRET
    )
    assert "Check the URL, and that the credentials may read and write there" in text


def test_missing_s3_credentials_are_refused(
    bucket: StorageRoot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # botocore looks there
    options = {name: bucket.storage_options[name] for name in ("endpoint_url", "client_kwargs")}
    text = _failure(
        lambda: open_storage(f"{bucket.url}/job", options).put("a/b", b"1"), StorageRefused
    )
    assert "credentials" in text


def _through_s3fs(url: str, options: dict[str, Any]) -> Storage:
    """S3 storage on s3fs that doesn't try again by itself."""
    storage = FsspecStorage(url, options)
    storage._fs.retries = 1
    return storage


@each_operation
@pytest.mark.parametrize("route", [_through_s3fs, S3Storage])
def test_an_endpoint_that_nobody_listens_on_is_unavailable(
    unused_endpoint: str,
    operation: Callable[[Storage], object],
    route: Callable[[str, dict[str, Any]], Storage],
) -> None:
    options = {
        "key": "AKIANOBODYKNOWSIT",
        "secret": SECRET,
        "endpoint_url": unused_endpoint,
        "config_kwargs": {"retries": {"total_max_attempts": 1}},
    }
    text = _failure(
        lambda: operation(route("s3://bucket/job", options)), StorageUnavailable, SECRET
    )
    assert text.startswith("storage s3://bucket/job is unavailable: ")
    assert unused_endpoint in text


@pytest.fixture
def unused_endpoint() -> Iterator[str]:
    """The URL of a port that is taken, but not listened on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


def test_opening_a_storage_leaves_its_options_as_they_were(bucket: StorageRoot) -> None:
    options = {
        **bucket.storage_options,
        "config_kwargs": {"retries": {"max_attempts": 3}, "s3": {}},
    }
    before = repr(options)
    open_storage(bucket.url, options).ls("")
    FsspecStorage(bucket.url, copy.deepcopy(options)).ls("")
    assert repr(options) == before


def test_a_protocol_whose_package_is_broken_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(sys.modules["fsspec.registry"].__dict__["_registry"], "s3", raising=False)
    text = _failure(lambda: open_storage("s3://bucket/job", {}), StorageRefused)
    assert "pip install 'dcp_mem[s3]'" in text


class _TalkativeFileSystem(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """Repeats, when it fails, everything that it was told."""

    protocol = "talkative"
    cachable = False

    def cat_file(self, path: str, *_: Any, **__: Any) -> bytes:
        raise RuntimeError(f"can't read {path} with {self.storage_options['said']}")


@pytest.mark.parametrize(
    ("options", "said", "secret"),
    [
        ({"secret": "kX9+c/longsecret="}, "kX9+c/longsecret=", "kX9+c/longsecret="),
        (
            {"secret": "kX9+c/longsecret="},
            "sig=kX9%2Bc%2Flongsecret%3D&x=1",
            "kX9%2Bc%2Flongsecret%3D",
        ),
        ({"password": "abc"}, "user:abc@host", ":abc@"),
        (
            {"client_kwargs": {"aws_secret_access_key": "nestedsecret"}},
            "nestedsecret",
            "nestedsecret",
        ),
        ({"tokens": ["listedsecret"]}, "listedsecret", "listedsecret"),
        (
            {"connection_string": "AccountName=me;AccountKey=Zm9vYmFy+w=="},
            "key Zm9vYmFy+w==",
            "Zm9vYmFy+w==",
        ),
        (
            {"sas_token": "?sv=2024&sig=abc%2Fdef%3D"},
            "https://h/c?sig=abc%2Fdef%3D",
            "abc%2Fdef%3D",
        ),
        ({"sas_token": "?sv=2024&sig=abc%2Fdef%3D"}, "the signature abc/def= is wrong", "abc/def="),
    ],
    ids=[
        "secret",
        "encoded",
        "short password",
        "nested",
        "listed",
        "connection string",
        "SAS",
        "decoded SAS",
    ],
)
def test_what_storage_repeats_of_the_credentials_is_taken_out(
    options: dict[str, Any], said: str, secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        sys.modules["fsspec.registry"].__dict__["_registry"], "talkative", _TalkativeFileSystem
    )
    storage = FsspecStorage("talkative://bucket/job", options)
    monkeypatch.setitem(storage._fs.storage_options, "said", said)
    text = _failure(lambda: storage.get("step-1/.metadata"), StorageUnavailable, secret)
    assert "can't read bucket/job/step-1/.metadata" in text
    assert "***" in text


# -- local directories -----------------------------------------------------------------------------


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    with mounted_tmpfs(tmp_path / "small", "1m") as directory:
        yield directory


@pytest.mark.parametrize("umask", [0o077, 0o027, 0o002])
def test_everything_in_a_local_root_has_the_modes_of_the_umask(tmp_path: Path, umask: int) -> None:
    root = tmp_path / "absent" / "root"
    storage, before = PosixStorage(str(root)), os.umask(umask)
    try:
        storage.put("step-1/.metadata", b"1", create=True)
        storage.put("step-1/.dcp_mem/manifest.json", b"1")
        upload(storage, "step-1/segment", b"12345")
    finally:
        os.umask(before)
    modes = {
        path: stat.S_IMODE(path.stat().st_mode) for path in (root.parent, *root.parent.rglob("*"))
    }
    assert len(modes) == 7
    assert modes == {path: (0o777 if path.is_dir() else 0o666) & ~umask for path in modes}


@pytest.mark.parametrize("operation", [OPERATIONS[name] for name in WRITING], ids=WRITING)
def test_a_file_in_the_way_is_refused(
    tmp_path: Path, operation: Callable[[Storage], object]
) -> None:
    (tmp_path / "root").write_bytes(b"not a directory")
    text = _failure(lambda: operation(PosixStorage(str(tmp_path / "root"))), StorageRefused)
    assert "Not a directory" in text
    assert str(tmp_path / "root") in text


def test_a_symlink_to_nowhere_hides_nothing(tmp_path: Path) -> None:
    storage = PosixStorage(str(tmp_path))
    storage.put("step-1/.metadata", b"1")
    (tmp_path / "latest").symlink_to(tmp_path / "gone")
    (tmp_path / "around").symlink_to(tmp_path / "around")
    assert checkpoint_names(storage) == ["step-1"]


@pytest.mark.parametrize("operation", [OPERATIONS[name] for name in WRITING], ids=WRITING)
def test_a_full_disk_is_unavailable_until_there_is_room(
    small_tmpfs: Path, operation: Callable[[Storage], object]
) -> None:
    storage = PosixStorage(str(small_tmpfs))
    storage.put("step-1/old", b"old")
    filler = small_tmpfs / "filler"
    fill(filler)
    text = _failure(lambda: operation(storage), StorageUnavailable)
    assert "no space is left there" in text
    assert sorted(entry.name for entry in storage.ls("step-1")) == ["old"]
    filler.unlink()
    operation(storage)
    assert storage.get("step-1/key") == b"12345"


# -- what the kernel says once ---------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.EIO, errno.EDQUOT], ids=["EIO", "EDQUOT"])
@pytest.mark.parametrize("call", ["fsync", "pwrite"])
def test_a_file_whose_bytes_may_be_lost_is_never_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    def fail_once(*given: Any) -> Any:
        if failures:
            raise failures.pop()
        return original(*given)

    original, failures = getattr(os, call), list[OSError]()
    monkeypatch.setattr(os, call, fail_once)
    storage, data = RetryingStorage(PosixStorage(str(tmp_path))), bytes(LEAST_PART + 7)
    with closing(storage.upload("step-1/segment", len(data))) as going:
        failures.append(OSError(number, os.strerror(number)))
        parts = [memoryview(data)[:LEAST_PART], memoryview(data)[LEAST_PART:]]
        if call == "pwrite":
            with pytest.raises(StorageUnavailable, match="is begun anew"):
                going.put_part(0, parts[0], 0)
            with pytest.raises(StorageUnavailable, match="is begun anew"):
                going.put_part(0, parts[0], 0)
        else:
            for part_number, part in enumerate(parts):
                going.put_part(part_number, part, 0)
        for _ in range(2):
            with pytest.raises(StorageUnavailable, match="is begun anew"):
                going.finish()
    assert storage.retries == 0
    assert list((tmp_path / "step-1").iterdir()) == []
    upload(storage, "step-1/segment", data)
    assert storage.get("step-1/segment") == data


# -- what an NFS client does to a directory (on a real mount: tests/storage/test_nfs.py) -----------


@pytest.mark.parametrize(
    "operation", [OPERATIONS[name] for name in ("get", "read_into")], ids=["get", "read_into"]
)
def test_a_name_that_is_listed_is_not_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: Callable[[Storage], object]
) -> None:
    storage = PosixStorage(str(tmp_path))
    storage.put("step-1/key", b"12345")
    expected = operation(storage)
    with monkeypatch.context() as patch:
        _miss_until_listed(patch, tmp_path)
        assert operation(storage) == expected


@pytest.mark.parametrize(
    "operation", [OPERATIONS[name] for name in ("get", "read_into")], ids=["get", "read_into"]
)
def test_what_is_missing_from_a_directory_that_may_not_be_listed_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: Callable[[Storage], object]
) -> None:
    def refuse(path: str) -> list[str]:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    (tmp_path / "step-1").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", refuse)
        _failure(lambda: operation(PosixStorage(str(tmp_path))), StorageKeyMissing)


def test_a_link_whose_answer_was_lost_is_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link_and_lose_the_answer(source: str, target: str) -> None:
        link(source, target)
        link(source, target)

    link = os.link
    storage = PosixStorage(str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(os, "link", link_and_lose_the_answer)
        storage.put("step-1/.metadata", b"ours", create=True)
        _failure(lambda: storage.put("step-1/.metadata", b"another", create=True), CheckpointExists)
    assert storage.get("step-1/.metadata") == b"ours"
    assert [entry.name for entry in storage.ls("step-1")] == [".metadata"]


@each_operation
@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO], ids=["ESTALE", "EIO"])
def test_a_server_that_lost_a_file_or_fails_is_unavailable(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    operation: Callable[[Storage], object],
    number: int,
) -> None:
    def fail(path: object, *_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number), path)

    storage = PosixStorage(str(tmp_path))
    storage.put("step-1/key", b"12345")
    with monkeypatch.context() as patch:
        for module, name in ((os, "open"), (os, "scandir"), (os, "unlink"), (builtins, "open")):
            patch.setattr(module, name, fail)
        with pytest.raises(StorageUnavailable, match=re.escape(os.strerror(number))):
            operation(storage)


def _miss_until_listed(patch: pytest.MonkeyPatch, root: Path) -> None:
    """Have nothing below the root be opened before its directory has been listed."""
    listed = set[str]()

    def listing(path: str) -> list[str]:
        listed.add(path)
        return listdir(path)

    def missing(act: Callable[..., Any]) -> Callable[..., Any]:
        def opening(path: Any, *args: Any, **options: Any) -> Any:
            if str(path).startswith(str(root)) and os.path.dirname(path) not in listed:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            return act(path, *args, **options)

        return opening

    listdir = os.listdir
    patch.setattr(os, "listdir", listing)
    patch.setattr(os, "open", missing(os.open))
    patch.setattr(builtins, "open", missing(builtins.open))
