"""Decide which checkpoints stay, in memory or on storage, by policies that compose.

Decided from what is known of each checkpoint: order, step, metrics and date. The rules:

1. `keep_last`, `keep_for`, `keep_every` and `keep_best` each choose some; `any_of` keeps what one
   of its policies chooses.
2. The newest checkpoint always stays, and so does what the caller still needs.
3. The rest leaves, oldest first.
4. Dates are compared among checkpoints of one writer only (the node that commits), never with a
   clock. A checkpoint is as old as the newest one of its writer is younger, and at least as old as
   each checkpoint that is newer in the job's order. The days of different writers are different
   days. So clocks that differ keep more, not less.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Literal, Protocol

from dcp_mem.common.value_class import value_class
from dcp_mem.errors import ConfigError
from dcp_mem.policy.facts import CheckpointFacts
from dcp_mem.policy.frequency import parse_seconds
from dcp_mem.policy.order import newest_first


class Retention(Protocol):
    """A policy that chooses the checkpoints that stay.

    It can be pickled: the agent applies the one for storage.
    """

    @property
    def most(self) -> int | None:
        """The largest number of checkpoints that stay; None for no limit."""

    def chosen(self, known: Sequence[CheckpointFacts]) -> frozenset[str]:
        """Return the keys of those that stay, of all that are known.

        Args:
            known: All checkpoints, in any order.
        """


@value_class
class KeepLast:
    """The policy of `keep_last`."""

    count: int

    @property
    def most(self) -> int | None:
        return self.count

    def chosen(self, known: Sequence[CheckpointFacts]) -> frozenset[str]:
        return frozenset(one.key for one in _newest_first(known)[: self.count])


@value_class
class KeepEvery:
    """The policy of `keep_every`."""

    steps: int

    @property
    def most(self) -> int | None:
        return None

    def chosen(self, known: Sequence[CheckpointFacts]) -> frozenset[str]:
        return frozenset(
            one.key for one in known if one.step is not None and one.step % self.steps == 0
        )


@value_class
class KeepFor:
    """The policy of `keep_for`."""

    seconds: float

    @property
    def most(self) -> int | None:
        return None

    def chosen(self, known: Sequence[CheckpointFacts]) -> frozenset[str]:
        age = 0.0
        now: dict[str, float] = {}  # by each writer's clock, when the newest checkpoint was saved
        young = []
        for one in _newest_first(known):
            age = max(age, now.get(one.writer, -math.inf) - one.created)
            now[one.writer] = max(now.get(one.writer, -math.inf), one.created + age)
            if age < self.seconds:
                young.append(one.key)
        return frozenset(young)


@value_class
class KeepOneIn:
    """The policy of `keep_every` with a time."""

    seconds: float

    @property
    def most(self) -> int | None:
        return None

    def chosen(self, known: Sequence[CheckpointFacts]) -> frozenset[str]:
        # The first of each day is the last that is set, and no later one takes its place.
        first = {(one.writer, one.created // self.seconds): one.key for one in _newest_first(known)}
        return frozenset(first.values())


@value_class
class KeepBest:
    """The policy of `keep_best`."""

    metric: str
    count: int
    sign: int  # 1 where small figures are good, -1 where large ones are

    @property
    def most(self) -> int | None:
        return self.count

    def chosen(self, known: Sequence[CheckpointFacts]) -> frozenset[str]:
        rated = [one for one in known if not math.isnan(one.metrics.get(self.metric, math.nan))]
        return frozenset(
            one.key
            for one in sorted(
                _newest_first(rated), key=lambda one: self.sign * one.metrics[self.metric]
            )[: self.count]
        )


@value_class
class AnyOf:
    """The policy of `any_of`."""

    policies: tuple[Retention, ...]

    @property
    def most(self) -> int | None:
        total = 0
        for policy in self.policies:
            if policy.most is None:
                return None
            total += policy.most
        return total

    def chosen(self, known: Sequence[CheckpointFacts]) -> frozenset[str]:
        return frozenset().union(*(policy.chosen(known) for policy in self.policies))


def keep_last(n: int) -> Retention:
    """Keep the newest n checkpoints.

    Args:
        n: At least 1.

    Raises:
        ConfigError: n is no whole number of at least 1.
    """
    return KeepLast(_count(f"keep_last({n!r})", n))


def keep_for(duration: float | str) -> Retention:
    """Keep the checkpoints that are younger than a duration, by the newest one's date.

    Dates are those that the committing node put into the checkpoints, and are compared with each
    other, not with a clock: a job that stands still loses nothing. Across a change of that node
    only the time that each of them saved counts.

    Args:
        duration: Seconds, or a text such as "24h", "30min", "7d" or "90s".

    Raises:
        ConfigError: It is no duration above 0.
    """
    return KeepFor(parse_seconds(duration, "keep_for"))


def keep_every(steps: int | str) -> Retention:
    """Keep the checkpoints whose step is a multiple of `steps`, or one in each period of time.

    Args:
        steps: At least 1; checkpoints without a step aren't kept. Or a text such as "1d", "12h" or
            "30min": the first checkpoint of each day stays (days begin at midnight UTC, by the
            clock of the node that commits; another node's days count by themselves).

    Raises:
        ConfigError: steps is no whole number of at least 1, and no duration.
    """
    if isinstance(steps, str):
        return KeepOneIn(parse_seconds(steps, "keep_every"))
    return KeepEvery(_count(f"keep_every({steps!r})", steps))


def keep_best(metric: str, n: int = 1, *, mode: Literal["min", "max"] = "min") -> Retention:
    """Keep the n checkpoints with the best figure; of equal ones the newer is better.

    Those without that figure, or with NaN, aren't kept.

    Args:
        metric: Name of the figure, as it is passed to `save`.
        n: How many are kept.
        mode: "min" where small figures are good (a loss), "max" where large ones are.

    Raises:
        ConfigError: An argument doesn't fit.
    """
    what = f"keep_best({metric!r}, {n!r}, mode={mode!r})"
    if type(metric) is not str or not metric:
        raise ConfigError(f"{what}: give the name of a metric that is passed to save")
    if mode not in ("min", "max"):
        raise ConfigError(f"{what}: choose mode='min' or 'max'")
    return KeepBest(metric, _count(what, n), 1 if mode == "min" else -1)


def any_of(*policies: Retention) -> Retention:
    """Keep what at least one of the policies keeps.

    Args:
        policies: At least one.

    Raises:
        ConfigError: There is no policy among the arguments, or something that is none.
    """
    if not policies:
        raise ConfigError("any_of(): give at least one policy, such as keep_last(2)")
    if isinstance(policies[0], (list, tuple)):
        raise ConfigError("any_of([…]): give the policies one by one, as any_of(first, second)")
    return AnyOf(tuple(retention(policy, "any_of(…)") for policy in policies))


def retention(given: object, argument: str) -> Retention:
    """Return the policy that an argument stands for: itself, or `keep_last(n)` for a number n.

    Raises ConfigError.
    """
    if isinstance(given, (KeepLast, KeepFor, KeepEvery, KeepOneIn, KeepBest, AnyOf)):
        return given
    if type(given) is int:
        return KeepLast(_count(f"{argument}={given!r}", given))
    raise ConfigError(
        f"{argument}={given!r}: give a number of checkpoints, keep_last(n), keep_for('24h'), "
        f"keep_every(steps or '1d'), keep_best(metric, n), or any_of several of them"
    )


def with_newest(policy: Retention) -> Retention:
    """Return the policy with the newest checkpoint added, so that `most` counts it as well.

    `policy`: returned as it is where it keeps the newest checkpoint already.
    """
    parts = policy.policies if isinstance(policy, AnyOf) else (policy,)
    return (
        policy
        if any(isinstance(part, KeepLast) for part in parts)
        else AnyOf((KeepLast(1), *parts))
    )


def leaving(
    policy: Retention, known: Sequence[CheckpointFacts], needed: Collection[str] = ()
) -> list[CheckpointFacts]:
    """Return what leaves, oldest first. What was rejected doesn't count, and is left alone."""
    known = [one for one in known if not one.rejected]
    newest = KeepLast(1).chosen(known)
    staying = policy.chosen(known) | newest | frozenset(needed)
    return [one for one in reversed(_newest_first(known)) if one.key not in staying]


def _newest_first(known: Sequence[CheckpointFacts]) -> list[CheckpointFacts]:
    return newest_first(known, lambda one: one.place)


def _count(what: str, n: object) -> int:
    if type(n) is not int or n < 1:
        raise ConfigError(f"{what}: give a whole number, at least 1")
    return n
