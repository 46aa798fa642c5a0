"""Which route serves which URL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dcp_mem.storage import Storage
from dcp_mem.storage.fsspec_route import FsspecStorage
from dcp_mem.storage.patient import PATIENCE, Patience, PatientStorage
from dcp_mem.storage.posix import PosixStorage


def open_storage(url: str, storage_options: Mapping[str, Any], patience: Patience = PATIENCE) -> PatientStorage:
    """The storage under a root URL or absolute path. Raises StorageRefused, StorageUnavailable."""
    return PatientStorage(_route(url, storage_options), patience)


def _route(url: str, storage_options: Mapping[str, Any]) -> Storage:
    if url.startswith("/"):
        return PosixStorage(url)
    return FsspecStorage(url, storage_options)
