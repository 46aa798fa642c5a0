"""Advisory locks: they vanish with the process that holds them, however it ends.

Leases (flock) go by open file, so a checkpoint that is being read or flushed, and a slot that is being staged, are
protected in whatever directory they lie at the moment. The job's lock (POSIX) goes by process, so that a forked
data-loader worker that outlives its killed trainer doesn't hold the job.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import struct
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from dcp_mem.errors import JobInUse
from dcp_mem.files import read_bytes, write_atomically

_PROBES_LAST = 0.2


def try_lease(descriptor: int, *, exclusive: bool) -> bool:
    """Take or convert this descriptor's lease without waiting; False where another's lease is in the way."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def share(descriptor: int) -> bool:
    """Take a shared lease, sitting out those that only ask whether there is one; False where it is taken for good."""
    deadline = time.monotonic() + _PROBES_LAST
    while not try_lease(descriptor, exclusive=False):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def open_leased(path: str) -> int:
    """A descriptor, with a shared lease, of the file that lies there. Raises FileNotFoundError where none lies there.

    One that was taken away to be recycled before its lease was ours counts as gone: its bytes are another save's by now.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if share(descriptor) and os.stat(path).st_ino == os.fstat(descriptor).st_ino:
            return descriptor
        end_lease(descriptor)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    except BaseException:
        os.close(descriptor)
        raise


def end_lease(descriptor: int) -> None:
    """Give the lease back explicitly: closing isn't enough while a forked child holds a copy of the descriptor."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)


def is_leased(path: str) -> bool:
    """Whether somebody reads, flushes or stages this file right now."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if try_lease(descriptor, exclusive=True):
            end_lease(descriptor)
            return False
        return True
    finally:
        os.close(descriptor)


@contextmanager
def in_turn(directory: str) -> Iterator[None]:
    """Run while no other process asks about leases in this directory: who asks holds each for a moment.

    Who takes longer than `_PROBES_LAST` (a stopped process, say) isn't waited for: its claims are safe all the same, and
    only the number of slots may grow by one.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + _PROBES_LAST
        while not try_lease(descriptor, exclusive=True) and time.monotonic() < deadline:
            time.sleep(0.0005)
        yield
    finally:
        end_lease(descriptor)
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """Who may share a job's memory: processes of one run (its launcher's id), or those that pickled the same token."""

    run: str
    token: str

    def admits(self, other: RunIdentity) -> bool:
        return bool(self.run and self.run == other.run) or self.token == other.token


_held_here: set[str] = set()


class JobLock:
    """This process's hold on a job directory; shared within a run, closed to other runs.

    One file carries the lock and is never opened for anything else: closing any descriptor of it would drop the lock.
    """

    def __init__(self, directory: str, job: str, identity: RunIdentity) -> None:
        self._directory = directory
        self._owner_path = os.path.join(directory, ".owner.json")
        self._descriptor = os.open(os.path.join(directory, ".lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            self._take(job, identity)
        except BaseException:
            os.close(self._descriptor)
            raise

    def _take(self, job: str, identity: RunIdentity) -> None:
        if not self._alone(identity):
            # Someone else is there. Whoever holds it exclusively is only writing down who he is.
            fcntl.lockf(self._descriptor, fcntl.LOCK_SH)
            held_by, text = _read_owner(self._owner_path)
            if not identity.admits(held_by) and not self._alone(identity):
                raise JobInUse(job, text)
        _held_here.add(self._directory)

    def _alone(self, identity: RunIdentity) -> bool:
        """Take the job over if nobody holds it, and let the others of this run in."""
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False
        write_atomically(self._owner_path, _owner(identity))
        fcntl.lockf(self._descriptor, fcntl.LOCK_SH)
        return True

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            _held_here.discard(self._directory)


def job_is_live(directory: str) -> bool:
    """Whether a live process holds the job."""
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


def _holder(descriptor: int) -> int | None:
    """Process id of one that holds a POSIX lock on the file, asked without taking it."""
    query = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    answer = struct.unpack("hhqqi", fcntl.fcntl(descriptor, fcntl.F_GETLK, query))
    return None if answer[0] == fcntl.F_UNLCK else int(answer[4])


def new_token() -> str:
    return uuid.uuid4().hex


def _owner(identity: RunIdentity) -> bytes:
    facts = {"run": identity.run, "token": identity.token, "pid": os.getpid(), "host": os.uname().nodename}
    return json.dumps(facts).encode()


def _read_owner(path: str) -> tuple[RunIdentity, str]:
    try:
        facts = json.loads(read_bytes(path))
        text = f"process {facts['pid']} on {facts['host']}" + (f" ({facts['run']})" if facts["run"] else "")
        return RunIdentity(str(facts["run"]), str(facts["token"])), text
    except (OSError, ValueError, KeyError, TypeError):
        return RunIdentity("", ""), "another process"
