"""Checkpoints that all ranks delete or reject together."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from dcp_mem.comm import Ranks
from dcp_mem.comm.agreement import described, from_all_ranks, leaving_on_error
from dcp_mem.common.values import Outcome
from dcp_mem.config import Settings
from dcp_mem.errors import CheckpointNotFound, DcpMemError, RankFailed
from dcp_mem.memory.job import JobMemory
from dcp_mem.operations import housekeeping
from dcp_mem.operations.inventory import list_checkpoints
from dcp_mem.runtime.states import job_memory

_BUSY_SECONDS = 60.0
_PAUSE = 0.05


def reject(settings: Settings, ranks: Ranks, name: str, why: str) -> None:
    """Mark a checkpoint in memory and on storage. Raises CheckpointNotFound, RankFailed."""
    _everywhere(
        settings,
        ranks,
        name,
        "rejecting",
        lambda: housekeeping.reject_in_memory(settings, name, why),
        lambda: housekeeping.reject_on_storage(settings, name, why),
    )


def delete(settings: Settings, ranks: Ranks, name: str) -> None:
    """Delete a checkpoint everywhere. Raises CheckpointNotFound, RankFailed."""
    _everywhere(
        settings,
        ranks,
        name,
        "deleting",
        lambda: _evict(settings, name),
        lambda: housekeeping.delete_stored(settings, name),
    )


def _everywhere(
    settings: Settings,
    ranks: Ranks,
    name: str,
    doing: str,
    in_memory: Callable[[], bool],
    on_storage: Callable[[], bool],
) -> None:
    """Act in memory on every rank, then on storage on rank 0; both return whether it was there.
    Raise on all ranks where one fails, or it was nowhere.
    """
    what = f"{doing} {name}"
    try:
        with leaving_on_error(ranks):
            is_found = from_all_ranks(
                ranks, what, in_memory, lambda were_there: on_storage() or any(were_there)
            )
    except RankFailed:
        raise
    except Exception as error:
        raise RankFailed(what, [(ranks.rank, described(error))]) from error
    if not is_found:
        available = [one.name for one in list_checkpoints(settings)]
        raise CheckpointNotFound(name, f"job {settings.job}", available, [])


def _evict(settings: Settings, name: str) -> bool:
    memory, deadline = job_memory(settings), time.monotonic() + _BUSY_SECONDS
    if memory is None or not memory.find(name):
        return False
    while True:
        _, why_not = housekeeping.evict(settings, name)
        if not why_not:
            return True
        if time.monotonic() > deadline:
            _give_up(memory, name)
            raise DcpMemError(f"{name}: {why_not}")
        time.sleep(_PAUSE)


def _give_up(memory: JobMemory, name: str) -> None:
    """Reject what can't be evicted here, unless storage has it: other nodes may have dropped their
    parts, so it can neither be loaded nor flushed, and nobody is to wait for that.
    """
    for one in memory.find(name):
        if one.flush.outcome != Outcome.DURABLE and len(one.manifest.nodes) > 1:
            with contextlib.suppress(FileNotFoundError):  # it has gone just now
                memory.reject(one, "its deletion has failed on this node; delete it again")
