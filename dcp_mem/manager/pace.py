"""The interval of saves, and the seconds that steps and saves take."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from statistics import median

from dcp_mem.common.values import CheckpointStatus, State
from dcp_mem.errors import ConfigError
from dcp_mem.policy.frequency import Advice, Auto, advice, parse_seconds, steps_between

_MEASURED = 9


class Pace:
    """Says which steps to save at, by an interval or by what steps and saves have taken."""

    def __init__(self, interval: int | Auto) -> None:
        is_auto = isinstance(interval, Auto)
        if not is_auto and (type(interval) is not int or interval < 1):
            raise ConfigError(
                f"save_interval_steps={interval!r}: give a number of steps, at least 1, or "
                "auto(mtbf=…)"
            )
        self._interval = interval
        self.pause = 1 if isinstance(interval, Auto) else interval
        self._last: int | None = None
        self._ended = 0.0
        self._is_warm = False
        self._blocking: deque[float] = deque(maxlen=_MEASURED)

    def is_due(self, step: int) -> bool:
        """Tell whether a save is due; after a step that went back, steps count from there."""
        return self._last is None or not 0 <= step - self._last < self.pause

    def steps_until_next(self, step: int) -> int:
        """Return the steps this rank would leave until the next save; the coordinator's count."""
        if not isinstance(self._interval, Auto):
            return self._interval
        is_known = self._last is not None and step > self._last and self._ended
        if self._last is None or not (self._blocking and is_known):
            return self._interval.at_least_steps
        seconds = (time.monotonic() - self._ended) / (step - self._last)
        return steps_between(self._interval, median(self._blocking), seconds)

    def passed(self, step: int) -> None:
        """Count from a step that was restored, or couldn't be saved: the next save is due later."""
        self._last, self._ended = step, time.monotonic()

    def forget(self) -> None:
        """Count from no step: the next save is due."""
        self._last = None

    def saved(self, step: int, seconds: float, pause: int) -> None:
        if self._is_warm:  # The first save makes slots and plans, which later ones find.
            self._blocking.append(seconds)
        self._is_warm, self.pause = True, pause
        self.passed(step)

    def advice(
        self, known: Sequence[CheckpointStatus], mtbf: float | str, recovery_seconds: float
    ) -> Advice:
        """Return how often to save, by what saves and flushes have taken. Raises ConfigError."""
        if not self._blocking:
            raise ConfigError("advice() goes by what saves take: save at least once before")
        flushes = [one.flush_seconds for one in known if one.state is State.DURABLE]
        return advice(
            median(self._blocking),
            parse_seconds(mtbf, "mtbf"),
            flush_seconds=median(flushes) if flushes else 0.0,
            recovery_seconds=recovery_seconds,
        )
