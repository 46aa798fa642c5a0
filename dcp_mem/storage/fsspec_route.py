"""Storage behind any fsspec URL, through fsspec itself, with bounded memory.

Few of fsspec's file systems copy a file on the server: most of them download and upload it, which
costs more than sending what lies in memory. So only those that are listed here are asked to copy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any

from dcp_mem.common.log import log
from dcp_mem.errors import (
    CheckpointExists,
    DcpMemError,
    StorageKeyMissing,
    StorageRefused,
    StorageUnavailable,
)
from dcp_mem.storage import (
    Copies,
    Entry,
    Sending,
    Source,
    Unfinished,
    is_still,
    part_count,
    part_nbytes,
    scatter,
)
from dcp_mem.storage.file_system import file_system_of
from dcp_mem.storage.translate import Translator, says, status_of

_BLOCK = 32 << 20
_LEAST_BLOCK = 5 << 20
"""s3fs writes no shorter ones."""
# On these a directory is only a part of a name, and making one may create a bucket whose name is a
# typing error.
_WITHOUT_DIRECTORIES = {
    "s3",
    "s3a",
    "abfs",
    "abfss",
    "az",
    "adl",
    "gs",
    "gcs",
    "oci",
    "oss",
    "r2",
    "http",
    "https",
}
_MOST_FAILED_COPIES = 3
"""In a row: then the storage isn't asked any more. A store may begin a copy, and keep what it has
of it as an unfinished upload."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCopies:
    """What makes the server of a file system copy an object."""

    digest: str  # The field of `info` that stands for an object's bytes. A copy's must be the same.
    options: Mapping[str, Any] = field(default_factory=dict)


_COPYING = {
    # Part by part, as the object was put: then a copy has its ETag, an MD5 of all of its parts.
    "s3fs.core.S3FileSystem": ServerCopies(digest="ETag", options={"preserve_etag": True})
}


def server_copies_of(cls: type) -> ServerCopies | None:
    """Return how a file system has its server copy; None where it isn't known to do so.

    Not listed: adlfs begins a copy, and doesn't wait for its end; SFTP and FTP have none in fsspec;
    HDFS's, and that of most others, reads and writes.
    """
    classes = (f"{one.__module__}.{one.__qualname__}" for one in cls.__mro__)
    return next((_COPYING[one] for one in classes if one in _COPYING), None)


