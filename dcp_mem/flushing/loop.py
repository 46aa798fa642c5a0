"""The loop that flushes the checkpoints of a memory root's jobs, one after the other.

The agent's process runs it, or a thread of the trainer (`agent="thread"`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from dcp_mem.flushing.flusher import JobFlusher
from dcp_mem.flushing.registration import Registration
from dcp_mem.memory.checksumming import ChecksumThread

_LOOK_SECONDS = 1.0
_BUSY_LOOK_SECONDS = 0.05
_DRAIN_SECONDS = 60.0


class FlushLoop:
    """Flushes the checkpoints of registered jobs until it is told to stop. Checksums of all their
    checkpoints are made meanwhile: a slow flush doesn't hold those up. One thread calls `run`, or
    `flush_next`; all other methods may be called from any thread.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._flushers: dict[str, JobFlusher] = {}
        self._checksums: ChecksumThread | None = None
        self._woken = threading.Event()
        self._lock = threading.Lock()
        self._is_closed = self._is_stopping = False

    def register(self, registration: Registration) -> bool:
        """Take a job on, or its new credentials or nodes; return False where the loop has ended."""
        with self._lock:
            if self._is_closed:
                return False
            known = self._flushers.get(registration.job)
            if known is None:
                self._flushers[registration.job] = JobFlusher(self._root, registration)
            else:
                known.register(registration)
            if self._checksums is not None:
                self._checksums.wake(registration.job, registration.on_nonfinite)
            self._woken.set()
            return True

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
        checksums = ChecksumThread(self._root, _LOOK_SECONDS)
        with self._lock:
            self._checksums = checksums
            for one in self._jobs():
                checksums.wake(one.registration.job, one.registration.on_nonfinite)
        idle_since = time.monotonic()
        try:
            while not self._is_stopping and may_go_on():
                self._woken.clear()
                if self.flush_next():
                    idle_since = time.monotonic()
                    continue
                for job in self._jobs():
                    job.exporter.go_on(job.registration)
                if linger_seconds is not None:
                    is_needed = any(job.is_needed() for job in self._jobs())
                    if not is_needed:
                        checksums.hurry()
                    if is_needed or checksums.is_busy:
                        idle_since = time.monotonic()
                    elif time.monotonic() - idle_since > linger_seconds and self._is_over():
                        return
                due = [one - time.monotonic() for job in self._jobs() for one in job.due_times()]
                self._woken.wait(max(0.0, min(*due, look_seconds)) if due else look_seconds)
        finally:
            checksums.stop()

    def flush_next(self) -> bool:
        """Flush one checkpoint, of the job that was served least recently; False if none is due."""
        return any(job.flush_next() for job in sorted(self._jobs(), key=lambda one: one.last_turn))

    def retry(self) -> None:
        for job in self._jobs():
            job.retry()

    def stop(self) -> None:
        """End the loop after the checkpoint that it is at."""
        self._is_stopping = True
        self._woken.set()

    def _jobs(self) -> list[JobFlusher]:
        return list(self._flushers.values())

    def _is_over(self) -> bool:
        """Take no more jobs on, unless one has just come: a job that was taken on is served."""
        with self._lock:
            self._is_closed = not self._woken.is_set()
            return self._is_closed


class FlushThread(FlushLoop):
    """The loop in a daemon thread of the trainer, where no second process may run."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self._thread = threading.Thread(target=self.run, name="dcp_mem-flush", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        super().stop()
        self._thread.join(timeout=_DRAIN_SECONDS)

    def drain(self) -> None:
        """Try all that is pending once more as the process ends, until it is done or has failed."""
        deadline = time.monotonic() + _DRAIN_SECONDS
        self.retry()
        self._woken.set()
        while time.monotonic() < deadline and any(job.queue.is_busy() for job in self._jobs()):
            time.sleep(_BUSY_LOOK_SECONDS)
