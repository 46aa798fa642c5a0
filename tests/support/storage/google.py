"""Google Cloud Storage for the tests: Google's dialect, strictly, in front of moto's S3.

python google.py PORT TOKEN

It is stricter than Google: it refuses a request with a header of Amazon's, with bytes and without
their checksum, or with another bearer token than the one that it gave out. For gcsfs it answers
what a reader asks its JSON API for.
"""

import base64
import io
import itertools
import json
import re
import sys
import threading
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlencode

from crc32c import crc32c
from moto.moto_server.werkzeug_app import (
    DomainDispatcherApplication,
    MotoRequestHandler,
    create_backend_app,
)
from werkzeug.serving import run_simple
from werkzeug.test import Client, run_wsgi_app

_SIGNED = {
    "Authorization": "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request, "
    "SignedHeaders=host, Signature=0"
}
Answer = tuple[int, list[tuple[str, str]], bytes]
_JSON = re.compile(r"(?:/download)?/storage/v1/b/(?P<bucket>[^/]+)/o(?:/(?P<key>.+))?$")
_JSON_UPLOAD = re.compile(r"/upload/storage/v1/b/(?P<bucket>[^/]+)/o$")
_JSON_PLACE = re.compile(r"/storage/v1/b/(?P<bucket>[^/]+)(?:/o/(?P<key>.+))?$")
_COPY = {
    "HTTP_X_GOOG_COPY_SOURCE": "HTTP_X_AMZ_COPY_SOURCE",
    "HTTP_X_GOOG_COPY_SOURCE_IF_MATCH": "HTTP_X_AMZ_COPY_SOURCE_IF_MATCH",
}


