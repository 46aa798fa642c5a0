"""Azure's answers without Azure: a server that answers as told, and a hierarchical account.

What such an account sends was taken from the service's documentation and from answers that others
recorded of it: real directories, made by writing under them, that stay when they are empty; a
directory is a BlobPrefix with properties, a zero-length blob with `hdi_isfolder` to HEAD; Delete
Blob refuses one that isn't empty, and any with its snapshots.
"""

import base64
import itertools
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

_ACCOUNT, _KEY = "recorded", base64.b64encode(b"nobody's key").decode()
CONTAINER = "checkpoints"


@dataclass(frozen=True, slots=True)
class Asked:
    """A request. path: decoded, without the account; headers: names in lower case."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Answer:
    """announced: a Content-Length that isn't the body's; unless to HEAD, the connection is cut."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    announced: int | None = None


@dataclass(frozen=True, slots=True)
class Endpoint:
    """asked: all requests so far."""

    url: str
    asked: list[Asked]

    @property
    def storage_options(self) -> dict[str, Any]:
        parts = (
            "DefaultEndpointsProtocol=http",
            f"AccountName={_ACCOUNT}",
            f"AccountKey={_KEY}",
            f"BlobEndpoint={self.url}",
        )
        return {"connection_string": ";".join(parts)}


