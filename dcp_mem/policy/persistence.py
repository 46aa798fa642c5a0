"""Which saves go to storage."""

from __future__ import annotations

from dataclasses import dataclass

from dcp_mem.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Persist:
    """Persist the first save, and then whichever comes after `saves` more saves or `seconds` more seconds.

    saves=1 persists every save; both None persists none.
    """

    saves: int | None = None
    seconds: float | None = None

    def wants(self, saves_since: int | None, seconds_since: float | None) -> bool:
        """Whether a save goes to storage, given how long ago the last one that did was (None: there was none)."""
        if self.saves is None and self.seconds is None:
            return False
        if saves_since is None or seconds_since is None:
            return True
        by_count = self.saves is not None and saves_since >= self.saves
        by_time = self.seconds is not None and seconds_since >= self.seconds
        return by_count or by_time


def every(n: int) -> Persist:
    """Persist the first save and every n-th after it. Raises ConfigError unless n is at least 1."""
    if type(n) is not int or n < 1:
        raise ConfigError(f"every({n!r}): give a whole number of saves, at least 1")
    return Persist(saves=n)


def interval(seconds: float) -> Persist:
    """Persist the first save and then the first after each `seconds`. Raises ConfigError unless positive."""
    try:
        positive = seconds > 0 and not isinstance(seconds, bool)
    except TypeError:
        positive = False
    if not positive:
        raise ConfigError(f"interval({seconds!r}): give a number of seconds above 0")
    return Persist(seconds=float(seconds))


def persist_policy(persist: bool | Persist) -> Persist:
    """The policy that the argument stands for. Raises ConfigError."""
    if isinstance(persist, Persist):
        return persist
    if isinstance(persist, bool):
        return Persist(saves=1) if persist else Persist()
    raise ConfigError(f"persist={persist!r}: give True, False, every(n) or interval(seconds)")
