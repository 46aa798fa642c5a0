"""How long a warm save blocks, beside a copy into a warm mapping and beside torch's savers."""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

import dcp_mem
from benchmarks.harness import null_writer, torch_peers
from benchmarks.harness.clock import datas, others, seconds, wholes
from benchmarks.harness.floors import warm_mapping, ways_to_copy
from benchmarks.harness.processes import in_fresh_processes
from benchmarks.harness.repeated import Saves
from benchmarks.harness.samples import Sample, fastest, slowest, slowest_by_name
from benchmarks.harness.scratch import need, scratch
from benchmarks.harness.settings import GIB
from benchmarks.harness.states import State, Workload, trained
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

TITLE = "Blocking save, warm"
TIMES_FASTER = 10.0
WRITE_DATA_MANY = 2.0
OWN_LARGE = 1.05
OWN_MANY = {1: 2.0, 2: 2.5}
"""By the number of ranks."""
LEAST = "the least that any writer could reach"
DCP_MEM, NULL_WRITER = "dcp_mem", "null writer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What a rank measures.

    Attributes:
        keep: Checkpoints that stay in memory.
        dcp_repeats: Of dcp.save with dcp_mem's writer, and with the null writer.
    """

    workload: Workload
    directory: Path
    keep: int
    repeats: int
    dcp_repeats: int
    peer_repeats: int
    async_repeats: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Seconds on one rank, or of the slowest.

    Attributes:
        floors: Copies of the tensors as they are, by the way to copy.
        floors_as_one: Where tensors are many: one copy of all bytes, by the way to copy.
        null_writer: `dcp.save` through a writer that does nothing.
        whole: `dcp.save` through dcp_mem's writer.
        data: Its `write_data`.
        other: Its other methods.
        own: `dcp_mem.save`.
    """

    floors: Mapping[str, Sample]
    floors_as_one: Mapping[str, Sample]
    null_writer: Sample
    whole: Sample
    data: Sample
    other: Sample
    own: Own
    torch_whole: Sample
    torch_data: Sample
    torch_async: Sample
    torch_async_kept: Sample


@dataclass(frozen=True, slots=True)
class Own:
    """`dcp_mem.save`: whole saves, and the floors that were measured in turn with them."""

    floors: Mapping[str, Sample]
    floors_as_one: Mapping[str, Sample]
    whole: Sample


def run(settings: Settings) -> Section:
    parts = []
    for workload, ranks in _plan(settings):
        measure = partial(_part, settings, workload, ranks)
        parts.append(attempt("save", workload.on(ranks), measure))
    return Section(TITLE, parts)


def _plan(settings: Settings) -> list[tuple[Workload, int]]:
    large = [Workload(1 * GIB, 64), Workload(2 * GIB, 64), Workload(4 * GIB, 64)]
    many = Workload(1 * GIB, 20_000)
    if settings.quick:
        return [(large[0], 1), (large[1], 1), (large[1], 2), (many, 1), (many, 2)]
    return [(workload, ranks) for workload in (*large, many) for ranks in (1, 2)]


def _part(settings: Settings, workload: Workload, ranks: int) -> Part:
    keep = 1 if workload.nominal_bytes > 2 * GIB else 2
    # The state, a floor or two, and the slots; torch's files come when those are gone.
    need(settings.tmpfs, workload.total_bytes * (keep + 3 + 2 * workload.many))
    with scratch(settings.tmpfs) as directory:
        spec = Spec(
            workload=workload,
            directory=directory,
            keep=keep,
            repeats=settings.repeats_of(workload),
            # Torch plans the save of twenty thousand DTensors in many seconds, with any writer.
            dcp_repeats=settings.peer_repeats
            if workload.many and ranks > 1
            else settings.repeats_of(workload),
            peer_repeats=settings.peer_repeats,
            async_repeats=settings.async_repeats,
        )
        by_rank = in_fresh_processes(_measure, spec, ranks=ranks)
    m = _slowest(by_rank)
    if workload.many:
        rows = [*_rows_of_many(m), *_rows_of_many_own(m, OWN_MANY[ranks])]
    else:
        rows = [
            *_rows_of_large(m, _large_limit(workload, ranks)),
            *_rows_of_large_own(m, _own_limit(workload)),
        ]
    return Part(rows, _notes(m))


