"""Turn figures into coordinates of a chart, by pure functions.

The more figures there are, the coarser is the chart, so what is drawn stays small.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, count
from statistics import median

from dcp_mem.common.value_class import value_class

LEFT, RIGHT = 132.0, 938.0
"""The two ends of the time axis, in the units of the drawing."""
_FEW = 150
"""Up to so many events or values are drawn one by one."""
_BINS = 220
"""Stretches of time into which more values than these are put."""
_STEPS = (
    *(1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900),
    *(1800, 3600, 7200, 10_800, 21_600, 43_200, 86_400),
)
"""Seconds between ticks of the axis of time, up to a day."""
_DAY = 86_400
_LABELS = 8
"""Most ticks on the axis of time."""
_LEAST_SHARE = 0.4
"""Share of a column that a kind which is to be seen gets at least."""


@value_class
class Tick:
    at: float
    label: str


@value_class
class Times:
    """The axis of time, in seconds since the epoch."""

    first: float
    last: float

    @classmethod
    def around(cls, moments: Iterable[float]) -> Times:
        """Return an axis that has all these moments on it, with some room at both ends."""
        found = list(moments)
        first, last = min(found, default=0.0), max(found, default=1.0)
        room = max((last - first) * 0.015, 0.5)
        return cls(first - room, last + room)

    def at(self, moment: float) -> float:
        """Return the coordinate of a moment; moments outside of the axis go to its ends."""
        share = (moment - self.first) / (self.last - self.first)
        return LEFT + min(max(share, 0.0), 1.0) * (RIGHT - LEFT)

    def ticks(self) -> list[Tick]:
        """Return round moments in UTC, at most eight."""
        steps = chain(_STEPS, (_DAY << doubled for doubled in count(1)))
        interval = next(step for step in steps if (self.last - self.first) / step <= _LABELS)
        first = math.ceil(self.first / interval)
        return [
            Tick(self.at(number * interval), _clock(number * interval, interval))
            for number in range(first, math.floor(self.last / interval) + 1)
        ]


def _clock(moment: float, interval: int) -> str:
    when = time.gmtime(moment)
    if interval >= _DAY or moment % _DAY == 0:
        return time.strftime("%d %b", when)
    return time.strftime("%H:%M" if interval >= 60 else "%H:%M:%S", when)


@value_class
class Mark:
    at: float
    width: float
    kind: str
    title: str


def marks(
    times: Times,
    events: Sequence[tuple[float, float, str, str]],
    least_width: float,
    seen: str = "",
) -> tuple[list[Mark], dict[str, str]]:
    """Lay out a lane of events: as marks if they are few, else as one SVG path for each kind. In
    paths, events that lie side by side are one bar, and a column that several kinds share is
    divided among them; the kind `seen` gets enough of it to be seen. One of the two results is
    empty.
    """
    if len(events) <= _FEW:
        return [
            Mark(
                round(times.at(begin), 1),
                round(max(times.at(end) - times.at(begin), least_width), 1),
                kind,
                title,
            )
            for begin, end, kind, title in events
        ], {}
    columns: dict[int, dict[str, int]] = {}
    for begin, end, kind, _ in events:
        first, last = int(times.at(begin) / least_width), int(times.at(end) / least_width)
        for column in range(first, last + 1):
            kinds = columns.setdefault(column, {})
            kinds[kind] = kinds.get(kind, 0) + 1
    return [], _paths(columns, least_width, seen)


def _paths(columns: Mapping[int, Mapping[str, int]], width: float, seen: str) -> dict[str, str]:
    """Return an SVG path for each kind, in a lane of height 1; equal neighbours become one bar."""
    bars: dict[str, list[list[float]]] = {}
    for column in sorted(columns):
        total, top = sum(columns[column].values()), 0.0
        shares = {kind: number / total for kind, number in columns[column].items()}
        if seen in shares:
            shares[seen] = max(shares[seen], _LEAST_SHARE)
        for kind in sorted(shares):
            height = round(shares[kind] / sum(shares.values()), 2)
            bar = [column * width, top, height, width]
            last = bars.setdefault(kind, []) and bars[kind][-1]
            if last and last[1:3] == bar[1:3] and math.isclose(last[0] + last[3], bar[0]):
                last[3] += width
            else:
                bars[kind].append(bar)
            top = round(top + height, 2)
    return {
        kind: "".join(
            f"M{x:.1f} {y:g}h{wide:.1f}v{high:g}h-{wide:.1f}z" for x, y, high, wide in found
        )
        for kind, found in bars.items()
    }


@value_class
class Dot:
    x: float
    y: float
    title: str


@value_class
class Series:
    line: str  # data of an SVG path through the values, or through the medians of stretches of time
    # data of an SVG path around the values of each stretch, where there are too many for dots
    band: str
    dots: tuple[Dot, ...]
    ticks: tuple[Tick, ...]


def series(
    times: Times,
    values: Sequence[tuple[float, float]],
    height: float,
    shown: Callable[[float], str],
    base: int = 10,
    breaks: Sequence[float] = (),
    is_from_zero: bool = True,
) -> Series:
    """Lay out a chart of values, with no line over the moments of `breaks` (ascending), and labels
    that are round in bytes with base 1024. The axis begins at 0, or at the least value.
    """
    greatest = max((value for _, value in values), default=0.0)
    least = 0.0 if is_from_zero else min((value for _, value in values), default=0.0)
    middle = least + (greatest - least) / 2
    ticks = _round_values(greatest, base) if is_from_zero else sorted({least, middle, greatest})
    room = (greatest - least) * 1.06 or 1.0

    def y(value: float) -> float:
        return round(height * (1 - (value - least) / room), 1)

    at = [(times.at(moment), value) for moment, value in sorted(values)]
    labels = tuple(Tick(y(value), shown(value)) for value in ticks)
    if len(at) <= _FEW:
        dots = tuple(Dot(round(x, 1), y(value), shown(value)) for x, value in at)
        return Series(
            _lines([(dot.x, dot.y) for dot in dots], list(map(times.at, breaks))), "", dots, labels
        )
    width = (RIGHT - LEFT) / _BINS
    bins: dict[int, list[float]] = {}
    for x, value in at:
        bins.setdefault(int((x - LEFT) / width), []).append(value)
    middles = [
        (round(LEFT + (number + 0.5) * width, 1), found) for number, found in sorted(bins.items())
    ]
    line = _path([(x, y(median(found))) for x, found in middles])
    outline = [(x, y(max(found))) for x, found in middles] + [
        (x, y(min(found))) for x, found in reversed(middles)
    ]
    return Series(line, _path(outline) + "z", (), labels)


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:g} {y:g}" for x, y in points) if points else ""


def _lines(points: Sequence[tuple[float, float]], breaks: Sequence[float]) -> str:
    """Return a path through the points, interrupted at the breaks."""
    pieces: dict[int, list[tuple[float, float]]] = {}
    for point in points:
        pieces.setdefault(bisect_left(breaks, point[0]), []).append(point)
    return "".join(map(_path, pieces.values()))


def _round_values(greatest: float, base: int) -> list[float]:
    """Return 0 and up to four round values above it, none above the greatest."""
    if greatest <= 0:
        return [0.0]
    unit = float(base ** math.floor(math.log(greatest, base))) if base != 10 else 1.0
    share = greatest / unit
    power = 10 ** math.floor(math.log10(share))
    step = next(
        factor * power for factor in (0.2, 0.25, 0.5, 1, 2, 2.5, 5) if share / (factor * power) <= 4
    )
    return [number * step * unit for number in range(math.floor(share / step) + 1)]
