"""The flush loop in a thread of the trainer (`agent="thread"`), where no second process may run."""

from __future__ import annotations

import threading

from dcp_mem.flushing.loop import FlushLoop
from dcp_mem.flushing.registration import Registration

_DRAIN_SECONDS = 60.0


class FlushThread:
    """A daemon thread that flushes the checkpoints under a memory root."""

    def __init__(self, root: str) -> None:
        self._loop = FlushLoop(root)
        self._thread = threading.Thread(target=self._loop.run, name="dcp_mem-flush", daemon=True)
        self._thread.start()

    def wake(self, registration: Registration) -> None:
        """Tell the thread that the job may have a checkpoint to flush."""
        self._loop.register(registration)

    def stop(self) -> None:
        """End the thread after the checkpoint that it is at."""
        self._loop.stop()
        self._thread.join(timeout=_DRAIN_SECONDS)

    def drain(self) -> None:
        """Give what is pending a last chance as the process ends.

        What stays pending is flushed by the job's next start.
        """
        self._loop.drain(_DRAIN_SECONDS)
