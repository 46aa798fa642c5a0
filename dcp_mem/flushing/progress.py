"""The records of a flush: in memory while it runs, in the history on storage afterwards.

None of it can fail a flush.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from dcp_mem.common.log import log
from dcp_mem.common.values import HISTORIES, Outcome, Transfer
from dcp_mem.errors import DcpMemError, ManifestInvalid, StorageKeyMissing
from dcp_mem.flushing.metering import Meter
from dcp_mem.format import history, names
from dcp_mem.format.history import HistoryRow
from dcp_mem.format.manifest import FlushRecord
from dcp_mem.memory.checkpoint import LocalCheckpoint
from dcp_mem.memory.job import JobMemory
from dcp_mem.storage import Storage
from dcp_mem.storage.retry import RetryingStorage

_STORED_ROWS = 10_000


class FlushAttempt:
    """One attempt at a flush; its progress stands in the checkpoint's record in memory."""

    def __init__(
        self, memory: JobMemory, checkpoint: LocalCheckpoint, waited_seconds: float
    ) -> None:
        """Begin an attempt.

        `waited_seconds`: time since this node's part was done, spent in waiting for other nodes.
        """
        self._memory, self._checkpoint = memory, checkpoint
        self._started = time.monotonic()
        before = checkpoint.flush.transfer
        self._before = replace(before, waiting_seconds=before.waiting_seconds + waited_seconds)
        self._meter = Meter(self._before)
        if checkpoint.flush.again:
            self.note(replace(checkpoint.flush, again=0.0))  # it isn't due later any more, but now

    @property
    def seconds(self) -> float:
        """Seconds since the attempt began."""
        return time.monotonic() - self._started

    def meter(self, storage: RetryingStorage) -> Meter:
        """Return what counts this attempt on its way to the storage.

        `storage`: the attempt's storage, which counts how often it repeats a request.
        """
        self._meter = Meter(self._before, retries=lambda: storage.retries, report=self._report)
        return self._meter

    def record(self) -> FlushRecord:
        """Return the checkpoint's record with the figures up to now."""
        return self._record_at("", self._meter.transfer())

    def note(self, record: FlushRecord) -> None:
        """Write the record down in memory, if there is room for that."""
        try:
            self._memory.record_flush(self._checkpoint, record)
        except (DcpMemError, OSError) as error:
            log.debug("how far %s is can't be written down: %s", self._checkpoint.name, error)

    def note_waiting(self) -> None:
        """Write down that this node's part is done, and another node's isn't."""
        record = self.record()
        # Otherwise this node has no part of its own.
        if 0 < record.transfer.nbytes == record.transfer.stored_nbytes:
            self.note(replace(record, stage="waiting"))

    def _report(self, stage: str, transfer: Transfer) -> None:
        self.note(self._record_at(stage, transfer))

    def _record_at(self, stage: str, transfer: Transfer) -> FlushRecord:
        flush = self._checkpoint.flush
        seconds = flush.seconds + self.seconds
        return replace(flush, seconds=seconds, stage=stage, again=0.0, transfer=transfer)


def add_to_stored_history(
    storage: Storage, row: HistoryRow, known: Sequence[HistoryRow], *, is_shown: bool = False
) -> None:
    """Add a checkpoint's row to the history on storage; a failure is logged.

    `row`: takes the place of an earlier one of the same save. `is_shown`: whether people look for
    the history in the root itself: a copy is put there.
    """
    try:
        before = _stored_history(storage)
        try:
            after = (
                history.to_csv([row])
                if before is None
                else history.with_row(before, row, _STORED_ROWS)
            )
        except ManifestInvalid as error:
            log.warning("%s in %s is begun anew: %s", HISTORIES, storage.url, error)
            durable = [
                other
                for other in known
                if other.save_id != row.save_id and other.outcome == Outcome.DURABLE
            ]
            after = history.to_csv([*durable, row])
        if after != before:
            storage.put(names.job_file(HISTORIES), after)
        if after != before and is_shown:
            storage.put(HISTORIES, after)
    except Exception as error:  # the checkpoint is committed, whatever this may be
        log.warning(
            "%s is durable, but %s in %s doesn't tell: %s", row.name, HISTORIES, storage.url, error
        )


def _stored_history(storage: Storage) -> bytes | None:
    try:
        return storage.get(names.job_file(HISTORIES))
    except StorageKeyMissing:
        return None
