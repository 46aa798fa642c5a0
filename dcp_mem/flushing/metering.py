"""The meter and the records of a flush, and the throttle that limits its speed.

Records of a flush lie in memory while it runs, and in the history on storage afterwards. None of
them can fail a flush.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

from dcp_mem.common.files import write_atomically
from dcp_mem.common.log import log
from dcp_mem.common.values import HISTORIES, Outcome, Transfer
from dcp_mem.errors import DcpMemError, ManifestInvalid, StorageKeyMissing
from dcp_mem.flushing.registration import Registration
from dcp_mem.format import history, names
from dcp_mem.format.history import HistoryRow
from dcp_mem.format.manifest import FlushRecord
from dcp_mem.memory.checkpoint import LocalCheckpoint
from dcp_mem.memory.job import JobMemory
from dcp_mem.storage import Storage
from dcp_mem.storage.retry import RetryingStorage

Stage = Literal["segments", "commit"]

_REPORT_EVERY = 0.5
"""Seconds between two reports."""
_LOOK = 0.2
"""Longest time, in seconds, until a waiting part notices that it is to stop."""
_STORED_ROWS = 10_000


class Meter:
    """Counts what an attempt at a flush moves, beside what earlier attempts moved. Thread-safe."""

    def __init__(
        self,
        before: Transfer | None = None,
        *,
        retries: Callable[[], int] = lambda: 0,
        report: Callable[[str, Transfer], None] = lambda stage, transfer: None,
    ) -> None:
        """Begin an attempt. `retries` returns how many requests were repeats so far, of this
        attempt and others. `report` is called every half second at most, by the thread that counts.
        """
        self._lock = threading.Lock()
        self._so_far = before or Transfer()
        self._retries, self._retries_before = retries, retries()
        self._report, self._reported = report, time.monotonic()
        self._stage: Stage | None = None
        self._since = 0.0
        self._has_begun = False

    def expect(self, nbytes: int, parts: int) -> None:
        """Add to what this attempt has to move, none of which storage is known to have."""
        with self._lock:
            known = (
                self._so_far
                if self._has_begun
                else replace(self._so_far, nbytes=0, parts=0, stored_nbytes=0)
            )
            self._so_far = replace(known, nbytes=known.nbytes + nbytes, parts=known.parts + parts)
            self._has_begun = True

    def find_stored(self, nbytes: int) -> None:
        """Note that storage has all of this node's bytes since an earlier attempt."""
        with self._lock:
            self._so_far = replace(self._so_far, nbytes=nbytes, stored_nbytes=nbytes)
            self._has_begun = True

    def count(self, nbytes: int, *, is_sent: bool, is_reused: bool = False) -> None:
        """Count a part that storage has now, sent or copied (`is_reused`) by this attempt, or
        earlier.
        """
        with self._lock:
            known = self._so_far
            self._so_far = replace(
                known,
                stored_nbytes=known.stored_nbytes + nbytes,
                sent_nbytes=known.sent_nbytes + nbytes * is_sent,
                reused_nbytes=known.reused_nbytes + nbytes * is_reused,
                sent_parts=known.sent_parts + is_sent,
            )
            now = time.monotonic()
            is_due = now - self._reported >= _REPORT_EVERY
            if is_due:
                self._reported = now
            stage, transfer = self._stage or "", self._at(now)
        if is_due:
            self._report(stage, transfer)

    @contextmanager
    def stage(self, stage: Stage) -> Iterator[None]:
        with self._lock:
            self._stage, self._since = stage, time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self._so_far = self._timed(time.monotonic())
                self._stage = None

    def transfer(self) -> Transfer:
        with self._lock:
            return self._at(time.monotonic())

    def _at(self, now: float) -> Transfer:
        timed = self._timed(now)
        return replace(timed, retries=timed.retries + self._retries() - self._retries_before)

    def _timed(self, now: float) -> Transfer:
        known = self._so_far
        if self._stage == "segments":
            return replace(known, segments_seconds=known.segments_seconds + now - self._since)
        if self._stage == "commit":
            return replace(known, commit_seconds=known.commit_seconds + now - self._since)
        return known


