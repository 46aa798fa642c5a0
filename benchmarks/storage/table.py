"""Routes side by side, and what is said about ours."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from benchmarks.processes import MeasurementFailed, in_fresh_processes
from benchmarks.report import Row, Table, factor, size
from benchmarks.samples import Sample
from benchmarks.storage.cost import Cost, Spec, measure

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from benchmarks.storage.cost import Route

TIMEOUT = 150.0
COLUMNS = ("route", "CPU-s/GB", "x floor", "x raw SDK", "GB/s", "extra RssAnon", "extra RSS in all")


@dataclass(frozen=True, slots=True)
class Found:
    """What each route costs; or why nothing is known of it."""

    costs: Mapping[str, Cost]
    missing: Mapping[str, str]
    failed: Mapping[str, str]

    def table(self, routes: Sequence[Route], floor: Route, sdk: Route) -> Table:
        lines = [self._line(route, self.costs.get(floor.name), self.costs.get(sdk.name)) for route in routes]
        return Table(COLUMNS, lines)

    def failures(self) -> list[Row]:
        return [Row(name, ours=f"failed: {why}", met=False, failed=True) for name, why in self.failed.items()]

    def _line(self, route: Route, floor: Cost | None, sdk: Cost | None) -> tuple[str, ...]:
        cost = self.costs.get(route.name)
        if cost is None:
            why = self.missing.get(route.name) or f"failed: {self.failed[route.name]}"
            return (route.name, why, *([""] * (len(COLUMNS) - 2)))
        return (
            route.name,
            factor(cost.cpu),
            _times(cost, floor),
            _times(cost, sdk),
            factor(cost.rate),
            size(cost.anonymous),
            size(cost.total),
        )


def take(routes: Sequence[Route], spec: Callable[[Route], Spec]) -> Found:
    """Measure each route in a process of its own, one after the other."""
    costs, missing, failed = {}, {}, {}
    for route in routes:
        absent = [name for name in route.needs if find_spec(name) is None]
        if absent:
            missing[route.name] = f"not installed: {', '.join(absent)}"
            continue
        try:
            costs[route.name] = in_fresh_processes(measure, spec(route), timeout=TIMEOUT)[0]
        except MeasurementFailed as error:
            print(error)
            failed[route.name] = str(error).strip().splitlines()[-1]
    return Found(costs, missing, failed)


def beside_floor(what: str, floor: Cost, ours: Cost, at_most: float) -> Row:
    """CPU of ours beside raw sockets'."""
    ratio = ours.cpu.median / floor.cpu.median
    return Row(
        what,
        floor=cpu(floor.cpu),
        ours=cpu(ours.cpu),
        ratio=f"{ratio:.2f}",
        target=f"≤ {at_most:.2f} x floor",
        met=ratio <= at_most,
    )


def within_cpu(what: str, ours: Cost, limit: float) -> Row:
    return Row(what, ours=cpu(ours.cpu), target=f"≤ {limit:.2f} CPU-s/GB", met=ours.cpu.median <= limit)


def within_memory(what: str, ours: Cost, limit: int) -> Row:
    return Row(what, ours=size(ours.anonymous), target=f"≤ {size(limit)}", met=ours.anonymous <= limit)


def beside_peer(what: str, ours: Cost, peer: Cost, at_least: float) -> Row:
    times = peer.cpu.median / ours.cpu.median
    return Row(
        what,
        ours=cpu(ours.cpu),
        target=f"{at_least:g} x less than the peer",
        met=times >= at_least,
        peer=cpu(peer.cpu),
        versus_peer=f"{times:.1f} x less",
    )


def cpu(sample: Sample) -> str:
    return f"{factor(sample)} CPU-s/GB"


def _times(cost: Cost, other: Cost | None) -> str:
    return "" if other is None else f"{cost.cpu.median / other.cpu.median:.2f}"
