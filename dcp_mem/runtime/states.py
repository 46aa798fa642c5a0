"""Following checkpoints from outside of a save: their status, and waiting for a state."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from dcp_mem.common import files
from dcp_mem.common.log import log
from dcp_mem.common.progress_bar import Show
from dcp_mem.common.values import (
    MEMORY,
    STORAGE,
    CheckpointStatus,
    ExportState,
    Outcome,
    State,
    Transfer,
)
from dcp_mem.config import Settings, exchange_timeout
from dcp_mem.errors import (
    CheckpointNotFound,
    ConfigError,
    FlushFailed,
    ReplicationFailed,
    WaitTimeout,
)
from dcp_mem.flushing import agent_handle
from dcp_mem.format.history import HistoryRow
from dcp_mem.format.manifest import Manifest
from dcp_mem.memory.checkpoint import LocalCheckpoint
from dcp_mem.memory.exports import ExportRecords, read_exports, unseen
from dcp_mem.memory.job import JobMemory
from dcp_mem.policy.order import Place, SaveNumber, newest_first
from dcp_mem.runtime.agent_link import left_without_agent, with_remains

_FIRST_PAUSE = 0.005
_LONGEST_PAUSE = 0.2
_WAKE_EVERY = 2.0
_COMPLAIN_EVERY = 30.0
_ABSENT_SECONDS, _ABSENT_TRIES = 60.0, 5
"""The longest wait for an agent that doesn't answer, and whose checkpoints get no further; the
fewest tries to wake it in that time: this process may have been stopped itself."""

_AWAITABLE = (State.COMPLETE, State.REPLICATED, State.DURABLE)

Wake = Callable[[bool], str]
"""Has the agent look at what is pending; with True it tries at once again what failed.

Returns why there is no agent that answers, as `AgentHandle.wake`; "" where there is one."""


def status(settings: Settings) -> list[CheckpointStatus]:
    """Return every known checkpoint of the job on this node, newest first."""
    return _status(JobMemory(settings.memory_root, settings.job))


def job_memory(settings: Settings) -> JobMemory | None:
    """Return the job's memory on this node; None where it has none, and none is made."""
    slots = os.path.join(settings.memory_root, settings.job, ".slots")
    return JobMemory(settings.memory_root, settings.job) if os.path.isdir(slots) else None


def _status(memory: JobMemory) -> list[CheckpointStatus]:
    present = [status_of(checkpoint) for checkpoint in memory.checkpoints()]
    known = {entry.save_id for entry in present}
    past = [_of_history(row) for row in memory.history.rows() if row.save_id not in known]
    found = with_exports([*present, *past], read_exports(memory.directory))
    return newest_first(found, place_of)


def summary(of: object, settings: Settings, loaded: str = "") -> str:
    """Return the repr of what a job is saved or read with: its root, name, and what this node's
    memory knows to be newest.
    """
    newest = ""
    with suppress(Exception):  # whatever a repr is made of: it never raises
        newest = next((f", newest {one.name}" for one in status(settings)), "")
    where = settings.url or "memory only"
    return f"<{type(of).__name__} {where}, job {settings.job}{newest}{loaded}>"


def with_exports(
    entries: Sequence[CheckpointStatus], exports: ExportRecords
) -> list[CheckpointStatus]:
    """Return the entries with what became of their exports."""
    records = {one.save_id: one for one in exports.records}
    return [
        entry
        if (record := records.get(entry.save_id)) is None
        else replace(
            entry,
            export=record.state,
            exported_to=record.target,
            export_error=record.error,
        )
        for entry in entries
    ]


def agent_log(settings: Settings) -> str:
    """Return the path of the file where this node's agent writes what it does."""
    return agent_handle.log_path(settings.memory_root)


def wait(
    settings: Settings,
    name: str | None,
    state: State | str,
    *,
    timeout: float | None,
    wake: Wake,
    show: Show | None = None,
) -> None:
    """Wait until a checkpoint has reached a state; raise what `MemoryStorageWriter.wait` raises.

    `name`: of the checkpoint; None for the newest one that is meant to reach the state. `timeout`:
    seconds; None waits for as long as there is hope. Raises ConfigError.
    """
    wanted = _awaitable(state)
    if wanted is State.REPLICATED and not settings.redundancy:
        raise ConfigError("nothing is replicated: the writer has replicas=0, and no parity")
    is_never_durable = settings.url is None or (name is None and settings.persist.is_never)
    if wanted is State.DURABLE and is_never_durable:
        raise ConfigError("nothing becomes durable: the writer has no path, or persist=False")
    memory = JobMemory(settings.memory_root, settings.job)
    patience = AgentPatience(settings, wake)
    _wait_until(
        lambda: _has_reached(memory, name, wanted, patience),
        f"{name or 'the newest checkpoint'} is not {wanted.value} yet",
        settings,
        patience,
        awaited=lambda: _candidates(memory, name, wanted)[:1],
        show=show,
        timeout=timeout,
        state=wanted,
    )


