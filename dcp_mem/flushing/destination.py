"""Where one job's checkpoints go: its storage, and what is kept with it from flush to flush."""

from __future__ import annotations

from functools import cached_property

from dcp_mem.flushing.metering import Throttle
from dcp_mem.flushing.ownership import Ownership
from dcp_mem.flushing.queue import FlushQueue
from dcp_mem.flushing.registration import Registration
from dcp_mem.flushing.retention import Retainer
from dcp_mem.flushing.reuse import Reuse
from dcp_mem.storage.retry import RetryingStorage, RetryPolicy
from dcp_mem.storage.routes import open_storage

_RETRY_POLICY = RetryPolicy(tries=4, first_pause_seconds=0.2, longest_pause_seconds=3.0)
"""Of requests within a flush. A failed flush is tried again, and goes on where it stopped."""


class Destination:
    """A registration's storage, opened within `environment_of` the registration. It is kept: file
    systems cost connections, and some are never freed.
    """

    def __init__(self, registration: Registration, queue: FlushQueue) -> None:
        self._registration, self._queue = registration, queue
        self.throttle = Throttle(registration.upload_limit)
        self.reuse = Reuse() if registration.reuse_stored else None
        self.retainer = Retainer()

    @cached_property
    def storage(self) -> RetryingStorage:
        registration = self._registration
        return open_storage(registration.url, registration.storage_options, _RETRY_POLICY)

    @cached_property
    def ownership(self) -> Ownership:
        return Ownership(self._queue.memory(), self.storage, self._queue.is_live)

    def forget(self) -> None:
        """Have the storage opened, and looked at, anew: something has failed."""
        self.retainer = Retainer()
        for name in ("storage", "ownership"):
            self.__dict__.pop(name, None)
