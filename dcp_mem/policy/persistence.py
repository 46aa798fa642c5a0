"""Decide which saves go to storage.

Decided from the saves, seconds and steps since the last save that the policy chose. The rules:

1. The job's first save goes to storage, unless none ever does.
2. So does every save that has reached one of the policy's limits.
3. Each manifest says how far the counts were at its save. A job goes on from those of the save that
   it continues: its own last one, or the one that it has resumed from. No clock of another machine
   takes part: the time between the last save of a run and the next run isn't counted.
"""

from __future__ import annotations

from collections.abc import Sequence

from dcp_mem.common.value_class import value_class
from dcp_mem.errors import ConfigError


@value_class
class Since:
    """The time since the policy last chose a save, in three units."""

    saves: int  # saves since then, the one in question included
    seconds: float
    # training steps since then; None where one of the two saves told no step
    steps: int | None = None


@value_class
class Persisted:
    """How far a job's counts were at one of its saves, as the save's manifest says."""

    saves: int = 0  # saves since the one that the policy last chose; 0: it chose this one
    seconds: float = 0.0  # seconds since then, as far as processes of the job have measured them
    step: int | None = None  # training step of the one that it chose


@value_class(kw_only=True)
class CountedSave:
    """A save that the next one may go on counting from."""

    name: str
    step: int | None
    persisted: Persisted | None  # None where the policy has chosen no save yet
    at: float  # when this process made or loaded it, by the monotonic clock

    def is_repeated_by(self, name: str, step: int | None) -> bool:
        """Return whether a save makes this one again, as after a restart from it."""
        return step is not None and (name, step) == (self.name, self.step)

    def next(self, name: str, step: int | None, now: float) -> Persisted | None:
        """Return how far the counts are at the next save, if the policy doesn't choose that."""
        known = self.persisted
        if known is None:
            return None
        saves = known.saves + (not self.is_repeated_by(name, step))
        return Persisted(saves, round(known.seconds + max(0.0, now - self.at), 3), known.step)


def count_from(
    own: CountedSave | None, resumed: Sequence[CountedSave], step: int | None
) -> CountedSave | None:
    """Return the save that one of this step continues; None where the job counts anew.

    That is the one with the latest step up to this one: a job that has gone back to an older step
    counts from there, and one that has only looked at an older checkpoint doesn't. Where nobody
    told steps, it is the process's own last save, or else what it has loaded last.

    `own`: the last save of this process. `resumed`: what it has loaded since, in order.
    """
    known = [*resumed, *([own] if own is not None else [])]
    if step is None or not any(one.step is not None for one in known):
        return known[-1] if known else None
    before = [one for one in known if one.step is not None and one.step <= step]
    return max(before, key=lambda one: one.step or 0, default=own)


@value_class(frozen=True)
class Persist:
    """A policy that persists the first save, and each one far enough behind the last it chose.

    With several limits, the one that is reached first counts; with none, nothing is persisted.
    Counts go on across restarts, and saves that were persisted for other reasons don't move them.

    Attributes:
        saves: Persist after so many saves; 1 persists every save.
        seconds: Persist after so many seconds.
        steps: Persist after so many training steps.
    """

    saves: int | None = None
    seconds: float | None = None
    steps: int | None = None

    @property
    def is_never(self) -> bool:
        """Whether no save goes to storage."""
        return self == Persist()

    def wants(self, since: Since | None, step: int | None = None) -> bool:
        """Tell whether a save goes to storage.

        Args:
            since: How long ago the last chosen save was; None where there was none.
            step: Training step of the save, where it was told.

        Raises:
            ConfigError: The policy counts steps, and nobody told the step.
        """
        if self.steps is not None and step is None:
            raise ConfigError(
                f"persist=every_n_steps({self.steps}) counts training steps, and this save told "
                f"none: call writer.annotate_next_save(step=...) before it, or save through "
                f"CheckpointManager"
            )
        if self.is_never:
            return False
        if since is None:
            return True
        by_saves = self.saves is not None and since.saves >= self.saves
        by_seconds = self.seconds is not None and since.seconds >= self.seconds
        # A step that went back belongs to another stretch of training, whose first save goes to
        # storage.
        by_steps = self.steps is not None and (
            since.steps is None or not 0 <= since.steps < self.steps
        )
        return by_saves or by_seconds or by_steps

    def count(
        self, before: CountedSave | None, name: str, step: int | None, now: float
    ) -> tuple[bool, Persisted | None]:
        """Tell whether a save goes to storage, and how far the counts are at it.

        `before`: the save that it continues; None where there is none. `now`: the monotonic clock.
        A save that makes a chosen one again is chosen again. Raises ConfigError.
        """
        counts = None if before is None else before.next(name, step, now)
        since = None
        if counts is not None and counts.saves:
            is_told = step is not None and counts.step is not None
            steps = step - counts.step if is_told else None  # type: ignore[operator]
            since = Since(counts.saves, counts.seconds, steps)
        is_chosen = self.wants(since, step)
        return is_chosen, Persisted(step=step) if is_chosen else counts


def every_n_saves(n: int) -> Persist:
    """Persist the job's first save and every n-th after it, across restarts.

    Saves that failed or were skipped don't count; a save of a step and name that were saved last
    counts once.

    Args:
        n: At least 1; 1 persists every save.

    Raises:
        ConfigError: n is no whole number of at least 1.
    """
    return Persist(saves=_whole("every_n_saves", n, "saves"))


def every_n_steps(n: int) -> Persist:
    """Persist the job's first save, and each one at least n training steps behind the last chosen.

    Each save has to tell its step: `CheckpointManager` does, and
    `MemoryStorageWriter.annotate_next_save` can.

    Args:
        n: Training steps, at least 1.

    Raises:
        ConfigError: n is no whole number of at least 1.
    """
    return Persist(steps=_whole("every_n_steps", n, "steps"))


def every_seconds(seconds: float) -> Persist:
    """Persist the job's first save, and then the first after each `seconds` of running.

    The time between a run's last save and the next run isn't counted.

    Args:
        seconds: Above 0.

    Raises:
        ConfigError: seconds is no number above 0.
    """
    try:
        is_positive = seconds > 0 and not isinstance(seconds, bool)
    except TypeError:
        is_positive = False
    if not is_positive:
        raise ConfigError(f"every_seconds({seconds!r}): give a number of seconds above 0")
    return Persist(seconds=float(seconds))


def persist_policy(persist: bool | Persist) -> Persist:
    """Return the policy that the argument `persist` stands for.

    `persist`: True: every save; False: none; a policy is returned as it is. Raises ConfigError.
    """
    if isinstance(persist, Persist):
        return persist
    if isinstance(persist, bool):
        return Persist(saves=1) if persist else Persist()
    raise ConfigError(
        f"persist={persist!r}: give True, False, every_n_saves(n), "
        f"every_n_steps(n) or every_seconds(s)"
    )


def _whole(function: str, n: int, unit: str) -> int:
    if type(n) is not int or n < 1:
        raise ConfigError(f"{function}({n!r}): give a whole number of {unit}, at least 1")
    return n
