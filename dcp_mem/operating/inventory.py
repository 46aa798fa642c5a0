"""What there is of a job: its checkpoints in this node's memory and on storage, and the jobs in a memory root."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from dcp_mem.config import Settings
from dcp_mem.errors import CheckpointNotFound
from dcp_mem.files import allocated_bytes
from dcp_mem.format import names
from dcp_mem.memory.job import Held, JobMemory, jobs_in, last_use
from dcp_mem.memory.locks import job_is_live
from dcp_mem.storage import Storage
from dcp_mem.storage.listing import Stored, checkpoint_names, committed_under, in_parallel
from dcp_mem.storage.patient import PATIENCE, Patience
from dcp_mem.storage.routes import open_storage
from dcp_mem.values import State
from dcp_mem.watch import status_of

MEMORY, STORAGE = "memory", "storage"
_GONE = "storage has it no more"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One checkpoint, wherever it lies.

    save_id: "" for one without a manifest of ours. scope: "", or the rank that saved alone ("r3"). step, metrics: what the
    training loop said of it. created: seconds since the epoch. nbytes: all ranks' segments together. world_size: 0 where it
    isn't known. state: DURABLE where storage has it committed; else what this node's memory says. places: MEMORY, STORAGE or
    both. persist: it is meant for storage. error: of its last flush. problem: what is wrong with what is there ("": nothing that
    is known). is_foreign: torch's own writer made it.
    """

    name: str
    save_id: str
    created: float
    nbytes: int
    state: State
    places: tuple[str, ...]
    scope: str = names.COLLECTIVE
    world_size: int = 0
    step: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    persist: bool = True
    error: str = ""
    problem: str = ""
    is_foreign: bool = False

    @property
    def is_durable(self) -> bool:
        """Whether storage has it, with nothing that is known to be wrong."""
        return STORAGE in self.places and not self.problem


@dataclass(frozen=True, slots=True)
class Job:
    """A job's part of a node's memory.

    is_live: a process holds it. nbytes: what it occupies. last_use: when it last saved, in seconds since the epoch.
    """

    name: str
    is_live: bool
    nbytes: int
    last_use: float
    checkpoints: tuple[Checkpoint, ...]


def inventory(settings: Settings, *, patience: Patience = PATIENCE) -> list[Checkpoint]:
    """Every checkpoint of a job, in this node's memory and on storage, newest first; needs no process group.

    What lies in both is one. Without a URL in the settings, storage isn't asked. patience: with storage that doesn't answer.
    Raises StorageUnavailable, StorageRefused, MemoryRootRefused, MemoryUnavailable.
    """
    held = in_memory(settings)
    if settings.url is None:
        return held
    storage = open_storage(settings.url, settings.storage_options, patience)
    return merged(held, on_storage(storage))


def find(checkpoints: list[Checkpoint], name: str, where: str) -> Checkpoint:
    """The newest checkpoint of that name, or the one of that save id. Raises CheckpointNotFound, which lists what there is."""
    for one in checkpoints:
        if name in (one.name, one.save_id):
            return one
    raise CheckpointNotFound(name, where, list(dict.fromkeys(one.name for one in checkpoints)), [])


def jobs(memory_root: str) -> list[Job]:
    """The jobs that have memory in this root, the one that saved last first. Raises MemoryRootRefused, MemoryUnavailable."""
    found = []
    for name in jobs_in(memory_root):
        directory = os.path.join(memory_root, name)
        checkpoints = tuple(_in(JobMemory(memory_root, name)))
        found.append(Job(name, job_is_live(directory), allocated_bytes(directory), last_use(directory), checkpoints))
    return sorted(found, key=lambda job: job.last_use, reverse=True)


def job_memory(settings: Settings) -> JobMemory | None:
    """The job's memory on this node, where it has any; nothing is made for one that has none."""
    directory = os.path.join(settings.memory_root, settings.job)
    return JobMemory(settings.memory_root, settings.job) if os.path.isdir(os.path.join(directory, ".slots")) else None


def in_memory(settings: Settings) -> list[Checkpoint]:
    """The checkpoints in this node's memory, newest first."""
    memory = job_memory(settings)
    return [] if memory is None else _in(memory)


def on_storage(storage: Storage) -> list[Checkpoint]:
    """What is committed on storage, newest first; several names are asked about at once."""
    found = in_parallel(lambda name: committed_under(storage, name), checkpoint_names(storage))
    return stored([one for under in found for one in under])


def stored(found: Sequence[Stored]) -> list[Checkpoint]:
    """What a listing has found, newest first."""
    return _newest_first([_stored(one) for one in found])


def merged(held: list[Checkpoint], on_storage: list[Checkpoint]) -> list[Checkpoint]:
    """Both places' checkpoints as one list, newest first. What memory takes to be durable and storage lacks says so."""
    there = {(one.name, one.save_id, one.scope): one for one in on_storage}
    found = []
    for one in held:
        same = there.pop((one.name, one.save_id, one.scope), None)
        if same is not None:
            found.append(replace(one, state=State.DURABLE, places=(MEMORY, STORAGE), error="", problem=same.problem))
        elif one.state is State.DURABLE:
            found.append(replace(one, state=State.COMPLETE, problem=_GONE))
        else:
            found.append(one)
    return _newest_first([*found, *there.values()])


def _newest_first(checkpoints: list[Checkpoint]) -> list[Checkpoint]:
    return sorted(checkpoints, key=lambda one: (one.created, one.name), reverse=True)


def _in(memory: JobMemory) -> list[Checkpoint]:
    return [_held(held) for held in memory.held()]


def _held(held: Held) -> Checkpoint:
    status, manifest = status_of(held), held.manifest
    return Checkpoint(
        status.name,
        status.save_id,
        status.created,
        status.nbytes,
        status.state,
        (MEMORY,),
        manifest.scope,
        manifest.world_size,
        status.step,
        status.metrics,
        status.persist,
        status.error,
    )


def _stored(one: Stored) -> Checkpoint:
    found = Checkpoint(
        one.name, one.save_id, one.created, one.nbytes, State.DURABLE, (STORAGE,), one.scope, problem=one.problem
    )
    if one.manifest is None:
        return replace(found, is_foreign=not one.problem)
    manifest = one.manifest
    return replace(
        found,
        nbytes=manifest.nbytes,
        world_size=manifest.world_size,
        step=manifest.step,
        metrics=manifest.metrics,
    )
