"""What of one job is to be exported, and what became of that; kept in memory as a file."""

from __future__ import annotations

import os
import time
from dataclasses import replace

from dcp_mem.common.log import log
from dcp_mem.common.values import ExportState
from dcp_mem.config import ExportOrder
from dcp_mem.errors import DcpMemError
from dcp_mem.format.exports import ExportRecord, ExportRecords
from dcp_mem.format.manifest import Manifest
from dcp_mem.memory.exports import read_exports, write_exports
from dcp_mem.policy.exports import is_exported, why_undecided

_MOST_TRIES = 8
_FIRST_PAUSE, _LONGEST_PAUSE = 2.0, 60.0


class JobExports:
    """One job's exports. The agent's one thread calls it; nothing here raises.

    What an agent that died had begun is begun again: where memory had no room for a record, this
    process alone knows it.
    """

    def __init__(self, root: str, job: str) -> None:
        self._directory = os.path.join(root, job)
        self._known: ExportRecords | None = None
        self._due: dict[str, float] = {}

    def look_at(self, order: ExportOrder, manifest: Manifest) -> None:
        """Decide whether a checkpoint is exported; each is looked at once."""
        records = self._records()
        if manifest.save_id in records.seen:
            return
        step, last = manifest.step, records.records[-1] if records.records else None
        # Of two that were saved in a row, the newer one may be on storage first.
        is_late = last is not None and manifest.number < last.number
        why_not = why_undecided(order.every, step)
        record = ExportRecord(
            name=manifest.name,
            save_id=manifest.save_id,
            scope=manifest.scope,
            step=step,
            created=manifest.created,
            generation=manifest.generation,
            count=manifest.count,
            state=ExportState.SKIPPED if why_not else ExportState.WAITING,
            error=why_not,
        )
        is_chosen = not is_late and (
            bool(why_not)
            or is_exported(
                order.every,
                step=step,
                created=manifest.created,
                last=None if last is None else (last.step, last.created),
                passed=records.passed,
            )
        )
        if is_chosen and why_not:
            log.warning("%s isn't exported: %s", manifest.name, why_not)
        self._put(records.looked_at(manifest.save_id, record if is_chosen else None))

    def next_due(self) -> ExportRecord | None:
        """Return what is to be exported now: what has failed least often, of that the newest."""
        now = time.monotonic()
        due = [one for one in self._open() if self._due.get(one.save_id, 0.0) <= now]
        return min(
            due,
            key=lambda one: (one.attempts, -one.number.packed),
            default=None,
        )

    def due_times(self) -> list[float]:
        """Return when each export is due that is still to be made."""
        return [self._due.get(one.save_id, 0.0) for one in self._open()]

    def begin(self, record: ExportRecord) -> None:
        """Note that an export runs."""
        self._put(self._records().updated(replace(record, state=ExportState.RUNNING)))

    def end(self, record: ExportRecord) -> None:
        """Note what became of an export.

        `record`: its state is EXPORTED or SKIPPED, or FAILED for one that is tried again, unless
        that was its last try.
        """
        if record.state is ExportState.FAILED:
            attempts = record.attempts + 1
            record = replace(record, attempts=attempts)
            pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** (attempts - 1))
            self._due[record.save_id] = time.monotonic() + pause
            if attempts >= _MOST_TRIES:
                record = replace(record, state=ExportState.GIVEN_UP)
                log.warning("the export of %s is given up: %s", record.name, record.error)
            else:
                text = "the export of %s failed, next try in %.0f s: %s"
                log.warning(text, record.name, pause, record.error)
        elif record.state is ExportState.SKIPPED:
            log.warning("%s isn't exported: %s", record.name, record.error)
        else:
            log.info("%s is exported to %s (%.1f s)", record.name, record.target, record.seconds)
        self._put(self._records().updated(record))

    def _open(self) -> list[ExportRecord]:
        return [one for one in self._records().records if one.is_open]

    def _records(self) -> ExportRecords:
        if self._known is None:
            self._known = read_exports(self._directory)
        return self._known

    def _put(self, records: ExportRecords) -> None:
        self._known = records
        try:
            write_exports(self._directory, records)
        except (DcpMemError, OSError) as error:
            log.warning("what became of exports can't be written down: %s", error)
