"""What feeds trackers: on rank 0, from a thread of its own, so that training waits for none of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from queue import Full, Queue

import torch.distributed as dist

from dcp_mem import watch
from dcp_mem.config import Settings
from dcp_mem.errors import ConfigError
from dcp_mem.events import log
from dcp_mem.operating.inventory import job_memory
from dcp_mem.reader import RecoveryReport
from dcp_mem.trackers.base import Event, Tracker
from dcp_mem.values import CheckpointStatus, State

_MOST_WAITING = 10_000
_PATIENCE = 15.0
_STEPS = 1_000


class Feed:
    """Tells trackers what comes of a job's checkpoints.

    Saves and restores are told as they happen. What becomes of a checkpoint behind training, its flush and its copies, is looked
    up in this node's memory after each save and at the end. What was known before this was made isn't told.
    """

    def __init__(self, trackers: Sequence[Tracker], settings: Settings, group: dist.ProcessGroup | None) -> None:
        for tracker in trackers:
            if not isinstance(tracker, Tracker):
                raise ConfigError(f"trackers: a {type(tracker).__name__} has no track() and close()")
        self._trackers = list(trackers)
        self._settings, self._group = settings, group
        self._since = time.time()
        self._told: set[tuple[str, ...]] = set()
        self._steps: dict[str, int] = {}  # of the last saves, by name: what has left memory doesn't tell
        self._events: Queue[Event | None] = Queue(_MOST_WAITING)
        self._thread: threading.Thread | None = None
        self._is_behind = False

    def saved(self, name: str, step: int, outcome: str, seconds: float, nbytes: int = 0, error: str = "") -> None:
        """Tell of a save, and look what has become of those before it."""
        self._put(Event("save", outcome, time.time(), self._settings.job, name, step, seconds, nbytes, detail=error))

    def restored(self, report: RecoveryReport) -> None:
        """Tell of a restore."""
        figures = {f"{source}_bytes": float(nbytes) for source, nbytes in report.sources.items()}
        facts = (self._settings.job, report.checkpoint_id, report.step, report.seconds, report.nbytes)
        detail = "; ".join(f"passed over {reason}" for reason in report.passed_over)
        self._put(Event("restore", "restored", time.time(), *facts, figures, detail))

    def close(self) -> None:
        """Tell what has become known since the last save, and end the trackers. Closing twice is fine."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        try:
            self._events.put(None, timeout=_PATIENCE)
            thread.join(_PATIENCE)
        except Full:
            pass
        if thread.is_alive():
            log.warning("trackers haven't taken all that they were told within %.0f s", _PATIENCE)

    def _put(self, event: Event) -> None:
        if not self._trackers or _rank(self._group) != 0:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="dcp_mem-trackers", daemon=True)
            self._thread.start()
        try:
            self._events.put_nowait(event)
        except Full:
            if not self._is_behind:
                log.warning("trackers are far behind; what they can't take any more is left out")
            self._is_behind = True

    def _work(self) -> None:
        while (event := self._events.get()) is not None:
            self._tell(event)
            if event.kind == "save":
                self._note_step(event)
                self._look()
        self._look()
        for tracker in list(self._trackers):
            self._try(tracker, tracker.close)

    def _note_step(self, event: Event) -> None:
        if event.step is not None:
            self._steps[event.checkpoint] = event.step
        if len(self._steps) > _STEPS:
            del self._steps[next(iter(self._steps))]

    def _look(self) -> None:
        try:
            is_there = job_memory(self._settings) is not None
            for event in self._news(watch.status(self._settings)) if is_there else ():
                self._tell(event)
        except Exception as error:  # the next look may find more
            log.warning("what became of checkpoints can't be looked up for trackers: %s", error)

    def _news(self, checkpoints: Sequence[CheckpointStatus]) -> Iterator[Event]:
        """What hasn't been told yet, oldest first."""
        there = {one.save_id for one in checkpoints}
        self._told = {key for key in self._told if key[0] in there}  # a run of months makes many
        for one in reversed(checkpoints):
            for key, event in (*_flushes(self._settings.job, one), *_copies(self._settings.job, one)):
                is_new = (one.save_id, *key) not in self._told
                self._told.add((one.save_id, *key))
                event = event if event.step is not None else replace(event, step=self._steps.get(one.name))
                if is_new and max(one.created, one.durable) >= self._since:
                    yield event

    def _tell(self, event: Event) -> None:
        for tracker in list(self._trackers):
            self._try(tracker, partial(tracker.track, event))

    def _try(self, tracker: Tracker, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # whatever it is, training goes on
            self._trackers.remove(tracker)
            log.warning("%s is told no more: %s: %s", type(tracker).__name__, type(error).__name__, error)


def _flushes(job: str, one: CheckpointStatus) -> Iterator[tuple[tuple[str, ...], Event]]:
    """What there is to tell of a checkpoint's flush; before it, what tells it from what has been told."""
    outcome, when, key = "", time.time(), ""
    if one.durable and one.state in (State.DURABLE, State.DELETED):
        outcome, when = "durable", one.durable
    elif one.state is State.FAILED:
        outcome, key = "failed", str(one.flush_attempts)
    elif one.state is State.SKIPPED and one.save_id and one.persist:
        outcome = "skipped"
    if outcome:
        figures = {"attempts": float(one.flush_attempts), "retries": float(one.transfer.retries)}
        facts = (job, one.name, one.step, one.flush_seconds, one.nbytes)
        yield ("flush", outcome, key), Event("flush", outcome, when, *facts, figures, one.error)


def _copies(job: str, one: CheckpointStatus) -> Iterator[tuple[tuple[str, ...], Event]]:
    """The same of its copies on other nodes, or its parity there."""
    outcome = "replicated" if one.is_replicated else "failed" if one.replication_error else ""
    if outcome:
        figures = {"on_nodes": float(one.replicas), "parity_over": float(one.parity)}
        facts = (job, one.name, one.step, one.replication_seconds, one.nbytes * one.replicas)
        yield ("copies", outcome), Event("copies", outcome, time.time(), *facts, figures, one.replication_error)


def _rank(group: dist.ProcessGroup | None) -> int:
    return dist.get_rank(group) if dist.is_available() and dist.is_initialized() else 0
