"""Storage in a directory: local disks, and network file systems that are mounted."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
import struct
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import TypeVar

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
from dcp_mem.config import is_checkpoint_name
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
    FileRefused,
    FileUnavailable,
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
_LOST_TEXT = "What was written before may be lost: the file is begun anew"
_UNFINISHED = re.compile(r"(.+?)(?:\.[0-9a-f]{8}\.(?:part|new|tmp))+")
"""Of an upload, of a put on condition, of a put; a put on condition begins with a put."""
_DESCRIPTORS = "/proc/self/fd"
_ABOVE = {".", ".."}
_SEARCHED = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_LOCK = ".dcp_mem/lock"
_MOST_REMOVED = 5
"""Times that a directory is made anew that somebody removes meanwhile."""
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF}
_LOCK_SECONDS = 10.0
"""The longest wait, in seconds, for another process that holds the lock."""
_LOCK_PAUSE = 0.005
_CLONE_RANGE = 0x4020940D  # FICLONERANGE: Python has no name for it


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

    def upload(self, key: str, nbytes: int, source: Source | None = None) -> PosixUpload:
        translated = partial(self._translated, key)
        with translated(), ExitStack() as unless_begun:
            directory = self._open_directory(_directory_of(key), make=True)
            unless_begun.callback(os.close, directory)
            opened = None if source is None else self._opened(source)
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
                descriptor = _found(open_file, path)
        except OSError:
            return None
        facts = os.fstat(descriptor)
        if facts.st_size == source.nbytes and _identity(facts) == source.etag:
            return descriptor
        os.close(descriptor)
        return None

    def put(self, key: str, data: bytes, *, create: bool = False) -> None:
        with self._translated(key), self._at(key, make=True) as path:
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
        """Make a file in the directory; where that is missing, a directory above. Neither stays.

        The directory itself is its user's to make: it doesn't come and go meanwhile.
        """
        name = f"trial.{uuid.uuid4().hex[:8]}.tmp"  # as of a put, should it be left
        with self._translated(""):
            if os.path.isdir(self.url):
                with self._at(name) as path:
                    os.close(open_file(path, os.O_RDWR | os.O_CREAT, _MODE))
                    os.unlink(path)
                return
            above = _missing(self.url)[-1]
            if os.path.lexists(above):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), above)
            path = os.path.join(os.path.dirname(above), name)
            if _takes_nameless_file(os.path.dirname(above)):
                return
            try:
                os.mkdir(path, 0o700)
                os.rmdir(path)
            except FileNotFoundError:
                _refuse_where_nothing_is_made(self.url, above)

    def get(self, key: str) -> bytes:
        with self._translated(key, is_read=True), self._at(key) as path:
            return _found(read_bytes, path)

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> int:
        with self._translated(key, is_read=True), self._at(key) as path:
            descriptor = _found(open_file, path)
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
                _found(os.unlink, path)
            self._remove_parent_if_empty(key)

    def has_conditions(self) -> bool:
        with self._translated(_LOCK), self._locked():
            return self._has_locks

    def swap(self, key: str, old: bytes, new: bytes) -> bool:
        with self._translated(key), self._at(key, make=True) as path:
            staged = f"{path}.{uuid.uuid4().hex[:8]}.new"
            write_atomically(staged, new, sync=True, mode=_MODE)
            try:
                with self._locked():
                    if not self._is(key, old):
                        return False
                    os.rename(staged, path)
            finally:
                remove(staged)
            sync_directory(os.path.dirname(path))
            return True

    def remove(self, key: str, old: bytes) -> bool:
        with self._translated(key):
            with self._locked():
                if not self._is(key, old):
                    return False
                with self._at(key) as path:
                    os.unlink(path)
            self._remove_parent_if_empty(key)
            return True

    def _is(self, key: str, data: bytes) -> bool:
        try:
            return self.get(key) == data
        except StorageKeyMissing:
            return False

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep out all other processes that swap or remove under this root, on any host.

        NFS clients take such a lock to the server. It ends with its process.
        """
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
                    match = _UNFINISHED.fullmatch(file)
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
                    match = _UNFINISHED.fullmatch(file)
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
            yield f"{_DESCRIPTORS}/{directory}/{name}"
        finally:
            os.close(directory)

    def _open_directory(self, key: str, *, make: bool = False) -> int:
        """Open a directory, made where it is missing if so asked. The caller closes it."""
        parts = key.split("/") if key else []
        if not {"", *_ABOVE}.isdisjoint(parts):
            raise self._astray(key)
        self._has_proc = self._has_proc or os.path.isdir(_DESCRIPTORS)
        if not self._has_proc:  # all would seem to be missing
            raise StorageRefused(self.url, "/proc isn't mounted. Mount it: files are reached there")
        if make:
            for made in _make_root(self.url):
                self._set_mode(made)
        found = _found(lambda path: os.open(path, _SEARCHED), self.url)
        for part in parts:
            above, path = found, f"{_DESCRIPTORS}/{found}/{part}"
            try:
                try:
                    found = _found(_enter, path)
                except FileNotFoundError:
                    if not make:
                        raise
                    _make_directory(path)
                    found = _found(_enter, path)
                    self._set_mode(f"{_DESCRIPTORS}/{found}")
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
        if is_read and number in _REFUSED_FILE | _UNAVAILABLE_FILE and key and _answers(self.url):
            return (FileRefused if number in _REFUSED_FILE else FileUnavailable)(self.url, reason)
        if is_unfit:
            return StorageRefused(self.url, f"{reason}. Remove it, or give another path.")
        if number in _REFUSED:
            what = "read" if is_read else "write"
            return StorageRefused(
                self.url, f"{reason}. Check the path, and that you may {what} there."
            )
        return StorageUnavailable(self.url, _FULL_TEXT if number in _FULL else reason)


