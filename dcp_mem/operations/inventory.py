"""List a job's checkpoints, in this node's memory and on storage, and the jobs in a memory root."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from dcp_mem.common.files import allocated_bytes
from dcp_mem.common.parallel import in_daemons
from dcp_mem.common.value_class import value_class
from dcp_mem.common.values import MEMORY, STORAGE, CheckpointStatus, Outcome, State
from dcp_mem.config import Settings, is_checkpoint_name, job_name
from dcp_mem.errors import CheckpointNotFound, ConfigError
from dcp_mem.format import names
from dcp_mem.memory.exports import read_exports
from dcp_mem.memory.job import JobMemory, jobs_in, last_use
from dcp_mem.memory.locks import job_is_live
from dcp_mem.policy.order import newest_first
from dcp_mem.runtime.states import job_memory, place_of, status_of, with_exports
from dcp_mem.storage import OfOneFile, StoredFiles
from dcp_mem.storage.listing import (
    Snapshot,
    StoredCheckpoint,
    checkpoint_names,
    committed_under,
    unreadable,
)
from dcp_mem.storage.retry import RETRIES, RetryPolicy
from dcp_mem.storage.routes import storage_of

_GONE = "storage has it no more"


@value_class
class LastDurable:
    """The checkpoint that became durable last, and when."""

    name: str
    at: float


@value_class(kw_only=True)
class Job:
    """A job's part of a node's memory."""

    name: str  # the job's name; its directory in the memory root is called so
    is_live: bool
    nbytes: int
    last_use: float  # when it last saved, in seconds since the epoch
    checkpoints: tuple[CheckpointStatus, ...]  # what it has there, newest first
    durable: LastDurable | None


def list_checkpoints(
    settings: Settings, *, retry_policy: RetryPolicy = RETRIES
) -> list[CheckpointStatus]:
    """List a job's checkpoints in this node's memory and on storage, newest first. A checkpoint
    that lies in both is listed once.
    """
    local, storage = in_memory(settings), storage_of(settings, retry_policy)
    if storage is None:
        return _with_exports(settings, local)
    is_directory = storage.url.startswith("/")
    found = on_storage(storage if is_directory else Snapshot(storage))
    return _with_exports(settings, merged(local, found))


def searched_places(settings: Settings) -> str:
    """Return where a job's checkpoints are looked for, for messages."""
    return f"memory (job {settings.job})" + (f" and {settings.url}" if settings.url else "")


def refuse_memory_as_root(settings: Settings) -> None:
    """Raise ConfigError where the root is a directory of memory, which isn't storage."""
    url = settings.url or ""
    parent = os.path.dirname(url)
    for directory in (url, parent):
        if directory.startswith("/") and os.path.isdir(os.path.join(directory, ".slots")):
            memory_root, job = os.path.split(directory)
            raise ConfigError(
                f"{url} is memory of job {job}, not its root on storage: give "
                f"--memory-root {memory_root} --job {job} in its place"
            )


def refuse_checkpoint_as_root(settings: Settings, retry_policy: RetryPolicy = RETRIES) -> None:
    """Raise ConfigError where the root, which has no checkpoints, is one's directory."""
    refuse_memory_as_root(settings)
    parent, _, name = (settings.url or "").rpartition("/")
    storage = storage_of(settings, retry_policy)
    if storage is None or not parent.strip(":/"):
        return
    if any(entry.name == names.metadata_file(names.COLLECTIVE) for entry in storage.ls("")):
        raise ConfigError(
            f"{settings.url} is the checkpoint {name} of job {job_name(None, parent)}: give the "
            f"job's root, {parent}"
        )


