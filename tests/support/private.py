"""Private directories in /dev/shm, one for each purpose, and the end of whoever uses them."""

import contextlib
import fcntl
import os
import secrets
import shutil
import signal
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

_SHM = Path("/dev/shm")
_ROOT_PREFIX = "dcp_mem-test"
_KILL_SECONDS = 10.0
_POLL_SECONDS = 0.01
_SETTLED_SECONDS = 60.0  # After which a directory without a lock will not get one any more.


@contextlib.contextmanager
def private_directory(
    purpose: str, inspect: Callable[[Path], object] = lambda _: None
) -> Iterator[Path]:
    """A directory that is locked while it is there.

    At the end the processes that use it are killed, `inspect` looks at what they have left, and it
    is removed.
    """
    earlier = _pids()
    directory = _SHM / f"{_ROOT_PREFIX}-{purpose}-{secrets.token_hex(8)}"
    directory.mkdir(mode=0o700)
    with _lock(directory):
        try:
            yield directory
        finally:
            try:
                _kill_users(directory, earlier)
                inspect(directory)
            finally:
                shutil.rmtree(directory)


def remove_abandoned() -> None:
    """Free the memory of sessions that were killed: their directories have lost their locks."""
    for directory in _SHM.glob(f"{_ROOT_PREFIX}-*"):
        with contextlib.suppress(OSError):  # Of another user, or in use, or gone by now.
            settled = time.time() - directory.stat().st_ctime > _SETTLED_SECONDS
            with _lock(directory):
                if settled:
                    shutil.rmtree(directory)


@contextlib.contextmanager
def _lock(directory: Path) -> Iterator[None]:
    """Hold the directory's lock. Raises BlockingIOError where another process has it."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _kill_users(directory: Path, earlier: Collection[int]) -> None:
    """Kill each process that was told of the directory or has a file in it open.

    Processes among the earlier ones are spared.
    """
    deadline = time.monotonic() + _KILL_SECONDS
    while users := [pid for pid in _pids() - set(earlier) if _uses(pid, str(directory))]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"can't kill the users of {directory}: {users}")
        for pid in users:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)


def _pids() -> set[int]:
    return {int(name) for name in os.listdir("/proc") if name.isdigit()}


def _uses(pid: int, directory: str) -> bool:
    """Whether a process knows the directory.

    It reads /proc itself: through psutil this takes a tenth of the suite's time.
    """
    with contextlib.suppress(OSError):  # it has ended, or is another user's
        for told in ("cmdline", "environ"):
            if os.fsencode(directory) in Path(f"/proc/{pid}/{told}").read_bytes():
                return True
        with os.scandir(f"/proc/{pid}/fd") as files:
            return any(directory in _opened(file) for file in files)
    return False


def _opened(file: os.DirEntry[str]) -> str:
    try:
        return os.readlink(file.path)
    except OSError:  # closed since
        return ""
