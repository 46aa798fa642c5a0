"""The order of flushes among the jobs of a memory root; exports come when no flush is due.

One scheduler serves them all. It runs in the agent, or in a thread of the trainer
(`agent="thread"`).
"""

from __future__ import annotations

import time

from dcp_mem.flushing.flusher import JobFlusher
from dcp_mem.flushing.registration import Registration


class FlushScheduler:
    """Flushes the pending checkpoints of registered jobs."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._jobs: dict[str, JobFlusher] = {}

    def register(self, registration: Registration) -> None:
        """Take a job on, or its new credentials or nodes."""
        known = self._jobs.get(registration.job)
        if known is None:
            self._jobs[registration.job] = JobFlusher(self._root, registration)
        else:
            known.register(registration)

    def flush_next(self) -> bool:
        """Flush one checkpoint, of the job that has waited longest.

        1. Write down what memory had no room for so far; claim generations for new runs.
        2. Take the job that was served least recently among those with a checkpoint that is due.
        3. Flush the one that has failed least often, and of several the newest.

        Returns False where no checkpoint is due.
        """
        jobs = sorted(self._all(), key=lambda one: one.last_turn)
        for job in jobs:
            job.catch_up()
        return any(job.flush_next() for job in jobs)

    def export_next(self) -> None:
        """Have what is due exported: no flush is. Waits for nothing."""
        for job in self._all():
            job.export_next()

    def stop(self) -> None:
        """Have the processes that export end soon."""
        for job in self._all():
            job.stop()

    def retry(self) -> None:
        """Make everything due that has failed."""
        for job in self._all():
            job.retry()

    def seconds_until_next(self) -> float | None:
        """Return how long it is until something is due; None where nothing is pending."""
        due = [one for job in self._all() for one in job.due_times()]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def is_busy(self) -> bool:
        """Return whether anything is pending but failures that are tried again later."""
        return any(job.queue.is_busy() for job in self._all())

    def is_needed(self) -> bool:
        """Return whether a trainer lives, or something pending is still worth trying."""
        return any(job.is_needed() for job in self._all())

    def _all(self) -> list[JobFlusher]:
        return list(self._jobs.values())
