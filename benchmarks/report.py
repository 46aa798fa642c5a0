"""Rows, verdicts and the markdown that shows them."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from benchmarks.processes import MeasurementFailed
from benchmarks.samples import Sample
from benchmarks.scratch import Skipped

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

COLUMNS = ("what", "floor", "ours", "ratio", "target", "met?", "torch peer", "ours vs peer")
VERDICTS = {None: "", True: "yes", False: "**no**"}


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table; `met` is None where there is no target."""

    what: str
    floor: str = ""
    ours: str = ""
    ratio: str = ""
    target: str = ""
    met: bool | None = None
    peer: str = ""
    versus_peer: str = ""
    failed: bool = False

    @property
    def cells(self) -> tuple[str, ...]:
        return (
            self.what,
            self.floor,
            self.ours,
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
    lines: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Part:
    """Rows that were measured together, the figures that they are about, and what there is to say about them."""

    rows: Sequence[Row]
    notes: Sequence[str] = ()
    title: str = ""
    tables: Sequence[Table] = ()

    @property
    def markdown(self) -> str:
        notes = [f"- {note}" for note in self.notes]
        rows = [Table(COLUMNS, [row.cells for row in self.rows])] if self.rows else []
        lines = [f"### {self.title}", ""]
        for table in (*self.tables, *rows):
            lines += [*_table(table), ""]
        return "\n".join([*lines, *notes, ""] if notes else lines)


@dataclass(frozen=True, slots=True)
class Section:
    """What one case found."""

    title: str
    parts: Sequence[Part]

    @property
    def markdown(self) -> str:
        return "\n".join([f"## {self.title}", "", *(part.markdown for part in self.parts)])


def attempt(case: str, title: str, measure: Callable[[], Part]) -> Part:
    """What `measure` returns, or a row that says why there is nothing."""
    print(f"{case}: {title} … ", end="", file=sys.stderr, flush=True)
    start = time.monotonic()
    try:
        part = measure()
    except Skipped as reason:
        part = Part([Row("all of it", ours=f"skipped: {reason}")])
    except MeasurementFailed as error:
        print(error, file=sys.stderr)
        last_line = str(error).strip().splitlines()[-1]
        part = Part([Row("all of it", ours=f"failed: {last_line}", met=False, failed=True)])
    print(f"{time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    return replace(part, title=title)


def summary(sections: Sequence[Section]) -> str:
    """How many targets were met, and which were missed."""
    judged = [
        (f"{section.title}: {part.title}: {row.what}", row)
        for section in sections
        for part in section.parts
        for row in part.rows
        if row.met is not None
    ]
    missed = [f"- {name}: {_figure(row)}" for name, row in judged if not row.met]
    met = f"{len(judged) - len(missed)} of {len(judged)} targets met"
    return "\n".join(["## Summary", "", f"{met}{', missed:' if missed else '.'}", "", *missed, ""])


def _figure(row: Row) -> str:
    """The figure that the verdict is about."""
    return row.ratio or row.versus_peer or row.ours


def failures(sections: Sequence[Section]) -> bool:
    """Whether anything could not be measured."""
    return any(row.failed for section in sections for part in section.parts for row in part.rows)


def beside_floor(
    what: str,
    floor: Sample,
    ours: Sample,
    *,
    at_most: float | None = None,
    peer: Sample | None = None,
) -> Row:
    """Ours beside a floor, with a target where `at_most` times the floor is allowed."""
    ratio = ours.per(floor)
    return Row(
        what,
        floor=duration(floor),
        ours=duration(ours),
        ratio=factor(ratio),
        target="" if at_most is None else f"≤ {at_most:.2f} x floor",
        met=None if at_most is None else ratio.median <= at_most,
        peer="" if peer is None else duration(peer),
        versus_peer="" if peer is None else _times_less(ours, peer),
    )


def beside_peer(what: str, ours: Sample, peer: Sample, *, at_least: float | None = None) -> Row:
    """Ours beside torch's, with a target where ours has to be `at_least` times faster."""
    return Row(
        what,
        ours=duration(ours),
        target=_target_beside_peer(at_least),
        met=None if at_least is None else peer.median >= at_least * ours.median,
        peer=duration(peer),
        versus_peer=_times_less(ours, peer),
    )


def within(what: str, ours: Sample, limit: float) -> Row:
    """Ours beside so many seconds."""
    target = f"≤ {duration(Sample((limit,))).partition(' (')[0]}"
    return Row(what, ours=duration(ours), target=target, met=ours.median <= limit)


def duration(sample: Sample) -> str:
    """Median and middle half of seconds."""
    low, high = sample.quartiles
    scale, unit, digits = (1.0, "s", 2) if sample.median >= 1 else (1e3, "ms", 1)
    if sample.median < 1e-4:
        scale, unit = 1e6, "µs"
    figures = [f"{value * scale:.{digits}f}" for value in (sample.median, low, high)]
    return f"{figures[0]} {unit} ({figures[1]}-{figures[2]})"


def named(samples: Mapping[str, Sample]) -> str:
    """Several durations in a line of text."""
    return ", ".join(f"{name} {duration(sample)}" for name, sample in samples.items())


def factor(sample: Sample) -> str:
    """Median and middle half of ratios."""
    low, high = sample.quartiles
    return f"{sample.median:.2f} ({low:.2f}-{high:.2f})"


def size(count: float) -> str:
    """Bytes in MiB."""
    return f"{count / 2**20:,.1f} MiB"


def _target_beside_peer(at_least: float | None) -> str:
    if at_least is None:
        return ""
    return "less than torch" if at_least == 1 else f"{at_least:g} x less than torch"


def _times_less(ours: Sample, peer: Sample) -> str:
    return f"{peer.median / ours.median:.1f} x less"


def _table(table: Table) -> list[str]:
    lines = [table.columns, ["---"] * len(table.columns), *table.lines]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
