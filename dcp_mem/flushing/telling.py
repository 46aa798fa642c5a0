"""What a flush tells: in memory while it runs, and in the history on storage once it is done. None of it can fail a flush."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from dcp_mem.errors import DcpMemError, ManifestInvalid, StorageKeyMissing
from dcp_mem.events import log
from dcp_mem.flushing.metering import Meter
from dcp_mem.format import histories
from dcp_mem.format.histories import Line
from dcp_mem.format.manifest import FlushRecord
from dcp_mem.memory.job import Held, JobMemory
from dcp_mem.storage import Storage
from dcp_mem.storage.patient import PatientStorage
from dcp_mem.values import HISTORIES, Transfer

_STORED_LINES = 10_000


class Attempt:
    """One attempt at a flush: how far it is stands in the checkpoint's record, while it runs and after it.

    waited: seconds since this node's part was done, spent in waiting for other nodes.
    """

    def __init__(self, memory: JobMemory, held: Held, waited: float) -> None:
        self._memory, self._held = memory, held
        self._started = time.monotonic()
        before = held.flush.transfer
        self._before = replace(before, waiting_seconds=before.waiting_seconds + waited)
        self._meter = Meter(self._before)
        if held.flush.again:
            self.note(replace(held.flush, again=0.0))  # it isn't due some time any more, but now

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def meter(self, storage: PatientStorage) -> Meter:
        """What counts this attempt."""
        self._meter = Meter(self._before, retries=lambda: storage.retries, tell=self._tell)
        return self._meter

    def record(self) -> FlushRecord:
        """The checkpoint's record with the figures up to now."""
        flush = self._held.flush
        transfer = self._meter.transfer()
        return replace(flush, seconds=flush.seconds + self.seconds, stage="", again=0.0, transfer=transfer)

    def note(self, record: FlushRecord) -> None:
        """Show how far it is, if there is room for that."""
        try:
            self._memory.record_flush(self._held, record)
        except (DcpMemError, OSError) as error:
            log.debug("how far %s is can't be written down: %s", self._held.name, error)

    def note_waiting(self) -> None:
        """Show that this node's part is done, and another's isn't."""
        record = self.record()
        if 0 < record.transfer.nbytes == record.transfer.stored_nbytes:  # or another process is at it, and tells more
            self.note(replace(record, stage="waiting"))

    def _tell(self, stage: str, transfer: Transfer) -> None:
        flush = self._held.flush
        self.note(replace(flush, seconds=flush.seconds + self.seconds, stage=stage, again=0.0, transfer=transfer))


def add_to_stored_history(storage: Storage, line: Line, known: Sequence[Line]) -> None:
    """Put a checkpoint's line into the history in the job's root. known: what replaces a file that can't be read."""
    try:
        before = _stored_history(storage)
        try:
            after = histories.to_csv([line]) if before is None else histories.with_line(before, line, _STORED_LINES)
        except ManifestInvalid as error:
            log.warning("%s in %s is begun anew: %s", HISTORIES, storage.url, error)
            others = [other for other in known if other.save_id != line.save_id and other.outcome == "durable"]
            after = histories.to_csv([*others, line])
        if after != before:
            storage.put(HISTORIES, after)
    except Exception as error:  # the checkpoint is committed, whatever this may be
        log.warning("%s is durable, but %s in %s doesn't tell: %s", line.name, HISTORIES, storage.url, error)


def _stored_history(storage: Storage) -> bytes | None:
    try:
        return storage.get(HISTORIES)
    except StorageKeyMissing:
        return None
