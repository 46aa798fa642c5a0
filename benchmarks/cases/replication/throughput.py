"""How fast checkpoints are copied to another node, beside plain gloo with the same bytes."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import dcp_mem
from benchmarks.harness.nodes.cluster import MEMORY
from benchmarks.harness.nodes.jobs import LINKS, PATIENCE, nodes, over
from benchmarks.harness.nodes.wire import Exchange, in_tmpfs, touched
from benchmarks.harness.repeated import Saves
from benchmarks.harness.samples import Sample, fastest, slowest_by_name
from benchmarks.harness.settings import MIB
from benchmarks.harness.states import Workload, trained
from benchmarks.harness.tables import RATE, RATIO, Figure, Part, Row, Section, attempt, named

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from benchmarks.harness.processes import Rank
    from benchmarks.harness.settings import Settings

TITLE = "Throughput of replication"
NODES = 2
KEEP = 1
WARM_UPS = 4
"""From then on slots are used again: the first slots get their pages while copies arrive."""
LIMIT = 0.85
GB = 1e9
DCP_MEM = "dcp_mem"
CHECKPOINTS = 2 * (KEEP + 2) + 2
"""Checkpoints that fit on a node, with what plain gloo sends and receives."""


@dataclass(frozen=True, slots=True)
class Spec:
    workload: Workload
    repeats: int


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds of one rank, by name.

    Attributes:
        wall: Time that passed.
        cpu: CPU time of the rank's process.
    """

    wall: Mapping[str, Sample]
    cpu: Mapping[str, Sample]


def run(settings: Settings) -> Section:
    huge = settings.huge
    workload = Workload((128 if settings.quick else 1024) * MIB, 64)
    each = workload.total_bytes // NODES // MIB
    title = f"{each} MiB from each of {NODES} nodes to the other, both at once"
    return Section(
        TITLE,
        [
            attempt(
                "throughput", title + over(link), partial(_part, settings, huge, workload, link)
            )
            for link in LINKS
        ],
    )


def _part(settings: Settings, huge: str, workload: Workload, link: str | None) -> Part:
    nbytes = workload.total_bytes // NODES
    with nodes(
        NODES, memory_bytes=CHECKPOINTS * nbytes, huge=huge, besides=3 * NODES * nbytes, link=link
    ) as found:
        by_rank = found.measure(_measure, Spec(workload, settings.repeats))
    wall = slowest_by_name([one.wall for one in by_rank])
    cpu = slowest_by_name([one.cpu for one in by_rank])
    measured = wall.pop(DCP_MEM)
    floor = fastest(wall.values())
    speed = floor.per(measured)
    row = Row(
        "bytes per second, from the start to the record; floor: plain gloo",
        floor=Figure.of(_rate(nbytes, floor), RATE),
        dcp_mem=Figure.of(_rate(nbytes, measured), RATE),
        ratio=Figure.of(speed, RATIO),
        target=f"≥ {LIMIT:.2f} × floor",
        met=speed.median >= LIMIT,
    )
    per_gb = ", ".join(f"{name} {sample.median / nbytes * GB:.2f}" for name, sample in cpu.items())
    cpu_note = (
        f"CPU-s of a node per GB that it sends, and GB that it receives: {per_gb}; "
        "dcp_mem's with the checksums of both ends"
    )
    return Part([row], [f"floors: {named(wall)}", cpu_note])


def _rate(nbytes: int, sample: Sample) -> Sample:
    return Sample(tuple(nbytes / value / GB for value in sample.values))


def _measure(rank: Rank, spec: Spec) -> Measured:
    state = trained(spec.workload, rank)
    nbytes, other = state.local_bytes, 1 - rank.rank
    slots = in_tmpfs(MEMORY / "outgoing", nbytes), in_tmpfs(MEMORY / "incoming", nbytes)
    in_slots = {f"{name} in tmpfs": act for name, act in Exchange(*slots, other).ways().items()}
    ways = {**Exchange(touched(nbytes), touched(nbytes), other).ways(), **in_slots}
    cpu: dict[str, list[float]] = {}
    with closing(
        Saves(
            state, memory=MEMORY / "dcp_mem", keep=KEEP, save=dcp_mem.save, changes=True, replicas=1
        )
    ) as saves:

        def replicate() -> float:
            saves.save()
            return _with_cpu(cpu.setdefault(DCP_MEM, []), partial(_until_recorded, saves))

        measures: dict[str, Callable[[], float]] = {
            name: partial(_with_cpu, cpu.setdefault(name, []), act) for name, act in ways.items()
        }
        wall = rank.in_turn(
            {**measures, DCP_MEM: replicate}, repeats=spec.repeats, warm_ups=WARM_UPS
        )
    return Measured(wall, {name: Sample(tuple(values[WARM_UPS:])) for name, values in cpu.items()})


def _with_cpu(spent: list[float], act: Callable[[], float]) -> float:
    start = time.process_time()
    took = act()
    spent.append(time.process_time() - start)
    return took


def _until_recorded(saves: Saves) -> float:
    """Seconds from the start of the copies, within the save, until they are recorded."""
    saves.writer.wait(saves.newest, "replicated", timeout=PATIENCE)
    return next(
        one.replication_seconds for one in saves.writer.status() if one.name == saves.newest
    )
