"""The meter of a flush, and the throttle that limits its speed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

from dcp_mem.common.values import Transfer

Stage = Literal["segments", "commit"]

_REPORT_EVERY = 0.5
"""Seconds between two reports."""
_LOOK = 0.2
"""Longest time, in seconds, until a waiting part notices that it is to stop."""


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
