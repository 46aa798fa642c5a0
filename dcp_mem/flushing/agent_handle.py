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

from dcp_mem.common.log import log
from dcp_mem.flushing.registration import Registration
from dcp_mem.memory.root import private_directory

STARTING_SECONDS = 30.0
"""Time that an agent has for its start."""
_ANSWER_SECONDS = 0.5
"""Time that a trainer waits for an answer."""
_ADVICE = "give credentials as plain values or in the environment, or choose agent='thread'"


def log_path(root: str) -> str:
    """Return where the agent of this memory root writes its log.

    Args:
        root: The memory root.
    """
    return os.path.join(root, ".agent", "agent.log")


def is_alive(root: str) -> bool:
    """Return whether this memory root's agent runs.

    Args:
        root: The memory root.
    """
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
    """A process's connection to the agent of its node; one for each memory root.

    Args:
        root: The memory root.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._children: list[int] = []
        self._started = 0.0
        self._started_with: Registration | None = None

    def wake(self, registration: Registration) -> None:
        """Tell the agent that a checkpoint awaits its flush; start an agent if none runs.

        Doesn't wait for the agent's start.

        Args:
            registration: How the job's checkpoints are flushed.

        Raises:
            OSError: The agent can't be started.
        """
        message = pickle.dumps(registration)
        if send(self._root, message) or self._is_starting_with(registration):
            return
        # An agent that finds another one hands its registration over, and ends.
        self._children.append(_start(self._root, message))
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


def send(root: str, message: bytes) -> bool:
    """Hand a registration to the agent that runs.

    Args:
        root: The memory root.
        message: The pickled registration.

    Returns:
        False where no agent takes it.
    """
    try:
        with socket_directory(root) as directory, socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_ANSWER_SECONDS)
            connection.connect(f"{directory}/socket")
            connection.sendall(struct.pack("!I", len(message)) + message)
            try:
                answer = connection.recv(1)
            except TimeoutError:
                return True  # the agent reads it as soon as it can: training doesn't wait for that
            if answer == b"-":
                log.error(
                    "the agent can't read this job's storage_options: %s (see %s)",
                    _ADVICE,
                    log_path(root),
                )
            return answer != b""
    except OSError:
        return False


def _start(root: str, message: bytes) -> int:
    private_directory(os.path.join(root, ".agent"))
    package = os.path.abspath(__file__)
    for _ in range(
        3
    ):  # from dcp_mem/flushing/agent_handle.py to the directory that dcp_mem lies in
        package = os.path.dirname(package)
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
    """Open `.agent` under a short path: socket addresses may have only 108 bytes.

    Args:
        root: The memory root.
    """
    descriptor = os.open(os.path.join(root, ".agent"), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
