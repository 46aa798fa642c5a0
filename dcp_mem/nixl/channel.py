"""Channels over NIXL: the receiver reads the sender's memory, and a TCP connection tells it where.

    sender -> receiver   INLINE  a small message itself
    sender -> receiver   OFFER   where a large message lies, and what NIXL needs to read it
    receiver -> sender   TAKEN   the offer's number: all of it has been read

Only the receiver writes into the receiver's memory, so closing its own end is enough to stop that.
The connection orders the messages, and tells at once when the peer is gone. No thread works in the
background: whoever waits for a message makes progress with all of them.
"""

from __future__ import annotations

import atexit
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakSet

from dcp_mem.comm.control_line import ControlLine, Frame
from dcp_mem.nixl.agents import Extent, PeerSilent, Read, Sink, Source, extent_of

_INLINE, _OFFER, _TAKEN = 1, 2, 3
_OFFER_HEAD = struct.Struct("<QQH")
INLINE_NBYTES = 64 << 10
"""Bytes of a message that goes over the connection; larger ones are read."""
_KEPT_NBYTES = 256 << 20
"""Bytes that a source without registered memory keeps, at most, while nothing is sent."""
_PRODUCTIVE = 20e-6
"""Seconds from which on a call of NIXL's has moved bytes."""
_FIRST_PAUSE, _LONGEST_PAUSE = 20e-6, 2e-3
"""Seconds between two looks at reads that are under way; each pause is twice the one before."""
_GONE = "the peer has closed its end, or is gone"


