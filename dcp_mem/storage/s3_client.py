"""A synchronous S3 client that goes where s3fs would go, and sends memory without copying it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import botocore.session
from botocore import UNSIGNED
from botocore.config import Config

from dcp_mem.common.releases import warn_if_untested
from dcp_mem.storage import Copies, NotThisRoute
from dcp_mem.storage.file_system import refuse_missing_authorities, trusted_authorities
from dcp_mem.storage.streams import Body

_PIECE = 2 << 20
_SESSION_ARGUMENTS = {"profile"}
CONFIG = {
    "connect_timeout": 10,
    "read_timeout": 60,
    "max_pool_connections": 64,
    "tcp_keepalive": True,
    # Every byte read is compared with the segments' checksums; the SDK's own would be a second
    # pass, and a copy.
    "response_checksum_validation": "when_required",
}


class S3Client:
    """Requests to one bucket, each sent once (`retry` repeats them), by any number of threads.

    `extra`: arguments that go along with every request that takes them. `sends_checksums`: False
    where the user's configuration is for a storage that takes none.
    """

    copies = Copies.PARTS

    def __init__(self, client: Any, extra: Mapping[str, Any], bucket: str) -> None:
        self._extra = dict(extra)
        self.bucket = bucket
        self.sends_checksums = client.meta.config.request_checksum_calculation != "when_required"
        if self.sends_checksums:  # another one would have to be computed as well
            self._extra = {
                name: value
                for name, value in self._extra.items()
                if not name.startswith("Checksum")
            }
        self._client = client
        self._direct = _Direct()
        for operation in ("PutObject", "UploadPart"):
            client.meta.events.register(f"before-send.s3.{operation}", self._direct.take_over)
        weakref.finalize(self, client.close)

    def algorithm(self) -> dict[str, str]:
        """Return the arguments by which a request asks for checksums."""
        return {"ChecksumAlgorithm": "CRC32C"} if self.sends_checksums else {}

    def identity(self, answer: Mapping[str, Any]) -> str:
        """Return what a condition names an object by, which was read."""
        return str(answer["ETag"])

    def call(self, method: str, **arguments: Any) -> Any:
        """Return the answer to a request. Bodies are given as `Body`."""
        answer = getattr(self._client, method)(**self._arguments(method, arguments))
        self._direct.is_answered = True
        return answer

    def pages(self, method: str, **arguments: Any) -> Iterator[Any]:
        """Yield the answers to a request for a list, page by page."""
        yield from self._client.get_paginator(method).paginate(**self._arguments(method, arguments))
        self._direct.is_answered = True

    def _arguments(self, method: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        operation = self._client.meta.service_model.operation_model(
            self._client.meta.method_to_api_mapping[method]
        )
        known = operation.input_shape.members
        extra = {name: value for name, value in self._extra.items() if name in known}
        return {**extra, **arguments, "Bucket": self.bucket}


def by_s3fs(fs: Any, bucket: str) -> S3Client:
    """Return a client with the endpoint, credentials and options of an s3fs file system.

    What the environment and its files say is read once, here; botocore fetches credentials again
    that expire. Raises NotThisRoute, Exception.
    """
    import s3fs  # gs:// does without

    warn_if_untested("s3fs")
    if not isinstance(fs, s3fs.S3FileSystem):
        raise NotThisRoute(f"{type(fs).__name__} isn't s3fs's file system")
    try:
        return S3Client(_client(fs), {**fs.s3_additional_kwargs, **fs.req_kw}, bucket)
    except AttributeError as error:
        raise NotThisRoute(f"this version of s3fs is unknown here ({error})") from None


class _Direct:
    """Sends bodies straight from memory, once the bucket has given any answer.

    Until then botocore sends them, and waits for the storage's go-ahead (`Expect: 100-continue`): a
    bucket in another region redirects that request before it has the body, and botocore rewinds and
    follows. Later that wait would be a round trip for each part, and a second for each where a
    storage never gives the go-ahead.

    Bodies are sent in pieces because a socket's timeout is that of a whole `sendall`. On a new
    connection urllib3's timeout is that for connecting: a part that a slow network takes longer for
    would never get through.
    """

    def __init__(self) -> None:
        self.is_answered = False

    def take_over(self, request: Any, **_: Any) -> None:
        if self.is_answered and isinstance(request.body, Body):
            view = request.body.view
            request.body = [view[start : start + _PIECE] for start in range(0, len(view), _PIECE)]
            del request.headers["Expect"]  # no signature covers it


def _client(fs: Any) -> Any:
    if fs.session is not None:
        raise NotThisRoute("a session= of aiobotocore's works only there")
    if not fs.kwargs.keys() <= _SESSION_ARGUMENTS:
        raise NotThisRoute(
            f"only s3fs knows {', '.join(sorted(fs.kwargs.keys() - _SESSION_ARGUMENTS))}"
        )
    arguments = {
        "aws_access_key_id": fs.key,
        "aws_secret_access_key": fs.secret,
        "aws_session_token": fs.token,
        "endpoint_url": fs.endpoint_url,
    }
    arguments = {name: value for name, value in arguments.items() if value is not None}
    arguments = {"use_ssl": fs.use_ssl, **fs.client_kwargs, **arguments}
    if fs.anon:
        arguments = {
            name: value for name, value in arguments.items() if not name.startswith("aws_")
        }
    session = botocore.session.Session(**fs.kwargs)
    if arguments.get("verify") is None:
        arguments["verify"] = session.get_config_variable("ca_bundle")
    if arguments["verify"] is None:
        arguments["verify"] = trusted_authorities("REQUESTS_CA_BUNDLE")
    refuse_missing_authorities(arguments["verify"])
    return session.create_client("s3", config=_config(fs), **arguments)


def _config(fs: Any) -> Config:
    given = {**CONFIG, **fs.config_kwargs, "retries": {"total_max_attempts": 1}}
    # Without this botocore hashes each part with SHA-256, at three times the cost of sending it.
    # The CRC32C that goes along with a part, and TLS, guard its bytes on their way.
    given["s3"] = {"payload_signing_enabled": False, **(fs.config_kwargs.get("s3") or {})}
    if fs.anon:
        given["signature_version"] = UNSIGNED
    try:
        return Config(**given)
    except TypeError as error:
        raise NotThisRoute(f"config_kwargs: {error}") from None
