"""`.exports.json`: which of a job's checkpoints this node exports, and what became of that.

The agent chooses, and starts a process for each export, which writes down what becomes of it; only
one of them writes at a time. `status()` and `close()` read the file.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace

from dcp_mem.common import files
from dcp_mem.common.log import log
from dcp_mem.common.value_class import value_class
from dcp_mem.common.values import ExportState, Outcome
from dcp_mem.errors import ConfigError, DcpMemError, ManifestInvalid
from dcp_mem.format.history import HistoryRow
from dcp_mem.format.manifest import Manifest
from dcp_mem.format.records import Record
from dcp_mem.memory.checkpoint import LocalCheckpoint
from dcp_mem.memory.job import JobMemory
from dcp_mem.memory.locks import saving_run
from dcp_mem.policy.order import SaveNumber
from dcp_mem.policy.persistence import Persist, Since

_FILE = ".exports.json"
_MOST_RECORDS, _MOST_RUNS, _MOST_TRIES = 256, 8, 8
_LONGEST_ERROR = 2000
_FIRST_PAUSE, _LONGEST_PAUSE = 2.0, 60.0
_STORED = (Outcome.DURABLE, Outcome.DELETED)
_OPEN = (ExportState.WAITING, ExportState.RUNNING, ExportState.FAILED)


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


@value_class(kw_only=True)
class LookedAt:
    """How many of a run's saves have been looked at."""

    run: str
    count: int = -1


@value_class(kw_only=True)
class ExportRecords(Record):
    """The exports of a job on one node."""

    form = "exports"

    records: tuple[ExportRecord, ...] = ()  # in the order in which checkpoints were chosen
    runs: tuple[LookedAt, ...] = ()  # that have exported, the newest last
    passed: int = 0  # checkpoints that were looked at since one was last chosen

    @property
    def open(self) -> list[ExportRecord]:
        """The exports that are still to be made."""
        return [one for one in self.records if one.state in _OPEN]

    def next_due(self) -> ExportRecord | None:
        """Return what is to be exported now: what has failed least often, of that the newest."""
        due = [one for one in self.open if one.again <= time.time()]
        return min(due, key=lambda one: (one.attempts, -one.number.packed), default=None)

    @property
    def is_under_way(self) -> bool:
        """Whether an export runs, or awaits its first attempt."""
        begun = (ExportState.WAITING, ExportState.RUNNING)
        return any(one.state in begun for one in self.records)

    def of_run(self, run: str) -> ExportRecords:
        """Return the records with a run that exports from now on."""
        if any(one.run == run for one in self.runs):
            return self
        return replace(self, runs=(*self.runs, LookedAt(run=run))[-_MOST_RUNS:])

    def looked_at(self, one: ExportRecord, is_chosen: bool) -> ExportRecords:
        """Return the records after a checkpoint of a known run was looked at."""
        runs = tuple(
            replace(each, count=max(each.count, one.count)) if each.run == one.run else each
            for each in self.runs
        )
        if not is_chosen:
            return replace(self, runs=runs, passed=self.passed + 1)
        records = (*self.records, one)[-_MOST_RECORDS:]
        return replace(self, records=records, runs=runs, passed=0)

    def updated(self, record: ExportRecord) -> ExportRecords:
        """Return the records with one replaced."""
        short = replace(record, error=record.error[:_LONGEST_ERROR])
        records = tuple(short if one.save_id == record.save_id else one for one in self.records)
        return replace(self, records=records)

    def failed(self, record: ExportRecord, error: str) -> ExportRecords:
        """Return the records after an attempt has failed, and log it; the last one is given up."""
        attempts = record.attempts + 1
        pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** (attempts - 1))
        state, what = ExportState.FAILED, f"failed, next try in {pause:.0f} s"
        if attempts >= _MOST_TRIES:
            state, what = ExportState.GIVEN_UP, "is given up"
        log.warning("the export of %s %s: %s", record.name, what, error)
        again = time.time() + pause
        failed = replace(record, state=state, error=error, attempts=attempts, again=again)
        return self.updated(failed)


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


def look(
    memory: JobMemory, records: ExportRecords, every: Persist, *, of_complete: bool
) -> ExportRecords:
    """Return the records after all that is new was looked at.

    The first checkpoint is exported, and each that has reached one of the policy's limits, counted
    from the last that was chosen. What gets to storage after a newer one was chosen isn't.
    """
    for one in unseen(memory, records, of_complete=of_complete):
        last = records.records[-1] if records.records else None
        is_chosen = last is None or one.number >= last.number
        try:
            is_chosen = is_chosen and every.wants(_since(records, one), one.step)
        except ConfigError:
            error = (
                f"every=every_n_steps({every.steps}) counts training steps, and this save told "
                "none: call writer.annotate_next_save(step=...) before it, or save through "
                "CheckpointManager"
            )
            log.warning("%s isn't exported: %s", one.name, error)
            one = replace(one, state=ExportState.SKIPPED, error=error)
        records = records.of_run(one.run).looked_at(one, is_chosen)
    return records


def _since(records: ExportRecords, one: ExportRecord) -> Since | None:
    if not records.records:
        return None
    last = records.records[-1]
    steps = None if one.step is None or last.step is None else one.step - last.step
    return Since(records.passed + 1, one.created - last.created, steps)


def unseen(memory: JobMemory, records: ExportRecords, *, of_complete: bool) -> list[ExportRecord]:
    """Return this node's checkpoints that nobody has looked at, as they became durable.

    They are those that it has committed since its run exports, whether memory still has them or
    not; with `of_complete`, those as well that stay in memory.
    """
    looked_at = {one.run: one.count for one in records.of_run(saving_run(memory.directory)).runs}
    here = [one for one in memory.checkpoints() if not one.manifest.scope]
    runs = {one.manifest.run for one in here if one.manifest.committer == memory.node}
    runs &= looked_at.keys()
    if not runs:
        return []
    known = {one.manifest.save_id for one in here}
    found: list[tuple[float, Manifest | HistoryRow]] = [
        *((one.flush.durable, one.manifest) for one in here if _is_ready(one, of_complete)),
        *((one.durable, one) for one in memory.history.rows() if one.outcome in _STORED),
    ]
    new = [
        (durable or one.created, one)
        for durable, one in found
        if one.run in runs and one.count > looked_at[one.run]
        if isinstance(one, Manifest) or one.save_id not in known
    ]
    generations = memory.generations.known()
    return [
        ExportRecord(
            name=one.name,
            save_id=one.save_id,
            run=one.run,
            step=one.step,
            created=one.created,
            generation=max(one.generation, generations.get(one.run, 0)),
            count=one.count,
        )
        for _, one in sorted(new, key=lambda each: each[0])
    ]


def _is_ready(one: LocalCheckpoint, of_complete: bool) -> bool:
    if one.flush.outcome == Outcome.DURABLE:
        return True
    if not of_complete or one.manifest.persist or one.rejected:
        return False
    files_here = set(one.segment_files())
    return all(segment.file in files_here for segment in one.manifest.segments)
