"""Storage in Google Cloud Storage: the route of S3, in the dialect of Google's XML API."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import botocore.session
import gcsfs
from botocore import UNSIGNED
from botocore.config import Config

from dcp_mem.common.releases import warn_if_untested
from dcp_mem.storage import Copies, NotThisRoute
from dcp_mem.storage.file_system import refuse_missing_authorities, trusted_authorities
from dcp_mem.storage.s3 import S3Storage
from dcp_mem.storage.s3_client import CONFIG, S3Client

warn_if_untested("gcsfs")

# "when_required": of checksums Google takes only the one that is given, in its own header.
_CONFIG = {
    **CONFIG,
    "request_checksum_calculation": "when_required",
    "retries": {"total_max_attempts": 1},
    "s3": {"addressing_style": "path"},
    "signature_version": UNSIGNED,
}
_DIALECT: Mapping[str, tuple[str, Callable[[str], str]]] = {
    "if-match": ("x-goog-if-generation-match", lambda generation: generation),
    "if-none-match": ("x-goog-if-generation-match", lambda _: "0"),  # there is no object yet
    "x-amz-checksum-crc32c": ("x-goog-hash", lambda crc32c: f"crc32c={crc32c}"),
    "x-amz-copy-source": ("x-goog-copy-source", lambda source: source),
    "x-amz-copy-source-if-match": ("x-goog-copy-source-if-match", lambda etag: etag),
}


class GcsStorage(S3Storage):
    """A bucket, or a prefix in it, by botocore and Google's XML API. Raises NotThisRoute."""

    def __init__(self, url: str, storage_options: Mapping[str, Any]) -> None:
        super().__init__(url, storage_options, _by_gcsfs)

    def has_conditions(self) -> bool:
        return True


class _GcsClient(S3Client):
    """A condition names an object by its generation; only whole objects are copied."""

    copies = Copies.WHOLE

    def __init__(self, client: Any, bucket: str) -> None:
        super().__init__(client, {}, bucket)
        self.sends_checksums = True

    def algorithm(self) -> dict[str, str]:
        return {}  # an upload in parts names none

    def identity(self, answer: Mapping[str, Any]) -> str:
        return str(answer["ResponseMetadata"]["HTTPHeaders"]["x-goog-generation"])


class _Dialect:
    """Makes a request for S3 one for Google, with the credentials of a gcsfs file system."""

    def __init__(self, fs: Any) -> None:
        payer = fs.requester_pays
        self._credentials = fs.credentials
        self._payer = fs.project if payer is True else payer

    def speak(self, request: Any, **_: Any) -> None:
        headers: MutableMapping[str, Any] = request.headers
        for name in [*headers]:
            if name.lower() in _DIALECT:
                named, translated = _DIALECT[name.lower()]
                value = headers.pop(name)
                headers[named] = translated(value.decode() if isinstance(value, bytes) else value)
            elif name.lower().startswith(("x-amz-", "amz-sdk-")):
                del headers[name]
        self._credentials.apply(headers)  # renewed five minutes before they expire
        if self._payer:
            headers["x-goog-user-project"] = self._payer


def _by_gcsfs(fs: Any, bucket: str) -> S3Client:
    """Return a client with the endpoint, credentials and options of a gcsfs file system."""
    if not isinstance(fs, gcsfs.GCSFileSystem):
        raise NotThisRoute(f"{type(fs).__name__} isn't gcsfs's file system")
    try:
        if fs.session_kwargs or getattr(fs, "_use_client_cert", False):
            raise NotThisRoute("only gcsfs knows session_kwargs= and certificates of clients")
        seconds = fs.requests_timeout or fs.timeout
        endpoint, dialect = fs._location, _Dialect(fs)
    except AttributeError as error:
        raise NotThisRoute(f"this version of gcsfs is unknown here ({error})") from None
    timeouts = {"connect_timeout": seconds, "read_timeout": seconds} if seconds else {}
    trusted = trusted_authorities("REQUESTS_CA_BUNDLE")
    refuse_missing_authorities(trusted)
    session = botocore.session.Session({"profile": (None, None, None, None)})  # Amazon's
    client = session.create_client(
        "s3",
        endpoint_url=endpoint,
        region_name="auto",
        verify=trusted,
        config=Config(**{**_CONFIG, **timeouts}),
    )
    client.meta.events.register_first("before-send.s3", dialect.speak)
    return _GcsClient(client, bucket)
