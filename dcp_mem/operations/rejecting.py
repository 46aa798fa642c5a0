"""Reject checkpoints, and take that back.

Rejected ones stay where they are, and no load takes them unless asked by name.
"""

from __future__ import annotations

from collections.abc import Sequence

from dcp_mem.config import Settings
from dcp_mem.format.manifest import Manifest
from dcp_mem.memory.checkpoint import LocalCheckpoint
from dcp_mem.memory.job import JobMemory
from dcp_mem.operations.inventory import job_memory
from dcp_mem.storage.listing import (
    StoredCheckpoint,
    committed_under,
    mark_rejected,
    remove_rejection,
)
from dcp_mem.storage.routes import open_storage


def reject_in_memory(settings: Settings, name: str, why: str, save_id: str = "") -> bool:
    """Reject a checkpoint in this node's memory; return whether there is one.

    It isn't flushed any more, doesn't count for retention, and leaves memory before any other.

    `save_id`: of the save that is meant; "" for whatever has the name.
    """
    memory = job_memory(settings)
    found = [] if memory is None else _in_memory(memory, name, save_id)
    for checkpoint in found:
        assert memory is not None
        memory.reject(checkpoint, why)
    return bool(found)


def reject_on_storage(settings: Settings, name: str, why: str, save_id: str = "") -> bool:
    """Reject a committed checkpoint on storage; return whether there is one.

    Retention leaves it alone from then on, and doesn't count it.

    Raises StorageUnavailable, StorageRefused.
    """
    if settings.url is None:
        return False
    storage = open_storage(settings.url, settings.storage_options)
    found = _manifests(committed_under(storage, name), save_id)
    for manifest in found:
        mark_rejected(storage, manifest, why)
    return bool(found)


def accept_in_memory(settings: Settings, name: str, save_id: str = "") -> bool:
    """Take back a rejection in this node's memory; return whether there was one.

    A checkpoint whose flush was skipped for the rejection awaits its flush again.
    """
    memory = job_memory(settings)
    here = [] if memory is None else _in_memory(memory, name, save_id)
    found = [one for one in here if one.rejected]
    for checkpoint in found:
        assert memory is not None
        memory.accept(checkpoint)
    return bool(found)


def accept_on_storage(settings: Settings, name: str, save_id: str = "") -> bool:
    """Take back a rejection on storage; return whether there was one.

    Raises StorageUnavailable, StorageRefused.
    """
    if settings.url is None:
        return False
    storage = open_storage(settings.url, settings.storage_options)
    found = _manifests([one for one in committed_under(storage, name) if one.rejected], save_id)
    for manifest in found:
        remove_rejection(storage, manifest)
    return bool(found)


def _in_memory(memory: JobMemory, name: str, save_id: str) -> list[LocalCheckpoint]:
    return [one for one in memory.find(name) if save_id in ("", one.manifest.save_id)]


def _manifests(found: Sequence[StoredCheckpoint], save_id: str) -> list[Manifest]:
    """Return the manifests of what is meant; what has none can't be rejected."""
    manifests = [one.manifest for one in found if save_id in ("", one.save_id)]
    return [manifest for manifest in manifests if manifest is not None]
