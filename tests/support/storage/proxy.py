"""A proxy between a client and a storage server that lets requests meet faults.

    with running_proxy(server.endpoint) as proxy:
        options = server.options_at(proxy.endpoint) proxy.fail(lambda request: request.method ==
        "PUT", s3_error(503, "SlowDown", retry_after="1"), times=2) ... assert [one.status for one
        in proxy.requests] == [503, 503, 200]

Heads are forwarded as they come, Host included: S3 signs it. Bodies are passed on piece by piece.
`Expect: 100-continue` is answered here, and not forwarded.
"""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit

from tests.support.storage.http_wire import Head, Length, Piece, Request, Wire

_HOST = "127.0.0.1"
_CLOSE_SECONDS = 10.0
_BACKLOG = 256


@dataclass(frozen=True, slots=True)
class Refuse:
    """Answers in the server's place, once the request has come in whole."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Reset:
    """Resets the connection when the request's head has come in. The server hears nothing of it."""


@dataclass(frozen=True, slots=True)
class ResetInBody:
    """A reset of both connections after so many bytes of the request's body, or all of it."""

    after_bytes: int


@dataclass(frozen=True, slots=True)
class Delay:
    """Forwards the request that much later."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Hang:
    """Takes the request in and never answers; the server hears nothing of it."""


@dataclass(frozen=True, slots=True)
class LoseAnswer:
    """Ends the connection when the server has answered in full; nothing of it is passed on."""


@dataclass(frozen=True, slots=True)
class Truncate:
    """Passes on the answer's head and that much of its body, then ends the connection."""

    keep_bytes: int


@dataclass(frozen=True, slots=True)
class CorruptBody:
    """Inverts one byte of the answer's body, or of the request's.

    A body that ends before it stays as it is.
    """

    at: int
    in_request: bool = False


Fault = Refuse | Reset | ResetInBody | Delay | Hang | LoseAnswer | Truncate | CorruptBody


def s3_error(status: int, code: str, **headers: str) -> Refuse:
    """S3's answer with this error code.

    A header's name is written with underscores: `retry_after="1"`.
    """
    body = (
        f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{code}</Code>'
        f"<Message>{code}</Message></Error>"
    )
    return Refuse(status, {"Content-Type": "application/xml", **_named(headers)}, body.encode())


def azure_error(status: int, code: str, **headers: str) -> Refuse:
    """The answer of Azure's blob service with this error code; headers as for `s3_error`."""
    refusal = s3_error(status, code, **headers)
    return replace(
        refusal, headers={"x-ms-error-code": code, "x-ms-version": "2021-12-02", **refusal.headers}
    )


def _named(headers: Mapping[str, str]) -> dict[str, str]:
    return {name.replace("_", "-").title(): value for name, value in headers.items()}


@dataclass(slots=True)
class Exchange:
    """A request that came to the proxy, and what has become of it so far."""

    method: str
    target: str
    """Path and query, as they were sent."""
    fault: Fault | None
    status: int | None = None
    """Of the answer, also where it was lost on the way back; None where there was none."""
    sent_bytes: int = 0
    """Of the request's body, passed to the server."""
    received_bytes: int = 0
    """Of the answer's body, passed to the client."""


@dataclass(slots=True)
class _Rule:
    match: Callable[[Request], bool]
    fault: Fault
    times: int
    after: int

    def applies(self) -> bool:
        """Whether the fault is for this request, which matches; counts it."""
        if self.after:
            self.after -= 1
            return False
        self.times -= 1
        return self.times >= 0