def _awaitable(state: State | str) -> State:
    """Return the state that is meant. Raises ConfigError for those that can't be waited for."""
    for one in _AWAITABLE:
        if state == one:
            return one
    text = state.value if isinstance(state, State) else state
    raise ConfigError(f"state={text!r}: wait for 'complete', 'replicated' or 'durable'")


def promote_newest(settings: Settings) -> frozenset[str]:
    """Have the newest checkpoint in memory flushed that was to stay there, of each scope.

    Returns the save ids of those; empty where storage has them, or is to get them anyway.
    """
    memory = JobMemory(settings.memory_root, settings.job)
    newest: dict[str, LocalCheckpoint] = {}
    for checkpoint in memory.checkpoints():
        newest.setdefault(checkpoint.manifest.scope, checkpoint)
    return frozenset(
        one.manifest.save_id
        for one in newest.values()
        if not one.manifest.persist and memory.promote(one)
    )


def wait_for_all(
    settings: Settings,
    wake: Wake,
    show: Show | None = None,
    timeout: float | None = None,
    *,
    promoted: Collection[str] = (),
) -> None:
    """Wait until nothing in memory awaits its flush.

    `timeout`: seconds; None waits for as long as there is hope. `promoted`: save ids of checkpoints
    that were to stay in memory. Other nodes may not have been told, so these are given up where
    they fail for longer than ranks wait for each other. Raises FlushFailed, WaitTimeout.
    """
    memory = JobMemory(settings.memory_root, settings.job)
    patience, ends = AgentPatience(settings, wake), time.monotonic() + exchange_timeout()

    def is_given_up(checkpoint: LocalCheckpoint) -> bool:
        has_failed = checkpoint.flush.outcome == Outcome.FAILED
        is_late = has_failed and time.monotonic() > ends
        return (is_late and checkpoint.manifest.save_id in promoted) or patience.is_refused(
            checkpoint
        )

    def is_over() -> bool:
        pending = [checkpoint for checkpoint in memory.checkpoints() if checkpoint.pending]
        given_up = [checkpoint for checkpoint in pending if is_given_up(checkpoint)]
        if given_up and len(given_up) == len(pending):
            why = given_up[0].flush.error.rstrip(".")
            raise FlushFailed(given_up[0].name, with_remains(settings, given_up, why))
        return not pending

    _wait_until(
        is_over,
        "not all is flushed",
        settings,
        patience,
        awaited=lambda: [entry for entry in _status(memory) if entry.persist],
        show=show,
        timeout=timeout,
    )


def wait_for_exports(settings: Settings, wake: Wake) -> None:
    """Wait until each export of this node has been tried; log those that have failed."""
    order = settings.export
    if order is None:
        return
    memory = JobMemory(settings.memory_root, settings.job)

    def is_over() -> bool:
        records = read_exports(memory.directory)
        return not records.is_under_way and not unseen(memory, records, order)

    what = f"exports to {order.to} aren't made"
    patience = AgentPatience(settings, wake)
    _wait_until(is_over, what, settings, patience, ends_without_agent=True)
    for one in read_exports(memory.directory).records:
        if one.state is ExportState.FAILED:
            text = "%s isn't exported so far, the agent tries again: %s"
            log.warning(text, one.name, one.error)


class AgentPatience:
    """Wakes the agent, and tells when to wait no longer for one that can't start or is stopped.

    Of refusals it counts those of attempts that began once the agent had been woken: only these
    know what the user has mended.
    """

    def __init__(self, settings: Settings, wake: Wake) -> None:
        self._settings, self._wake, self._answered = settings, wake, math.inf
        self._seconds = min(_ABSENT_SECONDS, exchange_timeout())
        self._woken: float | None = None
        self._since, self._tries = 0.0, 0
        self._seen: Sequence[CheckpointStatus] = ()

    def ended_by(self) -> str:
        """Wake the agent if it is time to; return why there is none, once patience is over."""
        now = time.monotonic()
        pause = min(_WAKE_EVERY, self._seconds / _ABSENT_TRIES)
        if self._woken is not None and now - self._woken < pause:
            return ""
        why_not = self._wake(self._woken is None)
        self._woken = now = time.monotonic()
        if not why_not:
            self._tries, self._answered = 0, min(self._answered, now)
            return ""
        seen = status(self._settings)
        if not self._tries or seen != self._seen:  # a busy one may answer late
            self._since, self._tries, self._seen = now, 0, seen
        self._tries += 1
        is_over = self._tries > _ABSENT_TRIES and now - self._since > self._seconds
        return why_not if is_over else ""

    def is_refused(self, checkpoint: LocalCheckpoint) -> bool:
        """Return whether storage refuses a checkpoint as things are now."""
        flush = checkpoint.flush
        return flush.outcome == Outcome.REFUSED and flush.begun >= self._answered


