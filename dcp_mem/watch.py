"""Following checkpoints from outside of the save: their status, and waiting for a state."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dcp_mem import agent
from dcp_mem.bar import Show
from dcp_mem.config import Settings
from dcp_mem.errors import CheckpointNotFound, ConfigError, FlushFailed, ReplicationFailed, WaitTimeout
from dcp_mem.events import log
from dcp_mem.format.histories import Line
from dcp_mem.memory.job import Held, JobMemory
from dcp_mem.memory.locks import is_leased
from dcp_mem.values import CheckpointStatus, State, Transfer

if TYPE_CHECKING:  # it brings torch along, which whoever only looks can do without
    from dcp_mem.saving.values import Caller

_LONGEST_PAUSE = 0.2
_WAKE_EVERY = 2.0
_COMPLAIN_EVERY = 30.0


def status(settings: Settings) -> list[CheckpointStatus]:
    """Every known checkpoint of the job on this node, newest first."""
    memory = JobMemory(settings.memory_root, settings.job)
    present = [status_of(held) for held in memory.held()]
    known = {entry.save_id for entry in present}
    past = [_of_history(line) for line in memory.history() if line.save_id not in known]
    return sorted([*present, *past], key=lambda entry: entry.created, reverse=True)


def agent_log(settings: Settings) -> str:
    return agent.log_path(settings.memory_root)


def record_skipped(caller: Caller, why: str) -> None:
    """Write down a save that never began."""
    if caller.ranks.rank == 0:
        line = Line(caller.name, "", time.time(), outcome="skipped", error=why)
        caller.session.memory.add_to_history(line)


def wait(
    settings: Settings,
    name: str | None,
    state: str,
    timeout: float | None,
    wake: Callable[[bool], None],
    show: Show | None = None,
) -> None:
    """Wait until a checkpoint (None: the newest that is meant for it) has the state. See `MemoryStorageWriter.wait`.

    wake: has the agent look at what is pending; told True, failed flushes are tried again at once.
    show: told of the checkpoint, several times a second.
    """
    if state not in ("complete", "replicated", "durable"):
        raise ConfigError(f"state={state!r}: wait for 'complete', 'replicated' or 'durable'")
    if state == "replicated" and not settings.redundancy:
        raise ConfigError("nothing is replicated: the writer has replicas=0, and no parity")
    if state == "durable" and (settings.url is None or (name is None and settings.persist.wants(None, None) is False)):
        raise ConfigError("nothing becomes durable: the writer has no path, or persist=False")
    before = _refusals(settings)
    _poll(
        lambda: _reached(settings, name, state, before),
        timeout,
        wake,
        f"{name or 'the newest checkpoint'} is not {state} yet",
        settings,
        lambda: _awaited(settings, name, state)[:1],
        show,
    )


def wait_for_all(
    settings: Settings, wake: Callable[[bool], None], show: Show | None = None, timeout: float | None = None
) -> None:
    """Wait until nothing in memory awaits its flush.

    Raises FlushFailed for the newest one that storage refused, WaitTimeout.
    """

    def done() -> bool:
        pending = [held for held in JobMemory(settings.memory_root, settings.job).held() if held.pending]
        refused = [held for held in pending if _is_refused_again(held, before)]
        if refused and len(refused) == len(pending):
            raise FlushFailed(refused[0].name, refused[0].flush.error)
        return not pending

    before = _refusals(settings)
    _poll(
        done,
        timeout,
        wake,
        "not all is flushed",
        settings,
        lambda: [one for one in status(settings) if one.persist],
        show,
    )


def _refusals(settings: Settings) -> dict[str, int]:
    """In how many attempts that began before a wait storage refused, by save id: the next one may succeed.

    One that is under way may have begun before whoever waits had mended what was wrong; a first one is believed.
    """
    found = {}
    for held in JobMemory(settings.memory_root, settings.job).held():
        is_again = held.flush.attempts > 0 and _is_under_way(held)
        if held.flush.outcome == "refused" or is_again:
            found[held.manifest.save_id] = held.flush.attempts + is_again
    return found


def _is_under_way(held: Held) -> bool:
    try:
        return is_leased(held.flushing_path)
    except FileNotFoundError:
        return False


def _is_refused_again(held: Held, before: dict[str, int]) -> bool:
    return held.flush.outcome == "refused" and held.flush.attempts > before.get(held.manifest.save_id, 0)


def _reached(settings: Settings, name: str | None, state: str, before: dict[str, int]) -> bool:
    candidates = _awaited(settings, name, state)
    if not candidates:
        if name is None:
            return True  # nothing was saved that would get there
        where = f"job {settings.job}, which has never saved it on this node"
        raise CheckpointNotFound(name, where, [one.name for one in status(settings)], [])
    newest = candidates[0]
    if state == "replicated":
        return newest.is_replicated or _raise_if_not_replicated(newest)
    if state == "complete" or newest.state is State.DURABLE:
        return newest.state is not State.SKIPPED or newest.in_memory or _raise(newest)
    if newest.state is State.SKIPPED or (not newest.in_memory and newest.persist):
        _raise(newest)
    if not newest.persist:
        raise FlushFailed(newest.name, "it is not meant for storage: persist= chose other saves")
    for held in JobMemory(settings.memory_root, settings.job).held():  # what is told may be newer than its status
        if held.manifest.save_id == newest.save_id and _is_refused_again(held, before):
            raise FlushFailed(held.name, held.flush.error)
    return False


def _raise_if_not_replicated(entry: CheckpointStatus) -> bool:
    if entry.replication_error or not entry.in_memory:
        raise ReplicationFailed(entry.name, entry.replication_error or "it has left memory")
    return False


def _awaited(settings: Settings, name: str | None, state: str) -> list[CheckpointStatus]:
    """What a wait may be for, newest first."""
    return [
        one for one in status(settings) if one.name == name or (name is None and (one.persist or state != "durable"))
    ]


def _raise(entry: CheckpointStatus) -> bool:
    raise FlushFailed(entry.name, entry.error or "it left memory before it was durable")


def _poll(
    done: Callable[[], bool],
    timeout: float | None,
    wake: Callable[[bool], None],
    what: str,
    settings: Settings,
    awaited: Callable[[], Sequence[CheckpointStatus]],
    show: Show | None,
) -> None:
    if done():
        return
    wake(True)
    started = woken = complained = time.monotonic()
    pause = 0.005
    while not _done_and_shown(done, awaited, show):
        now = time.monotonic()
        if timeout is not None and now - started > timeout:
            raise WaitTimeout(f"{what} after {timeout:g} s; {_trouble(settings)}")
        if now - woken > _WAKE_EVERY:
            wake(False)  # should the agent have died
            woken = now
        if now - complained > _COMPLAIN_EVERY:
            log.warning("%s after %.0f s; %s", what, now - started, _trouble(settings))
            complained = now
        time.sleep(pause)
        pause = min(pause * 1.3, _LONGEST_PAUSE)


def _done_and_shown(
    done: Callable[[], bool], awaited: Callable[[], Sequence[CheckpointStatus]], show: Show | None
) -> bool:
    try:
        return done()
    finally:
        if show is not None:
            show(awaited())  # what it ended with as well, good or bad


def _trouble(settings: Settings) -> str:
    errors = [f"{one.name}: {one.error}" for one in status(settings) if one.error and one.in_memory]
    log_file = "" if settings.agent == "thread" else f" (the agent's log: {agent_log(settings)})"
    return (errors[0] if errors else "no error so far") + log_file


def status_of(held: Held) -> CheckpointStatus:
    """What is known of a checkpoint in memory."""
    manifest, flush, replication = held.manifest, held.flush, held.replication
    is_replicated = replication.outcome == "replicated"
    states = {"durable": State.DURABLE, "failed": State.FAILED, "refused": State.FAILED, "skipped": State.SKIPPED}
    return CheckpointStatus(
        name=manifest.name,
        save_id=manifest.save_id,
        state=states.get(flush.outcome, State.REPLICATED if is_replicated else State.COMPLETE),
        in_memory=True,
        persist=manifest.persist,
        nbytes=manifest.nbytes,
        created=manifest.created,
        durable=flush.durable,
        stage_seconds=manifest.stage_seconds,
        flush_seconds=flush.seconds,
        flush_attempts=flush.attempts,
        error=flush.error,
        flush_stage=flush.stage,
        flush_again=flush.again,
        transfer=flush.transfer,
        replicas=replication.copies,
        replication_seconds=replication.seconds,
        replication_error=replication.error,
        parity=replication.parity,
        step=manifest.step,
        metrics=manifest.metrics,
    )


def _of_history(line: Line) -> CheckpointStatus:
    # One that failed and has left memory since will not be tried again.
    states = {"durable": State.DURABLE, "evicted": State.EVICTED, "deleted": State.DELETED}
    return CheckpointStatus(
        name=line.name,
        save_id=line.save_id,
        state=states.get(line.outcome, State.SKIPPED),
        in_memory=False,
        persist=bool(line.save_id) and line.outcome != "evicted",
        nbytes=line.nbytes,
        created=line.created,
        durable=line.durable,
        stage_seconds=line.stage_seconds,
        flush_seconds=line.flush_seconds,
        flush_attempts=line.attempts,
        error=line.error,
        transfer=Transfer(parts=line.parts, retries=line.retries),
    )
