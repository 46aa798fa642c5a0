"""The least that a client can do: presigned requests over plain sockets, from and into memory."""

from __future__ import annotations

import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from benchmarks.harness.storage.routes import sdk
from benchmarks.harness.storage.routes.threads import for_each
from benchmarks.harness.storage.source import CONNECTIONS, ranges
from benchmarks.harness.storage.targets import AZURE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from benchmarks.harness.storage.source import Segment
    from benchmarks.harness.storage.targets import Target

HEAD_BYTES = 16 << 10
PATIENCE = struct.pack("ll", 60, 0)
"""Seconds and microseconds until more of an answer has to come."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request whose body is sent from `view`, or whose answer's body goes there."""

    head: bytes
    view: memoryview


@contextmanager
def upload(target: Target, segments: Sequence[Segment]) -> Iterator[Callable[[], None]]:
    """Put the parts; the request or two that make objects of them are left out."""
    with sdk.presigned_puts(target, ranges(segments)) as puts:
        exchanges = [
            _exchange("PUT", put.url, put.range.view, f"Content-Length: {len(put.range.view)}")
            for put in puts
        ]
        with _connections(target) as connections:
            yield lambda: _on_all(connections, exchanges, _put)


@contextmanager
def read(target: Target, segments: Sequence[Segment]) -> Iterator[Callable[[], None]]:
    exchanges = []
    for url, one in sdk.presigned_gets(target, ranges(segments)):
        name = "x-ms-range" if target.kind == AZURE else "Range"
        exchanges.append(
            _exchange("GET", url, one.view, f"{name}: bytes={one.start}-{one.stop - 1}")
        )
    with _connections(target) as connections:
        yield lambda: _on_all(connections, exchanges, _get)


def _exchange(method: str, url: str, view: memoryview, header: str) -> Exchange:
    parts = urlsplit(url)
    lines = [
        f"{method} {parts.path}?{parts.query} HTTP/1.1",
        f"Host: {parts.netloc}",
        header,
        "",
        "",
    ]
    return Exchange("\r\n".join(lines).encode(), view)


@contextmanager
def _connections(target: Target) -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        connections = []
        for _ in range(CONNECTIONS):
            connections.append(
                stack.enter_context(closing(socket.create_connection(target.address)))
            )
            connections[-1].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # Not settimeout: with that, Python polls before every call, and this is the floor.
            connections[-1].setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, PATIENCE)
        yield connections


def _on_all(
    connections: list[socket.socket],
    exchanges: list[Exchange],
    do: Callable[[socket.socket, Exchange], None],
) -> None:
    """Do all exchanges: each connection takes the next one as soon as it is free."""
    waiting = iter(exchanges)  # next() of a list's iterator is atomic

    def work(connection: socket.socket) -> None:
        for exchange in waiting:
            do(connection, exchange)

    with ThreadPoolExecutor(len(connections)) as pool:
        for_each(pool, work, connections)


def _put(connection: socket.socket, exchange: Exchange) -> None:
    connection.sendall(exchange.head)
    connection.sendall(exchange.view)
    status, length, rest = _head(connection)
    while len(rest) < length:
        more = connection.recv(HEAD_BYTES)
        if not more:
            raise ConnectionResetError("the server closed the connection")
        rest += more
    if status not in (200, 201):
        raise AssertionError(f"a put was answered with {status}: {rest!r}")


def _get(connection: socket.socket, exchange: Exchange) -> None:
    connection.sendall(exchange.head)
    status, length, rest = _head(connection)
    if status != 206 or length != len(exchange.view):
        raise AssertionError(f"a get was answered with {status} and {length} bytes")
    exchange.view[: len(rest)] = rest
    done = len(rest)
    while done < length:
        got = connection.recv_into(exchange.view[done:])
        if not got:
            raise ConnectionResetError("the server closed the connection")
        done += got


def _head(connection: socket.socket) -> tuple[int, int, bytes]:
    """Return status and length of an answer, and the part of its body that came with its head."""
    got = b""
    while b"\r\n\r\n" not in got:
        more = connection.recv(HEAD_BYTES)
        if not more:
            raise ConnectionResetError("the server closed the connection")
        got += more
    head, _, rest = got.partition(b"\r\n\r\n")
    status, *lines = head.decode("latin-1").split("\r\n")
    fields = {
        name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
    }
    return int(status.split()[1]), int(fields.get("content-length", "0")), rest
