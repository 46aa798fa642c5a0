"""The records of a flush: in memory while it runs, in the history on storage afterwards.

None of it can fail a flush.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace

from dcp_mem.common.files import write_atomically
from dcp_mem.common.log import log
from dcp_mem.common.values import HISTORIES, Outcome, Transfer
from dcp_mem.errors import DcpMemError, ManifestInvalid, StorageKeyMissing
from dcp_mem.flushing.metering import Meter
from dcp_mem.flushing.registration import Registration
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
        self._before = replace(before, waiting_seconds=before.waiting_seconds + waited_seconds)
        self._meter = Meter(self._before)
        if checkpoint.flush.again:
            self._note(replace(checkpoint.flush, again=0.0))  # it isn't due later any more, but now

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begun

    def meter(self, storage: RetryingStorage) -> Meter:
        self._meter = Meter(self._before, retries=lambda: storage.retries, report=self._report)
        return self._meter

    def ended(
        self, outcome: Outcome, *, error: str = "", durable: float = 0.0, again: float = 0.0
    ) -> FlushRecord:
        found = self._record("", self._meter.transfer())
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
        transfer = self._meter.transfer()
        # Otherwise this node has no part of its own.
        if 0 < transfer.nbytes == transfer.stored_nbytes:
            self._report("waiting", transfer)

    def _report(self, stage: str, transfer: Transfer) -> None:
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