@contextmanager
def answering(answer: Callable[[Asked], Answer], *, pause: float = 0.0) -> Iterator[Endpoint]:
    """A server that answers each request so.

    pause: seconds that it takes for each MiB of a body.
    """
    asked: list[Asked] = []
    stop = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            length, pieces = int(self.headers.get("Content-Length", 0)), []
            while length:
                pieces.append(self.rfile.read(min(length, 1 << 20)))
                length -= len(pieces[-1])
                stop.wait(pause)
            url = urlsplit(self.path)
            path = unquote(url.path).removeprefix(f"/{_ACCOUNT}/")
            query = {name: values[0] for name, values in parse_qs(url.query).items()}
            headers = {name.lower(): value for name, value in self.headers.items()}
            asked.append(Asked(self.command, path, query, headers, b"".join(pieces)))
            given = answer(asked[-1])
            self.send_response(given.status)
            self.send_header(
                "Content-Length",
                str(len(given.body) if given.announced is None else given.announced),
            )
            for name, value in given.headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(given.body)
            is_cut = given.announced is not None and self.command != "HEAD"
            self.close_connection = self.close_connection or is_cut

        do_GET = do_PUT = do_HEAD = do_DELETE = _answer  # noqa: N815

        def log_message(self, *_: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads, server.block_on_close = True, False
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield Endpoint(f"http://127.0.0.1:{server.server_port}/{_ACCOUNT}", asked)
    finally:
        stop.set()
        server.shutdown()
        thread.join()
        server.server_close()


def refusal(status: int, code: str, message: str = "", detail: str = "") -> Answer:
    """How Azure says no."""
    more = f"<AuthenticationErrorDetail>{detail}</AuthenticationErrorDetail>" if detail else ""
    body = (
        f'<?xml version="1.0" encoding="utf-8"?><Error><Code>{code}</Code>'
        f"<Message>{message or code}</Message>{more}</Error>"
    )
    return Answer(
        status, body.encode(), {"x-ms-error-code": code, "Content-Type": "application/xml"}
    )


class HierarchicalAccount:
    """One container of an account with a hierarchical namespace, as its blob endpoint shows it."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.directories: set[str] = set()
        self._staged: dict[str, dict[str, bytes]] = {}
        self._committed: dict[str, dict[str, bytes]] = {}
        self._tags: dict[str, str] = {}
        self._times: dict[str, str] = {}
        self._count = itertools.count(1)
        self._lock = threading.Lock()

    def __call__(self, asked: Asked) -> Answer:
        container, _, path = asked.path.partition("/")
        with self._lock:
            if container != CONTAINER:
                return refusal(404, "ContainerNotFound")
            if asked.query.get("comp") == "list":
                return self._list(asked.query)
            return getattr(self, f"_{asked.method.lower()}")(path, asked)  # type: ignore[no-any-return]

    def _put(self, path: str, asked: Asked) -> Answer:
        if asked.query.get("comp") == "block":
            self._staged.setdefault(path, {})[asked.query["blockid"]] = asked.body
            return Answer(201)
        if "x-ms-copy-source" in asked.headers:
            return self._copy(path, asked)
        blocks = {**self._committed.get(path, {}), **self._staged.get(path, {})}
        if path in self.directories:
            return refusal(
                409, "ResourceTypeMismatch", "The resource type is not what the request expects."
            )
        if asked.headers.get("if-none-match") == "*" and path in self.files:
            return refusal(409, "BlobAlreadyExists", "The specified blob already exists.")
        if asked.headers.get("if-match", self._tags.get(path)) != self._tags.get(path):
            return refusal(412, "ConditionNotMet")
        chosen: dict[str, bytes] = {}
        if asked.query.get("comp") == "blocklist":
            names = re.findall("<Latest>([^<]*)</Latest>", asked.body.decode())
            if not blocks.keys() >= set(names):
                return refusal(400, "InvalidBlockList", "The specified block list is invalid.")
            chosen = {name: blocks[name] for name in names}
        self.files[path] = b"".join(chosen.values()) if "comp" in asked.query else asked.body
        self._committed[path] = chosen
        self._staged.pop(path, None)
        self.directories.update(
            "/".join(path.split("/")[:depth]) for depth in range(1, path.count("/") + 1)
        )
        for name in (path, *self.directories):
            self._tags[name] = f'"0x8DD{next(self._count):012X}"'
            self._times.setdefault(name, formatdate(usegmt=True))
        self._times[path] = formatdate(usegmt=True)
        return Answer(201, headers={"ETag": self._tags[path]})

    def _source_of(self, asked: Asked) -> str | Answer:
        """Return the path of the blob that is to be copied, or why it isn't."""
        given = urlsplit(asked.headers["x-ms-copy-source"])
        source = unquote(given.path).removeprefix(f"/{_ACCOUNT}/{CONTAINER}/")
        if source not in self.files:
            return refusal(404, "BlobNotFound")
        if "sig=" not in given.query:
            return refusal(403, "CannotVerifyCopySource")
        if asked.headers.get("x-ms-source-if-match", self._tags[source]) != self._tags[source]:
            return refusal(412, "SourceConditionNotMet")
        return source

    def _copy(self, path: str, asked: Asked) -> Answer:
        source = self._source_of(asked)
        if isinstance(source, Answer):
            return source
        made = self._put(path, replace(asked, headers={}, query={}, body=self.files[source]))
        return Answer(202, headers={**made.headers, "x-ms-copy-status": "success"})

    def _get(self, path: str, asked: Asked) -> Answer:
        if asked.query.get("comp") == "blocklist":
            return self._block_list(path)
        if path not in self.files:
            return refusal(404, "BlobNotFound", "The specified blob does not exist.")
        data, wanted = (
            self.files[path],
            asked.headers.get("x-ms-range") or asked.headers.get("range"),
        )
        if wanted is None:
            return Answer(200, data, {"ETag": self._tags[path]})
        first, last = map(int, wanted.removeprefix("bytes=").split("-"))
        if first >= len(data):
            return refusal(416, "InvalidRange")
        piece = data[first : last + 1]
        served = f"bytes {first}-{first + len(piece) - 1}/{len(data)}"
        return Answer(206, piece, {"Content-Range": served, "ETag": self._tags[path]})

    def _block_list(self, path: str) -> Answer:
        if path not in self.files and path not in self._staged:
            return refusal(404, "BlobNotFound", "The specified blob does not exist.")
        kinds = {
            "CommittedBlocks": self._committed.get(path, {}),
            "UncommittedBlocks": self._staged.get(path, {}),
        }
        lists = "".join(
            f"<{kind}>"
            + "".join(
                f"<Block><Name>{name}</Name><Size>{len(data)}</Size></Block>"
                for name, data in blocks.items()
            )
            + f"</{kind}>"
            for kind, blocks in kinds.items()
        )
        return _xml(f"<BlockList>{lists}</BlockList>")

    def _head(self, path: str, _: Asked) -> Answer:
        if path not in self.directories and path not in self.files:
            return Answer(404, headers={"x-ms-error-code": "BlobNotFound"})
        kind = {"x-ms-meta-hdi_isfolder": "true"} if path in self.directories else {}
        return Answer(
            200,
            headers={"ETag": self._tags[path], "x-ms-blob-type": "BlockBlob", **kind},
            announced=len(self.files.get(path, b"")) or None,
        )

    def _delete(self, path: str, asked: Asked) -> Answer:
        if asked.headers.get("if-match", self._tags.get(path)) != self._tags.get(path):
            return refusal(412, "ConditionNotMet")
        if path in self.directories:
            if "x-ms-delete-snapshots" in asked.headers:
                return refusal(
                    400,
                    "OperationNotSupportedOnDirectory",
                    "The requested operation is not supported on a directory.",
                )
            if any(name.startswith(f"{path}/") for name in (*self.files, *self.directories)):
                return refusal(
                    409,
                    "DirectoryIsNotEmpty",
                    "This operation is not permitted on a non-empty directory.",
                )
            self.directories.remove(path)
            return Answer(202)
        self._committed.pop(path, None)
        return (
            Answer(202) if self.files.pop(path, None) is not None else refusal(404, "BlobNotFound")
        )

    def _list(self, query: Mapping[str, str]) -> Answer:
        prefix, listed = query.get("prefix", ""), []
        uncommitted = (
            set(self._staged) - set(self.files)
            if "uncommittedblobs" in query.get("include", "")
            else set()
        )
        for name in sorted({*self.files, *self.directories, *uncommitted}):
            if not name.startswith(prefix) or ("delimiter" in query and "/" in name[len(prefix) :]):
                continue
            kind = "directory" if name in self.directories else "file"
            times = (
                ""
                if name in uncommitted
                else f"<Last-Modified>{self._times[name]}</Last-Modified><Etag>0x8DD</Etag>"
            )
            facts = (
                f"<Content-Length>{len(self.files.get(name, b''))}</Content-Length>"
                "<BlobType>BlockBlob</BlobType>"
            )
            properties = (
                f"<Properties>{times}<ResourceType>{kind}</ResourceType>{facts}</Properties>"
            )
            if kind == "directory" and "delimiter" in query:
                listed.append(f"<BlobPrefix><Name>{escape(name)}/</Name>{properties}</BlobPrefix>")
            else:
                marker = (
                    "<Metadata><hdi_isfolder>true</hdi_isfolder></Metadata>"
                    if kind == "directory"
                    else ""
                )
                listed.append(f"<Blob><Name>{escape(name)}</Name>{properties}{marker}</Blob>")
        delimiter = "<Delimiter>/</Delimiter>" if "delimiter" in query else ""
        return _xml(
            f'<EnumerationResults ServiceEndpoint="https://recorded/" ContainerName="{CONTAINER}">'
            f"<Prefix>{escape(prefix)}</Prefix>{delimiter}<Blobs>{''.join(listed)}</Blobs><NextMarker/></EnumerationResults>"
        )


def _xml(text: str) -> Answer:
    body = f'<?xml version="1.0" encoding="utf-8"?>{text}'.encode()
    return Answer(200, body, {"Content-Type": "application/xml"})
