"""`checkpointHistories.csv`: a row for each checkpoint, for people and their spreadsheets.

`status()` reads it back. The format is RFC 4180: commas, quotes and line ends in names and errors
are quoted. Text that a spreadsheet would take for a formula gets a `'` in front.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, fields
from operator import attrgetter
from typing import Any

from dcp_mem.common.value_class import value_class
from dcp_mem.common.values import Outcome
from dcp_mem.errors import ManifestInvalid
from dcp_mem.format.manifest import FlushRecord, Manifest
from dcp_mem.format.records import moment_of, moment_text
from dcp_mem.policy.order import Place, SaveNumber

_NEEDED = {
    "name",
    "save_id",
    "created",
    "outcome",
}  # files of other versions may lack other columns
_MOMENTS = {"created", "durable"}
_FORMULAS = ("=", "+", "-", "@", "\t", "\r")
_LONGEST_ERROR = 2000
_END = "\r\n"


@value_class(kw_only=True)
class HistoryRow:
    """One checkpoint's row of the history; its fields are the columns, in their order."""

    name: str
    save_id: str  # "" for a save that never began
    created: float  # seconds since the epoch
    world_size: int = 0
    nodes: int = 0
    nbytes: int = 0
    stage_seconds: float = 0.0
    # "durable", "failed", "refused", "skipped", "superseded" (a newer one was flushed in its
    # place), "evicted" (was never meant for storage), or "deleted" (has left storage by retention)
    outcome: str = ""
    durable: float = 0.0  # seconds since the epoch; 0.0 if it never became durable
    flush_seconds: float = 0.0
    # of the node that wrote the row; so are `parts`, `retries`, `sent_nbytes` and `reused_nbytes`
    throughput_mib_s: float = 0.0
    parts: int = 0
    retries: int = 0
    attempts: int = 0
    sent_nbytes: int = 0
    reused_nbytes: int = 0  # what storage copied from an earlier checkpoint instead
    # As in `Manifest`, like `count` and `run`. A save that never began has those of the one before
    # it.
    generation: int = 0
    count: int = 0
    run: str = ""
    error: str = ""
    step: int | None = None  # as the training loop gave it; None if it didn't
    # as the training loop gave them; JSON in the file
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def place(self) -> Place:
        """The checkpoint's place in the order of the job's checkpoints."""
        return Place(
            number=SaveNumber(self.generation, self.count),
            run=self.run,
            time=self.created,
            is_foreign=not self.save_id,
            key=(self.name, self.save_id),
        )


_FIELDS = {one.name.replace("nbytes", "bytes"): one.name for one in fields(HistoryRow)}
COLUMNS = tuple(_FIELDS)
_cells = attrgetter(*_FIELDS.values())


def row_of(manifest: Manifest, record: FlushRecord) -> HistoryRow:
    """Return the row of a checkpoint."""
    return HistoryRow(
        name=manifest.name,
        save_id=manifest.save_id,
        created=manifest.created,
        world_size=manifest.world_size,
        nodes=len(manifest.nodes),
        nbytes=manifest.nbytes,
        stage_seconds=round(manifest.stage_seconds, 6),
        outcome=record.outcome or Outcome.EVICTED,
        durable=record.durable,
        flush_seconds=round(record.seconds, 6),
        throughput_mib_s=round(record.transfer.throughput / (1 << 20), 3),
        parts=record.transfer.parts,
        retries=record.transfer.retries,
        attempts=record.attempts,
        sent_nbytes=record.transfer.sent_nbytes,
        reused_nbytes=record.transfer.reused_nbytes,
        generation=manifest.generation,
        count=manifest.count,
        run=manifest.run,
        error=record.error[:_LONGEST_ERROR],
        step=manifest.step,
        metrics=manifest.metrics,
    )


def skipped_row(name: str, number: SaveNumber, now: float, why: str) -> HistoryRow:
    """Return the row of a save that never began.

    `now`: seconds since the epoch.
    """
    return HistoryRow(
        name=name,
        save_id="",
        created=now,
        outcome=Outcome.SKIPPED,
        generation=number.generation,
        count=number.count,
        error=why,
    )


def to_csv(rows: Sequence[HistoryRow]) -> bytes:
    """Return a file with these rows."""
    return _HEAD + _lines(rows)


