"""Where things go on a chart: from figures to coordinates. Pure functions; however much there is, what is drawn stays small."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

LEFT, RIGHT = 86.0, 938.0
"""Where the axis of time begins and ends, in the units of the drawing."""
_FEW = 150
_BINS = 220
_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200, 86_400)
_DAY = 86_400
_LABELS = 8
_LEAST_SHARE = 0.4


@dataclass(frozen=True, slots=True)
class Tick:
    """A line across the chart with its label. at: its coordinate."""

    at: float
    label: str


@dataclass(frozen=True, slots=True)
class Times:
    """The axis of time, from `first` to `last`, in seconds since the epoch."""

    first: float
    last: float

    @classmethod
    def around(cls, moments: Iterable[float]) -> Times:
        """An axis that has all of these, with some room at both ends."""
        found = list(moments)
        first, last = min(found, default=0.0), max(found, default=1.0)
        room = max((last - first) * 0.015, 0.5)
        return cls(first - room, last + room)

    def at(self, moment: float) -> float:
        share = (moment - self.first) / (self.last - self.first)
        return LEFT + min(max(share, 0.0), 1.0) * (RIGHT - LEFT)

    def ticks(self) -> list[Tick]:
        """Round moments, in UTC, at most eight."""
        pause = next((step for step in _STEPS if (self.last - self.first) / step <= _LABELS), 0)
        days = 1
        while not pause:
            days *= 2
            pause = days * _DAY if (self.last - self.first) / (days * _DAY) <= _LABELS else 0
        first = math.ceil(self.first / pause)
        return [
            Tick(self.at(number * pause), _clock(number * pause, pause))
            for number in range(first, math.floor(self.last / pause) + 1)
        ]


def _clock(moment: float, pause: int) -> str:
    when = time.gmtime(moment)
    if pause >= _DAY or moment % _DAY == 0:
        return time.strftime("%d %b", when)
    return time.strftime("%H:%M" if pause >= 60 else "%H:%M:%S", when)


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that happened. kind: how it is drawn. width: of its bar (0: a moment)."""

    at: float
    width: float
    kind: str
    title: str


def marks(
    times: Times, events: Sequence[tuple[float, float, str, str]], least_width: float, seen: str = ""
) -> tuple[list[Mark], dict[str, str]]:
    """A lane of events (begin, end, kind, title).

    Few of them each as a mark of their own; many as one path for each kind, in which what lies side by side is one bar, and a
    column that several kinds share is divided among them. seen: a kind that gets enough of each to be seen.
    """
    if len(events) <= _FEW:
        return [
            Mark(round(times.at(begin), 1), round(max(times.at(end) - times.at(begin), least_width), 1), kind, title)
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
    """For each kind an SVG path, in a lane that is 1 high; columns that follow each other alike are drawn as one."""
    bars: dict[str, list[list[float]]] = {}
    for column in sorted(columns):
        total, top = sum(columns[column].values()), 0.0
        shares = {kind: count / total for kind, count in columns[column].items()}
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
        kind: "".join(f"M{x:.1f} {y:g}h{wide:.1f}v{high:g}h-{wide:.1f}z" for x, y, high, wide in found)
        for kind, found in bars.items()
    }


@dataclass(frozen=True, slots=True)
class Dot:
    """A value on a chart."""

    x: float
    y: float
    title: str


@dataclass(frozen=True, slots=True)
class Series:
    """Values over time. band: from the least to the greatest value of each stretch of time, where there are too many for dots.

    lines: SVG paths' data.
    """

    line: str
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
) -> Series:
    """A chart of (moment, value), `height` high, from 0 upwards.

    base: 1024 has the labels be round in bytes. breaks: moments over which no line is drawn, in order.
    """
    greatest = max((value for _, value in values), default=0.0)
    ticks = _round_values(greatest, base)
    top = greatest * 1.06 or 1.0

    def y(value: float) -> float:
        return round(height * (1 - value / top), 1)

    at = [(times.at(moment), value) for moment, value in sorted(values)]
    labels = tuple(Tick(y(value), shown(value)) for value in ticks)
    if len(at) <= _FEW:
        dots = tuple(Dot(round(x, 1), y(value), shown(value)) for x, value in at)
        return Series(_lines([(dot.x, dot.y) for dot in dots], list(map(times.at, breaks))), "", dots, labels)
    width = (RIGHT - LEFT) / _BINS
    bins: dict[int, list[float]] = {}
    for x, value in at:
        bins.setdefault(int((x - LEFT) / width), []).append(value)
    middles = [(round(LEFT + (number + 0.5) * width, 1), found) for number, found in sorted(bins.items())]
    line = _path([(x, y(median(found))) for x, found in middles])
    outline = [(x, y(max(found))) for x, found in middles] + [(x, y(min(found))) for x, found in reversed(middles)]
    return Series(line, _path(outline) + "z", (), labels)


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:g} {y:g}" for x, y in points) if points else ""


def _lines(points: Sequence[tuple[float, float]], breaks: Sequence[float]) -> str:
    """A path through the points, in pieces."""
    pieces: dict[int, list[tuple[float, float]]] = {}
    for point in points:
        pieces.setdefault(bisect_left(breaks, point[0]), []).append(point)
    return "".join(map(_path, pieces.values()))


def _round_values(greatest: float, base: int) -> list[float]:
    """0 and up to four round values above it, the last of which is at most a little less than the greatest."""
    if greatest <= 0:
        return [0.0]
    unit = float(base ** math.floor(math.log(greatest, base))) if base != 10 else 1.0
    share = greatest / unit
    power = 10 ** math.floor(math.log10(share))
    step = next(factor * power for factor in (0.2, 0.25, 0.5, 1, 2, 2.5, 5) if share / (factor * power) <= 4)
    return [number * step * unit for number in range(math.floor(share / step) + 1)]
