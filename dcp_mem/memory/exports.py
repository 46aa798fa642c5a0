"""`.exports.json`: which of a job's checkpoints this node exports, and what became of that.

The agent writes it. `status()` and `close()` read it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import field, replace

from dcp_mem.common import files
from dcp_mem.common.log import log
from dcp_mem.common.value_class import value_class
from dcp_mem.common.values import ExportState, Outcome
from dcp_mem.config import ExportOrder
from dcp_mem.errors import ConfigError, DcpMemError, ManifestInvalid
from dcp_mem.format.history import row_of
from dcp_mem.format.records import Record
from dcp_mem.memory.checkpoint import LocalCheckpoint
from dcp_mem.memory.job import JobMemory
from dcp_mem.memory.locks import saving_run
from dcp_mem.policy.order import SaveNumber
from dcp_mem.policy.persistence import Since

_FILE = ".exports.json"
_MOST_RECORDS, _MOST_TRIES = 256, 8
_LONGEST_ERROR = 2000
_FIRST_PAUSE, _LONGEST_PAUSE = 2.0, 60.0
_STORED = (Outcome.DURABLE, Outcome.DELETED)


@value_class(kw_only=True)
class ExportRecord:
    """The export of one checkpoint."""

    name: str
    save_id: str
    run: str = ""
    step: int | None = None  # its training step; None where nobody told it
    created: float = 0.0  # when it was saved, in seconds since the epoch
    generation: int = 0  # of the run that saved it; its place in the job's order, with `count`
    count: int = 0
    state: ExportState = ExportState.WAITING
    target: str = ""  # the directory that was made; "" while there is none
    error: str = ""  # why the last attempt failed, or why there is none
    attempts: int = 0
    again: float = 0.0  # when the next attempt is due, in seconds since the epoch

    @property
    def number(self) -> SaveNumber:
        """The number of the save: its place in the job's order."""
        return SaveNumber(self.generation, self.count)

    def exported(self, target: str) -> ExportRecord:
        return replace(self, state=ExportState.EXPORTED, target=target, error="")

    def skipped(self, error: str) -> ExportRecord:
        log.warning("%s isn't exported: %s", self.name, error)
        return replace(self, state=ExportState.SKIPPED, error=error[:_LONGEST_ERROR])

    def failed(self, error: str) -> ExportRecord:
        """Return the record after an attempt has failed; after the last one it is given up."""
        pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2**self.attempts)
        state, what = ExportState.FAILED, f"failed, next try in {pause:.0f} s"
        if self.attempts + 1 >= _MOST_TRIES:
            state, what = ExportState.GIVEN_UP, "is given up"
        log.warning("the export of %s %s: %s", self.name, what, error)
        again, error = time.time() + pause, error[:_LONGEST_ERROR]
        return replace(self, state=state, error=error, attempts=self.attempts + 1, again=again)


@value_class(kw_only=True)
class ExportRecords(Record):
    """The exports of a job on one node."""

    form = "exports"

    records: tuple[ExportRecord, ...] = ()  # in the order in which checkpoints were chosen
    # by run: the count of its last save that was looked at
    seen: Mapping[str, int] = field(default_factory=dict)
    passed: int = 0  # checkpoints that were looked at since one was last chosen

    @property
    def open(self) -> list[ExportRecord]:
        """The exports that are still to be made."""
        ended = (ExportState.EXPORTED, ExportState.GIVEN_UP, ExportState.SKIPPED)
        return [one for one in self.records if one.state not in ended]

    def next_due(self) -> ExportRecord | None:
        """Return what is to be exported now: what has failed least often, of that the newest."""
        due = [one for one in self.open if one.again <= time.time()]
        return min(due, key=lambda one: (one.attempts, -one.number.packed), default=None)

    @property
    def is_under_way(self) -> bool:
        """Whether an export runs, or awaits its first attempt."""
        return any(one.state is not ExportState.FAILED for one in self.open)

    def looked_at(self, one: ExportRecord, is_chosen: bool) -> ExportRecords:
        """Return the records after a checkpoint was looked at."""
        seen = {**self.seen, one.run: max(one.count, self.seen.get(one.run, 0))}
        if not is_chosen:
            return replace(self, seen=seen, passed=self.passed + 1)
        records = (*self.records, one)[-_MOST_RECORDS:]
        return replace(self, records=records, seen=seen, passed=0)

    def updated(self, record: ExportRecord) -> ExportRecords:
        """Return the records with one replaced."""
        records = tuple(record if one.save_id == record.save_id else one for one in self.records)
        return replace(self, records=records)


