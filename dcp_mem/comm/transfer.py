"""Checked transfer of chunks of bytes, from one rank's memory into another's.

Every transfer of many bytes between two ranks goes by this protocol:

    receiver -> sender   a greeting: empty where the receiver is ready, else why it refuses
    sender -> receiver   per chunk: its bytes, then its CRC32C
    receiver -> sender   per chunk: one byte, whether the chunk is right or is to be sent again

A few chunks are in flight at a time, and only the network copies their bytes. Both ranks always
wait for messages of the other: gloo (torch 2.6 to 2.13) reports at once that the peer is gone where
a rank waits for a message, but not where a message has been sent or received in part.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from dcp_mem.comm.collectives import Channel, PendingMessage
from dcp_mem.common.log import log
from dcp_mem.errors import DcpMemError

CHUNK = 16 << 20
"""Bytes of a chunk that is received in place; smaller ones cost gloo more than they carry."""
_IN_FLIGHT = 4
_GREETING = 512
_TRIES = 3
_RIGHT, _AGAIN = b"\0", b"\1"


@dataclass(frozen=True, slots=True)
class OutgoingChunk:
    """A chunk to be sent.

    Attributes:
        data: Its bytes, as a buffer.
        crc: Computes its CRC32C.
    """

    data: Any
    crc: Callable[[], int]


@dataclass(frozen=True, slots=True)
class IncomingChunk:
    """A chunk to be received.

    Attributes:
        data: The memory that it is received into.
        crc: Computes the CRC32C of what has been received.
        accept: Called once the chunk is right.
    """

    data: Any
    crc: Callable[[], int]
    accept: Callable[[], None]


def _never_stop() -> None:
    return


def send(
    channel: Channel,
    chunks: Iterable[OutgoingChunk],
    go_on: Callable[[], None] = _never_stop,
) -> None:
    """Send chunks, in their order; return once the receiver has all of them.

    Args:
        channel: To the receiver, who calls `receive` or `refuse`.
        chunks: Read as they are needed.
        go_on: Called before each chunk; raises where the rest isn't wanted any more.

    Raises:
        DcpMemError: The receiver refuses.
        RuntimeError: The receiver is gone, or silent.
    """
    greeting = bytearray(_GREETING)
    channel.receive(greeting).wait()
    refusal = greeting.rstrip(b"\0").decode(errors="replace")
    if refusal:
        raise DcpMemError(refusal)
    in_flight = deque[_Sent]()
    for chunk in chunks:
        go_on()
        while len(in_flight) >= _IN_FLIGHT:
            _settle(in_flight)
        in_flight.append(_Sent(channel, chunk))
    while in_flight:
        _settle(in_flight)


def _settle(in_flight: deque[_Sent]) -> None:
    """Wait for the answer to the first chunk; send it again, at the end, if it wasn't right."""
    first = in_flight.popleft()
    if not first.is_right():
        in_flight.append(_Sent(first.channel, first.chunk))  # the receiver counts how often


class _Sent:
    """A chunk that has been sent, and the answer to it."""

    def __init__(self, channel: Channel, chunk: OutgoingChunk) -> None:
        self.channel, self.chunk = channel, chunk
        self._answer = bytearray(1)
        self._pending_answer = channel.receive(self._answer)
        crc = chunk.crc()  # first: then the network finds the bytes in the processor's cache
        self._pending_data = channel.send(chunk.data)
        self._pending_crc = channel.send(bytearray(crc.to_bytes(4, "little")))

    def is_right(self) -> bool:
        self._pending_answer.wait()
        self._pending_data.wait()
        self._pending_crc.wait()
        return self._answer == _RIGHT


def refuse(channel: Channel, why: str) -> None:
    """Tell the sender that this rank can't receive, and why; its `send` raises DcpMemError.

    Args:
        channel: To the sender.
        why: The reason, for people; only the start of a long one is sent.
    """
    channel.send(bytearray(why.encode()[:_GREETING].ljust(_GREETING, b"\0"))).wait()


def receive(
    channel: Channel,
    chunks: Iterable[IncomingChunk],
    go_on: Callable[[], None] = _never_stop,
) -> None:
    """Receive chunks, in their order. Once this returns or raises, no chunk is written to any more.

    Args:
        channel: To the sender, who calls `send`.
        chunks: Read as they are needed.
        go_on: Called before each chunk; raises where the rest isn't wanted any more.

    Raises:
        DcpMemError: A chunk is damaged each time that it is sent.
        RuntimeError: The sender is gone, or silent.
    """
    in_flight = deque[_Expected]()
    answers: list[PendingMessage] = []  # gloo drops a message that isn't held
    refuse(channel, "")
    try:
        for chunk in chunks:
            go_on()
            while len(in_flight) >= _IN_FLIGHT:
                answers.append(_take(in_flight))
            in_flight.append(_Expected(channel, chunk))
        while in_flight:
            answers.append(_take(in_flight))
    finally:
        in_flight.clear()  # gloo doesn't write to the memory of a message that isn't held


class _Expected:
    """A chunk that is being received, and its CRC32C."""

    def __init__(self, channel: Channel, chunk: IncomingChunk, tries: int = 1) -> None:
        self.channel, self.chunk, self.tries = channel, chunk, tries
        self._crc = bytearray(4)
        self._pending_data = channel.receive(chunk.data)
        self._pending_crc = channel.receive(self._crc)

    def is_right(self) -> bool:
        self._pending_crc.wait()
        self._pending_data.wait()
        return self.chunk.crc() == int.from_bytes(self._crc, "little")


def _take(in_flight: deque[_Expected]) -> PendingMessage:
    """Wait for the first chunk, accept it if it is right, and answer; return the answer."""
    first = in_flight[0]
    is_right = first.is_right()
    in_flight.popleft()
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
