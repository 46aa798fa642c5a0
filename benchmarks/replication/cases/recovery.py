"""How long a load takes after a node was lost and an empty one has taken its place, beside moving the bytes plainly."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import dcp_mem
from benchmarks.clock import seconds
from benchmarks.ours import Loads, Saves
from benchmarks.replication.nodes import PATIENCE, nodes
from benchmarks.replication.profiles import profiled
from benchmarks.replication.wire import Exchange, touched
from benchmarks.report import Part, Section, Table, attempt, beside_floor, named
from benchmarks.samples import Sample, fastest, joined, slowest, slowest_by_name
from benchmarks.settings import MIB
from benchmarks.states import Workload, blank, check_trained, trained, wipe
from tests.cluster import MEMORY

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from benchmarks.processes import Rank
    from benchmarks.replication.profiles import Spent
    from benchmarks.settings import Settings

TITLE = "Recovery of a lost node from memory"
NODES = 2
KEEP = 1
LOST = 1
LIMIT = 1.30
LATER = 3
CHECKPOINTS = 2 * (KEEP + 1)
"""On a node."""
MOST_FUNCTIONS = 24
COPY = "copy of the rest"


@dataclass(frozen=True, slots=True)
class Spec:
    """repeats: of later loads in the same processes, which cost no new connections and mappings."""

    workload: Workload
    repeats: int = 0


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds on one rank: of the first load and of later ones, and of what nothing can beat, done once, and again."""

    first: Sample
    floors: Mapping[str, Sample]
    later: Sample
    later_floors: Mapping[str, Sample]


def run(settings: Settings, huge: str) -> Section:
    workload = Workload((256 if settings.quick else 1024) * MIB, 64)
    title = f"{workload.name} on {NODES} nodes, replicas=1, one of them replaced by an empty one"
    return Section(TITLE, [attempt("recovery", title, partial(_part, settings, huge, workload))])


def _part(settings: Settings, huge: str, workload: Workload) -> Part:
    nbytes = workload.total_bytes // NODES
    spec = Spec(workload, LATER)
    with nodes(NODES, memory_bytes=CHECKPOINTS * nbytes, huge=huge, besides=3 * NODES * nbytes) as found:
        found.measure(_save, spec)
        restarts = []
        for _ in range(settings.load_restarts):
            found.lose(LOST)
            restarts.append(found.measure(_load, spec))
        found.lose(LOST)
        profiles = found.measure(_load_profiled, spec)
    first = joined(slowest([one.first for one in ranks]) for ranks in restarts)
    floors = _joined([slowest_by_name([one.floors for one in ranks]) for ranks in restarts])
    later = joined(slowest([one.later for one in ranks]) for ranks in restarts)
    later_floors = _joined([slowest_by_name([one.later_floors for one in ranks]) for ranks in restarts])
    what = "dcp_mem.load, {}; floor: the bytes moved"
    rows = [
        beside_floor(what.format("the first of fresh processes"), _sum(floors), first, at_most=LIMIT),
        beside_floor(what.format("later ones"), _sum(later_floors), later),
    ]
    mib = nbytes // MIB
    notes = [
        f"floor: {mib} MiB through plain gloo, the faster way, and then a copy of {mib} MiB from memory to memory",
        f"floors of the first, done once: {named(floors)}",
        f"floors of the later: {named(later_floors)}",
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
    lines = [(function, *(_seconds(of_rank.get(function)) for of_rank in spent)) for function in longest]
    return Table(("function", *(f"rank {rank}: calls, ms in all, ms by itself" for rank in range(len(spent)))), lines)


def _seconds(spent: Spent | None) -> str:
    return "" if spent is None else f"{spent.calls}, {spent.whole * 1e3:.1f}, {spent.own * 1e3:.1f}"


def _save(rank: Rank, spec: Spec) -> None:
    state = trained(spec.workload, rank)
    with closing(Saves(state, memory=MEMORY / "dcp_mem", keep=KEEP, save=dcp_mem.save, replicas=1)) as saves:
        saves.save()
        saves.writer.wait(saves.newest, "replicated", timeout=PATIENCE)
        rank.barrier()


def _load(rank: Rank, spec: Spec) -> Measured:
    state = blank(spec.workload, rank)
    loads = Loads(state, MEMORY / "dcp_mem", dcp_mem.load)
    ways = _ways(rank, state.local_bytes)
    first = rank.together(loads.load)
    check_trained(state)
    floors = rank.in_turn(ways, repeats=1)
    wipe(state)
    later = rank.in_turn({"load": loads.load, **ways}, repeats=spec.repeats)
    check_trained(state)
    return Measured(Sample((first,)), floors, later.pop("load"), later)


def _load_profiled(rank: Rank, spec: Spec) -> list[Spent]:
    loads = Loads(blank(spec.workload, rank), MEMORY / "dcp_mem", dcp_mem.load)
    rank.barrier()
    return profiled(loads.load)


def _ways(rank: Rank, nbytes: int) -> Mapping[str, Callable[[], float]]:
    """What nothing can beat: a node's bytes sent to the other one, and as many copied."""
    is_lost = rank.rank == LOST
    here, there = touched(nbytes), touched(nbytes)
    exchange = Exchange(None, there, 1 - rank.rank) if is_lost else Exchange(here, None, 1 - rank.rank)
    return {**exchange.ways(), COPY: lambda: 0.0 if is_lost else seconds(lambda: there.copy_(here))}
