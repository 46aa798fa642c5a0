"""Storage behind any fsspec URL, through fsspec itself, with bounded memory.

Nothing is copied there: most of fsspec's file systems download and upload a file for that, which
costs more than sending what lies in memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from dcp_mem.errors import (
    CheckpointExists,
    StorageKeyMissing,
    StorageRefused,
    StorageUnavailable,
)
from dcp_mem.storage import (
    Entry,
    InParts,
    Source,
    Unfinished,
    is_still,
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


class FsspecStorage:
    """The file system that fsspec finds for a URL."""

    def __init__(self, url: str, storage_options: Mapping[str, Any]) -> None:
        self.url = url
        self._translator = Translator(url, storage_options)
        with self._translator.errors():
            self._fs, self._root = file_system_of(url, storage_options)
        protocol = self._fs.protocol if isinstance(self._fs.protocol, str) else self._fs.protocol[0]
        self._directories = protocol not in _WITHOUT_DIRECTORIES

    def upload(self, key: str, nbytes: int, source: Source | None = None) -> FsspecUpload:
        path = self._path(key)
        with self._translator.errors():
            self._make_parent(path)
        return FsspecUpload(self._fs, path, nbytes, self._translator)

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


class FsspecUpload(InParts):
    """An upload through a stream of fsspec's: parts in order; one that breaks off begins again."""

    in_order = True

    def __init__(self, fs: Any, path: str, nbytes: int, translator: Translator) -> None:
        super().__init__(nbytes)
        self._fs, self._path, self._translator = fs, path, translator
        with translator.errors():
            self._stream = fs.open(path, "wb", block_size=max(self.part_nbytes, _LEAST_BLOCK))
        self._is_open = True

    def put_part(self, number: int, data: memoryview, crc32c: int) -> bool:
        with self._translator.errors():
            self._stream.write(data)
        self._missing.discard(number)
        return True

    def finish(self) -> None:
        self._check_that_all_were_put()
        with self._translator.errors():
            self._stream.close()  # only now does the object appear
            self._is_open = False
            stored = int(self._fs.info(self._path)["size"])
        if stored != self._nbytes:
            raise StorageUnavailable(
                self._translator.url,
                f"{self._path} has {stored} bytes after an upload of {self._nbytes}",
            )

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