class Google:
    """A WSGI application. Generations are its own; objects and uploads are moto's."""

    def __init__(self, s3: Callable[..., Any], token: str) -> None:
        self._application, self._s3, self._token = s3, Client(s3), token
        self._numbers = itertools.count(1_700_000_000_000_001)
        self._generations: dict[str, int] = {}
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        environ["wsgi.input"] = io.BytesIO(
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        )
        status, headers, body = self._answered(environ)
        is_head = environ["REQUEST_METHOD"] == "HEAD"
        start(f"{status} -", headers)
        return [b"" if is_head else body]

    def _answered(self, environ: dict[str, Any]) -> Answer:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        query = parse_qs(environ["QUERY_STRING"], keep_blank_values=True)
        if path == "/token":
            return _json({"access_token": self._token, "expires_in": 3600, "token_type": "Bearer"})
        if environ.get("HTTP_AUTHORIZATION") != f"Bearer {self._token}":
            return _error(401, "AuthenticationRequired")
        environ["HTTP_AUTHORIZATION"] = _SIGNED["Authorization"]
        if any(name.startswith(("HTTP_X_AMZ_", "HTTP_AMZ_")) for name in environ):
            return _error(400, "ExcessHeaderValues")
        uri = environ["RAW_URI"].partition("?")[0]
        if method == "POST" and (found := _JSON_UPLOAD.match(uri)):
            return self._uploaded(environ, unquote(found["bucket"]))
        if (method, uri) == ("POST", "/storage/v1/b"):
            bucket = json.loads(environ["wsgi.input"].getvalue())["name"]
            self._s3.put(f"/{bucket}", headers=_SIGNED)
            return _json({"kind": "storage#bucket", "name": bucket})
        if method == "DELETE" and (found := _JSON_PLACE.match(uri)):
            place = "/" + unquote("/".join(filter(None, found.groups())))
            self._generations.pop(place, None)
            return self._s3.delete(quote(place), headers=_SIGNED).status_code, [], b""
        if found := _JSON.match(uri):
            return self._read(environ, unquote(found["bucket"]), unquote(found["key"] or ""), query)
        is_object = path.count("/") > 1
        is_copy = "HTTP_X_GOOG_COPY_SOURCE" in environ
        if method == "PUT" and is_object and not is_copy:
            data = environ["wsgi.input"].getvalue()
            given = environ.get("HTTP_X_GOOG_HASH", "no checksum")
            if given != f"crc32c={base64.b64encode(crc32c(data).to_bytes(4, 'big')).decode()}":
                return _error(400, "BadDigest")
        if is_copy and "partNumber" in query:
            return _error(400, "InvalidArgument")
        changes = is_object and method in ("PUT", "DELETE") and "uploadId" not in query
        ends = method == "POST" and "uploadId" in query
        if not (changes or ends):
            return self._forwarded(environ)
        with self._locks[path]:
            expected = environ.get("HTTP_X_GOOG_IF_GENERATION_MATCH")
            if expected is not None and int(expected) != self._generations.get(path, 0):
                return _error(412, "PreconditionFailed")
            status, headers, body = self._forwarded(environ)
            if method == "DELETE":
                self._generations.pop(path, None)
            elif status == 200 and b"<Error>" not in body:
                self._generations[path] = next(self._numbers)
            return status, [*headers, *self._generation(path)], body

    def _forwarded(self, environ: dict[str, Any]) -> Answer:
        for theirs, ours in _COPY.items():
            if theirs in environ:
                environ[ours] = environ.pop(theirs)
        source = environ.get("HTTP_X_AMZ_COPY_SOURCE")
        expected = environ.pop("HTTP_X_AMZ_COPY_SOURCE_IF_MATCH", None)
        if source and expected and self._etag(source) not in (expected, ""):
            return _error(412, "PreconditionFailed")
        body, status, answered = run_wsgi_app(self._application, environ, buffered=True)
        headers = [
            (name, value)
            for name, value in answered
            if not name.lower().startswith(("x-amz", "transfer-encoding", "connection"))
        ]
        if environ["REQUEST_METHOD"] in ("GET", "HEAD"):
            headers += self._generation(environ["PATH_INFO"])
        return int(status.split()[0]), headers, b"".join(body)

    def _etag(self, source: str) -> str:
        """The ETag of what is to be copied; "" where it is gone."""
        return str(self._s3.head(f"/{source.lstrip('/')}", headers=_SIGNED).headers.get("ETag", ""))

    def _generation(self, path: str) -> list[tuple[str, str]]:
        found = self._generations.get(path)
        return [("x-goog-generation", str(found))] if found else []

    def _uploaded(self, environ: dict[str, Any], bucket: str) -> Answer:
        """Put what gcsfs sends with one request: a description, and the bytes."""
        boundary = environ["CONTENT_TYPE"].partition("boundary=")[2].strip("'\"").encode()
        _, described, sent, _ = environ["wsgi.input"].getvalue().split(b"--" + boundary)
        key = json.loads(described.partition(b"\n\n")[2])["name"]
        data = sent.partition(b"\n\n")[2].removesuffix(b"\n")
        path = f"/{bucket}/{key}"
        with self._locks[path]:
            self._s3.put(quote(path), data=data, headers=_SIGNED)
            self._generations[path] = next(self._numbers)
        return _json(_item(bucket, key, len(data)))

    def _read(
        self, environ: dict[str, Any], bucket: str, key: str, query: dict[str, list[str]]
    ) -> Answer:
        """What gcsfs asks the JSON API for."""
        if key:
            path = f"/{bucket}/{quote(key)}"
            if query.get("alt") == ["media"] or environ["RAW_URI"].startswith("/download"):
                range_ = environ.get("HTTP_RANGE")
                answer = self._s3.get(
                    path, headers={**_SIGNED, **({"Range": range_} if range_ else {})}
                )
                return answer.status_code, [("Content-Type", "x/y")], answer.data
            head = self._s3.head(path, headers=_SIGNED)
            if head.status_code != 200:
                return _json({"error": {"code": 404, "message": "Not Found"}}, 404)
            return _json(_item(bucket, key, int(head.headers["Content-Length"])))
        asked = {"list-type": "2", "prefix": query.get("prefix", [""])[0]}
        if "delimiter" in query:
            asked["delimiter"] = query["delimiter"][0]
        listed = ET.fromstring(self._s3.get(f"/{bucket}?{urlencode(asked)}", headers=_SIGNED).data)
        space = {"s3": "http://s3.amazonaws.com/doc/2006-03-01/"}
        items = [
            _item(bucket, _text(one, "Key"), int(_text(one, "Size")))
            for one in listed.findall("s3:Contents", space)
        ]
        below = [_text(one, "Prefix") for one in listed.findall("s3:CommonPrefixes", space)]
        return _json({"kind": "storage#objects", "items": items, "prefixes": below})


def _text(one: ET.Element, name: str) -> str:
    return one.findtext(f"{{http://s3.amazonaws.com/doc/2006-03-01/}}{name}") or ""


def _item(bucket: str, key: str, nbytes: int) -> dict[str, str]:
    time = "2026-01-01T00:00:00.000Z"
    named = {"bucket": bucket, "name": key, "size": str(nbytes), "id": f"{bucket}/{key}/1"}
    return named | {"timeCreated": time, "updated": time, "generation": "1"}


def _json(value: object, status: int = 200) -> Answer:
    return status, [("Content-Type", "application/json")], json.dumps(value).encode()


def _error(status: int, code: str) -> Answer:
    body = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>{code}</Message></Error>'
    return status, [("Content-Type", "application/xml")], body.encode()


class _KeepAlive(MotoRequestHandler):
    protocol_version = "HTTP/1.1"


if __name__ == "__main__":
    google = Google(DomainDispatcherApplication(create_backend_app), sys.argv[2])
    run_simple("127.0.0.1", int(sys.argv[1]), google, threaded=True, request_handler=_KeepAlive)
