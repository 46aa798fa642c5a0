"""A synchronous client of Azure Blob, made from the file system of adlfs that fsspec finds for a URL."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import fsspec.asyn
from azure.core.pipeline.transport import RequestsTransport
from azure.storage.blob import BlobServiceClient
from requests import Session
from requests.adapters import HTTPAdapter

from dcp_mem.storage import NotThisRoute

_CONNECTION_TIMEOUT, _READ_TIMEOUT = 10.0, 60.0
_CONNECTIONS = 64  # more than parts are in flight: what doesn't fit would be closed after each request
_PIECE = 2 << 20  # a line of 200 kB/s for each connection is enough; smaller ones cost more CPU


class Pieces:
    """A request's body, sent in small pieces that aren't copied.

    The timeout for connecting bounds each send as well, whatever it sends: a part as a whole would have to go out within
    it, which it doesn't where many share a slow line.
    """

    def __init__(self, data: memoryview) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __iter__(self) -> Iterator[Any]:  # memoryviews, where the SDK declares bytes
        return (self._data[start : start + _PIECE] for start in range(0, len(self._data), _PIECE))


def service_client(fs: Any) -> BlobServiceClient:
    """The client of the account that `fs` is for, with its credentials; tries each request once. Thread-safe.

    Whatever renews the credentials for `fs` renews them here. Raises NotThisRoute.
    """
    try:
        options = {
            "transport": _transport(fs.storage_options),
            **dict.fromkeys(("retry_total", "retry_connect", "retry_read", "retry_status"), 0),
        }
        if fs.connection_string is not None:
            return BlobServiceClient.from_connection_string(fs.connection_string, **options)
        credential = _credential(fs)
        # adlfs, too, uses a SAS token only where nothing else was given, and nothing where that wasn't either.
        token = "?" + fs.sas_token.lstrip("?") if credential is None and fs.sas_token else ""
        location = {} if fs.location_mode is None else {"_location_mode": fs.location_mode}
        return BlobServiceClient(fs.account_url + token, credential, **location, **options)
    except (AttributeError, TypeError, ValueError) as error:
        raise NotThisRoute(f"{type(fs).__name__}: {type(error).__name__}") from None


class _Session(Session):
    """Asks the environment for proxies and certificates once for each host: asked for each request, that is a sixth of it."""

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
    return RequestsTransport(
        session=session,
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
    """An asynchronous credential of the user's, asked on the loop that it belongs to."""

    def __init__(self, credential: Any, loop: Any) -> None:
        self._credential, self._loop = credential, loop

    def get_token(self, *scopes: str, **options: Any) -> Any:
        return fsspec.asyn.sync(self._loop, self._credential.get_token, *scopes, **options)