def find_all(
    checkpoints: Sequence[CheckpointStatus], wanted: Sequence[str], settings: Settings
) -> list[CheckpointStatus]:
    """Return for each name its newest checkpoint, or the one of a save id or step, of a job's."""
    known: dict[str, CheckpointStatus] = {}
    for one in checkpoints:
        known.setdefault(one.name, one)
        known.setdefault(one.save_id or one.name, one)
    for number in set(filter(str.isdecimal, wanted)) - known.keys():
        step = int(number)
        of_step = {one.name for one in checkpoints if one.step == step}
        if f"step-{step}" in known:
            of_step = {f"step-{step}"}
        if len(of_step) > 1:
            raise ConfigError(
                f"{number} is the step of {', '.join(sorted(of_step))}: give one of them"
            )
        known.update((number, known[name]) for name in of_step)
    missing = [
        f"step-{int(name)}" if name.isdecimal() else name for name in wanted if name not in known
    ]
    if missing:
        available = list(dict.fromkeys(one.name for one in checkpoints))
        raise CheckpointNotFound(", ".join(missing), searched_places(settings), available, [])
    return [known[name] for name in wanted]


def find_one(
    settings: Settings, name: str, *, retry_policy: RetryPolicy = RETRIES
) -> CheckpointStatus:
    """Return what `find_all` does, and look at other checkpoints only where that is needed."""
    # A number may be a step, or a save id.
    is_name = is_checkpoint_name(name) and not name.isdecimal()
    storage = storage_of(settings, retry_policy) if is_name else None
    if storage is not None:
        local = [one for one in in_memory(settings) if one.name == name]
        found = merged(local, stored(_under(storage, name)))
        if found:
            return _with_exports(settings, found[:1])[0]
    known = list_checkpoints(settings, retry_policy=retry_policy)
    return find_all(known, [name], settings)[0]


def counts(one: CheckpointStatus) -> bool:
    """Return whether all ranks saved it, and nothing is known to keep it from being read."""
    is_readable = MEMORY in one.places or not one.problem
    return is_readable and one.scope == names.COLLECTIVE and not one.is_foreign


def may_be_resumed_from(one: CheckpointStatus) -> bool:
    """Return whether it counts, and nobody has rejected it: such a one is read by its name."""
    return counts(one) and not one.rejected


def list_jobs(memory_root: str) -> list[Job]:
    """List the jobs that have memory in a root, the one that saved last first."""
    found = [job_in(JobMemory(memory_root, name)) for name in jobs_in(memory_root)]
    return sorted(found, key=lambda job: job.last_use, reverse=True)


def job_in(memory: JobMemory) -> Job:
    checkpoints = tuple(_of_job(memory))
    durable = [(one.durable, one.name) for one in checkpoints if one.state is State.DURABLE]
    rows = memory.history.rows()
    durable += [(row.durable, row.name) for row in rows if row.outcome == Outcome.DURABLE]
    when, name = max(durable, default=(0.0, ""))
    return Job(
        name=memory.job,
        checkpoints=checkpoints,
        is_live=job_is_live(memory.directory),
        nbytes=allocated_bytes(memory.directory),
        last_use=last_use(memory.directory),
        durable=LastDurable(name, when) if name else None,
    )


def in_memory(settings: Settings) -> list[CheckpointStatus]:
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
    return newest_first([_of_storage(one) for one in found], place_of)


def merged(
    local: Sequence[CheckpointStatus], remote: Sequence[CheckpointStatus]
) -> list[CheckpointStatus]:
    """Join the checkpoints of memory and of storage, newest first. Storage decides what is durable:
    what memory takes to be durable and storage lacks is complete. That is no damage: retention on
    storage may have deleted it.
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
    return newest_first([*found, *unmatched.values()], place_of)


def _with_exports(
    settings: Settings, checkpoints: Sequence[CheckpointStatus]
) -> list[CheckpointStatus]:
    directory = os.path.join(settings.memory_root, settings.job)
    return with_exports(checkpoints, read_exports(directory))


def _of_job(memory: JobMemory) -> list[CheckpointStatus]:
    # Only storage knows whether a checkpoint lies there: `merged` adds that.
    return [
        replace(status_of(one), places=(MEMORY,), rejected=one.rejected)
        for one in memory.checkpoints()
    ]


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