class FlushAttempt(Meter):
    """One attempt at a flush; its progress stands in the checkpoint's record in memory."""

    def __init__(
        self,
        registration: Registration,
        memory: JobMemory,
        checkpoint: LocalCheckpoint,
        waited_seconds: float,
    ) -> None:
        """Begin an attempt, so many seconds after this node's part was done."""
        self.registration, self.memory, self.checkpoint = registration, memory, checkpoint
        self.begun = time.monotonic()
        before = checkpoint.flush.transfer
        waited_seconds += before.waiting_seconds
        super().__init__(replace(before, waiting_seconds=waited_seconds), report=self._note_stage)
        if checkpoint.flush.again:
            self._note(replace(checkpoint.flush, again=0.0))  # it isn't due later any more, but now

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begun

    def count_retries_of(self, storage: RetryingStorage) -> None:
        self._retries, self._retries_before = lambda: storage.retries, storage.retries

    def ended(
        self, outcome: Outcome, *, error: str = "", durable: float = 0.0, again: float = 0.0
    ) -> FlushRecord:
        found = self._record("", self.transfer())
        return replace(
            found,
            outcome=outcome,
            error=error,
            durable=durable or found.durable,
            again=again,
            attempts=found.attempts + 1,
            begun=self.begun,
        )

    def note_waiting(self) -> None:
        """Write down that this node's part is done, and another node's isn't."""
        transfer = self.transfer()
        # Otherwise this node has no part of its own.
        if 0 < transfer.nbytes == transfer.stored_nbytes:
            self._note_stage("waiting", transfer)

    def _note_stage(self, stage: str, transfer: Transfer) -> None:
        self._note(self._record(stage, transfer))

    def _record(self, stage: str, transfer: Transfer) -> FlushRecord:
        flush = self.checkpoint.flush
        seconds = flush.seconds + self.seconds
        return replace(flush, seconds=seconds, stage=stage, again=0.0, transfer=transfer)

    def _note(self, record: FlushRecord) -> None:
        """Write the record down in memory, if there is room for that."""
        try:
            self.memory.record_flush(self.checkpoint, record)
        except (DcpMemError, OSError) as error:
            log.debug("how far %s is can't be written down: %s", self.checkpoint.name, error)


class Throttle:
    """Lets through so many bytes per second; None for no limit. Thread-safe."""

    def __init__(self, bytes_per_second: float | None) -> None:
        self._rate = bytes_per_second
        self._changed = threading.Condition()
        self._free_at = 0.0

    def wait(self, nbytes: int, stop: threading.Event) -> None:
        """Wait until a part of so many bytes may be sent, or until `stop` is set."""
        if self._rate is None:
            return
        with self._changed:
            while not stop.is_set():
                now = time.monotonic()
                if self._free_at <= now:
                    self._free_at = now + nbytes / self._rate
                    return
                self._changed.wait(min(self._free_at - now, _LOOK))

    def give_back(self, nbytes: int) -> None:
        """Return the time of a part that need not be sent: storage turned out to have it."""
        if self._rate is not None:
            with self._changed:
                self._free_at -= nbytes / self._rate
                self._changed.notify()


def add_to_stored_history(
    storage: Storage,
    row: HistoryRow,
    known: Sequence[HistoryRow],
    *,
    is_shown: bool = False,
    outputs: str = "",
) -> None:
    """Add a checkpoint's row to the history on storage, or replace it; a failure is logged.
    `is_shown`: people look for the history in the root itself, and in `outputs` where that is
    given: copies are put there.
    """
    try:
        try:
            before = storage.get(names.job_file(HISTORIES))
        except StorageKeyMissing:
            before = history.to_csv([])
        try:
            after = history.with_row(before, row, _STORED_ROWS)
        except ManifestInvalid as error:
            log.warning("%s in %s is begun anew: %s", HISTORIES, storage.url, error)
            others = [one for one in known if one.save_id != row.save_id]
            durable = [one for one in others if one.outcome == Outcome.DURABLE]
            after = history.to_csv([*durable, row])
        for file in (names.job_file(HISTORIES), *([HISTORIES] if is_shown else [])):
            if after != before:
                storage.put(file, after)
        if is_shown and outputs:
            shown = os.path.join(outputs, "nebula", HISTORIES)
            os.makedirs(os.path.dirname(shown), exist_ok=True)
            write_atomically(shown, after, mode=0o644)
    except Exception as error:  # the checkpoint is committed, whatever this may be
        log.warning(
            "%s is durable, but %s in %s doesn't tell: %s", row.name, HISTORIES, storage.url, error
        )
