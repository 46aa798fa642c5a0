"""What nobody needs any more, found and given back: memory of jobs that are gone, and what lies on storage."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dcp_mem.config import checkpoint_name, memory_root, settings
from dcp_mem.errors import CheckpointNotFound, JobInUse
from dcp_mem.events import log
from dcp_mem.files import allocated_bytes
from dcp_mem.flushing.leftovers import Leftover, delete_checkpoint, leftovers
from dcp_mem.memory.job import JobMemory
from dcp_mem.memory.locks import JobLock, RunIdentity, is_leased, job_is_live, new_token
from dcp_mem.memory.root import open_root
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
    if not os.path.isdir(root):
        return []
    open_root(root)
    with os.scandir(root) as entries:
        names = sorted(
            entry.name for entry in entries if entry.is_dir(follow_symlinks=False) and not entry.name.startswith(".")
        )
    found = []
    for name in names:
        directory = os.path.join(root, name)
        if (
            (job is not None and name != job)
            or not os.path.isdir(os.path.join(directory, ".slots"))
            or job_is_live(directory)
            or time.time() - _last_use(directory) < older_than
        ):
            continue
        found.append(_reclaim_one(root, name, force=force, dry_run=dry_run))
    return found


def delete(
    path: str | os.PathLike[str],
    checkpoint_id: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> int:
    """Delete a checkpoint from storage, and nothing from memory; returns how many bytes that freed.

    What makes it a checkpoint (`.metadata`) goes first. Where it is broken off, or raises StorageUnavailable, repeat it:
    readers see no checkpoint of that name any more. Raises CheckpointNotFound where nothing lies under that name, StorageRefused.
    """
    chosen = settings(path, storage_options=storage_options)
    assert chosen.url is not None
    name = checkpoint_name(chosen.url, checkpoint_id)
    storage = open_storage(chosen.url, chosen.storage_options)
    if not storage.ls(name) and not storage.unfinished(name):
        there = sorted(entry.name for entry in storage.ls("") if entry.is_directory)
        raise CheckpointNotFound(name, chosen.url, there, [])
    return delete_checkpoint(storage, name)


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


def _last_use(directory: str) -> float:
    try:
        with os.scandir(directory) as entries:
            return max(
                (entry.stat(follow_symlinks=False).st_mtime for entry in entries), default=os.stat(directory).st_mtime
            )
    except FileNotFoundError:
        return 0.0
