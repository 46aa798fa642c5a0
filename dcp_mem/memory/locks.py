"""Advisory locks: they vanish with the process that holds them, however it ends.

Leases (flock) belong to an open file: a checkpoint that is read or flushed, and a slot that is
staged, are protected in whatever directory they lie. A forked child has a part in its parent's
leases until it closes its copies of the descriptors; those of slots it closes at once. The job's
lock (POSIX) belongs to a process: a forked data-loader worker that outlives its killed trainer
doesn't hold the job.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from dcp_mem.common.files import create, lies_at, read_bytes, write_atomically
from dcp_mem.common.value_class import value_class
from dcp_mem.errors import DcpMemError, JobInUse, ManifestInvalid
from dcp_mem.format.records import Record

_PROBE_SECONDS = 0.2
"""The longest time, in seconds, to hold a lease only to find out whether there is another one."""
_PAUSE = 0.0001
"""Seconds between two tries to get a turn; most turns take less."""


def try_lease(descriptor: int, *, exclusive: bool) -> bool:
    """Take or convert a descriptor's lease, without waiting; False where another one forbids it."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def share(descriptor: int) -> bool:
    """Take a shared lease; False where another process holds an exclusive one for good.

    Leases that are held only to find out whether there is another one are waited for.
    """
    deadline = time.monotonic() + _PROBE_SECONDS
    while not try_lease(descriptor, exclusive=False):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def open_leased(path: str) -> int:
    """Open a file, take a shared lease on it, and return its descriptor.

    Raises FileNotFoundError, BlockingIOError.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        is_shared = share(descriptor)
        if os.stat(path).st_ino != os.fstat(descriptor).st_ino:
            end_lease(descriptor)
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if not is_shared:
            raise BlockingIOError(errno.EWOULDBLOCK, "locked by a process that works on it", path)
        return descriptor
    except BaseException:
        os.close(descriptor)
        raise


def end_lease(descriptor: int) -> None:
    """End a lease; closing isn't enough while a forked child has a copy of the descriptor."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)


@contextmanager
def leased_alone(path: str, flags: int = os.O_RDONLY) -> Iterator[int | None]:
    """Open a file or directory under an exclusive lease, which ends with the block.

    Yields its descriptor; None where it is gone, or another process has a lease on it.
    """
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC)
    except FileNotFoundError:
        yield None
        return
    is_taken = False
    try:
        is_taken = try_lease(descriptor, exclusive=True)
        yield descriptor if is_taken else None
    finally:
        if is_taken:
            end_lease(descriptor)
        os.close(descriptor)


def is_leased(path: str) -> bool:
    """Return whether a process reads, flushes or stages this file right now."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if try_lease(descriptor, exclusive=True):
            end_lease(descriptor)
            return False
        return True
    finally:
        os.close(descriptor)


def is_in_use(path: str) -> bool:
    """Return whether a process reads or flushes a checkpoint, by the leases on its manifest.

    Raises FileNotFoundError.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # Where that fails, the other one may only be looking, too: `share` waits for it.
        is_alone = try_lease(descriptor, exclusive=True)
        is_leaving = not (is_alone or share(descriptor))
        if is_leaving or not lies_at(path, os.fstat(descriptor).st_ino):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return not (is_alone or try_lease(descriptor, exclusive=True))
    finally:
        end_lease(descriptor)
        os.close(descriptor)


@contextmanager
def in_turn(directory: str, *, is_shared: bool = False) -> Iterator[None]:
    """Run while no other process asks about leases in a directory, and so holds them for a moment.

    A process that takes longer than `_PROBE_SECONDS` (a stopped one, say) isn't waited for. So
    what runs in turn must be safe without one. Of slots, say, there may be one more then.

    `is_shared`: whether others that ask for a shared turn may run meanwhile.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + _PROBE_SECONDS
        while not try_lease(descriptor, exclusive=not is_shared) and time.monotonic() < deadline:
            time.sleep(_PAUSE)
        yield
    finally:
        end_lease(descriptor)
        os.close(descriptor)


@value_class
class RunIdentity:
    """Which processes may share a job's memory: those of one run, or with the same token."""

    run: str  # the launcher's id of the run; "" where there is none
    token: str  # goes along when a writer is pickled into another process

    def admits(self, other: RunIdentity) -> bool:
        """Return whether a process of the other identity may share the job."""
        return bool(self.run and self.run == other.run) or self.token == other.token


@value_class
class SavingRun:
    """The run that saves a job on this node, or did last."""

    token: str = ""  # as its checkpoints have it; "" before the first one
    url: str = ""  # the job's root on storage; "" for none, and where it isn't known
    has_ended: bool = False  # whether a writer of the run has been closed, rather than killed


