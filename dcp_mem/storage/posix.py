"""Storage in a directory: local disks, and network file systems that are mounted."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from dcp_mem.errors import CheckpointExists, StorageKeyMissing, StorageRefused, StorageUnavailable
from dcp_mem.files import remove, remove_directory_if_empty, sync_directory, write_atomically
from dcp_mem.storage import Entry

_REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP}
_FULL = {errno.ENOSPC, errno.EDQUOT}


class PosixStorage:
    """A directory as storage. Files and directories are private (0600, 0700) and synced before a put returns."""

    def __init__(self, url: str) -> None:
        self.url = url

    def put_stream(self, key: str, pieces: Iterable[memoryview], nbytes: int) -> None:
        path = self._path(key)
        part = path + ".part"
        with self._translated():
            self._make_parent(path)
            with open(
                os.open(part, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o600), "wb", buffering=0
            ) as stream:
                for piece in pieces:
                    _write(stream.fileno(), piece)
                os.fsync(stream.fileno())
            os.rename(part, path)
            sync_directory(os.path.dirname(path))

    def put(self, key: str, data: bytes, *, create: bool = False) -> None:
        path = self._path(key)
        with self._translated():
            self._make_parent(path)
            if not create:
                write_atomically(path, data, sync=True)
                return
            staged = f"{path}.{os.getpid()}.new"
            write_atomically(staged, data, sync=True)
            try:
                os.link(staged, path)
            except FileExistsError:
                raise CheckpointExists(os.path.dirname(key), self.url) from None
            finally:
                remove(staged)
            sync_directory(os.path.dirname(path))

    def get(self, key: str) -> bytes:
        with self._translated(key), open(self._path(key), "rb") as stream:
            return stream.read()

    def read_into(self, key: str, offset: int, buffer: memoryview) -> int:
        with self._translated(key):
            descriptor = os.open(self._path(key), os.O_RDONLY | os.O_CLOEXEC)
            try:
                return _read(descriptor, offset, buffer)
            finally:
                os.close(descriptor)

    def ls(self, prefix: str) -> list[Entry]:
        try:
            with self._translated(), os.scandir(self._path(prefix)) as entries:
                return [_entry(entry) for entry in entries]
        except FileNotFoundError:
            return []

    def delete(self, key: str) -> None:
        with self._translated():
            remove(self._path(key))
            remove_directory_if_empty(os.path.dirname(self._path(key)))

    def _path(self, key: str) -> str:
        return os.path.join(self.url, key) if key else self.url

    def _make_parent(self, path: str) -> None:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)

    @contextmanager
    def _translated(self, key: str | None = None) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            if key is None:
                raise
            raise StorageKeyMissing(self.url, key) from None
        except OSError as error:
            if isinstance(error, (StorageRefused, StorageUnavailable, CheckpointExists)):
                raise
            reason = f"{os.strerror(error.errno or 0)} ({error.filename or self.url})"
            if error.errno in _REFUSED:
                raise StorageRefused(self.url, f"{reason}: check the path and its permissions") from None
            if error.errno in _FULL:
                raise StorageUnavailable(
                    self.url, f"{reason}: free some space; the flush will be tried again"
                ) from None
            raise StorageUnavailable(self.url, reason) from None


def _write(descriptor: int, piece: memoryview) -> None:
    while piece:
        piece = piece[os.write(descriptor, piece) :]


def _read(descriptor: int, offset: int, buffer: memoryview) -> int:
    done = 0
    while done < len(buffer):
        count = os.preadv(descriptor, [buffer[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done


def _entry(entry: os.DirEntry[str]) -> Entry:
    facts = entry.stat()
    return Entry(entry.name, facts.st_size, entry.is_dir(), facts.st_mtime)
