"""Delete and reject checkpoints, and free what nobody needs: memory of dead jobs, orphans."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from typing import Any

from dcp_mem.common.files import allocated_bytes
from dcp_mem.common.log import log
from dcp_mem.common.value_class import value_class
from dcp_mem.config import Settings, checkpoint_name, memory_root_path
from dcp_mem.errors import CheckpointInUse, CheckpointNotFound, JobInUse
from dcp_mem.flushing.orphans import Orphan, delete_checkpoint, orphans
from dcp_mem.memory.job import JobMemory, jobs_in, last_use
from dcp_mem.memory.links import drop_dead_links
from dcp_mem.memory.locks import JobLock, RunIdentity, is_leased, job_is_live, new_token
from dcp_mem.options import settings
from dcp_mem.runtime.states import job_memory
from dcp_mem.storage.leases import is_being_read
from dcp_mem.storage.listing import (
    checkpoint_names,
    committed_under,
    mark_rejected,
    remove_rejection,
)
from dcp_mem.storage.posix_paths import link_target
from dcp_mem.storage.routes import open_storage, storage_of


@value_class(frozen=True)
class Reclaimed:
    """A dead job's memory.

    Attributes:
        nbytes: What it occupied.
        kept: Why it was left alone; "" if it was freed.
    """

    job: str
    nbytes: int
    kept: str = ""


def reclaim(
    memory_root: str | os.PathLike[str] | None = None,
    *,
    job: str | None = None,
    older_than: float = 0.0,
    force: bool = False,
    dry_run: bool = False,
) -> list[Reclaimed]:
    """Free the memory of jobs that no process works for; return an entry for each such job.

    A job with checkpoints that await their flush, or that are being read, is left alone. Live jobs,
    and directories that are no job's, are never touched.

    Args:
        memory_root: By default DCP_MEM_ROOT, or the user's directory in /dev/shm.
        job: Only this job.
        older_than: Seconds that must have passed since the job's last save.
        force: Give up what awaits its flush.
        dry_run: Only look.

    Raises:
        MemoryRootRefused: The memory root isn't this user's, or others may write to it.
        MemoryUnavailable: The memory root can't be opened.
    """
    root = memory_root_path(memory_root)
    found = []
    for name in jobs_in(root):
        directory = os.path.join(root, name)
        is_dead = job in (None, name) and not job_is_live(directory)
        if is_dead and time.time() - last_use(directory) >= older_than:
            found.append(_reclaim_one(root, name, force=force, dry_run=dry_run))
    return found


def delete(
    path: str | os.PathLike[str],
    checkpoint_id: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    force: bool = False,
) -> int:
    """Delete a checkpoint from storage, and nothing from memory; return how many bytes that freed.

    `.metadata`, which makes it a checkpoint, is deleted first: readers see no checkpoint of that
    name any more. So an interrupted call can be repeated. Of a symbolic link the link itself is
    deleted, and what it leads to stays.

    Args:
        path: The job's root.
        checkpoint_id: The checkpoint's name.
        storage_options: For the storage.
        force: Delete it even while it is loaded through a MemoryStorageReader.

    Raises:
        CheckpointNotFound: Nothing lies under that name.
        CheckpointInUse: It is being loaded.
        StorageUnavailable: Storage doesn't answer; try again.
        StorageRefused: Storage refuses to delete.
    """
    chosen = settings(path, storage_options=storage_options)
    assert chosen.url is not None
    name = checkpoint_name(chosen.url, checkpoint_id)
    storage = open_storage(chosen.url, chosen.storage_options)
    if link_target(chosen.url, name) is not None:
        storage.delete(name)
        return 0
    if not storage.ls(name) and not storage.unfinished(name):
        present = sorted(checkpoint_names(storage))
        raise CheckpointNotFound(name, chosen.url, present, [])
    if not force and is_being_read(storage, name):
        raise CheckpointInUse(name, chosen.url)
    return delete_checkpoint(storage, name)


def delete_stored(settings: Settings, name: str) -> bool:
    """Delete a checkpoint from a job's storage, as `delete`; return whether it was there."""
    if settings.url is None:
        return False
    try:
        delete(settings.url, name, storage_options=settings.storage_options)
    except CheckpointNotFound:
        return False
    return True


def evict(settings: Settings, name: str) -> tuple[int, str]:
    """Take a checkpoint out of this node's memory; return the bytes that were freed, and why it
    stays. Its memory goes back to the system, unless a live process will save into it again.
    """
    memory = job_memory(settings)
    if memory is None:
        return 0, ""
    freed = 0
    drop_dead_links(memory.links)
    for checkpoint in memory.find(name):
        nbytes = checkpoint.local_nbytes()
        if not memory.evict(checkpoint, "removed by hand"):
            return freed, "it is being read or flushed; try again in a moment"
        freed += nbytes
    if not job_is_live(memory.directory):
        memory.drop_free_slots()
    return freed, ""


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


def collect_orphans(
    path: str | os.PathLike[str],
    *,
    older_than: float = 86_400.0,
    storage_options: Mapping[str, Any] | None = None,
    dry_run: bool = False,
) -> list[Orphan]:
    """Remove what saves that never became durable left on storage; return what was found.

    These are segments and manifests under names without a committed checkpoint, and uploads that
    were never finished. Files of other programs are never touched.

    Args:
        path: The job's root.
        older_than: Seconds since any of it was touched; longer than an agent may need to go on.
        storage_options: For the storage.
        dry_run: Only look.

    Raises:
        StorageUnavailable: Storage doesn't answer.
        StorageRefused: Storage refuses.
    """
    chosen = settings(path, storage_options=storage_options)
    assert chosen.url is not None
    storage = open_storage(chosen.url, chosen.storage_options)
    found = orphans(storage, older_than)
    for one in found:
        if not dry_run:
            one.remove(storage)
    return found


def _reclaim_one(root: str, name: str, *, force: bool, dry_run: bool) -> Reclaimed:
    memory = JobMemory(root, name)
    nbytes, here = allocated_bytes(memory.directory), memory.checkpoints()
    pending = ", ".join(one.name for one in here if one.pending)
    reading = ", ".join(one.name for one in here if is_leased(one.manifest_path))
    if drop_dead_links(memory.links) or reading:
        return Reclaimed(name, nbytes, f"{reading or 'a checkpoint'} is being read or flushed")
    if pending and not force:
        return Reclaimed(name, nbytes, f"{pending} never reached storage (force=True gives it up)")
    if not dry_run:
        try:
            # No process may take the job up while its memory is removed.
            lock = JobLock(memory.directory, name, RunIdentity("", new_token()))
        except JobInUse as error:
            return Reclaimed(name, nbytes, str(error))
        try:
            shutil.rmtree(memory.directory)
        finally:
            lock.close()
        log.info("reclaimed %d bytes of job %s", nbytes, name)
    return Reclaimed(name, nbytes)
