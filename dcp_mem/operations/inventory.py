"""List a job's checkpoints, in this node's memory and on storage, and the jobs in a memory root."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dcp_mem.common.files import allocated_bytes
from dcp_mem.common.parallel import in_daemons
from dcp_mem.common.values import MEMORY, STORAGE, CheckpointStatus, Outcome, State
from dcp_mem.config import Settings, is_checkpoint_name
from dcp_mem.errors import CheckpointNotFound
from dcp_mem.memory.checkpoint import LocalCheckpoint
from dcp_mem.memory.exports import read_exports
from dcp_mem.memory.job import JobMemory, jobs_in, last_use
from dcp_mem.memory.locks import job_is_live
from dcp_mem.policy.order import newest_first
from dcp_mem.runtime.states import place_of, status_of, with_exports
from dcp_mem.storage import OfOneFile, StoredFiles
from dcp_mem.storage.listing import (
    StoredCheckpoint,
    checkpoint_names,
    committed_under,
    unreadable,
)
from dcp_mem.storage.retry import RETRIES, RetryPolicy
from dcp_mem.storage.routes import storage_of
from dcp_mem.storage.snapshot import Snapshot, cache_under

_GONE = "storage has it no more"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job's part of a node's memory."""

    name: str  # the job's name; its directory in the memory root is called so
    is_live: bool
    nbytes: int
    last_use: float  # when it last saved, in seconds since the epoch
    checkpoints: tuple[CheckpointStatus, ...]  # what it has there, newest first


def list_checkpoints(
    settings: Settings, *, retry_policy: RetryPolicy = RETRIES
) -> list[CheckpointStatus]:
    """List a job's checkpoints in this node's memory and on storage, newest first.

    A checkpoint that lies in both is listed once. No process group is needed.

    Raises StorageUnavailable, StorageRefused, MemoryRootRefused, MemoryUnavailable.
    """
    local, storage = in_memory(settings), storage_of(settings, retry_policy)
    if storage is None:
        return _with_exports(settings, local)
    if storage.url.startswith("/"):  # the file system keeps what it has read
        return _with_exports(settings, merged(local, on_storage(storage)))
    cache = cache_under(settings.memory_root, storage.url)
    found = on_storage(Snapshot(storage, cache))
    if cache is not None:
        cache.drop_unused()
    return _with_exports(settings, merged(local, found))


def find(checkpoints: Sequence[CheckpointStatus], name: str, where: str) -> CheckpointStatus:
    """Return the newest checkpoint of a name, or the one of a save id.

    `checkpoints`: all there are, newest first. Raises CheckpointNotFound.
    """
    return find_all(checkpoints, [name], where)[0]


def find_all(
    checkpoints: Sequence[CheckpointStatus], wanted: Sequence[str], where: str
) -> list[CheckpointStatus]:
    """Return for each name or save id what `find` returns.

    `checkpoints`: all there are, newest first. Raises CheckpointNotFound.
    """
    known: dict[str, CheckpointStatus] = {}
    for one in checkpoints:
        known.setdefault(one.name, one)
        known.setdefault(one.save_id or one.name, one)
    missing = [name for name in wanted if name not in known]
    if missing:
        available = list(dict.fromkeys(one.name for one in checkpoints))
        raise CheckpointNotFound(", ".join(missing), where, available, [])
    return [known[name] for name in wanted]


def find_one(
    settings: Settings, name: str, where: str, *, retry_policy: RetryPolicy = RETRIES
) -> CheckpointStatus:
    """Return what `find` returns, and look at the other checkpoints only where that is needed.

    Raises CheckpointNotFound, StorageUnavailable, StorageRefused, MemoryRootRefused,
    MemoryUnavailable.
    """
    storage = storage_of(settings, retry_policy) if is_checkpoint_name(name) else None
    if storage is not None:
        local = [one for one in in_memory(settings) if one.name == name]
        found = merged(local, stored(_under(storage, name)))
        if found:
            return _with_exports(settings, found[:1])[0]
    return find(list_checkpoints(settings, retry_policy=retry_policy), name, where)


def list_jobs(memory_root: str) -> list[Job]:
    """List the jobs that have memory in a root, the one that saved last first.

    Raises MemoryRootRefused, MemoryUnavailable.
    """
    found = []
    for name in jobs_in(memory_root):
        directory = os.path.join(memory_root, name)
        job = Job(
            name=name,
            checkpoints=tuple(_of_job(JobMemory(memory_root, name))),
            is_live=job_is_live(directory),
            nbytes=allocated_bytes(directory),
            last_use=last_use(directory),
        )
        found.append(job)
    return sorted(found, key=lambda job: job.last_use, reverse=True)


