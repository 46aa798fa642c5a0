"""Render a job's history as one HTML page.

It has no scripts and needs nothing from elsewhere; it is readable on any screen and on paper.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from itertools import zip_longest

from dcp_mem.common.value_class import value_class
from dcp_mem.common.values import counted, figures, shown
from dcp_mem.errors import gib as size
from dcp_mem.format.history import HistoryRow
from dcp_mem.format.recoveries import RecoveryRecord
from dcp_mem.operations.charts import LEFT, RIGHT, Dot, Series, Times, marks, series
from dcp_mem.operations.history import (
    Fate,
    History,
    Totals,
    fate_of,
    flush_span,
    flush_throughput,
    totals,
)

_CHECKPOINTS, _RECOVERIES, _TROUBLES = 60, 60, 40
_LANE, _CHART, _DOTTED = 26.0, 96.0, 40
_LONGEST_TEXT = 600
_METRICS = 6
"""Metrics that are drawn: those that the most checkpoints have."""
_NONE = "\N{EN DASH}"


@value_class(kw_only=True)
class Trouble:
    """A kind of failure in a job's history, and how often it happened."""

    what: str
    text: str
    count: int
    first: float
    last: float
    name: str


@value_class
class Tile:
    """A figure at the top of the page."""

    name: str
    value: str
    more: str
    kind: str = ""


@value_class
class Chart:
    title: str
    series: Series
    summary: str  # the same in words, for people who can't see it


