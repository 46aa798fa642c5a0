"""What the first saves of a process cost, beside copies into new and into touched memory."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.harness import torch_peers
from benchmarks.harness.clock import seconds
from benchmarks.harness.floors import first_touch_seconds, touch_memory, warm_mapping, ways_to_copy
from benchmarks.harness.processes import in_fresh_processes
from benchmarks.harness.repeated import Saves
from benchmarks.harness.samples import Sample, fastest, joined, slowest, slowest_by_name
from benchmarks.harness.scratch import huge_tmpfs, need, scratch
from benchmarks.harness.settings import GIB
from benchmarks.harness.states import Workload, trained
from benchmarks.harness.tables import (
    Part,
    Row,
    Section,
    attempt,
    beside_floor,
    beside_peer,
    duration,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from benchmarks.harness.processes import Rank
    from benchmarks.harness.settings import Settings

TITLE = "First saves of a process"
WORKLOAD = Workload(1 * GIB, 64)
SAVES = 4
KEEP = 2
DCP_MEM = "dcp_mem"
TMPFS_TIMES = KEEP + 4
"""Times the state: slots, one to spare, and two floors."""


@dataclass(frozen=True, slots=True)
class Spec:
    directory: Path
    prepare: bool
    floor_first: bool


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds.

    Attributes:
        saves: Of saves 1, 2, 3, …
        first_touch: Of a copy into new memory, by the way to copy; once per process.
        warm: Of copies into touched memory, by the way to copy; in turn with the saves.
        prepare: Of `prepare()`.
    """

    saves: Sample
    first_touch: Mapping[str, Sample]
    warm: Mapping[str, Sample]
    prepare: float


def run(settings: Settings) -> Section:
    parts = []
    for ranks in (1,) if settings.quick else (1, 2):
        name = WORKLOAD.on(ranks)
        huge = f"{name}, on a tmpfs mounted with huge=within_size"
        parts.append(attempt("first", name, partial(_part, settings, ranks)))
        parts.append(attempt("first", huge, partial(_huge_part, settings, ranks)))
    return Section(TITLE, parts)


def _part(settings: Settings, ranks: int) -> Part:
    need(settings.tmpfs, WORKLOAD.total_bytes * (TMPFS_TIMES + 1))
    with scratch(settings.tmpfs) as directory:
        cold, prepared, peer = [], [], []
        for again in range(settings.restarts):
            fresh = partial(_fresh, directory, ranks, floor_first=again % 2 == 0)
            cold.append(fresh(prepare=False))
            prepared.append(fresh(prepare=True))
            peer.append(slowest(in_fresh_processes(_measure_torch, directory, ranks=ranks)))
    async_first = _column(peer, 0)
    after_prepare = "save 1 after prepare(); peer: dcp.async_save's first"
    rows = [
        *_cold_rows("", cold, async_first),
        *_warm_rows(" after prepare()", prepared, at_most=1.2),
        beside_peer(after_prepare, _nth(prepared, 0), async_first, at_least=1),
    ]
    took = Sample(tuple(m.prepare for m in prepared))
    later = ", ".join(duration(_column(peer, n)) for n in range(1, SAVES))
    return Part(
        rows,
        [
            f"prepare() took, in the background, {duration(took)}",
            f"dcp.async_save's later saves blocked for {later}",
        ],
    )


def _huge_part(settings: Settings, ranks: int) -> Part:
    need(settings.tmpfs, WORKLOAD.total_bytes * (TMPFS_TIMES + 1))
    with huge_tmpfs(WORKLOAD.total_bytes * TMPFS_TIMES) as directory:
        fresh = partial(_fresh, directory, ranks, prepare=False)
        restarts = [fresh(floor_first=again % 2 == 0) for again in range(settings.restarts)]
    # A virtual machine may pay for the memory itself: so does the first touch beside it.
    touch = _best([m.first_touch for m in restarts], 0)
    first_touch = beside_floor("save 1; floor: first touch", touch, _nth(restarts, 0))
    return Part([*_warm_rows("", restarts, at_most=2.0), first_touch])


