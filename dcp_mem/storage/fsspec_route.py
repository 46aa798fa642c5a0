"""Storage behind any fsspec URL, through fsspec itself, with bounded memory."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import Any
from urllib.parse import quote, unquote

import fsspec
import fsspec.core

from dcp_mem.errors import CheckpointExists, DcpMemError, StorageKeyMissing, StorageRefused, StorageUnavailable
from dcp_mem.storage import Entry

_BLOCK = 8 << 20
_MOST_PARTS = 9000
# There, a directory is only a part of a name, and asking for one may create the bucket that a typing error named.
_WITHOUT_DIRECTORIES = {"s3", "s3a", "abfs", "abfss", "az", "adl", "gs", "gcs", "oci", "oss", "r2", "http", "https"}
_REFUSED_STATUS = {400, 401, 403, 404, 405, 411, 413}
_REFUSED_ERRNO = {errno.EACCES, errno.EPERM, errno.EROFS}
_HARMLESS = {"account_name", "endpoint_url", "region_name", "project"}
_NO_CONTAINER = ("NoSuchBucket", "ContainerNotFound", "bucket does not exist", "container does not exist")
_REFUSED_NAMES = [
    "NoCredentialsError",
    "PartialCredentialsError",
    "CredentialRetrievalError",
    "ClientAuthenticationError",
    "NoSuchBucket",
    "ResourceNotFoundError",
    "InvalidAccessKeyId",
    "ParamValidationError",
    "UnknownServiceError",
]


class FsspecStorage:
    """The file system that fsspec finds for a URL. Its instance belongs to this object alone; listings aren't cached."""

    def __init__(self, url: str, storage_options: Mapping[str, Any]) -> None:
        self.url = url
        self._secrets = sorted(set(_secrets(storage_options)), key=len, reverse=True)
        options = {"skip_instance_cache": True, "use_listings_cache": False, **storage_options}
        with self._translated():
            self._fs, self._root = fsspec.core.url_to_fs(url, **options)
        protocol = self._fs.protocol if isinstance(self._fs.protocol, str) else self._fs.protocol[0]
        self._directories = protocol not in _WITHOUT_DIRECTORIES

    def put_stream(self, key: str, pieces: Iterable[memoryview], nbytes: int) -> None:
        path = self._path(key)
        with self._translated():
            self._make_parent(path)
            stream = self._fs.open(path, "wb", block_size=max(_BLOCK, -(-nbytes // _MOST_PARTS)))
        written = 0
        try:
            for piece in pieces:  # not translated: its errors are the caller's own
                with self._translated():
                    stream.write(piece)
                written += len(piece)
            if written != nbytes:
                raise ValueError(f"{key}: {written} bytes came in pieces, {nbytes} were announced")
            with self._translated():
                stream.close()
        except BaseException:
            _discard(stream)
            raise
        with self._translated():
            stored = int(self._fs.info(path)["size"])
        if stored != nbytes:
            raise StorageUnavailable(self.url, f"{key} has {stored} bytes after an upload of {nbytes}")

    def put(self, key: str, data: bytes, *, create: bool = False) -> None:
        path = self._path(key)
        with self._translated():
            self._make_parent(path)
            try:
                if create:
                    self._fs.pipe_file(path, data, mode="create")
                else:
                    self._fs.pipe_file(path, data)
            except FileExistsError:
                raise CheckpointExists(key.rpartition("/")[0], self.url) from None
            except Exception as error:
                if create and (_status(error) == 412 or _says(error, "AlreadyExists")):
                    raise CheckpointExists(key.rpartition("/")[0], self.url) from None
                raise

    def get(self, key: str) -> bytes:
        with self._translated(key):
            return bytes(self._fs.cat_file(self._path(key)))

    def read_into(self, key: str, offset: int, buffer: memoryview) -> int:
        done = 0
        while done < len(buffer):
            stop = min(done + 4 * _BLOCK, len(buffer))
            with self._translated(key):
                piece = self._range(self._path(key), offset + done, offset + stop)
            buffer[done : done + len(piece)] = piece
            done += len(piece)
            if done < stop:
                break
        return done

    def _range(self, path: str, start: int, stop: int) -> bytes:
        try:
            return bytes(self._fs.cat_file(path, start=start, end=stop))
        except Exception as error:
            if _status(error) == 416:  # the object ends before `start`
                return b""
            raise

    def ls(self, prefix: str) -> list[Entry]:
        path = self._path(prefix)
        try:
            with self._translated(prefix):
                self._fs.invalidate_cache()
                listed = self._fs.ls(path, detail=True)
        except StorageKeyMissing:
            return []
        return [_entry(facts) for facts in listed if facts["name"].rstrip("/") != path.rstrip("/")]

    def delete(self, key: str) -> None:
        try:
            with self._translated(key):
                self._fs.rm_file(self._path(key))
        except StorageKeyMissing:
            return

    def _path(self, key: str) -> str:
        return f"{self._root.rstrip('/')}/{key}" if key else self._root

    def _make_parent(self, path: str) -> None:
        if self._directories:
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)

    @contextmanager
    def _translated(self, key: str | None = None) -> Iterator[None]:
        try:
            yield
        except DcpMemError:
            raise
        except Exception as error:
            raise self._translation(error, key) from None

    def _translation(self, error: Exception, key: str | None) -> DcpMemError:
        if _says(error, *_NO_CONTAINER):
            return StorageRefused(self.url, "there is no such bucket or container. Create it, or correct the URL.")
        if key is not None and (isinstance(error, FileNotFoundError) or _status(error) == 404):
            return StorageKeyMissing(self.url, key)
        text = self._redacted(f"{type(error).__name__}: {_first_line(error)}")[:600].rstrip(". ")
        if isinstance(error, ImportError):
            return StorageRefused(self.url, f"{text}. Install the package that fsspec needs for this protocol.")
        if _is_refusal(error):
            text = f"{text}. Check the URL, and that the credentials may read and write there."
            return StorageRefused(self.url, text)
        return StorageUnavailable(self.url, text)

    def _redacted(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text


def _is_refusal(error: Exception) -> bool:
    names = {kind.__name__ for kind in type(error).__mro__}
    if names & set(_REFUSED_NAMES) or isinstance(error, (PermissionError, FileNotFoundError, ValueError, TypeError)):
        return True
    if isinstance(error, OSError) and error.errno in _REFUSED_ERRNO:
        return True
    return _status(error) in _REFUSED_STATUS or any(
        name in str(error) for name in ("NoSuchBucket", "InvalidAccessKeyId")
    )


def _says(error: BaseException | None, *words: str) -> bool:
    """Whether one of the words occurs in the error, or in what led to it."""
    while error is not None:
        if any(word in str(error) for word in words):
            return True
        error = error.__cause__ or error.__context__
    return False


def _first_line(error: Exception) -> str:
    """What the error says, without the request ids and the XML that Azure's bring along."""
    lines = str(error).strip().splitlines()
    code = next((line.partition(":")[2] for line in lines[1:] if line.startswith("ErrorCode:")), "")
    return (lines[0] if lines else "no reason given") + (f" ({code})" if code else "")


def _status(error: BaseException | None) -> int:
    """HTTP status behind an exception of botocore's, azure-core's or aiohttp's, 0 where there is none."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        for name in ("status_code", "status"):
            value = getattr(error, name, None)
            if isinstance(value, int):
                return value
        error = error.__cause__
    return 0


def _discard(stream: Any) -> None:
    """Drop an upload without publishing it: closing a half-written fsspec stream would publish what there is."""
    abort: Callable[[], None] | None = getattr(stream, "discard", None)
    with contextlib.suppress(Exception):  # the upload failed already, and that error is the one to report
        if abort is not None:
            abort()
    with contextlib.suppress(AttributeError):  # fsspec's own memory file publishes at once, and can't be told
        stream.closed = True


def _secrets(value: Any, name: str = "") -> Iterator[str]:
    """Every text in the options that may be a secret, the parts of connection strings and SAS tokens, and how URLs have them."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if str(key) not in _HARMLESS:
                yield from _secrets(inner, str(key).lower())
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _secrets(inner, name)
    elif isinstance(value, str) and not value.startswith("http") and len(value) >= (3 if "pass" in name else 6):
        yield from {value, unquote(value), quote(value, safe="")}
        for part in value.lstrip("?").replace("&", ";").split(";"):
            name, _, secret = part.partition("=")
            if any(word in name.lower() for word in ("key", "sig", "token")):
                yield from _secrets(secret)


def _entry(facts: Mapping[str, Any]) -> Entry:
    name = str(facts["name"]).rstrip("/").rpartition("/")[2]
    return Entry(name, int(facts.get("size") or 0), facts.get("type") == "directory", _modified(facts))


def _modified(facts: Mapping[str, Any]) -> float:
    for field in ("LastModified", "last_modified", "mtime", "modified", "updated", "created"):
        value = facts.get(field)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, (int, float)):
            return float(value)
    return 0.0
