"""Reject checkpoints, and take that back.

Rejected ones stay where they are, and no load takes them unless asked by name.
"""

from __future__ import annotations

from dcp_mem.config import Settings
from dcp_mem.operations.inventory import job_memory
from dcp_mem.storage.listing import committed_under, mark_rejected, remove_rejection
from dcp_mem.storage.routes import storage_of


def reject_in_memory(settings: Settings, name: str, why: str | None, save_id: str = "") -> bool:
    """Reject a checkpoint in this node's memory; return whether there is one. It isn't flushed any
    more, doesn't count for retention, and leaves memory before any other. With `why` None, that is
    taken back: a checkpoint whose flush was skipped for it awaits its flush again. The save id ""
    stands for whatever has the name.
    """
    memory = job_memory(settings)
    found = [] if memory is None else memory.find(name)
    found = [one for one in found if save_id in ("", one.manifest.save_id)]
    found = [one for one in found if why is not None or one.rejected]
    for checkpoint in found:
        assert memory is not None
        if why is None:
            memory.accept(checkpoint)
        else:
            memory.reject(checkpoint, why)
    return bool(found)


def reject_on_storage(settings: Settings, name: str, why: str | None, save_id: str = "") -> bool:
    """Reject a committed checkpoint on storage; return whether there is one that has a manifest.
    Retention leaves it alone from then on, and doesn't count it. Arguments: as in memory.
    """
    storage = storage_of(settings)
    if storage is None:
        return False
    found = [one for one in committed_under(storage, name) if save_id in ("", one.save_id)]
    manifests = [one.manifest for one in found if why is not None or one.rejected]
    meant = [manifest for manifest in manifests if manifest is not None]
    for manifest in meant:
        if why is None:
            remove_rejection(storage, manifest)
        else:
            mark_rejected(storage, manifest, why)
    return bool(meant)
