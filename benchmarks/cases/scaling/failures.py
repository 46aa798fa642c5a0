"""A replay of published failure rates: how much of a job's time is training.

Makes the tables of docs/failures.md. What a save, a copy, a flush and a load take is measured by
other cases, or computed from that by `scaling.model`; rates of failures are published; the rest is
assumed, and stands below under its name.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import Enum
from math import floor, gamma
from typing import TYPE_CHECKING

from benchmarks.cases.scaling import model
from benchmarks.harness.tables import Part, Section, Table
from dcp_mem.policy.frequency import advice

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.harness.settings import Settings

HOUR, DAY = 3600.0, 86400.0
_2_GIB = 2**31 / 1e9

# Measured: seconds per GB of a rank (benchmarks/RESULTS.md; two EPYC cores).
SAVE = 0.151 / _2_GIB
STAGING = 0.176 / _2_GIB
"""dcp.async_save with torch's stager kept."""
RESTORE = 0.199 / _2_GIB
"""A load from the node's own memory."""

# Published.
LOST_NODES = 0.78
"""Llama 3: share of interruptions by confirmed or suspected hardware faults."""

# Assumed.
LOST_PAIRS = 0.01
"""Share of failures that take a node together with the node that has its copies."""
STEP = 6.0
"""Seconds of a training step: nothing saves more often."""
RESTARTS = (0.0, 60.0, 300.0, 900.0)
"""Seconds from a failure until the ranks load, the same for all: detection, scheduling, NCCL."""
STORAGE = {"fast": 2e12 / 2048, "slow": 2e11 / 2048}
"""Bytes per second of a node. Fast: what Llama 3's storage sustained, 2 TB/s, by 2,048 nodes."""
PLAIN_INTERVAL = 1800.0
DAYS, REPLAYS, SEED = 54, 20, 3


class Kind(Enum):
    """What a failure takes with it."""

    PROCESS = "memory stays"
    NODE = "one node's memory"
    PAIR = "a node and its copies"


