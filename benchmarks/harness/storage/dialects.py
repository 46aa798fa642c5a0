"""As much S3 and Azure Blob as the clients here need of a server."""

from __future__ import annotations

import html
import re
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, unquote, urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

AZURE_ACCOUNT = "devstoreaccount1"
KEPT_BYTES = 1 << 20
"""Objects up to this size are kept: metadata and manifests are read again."""
S3_NAMESPACE = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
MODIFIED = "Fri, 01 Nov 2024 00:00:00 GMT"
MODIFIED_ISO = "2024-11-01T00:00:00.000Z"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request.

    Attributes:
        headers: By lower-case name.
        nbytes: Length of the body.
        body: Empty where it was dropped.
    """

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    nbytes: int
    body: bytes

    @property
    def is_azure(self) -> bool:
        return self.path.startswith(f"/{AZURE_ACCOUNT}")

    @property
    def name(self) -> str:
        """Bucket and key, without the account."""
        return self.path.removeprefix(f"/{AZURE_ACCOUNT}").strip("/")


@dataclass(frozen=True, slots=True)
class Stored:
    """An object; body is None where only its size is known."""

    nbytes: int
    body: bytes | None


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer.

    Attributes:
        served: An object of which `nbytes` from `start` on are the body; a HEAD gets none.
    """

    status: str
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()
    served: Stored | None = None
    start: int = 0
    nbytes: int = 0