@value_class(kw_only=True)
class _Owner(Record):
    """`.owner.json`: the process that has a job, and the run that saves it."""

    form = "owner"

    run: str = ""
    token: str = ""
    process: str = "another process"
    saves: SavingRun = SavingRun()


def _owner_of(directory: str) -> _Owner:
    try:
        return _Owner.from_json(read_bytes(os.path.join(directory, _OWNER)))
    except (OSError, ManifestInvalid):
        return _Owner()


_OWNER = ".owner.json"
_held_here: set[str] = set()
"""Directories of the jobs whose locks this process has."""
_guard = threading.RLock()
"""Held while a lock is taken, and while a lock's file is open only to look at it.

Whoever closes the file drops the lock that this process has. Reentrant: a finalizer may close one.
"""


class JobLock:
    """This process's lock on a job's directory: shared within a run, closed to other runs.

    One file carries the lock. A process that has the lock opens the file for nothing else: closing
    any descriptor of it would drop the lock.

    Raises JobInUse, MemoryBudgetExceeded.
    """

    def __init__(self, directory: str, job: str, identity: RunIdentity) -> None:
        self._directory, self._identity = directory, identity
        self._descriptor = create(os.path.join(directory, ".lock"))
        try:
            while not self._has_taken(job):
                # A process that has the lock exclusively is only writing its identity.
                time.sleep(_PAUSE)
        except BaseException:
            self.close()
            raise

    def _has_taken(self, job: str) -> bool:
        """Take the lock, without waiting; False where another process has it exclusively."""
        with _guard:
            if not self._is_first():
                if not self._has_locked(fcntl.LOCK_SH):
                    return False
                owner = _owner_of(self._directory)
                is_admitted = self._identity.admits(RunIdentity(owner.run, owner.token))
                if not is_admitted and not self._is_first():
                    raise JobInUse(job, owner.process)
            _held_here.add(self._directory)
            return True

    def _has_locked(self, kind: int) -> bool:
        try:
            fcntl.lockf(self._descriptor, kind | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def _is_first(self) -> bool:
        """Take the job if no process has it, and let the others of this run in."""
        if not self._has_locked(fcntl.LOCK_EX):
            return False
        self._write_down(SavingRun())
        fcntl.lockf(self._descriptor, fcntl.LOCK_SH)
        return True

    def note_run(self, run: str, url: str | None = None) -> None:
        """Write down which run saves here from now on; flushers and followers go by it."""
        self._write_down(SavingRun(run, url or ""))

    def note_end(self) -> None:
        """Write down that the run has ended well, for followers; nothing where that can't be."""
        with suppress(OSError, DcpMemError):
            self._write_down(replace(run_in(self._directory), has_ended=True))

    def _write_down(self, saves: SavingRun) -> None:
        identity = self._identity
        process = f"process {os.getpid()} on {os.uname().nodename}"
        process += f" ({identity.run})" if identity.run else ""
        owner = _Owner(run=identity.run, token=identity.token, process=process, saves=saves)
        write_atomically(os.path.join(self._directory, _OWNER), owner.to_json())

    def close(self) -> None:
        """Give the lock back."""
        with _guard:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1
                _held_here.discard(self._directory)


def job_is_live(directory: str) -> bool:
    """Return whether a live process holds the job."""
    with _guard:
        if directory in _held_here:
            return True  # and opening its lock file here would lose the lock
        try:
            descriptor = os.open(os.path.join(directory, ".lock"), os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            return _holder(descriptor) is not None
        finally:
            os.close(descriptor)


def _forget_parent() -> None:
    """After a fork: the child has none of the locks, and another thread may have had the guard."""
    global _guard
    _guard = threading.RLock()
    _held_here.clear()


os.register_at_fork(after_in_child=_forget_parent)


def run_in(directory: str) -> SavingRun:
    """Return what is written down of the run that saves here."""
    return _owner_of(directory).saves


def saving_run(directory: str) -> str:
    """Return the token of the run that saves here, or did last; "" before its first checkpoint."""
    return run_in(directory).token


def _holder(descriptor: int) -> int | None:
    """Return the id of a process with a POSIX lock on the file; None where there is none."""
    query = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    answer = struct.unpack("hhqqi", fcntl.fcntl(descriptor, fcntl.F_GETLK, query))
    return None if answer[0] == fcntl.F_UNLCK else int(answer[4])


def new_token() -> str:
    """Return a token that no other run has."""
    return uuid.uuid4().hex
