"""The order of flushes: the next checkpoint, repeats of failed ones, and the records of both.

One scheduler serves all jobs of a memory root. It runs in the agent, or in a thread of the trainer
(`agent="thread"`).
"""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass, field, replace

from dcp_mem.common import faults
from dcp_mem.common.log import log
from dcp_mem.common.values import Outcome
from dcp_mem.errors import DcpMemError, StorageUnavailable
from dcp_mem.flushing.commit import Evicted, NotYet, Superseded, flush
from dcp_mem.flushing.metering import Throttle
from dcp_mem.flushing.ownership import Ownership
from dcp_mem.flushing.parts import FlushJob, drop_part
from dcp_mem.flushing.progress import FlushAttempt, add_to_stored_history
from dcp_mem.flushing.registration import Registration, environment_of
from dcp_mem.flushing.retention import Retainer
from dcp_mem.flushing.reuse import Reuse
from dcp_mem.format import names
from dcp_mem.format.history import row_of
from dcp_mem.format.manifest import FlushRecord
from dcp_mem.memory.checkpoint import LocalCheckpoint
from dcp_mem.memory.job import JobMemory
from dcp_mem.memory.locks import job_is_live, saving_run
from dcp_mem.policy.order import is_newer
from dcp_mem.storage.listing import mark_rejected
from dcp_mem.storage.retry import RetryingStorage, RetryPolicy
from dcp_mem.storage.routes import open_storage

_RETRY_POLICY = RetryPolicy(tries=4, first_pause_seconds=0.2, longest_pause_seconds=3.0)
"""Of requests within a flush. A failed flush is tried again, and goes on where it stopped."""
_LONGEST_PAUSE = 60.0
"""Seconds between two tries of a failed flush."""
_DEAD_JOB_SECONDS = 3600.0
"""Seconds for which failing flushes of a job without trainers are tried again."""
_DEAD_JOB_REFUSALS = 3
_LONGEST_LOOK = 2.0
"""Seconds between two looks for other nodes' parts."""
_PEER_GRACE = 600.0
"""Grace period, in seconds, before a missing part of another node is recorded as a failure."""
_PEER_LAG = 30.0
"""Grace period, in seconds, where a newer checkpoint is durable: then this one is skipped."""
_OWNER_GRACE = 30.0
"""Grace period, in seconds, before a node takes over another node's part where no trainer lives.

Twice the time that the node's own part took comes on top.
"""


@dataclass(slots=True, kw_only=True)
class _FlushState:
    """The state of one checkpoint's flush after the attempts so far.

    Times are those of `time.monotonic`; 0.0: never.

    Attributes:
        failures: Attempts that failed.
        refusals: Those of them that storage refused.
        first_failure: When the first one failed.
        due: When the next attempt is.
        waits: How often other nodes' parts were missing.
        waiting_since: Since when they have been missing.
        own_part_seconds: What this node's own part took.
        last_look: When other nodes' parts were last looked for, if that was the last thing done.
        without_trainer_since: Since when no trainer of the job has lived here, this node's part
            being done.
        lost: Nodes that aren't waited for any more.
        damaged: As in `FlushJob`.
    """

    job: str
    failures: int = 0
    refusals: int = 0
    first_failure: float = 0.0
    due: float = 0.0
    waits: int = 0
    waiting_since: float = 0.0
    own_part_seconds: float = 0.0
    last_look: float = 0.0
    without_trainer_since: float = 0.0
    lost: frozenset[str] = frozenset()
    damaged: set[str] = field(default_factory=set)

    def add_failure(self, pause: float) -> None:
        """Count a failure; the next attempt is after `pause` seconds."""
        now = time.monotonic()
        self.first_failure = self.first_failure or now
        self.failures += 1
        self.last_look = 0.0
        self.due = now + pause


@dataclass(frozen=True, slots=True)
class _Claim:
    """A claim that is to be made, and after how many seconds it is tried again."""

    due: float = 0.0
    pause: float = 1.0

    def later(self) -> _Claim:
        pause = min(_LONGEST_PAUSE, 2 * self.pause)
        return _Claim(time.monotonic() + self.pause, pause)


