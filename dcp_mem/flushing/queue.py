"""What of one job awaits its flush, how often that was tried, and when it is due again."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field

from dcp_mem.common.log import log
from dcp_mem.common.values import Outcome
from dcp_mem.errors import DcpMemError
from dcp_mem.flushing.parts import has_new_catalog
from dcp_mem.format.history import row_of
from dcp_mem.format.manifest import FlushRecord
from dcp_mem.memory.checkpoint import LocalCheckpoint
from dcp_mem.memory.job import JobMemory
from dcp_mem.memory.locks import job_is_live, saving_run

_DEAD_JOB_SECONDS = 3600.0
"""Seconds for which failing flushes of a job without trainers are tried again."""
_DEAD_JOB_REFUSALS = 3


@dataclass(slots=True, kw_only=True)
class FlushState:
    """The state of one checkpoint's flush so far. Times are of `time.monotonic`; 0.0: never."""

    failures: int = 0
    refusals: int = 0
    first_failure: float = 0.0
    due: float = 0.0
    was_put: bool = False  # whether this node's part has been seen on storage
    waits: int = 0
    waiting_since: float = 0.0
    own_part_seconds: float = 0.0
    # when other nodes' parts were last looked for, if that was the last thing done
    last_look: float = 0.0
    # since when no trainer of the job has lived here, this node's part being done
    without_trainer_since: float = 0.0
    lost: frozenset[str] = frozenset()
    damaged: set[str] = field(default_factory=set)

    def add_failure(self, pause: float) -> None:
        """Count a failure; the next attempt is due after `pause` seconds."""
        now = time.monotonic()
        self.first_failure = self.first_failure or now
        self.failures += 1
        self.last_look = 0.0
        self.due = now + pause

    def is_worth_trying(self, last_live: float) -> bool:
        """Return whether to go on for a job whose trainers were last seen then; 0.0: never."""
        now = time.monotonic()
        since = min(filter(None, (self.first_failure, self.waiting_since)), default=now)
        # Other nodes' own time, before this one takes their parts over, comes on top.
        longest = _DEAD_JOB_SECONDS + 2 * self.own_part_seconds
        return self.refusals < _DEAD_JOB_REFUSALS and now - max(since, last_live) < longest


class FlushQueue:
    def __init__(self, root: str, job: str) -> None:
        self.job = job
        self._root = root
        self._states: dict[str, FlushState] = {}
        self._unwritten: dict[str, tuple[JobMemory, LocalCheckpoint, FlushRecord]] = {}
        self._last_live = self.retried = 0.0
        self._runs: set[str] | None = set()  # that have registered; None: for all

    def admit(self, run: str) -> None:
        """Take in the checkpoints of a run that has registered; "" stands for all runs."""
        self._runs = {*(self._runs or ()), run} if run else None

    def memory(self) -> JobMemory:
        return JobMemory(self._root, self.job)

    def is_live(self) -> bool:
        is_live = job_is_live(os.path.join(self._root, self.job))
        if is_live:
            self._last_live = time.monotonic()
        return is_live

    def in_memory(self) -> list[LocalCheckpoint]:
        """Return all complete checkpoints, newest first; nothing where the memory is gone."""
        if not os.path.isdir(os.path.join(self._root, self.job)):
            return []
        try:
            return self.memory().checkpoints()
        except FileNotFoundError:
            return []
        except (DcpMemError, OSError) as error:
            log.warning("the memory of job %s can't be read: %s", self.job, error)
            return []

    def pending(self) -> list[LocalCheckpoint]:
        ended = {
            save_id
            for save_id, (_, _, record) in list(self._unwritten.items())
            if record.outcome in (Outcome.DURABLE, Outcome.SKIPPED)
        }
        return [
            one
            for one in self.in_memory()
            if one.pending and one.manifest.save_id not in ended and self._is_admitted(one)
        ]

    def next_due(self) -> LocalCheckpoint | None:
        """Return what is to be flushed now: what has failed least often, of that the newest. What
        fails again and again keeps no other checkpoint from its turn.
        """
        now = time.monotonic()
        due = [one for one in self.pending() if self.known_state(one).due <= now]
        return min(due, key=lambda one: self.known_state(one).failures, default=None)

    def due_times(self) -> list[float]:
        return [self.known_state(one).due for one in self.pending()]

    def is_busy(self) -> bool:
        """Return whether anything is pending but failures that are tried again later."""
        now, states = time.monotonic(), [self.known_state(one) for one in self.pending()]
        return any(state.due <= now or not state.failures for state in states)

    def is_needed(self) -> bool:
        """Return whether a trainer lives, or something pending is still worth trying."""
        return self.is_live() or any(
            self.known_state(one).is_worth_trying(self._last_live) for one in self.pending()
        )

    def retry(self) -> None:
        """Have all that has failed tried at once, and what just fails once more."""
        self.retried = time.monotonic()
        for state in list(self._states.values()):
            state.due = 0.0

    def state(self, checkpoint: LocalCheckpoint) -> FlushState:
        """Return the state of a checkpoint's flush, which is kept from now on."""
        return self._states.setdefault(checkpoint.manifest.save_id, FlushState())

    def known_state(self, checkpoint: LocalCheckpoint) -> FlushState:
        """Return the state of a checkpoint's flush; where nothing is known, a new one."""
        return self._states.get(checkpoint.manifest.save_id) or FlushState()

    def end(self, checkpoint: LocalCheckpoint) -> None:
        self._states.pop(checkpoint.manifest.save_id, None)

    def record(self, memory: JobMemory, checkpoint: LocalCheckpoint, record: FlushRecord) -> None:
        """Write down how a flush went, later if memory has no room even for that now. What is
        durable with a catalog that was replaced meanwhile is to be flushed once more.
        """
        try:
            memory.record_flush(checkpoint, record)
            memory.history.add(row_of(checkpoint.manifest, record))
            self._unwritten.pop(record.save_id, None)
            # In this order: whoever replaces it later finds the record, and removes that.
            if record.outcome == Outcome.DURABLE and has_new_catalog(checkpoint):
                memory.record_flush(checkpoint, FlushRecord(save_id=record.save_id))
        except (DcpMemError, OSError) as error:
            self._unwritten[record.save_id] = (memory, checkpoint, record)
            log.warning(
                "can't write down that %s is %s: %s", checkpoint.name, record.outcome, error
            )

    def write_down(self) -> None:
        """Write down what memory had no room for so far."""
        for unwritten in list(self._unwritten.values()):
            self.record(*unwritten)

    def _is_admitted(self, checkpoint: LocalCheckpoint) -> bool:
        """Return whether it is known how to flush a checkpoint. Another run's registration tells
        how to flush what dead runs have left. A run that lives tells how its own checkpoints are
        flushed.
        """
        run = checkpoint.manifest.run
        if self._runs is None or run in self._runs:
            return True
        return run != saving_run(os.path.join(self._root, self.job)) or not self.is_live()
