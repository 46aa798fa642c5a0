"""Checked transfer of chunks of bytes, from one rank's memory into another's.

Every transfer of many bytes between two ranks goes by this protocol:

    receiver -> sender   a greeting: empty where the receiver is ready, else why it refuses
    sender -> receiver   per chunk: its bytes, then its CRC32C
    receiver -> sender   per chunk: one byte, whether the chunk is right or is to be sent again

A few chunks are in flight at a time, and only the network copies their bytes. Both ranks always
wait for messages of the other: so they learn at once that it is gone, over any transport.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from dcp_mem.comm.collectives import Channel, PendingMessage
from dcp_mem.common.log import log
from dcp_mem.common.sendable import sendable
from dcp_mem.common.value_class import value_class
from dcp_mem.errors import DcpMemError

CHUNK = 16 << 20
"""Bytes of a chunk that is received in place; smaller ones cost more than they carry."""
_IN_FLIGHT = 4
_GREETING = 512
_TRIES = 3
_RIGHT, _AGAIN = b"\0", b"\1"


@value_class
class OutgoingChunk:
    """A chunk to be sent."""

    data: Any  # its bytes, as a buffer
    crc: Callable[[], int]


@value_class
class IncomingChunk:
    """A chunk to be received."""

    data: Any
    crc: Callable[[], int]  # computes the CRC32C of what has been received
    accept: Callable[[], None]


@sendable
class Amount(NamedTuple):
    """Bytes that were sent, repeats included, and that needn't be."""

    sent_nbytes: int = 0
    reused_nbytes: int = 0

    def plus(self, other: Amount) -> Amount:
        """Return the sum."""
        return Amount(
            self.sent_nbytes + other.sent_nbytes, self.reused_nbytes + other.reused_nbytes
        )


def _never_stop() -> None:
    return


def send(
    channel: Channel,
    chunks: Iterable[OutgoingChunk],
    go_on: Callable[[], None] = _never_stop,
) -> int:
    """Send chunks, in their order; return the bytes sent once the receiver has all of them.

    `chunks`: read as they are needed, the first one after the receiver's greeting. `go_on`: called
    before each chunk; raises where the rest isn't wanted any more.
    """
    greeting = bytearray(_GREETING)
    channel.receive(greeting).wait()
    refusal = greeting.rstrip(b"\0").decode(errors="replace")
    if refusal:
        raise DcpMemError(refusal)
    in_flight, sent_nbytes = deque[_Sent](), 0
    for chunk in chunks:
        go_on()
        while len(in_flight) >= _IN_FLIGHT:
            sent_nbytes += _settle(in_flight)
        in_flight.append(_Sent(channel, chunk))
        sent_nbytes += len(chunk.data)
    while in_flight:
        sent_nbytes += _settle(in_flight)
    return sent_nbytes


def _settle(in_flight: deque[_Sent]) -> int:
    """Wait for the answer to the first chunk; send it again, at the end, if it wasn't right.

    Returns the bytes that were sent again.
    """
    first = in_flight.popleft()
    if first.is_right():
        return 0
    in_flight.append(_Sent(first.channel, first.chunk))  # the receiver counts how often
    return len(first.chunk.data)


class _Sent:
    """A chunk that has been sent, and the answer to it."""

    def __init__(self, channel: Channel, chunk: OutgoingChunk) -> None:
        self.channel, self.chunk = channel, chunk
        self._answer = bytearray(1)
        self._pending_answer = channel.receive(self._answer)
        crc = chunk.crc()  # first: then the network finds the bytes in the processor's cache
        messages = [chunk.data, bytearray(crc.to_bytes(4, "little"))]
        self._pending = list(map(channel.send, messages))

    def is_right(self) -> bool:
        self._pending_answer.wait()
        for message in self._pending:
            message.wait()
        return self._answer == _RIGHT


def refuse(channel: Channel, why: str) -> None:
    """Tell the sender that this rank can't receive, and why; its `send` raises DcpMemError.

    `why`: the reason, for people; only the start of a long one is sent.
    """
    channel.send(bytearray(why.encode()[:_GREETING].ljust(_GREETING, b"\0"))).wait()


def receive(
    channel: Channel,
    chunks: Iterable[IncomingChunk],
    go_on: Callable[[], None] = _never_stop,
) -> None:
    """Receive chunks, in their order. Once this returns or raises, no chunk is written to any more.

    Where it raises, it closes the channel.

    `go_on`: called before each chunk; raises where the rest isn't wanted any more. Raises
    DcpMemError, RuntimeError.
    """
    in_flight = deque[_Expected]()
    answers: list[PendingMessage] = []
    refuse(channel, "")
    try:
        for chunk in chunks:
            go_on()
            while len(in_flight) >= _IN_FLIGHT:
                answers.append(_take(in_flight))
            in_flight.append(_Expected(channel, chunk))
        while in_flight:
            answers.append(_take(in_flight))
        for answer in answers:  # the last ones may not be sent yet
            answer.wait()
    except BaseException:
        channel.close()  # else a message that is under way could still be written
        raise


class _Expected:
    """A chunk that is being received, and its CRC32C."""

    def __init__(self, channel: Channel, chunk: IncomingChunk, tries: int = 1) -> None:
        self.channel, self.chunk, self.tries = channel, chunk, tries
        self._crc = bytearray(4)
        self._pending = [channel.receive(one) for one in (chunk.data, self._crc)]

    def is_right(self) -> bool:
        for message in reversed(self._pending):
            message.wait()
        return self.chunk.crc() == int.from_bytes(self._crc, "little")


def _take(in_flight: deque[_Expected]) -> PendingMessage:
    """Wait for the first chunk, accept it if it is right, and answer; return the answer."""
    first = in_flight.popleft()
    is_right = first.is_right()
    nbytes = len(first.chunk.data)
    if is_right:
        first.chunk.accept()
    elif first.tries == _TRIES:
        raise DcpMemError(
            f"a piece of {nbytes} bytes came otherwise than it was sent, {_TRIES} times"
        )
    else:
        log.warning("a piece of %d bytes came otherwise than it was sent; once more", nbytes)
        in_flight.append(_Expected(first.channel, first.chunk, first.tries + 1))
    return first.channel.send(bytearray(_RIGHT if is_right else _AGAIN))
