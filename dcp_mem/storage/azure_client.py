"""A synchronous client of Azure Blob, made from the adlfs file system that fsspec finds."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any
from urllib.parse import urlsplit

import fsspec.asyn
from azure.core.pipeline.transport import RequestsTransport
from azure.storage.blob import (
    BlobClient,
    BlobSasPermissions,
    BlobServiceClient,
    generate_blob_sas,
)
from requests import Session
from requests.adapters import HTTPAdapter

from dcp_mem.common.releases import warn_if_untested
from dcp_mem.storage import NotThisRoute
from dcp_mem.storage.file_system import refuse_missing_authorities, trusted_authorities

warn_if_untested("adlfs")

_CONNECTION_TIMEOUT, _READ_TIMEOUT = 10.0, 60.0
_CONNECTIONS = 64
"""More than there are parts in flight: connections beyond it are closed after each request."""
_SIGNATURE_LIFE = timedelta(hours=1)
_STORAGE_SCOPE = "https://storage.azure.com/.default"
_PIECE = 2 << 20
"""Goes out within the timeout at 200 kB/s for each connection; smaller pieces cost more CPU."""


class Pieces:
    """A request's body, sent in small pieces that aren't copied.

    The timeout for connecting bounds each send as well. A part as a whole might not go out within
    it where many share a slow network.

    `data`: must stay unchanged until the request is answered.
    """

    def __init__(self, data: memoryview) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __iter__(self) -> Iterator[Any]:  # memoryviews, where the SDK declares bytes
        return (self._data[start : start + _PIECE] for start in range(0, len(self._data), _PIECE))


def service_client(fs: Any) -> BlobServiceClient:
    """Return a client of the account that adlfs has found. It is thread-safe.

    It tries each request once. Credentials are renewed as they are for `fs`.

    Raises NotThisRoute.
    """
    try:
        options = {
            "transport": _transport(fs.storage_options),
            **dict.fromkeys(("retry_total", "retry_connect", "retry_read", "retry_status"), 0),
        }
        if fs.connection_string is not None:
            return BlobServiceClient.from_connection_string(fs.connection_string, **options)
        credential = _credential(fs)
        # As in adlfs: a SAS token counts only where no other credential was given.
        token = "?" + fs.sas_token.lstrip("?") if credential is None and fs.sas_token else ""
        location = {} if fs.location_mode is None else {"_location_mode": fs.location_mode}
        return BlobServiceClient(fs.account_url + token, credential, **location, **options)
    except (AttributeError, TypeError, ValueError) as error:
        raise NotThisRoute(f"{type(fs).__name__}: {type(error).__name__}") from None


def signed_for_copying(blob: BlobClient) -> dict[str, Any]:
    """Return the arguments by which a request for a copy may read its source."""
    credential = blob.credential
    key = getattr(credential, "account_key", None)
    if key is not None:
        signature = generate_blob_sas(
            str(blob.account_name),
            blob.container_name,
            blob.blob_name,
            account_key=key,
            permission=BlobSasPermissions(read=True),
            expiry=datetime.now(timezone.utc) + _SIGNATURE_LIFE,
        )
        return {"source_url": f"{blob.url}?{signature}"}
    if hasattr(credential, "get_token"):
        token = credential.get_token(_STORAGE_SCOPE).token
        return {"source_url": blob.url, "source_authorization": f"Bearer {token}"}
    return {"source_url": blob.url}  # a SAS token of the client's is part of that


class _Session(Session):
    """A session that looks up proxies and certificates once for each host: that saves CPU time."""

    def __init__(self) -> None:
        super().__init__()
        self._settings: dict[str, Any] = {}

    def merge_environment_settings(self, url: Any, *given: Any) -> Any:
        key = repr((urlsplit(url)[:2], given))
        if key not in self._settings:
            self._settings[key] = super().merge_environment_settings(url, *given)
        return self._settings[key]


def _transport(options: dict[str, Any]) -> RequestsTransport:
    session = _Session()
    session.headers["Accept-Encoding"] = "identity"
    for scheme in ("http://", "https://"):
        session.mount(scheme, HTTPAdapter(pool_maxsize=_CONNECTIONS))
    trusted = options.get("connection_verify")
    if trusted is None:
        trusted = trusted_authorities("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE") or True
    refuse_missing_authorities(trusted)
    return RequestsTransport(
        session=session,
        connection_verify=trusted,
        connection_timeout=options.get("connection_timeout") or _CONNECTION_TIMEOUT,
        read_timeout=options.get("read_timeout") or _READ_TIMEOUT,
    )


def _credential(fs: Any) -> Any:
    if fs.sync_credential is not None:  # adlfs made both
        return fs.sync_credential
    if fs.credential is None:
        return fs.account_key
    if inspect.iscoroutinefunction(getattr(fs.credential, "get_token", None)):
        return _AwaitedCredential(fs.credential, fs.loop)
    return fs.credential


class _AwaitedCredential:
    """An asynchronous credential of the user's, called on the event loop that it belongs to."""

    def __init__(self, credential: Any, loop: Any) -> None:
        self._credential, self._loop = credential, loop

    def get_token(self, *scopes: str, **options: Any) -> Any:
        return fsspec.asyn.sync(self._loop, self._credential.get_token, *scopes, **options)
