"""Decide which saves go to storage.

Decided from the saves, seconds and steps since the last save that went there. The rules:

1. The first save goes to storage, unless none ever does.
2. So does every save that has reached one of the policy's limits.
"""

from __future__ import annotations

from dataclasses import dataclass

from dcp_mem.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Since:
    """The time since a save last went to storage, in three units."""

    saves: int  # saves since then, the one in question included
    seconds: float
    # training steps since then; None where one of the two saves told no step
    steps: int | None = None


@dataclass(frozen=True, slots=True)
class Persist:
    """A policy that persists the first save, and each one far enough behind the last persisted.

    With several limits, the one that is reached first counts; with none, nothing is persisted.

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
            since: How long ago the last persisted save was; None where there was none.
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


def every_n_saves(n: int) -> Persist:
    """Persist the first save and every n-th after it.

    Args:
        n: At least 1; 1 persists every save.

    Raises:
        ConfigError: n is no whole number of at least 1.
    """
    return Persist(saves=_whole("every_n_saves", n, "saves"))


def every_n_steps(n: int) -> Persist:
    """Persist the first save, and each one at least n training steps behind the last persisted.

    Each save has to tell its step: `CheckpointManager` does, and
    `MemoryStorageWriter.annotate_next_save` can.

    Args:
        n: Training steps, at least 1.

    Raises:
        ConfigError: n is no whole number of at least 1.
    """
    return Persist(steps=_whole("every_n_steps", n, "steps"))


def every_seconds(seconds: float) -> Persist:
    """Persist the first save, and then the first after each `seconds`.

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
