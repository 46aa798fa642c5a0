"""Which route serves which URL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dcp_mem.events import log
from dcp_mem.storage import Storage
from dcp_mem.storage.fsspec_route import FsspecStorage
from dcp_mem.storage.patient import PATIENCE, Patience, PatientStorage
from dcp_mem.storage.posix import PosixStorage

_AZURE = ("abfs://", "abfss://", "az://")


def open_storage(url: str, storage_options: Mapping[str, Any], patience: Patience = PATIENCE) -> PatientStorage:
    """The storage under a root URL or absolute path. Raises StorageRefused, StorageUnavailable."""
    return PatientStorage(_route(url, storage_options), patience)


def _route(url: str, storage_options: Mapping[str, Any]) -> Storage:
    if url.startswith("/"):
        return PosixStorage(url)
    if url.startswith(_AZURE):
        return _azure(url, storage_options)
    return FsspecStorage(url, storage_options)


def _azure(url: str, storage_options: Mapping[str, Any]) -> Storage:
    try:  # comes with an extra, and takes half a second
        from dcp_mem.storage.azure import AzureStorage
        from dcp_mem.storage.azure_client import NoSynchronousClient
    except ImportError:
        return FsspecStorage(url, storage_options)  # which says what to install
    try:
        return AzureStorage(url, storage_options)
    except NoSynchronousClient as reason:
        log.info("%s is reached through fsspec: no client of our own can be made (%s)", url, reason)
        return FsspecStorage(url, storage_options)
