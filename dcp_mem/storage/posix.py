"""Storage in a directory: local disks, and network file systems that are mounted."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

from dcp_mem.common.files import (
    UnfitFile,
    kind_of,
    open_file,
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
from dcp_mem.storage import Entry, FileRefused, FileUnavailable, Source, Unfinished, is_still
from dcp_mem.storage.posix_mounts import has_links
from dcp_mem.storage.posix_paths import (
    DESCRIPTORS,
    SEARCHED,
    answers,
    enter,
    found_again,
    make_directory,
    make_root,
    missing_directories,
    refuse_where_nothing_is_made,
    takes_nameless_file,
)
from dcp_mem.storage.posix_upload import MODE, PosixUpload, identity_of

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
_REFUSED_FILE = {errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.ENAMETOOLONG}
_UNAVAILABLE_FILE = {
    errno.EIO,
    errno.ESTALE,
    errno.EREMOTEIO,
    errno.EUCLEAN,
    errno.EBADMSG,
    errno.ENODATA,
}
"""Of one file, where the root answers; a mount that is gone says other things, or this of all."""
_FULL = {errno.ENOSPC, errno.EDQUOT}
_FULL_TEXT = "no space is left there. Free some, or raise the quota; the flush is tried again."
_UNFINISHED = r"(.+?)(?:\.[0-9a-f]{8}\.(?:part|new|tmp))+"
"""Of an upload, of a put on condition, of a put; a put on condition begins with a put."""
_ABOVE = {".", ".."}
_LOCK = ".dcp_mem/lock"
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF}
_LOCK_SECONDS = 10.0
"""The longest wait, in seconds, for another process that holds the lock."""
_LOCK_PAUSE = 0.005


class PosixStorage:
    """A directory as storage. What is made there goes by the umask, and is synced by its put.

    The root may be reached through links. Below it none is followed: every path leads through a
    descriptor of the directory that the file is in, and that was opened part by part.

    `url`: the directory's absolute path; it is made by the first put. `directory_mode`: what new
    directories get in place of what the umask has them get.
    """

    def __init__(self, url: str, directory_mode: int | None = None) -> None:
        self.url = url
        self._directory_mode = directory_mode
        self._has_locks, self._has_proc = True, False
        self._has_links: bool | None = None  # None: nothing has been written yet

    def upload(self, key: str, nbytes: int, source: Source | None = None) -> PosixUpload:
        translated = partial(self._translated, key)
        with translated(), ExitStack() as unless_begun:
            directory = self._open_directory(_directory_of(key), make=True)
            unless_begun.callback(os.close, directory)
            opened = self._opened(source) if source is not None and self._has_links else None
            if opened is not None:
                unless_begun.callback(os.close, opened)
            name = key.rpartition("/")[2]
            upload = PosixUpload(directory, name, nbytes, translated, opened)
            unless_begun.pop_all()
            return upload

    def _opened(self, source: Source) -> int | None:
        """Open a file to copy from; None where it is gone, or isn't what was stored any more."""
        try:
            with self._at(source.key) as path:
                descriptor = found_again(open_file, path)
        except OSError:
            return None
        facts = os.fstat(descriptor)
        if facts.st_size == source.nbytes and identity_of(facts) == source.etag:
            return descriptor
        os.close(descriptor)
        return None

    def put(self, key: str, data: bytes, *, create: bool = False) -> None:
        with self._translated(key), self._at(key, make=True) as path:
            if not create:
                write_atomically(path, data, sync=True, mode=MODE)
                return
            staged = f"{path}.{uuid.uuid4().hex[:8]}.new"
            write_atomically(staged, data, sync=True, mode=MODE)
            try:
                self._name(staged, path)
            except FileExistsError:
                # On NFS the server may have made the link, and the answer was lost: then the
                # client's repeated request found it. Two names of our file say so.
                if _links(staged) != 2:
                    raise CheckpointExists(os.path.dirname(key), self.url) from None
            finally:
                remove(staged)
            sync_directory(os.path.dirname(path))

    def _name(self, staged: str, path: str) -> None:
        """Give a file its name, which must be new. Raises FileExistsError."""
        if self._has_links:
            os.link(staged, path)
            return
        with self._locked():
            if os.path.lexists(path):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            os.rename(staged, path)

    def try_out(self) -> None:
        """Make a file in the directory; where that is missing, a directory above. Neither stays."""
        name = f"trial.{uuid.uuid4().hex[:8]}.tmp"  # as of a put, should it be left
        with self._translated(""):
            missing = missing_directories(self.url)
            has_links(os.path.dirname(missing[-1]) if missing else self.url, self.url)
            if not missing:
                with self._at(name) as path:
                    os.close(open_file(path, os.O_RDWR | os.O_CREAT, MODE))
                    os.unlink(path)
                return
            above = missing[-1]
            if os.path.lexists(above):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), above)
            path = os.path.join(os.path.dirname(above), name)
            if takes_nameless_file(os.path.dirname(above)):
                return
            try:
                os.mkdir(path, 0o700)
                os.rmdir(path)
            except FileNotFoundError:
                refuse_where_nothing_is_made(self.url, above)

    def get(self, key: str) -> bytes:
        with self._translated(key, is_read=True), self._at(key) as path:
            return found_again(read_bytes, path)

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> int:
        with self._translated(key, is_read=True), self._at(key) as path:
            descriptor = found_again(open_file, path)
            try:
                return _read(descriptor, offset, buffers)
            finally:
                os.close(descriptor)

    def ls(self, prefix: str) -> list[Entry]:
        try:
            with (
                self._translated(prefix, is_read=True),
                self._at(f"{prefix}/" if prefix else "") as path,
                os.scandir(path) as entries,
            ):
                return [found for entry in entries if (found := _entry(entry)) is not None]
        except StorageKeyMissing:
            return []

    def tree(self, most: int) -> list[tuple[str, Entry]] | None:
        return None

    def delete(self, key: str) -> None:
        with self._translated(key):
            with contextlib.suppress(FileNotFoundError), self._at(key) as path:
                found_again(os.unlink, path)
            self._remove_parent_if_empty(key)

    def has_conditions(self) -> bool:
        with self._translated(_LOCK), self._locked():
            # FUSE mounts without links are object stores: their locks are this host's alone.
            return self._has_locks and bool(self._has_links)

    def swap(self, key: str, old: bytes, new: bytes) -> bool:
        with self._translated(key), self._at(key, make=True) as path:
            staged = f"{path}.{uuid.uuid4().hex[:8]}.new"
            write_atomically(staged, new, sync=True, mode=MODE)
            try:
                with self._locked():
                    if not is_still(self, key, old):
                        return False
                    os.rename(staged, path)
            finally:
                remove(staged)
            sync_directory(os.path.dirname(path))
            return True

    def remove(self, key: str, old: bytes) -> bool:
        with self._translated(key):
            with self._locked():
                if not is_still(self, key, old):
                    return False
                with self._at(key) as path:
                    os.unlink(path)
            self._remove_parent_if_empty(key)
            return True

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep out all other processes that swap or remove under this root, on any host."""
        with self._at(_LOCK, make=True) as path:
            descriptor = _open_lock(path)
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
            if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
                # NFS locks only what may be written.
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES)) from None
            self._has_locks = False
        return True

    def unfinished(self, prefix: str) -> list[Unfinished]:
        found, above = [], f"{prefix}/" if prefix else ""
        with (
            self._translated(prefix),
            contextlib.suppress(FileNotFoundError),
            self._at(above) as top,
        ):
            for directory, _, files in os.walk(top):
                for file in files:
                    match = re.fullmatch(_UNFINISHED, file)
                    if match is not None:
                        path = os.path.join(directory, file)
                        key = above + os.path.relpath(os.path.join(directory, match[1]), top)
                        with contextlib.suppress(FileNotFoundError):
                            found.append(Unfinished(key, os.lstat(path).st_mtime))
        return found

    def drop_unfinished(self, key: str) -> None:
        with self._translated(key), contextlib.suppress(FileNotFoundError):
            with self._at(key) as path:
                directory, name = os.path.split(path)
                for file in os.listdir(directory):
                    match = re.fullmatch(_UNFINISHED, file)
                    if match is not None and match[1] == name:
                        remove(os.path.join(directory, file))
            self._remove_parent_if_empty(key)

    def make_directory(self, key: str) -> None:
        """Make a directory, where it is missing, and those above it."""
        with self._translated(key), self._at(f"{key}/", make=True):
            return

    def _path(self, key: str) -> str:
        return os.path.join(self.url, key) if key else self.url

    @contextmanager
    def _at(self, key: str, *, make: bool = False) -> Iterator[str]:
        """Yield a path to a key on which only the last part may be a link; "a/" is directory a."""
        name = key.rpartition("/")[2]
        if name in _ABOVE:
            raise self._astray(key)
        directory = self._open_directory(_directory_of(key), make=make)
        try:
            yield f"{DESCRIPTORS}/{directory}/{name}"
        finally:
            os.close(directory)

    def _open_directory(self, key: str, *, make: bool = False) -> int:
        """Open a directory, made where it is missing if so asked. The caller closes it."""
        parts = key.split("/") if key else []
        if not {"", *_ABOVE}.isdisjoint(parts):
            raise self._astray(key)
        self._has_proc = self._has_proc or os.path.isdir(DESCRIPTORS)
        if not self._has_proc:  # all would seem to be missing
            raise StorageRefused(self.url, "/proc isn't mounted. Mount it: files are reached there")
        if make:
            for made in make_root(self.url):
                self._set_mode(made)
            if self._has_links is None:
                self._has_links = has_links(self.url, self.url)
        found = found_again(lambda path: os.open(path, SEARCHED), self.url)
        for part in parts:
            above, path = found, f"{DESCRIPTORS}/{found}/{part}"
            try:
                try:
                    found = found_again(enter, path)
                except FileNotFoundError:
                    if not make:
                        raise
                    make_directory(path)
                    found = found_again(enter, path)
                    self._set_mode(f"{DESCRIPTORS}/{found}")
            finally:
                os.close(above)
        return found

    def _set_mode(self, directory: str) -> None:
        if self._directory_mode is not None:
            with contextlib.suppress(PermissionError):  # another user's, who was quicker
                os.chmod(directory, self._directory_mode)

    def _astray(self, key: str) -> StorageRefused:
        return StorageRefused(self.url, f"{key!r} names nothing below the root. Check the name.")

    def _remove_parent_if_empty(self, key: str) -> None:
        """Remove the directory above a key; the root as well, unless a link leads there."""
        parent = _directory_of(key)
        with contextlib.suppress(FileNotFoundError):
            if parent:
                with self._at(parent) as path:
                    remove_directory_if_empty(path)
            elif not os.path.islink(self.url):
                remove_directory_if_empty(self.url)

    @contextmanager
    def _translated(self, key: str, *, is_read: bool = False) -> Iterator[None]:
        """Translate what goes wrong at a key; one that is read may be missing, or be at fault."""
        try:
            yield
        except MemoryBudgetExceeded:
            raise StorageUnavailable(self.url, _FULL_TEXT) from None
        except OSError as error:
            if isinstance(error, DcpMemError):
                raise
            if isinstance(error, FileNotFoundError) and is_read:
                raise StorageKeyMissing(self.url, key) from None
            raise self._error(error, key, is_read=is_read) from None

    def _error(self, error: OSError, key: str, *, is_read: bool) -> DcpMemError:
        number, is_unfit = error.errno, isinstance(error, UnfitFile)
        reason = f"{error.strerror or os.strerror(number or 0)} ({self._path(key)})"
        if is_read and is_unfit:
            return FileRefused(self.url, reason)
        if is_read and number in _REFUSED_FILE | _UNAVAILABLE_FILE and key and answers(self.url):
            return (FileRefused if number in _REFUSED_FILE else FileUnavailable)(self.url, reason)
        if is_unfit:
            return StorageRefused(self.url, f"{reason}. Remove it, or give another path.")
        if number in _REFUSED:
            what = "read" if is_read else "write"
            return StorageRefused(
                self.url, f"{reason}. Check the path, and that you may {what} there."
            )
        return StorageUnavailable(self.url, _FULL_TEXT if number in _FULL else reason)


def _directory_of(key: str) -> str:
    return key.rpartition("/")[0]


def _open_lock(path: str) -> int:
    """Open the lock; a new one is for all who may write beside it."""
    try:
        return open_file(path, os.O_RDWR)
    except PermissionError:
        return open_file(path)
    except FileNotFoundError:
        descriptor = open_file(path, os.O_RDWR | os.O_CREAT, MODE)
        with contextlib.suppress(PermissionError):  # another user's, who was quicker
            os.fchmod(descriptor, MODE & os.stat(os.path.dirname(path)).st_mode)
        return descriptor


def _links(path: str) -> int:
    """Return how many names the file has; opening it makes an NFS client ask its server."""
    descriptor = open_file(path)
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
    """Return what lies there, links as such; None where it is gone by now."""
    is_directory = True  # what can't be looked at may be a checkpoint
    try:
        is_directory = entry.is_dir(follow_symlinks=False)
        facts = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno not in _REFUSED_FILE | _UNAVAILABLE_FILE:
            raise
        return Entry(entry.name, 0, is_directory, what=os.strerror(error.errno))
    is_fit = is_directory or stat.S_ISREG(facts.st_mode)
    what = "" if is_fit else kind_of(facts.st_mode)
    return Entry(entry.name, facts.st_size, is_directory, modified=facts.st_mtime, what=what)
