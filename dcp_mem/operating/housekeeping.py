"""What nobody needs any more, found and given back: memory of jobs that are gone, and what lies on storage."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dcp_mem.config import Settings, checkpoint_name, memory_root, settings
from dcp_mem.errors import CheckpointInUse, CheckpointNotFound, JobInUse
from dcp_mem.events import log
from dcp_mem.files import allocated_bytes
from dcp_mem.flushing.leftovers import Leftover, delete_checkpoint, leftovers
from dcp_mem.memory.job import JobMemory, jobs_in, last_use
from dcp_mem.memory.locks import JobLock, RunIdentity, is_leased, job_is_live, new_token
from dcp_mem.operating.inventory import job_memory
from dcp_mem.storage.leases import is_being_read
from dcp_mem.storage.routes import open_storage


@dataclass(frozen=True, slots=True)
class Reclaimed:
    """A dead job's memory. nbytes: what it occupied. kept: why it was left alone ("" where it was given back)."""

    job: str
    nbytes: int
    kept: str = ""


def reclaim(
    memory: str | os.PathLike[str] | None = None,
    *,
    job: str | None = None,
    older_than: float = 0.0,
    force: bool = False,
    dry_run: bool = False,
) -> list[Reclaimed]:
    """Give back the memory of jobs that no process works for any more; returns what was found, a line for each dead job.

    job: only this one. older_than: seconds since its last save. A job with checkpoints that still await their flush, or that
    are being read, is left alone; force=True gives up what awaits its flush. dry_run: only look. Live jobs, and directories
    that are no job's, are never touched.
    """
    root = memory_root(memory)
    found = []
    for name in jobs_in(root):
        directory = os.path.join(root, name)
        if (
            (job is not None and name != job)
            or job_is_live(directory)
            or time.time() - last_use(directory) < older_than
        ):
            continue
        found.append(_reclaim_one(root, name, force=force, dry_run=dry_run))
    return found


def delete(
    path: str | os.PathLike[str],
    checkpoint_id: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    force: bool = False,
) -> int:
    """Delete a checkpoint from storage, and nothing from memory; returns how many bytes that freed.

    What makes it a checkpoint (`.metadata`) goes first. Where it is broken off, or raises StorageUnavailable, repeat it:
    readers see no checkpoint of that name any more. force: also one that somebody is loading through a MemoryStorageReader.
    Raises CheckpointNotFound where nothing lies under that name, CheckpointInUse, StorageRefused.
    """
    chosen = settings(path, storage_options=storage_options)
    assert chosen.url is not None
    name = checkpoint_name(chosen.url, checkpoint_id)
    storage = open_storage(chosen.url, chosen.storage_options)
    if not storage.ls(name) and not storage.unfinished(name):
        there = sorted(entry.name for entry in storage.ls("") if entry.is_directory)
        raise CheckpointNotFound(name, chosen.url, there, [])
    if not force and is_being_read(storage, name):
        raise CheckpointInUse(name, chosen.url)
    return delete_checkpoint(storage, name)


def evict(settings: Settings, name: str) -> tuple[int, str]:
    """Take a checkpoint out of this node's memory; returns how many bytes that freed, and why it is still there ("": it isn't).

    It stays where somebody reads or flushes it. Its memory goes back to the system unless a live process holds the job, which
    saves into it again. Raises MemoryRootRefused, MemoryUnavailable.
    """
    memory = job_memory(settings)
    if memory is None:
        return 0, ""
    freed = 0
    for held in memory.find(name):
        nbytes = memory.nbytes_of(held)
        if not memory.evict(held, "removed by hand"):
            return freed, "it is being read or flushed; try again in a moment"
        freed += nbytes
    if not job_is_live(memory.directory):
        memory.drop_free_slots()
    return freed, ""


def collect_leftovers(
    path: str | os.PathLike[str],
    *,
    older_than: float = 86_400.0,
    storage_options: Mapping[str, Any] | None = None,
    dry_run: bool = False,
) -> list[Leftover]:
    """Remove what saves that never became durable left under a job's root on storage; returns what was found.

    That is: segments and manifests under names without a committed checkpoint, and uploads that nobody finished. older_than:
    seconds since any of it was touched; longer than an agent may need to go on. dry_run: only look. Files that aren't dcp_mem's
    are never touched. Raises StorageUnavailable, StorageRefused.
    """
    chosen = settings(path, storage_options=storage_options)
    assert chosen.url is not None
    storage = open_storage(chosen.url, chosen.storage_options)
    found = leftovers(storage, older_than)
    for one in found:
        if not dry_run:
            one.remove(storage)
    return found


def _reclaim_one(root: str, name: str, *, force: bool, dry_run: bool) -> Reclaimed:
    memory = JobMemory(root, name)
    nbytes = allocated_bytes(memory.directory)
    pending = [held.name for held in memory.held() if held.pending]
    reading = [held.name for held in memory.held() if is_leased(held.manifest_path)]
    if reading:
        return Reclaimed(name, nbytes, f"{', '.join(reading)} is being read or flushed")
    if pending and not force:
        return Reclaimed(name, nbytes, f"{', '.join(pending)} never reached storage (force=True gives it up)")
    if not dry_run:
        try:
            lock = JobLock(memory.directory, name, RunIdentity("", new_token()))  # nobody takes it up meanwhile
        except JobInUse as error:
            return Reclaimed(name, nbytes, str(error))
        try:
            shutil.rmtree(memory.directory)
        finally:
            lock.close()
        log.info("reclaimed %d bytes of job %s", nbytes, name)
    return Reclaimed(name, nbytes)
