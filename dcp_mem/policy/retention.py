"""Which checkpoints stay, in memory or on storage: policies that compose, and decide from plain values."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dcp_mem.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Candidate:
    """A checkpoint as a policy sees it. key: tells it from others. created: orders them. step: None where nobody has said it."""

    key: str
    created: float
    step: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


class Retention(Protocol):
    """Chooses checkpoints that stay. It can be pickled: storage's is applied by the agent."""

    @property
    def most(self) -> int | None:
        """How many stay at most; None where there is no telling."""

    def chosen(self, there: Sequence[Candidate]) -> frozenset[str]:
        """Keys of those that stay, of all that are there."""


@dataclass(frozen=True, slots=True)
class KeepLast:
    count: int

    @property
    def most(self) -> int | None:
        return self.count

    def chosen(self, there: Sequence[Candidate]) -> frozenset[str]:
        return frozenset(one.key for one in sorted(there, key=_age, reverse=True)[: self.count])


@dataclass(frozen=True, slots=True)
class KeepEvery:
    steps: int

    @property
    def most(self) -> int | None:
        return None

    def chosen(self, there: Sequence[Candidate]) -> frozenset[str]:
        return frozenset(one.key for one in there if one.step is not None and one.step % self.steps == 0)


@dataclass(frozen=True, slots=True)
class KeepBest:
    metric: str
    count: int
    sign: int
    """1: small figures are good; -1: large ones."""

    @property
    def most(self) -> int | None:
        return self.count

    def chosen(self, there: Sequence[Candidate]) -> frozenset[str]:
        rated = [one for one in there if not math.isnan(one.metrics.get(self.metric, math.nan))]
        newest_first = sorted(rated, key=_age, reverse=True)
        return frozenset(
            one.key for one in sorted(newest_first, key=lambda one: self.sign * one.metrics[self.metric])[: self.count]
        )


@dataclass(frozen=True, slots=True)
class AnyOf:
    policies: tuple[Retention, ...]

    @property
    def most(self) -> int | None:
        total = 0
        for policy in self.policies:
            if policy.most is None:
                return None
            total += policy.most
        return total

    def chosen(self, there: Sequence[Candidate]) -> frozenset[str]:
        return frozenset().union(*(policy.chosen(there) for policy in self.policies))


def keep_last(n: int) -> Retention:
    """Keep the newest n. Raises ConfigError unless n is at least 1."""
    return KeepLast(_count(f"keep_last({n!r})", n))


def keep_every(steps: int) -> Retention:
    """Keep those whose step is a multiple of this; those without a step aren't. Raises ConfigError unless it is at least 1."""
    return KeepEvery(_count(f"keep_every({steps!r})", steps))


def keep_best(metric: str, n: int = 1, *, mode: str = "min") -> Retention:
    """Keep the n with the best figure under that name; those without one, or with NaN, aren't. Of equal ones the newer is better.

    mode: "min" where small is good (a loss), "max" where large is. Raises ConfigError.
    """
    what = f"keep_best({metric!r}, {n!r}, mode={mode!r})"
    if type(metric) is not str or not metric:
        raise ConfigError(f"{what}: give the name of a metric that is passed to save")
    if mode not in ("min", "max"):
        raise ConfigError(f"{what}: choose mode='min' or 'max'")
    return KeepBest(metric, _count(what, n), 1 if mode == "min" else -1)


def any_of(*policies: Retention) -> Retention:
    """Keep what at least one of the policies keeps. Raises ConfigError where there is none."""
    if not policies:
        raise ConfigError("any_of(): give at least one policy, such as keep_last(2)")
    return AnyOf(tuple(retention(policy, "any_of(…)") for policy in policies))


def retention(given: object, argument: str) -> Retention:
    """The policy that an argument stands for; a number n for keep_last(n). Raises ConfigError."""
    if isinstance(given, (KeepLast, KeepEvery, KeepBest, AnyOf)):
        return given
    if type(given) is int:
        return KeepLast(_count(f"{argument}={given!r}", given))
    raise ConfigError(
        f"{argument}={given!r}: give a number of checkpoints, keep_last(n), keep_every(steps), keep_best(metric, n), or any_of "
        f"several of them"
    )


def with_newest(policy: Retention) -> Retention:
    """The policy with the newest checkpoint among what it keeps, so that `most` counts it as well."""
    parts = policy.policies if isinstance(policy, AnyOf) else (policy,)
    return policy if any(isinstance(part, KeepLast) for part in parts) else AnyOf((KeepLast(1), *parts))


def leaving(policy: Retention, there: Sequence[Candidate], needed: Collection[str] = ()) -> list[Candidate]:
    """What goes, oldest first. The newest one never does, nor do those that are needed."""
    newest = KeepLast(1).chosen(there)
    staying = policy.chosen(there) | newest | frozenset(needed)
    return sorted((one for one in there if one.key not in staying), key=_age)


def _age(one: Candidate) -> tuple[float, str]:
    return one.created, one.key


def _count(what: str, n: object) -> int:
    if type(n) is not int or n < 1:
        raise ConfigError(f"{what}: give a whole number, at least 1")
    return n
