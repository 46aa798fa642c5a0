"""Bringing to storage, from outside of the training loop, what lies complete in this node's memory."""

from __future__ import annotations

import os
from dataclasses import dataclass

from dcp_mem.agent import AgentHandle
from dcp_mem.bar import Show
from dcp_mem.config import Settings
from dcp_mem.errors import ConfigError, FlushFailed
from dcp_mem.flushing.flusher import registration_of
from dcp_mem.memory.locks import job_is_live
from dcp_mem.operating.inventory import job_memory
from dcp_mem.values import CheckpointStatus, State
from dcp_mem.watch import status, wait_for_all


@dataclass(frozen=True, slots=True)
class Flushed:
    """What became of a checkpoint that awaited its flush. error: why it isn't durable ("" if it is)."""

    name: str
    save_id: str
    nbytes: int
    error: str


def promote(settings: Settings, newest: int | None = None) -> list[str]:
    """Mean checkpoints for storage that were saved to stay in memory; returns the names of those that are now.

    newest: only so many of them. It is this node's word alone: of a checkpoint that several nodes hold, each of them has to be
    told, or their part never comes. Raises ConfigError for a job without a URL.
    """
    if settings.url is None:
        raise ConfigError("nothing can be brought to storage without its URL: give the job's root")
    memory = job_memory(settings)
    kept = [] if memory is None else [held for held in memory.held() if not held.manifest.persist]
    return [held.name for held in kept[:newest] if memory is not None and memory.promote(held)]


def flush_now(
    settings: Settings, *, is_promoted: bool = False, show: Show | None = None, timeout: float | None = None
) -> list[Flushed]:
    """Wait until nothing in this node's memory awaits its flush; what became of each that did, newest first.

    The node's agent does it, with the credentials of this process; where a live job's own agent knows what is pending, it is left
    to that and its credentials. is_promoted: some of it the job doesn't know of. timeout: seconds. Raises WaitTimeout,
    ConfigError for a job without a URL.
    """
    if settings.url is None:
        raise ConfigError("nothing can be brought to storage without its URL: give the job's root")
    memory = job_memory(settings)
    pending = [] if memory is None else [held.manifest for held in memory.held() if held.pending]
    agent = AgentHandle(settings.memory_root)
    is_left_alone = job_is_live(os.path.join(settings.memory_root, settings.job)) and not is_promoted

    def wake(now: bool) -> None:
        if not is_left_alone:
            agent.wake(registration_of(settings, now=now))

    try:
        if pending:
            wait_for_all(settings, wake, show, timeout)
    except FlushFailed:
        pass  # what is said of each checkpoint says it
    known = {one.save_id: one for one in status(settings)} if pending else {}
    return [Flushed(one.name, one.save_id, one.nbytes, _error(known.get(one.save_id))) for one in pending]


def _error(found: CheckpointStatus | None) -> str:
    if found is None:
        return "it has left memory"
    return "" if found.state is State.DURABLE else found.error or f"it is {found.state.value}"
