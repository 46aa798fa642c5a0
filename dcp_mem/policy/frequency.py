"""Advise how often to save: as often as costs least.

Decided from what a save blocks, how often failures come, what a flush takes and what a recovery
takes. The rules:

1. The interval is that of J. T. Daly, "A higher order estimate of the optimum checkpoint interval
   for restart dumps" (Future Generation Computer Systems 22, 2006).
2. Saves that go to storage are no closer together than a flush takes.
3. `auto` measures what saves and steps take, and turns the interval into a number of steps.
"""

from __future__ import annotations

import math
import re

from dcp_mem.common.value_class import value_class
from dcp_mem.errors import ConfigError

_SECONDS_OF = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_NUMBER_AND_UNIT = r"(?i)\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]+)\s*"


@value_class(kw_only=True, frozen=True)
class Advice:
    """The recommended save interval and its cost.

    With T the interval, C the seconds that a save blocks and M the mean time between failures.

    Attributes:
        interval_seconds: T: training time from one save to the next, the saves not counted.
        young_seconds: T by Young's first-order estimate, sqrt(2 C M).
        persist_seconds: What to give `every_seconds` for saves that go to storage: T, or what a
            flush takes if that is longer.
        saving: Share of the time that saves take, C / (T + C).
        rework: Expected share that failures cost, ((T + C) / 2 + recovery) / M, at most 1.
        mtbf_seconds: M.
    """

    interval_seconds: float
    young_seconds: float
    persist_seconds: float
    saving: float
    rework: float
    mtbf_seconds: float

    @property
    def overhead(self) -> float:
        """The share of the time that is lost to saves and failures, at most 1."""
        return min(1.0, self.saving + self.rework)

    def __str__(self) -> str:
        return (
            f"save every {_duration(self.interval_seconds)}: {_percent(self.saving)} of the time "
            f"goes to saves, {_percent(self.rework)} to recoveries and work done twice "
            f"(MTBF {_duration(self.mtbf_seconds)})"
        )


@value_class(frozen=True)
class Auto:
    """Save as often as costs least; made by `auto`.

    Attributes:
        mtbf_seconds: Mean time between failures of the whole job.
        at_least_steps: Fewest steps from one save to the next.
    """

    mtbf_seconds: float
    at_least_steps: int = 1


def advice(
    blocking_seconds: float,
    mtbf_seconds: float,
    *,
    flush_seconds: float = 0.0,
    recovery_seconds: float = 0.0,
) -> Advice:
    """Return how often to save, and what that costs.

    With C the blocking time of a save and M the mean time between failures, the interval is Daly's:
    sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + (C / 2M) / 9) - C below C = 2M, and M from there on. It
    grows with C; with M too, but for a step down of a ninth at M = C / 2. A save that costs nothing
    gets an interval of 0.

    Args:
        blocking_seconds: C: how long a save blocks training.
        mtbf_seconds: M, of the whole job: a node's, divided by the number of nodes.
        flush_seconds: From a save until storage has it.
        recovery_seconds: From a failure until training goes on.

    Raises:
        ConfigError: A time is negative or not finite, or M is 0.
    """
    cost = _seconds("blocking_seconds", blocking_seconds, may_be_zero=True)
    mtbf = _seconds("mtbf_seconds", mtbf_seconds)
    flush = _seconds("flush_seconds", flush_seconds, may_be_zero=True)
    recovery = _seconds("recovery_seconds", recovery_seconds, may_be_zero=True)
    young = math.sqrt(2 * cost) * math.sqrt(mtbf)  # their product may overflow
    interval = _daly(cost, mtbf, young)
    return Advice(
        interval_seconds=interval,
        young_seconds=young,
        persist_seconds=max(interval, flush),
        saving=cost / (interval + cost) if cost else 0.0,
        rework=min(1.0, ((interval + cost) / 2 + recovery) / mtbf),
        mtbf_seconds=mtbf,
    )


def auto(mtbf: float | str, *, at_least_steps: int = 1) -> Auto:
    """Save as often as costs least, going by what saves and steps turn out to take.

    Args:
        mtbf: Mean time between failures of the whole job: seconds, or a text such as "12h",
            "30min", "1.5 d" or "90s".
        at_least_steps: Fewest steps from one save to the next.

    Raises:
        ConfigError: An argument doesn't fit.
    """
    if type(at_least_steps) is not int or at_least_steps < 1:
        raise ConfigError(
            f"at_least_steps={at_least_steps!r}: give a whole number of steps, at least 1"
        )
    return Auto(parse_seconds(mtbf, "mtbf"), at_least_steps)


def steps_between(auto: Auto, blocking_seconds: float, step_seconds: float) -> int:
    """Return how many steps to take from one save to the next.

    Raises ConfigError.
    """
    step = _seconds("step_seconds", step_seconds)
    interval = advice(blocking_seconds, auto.mtbf_seconds).interval_seconds
    return max(auto.at_least_steps, round(interval / step))


def parse_seconds(duration: float | str, argument: str) -> float:
    """Return the seconds of a number, or of a text like "12h", "30min", "1.5 d" or "90s".

    Raises ConfigError.
    """
    if not isinstance(duration, str):
        return _seconds(argument, duration)
    match = re.fullmatch(_NUMBER_AND_UNIT, duration)
    seconds = float(match[1]) * _SECONDS_OF.get(match[2].lower(), 0.0) if match is not None else 0.0
    if not 0 < seconds < math.inf:
        raise ConfigError(
            f"{argument}={duration!r}: give seconds above 0, or a text such as '12h', '30min', "
            f"'1.5 d'"
        )
    return seconds


def _daly(cost: float, mtbf: float, young: float) -> float:
    """Return Daly's higher-order estimate of the interval."""
    ratio = cost / (2 * mtbf)
    return young * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost if ratio < 1 else mtbf


def _seconds(argument: str, value: float, *, may_be_zero: bool = False) -> float:
    try:
        fits = 0 <= value < math.inf and (value > 0 or may_be_zero) and not isinstance(value, bool)
    except TypeError:
        fits = False
    if not fits:
        least = "at least 0" if may_be_zero else "above 0"
        raise ConfigError(f"{argument}={value!r}: give a finite number of seconds, {least}")
    return float(value)


def _duration(seconds: float) -> str:
    """Return a time with three digits, in the largest unit of which it is one or more."""
    unit = max(
        (unit for unit, length in _SECONDS_OF.items() if length <= max(seconds, 1.0)),
        key=_SECONDS_OF.__getitem__,
    )
    number = seconds / _SECONDS_OF[unit]
    return f"{number:.3g} {unit}" if number < 999.5 else f"{number:,.0f} {unit}"


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.995 else "100 %"
