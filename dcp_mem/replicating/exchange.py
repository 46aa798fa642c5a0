"""Bytes on their way from one rank's memory into another's, piece by piece, each checked as it comes.

First a letter of the receiver, that it is ready or why it isn't; then the pieces, a few in flight. No byte is copied but by the
network.

Behind each piece goes its CRC32C, and one byte comes back: that it is right, or is to be sent once more. Both ends wait for
these. For gloo (torch 2.6 to 2.13) tells at once who waits for a message that its peer is gone, but not who waits for one that is
half here, or half gone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from dcp_mem.errors import DcpMemError
from dcp_mem.events import log
from dcp_mem.ranks.base import Line, Passing

CHUNK = 16 << 20
"""Bytes of a piece that comes straight to where it belongs; with smaller ones gloo's messages cost more than they carry."""
_IN_FLIGHT = 4
_LETTER = 512
_TRIES = 3
_RIGHT, _AGAIN = b"\0", b"\1"


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A piece to be sent. crc: computes its CRC32C."""

    data: Any
    crc: Callable[[], int]


@dataclass(frozen=True, slots=True)
class Awaited:
    """A piece that is to come, into this memory. crc: computes the CRC32C of what has come. accept: is told that it is right."""

    data: Any
    crc: Callable[[], int]
    accept: Callable[[], None]


def send(line: Line, pieces: Iterable[Outgoing], go_on: Callable[[], None]) -> None:
    """Send pieces, in their order. go_on: asked before each; it raises where the rest isn't wanted.

    Raises DcpMemError where the receiver can't take them, and RuntimeError where it is gone or silent.
    """
    letter = bytearray(_LETTER)
    line.receive(letter).wait()
    refusal = letter.rstrip(b"\0").decode(errors="replace")
    if refusal:
        raise DcpMemError(refusal)
    passing = deque[_Sent]()
    for piece in pieces:
        go_on()
        while len(passing) >= _IN_FLIGHT:
            _settle(passing)
        passing.append(_Sent(line, piece))
    while passing:
        _settle(passing)


def _settle(passing: deque[_Sent]) -> None:
    """Hear of the first piece; where it didn't come right it is sent again, behind those that are on their way."""
    first = passing.popleft()
    if not first.is_right():
        passing.append(_Sent(first.line, first.piece))  # the receiver counts how often


class _Sent:
    """A piece on its way, and the answer to it."""

    def __init__(self, line: Line, piece: Outgoing) -> None:
        self.line, self.piece = line, piece
        self._said = bytearray(1)
        self._answer = line.receive(self._said)
        crc = piece.crc()  # first: then the network finds the bytes in the processor's cache
        self._message = line.send(piece.data)
        self._crc = line.send(bytearray(crc.to_bytes(4, "little")))

    def is_right(self) -> bool:
        self._answer.wait()
        self._message.wait()
        self._crc.wait()
        return self._said == _RIGHT


def refuse(line: Line, why: str) -> None:
    """Let the sender know that this rank can't take what it has."""
    line.send(bytearray(why.encode()[:_LETTER].ljust(_LETTER, b"\0"))).wait()


def receive(line: Line, pieces: Iterable[Awaited], go_on: Callable[[], None]) -> None:
    """Receive pieces, in their order; each is accepted once it is right.

    Raises DcpMemError where one never is, and RuntimeError where the sender is gone or silent. No byte comes later.
    """
    passing = deque[_Expected]()
    answers: list[Passing] = []
    refuse(line, "")
    try:
        for piece in pieces:
            go_on()
            while len(passing) >= _IN_FLIGHT:
                answers.append(_take(passing))
            passing.append(_Expected(line, piece))
        while passing:
            answers.append(_take(passing))
    finally:
        passing.clear()  # what is given up here isn't written to any more


class _Expected:
    """A piece that is to come, and its CRC32C."""

    def __init__(self, line: Line, piece: Awaited, tries: int = 1) -> None:
        self.line, self.piece, self.tries = line, piece, tries
        self._sent = bytearray(4)
        self._message, self._crc = line.receive(piece.data), line.receive(self._sent)

    def is_right(self) -> bool:
        self._crc.wait()
        self._message.wait()
        return self.piece.crc() == int.from_bytes(self._sent, "little")


def _take(passing: deque[_Expected]) -> Passing:
    """Wait for the first piece, and answer it; the answer doesn't leave unless somebody holds it."""
    first = passing[0]
    is_right = first.is_right()
    passing.popleft()
    if is_right:
        first.piece.accept()
    elif first.tries == _TRIES:
        raise DcpMemError(f"a piece of {len(first.piece.data)} bytes came otherwise than it was sent, {_TRIES} times")
    else:
        log.warning("a piece of %d bytes came otherwise than it was sent; once more", len(first.piece.data))
        passing.append(_Expected(first.line, first.piece, first.tries + 1))
    return first.line.send(bytearray(_RIGHT if is_right else _AGAIN))