# -- how far a checkpoint is -----------------------------------------------------------------------


def _has_reached(
    memory: JobMemory, name: str | None, wanted: State, patience: AgentPatience
) -> bool:
    """Tell whether the checkpoint has reached the state; raise if it never will."""
    candidates = _candidates(memory, name, wanted)
    if not candidates:
        if name is None:
            return True  # nothing was saved that would get there
        where = f"job {memory.job}, which has never saved it on this node"
        raise CheckpointNotFound(name, where, [entry.name for entry in _status(memory)], [])
    newest = candidates[0]
    if wanted is State.REPLICATED:
        return _is_replicated(newest)
    if wanted is State.COMPLETE or newest.state is State.DURABLE:
        if newest.state is State.SKIPPED and not newest.in_memory:
            raise _flush_failed(newest)
        return wanted is State.COMPLETE or not _is_pending_beside(memory, newest, patience)
    if newest.state is State.SKIPPED or (not newest.in_memory and newest.persist):
        raise _flush_failed(newest)
    if not newest.persist:
        raise FlushFailed(newest.name, "it is not meant for storage: persist= chose other saves")
    # Looked at again: what memory says may be newer than the status.
    for checkpoint in memory.checkpoints():
        is_same_save = checkpoint.manifest.save_id == newest.save_id
        if is_same_save and patience.is_refused(checkpoint):
            raise FlushFailed(checkpoint.name, checkpoint.flush.error)
    return False


def _is_pending_beside(memory: JobMemory, entry: CheckpointStatus, patience: AgentPatience) -> bool:
    """Tell whether others of the same name await their flush: ranks that save alone have one each.

    Raises FlushFailed where storage refuses one of them.
    """
    pending = [
        one
        for one in memory.find(entry.name)
        if one.pending and one.manifest.save_id != entry.save_id
    ]
    for checkpoint in pending:
        if patience.is_refused(checkpoint):
            raise FlushFailed(checkpoint.name, checkpoint.flush.error)
    return bool(pending)


def _is_replicated(entry: CheckpointStatus) -> bool:
    """Tell whether it survives the loss of a node; raise ReplicationFailed if it never will."""
    if not entry.is_replicated and (entry.replication_error or not entry.in_memory):
        raise ReplicationFailed(entry.name, entry.replication_error or "it has left memory")
    return entry.is_replicated


def _flush_failed(entry: CheckpointStatus) -> FlushFailed:
    return FlushFailed(entry.name, entry.error or "it left memory before it was durable")


def _candidates(memory: JobMemory, name: str | None, wanted: State) -> list[CheckpointStatus]:
    """Return the checkpoints that a wait may be for, newest first."""
    return [
        entry
        for entry in _status(memory)
        if entry.name == name or (name is None and (entry.persist or wanted is not State.DURABLE))
    ]


# -- waiting ---------------------------------------------------------------------------------------


def _wait_until(
    is_over: Callable[[], bool],
    what: str,
    settings: Settings,
    patience: AgentPatience,
    *,
    awaited: Callable[[], Sequence[CheckpointStatus]] = list,
    show: Show | None = None,
    timeout: float | None = None,
    state: State = State.DURABLE,
    ends_without_agent: bool = False,
) -> None:
    """Wait until something has happened in the job's memory.

    `is_over`: returns whether it has; raises where it never will. `show`: shown what is `awaited`
    several times a second. `state`: what is awaited; an agent only makes checkpoints durable.
    `ends_without_agent`: where nothing in memory awaits it. Raises WaitTimeout, FlushFailed.
    """
    if is_over():
        return

    def is_over_and_shown() -> bool:
        try:
            return is_over()
        finally:
            if show is not None:
                show(awaited())  # the end as well, good or bad

    patience.ended_by()
    started = complained = time.monotonic()
    pause = _FIRST_PAUSE
    while not is_over_and_shown():
        now = time.monotonic()
        if timeout is not None and now - started > timeout:
            raise WaitTimeout(f"{what} after {timeout:g} s; {_trouble(settings)}")
        # The agent may have died.
        if (why_not := patience.ended_by()) and state is State.DURABLE:
            left, text = left_without_agent(settings, why_not)
            if left:
                raise FlushFailed(left[0].name, text)
            if ends_without_agent:
                log.error("%s: the agent %s", what, why_not)
                return
        if now - complained > _COMPLAIN_EVERY:
            log.warning("%s after %.0f s; %s", what, now - started, _trouble(settings))
            complained = now
        time.sleep(pause)
        pause = min(pause * 1.3, _LONGEST_PAUSE)