class Proxy:
    """Passes requests on to one server. Threads of this process do it, one for every connection."""

    def __init__(self, server_endpoint: str) -> None:
        server = urlsplit(server_endpoint)
        self._server = (server.hostname or _HOST, server.port or 80)
        self._lock = threading.Lock()
        self._rules: list[_Rule] = []
        self._exchanges: list[Exchange] = []
        self._wires: set[Wire] = set()
        self._threads: list[threading.Thread] = []
        self._closing = threading.Event()
        # Bound, but not listened on: keeps the port while the proxy is down.
        self._reserved = _bound(0)
        self._port: int = self._reserved.getsockname()[1]
        self._listener: socket.socket | None = None

    @property
    def endpoint(self) -> str:
        """What clients are given as the server's URL."""
        return f"http://{_HOST}:{self._port}"

    @property
    def requests(self) -> list[Exchange]:
        """What has come in since the start or `reset`, in that order.

        An answer is counted before it is passed on.
        """
        with self._lock:
            return [replace(exchange) for exchange in self._exchanges]

    def fail(
        self, match: Callable[[Request], bool], fault: Fault, times: int = 1, after: int = 0
    ) -> None:
        """Make the next matching requests meet the fault: `times` of them, after `after` others.

        Of several faults a request meets the one that was set first.
        """
        with self._lock:
            self._rules.append(_Rule(match, fault, times, after))

    def reset(self) -> None:
        """Forget faults and requests. Connections that hang go on hanging."""
        with self._lock:
            self._rules.clear()
            self._exchanges.clear()

    def down(self) -> None:
        """End all connections, and refuse new ones until `up`."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            listener.close()
        with self._lock:
            for wire in self._wires:
                wire.interrupt()

    def up(self) -> None:
        """Accept connections."""
        self._listener = _bound(self._port)
        self._listener.listen(_BACKLOG)
        self._start(self._accept, self._listener)

    def close(self) -> None:
        """End everything, and free the port."""
        self._closing.set()
        self.down()
        self._reserved.close()
        for thread in self._threads:  # Grows until the thread that accepts, the first, has ended.
            thread.join(_CLOSE_SECONDS)
        if any(thread.is_alive() for thread in self._threads):
            raise TimeoutError(f"threads of the proxy still run after {_CLOSE_SECONDS:.0f} s")

    def _start(self, run: Callable[[socket.socket], None], connection: socket.socket) -> None:
        thread = threading.Thread(target=run, args=(connection,), name="proxy", daemon=True)
        thread.start()
        self._threads.append(thread)

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                self._start(self._serve, listener.accept()[0])

    def _serve(self, connection: socket.socket) -> None:
        with self._wire(connection) as client:
            try:
                while (head := client.head()) is not None:
                    if not self._exchange(client, head):
                        break
            except OSError:  # Either side has ended its connection: so does the proxy.
                client.reset()

    @contextlib.contextmanager
    def _wire(self, connection: socket.socket) -> Iterator[Wire]:
        wire = Wire(connection)
        with contextlib.closing(wire):
            with self._lock:
                self._wires.add(wire)
            try:
                if self._listener is None:
                    wire.interrupt()  # `down` may not have seen it.
                yield wire
            finally:
                with self._lock:
                    self._wires.remove(wire)

    def _exchange(self, client: Wire, head: Head) -> bool:
        """Have one request answered, or not; whether the connection can take another."""
        request = Request.of(head)
        exchange = self._admitted(request)
        fault = exchange.fault
        if isinstance(fault, Reset):
            client.reset()
            return False
        if isinstance(fault, Refuse):
            return _refuse(client, head, exchange, fault)
        if "expect" in head.headers:
            client.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        if isinstance(fault, Hang):
            client.wait_for_end()
            return False
        if isinstance(fault, Delay):
            self._closing.wait(fault.seconds)
        with self._wire(socket.create_connection(self._server)) as server:
            if not _upload(client, server, head, exchange):
                return False
            return _answer(client, server, head, exchange)

    def _admitted(self, request: Request) -> Exchange:
        with self._lock:
            faults = (rule.fault for rule in self._rules if rule.match(request) and rule.applies())
            exchange = Exchange(request.method, request.target, next(faults, None))
            self._exchanges.append(exchange)
            return exchange


@contextlib.contextmanager
def running_proxy(server_endpoint: str) -> Iterator[Proxy]:
    """A proxy in front of the server, without faults at first."""
    with contextlib.closing(Proxy(server_endpoint)) as proxy:
        proxy.up()
        yield proxy


def _refuse(client: Wire, head: Head, exchange: Exchange, fault: Refuse) -> bool:
    # A client that asks before it sends its body may or may not send it now: nothing can follow.
    asks = "expect" in head.headers
    if not asks:
        for _ in client.body(head.request_length()):
            pass
    exchange.status = fault.status
    headers = {
        "Content-Length": str(len(fault.body)),
        "Connection": "close" if asks else "keep-alive",
        **fault.headers,
    }
    lines = [
        f"HTTP/1.1 {fault.status} Refused",
        *(f"{name}: {value}" for name, value in headers.items()),
        "",
        "",
    ]
    client.send("\r\n".join(lines).encode() + (b"" if head.start[0] == "HEAD" else fault.body))
    return not (asks or head.ends_connection)


def _upload(client: Wire, server: Wire, head: Head, exchange: Exchange) -> bool:
    """Forward the request; False where a fault has ended that."""
    fault = exchange.fault
    body: Iterable[Piece] = client.body(head.request_length())
    if isinstance(fault, ResetInBody):
        body = _first(body, fault.after_bytes)
    elif isinstance(fault, CorruptBody) and fault.in_request:
        body = _inverted(body, fault.at)
    server.send(head.without("Expect"))
    for piece in body:
        # The server may have answered early; the client gets the answer once it has sent all.
        with contextlib.suppress(ConnectionError):
            server.send(piece.data)
            exchange.sent_bytes += len(piece.data) if piece.is_body else 0
    if isinstance(fault, ResetInBody):
        server.reset()
        client.reset()
        return False
    return True


def _answer(client: Wire, server: Wire, head: Head, exchange: Exchange) -> bool:
    """Pass on what the server answers; whether the client's connection can take another request."""
    fault = exchange.fault
    answer = _final_head(server)
    exchange.status = answer.status
    length = answer.response_length(head.start[0])
    body: Iterable[Piece] = server.body(length)
    if isinstance(fault, LoseAnswer):
        for _ in body:
            pass
        return False
    if isinstance(fault, Truncate):
        body = _first(body, fault.keep_bytes)
    elif isinstance(fault, CorruptBody) and not fault.in_request:
        body = _inverted(body, fault.at)
    client.send(answer.raw)
    for piece in body:
        exchange.received_bytes += len(piece.data) if piece.is_body else 0
        client.send(piece.data)
    ended = isinstance(fault, Truncate) or length is Length.UNTIL_CLOSE
    return not (ended or head.ends_connection or answer.ends_connection)


def _final_head(server: Wire) -> Head:
    while (head := server.head()) is not None:
        if head.status >= 200:
            return head
    raise ConnectionError("the server has ended the connection instead of answering")


def _first(pieces: Iterable[Piece], count: int) -> Iterator[Piece]:
    """The pieces until `count` bytes of the body have come."""
    for piece in pieces:
        if not piece.is_body:
            yield piece
            continue
        yield Piece(piece.data[:count], True)
        count -= len(piece.data)
        if count <= 0:
            return


def _inverted(pieces: Iterable[Piece], at: int) -> Iterator[Piece]:
    """The pieces, with every bit of the body's byte `at` inverted."""
    for piece in pieces:
        if piece.is_body:
            if 0 <= at < len(piece.data):
                data = bytearray(piece.data)
                data[at] ^= 0xFF
                piece = Piece(bytes(data), True)
            at -= len(piece.data)
        yield piece


def _bound(port: int) -> socket.socket:
    """A socket at the port, which it shares with others of this proxy."""
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    bound.bind((_HOST, port))
    return bound