def _measure(rank: Rank, spec: Spec) -> Measured:
    state = trained(spec.workload, rank)
    floors, as_one, idle, through_dcp = _measure_through_dcp(rank, spec, state)
    torch_peers.remove(rank, spec.directory / "memory")
    own = _measure_own(rank, spec, state)  # now that there is room for its slots
    torch_peers.remove(rank, spec.directory / "own")
    directory = spec.directory / "torch"
    # The first of the asynchronous saves fills buffers, and grows the heap.
    repeats = 1 + spec.async_repeats
    peer = partial(torch_peers.async_save_seconds, rank, state, directory, repeats)
    saves = torch_peers.saves(rank, state, directory, spec.peer_repeats)
    with closing(torch_peers.kept_stager()) as stager:
        kept = Sample(peer(stager).values[1:])
    return Measured(
        floors=floors,
        floors_as_one=as_one,
        null_writer=idle,
        whole=wholes(through_dcp),
        data=datas(through_dcp),
        other=others(through_dcp),
        own=own,
        torch_whole=wholes(saves),
        torch_data=datas(saves),
        torch_async=Sample(peer().values[1:]),
        torch_async_kept=kept,
    )


def _measure_through_dcp(
    rank: Rank, spec: Spec, state: State
) -> tuple[dict[str, Sample], dict[str, Sample], Sample, Sequence[Phases]]:
    with ExitStack() as stack:
        floors, as_one = _all_floors(rank, spec, state, stack)
        saves = stack.enter_context(
            closing(Saves(state, memory=spec.directory / "memory", keep=spec.keep))
        )
        measures: dict[str, Callable[[], float]] = {
            **{f"tensors {way}": floor for way, floor in floors.items()},
            **{f"as one {way}": floor for way, floor in as_one.items()},
            NULL_WRITER: partial(null_writer.save, state),
            DCP_MEM: saves.save,
        }
        # One more than there are slots: from then on every save reuses one.
        samples = rank.in_turn(measures, repeats=spec.dcp_repeats, warm_ups=spec.keep + 2)
        return (
            {way: samples[f"tensors {way}"] for way in floors},
            {way: samples[f"as one {way}"] for way in as_one},
            samples[NULL_WRITER],
            saves.history[-spec.dcp_repeats :],
        )


def _measure_own(rank: Rank, spec: Spec, state: State) -> Own:
    with ExitStack() as stack:
        floors, as_one = _all_floors(rank, spec, state, stack)
        own = Saves(state, memory=spec.directory / "own", keep=spec.keep, save=dcp_mem.save)
        saves = stack.enter_context(closing(own))
        measures: dict[str, Callable[[], float]] = {
            **{f"tensors {way}": floor for way, floor in floors.items()},
            **{f"as one {way}": floor for way, floor in as_one.items()},
            DCP_MEM: saves.save,
        }
        samples = rank.in_turn(measures, repeats=spec.repeats, warm_ups=spec.keep + 2)
    return Own(
        {way: samples[f"tensors {way}"] for way in floors},
        {way: samples[f"as one {way}"] for way in as_one},
        samples[DCP_MEM],
    )


def _all_floors(
    rank: Rank, spec: Spec, state: State, stack: ExitStack
) -> tuple[dict[str, Callable[[], float]], dict[str, Callable[[], float]]]:
    """Return copies of the tensors as they are, and of all bytes as one where they are many."""
    floors = _floors(rank, spec.directory / f"floor-{rank.rank}", state.local, stack)
    if not spec.workload.many:
        return floors, {}
    path = spec.directory / f"floor-as-one-{rank.rank}"
    return floors, _floors(rank, path, [torch.cat(state.local)], stack)


def _floors(
    rank: Rank, path: Path, tensors: Sequence[torch.Tensor], stack: ExitStack
) -> dict[str, Callable[[], float]]:
    mapping = stack.enter_context(warm_mapping(path, tensors))
    ways = stack.enter_context(ways_to_copy(rank.threads, tensors))
    return {way: partial(seconds, partial(mapping.fill, copy)) for way, copy in ways.items()}


def _slowest(ranks: Sequence[Measured]) -> Measured:
    return Measured(
        floors=slowest_by_name([m.floors for m in ranks]),
        floors_as_one=slowest_by_name([m.floors_as_one for m in ranks]),
        null_writer=slowest([m.null_writer for m in ranks]),
        whole=slowest([m.whole for m in ranks]),
        data=slowest([m.data for m in ranks]),
        other=slowest([m.other for m in ranks]),
        own=Own(
            floors=slowest_by_name([m.own.floors for m in ranks]),
            floors_as_one=slowest_by_name([m.own.floors_as_one for m in ranks]),
            whole=slowest([m.own.whole for m in ranks]),
        ),
        torch_whole=slowest([m.torch_whole for m in ranks]),
        torch_data=slowest([m.torch_data for m in ranks]),
        torch_async=slowest([m.torch_async for m in ranks]),
        torch_async_kept=slowest([m.torch_async_kept for m in ranks]),
    )


