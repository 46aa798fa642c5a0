"""How fast checkpoints are copied to another node, beside plain gloo with the same bytes."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import dcp_mem
from benchmarks.ours import Saves
from benchmarks.replication.nodes import LINKS, PATIENCE, nodes, over
from benchmarks.replication.wire import Exchange, in_tmpfs, touched
from benchmarks.report import Part, Row, Section, attempt, factor, named
from benchmarks.samples import Sample, fastest, slowest_by_name
from benchmarks.settings import MIB
from benchmarks.states import Workload, trained
from tests.cluster import MEMORY

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from benchmarks.processes import Rank
    from benchmarks.settings import Settings

TITLE = "Throughput of replication"
NODES = 2
KEEP = 1
WARM_UPS = 4
"""By then slots are used again: those of the first ones get their pages while copies come."""
LIMIT = 0.85
GB = 1e9
CHECKPOINTS = 2 * (KEEP + 2) + 2
"""On a node, with what plain gloo sends and receives."""


@dataclass(frozen=True, slots=True)
class Spec:
    workload: Workload
    repeats: int


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one rank: seconds by what was done, and seconds of CPU of its process meanwhile."""

    wall: Mapping[str, Sample]
    cpu: Mapping[str, Sample]


def run(settings: Settings, huge: str) -> Section:
    workload = Workload((128 if settings.quick else 1024) * MIB, 64)
    title = f"{workload.total_bytes // NODES // MIB} MiB from each of {NODES} nodes to the other, both at once"
    return Section(
        TITLE,
        [attempt("throughput", title + over(link), partial(_part, settings, huge, workload, link)) for link in LINKS],
    )


def _part(settings: Settings, huge: str, workload: Workload, link: str | None) -> Part:
    nbytes = workload.total_bytes // NODES
    with nodes(NODES, memory_bytes=CHECKPOINTS * nbytes, huge=huge, besides=3 * NODES * nbytes, link=link) as found:
        by_rank = found.measure(_measure, Spec(workload, settings.repeats))
    wall = slowest_by_name([one.wall for one in by_rank])
    cpu = slowest_by_name([one.cpu for one in by_rank])
    ours = wall.pop("ours")
    floor = fastest(wall.values())
    speed = floor.per(ours)
    row = Row(
        "bytes per second, from the start to the record; floor: plain gloo",
        floor=f"{factor(_rate(nbytes, floor))} GB/s",
        ours=f"{factor(_rate(nbytes, ours))} GB/s",
        ratio=factor(speed),
        target=f"≥ {LIMIT:.2f} x floor",
        met=speed.median >= LIMIT,
    )
    per_gb = ", ".join(f"{name} {sample.median / nbytes * GB:.2f}" for name, sample in cpu.items())
    return Part(
        [row],
        [
            f"floors: {named(wall)}",
            f"CPU-s of a node per GB that it sends, and GB that it receives: {per_gb}; ours with the checksums of both",
        ],
    )


def _rate(nbytes: int, sample: Sample) -> Sample:
    return Sample(tuple(nbytes / value / GB for value in sample.values))


def _measure(rank: Rank, spec: Spec) -> Measured:
    state = trained(spec.workload, rank)
    nbytes, other = state.local_bytes, 1 - rank.rank
    slots = in_tmpfs(MEMORY / "outgoing", nbytes), in_tmpfs(MEMORY / "incoming", nbytes)
    in_slots = {f"{name} in tmpfs": act for name, act in Exchange(*slots, other).ways().items()}
    ways = {**Exchange(touched(nbytes), touched(nbytes), other).ways(), **in_slots}
    cpu: dict[str, list[float]] = {}
    with closing(Saves(state, memory=MEMORY / "dcp_mem", keep=KEEP, save=dcp_mem.save, replicas=1)) as saves:

        def replicate() -> float:
            saves.save()
            return _with_cpu(cpu.setdefault("ours", []), partial(_until_recorded, saves))

        measures: dict[str, Callable[[], float]] = {
            name: partial(_with_cpu, cpu.setdefault(name, []), act) for name, act in ways.items()
        }
        wall = rank.in_turn({**measures, "ours": replicate}, repeats=spec.repeats, warm_ups=WARM_UPS)
    return Measured(wall, {name: Sample(tuple(values[WARM_UPS:])) for name, values in cpu.items()})


def _with_cpu(spent: list[float], act: Callable[[], float]) -> float:
    start = time.process_time()
    took = act()
    spent.append(time.process_time() - start)
    return took


def _until_recorded(saves: Saves) -> float:
    """Seconds from the start of the copies, which the save has just seen to, until they are written down."""
    saves.writer.wait(saves.newest, "replicated", timeout=PATIENCE)
    return next(one.replication_seconds for one in saves.writer.status() if one.name == saves.newest)