def read_exports(directory: str) -> ExportRecords:
    """Return what is recorded of a job's exports on this node; a damaged file counts as none."""
    try:
        return ExportRecords.from_json(files.read_bytes(os.path.join(directory, _FILE)))
    except (FileNotFoundError, ManifestInvalid):
        return ExportRecords()


def write_exports(directory: str, records: ExportRecords) -> None:
    """Replace what is recorded; where there is no room, that is logged."""
    try:
        files.write_atomically(os.path.join(directory, _FILE), records.to_json())
    except (DcpMemError, OSError) as error:
        log.warning("what became of exports can't be written down: %s", error)


def look(memory: JobMemory, records: ExportRecords, order: ExportOrder) -> ExportRecords:
    """Return the records after all that is new was looked at.

    The first checkpoint is exported, and each that has reached one of the policy's limits, counted
    from the last that was chosen. What gets to storage after a newer one was chosen isn't.
    """
    if not (new := unseen(memory, records, order)):
        return records
    for one in new:
        last = records.records[-1] if records.records else None
        is_chosen = last is None or one.number >= last.number
        try:
            is_chosen = is_chosen and order.every.wants(_since(records, one), one.step)
        except ConfigError:
            one = one.skipped(
                f"every=every_n_steps({order.every.steps}) counts training steps, and this save "
                "told none: call writer.annotate_next_save(step=...) before it, or save through "
                "CheckpointManager"
            )
        records = records.looked_at(one, is_chosen)
    runs = {saving_run(memory.directory), *(one.manifest.run for one in memory.checkpoints())}
    seen = {run: count for run, count in records.seen.items() if run in runs}
    return replace(records, seen=seen)


def _since(records: ExportRecords, one: ExportRecord) -> Since | None:
    if not records.records:
        return None
    last = records.records[-1]
    steps = None if one.step is None or last.step is None else one.step - last.step
    return Since(records.passed + 1, one.created - last.created, steps)


def unseen(memory: JobMemory, records: ExportRecords, order: ExportOrder) -> list[ExportRecord]:
    """Return this node's checkpoints that nobody has looked at, as they became durable.

    They are those that it has committed since its run exports, whether memory still has them or
    not, and those that stay in memory, if they are to be exported.
    """
    exporting = {saving_run(memory.directory), *records.seen}
    here = [one for one in memory.checkpoints() if not one.manifest.scope]
    runs = {one.manifest.run for one in here if one.manifest.committer == memory.node} & exporting
    if not runs:
        return []
    known = {one.manifest.save_id for one in here}
    past = [row for row in memory.history.rows() if row.save_id not in known]
    rows = [
        *(row_of(one.manifest, one.flush) for one in here if _is_ready(one, order.of_complete)),
        *(row for row in past if row.outcome in _STORED),
    ]
    new = [row for row in rows if row.run in runs and row.count > records.seen.get(row.run, 0)]
    generations = memory.generations.known()
    return [
        ExportRecord(
            name=row.name,
            save_id=row.save_id,
            run=row.run,
            step=row.step,
            created=row.created,
            generation=max(row.generation, generations.get(row.run, 0)),
            count=row.count,
        )
        for row in sorted(new, key=lambda row: row.durable or row.created)
    ]


def _is_ready(one: LocalCheckpoint, of_complete: bool) -> bool:
    if one.flush.outcome == Outcome.DURABLE:
        return True
    if not of_complete or one.manifest.persist or one.rejected:
        return False
    files_here = set(one.segment_files())
    return all(segment.file in files_here for segment in one.manifest.segments)
