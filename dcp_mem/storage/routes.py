"""Choose the route for a URL: POSIX, S3, Azure, Google, or fsspec for all others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dcp_mem.common.log import log
from dcp_mem.config import Settings
from dcp_mem.storage import NotThisRoute, Storage
from dcp_mem.storage.fsspec_route import FsspecStorage
from dcp_mem.storage.posix import PosixStorage
from dcp_mem.storage.retry import RETRIES, RetryingStorage, RetryPolicy

Route = Callable[[str, Mapping[str, Any]], Storage]


def open_storage(
    url: str, storage_options: Mapping[str, Any], retry_policy: RetryPolicy = RETRIES
) -> RetryingStorage:
    """Return the storage under a root URL or absolute path."""
    return RetryingStorage(_storage(url, _copied(storage_options)), retry_policy)


def storage_of(chosen: Settings, retry_policy: RetryPolicy = RETRIES) -> RetryingStorage | None:
    """Return a job's storage; None for a job without a URL. Raises what `open_storage` raises."""
    if chosen.url is None:
        return None
    return open_storage(chosen.url, chosen.storage_options, retry_policy)


def _copied(options: Any) -> Any:
    """Copy the options: some SDKs change what they are given. Credential objects stay the same."""
    if isinstance(options, Mapping):
        return {name: _copied(value) for name, value in options.items()}
    return [_copied(value) for value in options] if isinstance(options, list) else options


def _storage(url: str, storage_options: Mapping[str, Any]) -> Storage:
    if url.startswith("/"):
        return PosixStorage(url)
    try:
        return _route(url)(url, storage_options)
    except NotThisRoute as reason:
        log.info("%s goes through fsspec, which takes more CPU and memory: %s", url, reason)
        return FsspecStorage(url, storage_options)


def _route(url: str) -> Route:
    protocol = url.partition("://")[0]
    try:  # the SDKs come with extras, and take half a second to import
        if protocol in ("s3", "s3a"):
            from dcp_mem.storage.s3 import S3Storage

            return S3Storage
        if protocol in ("abfs", "abfss", "az"):
            from dcp_mem.storage.azure import AzureStorage

            return AzureStorage
        if protocol in ("gs", "gcs"):
            from dcp_mem.storage.gcs import GcsStorage

            return GcsStorage
    except ImportError:
        pass  # fsspec says what to install
    return FsspecStorage
