"""`checkpointHistories.csv`: a line for each checkpoint, for people and their spreadsheets, and read back by `status()`.

RFC 4180: commas, quotes and line ends in names and errors are quoted. Text that a spreadsheet would take for a formula has a
`'` in front.
"""

from __future__ import annotations

import contextlib
import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timezone
from operator import attrgetter

from dcp_mem.errors import ManifestInvalid
from dcp_mem.format.manifest import FlushRecord, Manifest

COLUMNS = (
    "name",
    "save_id",
    "created",
    "world_size",
    "nodes",
    "bytes",
    "stage_seconds",
    "outcome",
    "durable",
    "flush_seconds",
    "throughput_mib_s",
    "parts",
    "retries",
    "attempts",
    "error",
)
_NEEDED = {"name", "save_id", "created", "outcome"}  # the others may come to be, in later versions
_MOMENTS = {"created", "durable"}
_FORMULAS = ("=", "+", "-", "@", "\t", "\r")
_LONGEST_ERROR = 2000
_END = "\r\n"


@dataclass(frozen=True, slots=True)
class Line:
    """What became of one checkpoint; fields in the order of COLUMNS.

    save_id: "" for a save that never began. created, durable: seconds since the epoch (0.0: never).
    outcome: "durable", "failed", "refused", "skipped", "evicted" for what was never meant for storage, or "deleted" for what
    has left it by retention.
    throughput_mib_s, parts, retries: of the node that wrote the line.
    """

    name: str
    save_id: str
    created: float
    world_size: int = 0
    nodes: int = 0
    nbytes: int = 0
    stage_seconds: float = 0.0
    outcome: str = ""
    durable: float = 0.0
    flush_seconds: float = 0.0
    throughput_mib_s: float = 0.0
    parts: int = 0
    retries: int = 0
    attempts: int = 0
    error: str = ""


_cells = attrgetter(*(field.name for field in fields(Line)))


def line_of(manifest: Manifest, record: FlushRecord) -> Line:
    """The line of a checkpoint that this came of."""
    return Line(
        name=manifest.name,
        save_id=manifest.save_id,
        created=manifest.created,
        world_size=manifest.world_size,
        nodes=len(manifest.nodes),
        nbytes=manifest.nbytes,
        stage_seconds=round(manifest.stage_seconds, 6),
        outcome=record.outcome or "evicted",
        durable=record.durable,
        flush_seconds=round(record.seconds, 6),
        throughput_mib_s=round(record.transfer.throughput / (1 << 20), 3),
        parts=record.transfer.parts,
        retries=record.transfer.retries,
        attempts=record.attempts,
        error=record.error[:_LONGEST_ERROR],
    )


def to_csv(lines: Sequence[Line]) -> bytes:
    """The file that has these lines."""
    return _HEAD + _rows(lines)


def from_csv(data: bytes) -> list[Line]:
    """The lines of a file, in their order, without those that are damaged. Raises ManifestInvalid where it is no such file."""
    text = data.decode("utf-8", "replace").replace("\0", "\ufffd")
    rows = csv.reader(io.StringIO(text, newline=""))
    found: list[Line] = []
    places: dict[str, int] = {}
    with contextlib.suppress(csv.Error):  # from there on nothing is to be made of it
        places = {column: place for place, column in enumerate(next(rows, []))}
        if places.keys() >= _NEEDED:
            found.extend(line for row in rows if (line := _line(row, places)) is not None)
    if not places.keys() >= _NEEDED:
        raise ManifestInvalid("no history of checkpoints: its first line lacks columns")
    return found


def with_line(data: bytes, line: Line, most: int) -> bytes:
    """The file with this line in it, in the place of an earlier one of the same save; of all others the last `most` or so.

    What can't be read of it is dropped. Raises ManifestInvalid where nothing can.
    """
    added = _rows([line])
    # A save makes room and waits for this: mostly nothing needs to be read. An open quote would swallow what comes behind it.
    is_sound = data.startswith(_HEAD) and data.endswith(_END.encode()) and data.count(b'"') % 2 == 0
    if is_sound and line.save_id and added in data:
        return data
    is_new = not line.save_id or line.save_id.encode() not in data
    if is_sound and is_new and data.count(b"\n") <= most + most // 10:
        return data + added
    others = [other for other in from_csv(data) if not line.save_id or other.save_id != line.save_id]
    return to_csv([*others, line][-most:])


def _rows(lines: Sequence[Line]) -> bytes:
    stream = io.StringIO(newline="")
    writer = csv.writer(stream, lineterminator=_END)
    for line in lines:
        cells = zip(COLUMNS, _cells(line), strict=True)
        writer.writerow([_iso(cell) if column in _MOMENTS else _guarded(cell) for column, cell in cells])
    return stream.getvalue().encode("utf-8", "replace")


def _line(row: Sequence[str], places: Mapping[str, int]) -> Line | None:
    """What a row says; None where it is damaged. Columns that the file lacks have their defaults."""
    if len(row) < len(places):
        return None
    name, save_id, created, world_size, nodes, nbytes, stage_seconds, outcome, durable, *figures, error = (
        row[places[column]] if column in places else "" for column in COLUMNS
    )
    flush_seconds, throughput, parts, retries, attempts = figures
    if not (name and created and outcome):
        return None
    try:
        return Line(
            _unguarded(name),
            _unguarded(save_id),
            _moment(created),
            int(world_size or 0),
            int(nodes or 0),
            int(nbytes or 0),
            float(stage_seconds or 0.0),
            _unguarded(outcome),
            _moment(durable),
            float(flush_seconds or 0.0),
            float(throughput or 0.0),
            int(parts or 0),
            int(retries or 0),
            int(attempts or 0),
            _unguarded(error),
        )
    except (ValueError, OverflowError):
        return None


def _guarded(cell: str | float) -> str | float:
    """Text that stays text when a spreadsheet reads it. Numbers are no danger."""
    if not isinstance(cell, str):
        return cell
    text = cell.replace("\0", "\ufffd")
    return f"'{text}" if text.lstrip("'").startswith(_FORMULAS) else text


def _unguarded(text: str) -> str:
    return text[1:] if text[:1] == "'" and text.lstrip("'").startswith(_FORMULAS) else text


def _iso(moment: float) -> str:
    return datetime.fromtimestamp(moment, timezone.utc).isoformat(timespec="microseconds") if moment else ""


def _moment(text: str) -> float:
    if not text:
        return 0.0
    found = datetime.fromisoformat(text)
    if found.tzinfo is None:
        raise ValueError("a time without its zone")
    return found.timestamp()


_HEAD = (",".join(COLUMNS) + _END).encode()