def _trouble(settings: Settings) -> str:
    errors = [
        f"{entry.name}: {entry.error}"
        for entry in status(settings)
        if entry.error and entry.in_memory
    ]
    log_file = "" if settings.agent == "thread" else f" (the agent's log: {agent_log(settings)})"
    if errors:
        return errors[0] + log_file
    told = "no error so far"
    if files.is_full(settings.memory_root):
        told += (
            f", but {settings.memory_root} is full, and the agent can't write down there how far "
            "it is: remove other files, or mount a larger tmpfs"
        )
    return told + log_file


# -- status ----------------------------------------------------------------------------------------


def status_of(checkpoint: LocalCheckpoint) -> CheckpointStatus:
    """Return what is known of a checkpoint in memory."""
    manifest, flush, replication = checkpoint.manifest, checkpoint.flush, checkpoint.replication
    is_replicated = replication.outcome == Outcome.REPLICATED
    states = {
        Outcome.DURABLE.value: State.DURABLE,
        Outcome.FAILED.value: State.FAILED,
        Outcome.REFUSED.value: State.FAILED,
        Outcome.SKIPPED.value: State.SKIPPED,
    }
    return CheckpointStatus(
        **_of_save(manifest),
        state=states.get(flush.outcome, State.REPLICATED if is_replicated else State.COMPLETE),
        in_memory=True,
        persist=manifest.persist,
        durable=flush.durable,
        flush_seconds=flush.seconds,
        flush_attempts=flush.attempts,
        error=flush.error,
        flush_stage=flush.stage,
        flush_again=flush.again,
        transfer=flush.transfer,
        replicas=replication.copies,
        replication_seconds=replication.seconds,
        replication_sent_nbytes=replication.sent_nbytes,
        replication_reused_nbytes=replication.reused_nbytes,
        replication_error=replication.error,
        parity=replication.parity,
        places=(MEMORY, STORAGE) if flush.outcome == Outcome.DURABLE else (MEMORY,),
        scope=manifest.scope,
        world_size=manifest.world_size,
    )


_OF_SAVE = ("name", "save_id", "nbytes", "created", "stage_seconds", "step", "metrics")
_OF_NUMBER = ("generation", "count", "run")


def _of_save(known: Manifest | HistoryRow) -> dict[str, Any]:
    """Return what a manifest and a history say of a save, under the names of `CheckpointStatus`."""
    return {name: getattr(known, name) for name in (*_OF_SAVE, *_OF_NUMBER)}


def place_of(entry: CheckpointStatus) -> Place:
    """Return what the order of the job's checkpoints goes by."""
    return Place(
        number=SaveNumber(entry.generation, entry.count),
        run=entry.run,
        time=entry.created,
        stored_at=entry.stored_at,
        is_foreign=entry.is_foreign or not entry.save_id,
        step=entry.step,
        key=(entry.name, entry.save_id, entry.scope),
    )


def _of_history(row: HistoryRow) -> CheckpointStatus:
    # One that failed and has left memory since will not be tried again.
    states = {
        Outcome.DURABLE.value: State.DURABLE,
        Outcome.EVICTED.value: State.EVICTED,
        Outcome.DELETED.value: State.DELETED,
    }
    return CheckpointStatus(
        **_of_save(row),
        state=states.get(row.outcome, State.SKIPPED),
        in_memory=False,
        persist=bool(row.save_id) and row.outcome != Outcome.EVICTED,
        durable=row.durable,
        flush_seconds=row.flush_seconds,
        flush_attempts=row.attempts,
        error=row.error,
        transfer=Transfer(
            parts=row.parts,
            retries=row.retries,
            sent_nbytes=row.sent_nbytes,
            reused_nbytes=row.reused_nbytes,
        ),
    )