class FlushScheduler:
    """Flushes the pending checkpoints of registered jobs, the newest first.

    Args:
        root: The memory root.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._jobs: dict[str, Registration] = {}
        self._states: dict[str, _FlushState] = {}
        self._storages: dict[str, tuple[Registration, RetryingStorage]] = {}
        self._throttles: dict[str, tuple[int | None, Throttle]] = {}
        self._unwritten: dict[str, tuple[JobMemory, LocalCheckpoint, FlushRecord]] = {}
        self._served: dict[str, float] = {}
        self._retainers: dict[str, Retainer] = {}
        self._ownerships: dict[str, Ownership] = {}
        self._reuses: dict[tuple[str, str], Reuse] = {}
        self._to_claim: dict[str, _Claim] = {}
        self._runs: dict[str, set[str] | None] = {}  # that have registered, by job; None: for all
        self._rejected: set[str] = set()  # save ids that storage has marked

    def register(self, registration: Registration) -> None:
        """Take a job on, or its new credentials or nodes: failed flushes may wait for those.

        Args:
            registration: How the job's checkpoints are flushed.
        """
        known = self._jobs.get(registration.job)
        if known is not None and registration.nodes is None:
            registration = replace(registration, nodes=known.nodes)
        self._jobs[registration.job] = registration
        runs = self._runs.get(registration.job) or set()
        self._runs[registration.job] = {*runs, registration.run} if registration.run else None
        self._to_claim.setdefault(registration.job, _Claim())
        is_same = (
            known is not None
            and registration.has_same_destination(known)
            and registration.nodes == known.nodes
        )
        if registration.now or not is_same:
            for state in list(self._states.values()):
                if state.job == registration.job:
                    state.due = 0.0

    def flush_next(self) -> bool:
        """Flush one checkpoint, of the job that has waited longest.

        1. Write down what memory had no room for so far; claim generations for new runs.
        2. Take the job that was served least recently among those with a checkpoint that is due.
        3. Flush its newest checkpoint that is due, among those that have failed least often: what
           fails again and again keeps no other from its turn.

        Returns:
            False where no checkpoint is due.
        """
        for unwritten in list(self._unwritten.values()):
            self._record(*unwritten)
        now = time.monotonic()
        for job, claim in list(self._to_claim.items()):
            if claim.due <= now:
                self._claim(self._jobs[job])
        for registration in sorted(
            self._jobs.values(), key=lambda one: self._served.get(one.job, 0.0)
        ):
            pending = self._pending(registration.job)
            self._carry_rejections(registration)
            due = [one for one in pending if self._due(one) <= now]
            if due:
                checkpoint = min(due, key=self._failures)
                self._served[registration.job] = now
                try:
                    memory = JobMemory(self._root, registration.job)
                    self._flush(registration, memory, checkpoint)
                except Exception:
                    # A defect, or memory that has vanished: the other jobs go on all the same.
                    log.exception("%s can't be flushed", checkpoint.name)
                    state = self._states.setdefault(
                        checkpoint.manifest.save_id, _FlushState(job=registration.job)
                    )
                    state.add_failure(_LONGEST_PAUSE)
                return True
        return False

    def retry(self) -> None:
        """Make everything due that has failed."""
        for state in list(self._states.values()):
            state.due = 0.0

    def seconds_until_next(self) -> float | None:
        """Return how long it is until a checkpoint is due; None where nothing is pending."""
        due = [self._due(one) for job in list(self._jobs) for one in self._pending(job)]
        due += [claim.due for claim in list(self._to_claim.values())]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def is_busy(self) -> bool:
        """Return whether anything is pending but failures that are tried again later."""
        now = time.monotonic()
        pending = [
            self._states.get(one.manifest.save_id)
            for job in list(self._jobs)
            for one in self._pending(job)
        ]
        return any(state is None or state.due <= now or not state.failures for state in pending)

    def is_needed(self) -> bool:
        """Return whether a trainer lives, or something pending is still worth trying."""
        return any(
            self._is_live(job) or any(map(self._is_worth_trying, self._pending(job)))
            for job in list(self._jobs)
        )

    def _carry_rejections(self, registration: Registration) -> None:
        """Mark on storage what has been rejected in this node's memory since it was durable."""
        for one in self._rejected_since(registration.job):
            self._carry_rejection(registration, one)

    def _carry_rejection(self, registration: Registration, one: LocalCheckpoint) -> None:
        try:
            with environment_of(registration):
                mark_rejected(self._storage(registration), one.manifest, one.rejected)
            self._rejected.add(one.manifest.save_id)
        except Exception as error:  # the next look brings another chance
            self._storages.pop(registration.job, None)
            log.warning("that %s is rejected isn't known on storage: %s", one.name, error)

    def _rejected_since(self, job: str) -> list[LocalCheckpoint]:
        return [
            one
            for one in self._in_memory(job)
            if one.rejected
            and one.flush.outcome == Outcome.DURABLE
            and one.manifest.save_id not in self._rejected
        ]

    # -- what is pending --------------------------------------------------------------------------

    def _is_live(self, job: str) -> bool:
        return job_is_live(os.path.join(self._root, job))

    def _pending(self, job: str) -> list[LocalCheckpoint]:
        """Return what awaits its flush, newest first; nothing where the job's memory is gone."""
        ended = {
            save_id
            for save_id, (_, _, record) in self._unwritten.items()
            if record.outcome in (Outcome.DURABLE, Outcome.SKIPPED)
        }
        found = self._in_memory(job)
        return [
            one
            for one in found
            if one.pending and one.manifest.save_id not in ended and self._is_registered(job, one)
        ]

    def _is_registered(self, job: str, checkpoint: LocalCheckpoint) -> bool:
        """Return whether it is known how to flush a checkpoint.

        Another run's registration tells how to flush what dead runs have left. A run that lives
        tells how its own checkpoints are flushed.
        """
        run, runs = checkpoint.manifest.run, self._runs.get(job)
        if runs is None or run in runs or run != saving_run(os.path.join(self._root, job)):
            return True
        return not self._is_live(job)

    def _in_memory(self, job: str) -> list[LocalCheckpoint]:
        if not os.path.isdir(os.path.join(self._root, job)):
            return []
        try:
            return JobMemory(self._root, job).checkpoints()
        except FileNotFoundError:
            return []
        except (DcpMemError, OSError) as error:
            log.warning("the memory of job %s can't be read: %s", job, error)
            return []

    def _due(self, checkpoint: LocalCheckpoint) -> float:
        state = self._states.get(checkpoint.manifest.save_id)
        return state.due if state is not None else 0.0

    def _failures(self, checkpoint: LocalCheckpoint) -> int:
        state = self._states.get(checkpoint.manifest.save_id)
        return state.failures if state is not None else 0

    def _is_worth_trying(self, checkpoint: LocalCheckpoint) -> bool:
        """Return whether to go on for a job without trainers."""
        state = self._states.get(checkpoint.manifest.save_id)
        if state is None:
            return True
        times = filter(None, (state.first_failure, state.waiting_since))
        since = min(times, default=time.monotonic())
        has_time = time.monotonic() - since < _DEAD_JOB_SECONDS
        return state.refusals < _DEAD_JOB_REFUSALS and has_time

    def _claim(self, registration: Registration) -> None:
        """Claim a generation for a run that has just begun, before its first checkpoint is flushed.

        Its checkpoints that stay in memory get their place among those on storage by that.
        """
        claim = self._to_claim.pop(registration.job)
        try:
            memory = JobMemory(self._root, registration.job)
            newest = next(iter(memory.checkpoints()), None)
            if self._expects_checkpoint(registration, newest):
                self._to_claim[registration.job] = _Claim(time.monotonic() + claim.pause)
            elif newest is not None and _is_unclaimed(memory, newest):
                with environment_of(registration):
                    self._ownership(memory, self._storage(registration)).claim()
        except Exception as error:  # the flush says so aloud, and training goes on in any case
            log.info("no generation for %s yet: %s", registration.job, error)
            self._storages.pop(registration.job, None)
            if isinstance(error, StorageUnavailable) or not isinstance(error, DcpMemError):
                self._to_claim[registration.job] = claim.later()

    def _expects_checkpoint(
        self, registration: Registration, newest: LocalCheckpoint | None
    ) -> bool:
        """Return whether a run has registered whose first checkpoint isn't there yet."""
        has_come = newest is not None and registration.run in ("", newest.manifest.run)
        return not has_come and self._is_live(registration.job)

    # -- one flush --------------------------------------------------------------------------------

    def _flush(
        self, registration: Registration, memory: JobMemory, checkpoint: LocalCheckpoint
    ) -> None:
        """Make one attempt at a flush, and act on what comes of it.

        1. Run the commit protocol with the job's credentials.
        2. Evicted: remove what was put. Parts of other nodes missing: come back soon. Superseded:
           skip it. Failed: come back later.
        3. Durable: record it, and apply retention if this node has committed it.
        """
        state = self._states.get(checkpoint.manifest.save_id)
        last_look = state.last_look if state is not None else 0.0
        waited_seconds = time.monotonic() - last_look if last_look else 0.0
        attempt = FlushAttempt(memory, checkpoint, waited_seconds)
        try:
            with environment_of(registration):
                record, has_committed = self._flushed(registration, memory, checkpoint, attempt)
        except Evicted:
            log.info("%s left memory before it was flushed", checkpoint.name)
            self._drop(registration, memory, checkpoint)
            return
        except NotYet as reason:
            self._wait_for_others(memory, checkpoint, attempt, str(reason))
            return
        except Superseded as reason:
            self._skip(memory, checkpoint, attempt, str(reason))
            return
        except Exception as error:  # whatever it is, training and other checkpoints must go on
            self._storages.pop(registration.job, None)
            self._fail(memory, checkpoint, attempt.record(), error)
            return
        self._record(memory, checkpoint, record)
        faults.point("flush.recorded")
        self._states.pop(checkpoint.manifest.save_id, None)
        log.info("%s is durable in %s (%.1f s)", checkpoint.name, registration.url, attempt.seconds)
        if has_committed:
            self._retain(registration, memory, checkpoint)

    def _flushed(
        self,
        registration: Registration,
        memory: JobMemory,
        checkpoint: LocalCheckpoint,
        attempt: FlushAttempt,
    ) -> tuple[FlushRecord, bool]:
        """Run the commit protocol; return what to record, and whether this node has committed.

        The node that has committed adds the checkpoint to the history on storage.
        """
        storage = self._storage(registration)
        lost, damaged = self._lost(registration, memory, checkpoint)
        ownership = self._ownership(memory, storage)
        if checkpoint.manifest.committer in {memory.node, *lost} and _is_shared(checkpoint):
            ownership.claim()
            checkpoint = replace(checkpoint, manifest=memory.raised(checkpoint.manifest))
        state = self._states.get(checkpoint.manifest.save_id)
        has_waited = state is not None and state.waits > 0
        job = FlushJob(
            checkpoint,
            memory.node,
            storage,
            overwrite=registration.overwrite,
            meter=attempt.meter(storage),
            throttle=self._throttle(registration),
            lost=lost,
            damaged=damaged,
            ownership=ownership,
            was_put=has_waited and _is_superseded(memory, checkpoint),
            memory=memory,
            reuse=self._reuse(registration),
        )
        has_committed = flush(job)
        ended = attempt.record()
        record = replace(
            ended,
            outcome=Outcome.DURABLE,
            error="",
            durable=time.time(),
            attempts=ended.attempts + 1,
        )
        if has_committed:
            row = row_of(checkpoint.manifest, record)
            add_to_stored_history(storage, row, memory.history())
        return record, has_committed

    def _drop(
        self, registration: Registration, memory: JobMemory, checkpoint: LocalCheckpoint
    ) -> None:
        """Remove what was put of a checkpoint that can't be finished any more."""
        try:
            with environment_of(registration):
                storage = self._storage(registration)
                overwrite = registration.overwrite
                drop_part(FlushJob(checkpoint, memory.node, storage, overwrite=overwrite))
        except Exception as error:
            log.warning(
                "what was put of %s can't be taken away (collect_orphans does): %s",
                checkpoint.name,
                error,
            )

    def _retain(
        self, registration: Registration, memory: JobMemory, checkpoint: LocalCheckpoint
    ) -> None:
        """Delete from storage what the job doesn't keep, now that this checkpoint is there."""
        if registration.keep_storage is None:
            return
        retainer = self._retainers.setdefault(registration.job, Retainer())
        try:
            with environment_of(registration):
                storage = self._storage(registration)
                ownership = self._ownership(memory, storage)
                deleted = retainer.apply(
                    storage,
                    registration.keep_storage,
                    memory.raised(checkpoint.manifest),
                    ownership,
                )
            memory.note_deleted(deleted)
        except Exception as error:  # the next commit brings another chance
            self._retainers.pop(registration.job)
            log.warning(
                "what %s doesn't keep in %s stays for now: %s",
                registration.job,
                registration.url,
                error,
            )
            return
        if deleted:
            log.info("retention has deleted %s from %s", ", ".join(deleted), registration.url)

    def _lost(
        self, registration: Registration, memory: JobMemory, checkpoint: LocalCheckpoint
    ) -> tuple[frozenset[str], set[str]]:
        """Return the nodes that won't put their parts any more, and copies known as damaged.

        Nodes that the job has gone on without are lost. Where no trainer is left here, all
        other nodes whose parts have been missing for long are taken for lost.
        """
        others = frozenset(checkpoint.manifest.nodes) - {memory.node}
        lost = others - registration.nodes if registration.nodes is not None else frozenset[str]()
        save_id = checkpoint.manifest.save_id
        state = self._state_of(memory, checkpoint) if lost else self._states.get(save_id)
        if state is None:
            return lost, set()
        now = time.monotonic()
        if self._is_live(memory.job) or not state.waits:
            state.without_trainer_since = 0.0
        else:
            state.without_trainer_since = state.without_trainer_since or now
        since = state.without_trainer_since
        if since and now - since > _OWNER_GRACE + 2 * state.own_part_seconds:
            lost = others
        if lost != state.lost:
            state.lost = lost
            state.waiting_since = 0.0  # the nodes that take over have their time as well
            log.info(
                "%s doesn't count on these nodes any more: %s",
                checkpoint.name,
                ", ".join(sorted(lost)) or "none",
            )
        return lost, state.damaged

    def _throttle(self, registration: Registration) -> Throttle:
        """Return the job's throttle. It is kept: what one flush sent counts for the next."""
        known = self._throttles.get(registration.job)
        if known is None or known[0] != registration.upload_limit:
            known = registration.upload_limit, Throttle(registration.upload_limit)
            self._throttles[registration.job] = known
        return known[1]

    def _storage(self, registration: Registration) -> RetryingStorage:
        """Return the job's storage, opened again after a failure.

        It is kept: file systems cost connections, and some are never freed.
        """
        known = self._storages.get(registration.job)
        if known is None or not known[0].has_same_destination(registration):
            storage = open_storage(registration.url, registration.storage_options, _RETRY_POLICY)
            known = self._storages[registration.job] = registration, storage
        return known[1]

    def _reuse(self, registration: Registration) -> Reuse | None:
        """Return what the job's storage has to copy from; None where everything is to be sent."""
        if not registration.reuse_stored:
            return None
        return self._reuses.setdefault((registration.job, registration.url), Reuse())

    def _ownership(self, memory: JobMemory, storage: RetryingStorage) -> Ownership:
        """Return this node's part in the ownership of the storage; it is kept with the storage."""
        known = self._ownerships.get(memory.job)
        if known is None or known.storage is not storage:
            known = Ownership(memory, storage, lambda: self._is_live(memory.job))
            self._ownerships[memory.job] = known
        return known

    # -- what comes of an attempt -----------------------------------------------------------------

    def _wait_for_others(
        self, memory: JobMemory, checkpoint: LocalCheckpoint, attempt: FlushAttempt, reason: str
    ) -> None:
        """Come back soon: this node's part is stored, and another node's is missing.

        A node whose part stays away has dropped the checkpoint, or died. Where a newer checkpoint
        is durable there is little to lose: then the node has some times the time that this node's
        part took.
        """
        now = time.monotonic()
        state = self._state_of(memory, checkpoint)
        state.own_part_seconds = max(state.own_part_seconds, attempt.seconds)
        state.waiting_since = state.waiting_since or now
        state.last_look = now
        state.waits += 1
        state.due = now + min(_LONGEST_LOOK, 0.05 * 1.5 ** min(state.waits, 20))
        waited = now - state.waiting_since
        is_late = waited > _PEER_LAG + 10 * state.own_part_seconds
        is_late = is_late and not self._jobs[memory.job].persists_all
        if _is_superseded(memory, checkpoint) and is_late:
            self._skip(memory, checkpoint, attempt, f"{reason}; a newer one is durable")
        elif waited > _PEER_GRACE:
            error = StorageUnavailable(self._jobs[memory.job].url, reason)
            self._fail(memory, checkpoint, attempt.record(), error)
        else:
            attempt.note_waiting()

    def _skip(
        self, memory: JobMemory, checkpoint: LocalCheckpoint, attempt: FlushAttempt, reason: str
    ) -> None:
        """Record that the checkpoint isn't tried any more."""
        ended = attempt.record()
        attempts = ended.attempts + 1
        record = replace(ended, outcome=Outcome.SKIPPED, error=reason, attempts=attempts)
        self._record(memory, checkpoint, record)
        log.warning("%s is skipped: %s", checkpoint.name, reason)

    def _fail(
        self, memory: JobMemory, checkpoint: LocalCheckpoint, record: FlushRecord, error: Exception
    ) -> None:
        """Record a failure, and come back after a pause that doubles with each of them."""
        text = str(error) if isinstance(error, DcpMemError) else f"{type(error).__name__}: {error}"
        may_pass = isinstance(error, StorageUnavailable) or not isinstance(error, DcpMemError)
        state = self._state_of(memory, checkpoint)
        pause = min(_LONGEST_PAUSE, 0.5 * 2 ** min(state.failures + 1, 10))
        pause *= random.uniform(0.7, 1.3)
        self._record(
            memory,
            checkpoint,
            replace(
                record,
                outcome=Outcome.FAILED if may_pass else Outcome.REFUSED,
                error=text,
                attempts=record.attempts + 1,
                again=time.time() + pause,
            ),
        )
        state.refusals += not may_pass
        state.add_failure(pause)
        log.warning("flush of %s failed, next try in %.1f s: %s", checkpoint.name, pause, text)

    def _record(self, memory: JobMemory, checkpoint: LocalCheckpoint, record: FlushRecord) -> None:
        """Write down how a flush went, later if memory has no room even for that now."""
        try:
            memory.record_flush(checkpoint, record)
            memory.add_to_history(row_of(checkpoint.manifest, record))
            self._unwritten.pop(record.save_id, None)
        except (DcpMemError, OSError) as error:
            self._unwritten[record.save_id] = (memory, checkpoint, record)
            log.warning(
                "can't write down that %s is %s: %s", checkpoint.name, record.outcome, error
            )

    def _state_of(self, memory: JobMemory, checkpoint: LocalCheckpoint) -> _FlushState:
        return self._states.setdefault(checkpoint.manifest.save_id, _FlushState(job=memory.job))


def _is_shared(checkpoint: LocalCheckpoint) -> bool:
    """Return whether all ranks saved it together; it has a number that they agreed on."""
    manifest = checkpoint.manifest
    return manifest.scope == names.COLLECTIVE and manifest.run != ""


def _is_unclaimed(memory: JobMemory, checkpoint: LocalCheckpoint) -> bool:
    """Return whether this node has to get a generation for the checkpoint's run."""
    manifest = checkpoint.manifest
    has_none = memory.generations().get(manifest.run, 0) < manifest.generation
    return has_none and _is_shared(checkpoint) and manifest.committer == memory.node


def _is_superseded(memory: JobMemory, checkpoint: LocalCheckpoint) -> bool:
    """Return whether a newer checkpoint is durable."""
    return any(
        other.flush.outcome == Outcome.DURABLE and _is_newer(other, checkpoint)
        for other in memory.checkpoints()
    )


def _is_newer(one: LocalCheckpoint, other: LocalCheckpoint) -> bool:
    is_same_scope = one.manifest.scope == other.manifest.scope
    return is_same_scope and is_newer(one.manifest.place, other.manifest.place)
