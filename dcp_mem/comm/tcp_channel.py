"""Channels over TCP: one connection between two ranks, and no thread.

A message is its length, in eight bytes, and its bytes. The kernel's buffers keep the network busy
while the ranks compute; whoever waits for a message makes progress with all of them.
"""

from __future__ import annotations

import math
import os
import select
import socket
import threading
import time
from collections import deque
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any
from weakref import WeakSet

from dcp_mem.comm.peers import drop
from dcp_mem.comm.transports import Pair, met

_LENGTH_NBYTES = 8
_LONGEST_POLL = 0.5
"""Seconds after which a waiting thread looks whether another one has closed the channel."""
_CLOSED = "the channel is closed"
_GONE = "the peer has closed its end, or is gone"


class TcpChannel:
    """One rank's end of a channel."""

    def __init__(self, pair: Pair, /) -> None:
        """Connect, and return once the other rank has connected too.

        Raises RuntimeError.
        """
        self._pair = pair
        self._connection = met(pair)
        self._guard = threading.RLock()
        self._outgoing, self._incoming = deque[_Message](), deque[_Message]()
        self._why_no_sends = self._why_no_more = ""
        self._pollers, self._is_closed = 0, False
        self._last_moved = 0.0
        _all_channels.add(self)

    def send(self, data: Any) -> _Message:
        """Begin to send the bytes of a buffer.

        `data`: a buffer, left alone until the message is sent.
        """
        message = _Message(self, data)
        message.put_length()
        with self._guard:
            self._outgoing.append(message)
            self._send()
        return message

    def receive(self, data: Any) -> _Message:
        """Begin to receive bytes into a buffer."""
        message = _Message(self, data)
        with self._guard:
            self._incoming.append(message)
            self._receive()
        return message

    def registered(self, memory: Any) -> AbstractContextManager[None]:
        """Do nothing: sockets take any memory."""
        return nullcontext()

    def wait_for(self, message: _Message) -> None:
        """Make progress until a message is done.

        Raises RuntimeError.
        """
        began = time.monotonic()
        while True:
            with self._guard:
                self._send()
                self._receive()
                if message.is_done:
                    return
                if not message.left:
                    raise RuntimeError(self._why_no_more or self._why_no_sends)
                self._pollers += 1
            left = max(began, self._last_moved) + self._pair.seconds - time.monotonic()
            try:
                if left <= 0:
                    self._pair.on_silence()
                    raise RuntimeError(f"the peer was silent for {self._pair.seconds:.0f} s")
                self._poll(min(left, _LONGEST_POLL))
            finally:
                with self._guard:
                    self._pollers -= 1
                    self._close_unused()

    def close(self) -> None:
        """Close this end, and give up pending messages."""
        with self._guard:
            self._is_closed = True
            self._end_sends(_CLOSED)
            self._end_receipt(_CLOSED)
            with suppress(OSError):  # wakes whoever polls
                self._connection.shutdown(socket.SHUT_RDWR)
            self._close_unused()

    def __del__(self) -> None:
        if hasattr(self, "_guard"):  # else the two never met
            self.close()

    def forget(self) -> None:
        """Close a forked child's copy of the connection, which stays open in the parent."""
        self._guard = threading.RLock()  # another thread of the parent may hold it
        self._why_no_sends = self._why_no_more = "the channel belongs to another process"
        self._connection.close()

    # -- the connection ----------------------------------------------------------------------------

    def _poll(self, seconds: float) -> None:
        poller = select.poll()
        events = (select.POLLOUT if self._outgoing else 0) | (
            select.POLLIN if self._incoming else 0
        )
        poller.register(self._connection, events)
        poller.poll(math.ceil(1000 * seconds))

    def _send(self) -> None:
        if self._why_no_sends:
            _give_up(self._outgoing)
        try:
            while self._outgoing:
                message = self._outgoing[0]
                message.note_moved(self._connection.sendmsg(message.left))
                if message.is_done:
                    self._outgoing.popleft()
                self._last_moved = time.monotonic()
        except BlockingIOError:
            return
        except OSError as error:  # what the peer has sent before is still to be read
            self._end_sends(f"{_GONE}: {error}")

    def _receive(self) -> None:
        if self._why_no_more:
            _give_up(self._incoming)
        try:
            while self._incoming:
                message = self._incoming[0]
                nbytes, *_ = self._connection.recvmsg_into(message.left)
                if not nbytes:
                    self._end_receipt(_GONE)
                    return
                message.note_moved(nbytes)
                self._last_moved = time.monotonic()
                if why := message.why_wrong():
                    self._end_receipt(why)
                    self.close()
                elif message.is_done:
                    self._incoming.popleft()
        except BlockingIOError:
            return
        except OSError as error:
            self._end_receipt(f"{_GONE}: {error}")

    def _end_sends(self, why: str) -> None:
        self._why_no_sends = self._why_no_sends or why
        _give_up(self._outgoing)

    def _end_receipt(self, why: str) -> None:
        self._why_no_more = self._why_no_more or why
        _give_up(self._incoming)

    def _close_unused(self) -> None:
        """Close the connection once no thread polls it: its number may be another file's then."""
        if self._is_closed and not self._pollers:
            self._connection.close()


class _Message:
    """A message that is being sent or received.

    `left`: what has still to move; empty too where the message was given up.
    """

    def __init__(self, channel: TcpChannel, data: Any) -> None:
        self._channel, self.is_done = channel, False
        body = memoryview(data).cast("B")
        self._nbytes, self._length = len(body), bytearray(_LENGTH_NBYTES)
        self.left = [memoryview(self._length), *([body] if len(body) else [])]

    def put_length(self) -> None:
        self._length[:] = self._nbytes.to_bytes(_LENGTH_NBYTES, "little")

    def why_wrong(self) -> str:
        """Return why what comes isn't this message; "" where it is, as far as it has come."""
        nbytes = int.from_bytes(self._length, "little")
        has_length = not self.left or self.left[0].obj is not self._length
        if has_length and nbytes != self._nbytes:
            return f"a message of {nbytes} bytes came where {self._nbytes} bytes were to come"
        return ""

    def note_moved(self, nbytes: int) -> None:
        drop(self.left, nbytes)
        self.is_done = not self.left

    def wait(self) -> None:
        """Return once the message has been sent, or received."""
        if not self.is_done:
            self._channel.wait_for(self)


def _give_up(messages: deque[_Message]) -> None:
    for message in messages:
        message.left.clear()
    messages.clear()


_all_channels = WeakSet[TcpChannel]()


def _leave_to_parent() -> None:
    for channel in list(_all_channels):
        channel.forget()


os.register_at_fork(after_in_child=_leave_to_parent)