def _rows_of_large(m: Measured, limit: float) -> list[Row]:
    floor = fastest(m.floors.values())
    return [
        beside_floor("dcp.save; floor: a copy", floor, m.whole, at_most=limit),
        beside_floor("write_data; floor: a copy", floor, m.data),
        beside_peer(
            "dcp.save; peer: FileSystemWriter", m.whole, m.torch_whole, at_least=TIMES_FASTER
        ),
        *_rows_beside_async(m),
        beside_floor(f"{LEAST}; floor: a copy", floor, floor + m.null_writer),
        beside_peer(f"{LEAST}; peer: FileSystemWriter", floor + m.null_writer, m.torch_whole),
    ]


def _rows_of_many(m: Measured) -> list[Row]:
    as_one, by_tensor = fastest(m.floors_as_one.values()), fastest(m.floors.values())
    limit = WRITE_DATA_MANY
    return [
        beside_floor("write_data; floor: one large copy", as_one, m.data, at_most=limit),
        beside_floor("write_data; floor: as many copies", by_tensor, m.data, at_most=limit),
        # dcp.save as a whole is mostly torch's planning here, which is the same for both writers.
        beside_peer(
            "write_data; peer: FileSystemWriter's", m.data, m.torch_data, at_least=TIMES_FASTER
        ),
        beside_peer("dcp.save; peer: FileSystemWriter", m.whole, m.torch_whole),
        beside_floor("dcp.save; floor: one large copy", as_one, m.whole),
        *_rows_beside_async(m),
        beside_peer(f"{LEAST}; peer: dcp.async_save", by_tensor + m.null_writer, m.torch_async),
    ]


def _rows_of_large_own(m: Measured, limit: float | None) -> list[Row]:
    floor = fastest(m.own.floors.values())
    return [
        beside_floor("dcp_mem.save; floor: a copy", floor, m.own.whole, at_most=limit),
        *_rows_of_own_beside_peers(m),
    ]


def _rows_of_many_own(m: Measured, limit: float) -> list[Row]:
    as_one, by_tensor = fastest(m.own.floors_as_one.values()), fastest(m.own.floors.values())
    return [
        beside_floor("dcp_mem.save; floor: one large copy", as_one, m.own.whole, at_most=limit),
        beside_floor("dcp_mem.save; floor: as many copies", by_tensor, m.own.whole, at_most=limit),
        *_rows_of_own_beside_peers(m),
    ]


def _rows_of_own_beside_peers(m: Measured) -> list[Row]:
    return [
        beside_peer("dcp_mem.save; peer: FileSystemWriter", m.own.whole, m.torch_whole),
        beside_peer("dcp_mem.save; peer: dcp.async_save", m.own.whole, m.torch_async, at_least=1),
    ]


def _rows_beside_async(m: Measured) -> list[Row]:
    kept = "dcp.save; peer: dcp.async_save, stager kept by the caller"
    return [
        beside_peer("dcp.save; peer: dcp.async_save", m.whole, m.torch_async, at_least=1),
        beside_peer(kept, m.whole, m.torch_async_kept),
    ]


def _large_limit(workload: Workload, ranks: int) -> float:
    """At 1 GiB the copy is so short that every millisecond of Python shows."""
    if workload.nominal_bytes < 2 * GIB:
        return 1.20
    return 1.10 if ranks == 1 else 1.15


def _own_limit(workload: Workload) -> float | None:
    return OWN_LARGE if workload.nominal_bytes >= 2 * GIB else None


def _notes(m: Measured) -> list[str]:
    planning = m.whole - m.data - m.other
    spent = (
        f"of dcp.save with dcp_mem's writer: write_data {duration(m.data)}, its other methods "
        f"{duration(m.other)}, "
        f"torch's own work {duration(planning)}"
    )
    notes = [
        spent,
        f"of torch's dcp.save: write_data {duration(m.torch_data)}",
        f"floors: {named(m.floors)}",
        f"floors beside dcp_mem.save: {named(m.own.floors)}",
    ]
    if m.floors_as_one:
        notes.append(f"floors, all bytes as one: {named(m.floors_as_one)}")
        notes.append(f"floors, all bytes as one, beside dcp_mem.save: {named(m.own.floors_as_one)}")
    return notes
