"""The agent: a process of its own, one per node and memory root, that flushes what trainers saved.

Trainers start it (`agent_handle.py`) and hand it their job and credentials. Otherwise they share
nothing with it but files in memory.
The agent outlives the trainers; it ends when nothing is left to flush and no trainer lives.
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

from dcp_mem.common.log import log
from dcp_mem.flushing.agent_handle import STARTING_SECONDS, log_path, send, socket_directory
from dcp_mem.flushing.loop import FlushLoop
from dcp_mem.flushing.registration import Registration

_LINGER = 5.0
"""Seconds that the agent goes on with nothing to do."""
_LOOK = 1.0
"""Longest time between two looks at the memory root, in seconds."""
_PAUSE = 0.1
"""Seconds between two tries of what must work in the end."""
_MOST_BYTES = 16 << 20
"""Longest registration."""


def run(root: str, first: Registration | None) -> None:
    """Serve the memory root until nothing is left to do.

    1. Lock the root; where another agent holds it, hand the registration to that agent and return.
    2. Listen for trainers on the socket, in a thread.
    3. Flush, until the root is gone or there has been nothing to do for a while.
    """
    lock = os.open(
        os.path.join(root, ".agent", "lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600
    )
    if not _becomes_agent(root, lock, first):
        return
    loop = FlushLoop(root)
    if first is not None:
        loop.register(first)
    with socket_directory(root) as directory, socket.socket(socket.AF_UNIX) as server:
        path = f"{directory}/socket"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        server.bind(path)
        server.listen(64)
        threading.Thread(target=_listen, args=(server, loop), daemon=True).start()
        log.info("agent %d serves %s", os.getpid(), root)
        loop.run(
            may_go_on=lambda: _is_locked_root(root, lock),
            linger_seconds=_LINGER,
            look_seconds=_LOOK,
        )
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    log.info("agent %d ends: nothing is left to flush and no trainer lives", os.getpid())


def _is_locked_root(root: str, lock: int) -> bool:
    """Return whether the root is still the one that was locked, and not another in its place."""
    try:
        return os.stat(os.path.join(root, ".agent", "lock")).st_ino == os.fstat(lock).st_ino
    except FileNotFoundError:
        return False


def _listen(server: socket.socket, loop: FlushLoop) -> None:
    """Take registrations from the socket; one that comes as the agent ends gets no answer."""
    while True:
        try:
            connection, _ = server.accept()
        except OSError as error:
            if server.fileno() < 0:
                return  # the agent is ending
            log.warning("no registration can be taken: %s; trying again", error)
            time.sleep(_PAUSE)
            continue
        with connection, contextlib.suppress(OSError):
            connection.settimeout(5.0)
            # The directory is 0700; this check also holds where a user has changed that.
            _, uid, _ = struct.unpack(
                "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            )
            if uid != os.geteuid():
                continue
            try:
                registration = _receive(connection.makefile("rb"))
            except EOFError as error:
                log.error("a trainer sent %s", error)
                connection.sendall(b"-")
                continue
            if loop.register(registration):
                connection.sendall(b"+")


def _receive(stream: IO[bytes]) -> Registration:
    """Read a registration. Raises EOFError, whose text ends "a trainer sent …"."""
    head = stream.read(4)
    if len(head) < 4:
        raise EOFError("nothing")
    (length,) = struct.unpack("!I", head)
    if length > _MOST_BYTES:
        raise EOFError(f"a registration of {length} bytes")
    try:
        registration = pickle.loads(stream.read(length))  # comes from a process of this user
    except Exception as error:
        raise EOFError(
            f"storage_options that can't be read here ({type(error).__name__}: {error})"
        ) from None
    if not isinstance(registration, Registration):
        raise EOFError("something that is no registration")
    return registration


def _becomes_agent(root: str, lock: int, registration: Registration | None) -> bool:
    """Become the root's agent, or hand the registration to the agent that runs and return False. An
    agent that is about to end doesn't take it: then the lock will be free in a moment.
    """
    deadline = time.monotonic() + STARTING_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if registration is None or send(root, pickle.dumps(registration)) != b"":
                return False
        else:
            return True
        if time.monotonic() > deadline:
            log.error("another agent holds %s and doesn't answer", root)
            return False
        time.sleep(_PAUSE)


def main() -> None:
    """Run `python -m dcp_mem.flushing.agent MEMORY_ROOT`, with a registration on stdin."""
    root = sys.argv[1]
    os.umask(0o077)
    handler = RotatingFileHandler(log_path(root), maxBytes=1 << 20, backupCount=1)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # the trainer's thread may have blocked some
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # SIGTERM may be a pre-emption notice for the whole node: go on until SIGKILL, since only what
    # is flushed by then is saved.
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
