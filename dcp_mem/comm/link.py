"""One TCP connection between two ranks, with messages in both directions, and no thread.

A message is its length, in eight bytes, and its bytes. Votes, channels and the frames of what is
plugged in go by it. The kernel's buffers keep the network busy while the ranks compute; whoever
waits for a message makes progress with all of them.
"""

from __future__ import annotations

import math
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import WeakSet

LENGTH_NBYTES = 8
"""Bytes in front of a message, which say how long it is."""
MOST_NBYTES = 1 << 32
"""Bytes of a message whose length its receiver doesn't know, at most."""
ENDED = "its connection has closed: the process has ended, or has left the call"
_CLOSED = "this rank has closed its end"
_LONGEST_POLL = 0.5
"""Seconds after which a waiting thread looks whether another one has closed the link."""


class Link:
    """One rank's end of the connection; any thread may use it.

    What fails in one direction leaves the other one: what the peer has sent before is still read.
    """

    def __init__(
        self,
        connection: socket.socket,
        seconds: float = math.inf,
        on_silence: Callable[[], None] = lambda: None,
    ) -> None:
        """Take over a connection that doesn't block.

        `seconds`: how long a message is waited for while nothing moves; then `on_silence` is
        called.
        """
        self._connection, self._seconds, self._on_silence = connection, seconds, on_silence
        self._guard = threading.RLock()
        self._outgoing, self._incoming = deque[Message](), deque[Message]()
        self._why_no_sends = self._why_no_more = ""
        self._pollers, self._is_closed = 0, False
        self._last_moved = 0.0
        self.is_wrong = False  # whether what came wasn't what was to come
        _all_links.add(self)

    def send(self, data: Any) -> Message:
        """Begin to send the bytes of a buffer, which is left alone until they are sent."""
        body = memoryview(data).cast("B")
        message = Message(self, body, len(body))
        message.length[:] = len(body).to_bytes(LENGTH_NBYTES, "little")
        with self._guard:
            self._outgoing.append(message)
            self._push()
        return message

    def receive(self, data: Any = None, most: int = MOST_NBYTES) -> Message:
        """Begin to receive bytes into a buffer, or, without one, as many as come, up to `most`."""
        message = Message(self, None if data is None else memoryview(data).cast("B"), most)
        with self._guard:
            self._incoming.append(message)
            self._pull()
        return message

    def advance(self, message: Message) -> bool:
        """Move what can be moved now; return whether the message is done.

        Raises RuntimeError.
        """
        with self._guard:
            self._push()
            self._pull()
            if not (message.is_done or message.left):
                raise RuntimeError(self._why_no_more or self._why_no_sends)
            return message.is_done

    def wait_for(self, message: Message) -> None:
        """Make progress until a message is done.

        Raises RuntimeError.
        """
        began = time.monotonic()
        while not self.advance(message):
            left = max(began, self._last_moved) + self._seconds - time.monotonic()
            if left <= 0:
                self._on_silence()
                raise RuntimeError(f"the peer was silent for {self._seconds:.0f} s")
            self.poll(left)

    def poll(self, seconds: float) -> None:
        """Return when bytes can be moved, or after a while, at most so many seconds."""
        with self._guard:
            if self._is_closed:
                return
            self._pollers += 1
            poller = select.poll()
            poller.register(self._connection, self.events)
        try:
            poller.poll(math.ceil(1000 * min(max(seconds, 0.0), _LONGEST_POLL)))
        finally:
            with self._guard:
                self._pollers -= 1
                self._close_unused()

    @property
    def events(self) -> int:
        """What to poll for."""
        outgoing, incoming = self._outgoing, self._incoming
        return (select.POLLOUT if outgoing else 0) | (select.POLLIN if incoming else 0)

    @property
    def has_outgoing(self) -> bool:
        """Whether messages wait for room in the kernel's buffer."""
        return bool(self._outgoing)

    @property
    def has_ended(self) -> bool:
        """Whether the peer has closed its end, and nothing is left to read; nothing is read."""
        try:
            return not self._connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def fileno(self) -> int:
        return self._connection.fileno()

    def close(self) -> None:
        """Close this end, and give up pending messages; what has been sent still arrives."""
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
        self._why_no_sends = self._why_no_more = "it belongs to the process that forked this one"
        self._connection.close()

    # -- with the guard held -----------------------------------------------------------------------

    def _push(self) -> None:
        """Send what there is room for."""
        if self._why_no_sends:
            _give_up(self._outgoing)
        try:
            while self._outgoing:
                message = self._outgoing[0]
                drop(message.left, self._connection.sendmsg(message.left))
                self._last_moved = time.monotonic()
                if not message.left:
                    message.is_done = True
                    self._outgoing.popleft()
        except BlockingIOError:
            return
        except OSError as error:
            self._end_sends(f"its connection has closed: {error}")

    def _pull(self) -> None:
        if self._why_no_more:
            _give_up(self._incoming)
        try:
            while self._incoming:
                message = self._incoming[0]
                nbytes, *_ = self._connection.recvmsg_into(message.left)
                if not nbytes:
                    self._end_receipt(ENDED)
                    return
                self._last_moved = time.monotonic()
                if why := message.note_received(nbytes):
                    self.is_wrong = True
                    self._end_receipt(why)
                    self.close()
                elif message.is_done:
                    self._incoming.popleft()
        except BlockingIOError:
            return
        except OSError as error:
            self._end_receipt(f"its connection has closed: {error}")

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


class Message:
    """A message that is being sent or received.

    `body`: its bytes; None while their number isn't known. `left`: what has still to move; empty
    too where the message was given up.
    """

    def __init__(self, link: Link, body: memoryview | None, most: int) -> None:
        self._link, self.body, self._most, self.is_done = link, body, most, False
        self.length = bytearray(LENGTH_NBYTES)
        self.left = [memoryview(self.length), *([body] if body else [])]

    def note_received(self, nbytes: int) -> str:
        """Note that so many bytes have come; return why they aren't this message, or ""."""
        drop(self.left, nbytes)
        if self.left and self.left[0].obj is self.length:
            return ""
        length = int.from_bytes(self.length, "little")
        if self.body is None:
            if length > self._most:
                return f"it speaks otherwise: a message of {length} bytes"
            self.body = memoryview(bytearray(length))
            self.left = [self.body] if length else []
        elif length != len(self.body):
            return f"a message of {length} bytes came where {len(self.body)} bytes were to come"
        self.is_done = not self.left
        return ""

    def wait(self) -> None:
        """Return once the message has been sent, or received."""
        if not self.is_done:
            self._link.wait_for(self)


def drop(views: list[memoryview], nbytes: int) -> None:
    """Take so many bytes, which have moved, from the front of a list of buffers."""
    count = 0
    while nbytes and nbytes >= len(views[count]):
        nbytes -= len(views[count])
        count += 1
    del views[:count]
    if nbytes:
        views[0] = views[0][nbytes:]


def _give_up(messages: deque[Message]) -> None:
    for message in messages:
        message.left.clear()
    messages.clear()


_all_links = WeakSet[Link]()


def _leave_to_parent() -> None:
    for link in list(_all_links):
        link.forget()


os.register_at_fork(after_in_child=_leave_to_parent)
