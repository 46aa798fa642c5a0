"""One job's flushes: an attempt at a checkpoint, and what comes of it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from dcp_mem.common import faults
from dcp_mem.common.log import log
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
from dcp_mem.flushing.destination import Destination
from dcp_mem.flushing.exporter import JobExporter
from dcp_mem.flushing.parts import FlushJob, drop_part
from dcp_mem.flushing.progress import FlushAttempt, add_to_stored_history
from dcp_mem.flushing.queue import FlushQueue
from dcp_mem.flushing.registration import Registration, environment_of
from dcp_mem.format import names
from dcp_mem.format.history import row_of
from dcp_mem.format.manifest import FlushRecord
from dcp_mem.memory.checkpoint import LocalCheckpoint
from dcp_mem.memory.job import JobMemory
from dcp_mem.policy.order import is_newer
from dcp_mem.storage.listing import committed_under, mark_rejected

_LONGEST_PAUSE = 60.0
"""Seconds between two tries of a failed flush."""
_EXPORT_LOOK = 0.2
"""Seconds between two looks at an export that runs."""
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


@dataclass(frozen=True, slots=True)
class _Retry:
    """When a claim or a mark is tried next, and the pause before it is tried once more."""

    due: float = 0.0
    pause: float = 1.0

    def later(self) -> _Retry:
        pause = min(_LONGEST_PAUSE, 2 * self.pause)
        return _Retry(time.monotonic() + self.pause, pause)


@dataclass(frozen=True, slots=True)
class _Turn:
    """One checkpoint that is being flushed."""

    registration: Registration  # the job's, as it is at the beginning
    memory: JobMemory
    checkpoint: LocalCheckpoint
    attempt: FlushAttempt


class JobFlusher:
    """Flushes one job's checkpoints, one at a time.

    `register`, `retry` and what only asks may be called from any thread; one thread calls the rest.
    """

    def __init__(self, root: str, registration: Registration) -> None:
        self.queue = FlushQueue(root, registration.job)
        self._exporter = JobExporter(root, registration.job)
        self.last_turn = 0.0
        self.registration = registration
        self._destination = Destination(self.queue.is_live)
        self._claim: _Retry | None = None
        self._rejected: set[str] = set()  # save ids that storage has marked, or hasn't any more
        self._mark_retries: dict[str, _Retry] = {}  # by save id, where a mark couldn't be put
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
        is_same = registration.has_same_destination(known) and registration.nodes == known.nodes
        if registration.now or not is_same:
            self.retry()

    def retry(self) -> None:
        """Make everything due that has failed."""
        self.queue.retry()
        self._mark_retries = dict.fromkeys(list(self._mark_retries), _Retry())

    def export_next(self) -> None:
        """Have a process make the exports that are due, if there are any. Waits for nothing."""
        self._exporter.go_on(self.registration)

    def stop(self) -> None:
        """Have the process that exports end soon; a successor goes on where it was."""
        self._exporter.stop()

    def is_needed(self) -> bool:
        """Return whether a trainer lives, or something is to be flushed or exported."""
        return self.queue.is_needed() or self._exporter.is_needed()

    def due_times(self) -> list[float]:
        """Return when a checkpoint or a claim is due, or a look at an export that runs."""
        due = self.queue.due_times()
        if self._claim is not None:
            due.append(self._claim.due)
        if self._exporter.is_running:
            due.append(time.monotonic() + _EXPORT_LOOK)
        return due

    def catch_up(self) -> None:
        """Write down what memory had no room for, and claim a generation where one is due."""
        self.queue.write_down()
        if self._claim is not None and self._claim.due <= time.monotonic():
            self._claim_generation(self._claim)

    def flush_next(self) -> bool:
        """Flush the next checkpoint that is due; mark on storage what has been rejected.

        A new mark comes first: the checkpoint may leave memory, and retention is not to count it.

        Returns False where none is due.
        """
        self._carry_rejections(lambda save_id: save_id not in self._mark_retries)
        checkpoint = self.queue.next_due()
        if checkpoint is not None:
            self._try_to_flush(checkpoint)
        if self._mark_retries:
            self._carry_rejections(self._is_mark_due)
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
        """Claim a generation for a run that has just begun, before its first checkpoint is flushed.

        Its checkpoints that stay in memory get their place among those on storage by that.
        """
        self._claim, registration = None, self.registration
        try:
            memory = self.queue.memory()
            newest = next(iter(memory.checkpoints()), None)
            if self._expects_checkpoint(registration, newest):
                self._claim = _Retry(time.monotonic() + claim.pause)
            elif newest is not None and _is_unclaimed(memory, newest):
                with environment_of(registration):
                    self._destination.ownership(registration, memory).claim()
        except Exception as error:  # the flush says so aloud, and training goes on in any case
            log.info("no generation for %s yet: %s", registration.job, error)
            self._destination.forget_storage()
            if isinstance(error, StorageUnavailable) or not isinstance(error, DcpMemError):
                self._claim = claim.later()

    def _expects_checkpoint(
        self, registration: Registration, newest: LocalCheckpoint | None
    ) -> bool:
        """Return whether a run has registered whose first checkpoint isn't there yet."""
        has_come = newest is not None and registration.run in ("", newest.manifest.run)
        return not has_come and self.queue.is_live()

    def _carry_rejections(self, is_wanted: Callable[[str], bool]) -> None:
        """Mark on storage what has been rejected in this node's memory since it was durable."""
        for one in self.queue.in_memory():
            save_id = one.manifest.save_id
            is_durable = one.flush.outcome == Outcome.DURABLE
            is_unmarked = one.rejected and is_durable and save_id not in self._rejected
            if is_unmarked and is_wanted(save_id):
                self._carry_rejection(one)

    def _is_mark_due(self, save_id: str) -> bool:
        retry = self._mark_retries.get(save_id)
        return retry is not None and retry.due <= time.monotonic()

    def _carry_rejection(self, one: LocalCheckpoint) -> None:
        """Mark a checkpoint on storage, unless it was deleted there, or saved anew."""
        registration, save_id = self.registration, one.manifest.save_id
        try:
            with environment_of(registration):
                storage = self._destination.storage(registration)
                for stored in committed_under(storage, one.name):
                    if stored.manifest is not None and stored.save_id == save_id:
                        mark_rejected(storage, stored.manifest, one.rejected)
            self._rejected.add(save_id)
            self._mark_retries.pop(save_id, None)
        except Exception as error:
            self._destination.forget_storage()
            self._mark_retries[save_id] = self._mark_retries.get(save_id, _Retry()).later()
            log.warning("that %s is rejected isn't known on storage: %s", one.name, error)

    # -- one flush --------------------------------------------------------------------------------

    def _flush(self, checkpoint: LocalCheckpoint) -> None:
        """Make one attempt at a flush, and act on what comes of it.

        1. Run the commit protocol with the job's credentials.
        2. Evicted: remove what was put. Another process flushes it, or parts of other nodes are
           missing: come back soon. Superseded: skip it. Failed: come back later.
        3. Durable: record it, and apply retention if this node has committed it.
        """
        memory = self.queue.memory()
        last_look = self.queue.known_state(checkpoint).last_look
        waited_seconds = time.monotonic() - last_look if last_look else 0.0
        attempt = FlushAttempt(memory, checkpoint, waited_seconds)
        turn = _Turn(self.registration, memory, checkpoint, attempt)
        try:
            with environment_of(turn.registration):
                record, has_committed = self._flushed(turn)
        except Evicted:
            log.info("%s left memory before it was flushed", checkpoint.name)
            self.queue.end(checkpoint)
            self._drop(turn)
            return
        except AlreadyFlushing:
            # What becomes of it is for that process to record.
            self.queue.state(checkpoint).due = time.monotonic() + _LONGEST_LOOK
            return
        except NotYet as reason:
            self.queue.state(checkpoint).was_put = not isinstance(reason, SegmentsGone)
            self._wait_for_others(turn, str(reason))
            return
        except Superseded as reason:
            self._skip(turn, str(reason))
            return
        except Exception as error:  # whatever it is, training and other checkpoints must go on
            self._destination.forget_storage()
            self._fail(turn, error)
            return
        self.queue.record(memory, checkpoint, record)
        faults.point("flush.recorded")
        self.queue.end(checkpoint)
        url = turn.registration.url
        log.info("%s is durable in %s (%.1f s)", checkpoint.name, url, attempt.seconds)
        if has_committed:
            self._retain(turn)

    def _flushed(self, turn: _Turn) -> tuple[FlushRecord, bool]:
        """Run the commit protocol; return what to record, and whether this node has committed.

        The node that has committed adds the checkpoint to the history on storage.
        """
        registration, memory, checkpoint = turn.registration, turn.memory, turn.checkpoint
        storage = self._destination.storage(registration)
        lost, damaged = self._lost(turn)
        ownership = self._destination.ownership(registration, memory)
        if checkpoint.manifest.committer in {memory.node, *lost} and _is_shared(checkpoint):
            ownership.claim()
            checkpoint = replace(checkpoint, manifest=memory.raised(checkpoint.manifest))
        was_put = self.queue.known_state(checkpoint).was_put
        job = FlushJob(
            checkpoint=checkpoint,
            node=memory.node,
            storage=storage,
            overwrite=registration.overwrite,
            meter=turn.attempt.meter(storage),
            throttle=self._destination.throttle(registration),
            lost=lost,
            damaged=damaged,
            ownership=ownership,
            was_put=was_put and _is_superseded(memory, checkpoint),
            memory=memory,
            reuse=self._destination.reuse(registration),
        )
        has_committed = flush(job)
        ended = turn.attempt.record()
        record = replace(
            ended,
            outcome=Outcome.DURABLE,
            error="",
            durable=time.time(),
            attempts=ended.attempts + 1,
        )
        if has_committed:
            row = row_of(checkpoint.manifest, record)
            is_shown = registration.shows_history
            add_to_stored_history(storage, row, memory.history.rows(), is_shown=is_shown)
        return record, has_committed

    def _lost(self, turn: _Turn) -> tuple[frozenset[str], set[str]]:
        """Return the nodes that won't put their parts any more, and copies known as damaged.

        Nodes that the job has gone on without are lost. Where no trainer is left here, all
        other nodes whose parts have been missing for long are taken for lost.
        """
        nodes, checkpoint = turn.registration.nodes, turn.checkpoint
        others = frozenset(checkpoint.manifest.nodes) - {turn.memory.node}
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

    def _drop(self, turn: _Turn) -> None:
        """Remove what was put of a checkpoint that can't be finished any more."""
        registration, checkpoint = turn.registration, turn.checkpoint
        try:
            with environment_of(registration):
                storage = self._destination.storage(registration)
                overwrite = registration.overwrite
                node = turn.memory.node
                drop_part(
                    FlushJob(checkpoint=checkpoint, node=node, storage=storage, overwrite=overwrite)
                )
        except Exception as error:
            log.warning(
                "what was put of %s can't be taken away (collect_orphans does): %s",
                checkpoint.name,
                error,
            )

    def _retain(self, turn: _Turn) -> None:
        """Delete from storage what the job doesn't keep, now that this checkpoint is there."""
        registration, memory = turn.registration, turn.memory
        try:
            committed = memory.raised(turn.checkpoint.manifest)
            with environment_of(registration):
                deleted = self._destination.retain(registration, memory, committed)
            memory.history.note_deleted(deleted)
        except Exception as error:  # the next commit brings another chance
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

    def _wait_for_others(self, turn: _Turn, reason: str) -> None:
        """Come back soon: this node's part is stored, and another node's is missing.

        A node whose part stays away has dropped the checkpoint, or died. Where a newer checkpoint
        is durable there is little to lose: then the node has some times the time that this node's
        part took.
        """
        now = time.monotonic()
        state = self.queue.state(turn.checkpoint)
        state.own_part_seconds = max(state.own_part_seconds, turn.attempt.seconds)
        state.waiting_since = state.waiting_since or now
        state.last_look = now
        state.waits += 1
        state.due = now + min(_LONGEST_LOOK, 0.05 * 1.5 ** min(state.waits, 20))
        waited = now - state.waiting_since
        is_late = waited > _PEER_LAG + 10 * state.own_part_seconds
        is_late = is_late and not turn.registration.persists_all
        if _is_superseded(turn.memory, turn.checkpoint) and is_late:
            self._skip(turn, f"{reason}; a newer one is durable")
        elif waited > _PEER_GRACE:
            self._fail(turn, StorageUnavailable(turn.registration.url, reason))
        else:
            turn.attempt.note_waiting()

    def _skip(self, turn: _Turn, reason: str) -> None:
        """Record that the checkpoint isn't tried any more."""
        ended = turn.attempt.record()
        attempts = ended.attempts + 1
        record = replace(ended, outcome=Outcome.SKIPPED, error=reason, attempts=attempts)
        self.queue.record(turn.memory, turn.checkpoint, record)
        self.queue.end(turn.checkpoint)
        log.warning("%s is skipped: %s", turn.checkpoint.name, reason)

    def _fail(self, turn: _Turn, error: Exception) -> None:
        """Record a failure, and come back after a pause that doubles with each of them."""
        text = str(error) if isinstance(error, DcpMemError) else f"{type(error).__name__}: {error}"
        may_pass = isinstance(error, StorageUnavailable) or not isinstance(error, DcpMemError)
        state = self.queue.state(turn.checkpoint)
        pause = min(_LONGEST_PAUSE, 0.5 * 2 ** min(state.failures + 1, 10))
        pause *= random.uniform(0.7, 1.3)
        ended = turn.attempt.record()
        record = replace(
            ended,
            outcome=Outcome.FAILED if may_pass else Outcome.REFUSED,
            error=text,
            attempts=ended.attempts + 1,
            again=time.time() + pause,
        )
        self.queue.record(turn.memory, turn.checkpoint, record)
        state.refusals += not may_pass
        state.add_failure(pause)
        name = turn.checkpoint.name
        log.warning("flush of %s failed, next try in %.1f s: %s", name, pause, text)


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
