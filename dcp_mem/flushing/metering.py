"""What a flush is counted and slowed down by."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

from dcp_mem.values import Transfer

Stage = Literal["segments", "commit"]

_TELL_EVERY = 0.5
_LOOK = 0.2


class Meter:
    """Counts what an attempt at a flush moves, on top of what came of earlier ones. Thread-safe.

    retries: how many requests were repeats, so far, of this attempt and others.
    tell: told stage and figures once in half a second at most, by whoever counts: it must be quick, and not raise.
    """

    def __init__(
        self,
        before: Transfer | None = None,
        *,
        retries: Callable[[], int] = lambda: 0,
        tell: Callable[[str, Transfer], None] = lambda stage, transfer: None,
    ) -> None:
        self._lock = threading.Lock()
        self._so_far = before or Transfer()
        self._retries, self._retries_before = retries, retries()
        self._tell, self._told = tell, time.monotonic()
        self._stage: Stage | None = None
        self._since = 0.0
        self._has_begun = False

    def expect(self, nbytes: int, parts: int) -> None:
        """Note that there is this to move, beside what this attempt knew of, and that storage has none of it yet."""
        with self._lock:
            known = self._so_far if self._has_begun else replace(self._so_far, nbytes=0, parts=0, stored_nbytes=0)
            self._so_far = replace(known, nbytes=known.nbytes + nbytes, parts=known.parts + parts)
            self._has_begun = True

    def find_stored(self, nbytes: int) -> None:
        """Note that storage has all of this node's bytes since an earlier attempt."""
        with self._lock:
            self._so_far = replace(self._so_far, nbytes=nbytes, stored_nbytes=nbytes)
            self._has_begun = True

    def count(self, nbytes: int, *, is_sent: bool) -> None:
        """Note a part that storage has now, sent by us or known from an earlier attempt."""
        with self._lock:
            known = self._so_far
            self._so_far = replace(
                known,
                stored_nbytes=known.stored_nbytes + nbytes,
                sent_nbytes=known.sent_nbytes + nbytes * is_sent,
                sent_parts=known.sent_parts + is_sent,
            )
            now = time.monotonic()
            is_due = now - self._told >= _TELL_EVERY
            if is_due:
                self._told = now
            stage, transfer = self._stage or "", self._at(now)
        if is_due:
            self._tell(stage, transfer)

    @contextmanager
    def stage(self, stage: Stage) -> Iterator[None]:
        """Time what runs meanwhile."""
        with self._lock:
            self._stage, self._since = stage, time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self._so_far = self._timed(time.monotonic())
                self._stage = None

    def transfer(self) -> Transfer:
        """The figures up to now."""
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
    """Lets through so many bytes per second, None for as many as come. Thread-safe."""

    def __init__(self, bytes_per_second: float | None) -> None:
        self._rate = bytes_per_second
        self._changed = threading.Condition()
        self._free_at = 0.0

    def wait(self, nbytes: int, stop: threading.Event) -> None:
        """Wait for this part's turn, or until `stop` is set."""
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
        """Have others take the turn of a part that storage turned out to have."""
        if self._rate is not None:
            with self._changed:
                self._free_at -= nbytes / self._rate
                self._changed.notify()
