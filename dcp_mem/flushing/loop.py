"""The loop around the scheduler, which the agent's process and the trainer's flush thread run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from dcp_mem.flushing.registration import Registration
from dcp_mem.flushing.scheduler import FlushScheduler
from dcp_mem.memory.checksumming import ChecksumThread

_LOOK_SECONDS = 1.0
_BUSY_LOOK_SECONDS = 0.05


class FlushLoop:
    """Flushes the checkpoints of registered jobs, one after the other, until it is told to stop.

    Checksums of all their checkpoints are made meanwhile: a slow flush doesn't hold those up.
    One thread calls `run`; all other methods may be called from any thread.
    """

    def __init__(self, root: str) -> None:
        self._scheduler = FlushScheduler(root)
        self._checksums = ChecksumThread(root, _LOOK_SECONDS)
        self._woken = threading.Event()
        self._lock = threading.Lock()
        self._is_closed = False
        self._is_stopping = False

    def register(self, registration: Registration) -> bool:
        """Take a job on, and look at once whether it has a checkpoint to flush.

        Returns False where the loop has ended: then nothing was taken on.
        """
        with self._lock:
            if not self._is_closed:
                self._scheduler.register(registration)
                self._checksums.wake(registration.job, registration.on_nonfinite)
                self._woken.set()
            return not self._is_closed

    def run(
        self,
        *,
        may_go_on: Callable[[], bool] = lambda: True,
        linger_seconds: float | None = None,
        look_seconds: float = _LOOK_SECONDS,
    ) -> None:
        """Flush whatever is due, and wait in between.

        1. Flush one checkpoint, if one is due, and begin again.
        2. Otherwise have a process begin that exports, where that is due; it runs beside this loop.
        3. End, if there has been nothing to do for long enough.
        4. Otherwise wait until a checkpoint is due, or a job is registered.

        `may_go_on`: asked before each round; the loop ends where it says no. `linger_seconds`: how
        long the loop goes on with nothing to do; None: until `stop`.
        """
        try:
            self._run(may_go_on, linger_seconds, look_seconds)
        finally:
            self._scheduler.stop()
            self._checksums.stop()

    def _run(
        self, may_go_on: Callable[[], bool], linger_seconds: float | None, look_seconds: float
    ) -> None:
        idle_since = time.monotonic()
        while not self._is_stopping and may_go_on():
            self._woken.clear()
            if self._scheduler.flush_next():
                idle_since = time.monotonic()
                continue
            self._scheduler.export_next()
            if linger_seconds is not None:
                is_needed = self._scheduler.is_needed()
                if not is_needed:
                    self._checksums.hurry()
                if is_needed or self._checksums.is_busy:
                    idle_since = time.monotonic()
                elif time.monotonic() - idle_since > linger_seconds and self._close_unless_woken():
                    return
            due = self._scheduler.seconds_until_next()
            self._woken.wait(look_seconds if due is None else min(due, look_seconds))

    def stop(self) -> None:
        """End the loop after the checkpoint that it is at."""
        self._is_stopping = True
        self._woken.set()

    def drain(self, timeout_seconds: float) -> None:
        """Try all that is pending once more, and wait until it is done or has failed again."""
        deadline = time.monotonic() + timeout_seconds
        self._scheduler.retry()
        self._woken.set()
        while time.monotonic() < deadline and self._scheduler.is_busy():
            time.sleep(_BUSY_LOOK_SECONDS)

    def _close_unless_woken(self) -> bool:
        """Take no more jobs on, unless one has just come: a job that was taken on is served."""
        with self._lock:
            self._is_closed = not self._woken.is_set()
            return self._is_closed
