"""Memory of jobs that are gone: found, and given back."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass

from dcp_mem.config import memory_root
from dcp_mem.errors import JobInUse
from dcp_mem.events import log
from dcp_mem.files import allocated_bytes
from dcp_mem.memory.job import JobMemory
from dcp_mem.memory.locks import JobLock, RunIdentity, is_leased, job_is_live, new_token
from dcp_mem.memory.root import open_root


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
