"""The histories of a job's checkpoints and of its loads, as its directory in memory has them."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import replace

from dcp_mem.common import files
from dcp_mem.common.log import log
from dcp_mem.common.values import HISTORIES, RECOVERIES, Outcome
from dcp_mem.errors import ManifestInvalid, MemoryBudgetExceeded
from dcp_mem.format import history
from dcp_mem.format.history import HistoryRow, row_of
from dcp_mem.format.recoveries import (
    MOST_RECOVERIES,
    RecoveryRecord,
    from_lines,
    merge_recoveries,
    to_lines,
)
from dcp_mem.memory.checkpoint import LocalCheckpoint
from dcp_mem.memory.locks import in_turn

_MOST_ROWS = 1_000


class LocalHistory:
    """`checkpointHistories.csv` in a job's directory.

    A row for each checkpoint that has left memory, or whose flush has ended.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._path = os.path.join(directory, HISTORIES)

    def rows(self) -> list[HistoryRow]:
        """Return all rows, oldest first; none where the file is missing or damaged."""
        try:
            return history.from_csv(self._bytes())
        except ManifestInvalid:
            return []

    def add(self, row: HistoryRow) -> None:
        """Add a row, in the place of an earlier one of the same save.

        Where memory is full, the row is lost; that is logged.
        """
        try:
            with in_turn(self._directory):  # the agent and the trainers all write to it
                before = self._bytes()
                try:
                    after = history.with_row(before, row, _MOST_ROWS) if before else b""
                except ManifestInvalid:  # the file is damaged
                    after = b""
                after = after or history.to_csv([row])
                if after != before:
                    files.write_atomically(self._path, after)
        except (OSError, MemoryBudgetExceeded) as error:
            log.warning("what became of %s can't be written down: %s", row.name, error)

    def add_leaving(
        self, checkpoint: LocalCheckpoint, reason: str, outcome: Outcome = Outcome.SKIPPED
    ) -> None:
        """Add that a checkpoint leaves memory; one that is still pending never becomes durable.

        `reason`: goes into the row of one that is pending, or was skipped, without an error.
        `outcome`: of one that is pending, unless its flush has failed: then it failed.
        """
        flush = checkpoint.flush
        if checkpoint.pending and not flush.error:
            flush = replace(flush, outcome=outcome, error=reason)
        elif checkpoint.pending:
            flush = replace(flush, outcome=Outcome.FAILED)
        elif flush.outcome == Outcome.SKIPPED:
            flush = replace(flush, error=flush.error or reason)
        elif flush.outcome == Outcome.DURABLE and self._is_deleted(checkpoint.manifest.save_id):
            return
        self.add(row_of(checkpoint.manifest, flush))

    def _is_deleted(self, save_id: str) -> bool:
        """Return whether the save was noted as deleted from storage."""
        return any(row.save_id == save_id and row.outcome == Outcome.DELETED for row in self.rows())

    def note_deleted(self, names: Collection[str]) -> None:
        """Note that durable checkpoints of these names have left storage."""
        for row in self.rows() if names else ():
            if row.name in names and row.outcome == Outcome.DURABLE:
                self.add(replace(row, outcome=Outcome.DELETED))

    def _bytes(self) -> bytes:
        try:
            return files.read_bytes(self._path)
        except FileNotFoundError:
            return b""


# -- loads -----------------------------------------------------------------------------------------


def recoveries_in(directory: str) -> list[RecoveryRecord]:
    """Return the records of a job's loads, in the order of time."""
    try:
        found = from_lines(files.read_bytes(_recoveries(directory)))
    except FileNotFoundError:
        return []
    return merge_recoveries(found, most=MOST_RECOVERIES)


def add_recovery(directory: str, recovery: RecoveryRecord) -> None:
    """Add a record; others are kept as they are, unread, since every load waits for this."""
    with in_turn(directory):
        try:
            before = files.read_bytes(_recoveries(directory)).splitlines()
        except FileNotFoundError:
            before = []
        kept = b"".join(line + b"\n" for line in before[1 - MOST_RECOVERIES :])
        files.write_atomically(_recoveries(directory), kept + to_lines([recovery]))


def _recoveries(directory: str) -> str:
    return os.path.join(directory, RECOVERIES)
