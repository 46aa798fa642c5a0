"""Storage in a directory: local disks, and network file systems that are mounted."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import struct
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

from dcp_mem.common.files import (
    create,
    read_bytes,
    remove,
    remove_directory_if_empty,
    sync_directory,
    write_atomically,
)
from dcp_mem.errors import (
    CheckpointExists,
    DcpMemError,
    MemoryBudgetExceeded,
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
    UploadBroken,
    part_count,
    part_nbytes,
)

T = TypeVar("T")

_REFUSED = {
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
    errno.ENAMETOOLONG,
    errno.ELOOP,
}
_MODE = 0o666  # less the umask: a checkpoint is for whoever may read the root
_FULL = {errno.ENOSPC, errno.EDQUOT}
_FULL_TEXT = "no space is left there. Free some, or raise the quota; the flush is tried again."
_LOST_TEXT = "What was written before may be lost: the file is begun anew"
_UNFINISHED = re.compile(r"(.+?)(?:\.[0-9a-f]{8}\.(?:part|new|tmp))+")
"""Of an upload, of a put on condition, of a put; a put on condition begins with a put."""
_LOCK = ".dcp_mem/lock"
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF}
_LOCK_SECONDS = 10.0
"""The longest wait, in seconds, for another process that holds the lock."""
_LOCK_PAUSE = 0.005
_GONE = {errno.ENOENT, errno.ESTALE, errno.ELOOP}
_CLONE_RANGE = 0x4020940D  # FICLONERANGE: Python has no name for it


class PosixStorage:
    """A directory as storage. What is made there goes by the umask, and is synced by its put.

    Args:
        url: The directory's absolute path; it is made by the first put.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._has_locks = True

    def upload(self, key: str, nbytes: int, source: Source | None = None) -> PosixUpload:
        with self._translated():
            path = self._path(key)
            self._make_parent(path)
            opened = None if source is None else self._opened(source)
            try:
                return PosixUpload(path, nbytes, self._translated, opened)
            except BaseException:
                if opened is not None:
                    os.close(opened)
                raise

    def _opened(self, source: Source) -> int | None:
        """Open a file to copy from; None where it is gone, or isn't what was stored any more."""
        try:
            descriptor = self._found(_open, self._path(source.key))
        except OSError:
            return None
        facts = os.fstat(descriptor)
        if facts.st_size == source.nbytes and _identity(facts) == source.etag:
            return descriptor
        os.close(descriptor)
        return None

    def put(self, key: str, data: bytes, *, create: bool = False) -> None:
        path = self._path(key)
        with self._translated():
            self._make_parent(path)
            if not create:
                write_atomically(path, data, sync=True, mode=_MODE)
                return
            staged = f"{path}.{uuid.uuid4().hex[:8]}.new"
            write_atomically(staged, data, sync=True, mode=_MODE)
            try:
                os.link(staged, path)
            except FileExistsError:
                # On NFS the server may have made the link, and the answer was lost: then the
                # client's repeated request found it. Two names of our file say so.
                if _links(staged) != 2:
                    raise CheckpointExists(os.path.dirname(key), self.url) from None
            finally:
                remove(staged)
            sync_directory(os.path.dirname(path))

    def try_out(self) -> None:
        """Make the directory, where it is missing, and a file in it; nothing of both stays."""
        path = self._path(f"trial.{uuid.uuid4().hex[:8]}.tmp")  # as of a put, should it be left
        with self._translated():
            made = self._make_parent(path)
            try:
                os.close(create(path))
                os.unlink(path)
            finally:
                for directory in reversed(made):
                    remove_directory_if_empty(directory)

    def get(self, key: str) -> bytes:
        with self._translated(key):
            return self._found(read_bytes, self._path(key))

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> int:
        with self._translated(key):
            descriptor = self._found(_open, self._path(key))
            try:
                return _read(descriptor, offset, buffers)
            finally:
                os.close(descriptor)

    def ls(self, prefix: str) -> list[Entry]:
        try:
            with self._translated(prefix), self._found(os.scandir, self._path(prefix)) as entries:
                return [found for entry in entries if (found := _entry(entry)) is not None]
        except StorageKeyMissing:
            return []

    def tree(self, most: int) -> list[tuple[str, Entry]] | None:
        return None

    def delete(self, key: str) -> None:
        with self._translated():
            with contextlib.suppress(FileNotFoundError):
                self._found(os.unlink, self._path(key))
            remove_directory_if_empty(os.path.dirname(self._path(key)))

    def has_conditions(self) -> bool:
        with self._translated(), self._locked():
            return self._has_locks

    def swap(self, key: str, old: bytes, new: bytes) -> bool:
        path = self._path(key)
        with self._translated():
            self._make_parent(path)
            staged = f"{path}.{uuid.uuid4().hex[:8]}.new"
            write_atomically(staged, new, sync=True, mode=_MODE)
            try:
                with self._locked():
                    if not self._is(path, old):
                        return False
                    os.rename(staged, path)
            finally:
                remove(staged)
            sync_directory(os.path.dirname(path))
            return True

    def remove(self, key: str, old: bytes) -> bool:
        path = self._path(key)
        with self._translated():
            with self._locked():
                if not self._is(path, old):
                    return False
                os.unlink(path)
            remove_directory_if_empty(os.path.dirname(path))
            return True

    def _is(self, path: str, data: bytes) -> bool:
        try:
            return self._found(read_bytes, path) == data
        except FileNotFoundError:
            return False

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep out all other processes that swap or remove under this root, on any host.

        NFS clients take such a lock to the server. It ends with its process.
        """
        path = self._path(_LOCK)
        self._make_parent(path)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _MODE)
        try:
            self._lock(descriptor)
            yield
        finally:
            os.close(descriptor)

    def _lock(self, descriptor: int) -> None:
        """Take the lock, unless the file system has none. Raises StorageUnavailable."""
        deadline = time.monotonic() + _LOCK_SECONDS
        while self._has_locks and not self._try_lock(descriptor):
            if time.monotonic() > deadline:
                raise StorageUnavailable(
                    self.url, "another process holds its lock; it may be stopped"
                )
            time.sleep(_LOCK_PAUSE)

    def _try_lock(self, descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            self._has_locks = False
        return True

    def unfinished(self, prefix: str) -> list[Unfinished]:
        found = []
        with self._translated():
            for directory, _, files in os.walk(self._path(prefix)):
                for file in files:
                    match = _UNFINISHED.fullmatch(file)
                    if match is not None:
                        path = os.path.join(directory, file)
                        key = os.path.relpath(os.path.join(directory, match[1]), self.url)
                        with contextlib.suppress(FileNotFoundError):
                            found.append(Unfinished(key, os.stat(path).st_mtime))
        return found

    def drop_unfinished(self, key: str) -> None:
        directory, name = os.path.split(self._path(key))
        with self._translated(), contextlib.suppress(FileNotFoundError):
            for file in os.listdir(directory):
                match = _UNFINISHED.fullmatch(file)
                if match is not None and match[1] == name:
                    remove(os.path.join(directory, file))
            remove_directory_if_empty(directory)

    def _path(self, key: str) -> str:
        return os.path.join(self.url, key) if key else self.url

    def _found(self, act: Callable[[str], T], path: str) -> T:
        """Return what `act` returns for a path; a missing file is looked for in its directory.

        An NFS client that has missed a name misses it for half a minute, unless it lists the
        directory. Raises FileNotFoundError only where the directory doesn't list the name.
        """
        try:
            return act(path)
        except FileNotFoundError:
            if not self._is_listed(path):
                raise
            return act(path)

    def _is_listed(self, path: str) -> bool:
        directory, name = os.path.split(path)
        try:
            return name in os.listdir(directory)
        except PermissionError:  # the directory may be searched but not read
            return False
        except FileNotFoundError:  # the directory itself may have been missed, up to the root
            return (
                len(path) > len(self.url)
                and self._is_listed(directory)
                and name in os.listdir(directory)
            )

    def _make_parent(self, path: str) -> list[str]:
        """Make the missing directories above `path`, as durable as what is in them; return them."""
        directory, missing = os.path.dirname(path), []
        while not os.path.isdir(directory):
            missing.append(directory)
            directory = os.path.dirname(directory)
        missing.reverse()
        for directory in missing:
            with contextlib.suppress(FileExistsError):
                self._make(directory)
            # A directory that may be written but not read can't be synced.
            with contextlib.suppress(PermissionError):
                sync_directory(os.path.dirname(directory))
        return missing

    def _make(self, directory: str) -> None:
        try:
            os.mkdir(directory, 0o777)
        except FileNotFoundError:
            if not os.path.isdir(os.path.dirname(directory)):
                raise
            reason = f"no directory can be made there ({directory}). Check the path."  # as in /proc
            raise StorageRefused(self.url, reason) from None

    @contextmanager
    def _translated(self, key: str | None = None) -> Iterator[None]:
        try:
            yield
        except MemoryBudgetExceeded:
            raise StorageUnavailable(self.url, _FULL_TEXT) from None
        except OSError as error:
            if isinstance(error, DcpMemError):
                raise
            if isinstance(error, FileNotFoundError) and key is not None:
                raise StorageKeyMissing(self.url, key) from None
            reason = f"{os.strerror(error.errno or 0)} ({error.filename or self.url})"
            if error.errno in _REFUSED:
                what = "write" if key is None else "read"
                raise StorageRefused(
                    self.url, f"{reason}. Check the path, and that you may {what} there."
                ) from None
            raise StorageUnavailable(
                self.url, _FULL_TEXT if error.errno in _FULL else reason
            ) from None


class PosixUpload(Sending):
    """A file that gets its name once it is whole.

    Until then it has a name of its own: two flushers of one segment don't write to the same file.

    A copy is a clone of a part's blocks where the file system has that (XFS, btrfs, NFS 4.2 above
    these): it moves no bytes. Elsewhere it is a hard link, and all of the file or nothing. There is
    no `copy_file_range`: where it can't clone, it reads and writes the bytes again.

    Args:
        path: Of the file; its directory exists.
        nbytes: Length of the file.
        translated: Returns a context that translates errors.
        source: Open file that may be copied from. The upload closes it.
    """

    in_order = False

    def __init__(
        self,
        path: str,
        nbytes: int,
        translated: Callable[[], AbstractContextManager[None]],
        source: int | None = None,
    ) -> None:
        self.part_nbytes = part_nbytes(nbytes)
        self._path, self._translated = path, translated
        self._missing = set(range(part_count(nbytes, self.part_nbytes)))
        self._part = f"{path}.{uuid.uuid4().hex[:8]}.part"
        self._descriptor = os.open(
            self._part, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, _MODE
        )
        self._nbytes, self._source, self._etag = nbytes, source, ""
        self._is_named = self._is_link = False
        self._loss: tuple[str, str] | None = None  # storage, and why
        if source is not None:
            self.copies = Copies.PARTS if self._clones(0) else Copies.WHOLE

    def put_part(self, number: int, data: memoryview, crc32c: int) -> bool:
        offset = number * self.part_nbytes
        with self._writing():
            while data:
                count = os.pwrite(self._descriptor, data, offset)
                data, offset = data[count:], offset + count
        self._missing.discard(number)
        return True

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Translate errors, and raise UploadBroken for good once there was one.

        The error may be of bytes that were written before. The kernel drops those and says so once
        for each descriptor: the next sync would succeed.
        """
        if self._loss is not None:
            raise UploadBroken(*self._loss)
        try:
            with self._translated():
                yield
        except (StorageUnavailable, StorageRefused) as error:
            self._loss = error.url, f"{error.reason.rstrip('.')}. {_LOST_TEXT}"
            if isinstance(error, StorageRefused):
                raise
            raise UploadBroken(*self._loss) from None

    def copy_part(self, number: int, crc32c: int) -> bool:
        is_copied = self._clones(number)
        if is_copied:
            self._missing.discard(number)
        return is_copied

    def _clones(self, number: int) -> bool:
        """Clone the blocks of a part; return whether the file system has done it."""
        if self._source is None:
            return False
        start = number * self.part_nbytes
        nbytes = min(self.part_nbytes, self._nbytes - start)
        wanted = struct.pack("qQQQ", self._source, start, nbytes, start)
        try:
            fcntl.ioctl(self._descriptor, _CLONE_RANGE, wanted)
        except OSError:
            return False
        return nbytes > 0

    def copy_whole(self) -> bool:
        if self._source is None:
            return False
        try:
            # All names of a file have one time. It must not make what is being put look old: gc
            # and later commits remove old files that belong to no checkpoint.
            os.utime(self._source)
            # By its descriptor, so that it is the file that was looked at. Only with a `dir_fd`
            # does Python follow the link in /proc.
            os.link(f"/proc/self/fd/{self._source}", self._path, src_dir_fd=self._source)
        except FileExistsError:
            # The client's repeated request found the link that the first one had made (NFS), or
            # another process has put the segment meanwhile.
            return self._is_there()
        except OSError:
            return False
        with self._translated():
            sync_directory(os.path.dirname(self._path))
        self._note(self._source)
        self._is_link = True
        return True

    def _is_there(self) -> bool:
        with self._translated():
            self._is_link = os.stat(self._path).st_size == self._nbytes
            sync_directory(os.path.dirname(self._path))
        return self._is_link

    def etag(self) -> str:
        return self._etag

    def _note(self, descriptor: int) -> None:
        with self._translated():
            self._etag = _identity(os.fstat(descriptor))

    def finish(self) -> None:
        if not self._is_named:
            with self._writing():
                if self._missing:
                    raise ValueError(f"{len(self._missing)} parts of {self._path} were never put")
                os.fsync(self._descriptor)
        with self._translated():
            if not self._is_named:
                self._note(self._descriptor)
                os.rename(self._part, self._path)
                self._is_named = True
            sync_directory(os.path.dirname(self._path))

    def close(self) -> None:
        # An error here was reported by fsync already, or would hide the one that kept it from
        # running.
        for descriptor in (self._descriptor, self._source):
            if descriptor is not None:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        if not self._is_named:
            with contextlib.suppress(OSError):
                remove(self._part)


def _open(path: str) -> int:
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def _identity(facts: os.stat_result) -> str:
    """Return what changes where somebody writes to a file, or puts another in its place."""
    return f"{facts.st_ino}-{facts.st_mtime_ns}"


def _links(path: str) -> int:
    """Return how many names the file has; opening it makes an NFS client ask its server."""
    descriptor = _open(path)
    try:
        return os.fstat(descriptor).st_nlink
    finally:
        os.close(descriptor)


def _read(descriptor: int, offset: int, buffers: Sequence[memoryview]) -> int:
    done = 0
    for buffer in buffers:
        while buffer:
            count = os.preadv(descriptor, [buffer], offset + done)
            if count == 0:
                return done
            done, buffer = done + count, buffer[count:]
    return done


def _entry(entry: os.DirEntry[str]) -> Entry | None:
    """Return what lies there; None where it is gone by now, or a symlink to nowhere."""
    try:
        facts = entry.stat()
    except OSError as error:
        if error.errno in _GONE:
            return None
        raise
    return Entry(entry.name, facts.st_size, entry.is_dir(), modified=facts.st_mtime)
