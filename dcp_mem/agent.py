"""The agent: a process of its own, one per node and memory root, that outlives the trainers and flushes what they saved.

Trainers start it (`wake`), hand it their job and credentials over stdin or a socket in the private `.agent` directory,
and otherwise share nothing with it but the files in memory. It ends when nothing is left to flush and no trainer lives.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import pickle
import signal
import socket
import struct
import sys
import threading
import time
from logging.handlers import RotatingFileHandler
from typing import IO

from dcp_mem.events import log
from dcp_mem.flushing.flusher import Flusher, Registration
from dcp_mem.memory.root import private_directory

_LINGER = 5.0
_LOOK = 1.0
_STARTING = 30.0
_ANSWER = 0.5
_MOST = 1 << 20
_ADVICE = "give credentials as plain values or in the environment, or choose agent='thread'"


def log_path(root: str) -> str:
    """Where the agent of this memory root writes its log."""
    return os.path.join(root, ".agent", "agent.log")


def is_alive(root: str) -> bool:
    """Whether this root's agent runs."""
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


# -- the trainer's side -------------------------------------------------------------------------------------------


class AgentHandle:
    """A trainer's way to the agent of its node; one for each process and memory root."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._child = 0
        self._started = 0.0

    def wake(self, registration: Registration) -> None:
        """Tell the agent that there is something to flush; start it if there is none. Costs no wait for its start-up."""
        message = pickle.dumps(registration)
        if _send(self._root, message) or self._is_starting():
            return
        self._child = _start(self._root, message)
        self._started = time.monotonic()

    def _is_starting(self) -> bool:
        if not self._child:
            return False
        try:
            pid, _ = os.waitpid(self._child, os.WNOHANG)
        except ChildProcessError:
            pid = self._child
        if pid:
            self._child = 0
        return not pid and time.monotonic() - self._started < _STARTING


def _send(root: str, message: bytes) -> bool:
    try:
        with _socket_directory(root) as directory, socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_ANSWER)
            connection.connect(f"{directory}/socket")
            connection.sendall(struct.pack("!I", len(message)) + message)
            try:
                answer = connection.recv(1)
            except TimeoutError:
                return True  # it is there, and reads this as soon as it gets to it: training doesn't wait for that
            if answer == b"-":
                log.error("the agent can't read this job's storage_options: %s (see %s)", _ADVICE, log_path(root))
            return answer != b""
    except OSError:
        return False


def _start(root: str, message: bytes) -> int:
    private_directory(os.path.join(root, ".agent"))
    reading, writing = os.pipe()
    output = os.open(log_path(root), os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o600)
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH", ""))))
    environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    try:
        child = os.posix_spawn(
            sys.executable,
            [sys.executable, "-m", "dcp_mem.agent", root],
            environment,
            file_actions=[
                (os.POSIX_SPAWN_DUP2, reading, 0),
                (os.POSIX_SPAWN_DUP2, output, 1),
                (os.POSIX_SPAWN_DUP2, output, 2),
            ],
            setsid=True,
            setsigmask=[],
            setsigdef=[signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE],
        )
    finally:
        os.close(reading)
        os.close(output)
    try:
        with contextlib.suppress(BrokenPipeError):  # it died at once; the next wake starts another
            os.write(writing, struct.pack("!I", len(message)) + message)
    finally:
        os.close(writing)
    return child


@contextlib.contextmanager
def _socket_directory(root: str):  # type: ignore[no-untyped-def]
    """The `.agent` directory by a short path: socket addresses may have only 108 bytes."""
    descriptor = os.open(os.path.join(root, ".agent"), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


# -- the agent's side ---------------------------------------------------------------------------------------------


def run(root: str, first: Registration | None) -> None:
    """Serve the memory root until nothing is left to do. Returns at once where another agent does already."""
    lock = os.open(os.path.join(root, ".agent", "lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    if not _alone(root, lock, first):
        return
    flusher, door = Flusher(root), _Door()
    if first is not None:
        flusher.register(first)
    with _socket_directory(root) as directory, socket.socket(socket.AF_UNIX) as server:
        path = f"{directory}/socket"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        server.bind(path)
        server.listen(64)
        threading.Thread(target=_listen, args=(server, flusher, door), daemon=True).start()
        log.info("agent %d serves %s", os.getpid(), root)
        _work(root, lock, flusher, door)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    log.info("agent %d ends: nothing is left to flush and no trainer lives", os.getpid())


class _Door:
    """Lets registrations in until the agent ends; after that nobody is told that he was heard."""

    def __init__(self) -> None:
        self.woken = threading.Event()
        self._lock = threading.Lock()
        self._closed = False

    def enter(self, flusher: Flusher, registration: Registration) -> bool:
        with self._lock:
            if not self._closed:
                flusher.register(registration)
                self.woken.set()
            return not self._closed

    def close_unless_woken(self) -> bool:
        with self._lock:
            self._closed = not self.woken.is_set()
            return self._closed


def _work(root: str, lock: int, flusher: Flusher, door: _Door) -> None:
    idle_since = time.monotonic()
    while _is_ours(root, lock):
        door.woken.clear()
        if flusher.flush_next():
            idle_since = time.monotonic()
            continue
        if flusher.is_needed():
            idle_since = time.monotonic()
        elif time.monotonic() - idle_since > _LINGER and door.close_unless_woken():
            return
        due = flusher.seconds_until_next()
        door.woken.wait(_LOOK if due is None else min(due, _LOOK))


def _is_ours(root: str, lock: int) -> bool:
    """Whether the memory root is still the one that was locked: it may be deleted, and made anew, at any time."""
    try:
        return os.stat(os.path.join(root, ".agent", "lock")).st_ino == os.fstat(lock).st_ino
    except FileNotFoundError:
        return False


def _listen(server: socket.socket, flusher: Flusher, door: _Door) -> None:
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return  # the agent is ending
        with connection, contextlib.suppress(OSError):
            connection.settimeout(5.0)
            # The directory is 0700 already; this also holds where someone opened it up.
            _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if uid != os.geteuid():
                continue
            try:
                registration = _receive(connection.makefile("rb"))
            except EOFError as error:
                log.error("a trainer sent %s", error)
                connection.sendall(b"-")
                continue
            if door.enter(flusher, registration):
                connection.sendall(b"+")


def _receive(stream: IO[bytes]) -> Registration:
    head = stream.read(4)
    if len(head) < 4:
        raise EOFError("nothing")
    (length,) = struct.unpack("!I", head)
    if length > _MOST:
        raise EOFError(f"a registration of {length} bytes")
    try:
        registration = pickle.loads(stream.read(length))  # from a process of this very user
    except Exception as error:
        raise EOFError(f"storage_options that can't be read here ({type(error).__name__}: {error})") from None
    if not isinstance(registration, Registration):
        raise EOFError("something that is no registration")
    return registration


def _alone(root: str, lock: int, registration: Registration | None) -> bool:
    """Become the root's agent; or hand the registration over to the one that is it, and return False.

    One that is about to end doesn't take it: then its place will be free in a moment.
    """
    deadline = time.monotonic() + _STARTING
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if registration is None or _send(root, pickle.dumps(registration)):
                return False
        else:
            return True
        if time.monotonic() > deadline:
            log.error("another agent holds %s and doesn't answer", root)
            return False
        time.sleep(0.1)


def main() -> None:
    """Entry of `python -m dcp_mem.agent MEMORY_ROOT`, with a registration on stdin."""
    root = sys.argv[1]
    os.umask(0o077)
    handler = RotatingFileHandler(log_path(root), maxBytes=1 << 20, backupCount=1)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A pre-emption notice for the whole node: go on until SIGKILL, since what is pending is all that counts now.
    signal.signal(signal.SIGTERM, lambda *_: log.info("SIGTERM: still flushing what is pending"))
    with contextlib.suppress(OSError):
        os.nice(15)
    try:
        first = _receive(sys.stdin.buffer)
    except EOFError as error:
        log.error("the trainer that started this agent sent %s", error)
        first = None
    run(root, first)


if __name__ == "__main__":
    main()