@dataclass(frozen=True, slots=True)
class Failure:
    """A failure, in seconds after the start of the job."""

    at: float
    kind: Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """Checkpoints in one place, which some failures leave.

    Attributes:
        interval: Seconds of training between two of them.
        lag: Seconds from the end of a save until a load could use it.
    """

    interval: float
    lag: float
    load: dict[Kind, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """A way to save.

    Attributes:
        blocks: Seconds that training waits for each save of the first tier.
        tiers: By age: the first that a failure leaves is loaded.
    """

    name: str
    blocks: float
    tiers: tuple[Tier, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Where the seconds of a job went."""

    useful: float = 0.0
    saving: float = 0.0
    rework: float = 0.0
    recovery: float = 0.0

    @property
    def total(self) -> float:
        return self.useful + self.saving + self.rework + self.recovery

    @property
    def ratio(self) -> float:
        """Effective training time ratio: useful seconds of all seconds."""
        return self.useful / self.total

    def __add__(self, other: Spent) -> Spent:
        return Spent(
            useful=self.useful + other.useful,
            saving=self.saving + other.saving,
            rework=self.rework + other.rework,
            recovery=self.recovery + other.recovery,
        )


@dataclass(frozen=True, slots=True)
class Rate:
    """Published failures: docs/failures.md has the sources."""

    name: str
    cluster: model.Cluster
    mtbf: float


_1K, _16K = model.Cluster(1024, 70e9), model.Cluster(16384, 405e9)
RATES = (
    Rate("Llama 3, 16,384 GPUs", _16K, 54 * DAY / 419),
    Rate("Meta's research clusters, 16,384 GPUs", _16K, 1.8 * HOUR),
    Rate("Meta's research clusters, 1,024 GPUs", _1K, 7.9 * HOUR),
    Rate("OPT-175B, 1,024 GPUs", _1K, 60 * DAY / 105),
)


def replay(
    failures: Sequence[Failure], strategy: Strategy, seconds: float, restart: float
) -> Spent:
    """Return what a job of so many seconds spends on what, with these failures in their order.

    A failure before training has gone on begins the recovery anew. A tier's checkpoint counts from
    its lag on; a job that has none since it went on loads the one that it had loaded.
    """
    spent, resumed = Spent(), 0.0
    for failure in failures:
        if failure.at >= seconds:
            break
        recovery = restart + _tier(strategy, failure.kind).load[failure.kind]
        if failure.at < resumed:
            spent += Spent(recovery=failure.at - resumed)
        else:
            spent += _lost(strategy, failure, failure.at - resumed)
        spent += Spent(recovery=recovery)
        resumed = failure.at + recovery
    if resumed > seconds:
        return spent + Spent(recovery=seconds - resumed)
    return spent + _trained(strategy, seconds - resumed)


def _trained(strategy: Strategy, seconds: float) -> Spent:
    """What seconds without a failure are spent on."""
    cycle = strategy.tiers[0].interval + strategy.blocks
    saves, rest = divmod(seconds, cycle)
    begun = max(0.0, rest - strategy.tiers[0].interval)
    saving = saves * strategy.blocks + begun
    return Spent(useful=seconds - saving, saving=saving)


def _lost(strategy: Strategy, failure: Failure, ran: float) -> Spent:
    """What the seconds since the last recovery were spent on, once a failure has ended them."""
    tier = _tier(strategy, failure.kind)
    cycle = strategy.tiers[0].interval + strategy.blocks
    period = cycle * max(1, round(tier.interval / strategy.tiers[0].interval))
    kept = max(0, floor((ran - tier.lag) / period)) * period
    return _trained(strategy, kept) + Spent(rework=ran - kept)


def _tier(strategy: Strategy, kind: Kind) -> Tier:
    return next(tier for tier in strategy.tiers if kind in tier.load)


def drawn(mtbf: float, seconds: float, seed: int, *, shape: float = 1.0) -> list[Failure]:
    """Return failures with these mean seconds between them, by a Weibull distribution.

    Below a shape of 1 they come in bursts; at 1 they are independent of each other.
    """
    chance = random.Random(seed)
    scale = mtbf / gamma(1 + 1 / shape)
    at, failures = 0.0, []
    while (at := at + chance.weibullvariate(scale, shape)) < seconds:
        draw = chance.random()
        lost = Kind.NODE if draw < LOST_NODES else Kind.PROCESS
        failures.append(Failure(at, Kind.PAIR if draw < LOST_PAIRS else lost))
    return failures


# -- strategies ------------------------------------------------------------------------------------


def strategies(cluster: model.Cluster, mtbf: float, storage: float) -> tuple[Strategy, ...]:
    """Return ways to save, from the slowest to ours.

    Args:
        storage: Bytes per second of a node.
    """
    flush = cluster.of_node / storage
    from_storage = dict.fromkeys(Kind, flush)
    staging = cluster.of_rank / 1e9 * STAGING

    def plain(name: str, interval: float) -> Strategy:
        tier = Tier(interval=interval, lag=0.0, load=from_storage)
        return Strategy(name=name, blocks=flush, tiers=(tier,))

    def behind(name: str, interval: float) -> Strategy:
        tier = Tier(interval=max(interval, flush), lag=flush, load=from_storage)
        return Strategy(name=name, blocks=staging, tiers=(tier,))

    return (
        plain("dcp.save, 30 min", PLAIN_INTERVAL),
        plain("dcp.save, best", best(flush, mtbf)),
        behind("dcp.async_save, 30 min", PLAIN_INTERVAL),
        behind("dcp.async_save, best", best(staging, mtbf)),
        ours(cluster, mtbf, storage),
    )


def best(blocks: float, mtbf: float) -> float:
    """Return Daly's interval, of a step at least."""
    return max(STEP, advice(blocks, mtbf).interval_seconds)


def ours(cluster: model.Cluster, mtbf: float, storage: float) -> Strategy:
    """dcp_mem with replicas=1: memory as often as is best, storage as often as it can."""
    ranks, of_rank = cluster.gpus, cluster.of_rank / 1e9
    blocks = of_rank * SAVE + model.SAVING_PER_RANK * ranks + 3 * model.COPIES_OF_A_SAVE[ranks]
    replication = of_rank * model.REPLICATION / 2
    begin = model.ELECTING[ranks] + model.OPENING[ranks] + model.PLANNING[ranks]
    flush = cluster.of_node / storage
    interval = max(best(blocks, mtbf), replication)
    memory = Tier(
        interval=interval,
        lag=replication,
        load={
            Kind.PROCESS: begin + of_rank * RESTORE,
            Kind.NODE: begin + of_rank * model.LOAD + model.PASSING_ON[ranks],
        },
    )
    on_storage = Tier(interval=max(interval, flush), lag=flush, load={Kind.PAIR: begin + flush})
    return Strategy(name="dcp_mem", blocks=blocks, tiers=(memory, on_storage))


# -- tables ----------------------------------------------------------------------------------------


def run(_settings: Settings) -> Section:
    return Section(
        "Published failures, replayed",
        [
            Part([], title="Effective training time, restarts not counted", tables=[_ratios(1.0)]),
            Part([], title="The same, failures in bursts", tables=[_ratios(0.7)]),
            Part([], title="With restarts, at Llama 3's rate", tables=[_restarts()]),
            Part([], title="What was put in", tables=[_inputs()]),
        ],
    )


def spent(rate: Rate, strategy: Strategy, restart: float = 0.0, shape: float = 1.0) -> Spent:
    """Return what jobs of 54 days spend with a rate of failures, over all replays."""
    seconds = DAYS * DAY
    total = Spent()
    for number in range(REPLAYS):
        failures = drawn(rate.mtbf, seconds, SEED + number, shape=shape)
        total += replay(failures, strategy, seconds, restart)
    return total


def _ratios(shape: float) -> Table:
    lines = []
    for rate in RATES:
        for storage, speed in STORAGE.items():
            ways = strategies(rate.cluster, rate.mtbf, speed)
            figures = [_percent(spent(rate, way, shape=shape).ratio) for way in ways]
            lines.append([rate.name, storage, *figures])
    return Table(["failures of", "storage", *_names()], lines)


def _restarts() -> Table:
    rate, lines = RATES[0], []
    for restart in RESTARTS:
        for storage, speed in STORAGE.items():
            ways = strategies(rate.cluster, rate.mtbf, speed)
            figures = [_percent(spent(rate, way, restart).ratio) for way in ways]
            lines.append([f"{restart / 60:.0f} min", storage, *figures])
    return Table(["restart", "storage", *_names()], lines)


def _inputs() -> Table:
    lines = []
    for rate in (RATES[0], RATES[2]):
        for storage, speed in STORAGE.items():
            for way in strategies(rate.cluster, rate.mtbf, speed):
                first, last = way.tiers[0], way.tiers[-1]
                lines.append(
                    [
                        f"{rate.cluster.name}, {storage}",
                        way.name,
                        f"{way.blocks:.3f} s",
                        f"{first.interval:.0f} s",
                        f"{first.lag:.2f} s",
                        f"{min(first.load.values()):.2f} s, {last.load[Kind.PAIR]:.2f} s",
                    ]
                )
    columns = ["job, storage", "way", "blocks", "every", "usable after", "load: best, worst"]
    return Table(columns, lines)


def _names() -> list[str]:
    return [way.name for way in strategies(_16K, HOUR, 1e9)]


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"