class NixlChannel:
    """One rank's end of a channel."""

    def __init__(
        self, line: ControlLine, seconds: float, on_silence: Callable[[], None] = lambda: None
    ) -> None:
        """Take over a connection between the two ranks.

        `on_silence`: called where a wait for the other rank has taken that long, in vain.
        """
        self._line, self._seconds, self._on_silence = line, seconds, on_silence
        self._guard = threading.RLock()
        self._sink: Sink | None = None
        self._source: Source | None = None
        self._scopes: list[tuple[Extent, Any]] = []  # registered by the user of the channel
        self._sink_scopes: dict[Extent, Any] = {}
        self._offers: dict[int, _Outgoing] = {}
        self._count = 0
        self._left = 0.0  # seconds that the wait under way may still take
        self._arrived = deque[Frame]()
        self._awaited = deque[_Incoming]()
        self._reading = list[_Incoming]()
        self._failure = ""
        _all_channels.add(self)

    def be_patient(self, seconds: float, on_silence: Callable[[], None]) -> None:
        """Wait for this long from now on."""
        self._seconds, self._on_silence = seconds, on_silence

    # -- the channel's users -----------------------------------------------------------------------

    def send(self, data: Any) -> _Message:
        """Begin to send the bytes of a buffer.

        `data`: a buffer, left alone until the message is sent.
        """
        view = memoryview(data).cast("B")
        with self._guard:
            message = _Outgoing(self, view)
            if self._failure:
                return message
            with self._failing():
                if len(view) <= INLINE_NBYTES:
                    self._line.send(Frame(_INLINE, self._count, bytes(view)))
                    message.is_done = not self._line.has_outgoing
                else:
                    self._offer(message, view)
            self._count += 1
            return message

    def receive(self, data: Any) -> _Message:
        """Begin to receive bytes into a buffer."""
        message = _Incoming(self, memoryview(data).cast("B"))
        with self._guard:
            if not self._failure:
                self._awaited.append(message)
        return message

    @contextmanager
    def registered(self, memory: Any) -> Iterator[None]:
        """Register memory with the network card for the length of a context."""
        if not len(memory):
            yield
            return
        scope = extent_of(memory), memory
        with self._guard:
            self._scopes.append(scope)
        try:
            yield
        finally:
            with self._guard:
                self._scopes.remove(scope)
                self._deregister(scope[0])

    def close(self) -> None:
        """Close this end, and give up pending messages."""
        with self._guard:
            self._fail("the channel is closed")

    def __del__(self) -> None:
        self.close()

    # -- what messages wait for --------------------------------------------------------------------

    def wait_for(self, message: _Message) -> None:
        """Make progress until a message is done.

        Raises RuntimeError.
        """
        deadline, pause = time.monotonic() + self._seconds, _FIRST_PAUSE
        while True:
            with self._guard:
                self._left = max(deadline - time.monotonic(), 0.0)
                is_moving = self._advance(message)
                if message.is_done:
                    return
                if self._failure:
                    raise RuntimeError(self._failure)
                is_reading = bool(self._reading or self._offers)
            left = deadline - time.monotonic()
            if left <= 0:
                self._give_up()
            elif is_moving:
                pause = _FIRST_PAUSE
            elif is_reading and pause < 1e-3:  # less than a poll can wait
                time.sleep(pause)
                pause *= 2
            else:
                self._line.wait(min(pause, left) if is_reading else left)
                pause = min(2 * pause, _LONGEST_PAUSE)

    def _give_up(self) -> None:
        with self._guard:
            self._fail(self._silence())
        self._on_silence()

    def _silence(self) -> str:
        return f"the peer was silent for {self._seconds:.0f} s"

    # -- progress, with the guard held -------------------------------------------------------------

    def _advance(self, wanted: _Message) -> bool:
        """Move what can be moved now; return whether something has."""
        if self._failure:
            return False
        started = time.perf_counter()
        is_moving = False
        with self._failing():
            for frame in self._line.frames():
                self._hear(frame)
                is_moving = True
            while self._awaited and self._arrived:
                self._take(self._arrived.popleft(), self._awaited.popleft())
                is_moving = True
            is_moving |= self._look_at_reads()
            # UCX may abort this process where it answers a peer that has given up meanwhile.
            if self._source is not None and self._offers and not self._line.is_over:
                self._source.progress()
            if isinstance(wanted, _Outgoing) and not wanted.is_offer:
                wanted.is_done = not self._line.has_outgoing
            if self._line.is_over and not wanted.is_done and not self._reading:
                raise RuntimeError(_GONE)
        return is_moving or time.perf_counter() - started > 2 * _PRODUCTIVE

    def _hear(self, frame: Frame) -> None:
        if frame.kind == _TAKEN:
            self._offers.pop(frame.number).end()
            self._end_idle_source()
        elif frame.kind in (_INLINE, _OFFER):
            self._arrived.append(frame)
        else:
            raise RuntimeError(f"a frame of kind {frame.kind} came; the peer speaks otherwise")

    def _look_at_reads(self) -> bool:
        done = [message for message in self._reading if message.read and message.read.is_done()]
        for message in done:
            self._reading.remove(message)
            self._line.send(Frame(_TAKEN, message.number, b""))
            message.end()
        return bool(done)

    # -- sending -----------------------------------------------------------------------------------

    def _offer(self, message: _Outgoing, view: memoryview) -> None:
        if self._source is None:
            self._source = Source()
        extent = extent_of(view)
        covering = next((scope for scope in self._scopes if scope[0].covers(extent)), None)
        described = self._source.offer(*(covering or (extent, view)))
        name = self._source.name.encode()
        head = _OFFER_HEAD.pack(*extent, len(name))
        message.is_offer = True
        self._offers[self._count] = message
        self._line.send(Frame(_OFFER, self._count, head + name + described))

    def _end_idle_source(self) -> None:
        """End a source that keeps much memory mapped for nothing."""
        source = self._source
        if source and not self._offers and not self._scopes and source.kept_nbytes > _KEPT_NBYTES:
            self._end_source()

    def _end_source(self) -> None:
        if self._source is not None:
            self._source.close()
            self._source = None

    def _deregister(self, extent: Extent) -> None:
        """Deregister memory of which no message is pending."""
        registered = self._sink_scopes.pop(extent, None)
        if registered is not None and self._sink is not None:
            self._sink.deregister(registered)
        if self._offers:  # the user has broken off: nobody may read this any more
            self._fail("the sender has broken off")
        self._end_source()

    # -- receiving ---------------------------------------------------------------------------------

    def _take(self, frame: Frame, message: _Incoming) -> None:
        view = message.view
        assert view is not None
        if frame.kind == _INLINE:
            _check_length(len(frame.body), len(view))
            view[:] = frame.body
            message.end()
            return
        if self._line.is_over:  # UCX may abort this process where it reads from one that is gone
            raise RuntimeError(_GONE)
        address, nbytes, name_nbytes = _OFFER_HEAD.unpack_from(frame.body)
        _check_length(nbytes, len(view))
        name, described = _split(frame.body[_OFFER_HEAD.size :], name_nbytes)
        if self._sink is None:
            self._sink = Sink()
        if described:
            self._learn(name.decode(), described)
        own = extent_of(view)
        message.number = frame.number
        message.read = self._sink.read(own, Extent(address, nbytes), self._is_in_scope(own))
        self._reading.append(message)

    def _learn(self, source: str, described: bytes) -> None:
        assert self._sink is not None
        try:
            self._sink.learn(source, described, self._left)
        except PeerSilent:
            self._on_silence()
            raise RuntimeError(self._silence()) from None

    def _is_in_scope(self, extent: Extent) -> bool:
        """Register the user's memory around an extent, once; return whether there is any."""
        assert self._sink is not None
        for scope, _ in self._scopes:
            if scope.covers(extent):
                if scope not in self._sink_scopes:
                    self._sink_scopes[scope] = self._sink.registered(scope)
                return True
        return False

    # -- ending ------------------------------------------------------------------------------------

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Break the channel where the block raises."""
        try:
            yield
        except Exception as error:
            self._fail(str(error))

    def _fail(self, why: str) -> None:
        """Break the channel, once; no memory is written to any more."""
        if self._failure:
            return
        self._failure = why
        self._line.close()  # first: the peer is not to begin a read any more
        self._end_sink()
        self._end_source()
        for message in (*self._awaited, *self._reading, *self._offers.values()):
            message.view = None
        for kept in (self._awaited, self._reading, self._offers, self._arrived):
            kept.clear()

    def _end_sink(self) -> None:
        for message in self._reading:
            if message.read is not None:
                message.read.forget()
        self._sink_scopes.clear()
        if self._sink is not None:
            self._sink.close()
            self._sink = None

    def forget(self) -> None:
        """Leave the channel to the parent of this forked child."""
        self._guard = threading.RLock()  # another thread of the parent may hold it
        self._failure = "the channel belongs to the process that forked this one"
        for agent in (self._sink, self._source):
            if agent is not None:
                agent.leak()
        for message in self._reading:
            if message.read is not None:
                message.read.leak()


class _Message:
    """A message that is being sent or received."""

    def __init__(self, channel: NixlChannel, view: memoryview) -> None:
        self._channel = channel
        self.view: memoryview | None = view
        self.is_done = False

    def wait(self) -> None:
        """Return once the message has been sent, or received."""
        if not self.is_done:
            self._channel.wait_for(self)

    def end(self) -> None:
        """Let go of the memory: all of it has moved."""
        self.is_done, self.view = True, None


class _Outgoing(_Message):
    is_offer = False


class _Incoming(_Message):
    number = 0
    read: Read | None = None


def _check_length(sent: int, wanted: int) -> None:
    if sent != wanted:
        raise RuntimeError(f"a message of {sent} bytes came where {wanted} bytes were to come")


def _split(data: bytes, nbytes: int) -> tuple[bytes, bytes]:
    return data[:nbytes], data[nbytes:]


_all_channels = WeakSet[NixlChannel]()


def _leave_to_parent() -> None:
    for channel in list(_all_channels):
        channel.forget()


def _close_all() -> None:
    """End all agents while the interpreter still runs: their threads use UCX's memory."""
    for channel in list(_all_channels):
        with suppress(Exception):
            channel.close()


os.register_at_fork(after_in_child=_leave_to_parent)
atexit.register(_close_all)