@dataclass(slots=True)
class Store:
    """What the server remembers: names and sizes, and small bodies."""

    objects: dict[str, Stored] = field(default_factory=dict)
    parts: dict[str, dict[str, int]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, request: Request) -> Answer:
        with self.lock:
            return self._azure(request) if request.is_azure else self._s3(request)

    def _s3(self, request: Request) -> Answer:
        name, query = request.name, request.query
        is_bucket = "/" not in name
        upload = query.get("uploadId")
        match request.method:
            case "PUT" if upload:
                self.parts.setdefault(upload, {})[query["partNumber"]] = request.nbytes
                return Answer("200 OK")
            case "PUT" if source := request.headers.get("x-amz-copy-source"):
                self.objects[name] = self.objects[unquote(source).strip("/")]
                return _xml(f'<CopyObjectResult {S3_NAMESPACE}><ETag>"0"</ETag></CopyObjectResult>')
            case "PUT":
                return (
                    Answer("200 OK")
                    if is_bucket
                    else self._put(request, "200 OK", "412 Precondition Failed")
                )
            case "POST" if "uploads" in query:
                key = html.escape(name.partition("/")[2])
                return _xml(
                    _s3_result(
                        "InitiateMultipartUpload",
                        f"<Key>{key}</Key><UploadId>{_id(name)}</UploadId>",
                    )
                )
            case "POST" if upload:
                self.objects[name] = Stored(sum(self.parts.pop(upload, {}).values()), None)
                return _xml(_s3_result("CompleteMultipartUpload", '<Key>k</Key><ETag>"0-1"</ETag>'))
            case "POST":
                for key in re.findall(r"<Key>(.*?)</Key>", request.body.decode()):
                    self.objects.pop(f"{name}/{html.unescape(key)}", None)
                return _xml(f"<DeleteResult {S3_NAMESPACE}></DeleteResult>")
            case "DELETE":
                if not upload:
                    self.objects.pop(name, None)
                return Answer("204 No Content")
            case _ if is_bucket:
                return _xml(self._s3_listing(name, query))
        return self._get(request, _s3_error("NoSuchKey"))

    def _azure(self, request: Request) -> Answer:
        name, query = request.name, request.query
        if query.get("restype") == "container":
            if query.get("comp") == "list":
                return _xml(self._azure_listing(name, query))
            return Answer("201 Created" if request.method == "PUT" else "200 OK")
        match request.method, query.get("comp"):
            case "PUT", "block":
                self.parts.setdefault(name, {})[query["blockid"]] = request.nbytes
                return Answer("201 Created")
            case "PUT", "blocklist":
                self.objects[name] = Stored(sum(self.parts.pop(name, {}).values()), None)
                return Answer("201 Created")
            case "PUT", None if source := request.headers.get("x-ms-copy-source"):
                self.objects[name] = self.objects[
                    unquote(urlsplit(source).path).removeprefix(f"/{AZURE_ACCOUNT}/")
                ]
                return Answer(
                    "202 Accepted", headers=(("x-ms-copy-id", "0"), ("x-ms-copy-status", "success"))
                )
            case "PUT", None:
                return self._put(request, "201 Created", "409 Conflict")
            case "GET", "blocklist":  # no blocks: every run has to send all of them
                return Answer("404 Not Found", headers=(("x-ms-error-code", "BlobNotFound"),))
            case "DELETE", _:
                return Answer("202 Accepted" if self.objects.pop(name, None) else "404 Not Found")
        return self._get(
            request, Answer("404 Not Found", headers=(("x-ms-error-code", "BlobNotFound"),))
        )

    def _put(self, request: Request, done: str, there: str) -> Answer:
        if request.headers.get("if-none-match") == "*" and request.name in self.objects:
            return Answer(there, headers=(("x-ms-error-code", "BlobAlreadyExists"),))
        self.objects[request.name] = Stored(
            request.nbytes, request.body if request.nbytes <= KEPT_BYTES else None
        )
        return Answer(done)

    def _get(self, request: Request, missing: Answer) -> Answer:
        found = self.objects.get(request.name)
        if found is None:
            return missing
        types = (
            ("Content-Type", "application/octet-stream"),
            ("x-ms-blob-type", "BlockBlob"),
            ("Accept-Ranges", "bytes"),
        )
        asked = request.headers.get("x-ms-range") or request.headers.get("range")
        if asked is None:
            return Answer("200 OK", headers=types, served=found, nbytes=found.nbytes)
        first, _, last = asked.removeprefix("bytes=").partition("-")
        start = int(first) if first else max(0, found.nbytes - int(last))
        stop = min(int(last) + 1 if first and last else found.nbytes, found.nbytes)
        if start >= stop:
            return Answer(
                "416 Range Not Satisfiable", headers=(("x-ms-error-code", "InvalidRange"),)
            )
        span = ("Content-Range", f"bytes {start}-{stop - 1}/{found.nbytes}")
        return Answer(
            "206 Partial Content",
            headers=(*types, span),
            served=found,
            start=start,
            nbytes=stop - start,
        )

    def _s3_listing(self, bucket: str, query: Mapping[str, str]) -> str:
        keys, below = self._listed(bucket, query)
        found = "".join(
            f'<Contents><Key>{html.escape(key)}</Key><Size>{size}</Size><ETag>"0"</ETag>'
            f"<LastModified>{MODIFIED_ISO}</LastModified></Contents>"
            for key, size in keys
        )
        found += "".join(
            f"<CommonPrefixes><Prefix>{html.escape(one)}</Prefix></CommonPrefixes>" for one in below
        )
        count = f"<KeyCount>{len(keys) + len(below)}</KeyCount><IsTruncated>false</IsTruncated>"
        listed = f"<Name>{bucket}</Name>{count}{found}"
        return f"<ListBucketResult {S3_NAMESPACE}>{listed}</ListBucketResult>"

    def _azure_listing(self, container: str, query: Mapping[str, str]) -> str:
        keys, below = self._listed(container, query)
        found = "".join(
            f"<Blob><Name>{html.escape(key)}</Name><Properties><Last-Modified>{MODIFIED}</Last-Modified><Etag>0</Etag>"
            f"<Content-Length>{size}</Content-Length><BlobType>BlockBlob</BlobType></Properties></Blob>"
            for key, size in keys
        )
        found += "".join(
            f"<BlobPrefix><Name>{html.escape(one)}</Name></BlobPrefix>" for one in below
        )
        name = f'ContainerName="{container}"'
        return (
            f"<EnumerationResults {name}><Blobs>{found}</Blobs><NextMarker/></EnumerationResults>"
        )

    def _listed(
        self, bucket: str, query: Mapping[str, str]
    ) -> tuple[list[tuple[str, int]], list[str]]:
        """Return keys with sizes, and common prefixes, as prefix and delimiter ask for."""
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        keys, below = [], set()
        for key, nbytes in self._sizes(bucket):
            head, found, _ = (
                key.removeprefix(prefix).partition(delimiter) if delimiter else (key, "", "")
            )
            if not key.startswith(prefix):
                continue
            if found:
                below.add(f"{prefix}{head}{delimiter}")
            else:
                keys.append((key, nbytes))
        return keys, sorted(below)

    def _sizes(self, bucket: str) -> Iterator[tuple[str, int]]:
        for name, stored in sorted(self.objects.items()):
            owner, _, key = name.partition("/")
            if owner == bucket:
                yield key, stored.nbytes


def parsed(head: str, nbytes: int, body: bytes) -> Request:
    """Return a request from its head and its body."""
    line, *lines = head.split("\r\n")
    method, url, _ = line.split(" ", 2)
    parts = urlsplit(url)
    query = {
        name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()
    }
    return Request(
        method=method,
        path=unquote(parts.path),
        query=query,
        headers=headers(lines),
        nbytes=nbytes,
        body=body,
    )


def headers(lines: list[str]) -> dict[str, str]:
    pairs = (line.partition(":") for line in lines)
    return {name.strip().lower(): value.strip() for name, _, value in pairs}


def _id(name: str) -> str:
    """Return the upload id of an object, which has one upload at a time."""
    return re.sub(r"[^A-Za-z0-9]", "-", name)


def _xml(text: str) -> Answer:
    body = f'<?xml version="1.0" encoding="UTF-8"?>\n{text}'.encode()
    return Answer("200 OK", body, (("Content-Type", "application/xml"),))


def _s3_result(what: str, inner: str) -> str:
    return f"<{what}Result {S3_NAMESPACE}><Bucket>b</Bucket>{inner}</{what}Result>"


def _s3_error(code: str) -> Answer:
    body = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
    return Answer("404 Not Found", body, (("Content-Type", "application/xml"),))
