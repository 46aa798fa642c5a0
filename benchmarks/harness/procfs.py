"""What Linux says about processes: their memory, and which of them are flush agents."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

AGENT_MODULE = "dcp_mem.flushing.agent"
PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Resident:
    """Resident memory of a process, in bytes.

    Mapped pages of tmpfs are `shared`, in every process that maps them. They are the checkpoints,
    which are counted once, as tmpfs in use.
    """

    anonymous: int
    files: int
    shared: int

    @property
    def own(self) -> int:
        return self.anonymous + self.files

    @property
    def total(self) -> int:
        return self.own + self.shared


def resident(pid: int | None = None) -> Resident:
    """Return the resident memory of a process, of this one by default.

    Raises:
        OSError: The process has ended.
    """
    status = PROC / ("self" if pid is None else str(pid)) / "status"
    fields = dict(line.split(":", 1) for line in status.read_text().splitlines())

    def size(name: str) -> int:
        return int(fields[name].split()[0]) * 1024 if name in fields else 0

    return Resident(size("RssAnon"), size("RssFile"), size("RssShmem"))


class Growth:
    """Growth of this process's resident memory since this object was made."""

    def __init__(self) -> None:
        with suppress(OSError):  # where that is not permitted, the peak so far counts
            (PROC / "self" / "clear_refs").write_text("5")
        self._before = resident().total

    @property
    def peak(self) -> int:
        """The most until now, in bytes."""
        for line in (PROC / "self" / "status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "VmHWM":
                return int(value.split()[0]) * 1024 - self._before
        raise OSError("/proc/self/status has no VmHWM")


def available_bytes() -> int:
    """Return the bytes of memory that can be used without swapping."""
    for line in (PROC / "meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable")


def tmpfs_bytes(root: Path) -> int:
    """Return the bytes that files below `root` occupy; a file with several names counts once."""
    files: dict[int, int] = {}
    for directory, _, names in os.walk(root):
        for name in names:
            with suppress(FileNotFoundError):  # renamed meanwhile
                status = Path(directory, name).lstat()
                files[status.st_ino] = status.st_blocks * 512
    return sum(files.values())


def agents(root: Path) -> list[int]:
    """Return the process ids of the flush agents whose memory root lies below `root`."""
    pids = [int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if _is_agent(pid) and _uses(pid, root)]


def stop_agents(root: Path, patience: float = 5.0) -> None:
    """End the agents whose memory root lies below `root`."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + patience
        for pid in agents(root):
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        while agents(root) and time.monotonic() < deadline:
            time.sleep(0.05)


class Peaks:
    """The most bytes of memory that processes were seen to use, each kind by itself."""

    def __init__(self) -> None:
        self.looks = 0
        self.anonymous = 0
        self.own = 0
        self.shared = 0

    def look(self, pid: int) -> bool:
        """Look at the memory of a process; False when it has ended."""
        try:
            memory = resident(pid)
        except OSError:
            return False
        if not memory.total:  # a zombie
            return False
        self.looks += 1
        self.anonymous = max(self.anonymous, memory.anonymous)
        self.own = max(self.own, memory.own)
        self.shared = max(self.shared, memory.shared)
        return True


@contextmanager
def watching(find: Callable[[], list[int]], interval: float = 0.005) -> Iterator[Peaks]:
    """Look at the processes that `find` returns every `interval` seconds while the block runs."""
    peaks = Peaks()
    stop = threading.Event()

    def watch() -> None:
        pids: list[int] = []
        while not stop.wait(interval):
            pids = [pid for pid in pids if peaks.look(pid)] or find()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peaks
    finally:
        stop.set()
        thread.join()


def _is_agent(pid: int) -> bool:
    return any(AGENT_MODULE in argument for argument in _command_line(pid))


def _uses(pid: int, root: Path) -> bool:
    below = os.fspath(root)
    if any(below in argument for argument in _command_line(pid)):
        return True
    try:
        links = [os.readlink(entry) for entry in (PROC / str(pid) / "fd").iterdir()]
    except OSError:  # it has ended, or belongs to another user
        return False
    return any(link.startswith(below) for link in links)


def _command_line(pid: int) -> list[str]:
    try:
        return (PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []
