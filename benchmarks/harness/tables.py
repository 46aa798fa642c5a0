"""The table maker: figures and rows that cases find, as markdown and as JSON."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from benchmarks.harness.processes import MeasurementFailed
from benchmarks.harness.samples import Sample
from benchmarks.harness.scratch import Skipped

if TYPE_CHECKING:
    from collections.abc import Callable

SECONDS, BYTES, RATIO, RATE, CPU_PER_GB = "s", "B", "×", "GB/s", "CPU-s/GB"
UNIT_IN_COLUMN = ""
"""For figures in a table whose column names the unit."""
TIME = ("faster", "slower", "as fast")
AMOUNT = ("less", "more", "as much")
"""How to compare: better, worse, and about equal."""
EQUAL = 1.05
"""Two figures whose ratio is smaller are called equal."""
COLUMNS = ("what", "floor", "dcp_mem", "× floor", "target", "met?", "peer", "beside the peer")
VERDICTS = {None: "", True: "yes", False: "**no**"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """What was measured, once or several times.

    Attributes:
        median: In `unit`.
        low: Lower end of the middle half.
        high: Upper end of the middle half.
        unit: `SECONDS`, `BYTES`, `RATIO`, `RATE`, `CPU_PER_GB` or `UNIT_IN_COLUMN`.
        values: Every measurement, in the order in which they were made; empty where unknown.
    """

    median: float
    low: float
    high: float
    unit: str
    values: tuple[float, ...] = ()

    @classmethod
    def of(cls, sample: Sample, unit: str = SECONDS) -> Figure:
        low, high = sample.quartiles
        values = tuple(float(value) for value in sample.values)
        return cls(median=sample.median, low=low, high=high, unit=unit, values=values)

    @property
    def text(self) -> str:
        """Median, middle half and unit; of bytes the median alone."""
        if self.unit == BYTES:
            return size(self.median)
        if self.unit in (RATIO, UNIT_IN_COLUMN):
            return f"{self.median:.2f} ({self.low:.2f}-{self.high:.2f})"
        scale, unit, digits = _scale(self.median) if self.unit == SECONDS else (1.0, self.unit, 2)
        middle, low, high = (
            f"{one * scale:.{digits}f}" for one in (self.median, self.low, self.high)
        )
        return f"{middle} {unit} ({low}-{high})"

    @property
    def short(self) -> str:
        """Median and unit, with two or three digits."""
        if self.unit == BYTES:
            return size(self.median)
        if self.unit == RATIO:
            return f"{self.median:.2f} ×"
        scale, unit = (1.0, self.unit) if self.unit != SECONDS else _scale(self.median)[:2]
        value = self.median * scale
        digits = 0 if value >= 100 else 1 if value >= 9.95 else 2
        return f"{value:.{digits}f}{' ' if unit else ''}{unit}"


Cell: TypeAlias = "Figure | str"


@dataclass(frozen=True, slots=True)
class Row:
    """One line: a figure of dcp_mem beside its floor, its target and a peer.

    Attributes:
        what: What was measured, and beside what.
        ratio: dcp_mem's figure divided by the floor's.
        met: Whether the target is met; None where there is no target.
        versus_peer: The comparison in words (1.4 times slower).
        failed: Whether the measurement failed.
    """

    what: str
    _: KW_ONLY
    floor: Cell = ""
    dcp_mem: Cell = ""
    ratio: Cell = ""
    target: str = ""
    met: bool | None = None
    peer: Cell = ""
    versus_peer: str = ""
    failed: bool = False

    @property
    def cells(self) -> tuple[Cell, ...]:
        return (
            self.what,
            self.floor,
            self.dcp_mem,
            self.ratio,
            self.target,
            VERDICTS[self.met],
            self.peer,
            self.versus_peer,
        )


@dataclass(frozen=True, slots=True)
class Table:
    """Figures without verdicts, in columns of their own."""

    columns: Sequence[str]
    lines: Sequence[Sequence[Cell]]


@dataclass(frozen=True, slots=True)
class Part:
    """Rows that were measured together, with tables and notes that explain them."""

    rows: Sequence[Row]
    notes: Sequence[str] = ()
    title: str = ""
    tables: Sequence[Table] = ()

    @property
    def markdown(self) -> str:
        notes = [f"- {note}" for note in self.notes]
        lines = [f"### {self.title}", ""]
        for table in self.tables:
            lines += [*markdown_table(table), ""]
        if self.rows:
            filled = _without_empty_columns(Table(COLUMNS, [row.cells for row in self.rows]))
            lines += [*markdown_table(filled), ""]
        return "\n".join([*lines, *notes, ""] if notes else lines)


@dataclass(frozen=True, slots=True)
class Section:
    """What one case found.

    Attributes:
        case: The name by which the command knows the case.
    """

    title: str
    parts: Sequence[Part]
    case: str = ""

    @property
    def markdown(self) -> str:
        return "\n".join([f"## {self.title}", "", *(part.markdown for part in self.parts)])


def attempt(case: str, title: str, measure: Callable[[], Part]) -> Part:
    """Return what `measure` finds, or a row that says why there is nothing."""
    print(f"{case}: {title} … ", end="", file=sys.stderr, flush=True)
    start = time.monotonic()
    try:
        part = measure()
    except Skipped as reason:
        part = Part([Row("all of it", dcp_mem=f"skipped: {reason}")])
    except MeasurementFailed as error:
        print(error, file=sys.stderr)
        last_line = str(error).strip().splitlines()[-1]
        part = Part([Row("all of it", dcp_mem=f"failed: {last_line}", met=False, failed=True)])
    part = replace(part, title=title)
    # At once, so that a run that is cut off has told what it found.
    print(f"{time.monotonic() - start:.0f} s\n\n{part.markdown}", file=sys.stderr, flush=True)
    return part


def summary(sections: Sequence[Section]) -> str:
    """Say how many targets were met, and which were missed."""
    judged = [
        (f"{section.title}: {part.title}: {row.what}", row)
        for section in sections
        for part in section.parts
        for row in part.rows
        if row.met is not None
    ]
    missed = [f"- {name}: {_judged_figure(row)}" for name, row in judged if not row.met]
    if not judged:
        return "## Summary\n\nNo targets.\n"
    met = f"{len(judged) - len(missed)} of {len(judged)} targets met"
    return "\n".join(["## Summary", "", f"{met}{', missed:' if missed else '.'}", "", *missed, ""])


def failures(sections: Sequence[Section]) -> bool:
    """Whether anything could not be measured."""
    return any(row.failed for section in sections for part in section.parts for row in part.rows)


# -- rows --------------------------------------------------------------------------------------


def beside_floor(
    what: str,
    floor: Sample,
    measured: Sample,
    *,
    at_most: float | None = None,
    unit: str = SECONDS,
    in_turn: bool = True,
) -> Row:
    """Return dcp_mem's figure beside its floor.

    Args:
        at_most: Target: times the floor.
        in_turn: Whether both were measured in turn; if not, the ratio is that of the medians.
    """
    ratio = measured.per(floor) if in_turn else Sample((measured.median / floor.median,))
    return Row(
        what,
        floor=Figure.of(floor, unit),
        dcp_mem=Figure.of(measured, unit),
        ratio=Figure.of(ratio, RATIO) if in_turn else f"{ratio.median:.2f}",
        target="" if at_most is None else f"≤ {at_most:.2f} × floor",
        met=None if at_most is None else ratio.median <= at_most,
    )


def beside_peer(
    what: str,
    measured: Sample,
    peer: Sample,
    *,
    at_least: float | None = None,
    unit: str = SECONDS,
    words: tuple[str, str, str] = TIME,
) -> Row:
    """Return dcp_mem's figure beside a peer's.

    Args:
        at_least: Target: how many times smaller dcp_mem's figure has to be.
        words: How to compare: better, worse, about equal.
    """
    return Row(
        what,
        dcp_mem=Figure.of(measured, unit),
        target=target_beside_peer(at_least, words),
        met=None if at_least is None else peer.median >= at_least * measured.median,
        peer=Figure.of(peer, unit),
        versus_peer=compared(measured.median, peer.median, words),
    )


def within(what: str, measured: Sample, limit: float, unit: str = SECONDS) -> Row:
    """Return dcp_mem's figure beside a fixed limit."""
    text = Figure.of(Sample((limit,)), unit).text.partition(" (")[0]
    return Row(
        what,
        dcp_mem=Figure.of(measured, unit),
        target=f"≤ {text}",
        met=measured.median <= limit,
    )


def compared(measured: float, peer: float, words: tuple[str, str, str] = TIME) -> str:
    """Say how a figure compares with a peer's, where less is better (1.4 times slower)."""
    better, worse, equal = words
    times = max(measured, peer) / min(measured, peer)
    if times < EQUAL:
        return equal
    digits = 0 if times >= 100 else 1
    return f"{times:,.{digits}f} × {better if measured < peer else worse}"


def target_beside_peer(at_least: float | None, words: tuple[str, str, str] = TIME) -> str:
    if at_least is None:
        return ""
    return (
        f"{words[0]} than the peer" if at_least == 1 else f"{at_least:g} × {words[0]} than the peer"
    )


# -- text --------------------------------------------------------------------------------------


def duration(sample: Sample) -> str:
    """Return median and middle half of seconds, as text."""
    return Figure.of(sample).text


def named(samples: Mapping[str, Sample]) -> str:
    """Return several durations in a line of text."""
    return ", ".join(f"{name} {duration(sample)}" for name, sample in samples.items())


def factor(sample: Sample) -> str:
    """Return median and middle half of ratios, as text."""
    return Figure.of(sample, RATIO).text


def size(count: float) -> str:
    """Return a number of bytes, as text."""
    if abs(count) >= 1 << 20 or not count:
        return f"{count / 2**20:,.1f} MiB"
    return f"{count / 2**10:,.1f} KiB" if abs(count) >= 1 << 10 else f"{count:,.0f} B"


def markdown_table(table: Table) -> list[str]:
    """Return the lines of a table in markdown."""
    texts = [[text_of(cell).replace("|", "\\|") for cell in line] for line in table.lines]
    lines = [table.columns, ["---"] * len(table.columns), *texts]
    return ["| " + " | ".join(line) + " |" for line in lines]


def text_of(cell: Cell) -> str:
    return cell.text if isinstance(cell, Figure) else cell


def _scale(seconds: float) -> tuple[float, str, int]:
    """Factor, unit and digits in which to show so many seconds."""
    if seconds >= 1:
        return 1.0, "s", 2
    return (1e6, "µs", 1) if seconds < 1e-4 else (1e3, "ms", 1)


def _judged_figure(row: Row) -> str:
    return text_of(row.ratio) or row.versus_peer or text_of(row.dcp_mem)


def _without_empty_columns(table: Table) -> Table:
    kept = [
        index
        for index, name in enumerate(table.columns)
        if name == COLUMNS[0] or any(line[index] for line in table.lines)
    ]
    lines = [[line[index] for index in kept] for line in table.lines]
    return Table([table.columns[index] for index in kept], lines)


# -- JSON --------------------------------------------------------------------------------------


def to_json(section: Section) -> dict[str, Any]:
    """Return a section as plain values that `from_json` understands."""
    return {
        "case": section.case,
        "title": section.title,
        "parts": [
            {
                "title": part.title,
                "rows": [_row_to_json(row) for row in part.rows],
                "tables": [
                    {
                        "columns": list(table.columns),
                        "lines": [[_cell_to_json(cell) for cell in line] for line in table.lines],
                    }
                    for table in part.tables
                ],
                "notes": list(part.notes),
            }
            for part in section.parts
        ],
    }


def from_json(found: Mapping[str, Any]) -> Section:
    """Return the section that `to_json` was given."""
    parts = [
        Part(
            [_row_from_json(row) for row in part["rows"]],
            part["notes"],
            part["title"],
            [
                Table(
                    table["columns"],
                    [[_cell_from_json(cell) for cell in line] for line in table["lines"]],
                )
                for table in part["tables"]
            ],
        )
        for part in found["parts"]
    ]
    return Section(found["title"], parts, found["case"])


_CELLS = ("floor", "dcp_mem", "ratio", "peer")


def _row_to_json(row: Row) -> dict[str, Any]:
    cells = {name: _cell_to_json(getattr(row, name)) for name in _CELLS}
    rest = {
        "target": row.target,
        "met": row.met,
        "versus_peer": row.versus_peer,
        "failed": row.failed,
    }
    filled = {name: value for name, value in {**cells, **rest}.items() if value not in ("", None)}
    if not row.failed:
        del filled["failed"]
    return {"what": row.what, **filled}


def _row_from_json(found: Mapping[str, Any]) -> Row:
    cells = {name: _cell_from_json(found.get(name, "")) for name in _CELLS}
    return Row(
        found["what"],
        **cells,
        target=found.get("target", ""),
        met=found.get("met"),
        versus_peer=found.get("versus_peer", ""),
        failed=found.get("failed", False),
    )


def _cell_to_json(cell: Cell) -> Any:
    if isinstance(cell, str):
        return cell
    found: dict[str, Any] = {
        "median": cell.median,
        "low": cell.low,
        "high": cell.high,
        "unit": cell.unit,
    }
    return {**found, "values": list(cell.values)} if cell.values else found


def _cell_from_json(found: Any) -> Cell:
    if isinstance(found, str):
        return found
    return Figure(
        median=found["median"],
        low=found["low"],
        high=found["high"],
        unit=found["unit"],
        values=tuple(found.get("values", ())),
    )