def name_behind_link(url: str, name: str) -> str:
    """Return the name in the same directory that a link under the root stands for, else the name.

    People have links such as `latest`. They are names to load from, and nothing else follows them.
    """
    target = link_target(url, name)
    directory, _, base = os.path.join(url, target or name).rpartition("/")
    is_beside = target is not None and os.path.realpath(directory) == os.path.realpath(url)
    return base if is_beside and is_checkpoint_name(base) else name


def link_target(url: str, name: str) -> str | None:
    """Return where a link directly under a root leads; None where there is none by that name."""
    try:
        return os.readlink(os.path.join(url, name)).rstrip("/") if url.startswith("/") else None
    except OSError:  # no link, or not to be seen: whoever opens it says so
        return None


class PosixUpload(Sending):
    """A file that gets its name once it is whole.

    Until then it has a name of its own: two flushers of one segment don't write to the same file.

    A copy is a clone of a part's blocks where the file system has that (XFS, btrfs, NFS 4.2 above
    these): it moves no bytes. Elsewhere it is a hard link, and all of the file or nothing. There is
    no `copy_file_range`: where it can't clone, it reads and writes the bytes again.

    `source`: open file that may be copied from. The upload closes it.
    """

    in_order = False

    def __init__(
        self,
        directory: int,
        name: str,
        nbytes: int,
        translated: Callable[[], AbstractContextManager[None]],
        source: int | None = None,
    ) -> None:
        self.part_nbytes = part_nbytes(nbytes)
        self._directory, self._path = directory, f"{_DESCRIPTORS}/{directory}/{name}"
        self._translated = translated
        self._missing = set(range(part_count(nbytes, self.part_nbytes)))
        self._part = f"{self._path}.{uuid.uuid4().hex[:8]}.part"
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
        if self._source is None or _mode(self._source) != _mode(self._descriptor):
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
            facts = os.lstat(self._path)
            self._is_link = stat.S_ISREG(facts.st_mode) and facts.st_size == self._nbytes
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
        with contextlib.suppress(OSError):
            os.close(self._directory)


def _directory_of(key: str) -> str:
    return key.rpartition("/")[0]


def _enter(path: str) -> int:
    """Open a directory, to search it; raise UnfitFile for a link or anything else."""
    try:
        return os.open(path, _SEARCHED | os.O_NOFOLLOW)
    except NotADirectoryError:
        what = f"{os.path.basename(path)} is {kind_of(os.lstat(path).st_mode)}"
        if what.endswith("link"):
            what += ", and links below the root aren't followed"
        raise UnfitFile(path, what) from None


def _missing(path: str) -> list[str]:
    """Return a path and those above it that are no directories, the path first."""
    missing = []
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    return missing


def _make_root(url: str) -> list[str]:
    """Make the root, and the directories above it, where they are missing; return these."""
    for _ in range(_MOST_REMOVED):
        missing = _missing(url)
        try:
            for directory in reversed(missing):
                _make_directory(directory)
        except FileNotFoundError:  # somebody removes them meanwhile, or none can be made
            continue
        return missing
    _refuse_where_nothing_is_made(url, missing[-1])
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), url)


def _takes_nameless_file(directory: str) -> bool:
    """Make a file that nothing is left of, whoever is killed. False: not here, or not at all."""
    try:
        os.close(os.open(directory, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    except OSError:
        return False
    return True


def _refuse_where_nothing_is_made(url: str, missing: str) -> None:
    """Raise StorageRefused where the directory above is there: it takes none, as in /proc."""
    if os.path.isdir(os.path.dirname(missing)):
        reason = f"no directory can be made there ({missing}). Check the path."
        raise StorageRefused(url, reason)


def _make_directory(path: str) -> None:
    """Make a directory, as durable as what is in it."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o777)
        # A directory that may be written but not read can't be synced.
        with contextlib.suppress(PermissionError):
            sync_directory(os.path.dirname(path))


def _open_lock(path: str) -> int:
    """Open the lock; a new one is for all who may write beside it."""
    try:
        return open_file(path, os.O_RDWR)
    except PermissionError:
        return open_file(path)
    except FileNotFoundError:
        descriptor = open_file(path, os.O_RDWR | os.O_CREAT, _MODE)
        with contextlib.suppress(PermissionError):  # another user's, who was quicker
            os.fchmod(descriptor, _MODE & os.stat(os.path.dirname(path)).st_mode)
        return descriptor


def _found(act: Callable[[str], T], path: str) -> T:
    """Return what `act` returns for a path; a missing name is looked for in its directory.

    An NFS client that has missed a name misses it for half a minute, unless it lists the directory.
    Raises FileNotFoundError only where the directory doesn't list the name.
    """
    try:
        return act(path)
    except FileNotFoundError:
        directory, name = os.path.split(path)
        # The directory may be one that may be searched but not read, or missing itself.
        with contextlib.suppress(PermissionError, FileNotFoundError):
            if name in os.listdir(directory):
                return act(path)
        raise


def _answers(root: str) -> bool:
    """Return whether a root can be listed, and its file system answers: nothing keeps that."""
    try:
        os.statvfs(root)
        with os.scandir(root) as entries:
            next(entries, None)
    except OSError:
        return False
    return True


def _mode(descriptor: int) -> int:
    return stat.S_IMODE(os.fstat(descriptor).st_mode)


def _identity(facts: os.stat_result) -> str:
    """Return what changes where somebody writes to a file, or puts another in its place."""
    return f"{facts.st_ino}-{facts.st_mtime_ns}"


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
