"""One job's flushes: an attempt at a checkpoint, and what comes of it."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from functools import cached_property

from dcp_mem.common import faults
from dcp_mem.common.log import log
from dcp_mem.common.value_class import value_class
from dcp_mem.common.values import Outcome
from dcp_mem.errors import DcpMemError, StorageUnavailable
from dcp_mem.flushing.commit import (
    AlreadyFlushing,
    Evicted,
    NotYet,
    SegmentsGone,
    Superseded,
    flush,
)
from dcp_mem.flushing.exporter import JobExporter
from dcp_mem.flushing.metering import FlushAttempt, Throttle, add_to_stored_history
from dcp_mem.flushing.ownership import Ownership
from dcp_mem.flushing.parts import FlushJob
from dcp_mem.flushing.queue import FlushQueue
from dcp_mem.flushing.registration import Registration, environment_of
from dcp_mem.flushing.retention import Retainer
from dcp_mem.flushing.reuse import Reuse
from dcp_mem.format import names
from dcp_mem.format.history import row_of
from dcp_mem.format.manifest import FlushRecord
from dcp_mem.memory.checkpoint import LocalCheckpoint
from dcp_mem.memory.job import JobMemory
from dcp_mem.policy.order import is_newer
from dcp_mem.policy.retention import Retention
from dcp_mem.storage.listing import committed_under, mark_rejected
from dcp_mem.storage.retry import RETRIES_OF_A_FLUSH, RetryingStorage
from dcp_mem.storage.routes import open_storage

_LONGEST_PAUSE = 60.0
"""Seconds between two tries of a failed flush."""
_LONGEST_LOOK = 2.0
"""Seconds between two looks for other nodes' parts, or at what another process flushes."""
_PEER_GRACE = 600.0
"""Grace period, in seconds, before a missing part of another node is recorded as a failure."""
_PEER_LAG = 30.0
"""Grace period, in seconds, where a newer checkpoint is durable: then this one is skipped."""
_OWNER_GRACE = 30.0
"""Grace period, in seconds, before a node takes over another node's part where no trainer lives.

Twice the time that the node's own part took comes on top.
"""


@value_class
class _Retry:
    """When a claim or a mark is tried next, and the pause before it is tried once more."""

    due: float = 0.0
    pause: float = 1.0

    def later(self) -> _Retry:
        pause = min(_LONGEST_PAUSE, 2 * self.pause)
        return _Retry(time.monotonic() + self.pause, pause)


class _Destination:
    """A registration's storage, opened within `environment_of` the registration, and what is kept
    with it from flush to flush: file systems cost connections, and some are never freed.
    """

    def __init__(self, registration: Registration, queue: FlushQueue) -> None:
        self._registration, self._queue = registration, queue
        self.throttle = Throttle(registration.upload_limit)
        self.reuse = Reuse() if registration.reuse_stored else None
        self.retainer = Retainer()

    @cached_property
    def storage(self) -> RetryingStorage:
        registration = self._registration
        return open_storage(registration.url, registration.storage_options, RETRIES_OF_A_FLUSH)

    @cached_property
    def ownership(self) -> Ownership:
        return Ownership(self._queue.memory(), self.storage, self._queue.is_live)

    def forget(self) -> None:
        """Have the storage opened, and looked at, anew: something has failed."""
        self.retainer = Retainer()
        for name in ("storage", "ownership"):
            self.__dict__.pop(name, None)