def job_memory(settings: Settings) -> JobMemory | None:
    """Return the job's memory on this node; None where it has none, and none is made."""
    directory = os.path.join(settings.memory_root, settings.job)
    return (
        JobMemory(settings.memory_root, settings.job)
        if os.path.isdir(os.path.join(directory, ".slots"))
        else None
    )


def in_memory(settings: Settings) -> list[CheckpointStatus]:
    """List the checkpoints in this node's memory, newest first."""
    memory = job_memory(settings)
    return [] if memory is None else _of_job(memory)


def count_superseded(settings: Settings) -> int:
    """Return how many checkpoints newer ones have superseded before their flush, on this node."""
    memory = job_memory(settings)
    rows = [] if memory is None else memory.history.rows()
    return sum(row.outcome == Outcome.SUPERSEDED for row in rows)


def on_storage(storage: StoredFiles) -> list[CheckpointStatus]:
    """List what is committed on storage, newest first; several names are looked at at once."""
    found = in_daemons(lambda name: _under(storage, name), checkpoint_names(storage))
    return stored([one for under in found for one in under])


def _under(storage: StoredFiles, name: str) -> list[StoredCheckpoint]:
    try:
        return committed_under(storage, name)
    except OfOneFile as error:
        return [unreadable(name, error)]


def stored(found: Sequence[StoredCheckpoint]) -> list[CheckpointStatus]:
    """Return what a listing of storage has found, newest first."""
    return _newest_first([_of_storage(one) for one in found])


def merged(
    local: Sequence[CheckpointStatus], remote: Sequence[CheckpointStatus]
) -> list[CheckpointStatus]:
    """Join the checkpoints of memory and of storage, newest first.

    Storage decides what is durable: a checkpoint that memory takes to be durable and that storage
    lacks is complete. That is no damage: retention on storage may have deleted it.
    """
    unmatched = {(one.name, one.save_id, one.scope): one for one in remote}
    found = []
    for one in local:
        same = unmatched.pop((one.name, one.save_id, one.scope), None)
        if same is not None:
            found.append(
                replace(
                    one,
                    state=State.DURABLE,
                    places=(MEMORY, STORAGE),
                    error="",
                    problem=same.problem or one.problem,
                    rejected=same.rejected or one.rejected,
                    stored_at=same.stored_at,
                    generation=max(one.generation, same.generation),
                )
            )
        elif one.state is State.DURABLE:
            found.append(replace(one, state=State.COMPLETE, error=_GONE))
        else:
            found.append(one)
    return _newest_first([*found, *unmatched.values()])


def _with_exports(
    settings: Settings, checkpoints: Sequence[CheckpointStatus]
) -> list[CheckpointStatus]:
    directory = os.path.join(settings.memory_root, settings.job)
    return with_exports(checkpoints, read_exports(directory))


def _newest_first(checkpoints: Sequence[CheckpointStatus]) -> list[CheckpointStatus]:
    return newest_first(checkpoints, place_of)


def _of_job(memory: JobMemory) -> list[CheckpointStatus]:
    return [_of_memory(checkpoint) for checkpoint in memory.checkpoints()]


def _of_memory(checkpoint: LocalCheckpoint) -> CheckpointStatus:
    # Only storage knows whether it lies there: `merged` adds that.
    return replace(status_of(checkpoint), places=(MEMORY,), rejected=checkpoint.rejected)


def _of_storage(one: StoredCheckpoint) -> CheckpointStatus:
    manifest = one.manifest
    found = CheckpointStatus(
        name=one.name,
        save_id=one.save_id,
        state=State.DURABLE,
        in_memory=False,
        persist=True,
        nbytes=one.nbytes,
        created=one.created,
        places=(STORAGE,),
        scope=one.scope,
        problem=one.problem,
        rejected=one.rejected,
        is_foreign=manifest is None and not one.problem,
        stored_at=one.modified,
    )
    if manifest is None:
        return found
    return replace(
        found,
        nbytes=manifest.nbytes,
        stage_seconds=manifest.stage_seconds,
        world_size=manifest.world_size,
        step=manifest.step,
        metrics=manifest.metrics,
        generation=manifest.generation,
        count=manifest.count,
        run=manifest.run,
    )