def render_page(history: History, *, now: float | None = None) -> str:
    """Return the page as text; all names and errors in it are escaped."""
    # A tenth of what a trainer's import of dcp_mem took.
    from jinja2 import Environment, PackageLoader, StrictUndefined

    sums = totals(history)
    environment = Environment(
        loader=PackageLoader("dcp_mem", "operations"),
        autoescape=True,
        undefined=StrictUndefined,
        # Markup is no plain text: it has been made safe already.
        finalize=lambda value: shown(value) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(size=size, duration=duration, rate=rate, moment=moment)
    environment.filters.update(fate=fate_of, throughput=flush_throughput, figures=figures)
    newest = tuple(reversed(history.checkpoints))
    troubles = troubles_of(history)
    return environment.get_template("report.html").render(
        history=history,
        totals=sums,
        tiles=_tiles(sums),
        drawing=_drawing(history),
        checkpoints=newest[:_CHECKPOINTS],
        recoveries=tuple(reversed(history.recoveries))[:_RECOVERIES],
        troubles=troubles[:_TROUBLES],
        all_troubles=len(troubles),
        fates=[fate for fate in Fate if any(fate_of(one) is fate for one in history.checkpoints)],
        kind_of=_kind,
        now=time.time() if now is None else now,
    )


def troubles_of(history: History) -> list[Trouble]:
    """Return what failed, was skipped or passed over, or succeeded after errors; latest first.
    Errors that differ in nothing but the checkpoint's name are counted as one.
    """
    found: dict[tuple[str, str], Trouble] = {}
    events = [
        (
            one.created,
            fate_of(one).value if fate_of(one) is not Fate.DURABLE else "flushed in the end",
            error,
            one.name,
        )
        for one in history.checkpoints
        if (error := _error(one))
    ]
    events += [
        (
            one.time,
            "passed over",
            reason.removeprefix(f"{reason.partition(': ')[0]}: "),
            reason.partition(": ")[0],
        )
        for one in history.recoveries
        for reason in one.passed_over
    ]
    for when, what, text, name in sorted(events):
        text = text[:_LONGEST_TEXT]
        alike = what, text.replace(name, "*")
        earlier = found.pop(alike, None)
        found[alike] = Trouble(
            what=what,
            text=text,
            count=1 if earlier is None else earlier.count + 1,
            first=when if earlier is None else earlier.first,
            last=when,
            name=name,
        )
    return sorted(found.values(), key=lambda one: one.last, reverse=True)


def _error(one: HistoryRow) -> str:
    if fate_of(one) is Fate.SUPERSEDED:
        return ""
    if one.error or fate_of(one) not in (Fate.SKIPPED, Fate.FAILED):
        return one.error
    return (
        "it left memory before its turn came"
        if fate_of(one) is Fate.SKIPPED
        else "no reason was given"
    )


def _kind(fate: Fate) -> str:
    return fate.value.replace(" ", "-")


# -- figures as texts ------------------------------------------------------------------------------


def duration(seconds: float) -> str:
    """Return a time for people; "" for none."""
    if seconds <= 0:
        return ""
    if seconds < 0.9995:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 7200:
        return _two_units(round(seconds), 60, "min", "s")
    if seconds < 172_800:
        return _two_units(round(seconds / 60), 60, "h", "min")
    return _two_units(round(seconds / 3600), 24, "d", "h")


def _two_units(count: int, in_one: int, large: str, small: str) -> str:
    whole, rest = divmod(count, in_one)
    return f"{whole} {large}" + (f" {rest} {small}" if rest else "")


def rate(bytes_per_second: float) -> str:
    """Return a throughput for people; "" for none."""
    return f"{size(bytes_per_second)}/s" if bytes_per_second > 0 else ""


def moment(seconds: float) -> str:
    """Return a moment in UTC for people; "" for none."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds)) if seconds > 0 else ""


def _tiles(sums: Totals) -> list[Tile]:
    others = (
        (sums.memory_only, "in memory only"),
        (sums.waiting, "on their way"),
        (sums.superseded, "superseded by newer ones"),
        (sums.skipped, "skipped"),
    )
    saves = [f"{sums.durable:,} durable", *(f"{count:,} {what}" for count, what in others if count)]
    return [
        Tile("Saves", f"{sums.saves:,}", ", ".join(saves)),
        Tile(
            "Failed",
            f"{sums.failed:,}",
            f"{counted(sums.retries, 'request')} repeated",
            "bad" if sums.failed else "",
        ),
        Tile("Blocked per save", duration(sums.blocked_median) or _NONE, "median"),
        Tile(
            "Goodput",
            f"{sums.goodput:.1%}" if sums.last > sums.first else _NONE,
            f"{duration(sums.lost_seconds) or 'nothing'} lost",
        ),
        Tile(
            "Saving overhead",
            f"{sums.blocked_share:.2%}"
            if sums.blocked_seconds and sums.last > sums.first
            else _NONE,
            f"{duration(sums.blocked_seconds) or 'nothing'} of "
            f"{duration(sums.last - sums.first) or 'no time'}",
        ),
        Tile(
            "To storage",
            size(sums.flushed_nbytes),
            counted(sums.durable, "flush", "flushes")
            + (f", {size(sums.reused_nbytes)} reused" if sums.reused_nbytes else ""),
        ),
        Tile(
            "Flush throughput",
            rate(sums.throughput_median) or _NONE,
            f"median flush {duration(sums.flush_median)}"
            if sums.flush_median
            else "nothing was flushed",
        ),
        Tile(
            "Recoveries",
            f"{sums.recoveries:,}",
            f"median {duration(sums.recovery_median) or 'unknown'}"
            if sums.recoveries
            else "nothing was loaded",
        ),
    ]


# -- what is drawn ---------------------------------------------------------------------------------


def _drawing(history: History) -> dict[str, object] | None:
    """Return what the template draws; None where there is nothing."""
    checkpoints, recoveries = history.checkpoints, history.recoveries
    flushes = [(one, span) for one in checkpoints if (span := flush_span(one)) is not None]
    moments = [one.created for one in checkpoints]
    moments += [moment for _, span in flushes for moment in span]
    moments += [moment for one in recoveries for moment in (one.time - one.seconds, one.time)]
    if not moments:
        return None
    times = Times.around(moments)
    saves = [
        (one.created, one.created, _kind(fate_of(one)), _save_title(one)) for one in checkpoints
    ]
    moved = [(*span, "durable", _flush_title(one)) for one, span in flushes]
    loads = [
        (one.time - one.seconds, one.time, "recovery", _recovery_title(one)) for one in recoveries
    ]
    lanes = [
        ("saves", *marks(times, saves, 2.0, seen="failed")),
        ("flushes", *marks(times, moved, 2.0)),
        ("recoveries", *marks(times, loads, 3.0)),
    ]
    return {
        "left": LEFT,
        "right": RIGHT,
        "lane": _LANE,
        "height": _CHART,
        "ticks": times.ticks(),
        "lanes": lanes,
        "labels": _labels(times, recoveries),
        "recovered": [round(times.at(one.time), 1) for one in recoveries]
        if len(recoveries) <= _DOTTED
        else [],
        "charts": _charts(times, history, [one for one, _ in flushes]),
    }


def _charts(times: Times, history: History, flushed: Sequence[HistoryRow]) -> list[Chart]:
    saves = [one for one in history.checkpoints if one.save_id]
    blocked = [(one.created, one.stage_seconds) for one in saves if one.stage_seconds]
    moving = [(one.durable, flush_throughput(one)) for one in flushed if flush_throughput(one)]
    sizes = [(one.created, float(one.nbytes)) for one in saves if one.nbytes]
    charts, breaks = [], [one.time for one in history.recoveries]
    for title, values, text, base in (
        ("Size of checkpoints", sizes, size, 1024),
        ("Blocking time of saves", blocked, lambda value: duration(value) or "0", 10),
        ("Throughput of flushes", moving, lambda value: rate(value) or "0", 1024),
    ):
        if values:
            least, most = (text(choose(value for _, value in values)) for choose in (min, max))
            summary = f"{title}: {len(values)} values, from {least} to {most}"
            charts.append(Chart(title, series(times, values, _CHART, text, base, breaks), summary))
    for name, values in _metrics(history).items():
        low, high = (choose(value for _, value in values) for choose in (min, max))
        summary = f"{name}: {len(values)} values, from {low:.4g} to {high:.4g}"
        drawn = series(times, values, _CHART, "{:.4g}".format, breaks=breaks, is_from_zero=False)
        charts.append(Chart(name, drawn, summary))
    return charts


def _metrics(history: History) -> dict[str, list[tuple[float, float]]]:
    """Return (moment, value) of each metric that the training loop gave with its saves."""
    found: dict[str, list[tuple[float, float]]] = {}
    for one in history.checkpoints:
        for name, value in one.metrics.items():
            if math.isfinite(value):
                found.setdefault(name, []).append((one.created, value))
    most = sorted(found, key=lambda name: (-len(found[name]), name))[:_METRICS]
    return {name: found[name] for name in sorted(most)}


def _labels(times: Times, recoveries: Sequence[RecoveryRecord]) -> list[Dot]:
    """Return the names of what was recovered, where there is room for them."""
    found = []
    for one, after in zip_longest(recoveries, recoveries[1:]):
        text, x = one.name[:24], times.at(one.time)
        if x + 7.0 * len(text) + 10 < (times.at(after.time) if after is not None else RIGHT):
            found.append(Dot(round(x, 1), 0.0, text))
    return found


def _save_title(one: HistoryRow) -> str:
    took = f", blocked training for {duration(one.stage_seconds)}" if one.stage_seconds else ""
    return f"{one.name}, {moment(one.created)}: {size(one.nbytes)}, {fate_of(one).value}{took}"


def _flush_title(one: HistoryRow) -> str:
    took, speed = duration(one.flush_seconds) or "no time", rate(flush_throughput(one)) or "unknown"
    return f"{one.name} flushed in {took} ({speed})"


def _recovery_title(one: RecoveryRecord) -> str:
    sources = " and ".join(one.sources) or "nowhere"
    took = duration(one.seconds) or "no time"
    return f"{one.name} loaded from {sources} in {took}, {moment(one.time)}"
