"""Each fault of the proxy does what it says; without faults, clients don't notice the proxy."""

import contextlib
import http.client
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import botocore.session
import pytest
from azure.core.exceptions import AzureError
from azure.storage.blob import BlobServiceClient, ContainerClient
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

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
    azure_error,
    running_proxy,
    s3_error,
)
from tests.support.storage.servers import BlobServer, S3Server, StorageRoot

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


# -- against the servers of the tests --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Store:
    """An SDK's client that tries once, on a bucket or container behind a proxy."""

    proxy: Proxy
    put: Callable[[str, bytes], object]
    get: Callable[[str], bytes]
    failures: tuple[type[Exception], ...]
    refusal: Callable[[int, str], Refuse]


@pytest.fixture(params=["azurite", "moto", "radosgw"])
def store(request: pytest.FixtureRequest) -> Iterator[_Store]:
    server: BlobServer | S3Server = request.getfixturevalue(request.param)
    with running_proxy(server.endpoint) as proxy, server.fresh_root() as root:
        opened = (
            _azure(server, root, proxy)
            if isinstance(server, BlobServer)
            else _s3(server, root, proxy)
        )
        with opened as store:
            yield store


@contextlib.contextmanager
def _s3(server: S3Server, root: StorageRoot, proxy: Proxy) -> Iterator[_Store]:
    options, bucket = server.options_at(proxy.endpoint), root.url.removeprefix("s3://")
    client = botocore.session.Session().create_client(
        "s3",
        endpoint_url=options["endpoint_url"],
        region_name=options["client_kwargs"]["region_name"],
        aws_access_key_id=options["key"],
        aws_secret_access_key=options["secret"],
        config=Config(
            retries={"total_max_attempts": 1},
            read_timeout=_SECONDS,
            # Else it finds what was corrupted, where the server tells.
            response_checksum_validation="when_required",
        ),
    )

    def get(key: str) -> bytes:
        return bytes(client.get_object(Bucket=bucket, Key=key)["Body"].read())

    def put(key: str, data: bytes) -> object:
        return client.put_object(Bucket=bucket, Key=key, Body=data)

    with contextlib.closing(client):
        yield _Store(proxy, put, get, (BotoCoreError, ClientError), s3_error)


@contextlib.contextmanager
def _azure(server: BlobServer, root: StorageRoot, proxy: Proxy) -> Iterator[_Store]:
    connection = server.options_at(proxy.endpoint)["connection_string"]
    with BlobServiceClient.from_connection_string(connection, retry_total=0) as client:
        container: ContainerClient = client.get_container_client(root.url.removeprefix("abfs://"))

        def get(key: str) -> bytes:
            return bytes(container.download_blob(key).readall())

        def put(key: str, data: bytes) -> object:
            return container.upload_blob(key, data, overwrite=True)

        yield _Store(proxy, put, get, (AzureError,), azure_error)


def _data(count: int) -> bytes:
    return bytes(range(256)) * (count // 256)


def _puts(request: Request) -> bool:
    return request.method == "PUT"


def _gets(request: Request) -> bool:
    return request.method == "GET"


def test_an_sdk_stores_and_reads_through_the_proxy(store: _Store) -> None:
    data = _data(32 << 20)
    store.put("a/key+1", data)
    assert store.get("a/key+1") == data
    assert all(one.status in {200, 201, 206} for one in store.proxy.requests)
    assert sum(one.sent_bytes for one in store.proxy.requests) >= len(data)
    assert sum(one.received_bytes for one in store.proxy.requests) >= len(data)


def test_an_sdk_takes_a_refusal_for_the_servers_own(store: _Store) -> None:
    store.proxy.fail(_puts, store.refusal(403, "MadeUpForThis"))
    with pytest.raises(store.failures, match="MadeUpForThis"):
        store.put("key", b"data")
    store.put("key", b"data")
    assert store.get("key") == b"data"


@pytest.mark.parametrize("fault", [Reset(), ResetInBody(1 << 20)])
def test_an_upload_that_is_torn_leaves_nothing(store: _Store, fault: Fault) -> None:
    store.proxy.fail(_puts, fault)
    with pytest.raises(store.failures):
        store.put("key", _data(4 << 20))
    with pytest.raises(store.failures, match=r"NoSuchKey|does not exist"):
        store.get("key")


def test_an_upload_whose_answer_is_lost_is_there(store: _Store) -> None:
    store.proxy.fail(_puts, LoseAnswer())
    with pytest.raises(store.failures):
        store.put("key", b"data")
    assert store.get("key") == b"data"


def test_an_sdk_notices_a_truncated_answer(store: _Store) -> None:
    store.put("key", _data(1 << 20))
    store.proxy.fail(_gets, Truncate(1000), times=100)
    with pytest.raises(store.failures):
        store.get("key")


def test_a_corrupt_answer_has_its_length(store: _Store) -> None:
    data = _data(1 << 20)
    store.put("key", data)
    store.proxy.fail(_gets, CorruptBody(1000))
    got = store.get("key")
    assert got[:1000] + got[1001:] == data[:1000] + data[1001:]
    assert got[1000] != data[1000]
