"""How long a load takes after a node was lost and replaced, beside moving the bytes plainly."""

from __future__ import annotations

import threading
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import dcp_mem
from benchmarks.harness.clock import seconds
from benchmarks.harness.nodes.cluster import MEMORY
from benchmarks.harness.nodes.jobs import LINKS, PATIENCE, nodes, over
from benchmarks.harness.nodes.profiles import profiled
from benchmarks.harness.nodes.wire import Exchange, touched
from benchmarks.harness.repeated import Loads, Saves
from benchmarks.harness.samples import Sample, fastest, joined, slowest, slowest_by_name
from benchmarks.harness.settings import MIB
from benchmarks.harness.states import Workload, blank, check_trained, trained
from benchmarks.harness.tables import Part, Section, Table, attempt, beside_floor, named

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from benchmarks.harness.nodes.profiles import Spent
    from benchmarks.harness.processes import Rank
    from benchmarks.harness.settings import Settings

TITLE = "Recovery of a lost node from memory"
NODES = 2
KEEP = 1
LOST = 1
LIMIT = 1.30
FLOORS = 3
"""How often the floors are measured, after each load."""
CHECKPOINTS = 2 * (KEEP + 1)
"""Checkpoints that fit on a node."""
MOST_FUNCTIONS = 24
COPY = "copy of the rest"


@dataclass(frozen=True, slots=True)
class Spec:
    workload: Workload


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds on one rank: of the load, and of the floors that are measured after it."""

    load: Sample
    floors: Mapping[str, Sample]


def run(settings: Settings) -> Section:
    huge = settings.huge
    workload = Workload((256 if settings.quick else 1024) * MIB, 64)
    title = f"{workload.name} on {NODES} nodes, replicas=1, one of them replaced by an empty one"
    return Section(
        TITLE,
        [
            attempt("recovery", title + over(link), partial(_part, settings, huge, workload, link))
            for link in LINKS
        ],
    )


def _part(settings: Settings, huge: str, workload: Workload, link: str | None) -> Part:
    nbytes = workload.total_bytes // NODES
    spec = Spec(workload)
    with nodes(
        NODES, memory_bytes=CHECKPOINTS * nbytes, huge=huge, besides=3 * NODES * nbytes, link=link
    ) as found:
        found.measure(_save, spec)
        restarts = []
        for _ in range(settings.load_restarts):
            found.lose(LOST)
            restarts.append(found.measure(_load, spec))
        found.lose(LOST)
        profiles = found.measure(_load_profiled, spec)
    loads = joined(slowest([one.load for one in ranks]) for ranks in restarts)
    floors = _joined([slowest_by_name([one.floors for one in ranks]) for ranks in restarts])
    what = "dcp_mem.load, the first of fresh processes; floor: the bytes moved"
    rows = [beside_floor(what, _sum(floors), loads, at_most=LIMIT)]
    mib = nbytes // MIB
    notes = [
        f"floor: {mib} MiB through plain gloo, the faster way, then a copy of {mib} MiB in memory",
        f"floors, measured once the lost copies have been made again: {named(floors)}",
        "above: one more first load, under cProfile; rank 0 sends, rank 1 has lost everything",
    ]
    return Part(rows, notes, tables=[_profile_table(profiles)])


def _joined(restarts: Sequence[Mapping[str, Sample]]) -> dict[str, Sample]:
    return {name: joined(one[name] for one in restarts) for name in restarts[0]}


def _sum(floors: Mapping[str, Sample]) -> Sample:
    return fastest(sample for name, sample in floors.items() if name != COPY) + floors[COPY]


def _profile_table(by_rank: Sequence[Sequence[Spent]]) -> Table:
    spent = [{one.function: one for one in of_rank} for of_rank in by_rank]
    longest = dict.fromkeys(one.function for of_rank in by_rank for one in of_rank[:MOST_FUNCTIONS])
    lines = [
        (function, *(_seconds(of_rank.get(function)) for of_rank in spent)) for function in longest
    ]
    return Table(
        (
            "function",
            *(f"rank {rank}: calls, ms in all, ms by itself" for rank in range(len(spent))),
        ),
        lines,
    )


def _seconds(spent: Spent | None) -> str:
    return "" if spent is None else f"{spent.calls}, {spent.whole * 1e3:.1f}, {spent.own * 1e3:.1f}"


def _save(rank: Rank, spec: Spec) -> None:
    state = trained(spec.workload, rank)
    with closing(
        Saves(state, memory=MEMORY / "dcp_mem", keep=KEEP, save=dcp_mem.save, replicas=1)
    ) as saves:
        saves.save()
        saves.writer.wait(saves.newest, "replicated", timeout=PATIENCE)
        rank.barrier()


def _load(rank: Rank, spec: Spec) -> Measured:
    state = blank(spec.workload, rank)
    loads = Loads(state, MEMORY / "dcp_mem", dcp_mem.load)
    ways = _ways(rank, state.local_bytes)
    load = rank.together(loads.load)
    check_trained(state)
    _wait_for_copies()
    rank.barrier()
    floors = rank.in_turn(ways, repeats=FLOORS)
    return Measured(
        Sample((load,)), {name: Sample((sample.median,)) for name, sample in floors.items()}
    )


def _wait_for_copies() -> None:
    """Wait for what the load does in the background."""
    for thread in threading.enumerate():
        if thread.name.startswith("dcp_mem"):
            thread.join(PATIENCE)


def _load_profiled(rank: Rank, spec: Spec) -> list[Spent]:
    loads = Loads(blank(spec.workload, rank), MEMORY / "dcp_mem", dcp_mem.load)
    rank.barrier()
    return profiled(loads.load)


def _ways(rank: Rank, nbytes: int) -> Mapping[str, Callable[[], float]]:
    """The floors: a node's bytes sent to the other node, and as many copied."""
    is_lost = rank.rank == LOST
    here, there = touched(nbytes), touched(nbytes)
    exchange = (
        Exchange(None, there, 1 - rank.rank) if is_lost else Exchange(here, None, 1 - rank.rank)
    )
    return {**exchange.ways(), COPY: lambda: 0.0 if is_lost else seconds(lambda: there.copy_(here))}
