"""Routes side by side, and verdicts on dcp_mem's."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from benchmarks.harness import tables
from benchmarks.harness.processes import MeasurementFailed, in_fresh_processes
from benchmarks.harness.samples import Sample
from benchmarks.harness.storage.cost import Cost, Spec, measure
from benchmarks.harness.tables import (
    AMOUNT,
    BYTES,
    CPU_PER_GB,
    RATE,
    UNIT_IN_COLUMN,
    Cell,
    Figure,
    Row,
    Table,
    size,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from benchmarks.harness.storage.cost import Route

TIMEOUT = 150.0
COLUMNS = (
    "route",
    CPU_PER_GB,
    "× floor",
    "× raw SDK",
    RATE,
    "extra RssAnon",
    "extra RSS in all",
)


@dataclass(frozen=True, slots=True)
class Found:
    """What each route costs, by its name.

    Attributes:
        missing: Why a route was not measured.
        failed: Why a route's measurement failed.
    """

    costs: Mapping[str, Cost]
    missing: Mapping[str, str]
    failed: Mapping[str, str]

    def table(self, routes: Sequence[Route], floor: Route, sdk: Route) -> Table:
        lines = [
            self._line(route, self.costs.get(floor.name), self.costs.get(sdk.name))
            for route in routes
        ]
        return Table(COLUMNS, lines)

    def failures(self) -> list[Row]:
        return [
            Row(name, dcp_mem=f"failed: {why}", met=False, failed=True)
            for name, why in self.failed.items()
        ]

    def _line(self, route: Route, floor: Cost | None, sdk: Cost | None) -> tuple[Cell, ...]:
        cost = self.costs.get(route.name)
        if cost is None:
            why = self.missing.get(route.name) or f"failed: {self.failed[route.name]}"
            return (route.name, why, *([""] * (len(COLUMNS) - 2)))
        return (
            route.name,
            Figure.of(cost.cpu, UNIT_IN_COLUMN),
            _times(cost, floor),
            _times(cost, sdk),
            Figure.of(cost.rate, UNIT_IN_COLUMN),
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


def beside_floor(what: str, floor: Cost, measured: Cost, at_most: float) -> Row:
    """Return the CPU of dcp_mem's route beside that of raw sockets."""
    return tables.beside_floor(
        what, floor.cpu, measured.cpu, at_most=at_most, unit=CPU_PER_GB, in_turn=False
    )


def beside_peer(what: str, measured: Cost, peer: Cost, at_least: float) -> Row:
    """Return the CPU of dcp_mem's route beside that of a peer's."""
    return tables.beside_peer(
        what, measured.cpu, peer.cpu, at_least=at_least, unit=CPU_PER_GB, words=AMOUNT
    )


def within_cpu(what: str, measured: Cost, limit: float) -> Row:
    return tables.within(what, measured.cpu, limit, CPU_PER_GB)


def within_memory(what: str, measured: Cost, limit: int) -> Row:
    return tables.within(what, Sample((measured.anonymous,)), limit, BYTES)


def _times(cost: Cost, other: Cost | None) -> str:
    return "" if other is None else f"{cost.cpu.median / other.cpu.median:.2f}"
