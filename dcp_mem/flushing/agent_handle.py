"""The trainer's side of the agent: find it, start it, and hand it a job.

A registration travels over stdin to an agent that starts, and over a socket in the private `.agent`
directory to one that runs. Trainers import this, and nothing that flushes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from dcp_mem.flushing.registration import Registration
from dcp_mem.memory.root import private_directory

STARTING_SECONDS = 30.0
"""Time that an agent has for its start."""
_ANSWER_SECONDS, _SHORT_SECONDS = 0.5, 0.02
"""Time that a trainer waits for an answer; the same in a save, of an agent that didn't answer."""
_LONG_TRY = 10
"""Of so many tries in saves of an agent that doesn't answer, one has the longer time."""
SILENT = "doesn't answer: it may be stopped (kill -CONT lets it go on)"
_CANNOT_READ = (
    "can't read this job's storage_options: give credentials as plain values or in the "
    "environment, or choose agent='thread'"
)
_TAKEN, _UNREAD = b"+", b"-"


def log_path(root: str) -> str:
    """Return where the agent of this memory root writes its log."""
    return os.path.join(root, ".agent", "agent.log")


def is_alive(root: str) -> bool:
    try:
        descriptor = os.open(os.path.join(root, ".agent", "lock"), os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(descriptor)


class AgentHandle:
    """A process's connection to the agent of its node; one for each memory root."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._children: list[int] = []
        self._started = 0.0
        self._started_with: Registration | None = None
        self._why_not = ""
        self._silent_tries = 0

    def wake(self, registration: Registration, *, is_waiting: bool = False) -> str:
        """Tell the agent that a checkpoint awaits its flush; start an agent if none runs, in the
        background. `is_waiting`: the caller waits for the flush, and training doesn't. Returns why
        no agent answers, behind "the agent"; "" where it has, or was started for the first time.
        """
        message = pickle.dumps(registration)
        is_short = self._silent_tries % _LONG_TRY > 0 and not is_waiting
        answer = send(self._root, message, _SHORT_SECONDS if is_short else _ANSWER_SECONDS)
        self._silent_tries = self._silent_tries + 1 if answer is None else 0
        if answer in (_TAKEN, _UNREAD):
            self._why_not = "" if answer == _TAKEN else _CANNOT_READ
            self._started_with = None
        elif answer is None:
            self._why_not = SILENT
        elif not self._is_starting_with(registration):
            self._start(registration, message)
        return self._why_not

    def _start(self, registration: Registration, message: bytes) -> None:
        has_ended = self._started_with is not None and not self._is_starting()
        # An agent that finds another one hands its registration over, and ends.
        try:
            self._children.append(_start(self._root, message))
        except OSError as error:
            self._why_not = f"can't be started: {error} (agent='thread' needs none)"
            return
        if has_ended:
            self._why_not = "ends, or is silent, each time that it is started"
        self._started = time.monotonic()
        self._started_with = replace(registration, now=False)

    def is_gone(self) -> bool:
        """Return whether no agent runs, and this process has started none just now."""
        return not self._is_starting() and not is_alive(self._root)

    def _is_starting_with(self, registration: Registration) -> bool:
        """Return whether an agent starts that was given this registration already."""
        # One that starts tries everything at once: whether a caller waits is no news to it.
        return self._is_starting() and self._started_with == replace(registration, now=False)

    def _is_starting(self) -> bool:
        self._children = [child for child in self._children if not _has_ended(child)]
        return bool(self._children) and time.monotonic() - self._started < STARTING_SECONDS


def _has_ended(child: int) -> bool:
    """Return whether a child process has ended; collect its status."""
    try:
        return os.waitpid(child, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return True


def send(root: str, message: bytes, seconds: float = _ANSWER_SECONDS) -> bytes | None:
    """Hand a registration to the agent that runs. Returns its answer, b"+" or, where it can't read
    the message, b"-"; b"" where no agent takes it; None where one runs and hasn't answered: it
    reads the message as soon as it can.
    """
    try:
        with socket_directory(root) as directory, socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(seconds)
            connection.connect(f"{directory}/socket")
            connection.sendall(struct.pack("!I", len(message)) + message)
            return connection.recv(1)
    except (TimeoutError, BlockingIOError):  # the latter: too many messages await it
        return None
    except OSError:
        return b""


def _start(root: str, message: bytes) -> int:
    private_directory(os.path.join(root, ".agent"))
    package = str(Path(__file__).absolute().parents[2])  # the directory that dcp_mem lies in
    path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH", ""))))
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    reading, writing = os.pipe()
    # Where the agent dies at once, the next wake starts another.
    with contextlib.suppress(BrokenPipeError), open(writing, "wb") as told:
        with (
            open(reading, "rb", buffering=0) as read,
            open(log_path(root), "ab", buffering=0, opener=_open_privately) as output,
        ):
            # A descriptor of the trainer in the agent would outlive the trainer, and peers would
            # see their connections to it stay open when it is killed: gloo's sockets aren't
            # close-on-exec.
            child = subprocess.Popen(
                [sys.executable, "-m", "dcp_mem.flushing.agent", root],
                stdin=read,
                stdout=output,
                stderr=output,
                env=environment,
                close_fds=True,
                start_new_session=True,
            )
        child.returncode = 0  # Popen would warn that it still runs; it is waited for by its id.
        told.write(struct.pack("!I", len(message)) + message)
    return child.pid


def _open_privately(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


@contextlib.contextmanager
def socket_directory(root: str) -> Iterator[str]:
    """Open `.agent` under a short path: socket addresses may have only 108 bytes."""
    descriptor = os.open(os.path.join(root, ".agent"), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
