"""Bring to storage what lies complete in this node's memory, from outside of the training loop."""

from __future__ import annotations

import os

from dcp_mem.common.progress_bar import Show
from dcp_mem.common.value_class import value_class
from dcp_mem.common.values import CheckpointStatus, State
from dcp_mem.config import Settings
from dcp_mem.errors import ConfigError, FlushFailed
from dcp_mem.flushing.agent_handle import AgentHandle, is_alive
from dcp_mem.flushing.registration import registration_of
from dcp_mem.memory.locks import job_is_live
from dcp_mem.runtime.states import job_memory, status, wait_for_all
from dcp_mem.storage.destination import refuse_unusable


@value_class
class Flushed:
    name: str
    save_id: str
    nbytes: int
    error: str  # why it isn't durable; "" if it is


def promote(settings: Settings, newest: int | None = None, name: str | None = None) -> list[str]:
    """Mean checkpoints for storage that were saved to stay in memory; return their names. Only this
    node is told: others that hold a checkpoint must be told, too, or their parts never come.
    """
    _check_url(settings)
    memory = job_memory(settings)
    if memory is None:
        return []
    kept = [one for one in memory.checkpoints() if not one.manifest.persist]
    meant = [one for one in kept if name in (None, one.name)]
    return [one.name for one in meant[:newest] if memory.promote(one)]


def _check_url(settings: Settings) -> str:
    if settings.url is None:
        raise ConfigError("nothing can be brought to storage without its URL: give the job's root")
    return settings.url


def flush_now(
    settings: Settings,
    *,
    is_promoted: bool = False,
    show: Show | None = None,
    timeout: float | None = None,
) -> list[Flushed]:
    """Wait until nothing in this node's memory awaits its flush; return what became of each, newest
    first. The node's agent does it, with the credentials of this process. Where a live job's own
    agent knows what is pending (nothing `is_promoted`), it is left to that agent and its
    credentials.
    """
    url, memory = _check_url(settings), job_memory(settings)
    found = [] if memory is None else memory.checkpoints()
    pending = [one.manifest for one in found if one.pending]
    refuse_unusable(url, settings.storage_options, is_flushed_elsewhere=True)
    agent = AgentHandle(settings.memory_root)
    job = os.path.join(settings.memory_root, settings.job)
    is_left_alone = job_is_live(job) and not is_promoted

    def wake(now: bool) -> str:
        # A live job flushes by its agent, or by a thread of its own.
        if is_left_alone and (job_is_live(job) or is_alive(settings.memory_root)):
            return ""
        return agent.wake(registration_of(settings, now=now), is_waiting=True)

    why = ""
    try:
        if pending:
            wait_for_all(settings, wake, show, timeout)
    except FlushFailed as error:
        why = error.reason  # where a checkpoint has no error of its own
    known = {one.save_id: one for one in status(settings)} if pending else {}
    return [
        Flushed(one.name, one.save_id, one.nbytes, _error(known.get(one.save_id), why))
        for one in pending
    ]


def _error(found: CheckpointStatus | None, why: str) -> str:
    if found is None:
        return "it has left memory"
    if found.state is State.DURABLE:
        return ""
    return found.error or why or f"it is {found.state.value}"
