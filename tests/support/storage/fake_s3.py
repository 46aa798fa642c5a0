"""An S3 server in this process that checks more of S3's rules than moto, and errs when told to."""

from __future__ import annotations

import base64
import contextlib
import itertools
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from crc32c import crc32c

_PAGE = 2
"""Items in one page of a list: nobody may believe that the first one is all there is."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a client sent, but for the body."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]

    @property
    def operation(self) -> str:
        """The method and what of the object it is about: "PUT partNumber"."""
        about = [
            name
            for name in ("partNumber", "uploads", "uploadId", "list-type")
            if name in self.query
        ]
        return " ".join([self.method, *about[:1]])


@dataclass(slots=True)
class _Part:
    data: bytes
    etag: str
    checksum: str


@dataclass(slots=True)
class FakeS3:
    """One server; buckets are there as soon as they are named.

    refuse: (operation, status, code) of the next answers, each given once.
    gives_go_ahead: whether it answers `Expect: 100-continue`, as it has to.
    seconds_per_mib: how slowly it takes bodies.
    cut: bytes of a body after which it hangs up, -1 for never.
    ignores_ranges: it sends objects from their beginning.
    redirects_to: the region that it wants requests to be signed for, "" for any.
    """

    endpoint: str = ""
    objects: dict[str, bytes] = field(default_factory=dict)
    uploads: dict[str, tuple[str, dict[int, _Part]]] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    refuse: list[tuple[str, int, str]] = field(default_factory=list)
    gives_go_ahead: bool = True
    seconds_per_mib: float = 0.0
    cut: int = -1
    ignores_ranges: bool = False
    redirects_to: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def storage_options(self) -> dict[str, Any]:
        return {"key": "AKIDTESTING", "secret": "no-secret", "endpoint_url": self.endpoint}

    def count(self, operation: str) -> int:
        return sum(request.operation == operation for request in self.requests)

    def last(self, operation: str) -> Request:
        return [request for request in self.requests if request.operation == operation][-1]


@contextlib.contextmanager
def running_fake_s3() -> Iterator[FakeS3]:
    fake = FakeS3()
    handler = type("Handler", (_Handler,), {"fake": fake})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        serving = threading.Thread(target=server.serve_forever, args=(0.05,))
        serving.start()
        fake.endpoint = f"http://127.0.0.1:{server.server_port}"
        try:
            yield fake
        finally:
            server.shutdown()
            serving.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fake: FakeS3
    _ids = itertools.count()

    def handle_expect_100(self) -> bool:
        if self._redirected():
            return False
        return super().handle_expect_100() if self.fake.gives_go_ahead else True

    def do_PUT(self) -> None:
        request = self._noted()
        data = self._body()
        if data is None or self._refused(request):
            return
        checksum = base64.b64encode(crc32c(data).to_bytes(4, "big")).decode()
        if request.headers.get("x-amz-checksum-crc32c", checksum) != checksum:
            self._error(400, "BadDigest")
        elif "x-amz-copy-source" in request.headers:
            self._copy(request)
        elif request.operation == "PUT partNumber":
            self._put_part(request, data, checksum)
        elif request.headers.get("if-none-match") == "*" and request.path in self.fake.objects:
            self._error(412, "PreconditionFailed")
        else:
            self.fake.objects[request.path] = data
            self._answer(200, headers={"ETag": f'"{secrets.token_hex(16)}"'})

    def _copy(self, request: Request) -> None:
        """Copy as AWS does: it keeps to the condition, and tells the copy's CRC32C."""
        data = self.fake.objects.get(
            "/" + unquote(request.headers["x-amz-copy-source"]).lstrip("/")
        )
        if data is None:
            return self._error(404, "NoSuchKey")
        if "stale" in request.headers.get("x-amz-copy-source-if-match", ""):
            return self._error(412, "PreconditionFailed")
        wanted = request.headers.get("x-amz-copy-source-range")
        if wanted is not None:
            first, last = map(int, wanted.removeprefix("bytes=").split("-"))
            data = data[first : last + 1]
        checksum = base64.b64encode(crc32c(data).to_bytes(4, "big")).decode()
        etag = f'"{secrets.token_hex(16)}"'
        if wanted is None:
            self.fake.objects[request.path] = data
        else:
            parts = self.fake.uploads[request.query["uploadId"]][1]
            with self.fake.lock:
                parts[int(request.query["partNumber"])] = _Part(data, etag, checksum)
        quoted = etag.replace('"', "&quot;")
        facts = f"<ETag>{quoted}</ETag><ChecksumCRC32C>{checksum}</ChecksumCRC32C>"
        return self._answer(200, f"<R>{facts}</R>")

    def _put_part(self, request: Request, data: bytes, checksum: str) -> None:
        upload = self.fake.uploads.get(request.query["uploadId"])
        if upload is None:
            return self._error(404, "NoSuchUpload")
        # The ETag is like that of an encrypted part: it doesn't follow from the bytes.
        part = _Part(data, f'"{secrets.token_hex(16)}"', checksum)
        with self.fake.lock:
            upload[1][int(request.query["partNumber"])] = part
        return self._answer(200, headers={"ETag": part.etag})

    def do_POST(self) -> None:
        request = self._noted()
        body = self._body()
        if body is None or self._refused(request):
            return
        if request.operation == "POST uploads":
            number = f"upload-{next(self._ids):04d}"
            self.fake.uploads[number] = (request.path, {})
            self._answer(200, f"<R><UploadId>{number}</UploadId></R>")
            return
        upload = self.fake.uploads.get(request.query["uploadId"])
        if upload is None:
            self._error(404, "NoSuchUpload")
            return
        text, parts = body.decode().replace("&quot;", '"'), upload[1]
        if any(part.etag not in text or part.checksum not in text for part in parts.values()):
            self._error(400, "InvalidPart")
            return
        self.fake.objects[upload[0]] = b"".join(part.data for _, part in sorted(parts.items()))
        del self.fake.uploads[request.query["uploadId"]]
        self._answer(200, "<R><ETag>&quot;whole&quot;</ETag></R>")

    def do_DELETE(self) -> None:
        request = self._noted()
        if self._refused(request):
            return
        if "uploadId" in request.query:
            self.fake.uploads.pop(request.query["uploadId"], None)
        else:
            self.fake.objects.pop(request.path, None)
        self._answer(204)

    def do_HEAD(self) -> None:
        request = self._noted()
        if not self._refused(request):
            data = self.fake.objects.get(request.path)
            self._answer(404 if data is None else 200, length=len(data or b""))

    def do_GET(self) -> None:
        request = self._noted()
        if self._refused(request):
            return
        if request.operation == "GET uploads":
            self._list_uploads(request)
        elif request.operation == "GET uploadId":
            self._list_parts(request)
        elif request.operation == "GET list-type":
            self._answer(200, "<R><IsTruncated>false</IsTruncated></R>")
        else:
            self._get(request)

    def _get(self, request: Request) -> None:
        data = self.fake.objects.get(request.path)
        if data is None:
            return self._error(404, "NoSuchKey")
        wanted = request.headers.get("range")
        if wanted is None or self.fake.ignores_ranges:
            return self._answer(200, data)
        first, last = map(int, wanted.removeprefix("bytes=").split("-"))
        if first >= len(data):
            return self._error(416, "InvalidRange")
        where = f"bytes {first}-{min(last, len(data) - 1)}/{len(data)}"
        return self._answer(206, data[first : last + 1], {"Content-Range": where})

    def _list_uploads(self, request: Request) -> None:
        bucket = request.path.split("/")[1]
        prefix = f"/{bucket}/{request.query.get('prefix', '')}"
        after = request.query.get("upload-id-marker", "")
        ids = [
            one
            for one, (path, _) in sorted(self.fake.uploads.items())
            if path.startswith(prefix) and one > after
        ]
        listed = "".join(
            f"<Upload><Key>{self.fake.uploads[one][0].removeprefix(f'/{bucket}/')}</Key><UploadId>{one}</UploadId>"
            f"<Initiated>2026-01-01T00:{int(one[-4:]) % 60:02d}:00.000Z</Initiated></Upload>"
            for one in ids[:_PAGE]
        )
        more = (
            "<NextKeyMarker>x</NextKeyMarker>"
            f"<NextUploadIdMarker>{''.join(ids[_PAGE - 1 : _PAGE])}</NextUploadIdMarker>"
        )
        self._page(listed, more if len(ids) > _PAGE else "")

    def _list_parts(self, request: Request) -> None:
        upload = self.fake.uploads.get(request.query["uploadId"])
        if upload is None:
            return self._error(404, "NoSuchUpload")
        after = int(request.query.get("part-number-marker", "0"))
        numbers = sorted(number for number in upload[1] if number > after)
        listed = "".join(
            f"<Part><PartNumber>{number}</PartNumber><ETag>{part.etag}</ETag><Size>{len(part.data)}</Size>"
            f"<ChecksumCRC32C>{part.checksum}</ChecksumCRC32C></Part>"
            for number in numbers[:_PAGE]
            for part in [upload[1][number]]
        )
        more = (
            f"<NextPartNumberMarker>{numbers[_PAGE - 1]}</NextPartNumberMarker>"
            if len(numbers) > _PAGE
            else ""
        )
        return self._page(listed, more)

    def _page(self, listed: str, more: str) -> None:
        self._answer(
            200, f"<R><IsTruncated>{'true' if more else 'false'}</IsTruncated>{more}{listed}</R>"
        )

    def _noted(self) -> Request:
        parsed = urlsplit(self.path)
        query = {
            name: values[0]
            for name, values in parse_qs(parsed.query, keep_blank_values=True).items()
        }
        headers = {name.lower(): value for name, value in self.headers.items()}
        request = Request(self.command, unquote(parsed.path), query, headers)
        self.fake.requests.append(request)
        return request

    def _refused(self, request: Request) -> bool:
        for one in self.fake.refuse:
            if one[0] == request.operation:
                self.fake.refuse.remove(one)
                self._error(one[1], one[2])
                return True
        return self._redirected()

    def _redirected(self) -> bool:
        region = self.fake.redirects_to
        if not region or f"/{region}/s3/" in self.headers.get("Authorization", ""):
            return False
        self._error(301, "PermanentRedirect", {"x-amz-bucket-region": region})
        self.close_connection = True
        return True

    def _body(self) -> bytes | None:
        """The body, or None where the client hung up."""
        left, pieces = int(self.headers.get("Content-Length", "0")), []
        while left:
            piece = self.rfile.read(min(left, 1 << 20))
            if not piece:
                return None
            time.sleep(self.fake.seconds_per_mib * len(piece) / (1 << 20))
            pieces.append(piece)
            left -= len(piece)
        return b"".join(pieces)

    def _error(self, status: int, code: str, headers: Mapping[str, str] | None = None) -> None:
        text = (
            ""
            if self.command == "HEAD"
            else f"<Error><Code>{code}</Code><Message>of {code}</Message></Error>"
        )
        self._answer(status, text, headers)

    def _answer(
        self,
        status: int,
        body: str | bytes = b"",
        headers: Mapping[str, str] | None = None,
        length: int = -1,
    ) -> None:
        data = body.encode() if isinstance(body, str) else body
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(length if length >= 0 else len(data)))
        self.end_headers()
        if 0 <= self.fake.cut < len(data):
            data, self.close_connection = data[: self.fake.cut], True
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        return