def from_csv(data: bytes) -> list[HistoryRow]:
    """Return the rows of a file, in order, without those that are damaged.

    Raises ManifestInvalid.
    """
    text = data.decode("utf-8", "replace").replace("\0", "\ufffd")
    lines = csv.reader(io.StringIO(text, newline=""))
    found: list[HistoryRow] = []
    places: dict[str, int] = {}
    with contextlib.suppress(csv.Error):  # what follows can't be parsed
        places = {column: place for place, column in enumerate(next(lines, []))}
        if places.keys() >= _NEEDED:
            found.extend(row for cells in lines if (row := _row(cells, places)) is not None)
    if not places.keys() >= _NEEDED:
        raise ManifestInvalid("no history of checkpoints: its first line lacks columns")
    return found


def with_row(data: bytes, row: HistoryRow, most: int) -> bytes:
    """Return the file with this row in it, which replaces an earlier one of the same save.

    Rows that can't be read are dropped.

    Raises ManifestInvalid.
    """
    added = _lines([row])
    # A save that makes room waits for this, so the file is parsed only if it must be. A file with
    # an open quote must: the quote would swallow the row that is appended.
    is_sound = data.startswith(_HEAD) and data.endswith(_END.encode()) and data.count(b'"') % 2 == 0
    if is_sound and row.save_id and added in data:
        return data
    is_new = not row.save_id or row.save_id.encode() not in data
    if is_sound and is_new and data.count(b"\n") <= most + most // 10:
        return data + added
    others = [other for other in from_csv(data) if not row.save_id or other.save_id != row.save_id]
    return to_csv([*others, row][-most:])


def _lines(rows: Sequence[HistoryRow]) -> bytes:
    stream = io.StringIO(newline="")
    writer = csv.writer(stream, lineterminator=_END)
    for row in rows:
        cells = list(_cells(row))
        for place, written in _WRITTEN.items():
            cells[place] = written(cells[place])
        writer.writerow(cells)
    return stream.getvalue().encode("utf-8", "replace")


def _row(cells: Sequence[str], places: Mapping[str, int]) -> HistoryRow | None:
    """Parse a row; None where it is damaged. Columns that the file lacks get their defaults."""
    if len(cells) < len(places):
        return None
    given = {name: cells[places[name]] for name in COLUMNS if name in places}
    if not (given["name"] and given["created"] and given["outcome"]):
        return None
    try:
        found: dict[str, Any] = {
            _FIELDS[name]: _READ[name](cell) for name, cell in given.items() if cell
        }
        return HistoryRow(**{"save_id": "", **found})
    except (ValueError, OverflowError):
        return None


def _metrics_text(metrics: Mapping[str, float]) -> str:
    return json.dumps(dict(metrics), separators=(",", ":")) if metrics else ""


def _metrics(text: str) -> dict[str, float]:
    """Parse metrics; people may have edited them."""
    try:
        found = json.loads(text) if text else {}
        return {str(name): float(value) for name, value in found.items()}
    except (ValueError, TypeError, AttributeError, RecursionError, OverflowError):
        return {}


def _guarded(cell: str) -> str:
    """Return text that stays text when a spreadsheet reads it."""
    text = cell.replace("\0", "\ufffd")
    return f"'{text}" if text.lstrip("'").startswith(_FORMULAS) else text


def _unguarded(text: str) -> str:
    return text[1:] if text[:1] == "'" and text.lstrip("'").startswith(_FORMULAS) else text


_BY_TYPE: dict[Any, Callable[[str], Any]] = {
    "str": _unguarded,
    "int": int,
    "int | None": int,
    "float": float,
    "Mapping[str, float]": _metrics,
}
_READ = {
    column: moment_of if column in _MOMENTS else _BY_TYPE[one.type]
    for column, one in zip(COLUMNS, fields(HistoryRow), strict=True)
}
_TEXT_OF: dict[Any, Callable[[Any], str]] = {
    "str": _guarded,
    "Mapping[str, float]": _metrics_text,
}
_WRITTEN = {  # by place, what isn't written as it is
    place: moment_text if column in _MOMENTS else _TEXT_OF[one.type]
    for place, (column, one) in enumerate(zip(COLUMNS, fields(HistoryRow), strict=True))
    if column in _MOMENTS or one.type in _TEXT_OF
}
_HEAD = (",".join(COLUMNS) + _END).encode()
