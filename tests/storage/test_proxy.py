"""Each fault of the proxy does what it says; without faults, clients don't notice the proxy."""

import contextlib
import http.client
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.support.storage.http_wire import Request
from tests.support.storage.proxy import (
    CorruptBody,
    Exchange,
    Fault,
    LoseAnswer,
    Proxy,
    Refuse,
    Reset,
    ResetInBody,
    Truncate,
    running_proxy,
)

_SECONDS = 10.0
_LARGE = 64 << 20


# -- against a server of a few lines ---------------------------------------------------------------


@dataclass
class _Origin:
    """What a server was told, and what it answers."""

    endpoint: str = ""
    heard: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)
    """Request line, headers by name in lower case, body: of requests that came whole."""
    torn: list[int] = field(default_factory=list)
    """Bytes that came of bodies that did not come whole."""
    ended: threading.Event = field(default_factory=threading.Event)
    """A request has ended, whole or torn."""
    answer: bytes = b"the answer"
    status: int = 200
    chunked: bool = False


@pytest.fixture
def origin() -> Iterator[_Origin]:
    told = _Origin()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            body = (
                self._chunks()
                if "transfer-encoding" in headers
                else self._counted(headers.get("content-length"))
            )
            if body is not None:
                told.heard.append((self.requestline, headers, body))
                self._respond()
            told.ended.set()

        do_GET = do_PUT = do_HEAD = do_DELETE = _answer  # noqa: N815

        def _counted(self, length: str | None) -> bytes | None:
            body = b""
            with contextlib.suppress(ConnectionError):
                while data := self.rfile.read1(int(length or 0) - len(body)):
                    body += data
            if len(body) == int(length or 0):
                return body
            told.torn.append(len(body))
            self.close_connection = True
            return None

        def _chunks(self) -> bytes:
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            while self.rfile.readline() != b"\r\n":
                pass
            return body

        def _respond(self) -> None:
            self.send_response(told.status)
            if told.chunked:
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                for start in range(0, len(told.answer), 3):
                    chunk = told.answer[start:][:3]
                    self.wfile.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
                self.wfile.write(b"0\r\nTrailer: yes\r\n\r\n")
                return
            if told.status not in {204, 304}:
                self.send_header("Content-Length", str(len(told.answer)))
            self.end_headers()
            if self.command != "HEAD" and told.status not in {204, 304}:
                self.wfile.write(told.answer)

        def log_message(self, *_: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 64

    with Server(("127.0.0.1", 0), Handler) as server:
        told.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield told
        server.shutdown()
        thread.join()


@pytest.fixture
def proxy(origin: _Origin) -> Iterator[Proxy]:
    with running_proxy(origin.endpoint) as proxy:
        yield proxy


@pytest.fixture
def connection(proxy: Proxy) -> Iterator[http.client.HTTPConnection]:
    connection = http.client.HTTPConnection(_address(proxy), timeout=_SECONDS)
    with contextlib.closing(connection):
        yield connection


def _address(proxy: Proxy) -> str:
    return proxy.endpoint.removeprefix("http://")


def _always(_: Request) -> bool:
    return True


def _ask(
    connection: http.client.HTTPConnection, method: str = "PUT", body: bytes = b"0123456789"
) -> tuple[int, bytes]:
    connection.request(method, "/a/key", body)
    with connection.getresponse() as response:
        return response.status, response.read()


@contextlib.contextmanager
def _raw(proxy: Proxy) -> Iterator[socket.socket]:
    host, _, port = _address(proxy).partition(":")
    with socket.create_connection((host, int(port)), _SECONDS) as raw:
        yield raw


def test_requests_and_answers_pass_unchanged(
    origin: _Origin, proxy: Proxy, connection: http.client.HTTPConnection
) -> None:
    connection.request(
        "PUT", "/a%2Fb/c?partNumber=1&uploads", b"body", {"Host": "signed:1", "X-Odd": "a: b"}
    )
    with connection.getresponse() as response:
        assert (response.status, response.read()) == (200, b"the answer")
    ((line, headers, body),) = origin.heard
    assert line == "PUT /a%2Fb/c?partNumber=1&uploads HTTP/1.1"
    assert (headers["host"], headers["x-odd"], body) == ("signed:1", "a: b", b"body")
    assert proxy.requests == [Exchange("PUT", "/a%2Fb/c?partNumber=1&uploads", None, 200, 4, 10)]


def test_chunked_bodies_pass_both_ways(
    origin: _Origin, proxy: Proxy, connection: http.client.HTTPConnection
) -> None:
    origin.chunked = True
    for _ in range(2):
        connection.request(
            "PUT", "/a/key", iter([b"in ", b"three ", b"chunks"]), encode_chunked=True
        )
        with connection.getresponse() as response:
            assert response.read() == b"the answer"
    assert [body for _, _, body in origin.heard] == [b"in three chunks"] * 2
    assert [(one.sent_bytes, one.received_bytes) for one in proxy.requests] == [(15, 10)] * 2


def test_who_expects_a_100_gets_it_before_the_body(origin: _Origin, proxy: Proxy) -> None:
    with _raw(proxy) as raw:
        raw.sendall(
            b"PUT /k HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 4\r\n\r\n"
        )
        assert raw.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert origin.heard == []
        raw.sendall(b"body")
        assert raw.recv(1000).startswith(b"HTTP/1.1 200 ")
    assert [("expect" in headers, body) for _, headers, body in origin.heard] == [(False, b"body")]


def test_a_refusal_is_answered_without_the_server(
    origin: _Origin, proxy: Proxy, connection: http.client.HTTPConnection
) -> None:
    proxy.fail(_always, Refuse(503, {"Retry-After": "7"}, b"slow down"))
    connection.request("PUT", "/a/key", bytes(_LARGE))
    with connection.getresponse() as response:
        assert (response.status, response.headers["Retry-After"], response.read()) == (
            503,
            "7",
            b"slow down",
        )
    assert origin.heard == []
    assert _ask(connection)[0] == 200  # on the same connection
    assert [(one.status, one.sent_bytes, one.fault is not None) for one in proxy.requests] == [
        (503, 0, True),
        (200, 10, False),
    ]


def test_a_fault_meets_as_many_as_told_after_as_many_as_told(
    proxy: Proxy, connection: http.client.HTTPConnection
) -> None:
    proxy.fail(lambda request: request.method == "PUT", Refuse(500), times=2, after=1)
    assert [
        _ask(connection, method)[0] for method in ("PUT", "GET", "PUT", "GET", "PUT", "PUT")
    ] == [
        *(200, 200, 500),
        *(200, 500, 200),
    ]


def test_a_reset_in_the_body_tears_the_upload_for_both(origin: _Origin, proxy: Proxy) -> None:
    proxy.fail(_always, ResetInBody(1000))
    with _raw(proxy) as raw:
        raw.sendall(b"PUT /k HTTP/1.1\r\nHost: h\r\nContent-Length: 3000\r\n\r\n" + bytes(2000))
        with pytest.raises(ConnectionResetError):
            raw.recv(1)
    assert origin.ended.wait(_SECONDS)
    assert origin.heard == []
    assert len(origin.torn) == 1
    assert origin.torn[0] <= 1000
    assert [(one.status, one.sent_bytes) for one in proxy.requests] == [(None, 1000)]


def test_a_lost_answer_is_of_a_request_that_was_done(
    origin: _Origin, proxy: Proxy, connection: http.client.HTTPConnection
) -> None:
    proxy.fail(_always, LoseAnswer())
    with pytest.raises(http.client.RemoteDisconnected):
        _ask(connection)
    assert [body for _, _, body in origin.heard] == [b"0123456789"]
    assert proxy.requests == [Exchange("PUT", "/a/key", LoseAnswer(), 200, 10, 0)]


def test_a_corrupt_request_differs_in_one_byte(
    origin: _Origin, proxy: Proxy, connection: http.client.HTTPConnection
) -> None:
    sent = bytes(_LARGE)
    proxy.fail(_always, CorruptBody(_LARGE - 2, in_request=True))
    assert _ask(connection, "PUT", sent) == (200, b"the answer")
    assert origin.heard[0][2] == sent[:-2] + b"\xff\x00"


@pytest.mark.parametrize("fault", [Reset(), Truncate(5)])
def test_an_answer_that_breaks_off_is_an_error_and_the_next_one_whole(
    proxy: Proxy, connection: http.client.HTTPConnection, fault: Fault
) -> None:
    proxy.fail(_always, fault)
    with pytest.raises((ConnectionError, http.client.HTTPException)):
        _ask(connection, "GET")
    connection.close()
    assert _ask(connection, "GET") == (200, b"the answer")


def test_a_corrupt_answer_differs_in_one_byte(
    proxy: Proxy, connection: http.client.HTTPConnection
) -> None:
    proxy.fail(_always, CorruptBody(4))
    status, body = _ask(connection, "GET")
    assert (status, body[:4] + body[5:]) == (200, b"the nswer")
    assert body[4:5] != b"a"
