"""Small frames between two ranks over one TCP connection, which also tells when the peer is gone.

A frame is a kind, a number, the length of its body, and the body. Nothing here blocks but `wait`.
"""

from __future__ import annotations

import math
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import NamedTuple

from dcp_mem.comm.greetings import Door, greet
from dcp_mem.comm.peers import drop, tuned
from dcp_mem.comm.timed_store import LOOK_SECONDS

_HEAD = struct.Struct("<BQI")
MOST_NBYTES = 1 << 20
"""Bytes of a body, at most."""
_READ_NBYTES = 1 << 18
_LONGEST_POLL = 0.5
"""Seconds after which a waiting thread looks whether another one has closed the line."""


class Frame(NamedTuple):
    """A frame; what kinds and numbers there are is up to the users."""

    kind: int
    number: int
    body: bytes


class ControlLine:
    """One rank's end of the connection.

    `is_over`: whether the peer has closed its end, or is gone; frames may still be there to take.
    """

    def __init__(self, connection: socket.socket) -> None:
        """Take over a connection."""
        self._connection = connection
        self._outgoing = list[memoryview]()
        self._incoming = bytearray()
        self._waiters = 0
        self._is_closed = False
        self.is_over = False

    @property
    def has_outgoing(self) -> bool:
        """Whether frames wait for room in the kernel's buffer."""
        return bool(self._outgoing)

    def send(self, frame: Frame) -> None:
        """Send a frame as far as there is room; `flush` sends the rest."""
        head = _HEAD.pack(frame.kind, frame.number, len(frame.body))
        self._outgoing += [memoryview(head), *([memoryview(frame.body)] if frame.body else [])]
        self.flush()

    def flush(self) -> None:
        """Send what there is room for."""
        try:
            while self._outgoing and not self._is_closed:
                drop(self._outgoing, self._connection.sendmsg(self._outgoing[:64]))
        except BlockingIOError:
            return
        except OSError:  # what the peer has sent before is still to be read
            self._outgoing.clear()

    def frames(self) -> Iterator[Frame]:
        """Yield the frames that have come.

        Raises RuntimeError.
        """
        self._receive()
        start = 0
        while len(self._incoming) - start >= _HEAD.size:
            kind, number, nbytes = _HEAD.unpack_from(self._incoming, start)
            if nbytes > MOST_NBYTES:
                raise RuntimeError(f"a frame of {nbytes} bytes came; the peer speaks otherwise")
            stop = start + _HEAD.size + nbytes
            if stop > len(self._incoming):
                break
            yield Frame(kind, number, bytes(self._incoming[start + _HEAD.size : stop]))
            start = stop
        del self._incoming[:start]

    def _receive(self) -> None:
        while not self.is_over and not self._is_closed:
            try:
                data = self._connection.recv(_READ_NBYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            self._incoming += data
            self.is_over = not data
            if len(self._incoming) > MOST_NBYTES:  # enough for once
                return

    def wait(self, seconds: float) -> None:
        """Return when there is something to read, room for what waits, or the time is over.

        `seconds`: the most that this takes; several threads may wait.
        """
        self._waiters += 1
        try:
            if self._is_closed:
                return
            poller = select.poll()
            events = 0 if self.is_over else select.POLLIN
            poller.register(self._connection, events | (select.POLLOUT if self._outgoing else 0))
            poller.poll(math.ceil(1000 * min(max(seconds, 0.0), _LONGEST_POLL)))
        finally:
            self._waiters -= 1
            if self._is_closed and not self._waiters:
                self._connection.close()

    def close(self) -> None:
        """Close the connection; a thread that waits returns at once."""
        self._is_closed = True
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        if not self._waiters:
            self._connection.close()

    def forget(self) -> None:
        """Close a forked child's copy of the connection, which stays open in the parent."""
        self._is_closed = True
        self._connection.close()


def dialled(
    address: tuple[str, int],
    token: bytes,
    deadline: float,
    look: Callable[[], None] = lambda: None,
) -> socket.socket:
    """Return a connection to a peer that listens, and has proved that it is of this job.

    `deadline`: until when to wait, in seconds of the monotonic clock. `look`: called about once a
    second meanwhile; raises where waiting is in vain. Raises RuntimeError.
    """
    try:
        connection = socket.create_connection(address, max(deadline - time.monotonic(), 0.001))
        greet(connection, address, token, 0, deadline, look)
    except OSError as error:
        raise RuntimeError(
            f"can't be reached at {address[0]}, port {address[1]}: {error}"
        ) from None
    return tuned(connection)


def accepted(door: Door, deadline: float, look: Callable[[], None] = lambda: None) -> socket.socket:
    """Return the first connection that greets as one of this job; arguments as of `dialled`.

    Raises RuntimeError.
    """
    while (left := deadline - time.monotonic()) > 0:
        try:
            come = door.welcome(min(left, LOOK_SECONDS))
        except OSError as error:
            raise RuntimeError(f"no connection can be accepted: {error}") from None
        if come is not None:
            return tuned(come[1])
        look()
    raise RuntimeError("the peer has not connected in time")
