"""Which route serves which URL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dcp_mem.events import log
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
    if url.startswith(("s3://", "s3a://")):
        return _s3(url, storage_options)
    return FsspecStorage(url, storage_options)


def _s3(url: str, storage_options: Mapping[str, Any]) -> Storage:
    try:
        from dcp_mem.storage.s3 import S3Storage  # botocore comes with an extra
        from dcp_mem.storage.s3_client import CannotCarryOver
    except ImportError:
        return FsspecStorage(url, storage_options)  # which says what to install
    try:
        return S3Storage(url, storage_options)
    except CannotCarryOver as reason:
        log.info("%s goes through s3fs, which takes more CPU and memory: %s", url, reason)
        return FsspecStorage(url, storage_options)
