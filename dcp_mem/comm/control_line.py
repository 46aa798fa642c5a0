"""Small frames between two ranks over a link, for what is plugged in.

A frame is a message: a kind, a number, and the body. Nothing here blocks but `wait`.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from typing import NamedTuple

from dcp_mem.comm.link import Link

_HEAD = struct.Struct("<BQ")
MOST_NBYTES = 1 << 20
"""Bytes of a body, at most."""


class Frame(NamedTuple):
    """A frame; what kinds and numbers there are is up to the users."""

    kind: int
    number: int
    body: bytes


class ControlLine:
    """One rank's end of the connection.

    `is_over`: whether the peer has closed its end, or is gone, and no frame is left to take.
    """

    def __init__(self, connection: socket.socket) -> None:
        """Take over a connection."""
        self._link = Link(connection)
        self._coming = self._link.receive(most=_HEAD.size + MOST_NBYTES)
        self.is_over = False

    @property
    def has_outgoing(self) -> bool:
        """Whether frames wait for room in the kernel's buffer."""
        return self._link.has_outgoing

    def send(self, frame: Frame) -> None:
        """Send a frame as far as there is room; `frames` sends the rest."""
        self._link.send(_HEAD.pack(frame.kind, frame.number) + frame.body)

    def frames(self) -> Iterator[Frame]:
        """Yield the frames that have come; send on what there is room for.

        Raises RuntimeError.
        """
        while not self.is_over:
            try:
                if not self._link.advance(self._coming):
                    return
            except RuntimeError:
                self.is_over = True
                if self._link.is_wrong:
                    raise
                return
            body = self._coming.body
            assert body is not None
            self._coming = self._link.receive(most=_HEAD.size + MOST_NBYTES)
            kind, number = _HEAD.unpack_from(body)
            yield Frame(kind, number, bytes(body[_HEAD.size :]))

    def wait(self, seconds: float) -> None:
        """Return when there is something to read, room for what waits, or after a while.

        `seconds`: the most that this takes; several threads may wait.
        """
        self._link.poll(seconds)

    def close(self) -> None:
        """Close the connection; a thread that waits returns at once."""
        self._link.close()