class FsspecStorage:
    """The file system that fsspec finds for a URL."""

    def __init__(self, url: str, storage_options: Mapping[str, Any]) -> None:
        self.url = url
        self._translator = Translator(url, storage_options)
        with self._translator.errors():
            self._fs, self._root = file_system_of(url, storage_options)
        protocol = self._fs.protocol if isinstance(self._fs.protocol, str) else self._fs.protocol[0]
        self._directories = protocol not in _WITHOUT_DIRECTORIES
        self._copies = server_copies_of(type(self._fs))
        self._failed_copies = 0

    def upload(self, key: str, nbytes: int, source: Source | None = None) -> FsspecUpload:
        path = self._path(key)
        with self._translator.errors():
            self._make_parent(path)

        def open_stream() -> Any:
            with self._translator.errors():
                block_nbytes = max(part_nbytes(nbytes), _LEAST_BLOCK)
                return self._fs.open(path, "wb", block_size=block_nbytes)

        copy = None
        if self._copies is not None and source is not None and source.nbytes == nbytes:
            copy = partial(self._copy, source, key)
        return FsspecUpload(
            open_stream, nbytes, partial(self._stored, key, nbytes), self._translator, copy
        )

    def _stored(self, key: str, nbytes: int) -> str:
        """Return the digest of an object that has just been stored; raise if it isn't whole."""
        with self._translator.errors():
            facts = self._fs.info(self._path(key))
        stored = int(facts["size"])
        if stored != nbytes:
            raise StorageUnavailable(
                self.url, f"{key} has {stored} bytes after an upload of {nbytes}"
            )
        return self._digest(facts)

    def _digest(self, facts: Mapping[str, Any]) -> str:
        return "" if self._copies is None else str(facts.get(self._copies.digest) or "")

    def _copy(self, source: Source, key: str) -> str:
        """Have an object copied; return its digest, or "" where it can't be had that way."""
        if self._copies is None or not source.etag:
            return ""
        path = self._path(source.key)
        try:
            with self._translator.errors(source.key):
                if self._digest(self._fs.info(path)) != source.etag:
                    return ""
                self._fs.cp_file(path, self._path(key), **self._copies.options)
            digest = self._stored(key, source.nbytes)
        except StorageKeyMissing:
            return ""
        except DcpMemError as error:
            return self._note_failed_copy(str(error))
        if digest != source.etag:  # where objects are encrypted, it may not be of the bytes alone
            return self._note_failed_copy(f"a copy of {source.key} has another digest")
        self._failed_copies = 0
        return digest

    def _note_failed_copy(self, why: str) -> str:
        self._failed_copies += 1
        log.info("%s can't copy, so bytes are sent: %s", self.url, why)
        if self._failed_copies >= _MOST_FAILED_COPIES:
            self._copies = None
        return ""

    def put(self, key: str, data: bytes, *, create: bool = False) -> None:
        path = self._path(key)
        with self._translator.errors():
            self._make_parent(path)
            try:
                if create:
                    self._fs.pipe_file(path, data, mode="create")
                else:
                    self._fs.pipe_file(path, data)
            except FileExistsError:
                raise CheckpointExists(key.rpartition("/")[0], self.url) from None
            except Exception as error:
                if create and (status_of(error) == 412 or says(error, "AlreadyExists")):
                    raise CheckpointExists(key.rpartition("/")[0], self.url) from None
                raise

    def get(self, key: str) -> bytes:
        with self._translator.errors(key):
            return bytes(self._fs.cat_file(self._path(key)))

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> int:
        done, wanted = 0, sum(map(len, buffers))
        while done < wanted:
            stop = min(done + _BLOCK, wanted)
            with self._translator.errors(key):
                piece = self._range(self._path(key), offset + done, offset + stop)
            scatter(piece, done, buffers)
            done += len(piece)
            if done < stop:
                break
        return done

    def _range(self, path: str, start: int, stop: int) -> bytes:
        try:
            piece = bytes(self._fs.cat_file(path, start=start, end=stop))
        except Exception as error:
            if status_of(error) == 416:  # the object ends before `start`
                return b""
            raise
        if len(piece) > stop - start:
            why = "the server ignores ranges and sends whole files. Take one that knows `Range`"
            raise StorageRefused(self.url, why)
        return piece

    def ls(self, prefix: str) -> list[Entry]:
        path = self._path(prefix)
        try:
            with self._translator.errors(prefix):
                self._fs.invalidate_cache()
                listed = self._fs.ls(path, detail=True)
        except StorageKeyMissing:
            return []
        below = [facts for facts in listed if facts["name"].rstrip("/") != path.rstrip("/")]
        return [_entry(facts) for facts in map(self._with_size, below) if facts is not None]

    def _with_size(self, facts: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Add the size where the listing has none, as on the web; None where the file is gone."""
        if facts.get("size") is not None or facts.get("type") == "directory":
            return facts
        name = facts["name"]
        try:
            with self._translator.errors(name):
                try:
                    return {**facts, "size": self._fs.info(name)["size"]}
                except FileNotFoundError as error:
                    # fsspec's web client raises it after a failure of any kind.
                    if isinstance(error.__cause__, Exception) and status_of(error) != 404:
                        raise self._translator.translated(error.__cause__) from None
                    raise
        except StorageKeyMissing:
            return None

    def tree(self, most: int) -> list[tuple[str, Entry]] | None:
        return None

    def delete(self, key: str) -> None:
        try:
            with self._translator.errors(key):
                self._fs.rm_file(self._path(key))
        except StorageKeyMissing:
            return

    def has_conditions(self) -> bool:
        return False  # fsspec has no call for them

    def swap(self, key: str, old: bytes, new: bytes) -> bool:
        is_unchanged = is_still(self, key, old)
        if is_unchanged:
            self.put(key, new)
        return is_unchanged

    def remove(self, key: str, old: bytes) -> bool:
        is_unchanged = is_still(self, key, old)
        if is_unchanged:
            self.delete(key)
        return is_unchanged

    def unfinished(self, prefix: str) -> list[Unfinished]:
        return []  # fsspec has no call for them

    def drop_unfinished(self, key: str) -> None:
        return

    def _path(self, key: str) -> str:
        return f"{self._root.rstrip('/')}/{key}" if key else self._root

    def _make_parent(self, path: str) -> None:
        if self._directories:
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)


class FsspecUpload(Sending):
    """An upload through a stream of fsspec's: parts in order; one that breaks off begins again.

    `open_stream`: returns a stream to write to; the object appears when it is closed. `stored`:
    called once the stream is closed; raises where the object isn't whole. Returns what stands for
    its bytes. `copy`: has all of the source copied, in place of a stream; returns the same, or ""
    where it has no copy. None: there is nothing to copy.
    """

    in_order = True
    verifies_copies = True

    def __init__(
        self,
        open_stream: Callable[[], Any],
        nbytes: int,
        stored: Callable[[], str],
        translator: Translator,
        copy: Callable[[], str] | None = None,
    ) -> None:
        self.part_nbytes = part_nbytes(nbytes)
        self.copies = Copies.NOTHING if copy is None else Copies.WHOLE
        self._missing = part_count(nbytes, self.part_nbytes)
        self._open_stream, self._stored, self._translator = open_stream, stored, translator
        self._copy, self._etag = copy, ""
        self._stream, self._is_open = open_stream(), True

    def put_part(self, number: int, data: memoryview, crc32c: int) -> bool:
        if not self._is_open:
            self._stream, self._is_open = self._open_stream(), True
        with self._translator.errors():
            self._stream.write(data)
        self._missing -= 1
        return True

    def copy_whole(self) -> bool:
        if self._copy is None:
            return False
        self.close()  # parts that are put after all need a new stream
        self._etag = self._copy()
        return bool(self._etag)

    def etag(self) -> str:
        return self._etag

    def finish(self) -> None:
        if self._missing:
            raise ValueError(f"{self._missing} parts were never put")
        with self._translator.errors():
            self._stream.close()
        self._is_open = False
        self._etag = self._stored()

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            _discard(self._stream)


def _discard(stream: Any) -> None:
    """Drop an upload without publishing it, as closing a half-written fsspec stream would do."""
    abort: Callable[[], None] | None = getattr(stream, "discard", None)
    # The upload has failed already, and that error is the one to report.
    with contextlib.suppress(Exception):
        if abort is not None:
            abort()
    # On fsspec's own memory file this can't be set: it publishes at once.
    with contextlib.suppress(AttributeError):
        stream.closed = True


def _entry(facts: Mapping[str, Any]) -> Entry:
    name = str(facts["name"]).rstrip("/").rpartition("/")[2]
    return Entry(
        name,
        int(facts.get("size") or 0),
        is_directory=facts.get("type") == "directory",
        modified=_modified(facts),
    )


def _modified(facts: Mapping[str, Any]) -> float:
    for name in ("LastModified", "last_modified", "mtime", "modified", "updated", "created"):
        value = facts.get(name)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, (int, float)):
            return float(value)
    return 0.0
