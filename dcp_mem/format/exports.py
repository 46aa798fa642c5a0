"""`.exports.json`: which of a job's checkpoints a node exports, and what became of that.

The agent's queue and its report are one file: a successor goes on by it, and `status()` reads it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dcp_mem.common.values import ExportState
from dcp_mem.format.records import Record
from dcp_mem.policy.order import SaveNumber

_MOST_RECORDS, _MOST_SEEN = 256, 64
LONGEST_ERROR = 2000
"""Characters of an error that a record keeps."""
_OPEN = (ExportState.WAITING, ExportState.RUNNING, ExportState.FAILED)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRecord:
    """The export of one checkpoint."""

    name: str
    save_id: str
    scope: str = ""
    step: int | None = None  # its training step; None where nobody told it
    created: float = 0.0  # when it was saved, in seconds since the epoch
    generation: int = 0  # of the run that saved it; its place in the job's order, with `count`
    count: int = 0
    state: ExportState = ExportState.WAITING
    target: str = ""  # the directory that was made; "" while there is none
    error: str = ""  # why the last attempt failed, or why there is none
    attempts: int = 0
    nbytes: int = 0
    seconds: float = 0.0

    @property
    def number(self) -> SaveNumber:
        """The number of the save: its place in the job's order."""
        return SaveNumber(self.generation, self.count)

    @property
    def is_open(self) -> bool:
        """Whether the export is still to be made."""
        return self.state in _OPEN


@dataclass(frozen=True, slots=True)
class ExportRecords(Record):
    """The exports of a job on one node."""

    form = "exports"

    records: tuple[ExportRecord, ...] = ()  # in the order in which checkpoints were chosen
    seen: tuple[str, ...] = ()  # save ids that were looked at, chosen or not; the newest last
    passed: int = 0  # checkpoints that were looked at since one was last chosen

    def of(self, save_id: str) -> ExportRecord | None:
        """Return the record of a save, if it was chosen."""
        return next((one for one in self.records if one.save_id == save_id), None)

    def looked_at(self, save_id: str, chosen: ExportRecord | None) -> ExportRecords:
        """Return the records after a checkpoint was looked at.

        `chosen`: its record; None where it isn't exported.
        """
        seen = (*self.seen, save_id)[-_MOST_SEEN:]
        if chosen is None:
            return replace(self, seen=seen, passed=self.passed + 1)
        return ExportRecords((*self.records, _short(chosen))[-_MOST_RECORDS:], seen)

    def updated(self, record: ExportRecord) -> ExportRecords:
        """Return the records with one replaced."""
        short = _short(record)
        records = tuple(short if one.save_id == record.save_id else one for one in self.records)
        return replace(self, records=records)


def _short(record: ExportRecord) -> ExportRecord:
    return replace(record, error=record.error[:LONGEST_ERROR])
