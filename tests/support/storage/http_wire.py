"""HTTP/1.1 messages on a socket: whole heads, and bodies in pieces that can be passed on."""

import contextlib
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

_RECEIVED_BYTES = 256 << 10
_HEAD_BYTES = 1 << 20
_WITHOUT_BODY = (204, 304)


class Length(Enum):
    """How long a body is, where its head doesn't tell a number."""

    CHUNKED = "until the chunk of no bytes"
    UNTIL_CLOSE = "until the connection ends"


class Piece(NamedTuple):
    """Bytes of a message, behind its head."""

    data: bytes
    is_body: bool
    """Whether they are the body's own; those that are not are chunk sizes and trailers."""


@dataclass(frozen=True, slots=True)
class Head:
    """The first lines of a request or a response."""

    raw: bytes = field(repr=False)
    """As they came, with the empty line at the end."""
    start: tuple[str, str, str]
    """The three words of the first line."""
    headers: dict[str, str]
    """By name in lower case."""

    @property
    def status(self) -> int:
        return int(self.start[1])

    @property
    def ends_connection(self) -> bool:
        version = self.start[2] if self.start[2].startswith("HTTP/") else self.start[0]
        told = self.headers.get("connection", "close" if version == "HTTP/1.0" else "keep-alive")
        return told.lower() == "close"

    def request_length(self) -> int | Length:
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            return Length.CHUNKED
        return int(self.headers.get("content-length", "0"))

    def response_length(self, method: str) -> int | Length:
        """The length of the body that answers a request of this method."""
        if method == "HEAD" or self.status in _WITHOUT_BODY:
            return 0
        if "content-length" not in self.headers and "transfer-encoding" not in self.headers:
            return Length.UNTIL_CLOSE
        return self.request_length()

    def without(self, name: str) -> bytes:
        """The raw head, but for the header of this name."""
        start = f"{name}:".lower().encode()
        lines = self.raw.split(b"\r\n")
        return b"\r\n".join(line for line in lines if not line.lower().startswith(start))


@dataclass(frozen=True, slots=True)
class Request:
    """What a request asks for."""

    method: str
    target: str
    """Path and query, as they were sent."""
    path: str
    """Decoded, from `/` on."""
    query: dict[str, str]
    """Decoded; empty where a name has no value, like `uploads`."""
    headers: dict[str, str]
    """By name in lower case."""

    @staticmethod
    def of(head: Head) -> "Request":
        method, target, _ = head.start
        url = urlsplit(target)
        query = dict(parse_qsl(url.query, keep_blank_values=True))
        return Request(method, target, unquote(url.path), query, head.headers)

    @property
    def wanted(self) -> str:
        """The range of bytes that it asks for; empty where it asks for all."""
        return self.headers.get("x-ms-range") or self.headers.get("range", "")


class Wire:
    """A connection on which HTTP is spoken. Owns the socket.

    Reading raises ConnectionError where the other side ends the connection within a message.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._unread = b""

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def head(self) -> Head | None:
        """The next message's head; None where the other side has ended the connection instead."""
        with contextlib.suppress(ConnectionError):
            while not self._unread:
                self._unread = self._received()
        if not self._unread:
            return None
        raw = self._until(b"\r\n\r\n")
        first, *lines = raw.decode("latin-1").rstrip("\r\n").split("\r\n")
        one, two, three = (*first.split(" ", 2), "")[:3]
        named = (line.partition(":") for line in lines)
        return Head(
            raw,
            (one, two, three),
            {name.strip().lower(): value.strip() for name, _, value in named},
        )

    def body(self, length: int | Length) -> Iterator[Piece]:
        """The message's body, piece by piece as it comes in."""
        if isinstance(length, int):
            return self._counted(length)
        return self._chunked() if length is Length.CHUNKED else self._rest()

    def wait_for_end(self) -> None:
        """Read what still comes, until the other side or `interrupt` ends the connection."""
        with contextlib.suppress(OSError):
            while self._received():
                pass

    def interrupt(self) -> None:
        """End the connection under a thread that may be reading or writing it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection, after what was sent."""
        self._socket.close()

    def reset(self) -> None:
        """End the connection by an RST."""
        with contextlib.suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()

    def _counted(self, count: int) -> Iterator[Piece]:
        while count:
            data = self._unread or self._received()
            data, self._unread = data[:count], data[count:]
            count -= len(data)
            yield Piece(data, True)

    def _chunked(self) -> Iterator[Piece]:
        while True:
            line = self._until(b"\r\n")
            yield Piece(line, False)
            size = int(line.partition(b";")[0], 16)
            if size == 0:
                break
            yield from self._counted(size)
            yield Piece(self._until(b"\r\n"), False)
        while line != b"\r\n":  # trailers
            line = self._until(b"\r\n")
            yield Piece(line, False)

    def _rest(self) -> Iterator[Piece]:
        data, self._unread = self._unread, b""
        while data:
            yield Piece(data, True)
            data = self._socket.recv(_RECEIVED_BYTES)

    def _until(self, end: bytes) -> bytes:
        while end not in self._unread:
            if len(self._unread) > _HEAD_BYTES:
                raise ConnectionError("this is not HTTP")
            self._unread += self._received()
        found, end, self._unread = self._unread.partition(end)
        return found + end

    def _received(self) -> bytes:
        data = self._socket.recv(_RECEIVED_BYTES)
        if not data:
            raise ConnectionError("the connection was ended by the other side")
        return data
