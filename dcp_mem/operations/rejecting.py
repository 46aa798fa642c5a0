"""Reject checkpoints, and take that back.

Rejected ones stay where they are, and no load takes them unless asked by name.
"""

from __future__ import annotations

from dcp_mem.config import Settings
from dcp_mem.operations.inventory import job_memory
from dcp_mem.storage.listing import committed_under, mark_rejected, remove_rejection
from dcp_mem.storage.routes import open_storage


def reject_in_memory(settings: Settings, name: str, why: str) -> bool:
    """Reject a checkpoint in this node's memory; return whether there is one of that name.

    It isn't flushed any more, doesn't count for retention, and leaves memory before any other.

    Args:
        settings: The job's, with its memory root.
        name: The checkpoint's name.
        why: The reason, for people.
    """
    memory = job_memory(settings)
    found = [] if memory is None else memory.find(name)
    for checkpoint in found:
        assert memory is not None
        memory.reject(checkpoint, why)
    return bool(found)


def reject_on_storage(settings: Settings, name: str, why: str) -> bool:
    """Reject a committed checkpoint on storage; return whether there is one of that name.

    Retention leaves it alone from then on, and doesn't count it.

    Args:
        settings: The job's. Without a URL, there is none.
        name: The checkpoint's name.
        why: The reason, for people.

    Raises:
        StorageUnavailable: Storage doesn't answer.
        StorageRefused: Storage refuses.
    """
    if settings.url is None:
        return False
    storage = open_storage(settings.url, settings.storage_options)
    manifests = [one.manifest for one in committed_under(storage, name)]
    found = [manifest for manifest in manifests if manifest is not None]
    for manifest in found:
        mark_rejected(storage, manifest, why)
    return bool(found)


def accept_in_memory(settings: Settings, name: str) -> bool:
    """Take back a rejection in this node's memory; return whether there was one.

    A checkpoint whose flush was skipped for the rejection awaits its flush again.

    Args:
        settings: The job's, with its memory root.
        name: The checkpoint's name.
    """
    memory = job_memory(settings)
    found = [] if memory is None else [one for one in memory.find(name) if one.rejected]
    for checkpoint in found:
        assert memory is not None
        memory.accept(checkpoint)
    return bool(found)


def accept_on_storage(settings: Settings, name: str) -> bool:
    """Take back a rejection on storage; return whether there was one.

    Args:
        settings: The job's. Without a URL, there is none.
        name: The checkpoint's name.

    Raises:
        StorageUnavailable: Storage doesn't answer.
        StorageRefused: Storage refuses.
    """
    if settings.url is None:
        return False
    storage = open_storage(settings.url, settings.storage_options)
    found = [one.manifest for one in committed_under(storage, name) if one.rejected]
    for manifest in found:
        assert manifest is not None  # what has none can't be rejected
        remove_rejection(storage, manifest)
    return bool(found)
