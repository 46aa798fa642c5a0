"""Where one job's checkpoints go: its storage, and what is kept with it from flush to flush."""

from __future__ import annotations

from collections.abc import Callable

from dcp_mem.flushing.metering import Throttle
from dcp_mem.flushing.ownership import Ownership
from dcp_mem.flushing.registration import Registration
from dcp_mem.flushing.retention import Retainer
from dcp_mem.flushing.reuse import Reuse
from dcp_mem.format.manifest import Manifest
from dcp_mem.memory.job import JobMemory
from dcp_mem.storage.retry import RetryingStorage, RetryPolicy
from dcp_mem.storage.routes import open_storage

_RETRY_POLICY = RetryPolicy(tries=4, first_pause_seconds=0.2, longest_pause_seconds=3.0)
"""Of requests within a flush. A failed flush is tried again, and goes on where it stopped."""


class Destination:
    """A job's storage, and what counts and limits there from flush to flush.

    A job may register anew at any time, also during a flush: so all that depends on its
    registration is given one, whose credentials must hold (`environment_of`).
    """

    def __init__(self, is_live: Callable[[], bool]) -> None:
        self._is_live = is_live
        self._storage: tuple[Registration, RetryingStorage] | None = None
        self._throttle: tuple[int | None, Throttle] | None = None
        self._ownership: Ownership | None = None
        self._reuse: tuple[str, Reuse] | None = None
        self._retainer = Retainer()

    def storage(self, registration: Registration) -> RetryingStorage:
        """Return the job's storage, opened again after a failure.

        It is kept: file systems cost connections, and some are never freed.
        """
        known = self._storage
        if known is None or not known[0].has_same_destination(registration):
            options = registration.storage_options
            known = registration, open_storage(registration.url, options, _RETRY_POLICY)
            self._storage = known
        return known[1]

    def forget_storage(self) -> None:
        """Have the storage opened again at its next use: something has failed."""
        self._storage = None

    def throttle(self, registration: Registration) -> Throttle:
        """Return the job's throttle. It is kept: what one flush sent counts for the next."""
        limit = registration.upload_limit
        if self._throttle is None or self._throttle[0] != limit:
            self._throttle = limit, Throttle(limit)
        return self._throttle[1]

    def ownership(self, registration: Registration, memory: JobMemory) -> Ownership:
        """Return this node's part in the ownership of the storage; it is kept with the storage."""
        storage = self.storage(registration)
        if self._ownership is None or self._ownership.storage is not storage:
            self._ownership = Ownership(memory, storage, self._is_live)
        return self._ownership

    def reuse(self, registration: Registration) -> Reuse | None:
        """Return what the storage has to copy from; None where everything is to be sent."""
        if not registration.reuse_stored:
            return None
        if self._reuse is None or self._reuse[0] != registration.url:
            self._reuse = registration.url, Reuse()
        return self._reuse[1]

    def retain(
        self, registration: Registration, memory: JobMemory, committed: Manifest
    ) -> list[str]:
        """Delete from storage what the job doesn't keep; return the names."""
        if registration.keep_storage is None:
            return []
        storage = self.storage(registration)
        ownership = self.ownership(registration, memory)
        try:
            return self._retainer.apply(storage, registration.keep_storage, committed, ownership)
        except Exception:
            self._retainer = Retainer()  # what it remembers may not be so
            raise
