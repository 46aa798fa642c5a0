"""The thread of rank 0 that tells trackers what becomes of checkpoints: training never waits."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from dataclasses import asdict, replace
from functools import partial

import torch.distributed as dist

from dcp_mem.comm import rank_in
from dcp_mem.common.arguments import shown
from dcp_mem.common.log import log
from dcp_mem.common.parallel import KeptThreads
from dcp_mem.common.values import HISTORIES, RECOVERIES, CheckpointStatus, State
from dcp_mem.config import Settings
from dcp_mem.errors import ConfigError
from dcp_mem.format.history import to_csv
from dcp_mem.format.records import moment_text
from dcp_mem.format.recoveries import to_lines
from dcp_mem.manager.saved import Saved
from dcp_mem.manager.tracker import Event, Publisher, Story, Tracker
from dcp_mem.operations.history import History, fate_of, flush_throughput, read_history, totals
from dcp_mem.operations.report import render_page
from dcp_mem.reader import RecoveryReport
from dcp_mem.runtime import states
from dcp_mem.runtime.states import job_memory
from dcp_mem.storage.retry import RetryPolicy

_MOST_WAITING = 10_000
_PATIENCE = 15.0
_STEPS = 1_000
_BETWEEN_STORIES = 60.0
_FEW_RETRIES = RetryPolicy(tries=2, longest_pause_seconds=1.0, deadline_seconds=5.0)


class Feed:
    """Tells trackers what becomes of a job's checkpoints.

    Saves and restores are told as they happen. Flushes and copies, which happen behind training,
    are looked up in this node's memory after each save and at the end. What was known before the
    feed was made isn't told.

    `trackers`: to be told; a tracker that raises is left out from then on. Raises ConfigError.
    """

    def __init__(
        self, trackers: Sequence[Tracker], settings: Settings, group: dist.ProcessGroup | None
    ) -> None:
        for tracker in trackers if isinstance(trackers, (list, tuple)) else (None,):
            if not isinstance(tracker, Tracker):
                raise ConfigError(
                    f"trackers={shown(trackers)}: give a list of objects with track() and close()"
                )
        self._trackers = list(trackers)
        self._publishers = [one for one in trackers if isinstance(one, Publisher)]
        self._settings, self._group = settings, group
        self._told: set[tuple[str, ...]] = set()
        # Steps of the last saves, by name: a checkpoint that has left memory doesn't tell its own.
        self._steps: dict[str, int] = {}
        self._thread = KeptThreads(1, "dcp_mem-trackers")
        self._room = threading.Semaphore(_MOST_WAITING)
        self._has_told = self._is_behind = False
        self._published = -math.inf
        self._look(lambda event: None)  # what earlier runs have left; clocks don't tell it apart

    def saved(self, saved: Saved) -> None:
        """Tell of a save, and of what has become of those before it."""
        self._put(
            Event(
                kind="save",
                outcome=saved.outcome,
                time=time.time(),
                job=self._settings.job,
                checkpoint=saved.name,
                step=saved.step,
                seconds=saved.seconds,
                nbytes=saved.nbytes,
                detail=saved.error,
            )
        )

    def restored(self, report: RecoveryReport) -> None:
        """Tell of a restore."""
        self._put(
            Event(
                kind="restore",
                outcome="restored",
                time=time.time(),
                job=self._settings.job,
                checkpoint=report.checkpoint_id,
                step=report.step,
                seconds=report.seconds,
                nbytes=report.nbytes,
                figures={f"{source}_bytes": float(n) for source, n in report.sources.items()},
                detail="; ".join(f"passed over {reason}" for reason in report.passed_over),
            )
        )

    def close(self) -> None:
        """Tell what has become known since the last save, and close the trackers."""
        if not self._has_told:
            return
        self._has_told, end = False, self._thread.submit(self._end)
        self._thread.close()
        if not wait([end], _PATIENCE).done:
            log.warning("trackers haven't taken all that they were told within %.0f s", _PATIENCE)

    def _put(self, event: Event) -> None:
        if not self._trackers or rank_in(self._group) != 0:
            return
        self._has_told = True
        if self._room.acquire(blocking=False):
            self._thread.submit(self._take, event)
        elif not self._is_behind:
            self._is_behind = True
            log.warning("trackers are far behind; further events are left out")

    def _take(self, event: Event) -> None:
        self._room.release()
        self._tell(event)
        if event.kind == "save":
            self._note_step(event)
            self._look(self._tell)
            if time.monotonic() - self._published > _BETWEEN_STORIES:
                self._publish()

    def _end(self) -> None:
        self._look(self._tell)
        self._publish()
        for tracker in list(self._trackers):
            self._try(tracker, tracker.close)

    def _note_step(self, event: Event) -> None:
        if event.step is not None:
            self._steps[event.checkpoint] = event.step
        if len(self._steps) > _STEPS:
            del self._steps[next(iter(self._steps))]

    def _look(self, tell: Callable[[Event], None]) -> None:
        """Tell what has become of checkpoints since the last look."""
        try:
            if job_memory(self._settings) is not None:
                for event in self._news(states.status(self._settings)):
                    tell(event)
        except Exception as error:  # The next look may find more.
            log.warning("what became of checkpoints can't be looked up for trackers: %s", error)

    def _news(self, checkpoints: Sequence[CheckpointStatus]) -> Iterator[Event]:
        """Yield the events that haven't been told yet, oldest first."""
        known = {one.save_id for one in checkpoints}
        # A run of months makes many checkpoints: forget those that are no longer listed.
        self._told = {key for key in self._told if key[0] in known}
        for one in reversed(checkpoints):
            for key, event in _fates(self._settings.job, one):
                is_new = (one.save_id, *key) not in self._told
                self._told.add((one.save_id, *key))
                if event.step is None:
                    event = replace(event, step=self._steps.get(one.name))
                if is_new:
                    yield event

    def _publish(self) -> None:
        publishers = [one for one in self._publishers if one in self._trackers]
        if not publishers:
            return
        self._published = time.monotonic()
        try:
            story = _story(read_history(self._settings, retry_policy=_FEW_RETRIES))
        except Exception as error:  # The next one tells as much.
            log.warning("trackers get no report of %s: %s", self._settings.job, error)
            return
        for tracker in publishers:
            self._show(tracker, story)

    def _show(self, tracker: Publisher, story: Story) -> None:
        try:
            tracker.publish(story)
        except Exception as error:  # Its figures may still get through.
            self._publishers.remove(tracker)
            name, kind = type(tracker).__name__, type(error).__name__
            log.warning("%s gets no more reports: %s: %s", name, kind, error)

    def _tell(self, event: Event) -> None:
        for tracker in list(self._trackers):
            self._try(tracker, partial(tracker.track, event))

    def _try(self, tracker: Tracker, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # Whatever it is, training goes on.
            self._trackers.remove(tracker)
            log.warning(
                "%s is told no more: %s: %s", type(tracker).__name__, type(error).__name__, error
            )


def _story(history: History) -> Story:
    return Story(
        job=history.job,
        page=render_page(history),
        files={
            HISTORIES: to_csv(history.checkpoints).decode(),
            RECOVERIES: to_lines(history.recoveries).decode(),
        },
        checkpoints=[
            {
                "checkpoint": one.name,
                "step": "" if one.step is None else one.step,
                "created": moment_text(one.created),
                "outcome": fate_of(one).value,
                "bytes": one.nbytes,
                "save_seconds": one.stage_seconds,
                "flush_seconds": one.flush_seconds,
                "flush_bytes_per_second": flush_throughput(one),
                "error": one.error,
            }
            for one in history.checkpoints
        ],
        totals=asdict(totals(history)),
    )


def _fates(job: str, one: CheckpointStatus) -> Iterator[tuple[tuple[str, ...], Event]]:
    """Yield what became of a checkpoint's flush and copies, behind keys that tell it apart."""
    event = partial(Event, job=job, checkpoint=one.name, step=one.step)
    outcome, when, key = "", time.time(), ""
    if one.durable and one.state in (State.DURABLE, State.DELETED):
        outcome, when = "durable", one.durable
    elif one.state is State.FAILED:
        outcome, key = "failed", str(one.flush_attempts)
    elif one.state is State.SKIPPED and one.save_id and one.persist:
        outcome = "skipped"
    if outcome:
        yield (
            ("flush", outcome, key),
            event(
                kind="flush",
                outcome=outcome,
                time=when,
                seconds=one.flush_seconds,
                nbytes=one.nbytes,
                figures={
                    "attempts": float(one.flush_attempts),
                    "retries": float(one.transfer.retries),
                },
                detail=one.error,
            ),
        )
    copied = "replicated" if one.is_replicated else "failed" if one.replication_error else ""
    if copied:
        yield (
            ("copies", copied),
            event(
                kind="copies",
                outcome=copied,
                time=time.time(),
                seconds=one.replication_seconds,
                nbytes=one.nbytes * one.replicas,
                figures={"on_nodes": float(one.replicas), "parity_over": float(one.parity)},
                detail=one.replication_error,
            ),
        )
