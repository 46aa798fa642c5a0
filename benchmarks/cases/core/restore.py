"""How long a restore from memory takes, beside bare reads and beside torch's reader."""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

import dcp_mem
from benchmarks.harness import torch_peers
from benchmarks.harness.clock import datas, others, prepared, seconds, wholes
from benchmarks.harness.floors import Preads, fresh_mapping_seconds, warm_mapping, ways_to_copy
from benchmarks.harness.processes import in_fresh_processes
from benchmarks.harness.repeated import Loads, Saves
from benchmarks.harness.samples import Sample, fastest, joined, slowest, slowest_by_name
from benchmarks.harness.scratch import need, scratch
from benchmarks.harness.settings import GIB
from benchmarks.harness.states import Workload, blank, check_trained, trained, wipe, wipe_tensors
from benchmarks.harness.tables import (
    Part,
    Row,
    Section,
    attempt,
    beside_floor,
    beside_peer,
    duration,
    named,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from benchmarks.harness.clock import Phases
    from benchmarks.harness.processes import Rank
    from benchmarks.harness.settings import Settings
    from benchmarks.harness.states import State

TITLE = "Restore from memory, into existing tensors"
TIMES_FASTER_THAN_LOAD = 4.0
OWN_LIMIT = 2.0
"""Times the copy, for dcp_mem.load: the first load of a process, and later ones."""
DCP_MEM = "dcp_mem"
FRESH, WARM = "fresh mapping, ", "warm mapping, "


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What a rank measures.

    Attributes:
        dcp_repeats: Of dcp.load with dcp_mem's reader.
        later: Whether the process loads again after its first load.
    """

    workload: Workload
    directory: Path
    repeats: int
    dcp_repeats: int
    peer_repeats: int
    later: bool = True

    @property
    def memory(self) -> Path:
        return self.directory / "memory"

    @property
    def torch_checkpoint(self) -> Path:
        return self.directory / "torch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Seconds on one rank, or of the slowest; floors by the way to read."""

    first: float
    floors: Mapping[str, Sample]
    whole: Sample
    data: Sample
    other: Sample
    torch_whole: Sample
    torch_data: Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """Seconds of dcp_mem.load, and of the floors that are measured in turn with it.

    Attributes:
        first: The first load of each process.
        first_floors: As many copies as tensors, beside first loads, by the way to copy.
        whole: Later loads of one process.
        floors: As many copies as tensors, beside later loads.
        floors_as_one: One copy of all bytes, beside later loads.
    """

    first: Sample
    first_floors: Mapping[str, Sample]
    whole: Sample
    floors: Mapping[str, Sample]
    floors_as_one: Mapping[str, Sample]


def run(settings: Settings) -> Section:
    large, many = Workload(2 * GIB, 64), Workload(1 * GIB, 20_000)
    plan = [(large, 1), (many, 1), (many, 2)]
    if not settings.quick:
        plan.insert(1, (large, 2))
    parts = []
    for workload, ranks in plan:
        measure = partial(_part, settings, workload, ranks)
        parts.append(attempt("restore", workload.on(ranks), measure))
    return Section(TITLE, parts)


def _part(settings: Settings, workload: Workload, ranks: int) -> Part:
    # The state, once more as one, the slots, torch's files, the floors' files.
    need(settings.tmpfs, workload.total_bytes * 8)
    with scratch(settings.tmpfs) as directory:
        repeats, peer_repeats = settings.repeats_of(workload), settings.peer_repeats
        # Torch plans the load of twenty thousand DTensors in half a minute, with any reader.
        is_slow = workload.many and ranks > 1
        spec = Spec(
            workload=workload,
            directory=directory,
            repeats=repeats,
            dcp_repeats=peer_repeats if is_slow else repeats,
            peer_repeats=peer_repeats,
        )
        in_fresh_processes(_save, spec, ranks=ranks)
        m = _slowest(in_fresh_processes(_measure, spec, ranks=ranks))
        first_only = replace(spec, later=False)
        own = _own_together(
            [
                _own_slowest(
                    in_fresh_processes(_measure_own, first_only if restart else spec, ranks=ranks)
                )
                for restart in range(settings.load_restarts)
            ]
        )
    rows = _rows_of_many(m, ranks) if workload.many else _rows_of_large(m)
    return Part([*_rows_of_own(m, own), *rows], [*_notes(m), *_notes_on_own(own)])


def _save(rank: Rank, spec: Spec) -> None:
    """What the trainer did before it was restarted."""
    state = trained(spec.workload, rank)
    torch_peers.save(state, spec.torch_checkpoint)
    with closing(Saves(state, memory=spec.memory, keep=1, save=dcp_mem.save)) as saves:
        saves.save()


def _measure(rank: Rank, spec: Spec) -> Measured:
    state = blank(spec.workload, rank)
    loads = Loads(state, spec.memory)
    first = rank.together(partial(_checked_load, loads, state))
    floors, through_dcp = _measure_through_dcp(rank, spec, state, loads)
    rank.barrier()
    peer = [torch_peers.load(state, spec.torch_checkpoint) for _ in range(spec.peer_repeats)]
    return Measured(
        first=first,
        floors=floors,
        whole=wholes(through_dcp),
        data=datas(through_dcp),
        other=others(through_dcp),
        torch_whole=wholes(peer),
        torch_data=datas(peer),
    )


def _measure_through_dcp(
    rank: Rank, spec: Spec, state: State, loads: Loads
) -> tuple[dict[str, Sample], Sequence[Phases]]:
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
        measures = _into_wiped(tensors, measures)
        measures[DCP_MEM] = partial(_checked_load, loads, state)
        samples = rank.in_turn(measures, repeats=spec.dcp_repeats, warm_ups=1)
    del samples[DCP_MEM]  # the history has its phases
    return samples, loads.history[-spec.dcp_repeats :]


def _measure_own(rank: Rank, spec: Spec) -> Own:
    state = blank(spec.workload, rank)
    loads = Loads(state, spec.memory, dcp_mem.load)
    first = rank.together(partial(_checked_load, loads, state))
    with ExitStack() as stack:
        floors, as_one = _copies(rank, spec, state, stack)
        # A new process has to map the memory that it copies from.
        fresh = {way: floor for way, floor in floors.items() if way.startswith(FRESH)}
        first_floors = rank.in_turn(fresh, repeats=1)
        none = Sample(())
        if not spec.later:
            return Own(
                first=Sample((first,)),
                first_floors=first_floors,
                whole=none,
                floors=dict.fromkeys(floors, none),
                floors_as_one={},
            )
        measures: dict[str, Callable[[], float]] = {
            **{f"tensors {way}": floor for way, floor in floors.items()},
            **{f"as one {way}": floor for way, floor in as_one.items()},
            DCP_MEM: partial(_checked_load, loads, state),
        }
        samples = rank.in_turn(measures, repeats=spec.repeats)
    return Own(
        first=Sample((first,)),
        first_floors=first_floors,
        whole=samples[DCP_MEM],
        floors={way: samples[f"tensors {way}"] for way in floors},
        floors_as_one={way: samples[f"as one {way}"] for way in as_one},
    )


def _copies(
    rank: Rank, spec: Spec, state: State, stack: ExitStack
) -> tuple[dict[str, Callable[[], float]], dict[str, Callable[[], float]]]:
    """Return copies out of a file in memory: of each tensor, and of all bytes as one."""
    path = spec.directory / f"floor-{rank.rank}"
    floors = _mapped_copies(rank, path, state.local, stack)
    if not spec.later:
        return floors, {}
    preads = stack.enter_context(closing(Preads(path, state.local, rank.threads)))
    floors |= _into_wiped(state.local, {"preadv": partial(seconds, preads.read)})
    path, whole = (
        spec.directory / f"floor-as-one-{rank.rank}",
        torch.cat([one.flatten() for one in state.local]),
    )
    return floors, _mapped_copies(rank, path, [whole], stack)


def _into_wiped(
    tensors: Sequence[torch.Tensor], floors: Mapping[str, Callable[[], float]]
) -> dict[str, Callable[[], float]]:
    """Return floors that begin as our loads do: just after `tensors` were made wrong."""
    wiped = partial(wipe_tensors, tensors)
    return {name: prepared(wiped, floor) for name, floor in floors.items()}


def _mapped_copies(
    rank: Rank, path: Path, tensors: Sequence[torch.Tensor], stack: ExitStack
) -> dict[str, Callable[[], float]]:
    mapping = stack.enter_context(warm_mapping(path, tensors))
    ways = stack.enter_context(ways_to_copy(rank.threads, tensors))
    floors: dict[str, Callable[[], float]] = {}
    for way, copy in ways.items():
        floors[FRESH + way] = partial(fresh_mapping_seconds, path, tensors, copy)
        floors[WARM + way] = partial(seconds, partial(mapping.empty_out, copy))
    return _into_wiped(tensors, floors)


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


def _own_slowest(ranks: Sequence[Own]) -> Own:
    return Own(
        first=slowest([m.first for m in ranks]),
        first_floors=slowest_by_name([m.first_floors for m in ranks]),
        whole=slowest([m.whole for m in ranks]),
        floors=slowest_by_name([m.floors for m in ranks]),
        floors_as_one=slowest_by_name([m.floors_as_one for m in ranks]),
    )


def _own_together(restarts: Sequence[Own]) -> Own:
    """Join the first loads of all processes; later loads are those of the first process."""
    ways = restarts[0].first_floors
    return replace(
        restarts[0],
        first=joined(m.first for m in restarts),
        first_floors={way: joined(m.first_floors[way] for m in restarts) for way in ways},
    )


def _rows_of_own(m: Measured, own: Own) -> list[Row]:
    def best(floors: Mapping[str, Sample], kind: str) -> Sample:
        return fastest(floor for name, floor in floors.items() if name.startswith(kind))

    first = fastest(own.first_floors.values())
    warm = best(own.floors, WARM)
    cold = fastest(floor for name, floor in own.floors.items() if not name.startswith(WARM))
    as_one = best(own.floors_as_one, WARM)
    return [
        # A new reader has no mapping yet; the warm ones show what a kept mapping would give.
        beside_floor(
            "dcp_mem.load; floor: as many copies, preadv or mapped anew",
            cold,
            own.whole,
            at_most=OWN_LIMIT,
        ),
        beside_floor("dcp_mem.load; floor: as many copies, warm mapping", warm, own.whole),
        beside_floor("dcp_mem.load; floor: one large copy, warm mapping", as_one, own.whole),
        beside_floor(
            "dcp_mem.load, first; floor: as many copies, mapped anew",
            first,
            own.first,
            at_most=OWN_LIMIT,
        ),
        beside_floor(
            "dcp_mem.load, first; floor: as many copies, warm mapping",
            Sample((warm.median,)),
            own.first,
        ),
        beside_peer("dcp_mem.load; peer: FileSystemReader", own.whole, m.torch_whole),
        beside_peer("dcp_mem.load; peer: dcp.load with dcp_mem's reader", own.whole, m.whole),
    ]


def _rows_of_large(m: Measured) -> list[Row]:
    # A new reader has no mapping yet; the warm one shows what a kept mapping would give.
    cold = fastest(floor for name, floor in m.floors.items() if not name.startswith(WARM))
    warm = fastest(floor for name, floor in m.floors.items() if name.startswith(WARM))
    return [
        beside_floor("dcp.load; floor: preadv or fresh mapping", cold, m.whole, at_most=1.15),
        beside_floor("dcp.load; floor: warm mapping", warm, m.whole),
        beside_floor("read_data; floor: preadv or fresh mapping", cold, m.data),
        beside_peer("dcp.load; peer: FileSystemReader", m.whole, m.torch_whole),
    ]


def _rows_of_many(m: Measured, ranks: int) -> list[Row]:
    torch_load, least = "dcp.load; peer: FileSystemReader", TIMES_FASTER_THAN_LOAD
    return [
        # With several ranks torch's own planning of DTensors is most of both.
        beside_peer(torch_load, m.whole, m.torch_whole, at_least=least if ranks == 1 else None),
        beside_peer("read_data; peer: FileSystemReader's", m.data, m.torch_data),
        beside_floor("read_data; floor: the best of all", fastest(m.floors.values()), m.data),
    ]


def _notes(m: Measured) -> list[str]:
    planning = m.whole - m.data - m.other
    spent = (
        f"of dcp.load with dcp_mem's reader: read_data {duration(m.data)}, its other methods "
        f"{duration(m.other)}, "
        f"torch's own work {duration(planning)}; the first load of the process {m.first:.2f} s"
    )
    return [
        f"floors: {named(m.floors)}",
        "floors begin as loads do, just after what they read into was made wrong",
        spent,
        f"of torch's dcp.load: read_data {duration(m.torch_data)}",
    ]


def _notes_on_own(own: Own) -> list[str]:
    return [
        f"floors beside dcp_mem.load: {named(own.floors)}",
        f"floors beside dcp_mem.load, all bytes as one: {named(own.floors_as_one)}",
        f"floors beside first loads: {named(own.first_floors)}",
    ]
