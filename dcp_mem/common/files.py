"""Small file operations that the commit path rests on: each returns its result or raises."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import stat
import uuid
from mmap import mmap

from dcp_mem.errors import MemoryBudgetExceeded, MemoryRootRefused, MemoryUnavailable

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # of fallocate
_MOST_BYTES = 4 << 30
"""The largest file that is read whole: a catalog of tens of millions of shards is smaller."""
_NOT_OPENED = {errno.ELOOP, errno.ENXIO, errno.EISDIR}  # a link, a socket or device, a directory
_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a directory",
    stat.S_IFREG: "a file",
}


class UnfitFile(OSError):
    """The path isn't a regular file, or is too large; nothing was read."""

    def __init__(self, path: str, what: str) -> None:
        super().__init__(errno.EINVAL, what, path)


def umask() -> int:
    """Return this process's umask, without setting it: other threads make files meanwhile."""
    with open("/proc/self/status") as stream:
        match = re.search(r"^Umask:\s*([0-7]+)$", stream.read(), re.MULTILINE)
    return 0o077 if match is None else int(match[1], 8)


def write_atomically(
    path: str, data: bytes | memoryview | mmap, *, sync: bool = False, mode: int = 0o600
) -> os.stat_result:
    """Replace the file at `path`; readers see all of the old or all of the new one.

    Raises MemoryBudgetExceeded.
    """
    temporary = f"{path}.{uuid.uuid4().hex[:8]}.tmp"
    try:
        with open(
            os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, mode), "wb"
        ) as stream:
            stream.write(data)
            stream.flush()
            if sync:
                os.fsync(stream.fileno())
            facts = os.fstat(stream.fileno())
        os.rename(temporary, path)
    except OSError as error:
        remove(temporary)
        raise_if_full(error, path, len(data))
        raise
    if sync:
        sync_directory(os.path.dirname(path))
    return facts


def raise_if_full(error: OSError, path: str, nbytes: int = 1) -> None:
    """Raise MemoryBudgetExceeded, with the path, for an error that says that there is no space."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = free_bytes(os.path.dirname(path))
        what = f"no space for {path}"
        if free >= nbytes:
            what += ", though bytes are free: its inodes or a quota are used up"
        raise MemoryBudgetExceeded(max(nbytes, free + 1), free, what) from None


def create(path: str, *, flags: int = 0) -> int:
    """Open a private file (0600) for reading and writing, made where it is missing."""
    try:
        return open_file(path, os.O_CREAT | os.O_RDWR | flags)
    except OSError as error:
        raise_if_full(error, path)
        raise


def link(path: str, name: str) -> None:
    """Give a file one more name."""
    try:
        os.link(path, name)
    except OSError as error:
        raise_if_full(error, name)
        raise


def link_open(descriptor: int, name: str) -> None:
    """Give an open file, which has a name, one more. Raises FileNotFoundError where it has none."""
    try:  # With descriptors of directories os.link follows the symbolic link; the path is absolute.
        os.link(f"/proc/self/fd/{descriptor}", name, src_dir_fd=descriptor, follow_symlinks=True)
    except OSError as error:
        raise_if_full(error, name)
        raise


def swap_names(one: str, other: str) -> None:
    """Swap the names of two files in one step, so that neither is ever missing."""
    if _libc.renameat2(
        _AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE
    ):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), one)


def sync_directory(path: str) -> None:
    """Make a directory's entries survive a power cut."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def kind_of(mode: int) -> str:
    """Return what lies under a path, by its `st_mode`, in words."""
    return _KINDS.get(stat.S_IFMT(mode), "a device")


def open_file(path: str, flags: int = os.O_RDONLY, mode: int = 0o600) -> int:
    """Open a regular file, made where that is asked for; raise UnfitFile for anything else.

    A link isn't followed, and nobody is waited for at the other end of a FIFO.
    """
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, mode)
    except OSError as error:
        if error.errno not in _NOT_OPENED:
            raise
        raise UnfitFile(path, f"it is {kind_of(os.lstat(path).st_mode)}, not a file") from None
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise UnfitFile(path, f"it is {kind_of(mode)}, not a file")
    return descriptor


def read_bytes(path: str) -> bytes:
    """Return the content of a file; raise UnfitFile as `open_file` does, or if it is too large."""
    with open(open_file(path), "rb") as stream:
        nbytes = os.fstat(stream.fileno()).st_size
        if nbytes > _MOST_BYTES:
            raise UnfitFile(path, f"it has {nbytes} bytes, more than are ever read whole")
        return stream.read(nbytes)


