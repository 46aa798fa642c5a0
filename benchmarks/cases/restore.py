"""How long a restore from memory takes, beside bare reads and beside torch's reader."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from benchmarks import torch_own
from benchmarks.clock import datas, others, seconds, wholes
from benchmarks.floors import Preads, fresh_mapping_seconds, warm_mapping, ways_to_copy
from benchmarks.ours import Loads, Saves
from benchmarks.processes import in_fresh_processes
from benchmarks.report import Part, Row, Section, attempt, beside_floor, beside_peer, duration, named
from benchmarks.samples import Sample, fastest, slowest, slowest_by_name
from benchmarks.scratch import need, scratch
from benchmarks.settings import GIB
from benchmarks.states import Workload, blank, check_trained, trained, wipe

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from benchmarks.clock import Phases
    from benchmarks.processes import Rank
    from benchmarks.settings import Settings
    from benchmarks.states import State

TITLE = "Restore from memory, into existing tensors"
TIMES_FASTER_THAN_LOAD = 4.0
FRESH, WARM = "fresh mapping, ", "warm mapping, "


@dataclass(frozen=True, slots=True)
class Spec:
    workload: Workload
    directory: Path
    repeats: int
    peer_repeats: int

    @property
    def memory(self) -> Path:
        return self.directory / "memory"

    @property
    def torch_checkpoint(self) -> Path:
        return self.directory / "torch"


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds on one rank, or of the slowest; floors by what they read with."""

    first: float
    floors: Mapping[str, Sample]
    whole: Sample
    data: Sample
    other: Sample
    torch_whole: Sample
    torch_data: Sample


def run(settings: Settings) -> Section:
    large, many = Workload(2 * GIB, 64), Workload(1 * GIB, 20_000)
    plan = [(large, 1), (many, 1)] if settings.quick else [(large, 1), (large, 2), (many, 1)]
    parts = []
    for workload, ranks in plan:
        measure = partial(_part, settings, workload, ranks)
        parts.append(attempt("restore", workload.on(ranks), measure))
    return Section(TITLE, parts)


def _part(settings: Settings, workload: Workload, ranks: int) -> Part:
    # The state, our slots, torch's files, the floor's file.
    need(settings.tmpfs, workload.total_bytes * 6)
    with scratch(settings.tmpfs) as directory:
        spec = Spec(workload, directory, settings.repeats_of(workload), settings.peer_repeats)
        in_fresh_processes(_save, spec, ranks=ranks)
        by_rank = in_fresh_processes(_measure, spec, ranks=ranks)
    m = _slowest(by_rank)
    return Part(_rows_of_many(m) if workload.many else _rows_of_large(m), _notes(m))


def _save(rank: Rank, spec: Spec) -> None:
    """What the trainer did before it was restarted."""
    state = trained(spec.workload, rank)
    torch_own.save(state, spec.torch_checkpoint)
    with closing(Saves(state, memory=spec.memory, keep=1)) as saves:
        saves.save()


def _measure(rank: Rank, spec: Spec) -> Measured:
    state = blank(spec.workload, rank)
    loads = Loads(state, spec.memory)
    first = rank.together(partial(_checked_load, loads, state))
    floors, ours = _measure_ours(rank, spec, state, loads)
    rank.barrier()
    theirs = [torch_own.load(state, spec.torch_checkpoint) for _ in range(spec.peer_repeats)]
    return Measured(
        first=first,
        floors=floors,
        whole=wholes(ours),
        data=datas(ours),
        other=others(ours),
        torch_whole=wholes(theirs),
        torch_data=datas(theirs),
    )


def _measure_ours(rank: Rank, spec: Spec, state: State, loads: Loads) -> tuple[dict[str, Sample], Sequence[Phases]]:
    path, tensors = spec.directory / f"floor-{rank.rank}", state.local
    with (
        warm_mapping(path, tensors) as mapping,
        closing(Preads(path, tensors, rank.threads)) as preads,
        ways_to_copy(rank.threads, tensors) as ways,
    ):
        measures: dict[str, Callable[[], float]] = {"preadv": partial(seconds, preads.read)}
        for way, copy in ways.items():
            measures[FRESH + way] = partial(fresh_mapping_seconds, path, tensors, copy)
            measures[WARM + way] = partial(seconds, partial(mapping.empty_out, copy))
        measures["ours"] = partial(_checked_load, loads, state)
        samples = rank.in_turn(measures, repeats=spec.repeats, warm_ups=1)
    del samples["ours"]  # the history knows more
    return samples, loads.history[-spec.repeats :]


def _checked_load(loads: Loads, state: State) -> float:
    wipe(state)
    blocked = loads.load()
    check_trained(state)
    return blocked


def _slowest(ranks: list[Measured]) -> Measured:
    return Measured(
        first=max(m.first for m in ranks),
        floors=slowest_by_name([m.floors for m in ranks]),
        whole=slowest([m.whole for m in ranks]),
        data=slowest([m.data for m in ranks]),
        other=slowest([m.other for m in ranks]),
        torch_whole=slowest([m.torch_whole for m in ranks]),
        torch_data=slowest([m.torch_data for m in ranks]),
    )


def _rows_of_large(m: Measured) -> list[Row]:
    # A new reader has no mapping to begin with; the warm one shows what a kept mapping would give.
    cold = fastest(floor for name, floor in m.floors.items() if not name.startswith(WARM))
    warm = fastest(floor for name, floor in m.floors.items() if name.startswith(WARM))
    return [
        beside_floor("dcp.load; floor: preadv or fresh mapping", cold, m.whole, at_most=1.15),
        beside_floor("dcp.load; floor: warm mapping", warm, m.whole),
        beside_floor("read_data; floor: preadv or fresh mapping", cold, m.data),
        beside_peer("dcp.load; peer: FileSystemReader", m.whole, m.torch_whole),
    ]


def _rows_of_many(m: Measured) -> list[Row]:
    torch_load, least = "dcp.load; peer: FileSystemReader", TIMES_FASTER_THAN_LOAD
    return [
        beside_peer(torch_load, m.whole, m.torch_whole, at_least=least),
        beside_peer("read_data; peer: FileSystemReader's", m.data, m.torch_data),
        beside_floor("read_data; floor: the best of all", fastest(m.floors.values()), m.data),
    ]


def _notes(m: Measured) -> list[str]:
    planning = m.whole - m.data - m.other
    ours = (
        f"of our dcp.load: read_data {duration(m.data)}, our other methods {duration(m.other)}, "
        f"torch's own work {duration(planning)}; the first load of the process {m.first:.2f} s"
    )
    return [
        f"floors: {named(m.floors)}",
        ours,
        f"of torch's dcp.load: read_data {duration(m.torch_data)}",
    ]