def _fresh(directory: Path, ranks: int, *, prepare: bool, floor_first: bool) -> Measured:
    with scratch(directory) as inner:
        by_rank = in_fresh_processes(_measure, Spec(inner, prepare, floor_first), ranks=ranks)
    return Measured(
        saves=slowest([m.saves for m in by_rank]),
        first_touch=slowest_by_name([m.first_touch for m in by_rank]),
        warm=slowest_by_name([m.warm for m in by_rank]),
        prepare=max(m.prepare for m in by_rank),
    )


def _measure(rank: Rank, spec: Spec) -> Measured:
    state = trained(WORKLOAD, rank)
    touch_memory(spec.directory / f"touch-{rank.rank}", TMPFS_TIMES * state.local_bytes)
    with (
        warm_mapping(spec.directory / f"floor-{rank.rank}", state.local) as mapping,
        ways_to_copy(rank.threads, state.local) as ways,
        closing(Saves(state, memory=spec.directory / "memory", keep=KEEP)) as saves,
    ):
        prepare = _prepare(saves) if spec.prepare else 0.0
        path = spec.directory / f"touched-{rank.rank}"
        touches: dict[str, Callable[[], float]] = {
            way: partial(first_touch_seconds, path, state.local, copy) for way, copy in ways.items()
        }
        measures: dict[str, Callable[[], float]] = {
            way: partial(seconds, partial(mapping.fill, copy)) for way, copy in ways.items()
        }
        measures[DCP_MEM] = saves.save
        # What comes first gets free pages as the last process left them: take turns.
        first_touch = rank.in_turn(touches, repeats=1) if spec.floor_first else {}
        first = rank.in_turn(measures, repeats=1)
        first_touch = first_touch or rank.in_turn(touches, repeats=1)
        later = rank.in_turn(measures, repeats=SAVES - 1)
        samples = {name: joined([first[name], later[name]]) for name in measures}
        return Measured(samples.pop(DCP_MEM), first_touch, samples, prepare)


def _prepare(saves: Saves) -> float:
    return seconds(lambda: saves.writer.prepare(saves.state.tree).wait())


def _measure_torch(rank: Rank, directory: Path) -> Sample:
    state = trained(WORKLOAD, rank)
    touch_memory(directory / f"touch-{rank.rank}", TMPFS_TIMES * state.local_bytes)
    return torch_peers.async_save_seconds(rank, state, directory / "torch", SAVES)


def _cold_rows(when: str, cold: Sequence[Measured], async_first: Sample) -> list[Row]:
    touch = _best([m.first_touch for m in cold], 0)
    first, peer = _nth(cold, 0), f"save 1{when}; peer: dcp.async_save's first"
    return [
        beside_floor(f"save 1{when}; floor: first touch", touch, first, at_most=1.2),
        beside_peer(peer, first, async_first, at_least=1),
        *_later_rows(when, cold),
    ]


def _warm_rows(when: str, restarts: Sequence[Measured], *, at_most: float) -> list[Row]:
    warm = _best([m.warm for m in restarts], 0)
    what = f"save 1{when}; floor: warm copy"
    first = beside_floor(what, warm, _nth(restarts, 0), at_most=at_most)
    return [first, *_later_rows(when, restarts)]


def _later_rows(when: str, restarts: Sequence[Measured]) -> Iterator[Row]:
    for n in range(1, SAVES):
        warm = _best([m.warm for m in restarts], n)
        yield beside_floor(f"save {n + 1}{when}; floor: warm copy", warm, _nth(restarts, n))


def _best(floors: Sequence[Mapping[str, Sample]], n: int) -> Sample:
    """Return the n-th run of the fastest way to copy."""
    return fastest(_column([by_way[way] for by_way in floors], n) for way in floors[0])


def _nth(restarts: Sequence[Measured], n: int) -> Sample:
    return _column([m.saves for m in restarts], n)


def _column(samples: Sequence[Sample], n: int) -> Sample:
    return Sample(tuple(sample.values[n] for sample in samples))