class JobFlusher:
    """Flushes one job's checkpoints, one at a time. `register`, `retry` and what only asks may be
    called from any thread; one thread calls the rest.
    """

    def __init__(self, root: str, registration: Registration) -> None:
        self.queue = FlushQueue(root, registration.job)
        self.exporter = JobExporter(root, registration.job)
        self.last_turn = 0.0
        self.registration = registration
        self._destination = _Destination(registration, self.queue)
        self._claim: _Retry | None = None
        self._marked: set[str] = set()  # save ids that storage has marked, or hasn't any more
        self._mark_retry: _Retry | None = None  # where storage hasn't taken a mark
        self.register(registration)

    def register(self, registration: Registration) -> None:
        """Take new credentials or nodes: failed flushes may wait for those."""
        known, run = self.registration, registration.run
        if registration.nodes is None:
            registration = replace(registration, nodes=known.nodes)
        if known.run and not run:
            registration = known.reached_by(registration)
        elif not run and registration.export is None:
            registration = replace(registration, export=known.export)
        self.registration = registration
        self.queue.admit(run)
        self._claim = self._claim or _Retry()
        is_same = registration.has_same_destination(known)
        if not is_same:
            self._destination = _Destination(registration, self.queue)
        if registration.now or not is_same or registration.nodes != known.nodes:
            self.retry()

    def retry(self) -> None:
        self.queue.retry()
        self._mark_retry = self._mark_retry and _Retry()

    def is_needed(self) -> bool:
        """Return whether a trainer lives, or something is to be flushed or exported."""
        return self.queue.is_needed() or self.exporter.is_needed()

    def due_times(self) -> list[float]:
        """Return when a checkpoint or a claim is due."""
        due = self.queue.due_times()
        if self._claim is not None:
            due.append(self._claim.due)
        return due

    def flush_next(self) -> bool:
        """Flush the next checkpoint that is due, if there is one.

        1. Write down what memory had no room for so far; claim a generation for a new run.
        2. Mark on storage what has been rejected: it may leave memory, and isn't to count for
           retention. A mark that storage hasn't taken is tried again behind the flush.
        3. Flush what has failed least often, and of several the newest.

        Returns False where none is due.
        """
        self.queue.write_down()
        if self._claim is not None and self._claim.due <= time.monotonic():
            self._claim_generation(self._claim)
        if self._mark_retry is None:
            self._mark_rejections()
        checkpoint = self.queue.next_due()
        if checkpoint is not None:
            self._try_to_flush(checkpoint)
        if self._mark_retry is not None and self._mark_retry.due <= time.monotonic():
            self._mark_rejections()
        return checkpoint is not None

    def _try_to_flush(self, checkpoint: LocalCheckpoint) -> None:
        self.last_turn = time.monotonic()
        try:
            self._flush(checkpoint)
        except Exception:
            # A defect, or memory that has vanished: the other jobs go on all the same.
            log.exception("%s can't be flushed", checkpoint.name)
            self.queue.state(checkpoint).add_failure(_LONGEST_PAUSE)

    # -- beside the flushes -----------------------------------------------------------------------

    def _claim_generation(self, claim: _Retry) -> None:
        """Claim a generation for a run that has just begun, before its first checkpoint is flushed:
        what stays in memory gets its place among those on storage by that.
        """
        self._claim, registration, destination = None, self.registration, self._destination
        try:
            memory = self.queue.memory()
            newest = next(iter(memory.checkpoints()), None)
            has_come = newest is not None and registration.run in ("", newest.manifest.run)
            if not has_come and self.queue.is_live():  # the run's first checkpoint isn't there yet
                self._claim = _Retry(time.monotonic() + claim.pause)
            elif newest is not None and _is_unclaimed(memory, newest):
                with environment_of(registration):
                    destination.ownership.claim()
        except Exception as error:  # the flush says so aloud, and training goes on in any case
            log.info("no generation for %s yet: %s", registration.job, error)
            destination.forget()
            if _may_pass(error):
                self._claim = claim.later()

    def _mark_rejections(self) -> None:
        """Mark on storage what has been rejected in this node's memory since it was durable."""
        registration, destination, retry = self.registration, self._destination, self._mark_retry
        for one in self.queue.in_memory():
            save_id, is_durable = one.manifest.save_id, one.flush.outcome == Outcome.DURABLE
            if not one.rejected or not is_durable or save_id in self._marked:
                continue
            try:
                with environment_of(registration):
                    for stored in committed_under(destination.storage, one.name):
                        # Unless it was deleted there, or saved anew.
                        if stored.manifest is not None and stored.save_id == save_id:
                            mark_rejected(destination.storage, stored.manifest, one.rejected)
            except Exception as error:
                log.warning("that %s is rejected isn't known on storage: %s", one.name, error)
                destination.forget()
                self._mark_retry = (retry or _Retry()).later()
                return
            self._marked.add(save_id)
        self._mark_retry = None

    # -- one flush --------------------------------------------------------------------------------

    def _flush(self, checkpoint: LocalCheckpoint) -> None:
        """Make one attempt at a flush, and act on what comes of it.

        1. Run the commit protocol with the job's credentials.
        2. Another process flushes it, or parts of other nodes are missing: come back soon.
           Superseded: skip it. Failed: come back later.
        3. Durable: record it, and apply retention if this node has committed it.
        """
        registration, destination = self.registration, self._destination
        last_look = self.queue.known_state(checkpoint).last_look
        waited_seconds = time.monotonic() - last_look if last_look else 0.0
        attempt = FlushAttempt(registration, self.queue.memory(), checkpoint, waited_seconds)
        try:
            with environment_of(registration):
                record, has_committed = self._flushed(attempt, destination)
        except Evicted:
            log.info("%s left memory before it was flushed", checkpoint.name)
            self.queue.end(checkpoint)
        except AlreadyFlushing:
            # What becomes of it is for that process to record.
            self.queue.state(checkpoint).due = time.monotonic() + _LONGEST_LOOK
        except NotYet as reason:
            self.queue.state(checkpoint).was_put = not isinstance(reason, SegmentsGone)
            self._wait_for_others(attempt, str(reason))
        except Superseded as reason:
            self._skip(attempt, str(reason))
        except Exception as error:  # whatever it is, training and other checkpoints must go on
            destination.forget()
            self._fail(attempt, error)
        else:
            self.queue.record(attempt.memory, checkpoint, record)
            faults.point("flush.recorded")
            self.queue.end(checkpoint)
            url = registration.url
            log.info("%s is durable in %s (%.1f s)", checkpoint.name, url, attempt.seconds)
            if has_committed and registration.keep_storage is not None:
                self._retain(attempt, destination, registration.keep_storage)

    def _flushed(
        self, attempt: FlushAttempt, destination: _Destination
    ) -> tuple[FlushRecord, bool]:
        """Run the commit protocol; return what to record, and whether this node has committed."""
        registration, memory, checkpoint = attempt.registration, attempt.memory, attempt.checkpoint
        storage = destination.storage
        lost, damaged = self._lost(attempt)
        if checkpoint.manifest.committer in {memory.node, *lost} and _is_shared(checkpoint):
            destination.ownership.claim()
            checkpoint = replace(
                checkpoint, manifest=memory.generations.raised(checkpoint.manifest)
            )
        attempt.count_retries_of(storage)
        was_put = self.queue.known_state(checkpoint).was_put
        job = FlushJob(
            checkpoint=checkpoint,
            node=memory.node,
            storage=storage,
            overwrite=registration.overwrite,
            meter=attempt,
            throttle=destination.throttle,
            lost=lost,
            damaged=damaged,
            ownership=destination.ownership,
            was_put=was_put and _is_superseded(memory, checkpoint),
            memory=memory,
            reuse=destination.reuse,
        )
        has_committed = flush(job)
        record = attempt.ended(Outcome.DURABLE, durable=time.time())
        if has_committed:
            row = row_of(checkpoint.manifest, record)
            is_shown, outputs = registration.shows_history, registration.outputs
            known = memory.history.rows()
            add_to_stored_history(storage, row, known, is_shown=is_shown, outputs=outputs)
        return record, has_committed

    def _lost(self, attempt: FlushAttempt) -> tuple[frozenset[str], set[str]]:
        """Return the nodes that won't put their parts any more, and copies known as damaged. Nodes
        that the job has gone on without are lost. Where no trainer is left here, all other nodes
        whose parts have been missing for long are taken for lost.
        """
        nodes, checkpoint = attempt.registration.nodes, attempt.checkpoint
        others = frozenset(checkpoint.manifest.nodes) - {attempt.memory.node}
        lost = others - nodes if nodes is not None else frozenset[str]()
        state = self.queue.state(checkpoint)
        now = time.monotonic()
        if self.queue.is_live() or not state.waits:
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

    def _retain(self, attempt: FlushAttempt, destination: _Destination, policy: Retention) -> None:
        """Delete from storage what the job doesn't keep, now that this checkpoint is there."""
        registration, memory = attempt.registration, attempt.memory
        try:
            committed = memory.generations.raised(attempt.checkpoint.manifest)
            with environment_of(registration):
                deleted = destination.retainer.apply(
                    destination.storage, policy, committed, destination.ownership
                )
            memory.history.note_deleted(deleted)
        except Exception as error:  # the next commit brings another chance
            destination.forget()  # what is remembered of it may not be so
            log.warning(
                "what %s doesn't keep in %s stays for now: %s",
                registration.job,
                registration.url,
                error,
            )
            return
        if deleted:
            log.info("retention has deleted %s from %s", ", ".join(deleted), registration.url)

    # -- what comes of an attempt -----------------------------------------------------------------

    def _wait_for_others(self, attempt: FlushAttempt, reason: str) -> None:
        """Come back soon: this node's part is stored, and another node's is missing. A node whose
        part stays away has dropped the checkpoint, or died. Where a newer checkpoint is durable
        there is little to lose: then it has some times the time that this node's part took.
        """
        now = time.monotonic()
        state = self.queue.state(attempt.checkpoint)
        state.own_part_seconds = max(state.own_part_seconds, attempt.seconds)
        state.waiting_since = state.waiting_since or now
        state.last_look = now
        state.waits += 1
        state.due = now + min(_LONGEST_LOOK, 0.05 * 1.5 ** min(state.waits, 20))
        waited = now - state.waiting_since
        is_late = waited > _PEER_LAG + 10 * state.own_part_seconds
        is_late = is_late and not attempt.registration.persists_all
        if _is_superseded(attempt.memory, attempt.checkpoint) and is_late:
            self._skip(attempt, f"{reason}; a newer one is durable")
        elif waited > _PEER_GRACE:
            self._fail(attempt, StorageUnavailable(attempt.registration.url, reason))
        else:
            attempt.note_waiting()

    def _skip(self, attempt: FlushAttempt, reason: str) -> None:
        checkpoint = attempt.checkpoint
        record = attempt.ended(Outcome.SKIPPED, error=reason)
        self.queue.record(attempt.memory, checkpoint, record)
        self.queue.end(checkpoint)
        log.warning("%s is skipped: %s", checkpoint.name, reason)

    def _fail(self, attempt: FlushAttempt, error: Exception) -> None:
        """Record a failure, and come back after a pause that doubles with each of them."""
        text = str(error) if isinstance(error, DcpMemError) else f"{type(error).__name__}: {error}"
        state, checkpoint = self.queue.state(attempt.checkpoint), attempt.checkpoint
        pause = min(_LONGEST_PAUSE, 0.5 * 2 ** min(state.failures + 1, 10))
        # An attempt that began before a retry doesn't know what it was asked for.
        pause *= random.uniform(0.7, 1.3) * (attempt.begun > self.queue.retried)
        outcome = Outcome.FAILED if _may_pass(error) else Outcome.REFUSED
        record = attempt.ended(outcome, error=text, again=time.time() + pause)
        self.queue.record(attempt.memory, checkpoint, record)
        state.refusals += outcome is Outcome.REFUSED
        state.add_failure(pause)
        log.warning("flush of %s failed, next try in %.1f s: %s", checkpoint.name, pause, text)


def _may_pass(error: Exception) -> bool:
    return isinstance(error, StorageUnavailable) or not isinstance(error, DcpMemError)


def _is_shared(checkpoint: LocalCheckpoint) -> bool:
    """Return whether all ranks saved it together; it has a number that they agreed on."""
    manifest = checkpoint.manifest
    return manifest.scope == names.COLLECTIVE and manifest.run != ""


def _is_unclaimed(memory: JobMemory, checkpoint: LocalCheckpoint) -> bool:
    """Return whether this node has to get a generation for the checkpoint's run."""
    manifest = checkpoint.manifest
    has_none = memory.generations.known().get(manifest.run, 0) < manifest.generation
    return has_none and _is_shared(checkpoint) and manifest.committer == memory.node


def _is_superseded(memory: JobMemory, checkpoint: LocalCheckpoint) -> bool:
    return any(
        other.flush.outcome == Outcome.DURABLE and _is_newer(other, checkpoint)
        for other in memory.checkpoints()
    )


def _is_newer(one: LocalCheckpoint, other: LocalCheckpoint) -> bool:
    is_same_scope = one.manifest.scope == other.manifest.scope
    return is_same_scope and is_newer(one.manifest.place, other.manifest.place)