def settled(path: str, content: bytes) -> bytes:
    """Return what a private file holds: the content that the first process has given."""
    temporary = f"{path}.{uuid.uuid4().hex[:8]}.new"
    write_atomically(temporary, content)
    try:
        link(temporary, path)  # the first one wins, and is never seen half written
    except FileExistsError:
        pass
    finally:
        remove(temporary)
    return read_bytes(path)


def own_directory(path: str) -> str:
    """Make a directory (0700) where it is missing; check that it is this user's alone."""
    if not os.path.lexists(path):
        _make_own(path)
    facts = os.lstat(path)
    if stat.S_ISLNK(facts.st_mode) or os.path.realpath(path) != path:
        raise MemoryRootRefused(
            path, f"a symlink leads there (it is really {os.path.realpath(path)})"
        )
    if not stat.S_ISDIR(facts.st_mode):
        raise MemoryRootRefused(path, "it is not a directory")
    if facts.st_uid != os.geteuid():
        raise MemoryRootRefused(
            path, f"it belongs to uid {facts.st_uid}, not to you (uid {os.geteuid()})"
        )
    if facts.st_mode & 0o022:
        raise MemoryRootRefused(
            path, f"others may write to it (mode {stat.S_IMODE(facts.st_mode):04o})"
        )
    return path


def _make_own(path: str) -> None:
    parent = os.path.dirname(path)
    if not os.path.isdir(parent):
        raise MemoryUnavailable(path, f"{parent} does not exist")
    if os.path.realpath(parent) != parent:
        raise MemoryRootRefused(
            path, f"a symlink leads there (it is really {os.path.realpath(path)})"
        )
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        return
    except OSError as error:
        raise_if_full(error, path)
        raise MemoryUnavailable(path, os.strerror(error.errno or 0)) from None


def remove(path: str) -> None:
    """Delete a file, if it exists."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def version(facts: os.stat_result) -> tuple[int, ...]:
    """Return what tells a file from those that had its name before."""
    return facts.st_ino, facts.st_mtime_ns, facts.st_size


def lies_at(path: str, inode: int) -> bool:
    """Return whether a file lies there, rather than none or another one."""
    try:
        return os.stat(path, follow_symlinks=False).st_ino == inode
    except FileNotFoundError:
        return False


def give_back_memory(descriptor: int) -> None:
    """Give the memory of a tmpfs file without a name back, whoever has it open or mapped as well.

    Else it stays until the last of them has closed it. What still looks at the bytes finds zeros.
    Nothing happens to a file that has a name, or where the file system can't do this.
    """
    facts = os.fstat(descriptor)
    if facts.st_nlink == 0 and facts.st_size:
        _libc.fallocate(descriptor, _KEEP_SIZE | _PUNCH_HOLE, 0, facts.st_size)


def remove_directory_if_empty(path: str) -> None:
    """Delete a directory, if it exists and is empty."""
    try:
        os.rmdir(path)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
            raise


def free_bytes(path: str) -> int:
    """Return the bytes that a user may still write to the file system of `path`."""
    facts = os.statvfs(path)
    return facts.f_bavail * facts.f_frsize


def is_full(path: str) -> bool:
    """Return whether a user can make no file in the file system of `path`."""
    facts = os.statvfs(path)
    lacks_inodes = facts.f_files > 0 and facts.f_favail == 0  # some have no limit, and tell 0
    return facts.f_bavail == 0 or lacks_inodes


def allocated_bytes(path: str) -> int:
    """Return the bytes that the files under `path` occupy, or have set aside by their size.

    What has several names counts once. Hidden directories come first and last: what is renamed from
    one or into one meanwhile, as free slots become segments and these free slots, isn't overlooked.
    """
    found = dict[int, int]()
    for directory, below, names in os.walk(path):
        hidden = [name for name in below if name.startswith(".")]
        if hidden:
            below[:] = [*hidden, *(name for name in below if name not in hidden), *hidden]
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # renamed or deleted meanwhile
                facts = os.lstat(os.path.join(directory, name))
                nbytes = max(facts.st_blocks * 512, facts.st_size)
                found[facts.st_ino] = max(nbytes, found.get(facts.st_ino, 0))
    return sum(found.values())
