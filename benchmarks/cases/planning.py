"""What the ranks' common plan costs: rank 0 of many, simulated in one process, and recognition from then on.

Plans are made and pickled rank by rank; what rank 0 does with them is what it does in a save, but for the wire. Torch's
planner gets the same state dicts. Torch's part of a rank's metadata is what its `dcp.save` broadcasts at the end.
"""

from __future__ import annotations

import io
import pickle
import time
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex

import dcp_mem
from benchmarks.clock import seconds
from benchmarks.ours import Saves
from benchmarks.processes import in_fresh_processes
from benchmarks.procfs import Growth
from benchmarks.report import Part, Row, Section, attempt, beside_peer, duration, named, size
from benchmarks.samples import Sample
from benchmarks.scratch import need, scratch
from benchmarks.settings import GIB, MIB
from benchmarks.simulated import Model
from benchmarks.states import Workload, trained
from dcp_mem.format import names
from dcp_mem.format.metadata import RankItems, make_template
from dcp_mem.heap import collector_paused
from dcp_mem.planning.columns import Kind
from dcp_mem.planning.describe import describe
from dcp_mem.planning.local import Structure
from dcp_mem.planning.merge import merge
from dcp_mem.ranks import Alone, _dump, _load
from dcp_mem.saving.collective import _mask, collective_of
from dcp_mem.saving.values import Caller, Outcome, Planned
from dcp_mem.session import open_session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from torch.distributed.checkpoint.planner import SavePlan

    from benchmarks.processes import Rank
    from benchmarks.settings import Settings
    from dcp_mem.planning.merge import GlobalPlan

T = TypeVar("T")

TITLE = "Planning together"
ITEMS = 1000
TIMES_LESS = 20.0
SECONDS_LIMIT = 15.0
MEMORY_LIMIT = 2 * GIB
COMPARED, LIMITED = 256, 1024
"""Ranks at which there are targets: beside torch's planner, and in seconds and bytes."""
PEER_RANKS = (64, COMPARED)
"""Torch's planner takes minutes for more."""
MOST_DESCRIBED = LIMITED
"""The metadata of more is a matter of gigabytes, ours and torch's alike: DCP's objects."""
BYTES_PER_RANK = 3 * MIB
"""Of memory, for a description: more than any of them takes."""
TENSORS = 20_000
RECOGNISED = Workload(20 * MIB, TENSORS)
LATER_LIMIT = 0.020
LOOKS = 5


@dataclass(frozen=True, slots=True)
class Spec:
    ranks: int


@dataclass(frozen=True, slots=True)
class Share:
    """What each of the other ranks gets: bytes, and seconds to make sense of them."""

    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Described:
    """The metadata of a plan: seconds to make and to pickle it on rank 0, and what all others get of it."""

    described: float
    pickled: float
    peak: int
    share: Share

    @property
    def whole(self) -> float:
        return self.described + self.pickled


@dataclass(frozen=True, slots=True)
class Ours:
    """Seconds and bytes on rank 0. sent: by each other rank. peak: growth of memory, with all that was received."""

    sent: int
    unpickled: float
    merged: float
    masked: float
    peak: int
    share: Share
    metadata: Described | None

    @property
    def plan(self) -> float:
        return self.unpickled + self.merged + self.masked


@dataclass(frozen=True, slots=True)
class Theirs:
    """The same of torch's planner, whose plan has its metadata in it; storage data is filled in as its writers do."""

    sent: int
    unpickled: float
    merged: float
    scattered: float
    peak: int
    pickled: float
    share: Share

    @property
    def plan(self) -> float:
        return self.unpickled + self.merged + self.scattered

    @property
    def whole(self) -> float:
        return self.plan + self.pickled


@dataclass(frozen=True, slots=True)
class LaterSpec:
    memory: Path
    repeats: int


@dataclass(frozen=True, slots=True)
class Later:
    """Seconds of CPU time."""

    planned: Sample
    recognised: Sample


def run(settings: Settings) -> Section:
    sizes = (64, COMPARED, LIMITED) if settings.quick else (64, COMPARED, LIMITED, 4096)
    parts = [
        attempt("planning", f"first plan, {ranks:,} ranks x {ITEMS:,} items", partial(_first_part, settings, ranks))
        for ranks in sizes
    ]
    recognition = attempt("planning", f"later plans, {TENSORS:,} tensors", partial(_later_part, settings))
    return Section(TITLE, [*parts, recognition])


# -- the first plan ----------------------------------------------------------------------------------------------------


def _first_part(settings: Settings, ranks: int) -> Part:
    need(settings.tmpfs, ranks * BYTES_PER_RANK)
    restarts = settings.restarts if ranks <= LIMITED else 1
    ours = [in_fresh_processes(_measure, Spec(ranks))[0] for _ in range(restarts)]
    theirs = in_fresh_processes(_measure_torch, Spec(ranks))[0] if ranks in PEER_RANKS else None
    return Part([*_plan_rows(ranks, ours, theirs), *_share_rows(ranks, ours, theirs)], _notes(ours, theirs))


def _measure(rank: Rank, spec: Spec) -> Ours:
    model = Model(spec.ranks, ITEMS)
    growth = Growth()
    received = [_dump(model.local_plan(one)) for one in range(spec.ranks)]
    sent = len(received[0])
    with collector_paused():  # as in a save
        plans, unpickled = _timed(lambda: _unpickled(received))
        whole, merged = _timed(lambda: merge(plans))
        message, masked = _timed(lambda: _dump(_masks(whole, list(map(len, plans)))))
        peak = growth.peak
        plans.clear()
        share = _share(message)
        metadata = _describe(growth, whole, spec.ranks) if spec.ranks <= MOST_DESCRIBED else None
    return Ours(sent, unpickled, merged, masked, peak, share, metadata)


def _unpickled(received: list[torch.Tensor]) -> list[Any]:
    """What the ranks have sent; the buffers go when all of it is there."""
    plans = [_load(data, len(data)) for data in received]
    received.clear()
    return plans


def _masks(whole: GlobalPlan, lengths: Sequence[int]) -> Outcome[tuple[str, list[bytes]]]:
    return Outcome(("0" * 16, [_mask(length, whole.rows_of(rank)) for rank, length in enumerate(lengths)]))


def _describe(growth: Growth, whole: GlobalPlan, ranks: int) -> Described:
    """DCP's metadata of a plan, from what is sent for it, to what is sent to all ranks."""
    received = [_dump(_rank_items(whole, rank)) for rank in range(ranks)]
    metadata, described = _timed(lambda: describe(whole)[0])
    message, pickled = _timed(lambda: _dump(Outcome(make_template(metadata, _unpickled(received)))))
    return Described(described, pickled, growth.peak, _share(message))


def _rank_items(whole: GlobalPlan, rank: int) -> RankItems:
    """What a rank tells of its segment."""
    mine = whole.writer == rank
    places = [
        MetadataIndex(whole.names[name], None if kind == Kind.OBJECT else torch.Size(offset[:dimensions]))
        for name, kind, dimensions, offset in zip(
            whole.name[mine].tolist(),
            whole.kind[mine].tolist(),
            whole.dimensions[mine].tolist(),
            whole.offset[mine].tolist(),
            strict=True,
        )
    ]
    extents = [(number * MIB, MIB) for number in range(len(places))]
    return RankItems(rank, places, extents, int((whole.kind[mine] != Kind.OBJECT).sum()))


def _measure_torch(rank: Rank, spec: Spec) -> Theirs:
    theirs, message = _plan_as_torch(Model(spec.ranks, ITEMS), spec.ranks)
    # The plans are gone: other ranks don't have them.
    took = median(seconds(lambda: pickle.loads(message)) for _ in range(2))
    return replace(theirs, share=Share(len(message), took))


def _plan_as_torch(model: Model, ranks: int) -> tuple[Theirs, bytes]:
    """Rank 0's part, and the message that all ranks get."""
    growth = Growth()
    received = [_pickled(model.save_plan(one)) for one in range(ranks)]
    sent = len(received[0])
    plans, unpickled = _timed(lambda: list(map(pickle.loads, received)))
    received.clear()
    (final, metadata), merged = _timed(lambda: DefaultSavePlanner().create_global_plan(plans))
    _, scattered = _timed(lambda: list(map(_pickled, final)))
    peak = growth.peak
    metadata.storage_data = _storage_data(final)
    message, pickled = _timed(lambda: _pickled(metadata))
    return Theirs(sent, unpickled, merged, scattered, peak, pickled, Share(len(message), 0.0)), message


def _storage_data(final: Sequence[SavePlan]) -> dict[MetadataIndex, _StorageInfo]:
    """What torch's writers note of where the items lie."""
    return {
        item.index: _StorageInfo(f"__{rank}_0.distcp", number * MIB, MIB)
        for rank, plan in enumerate(final)
        for number, item in enumerate(plan.items)
    }


def _pickled(value: Any) -> bytes:
    """As torch.distributed does it."""
    stream = io.BytesIO()
    pickle.Pickler(stream).dump(value)
    return stream.getvalue()


def _share(message: torch.Tensor) -> Share:
    return Share(len(message), median(seconds(lambda: _load(message, len(message))) for _ in range(LOOKS)))


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    start = time.perf_counter()
    answer = work()
    return answer, time.perf_counter() - start


def _plan_rows(ranks: int, ours: Sequence[Ours], theirs: Theirs | None) -> list[Row]:
    """Rank 0's time and memory: with the plan alone, and in all."""
    plan = "rank 0: all plans unpickled, merged, and who writes what pickled"
    rows = [
        _time_row(ranks, plan, _sample(m.plan for m in ours), None if theirs is None else theirs.plan),
        _memory_row(ranks, "rank 0: memory for that, peak growth", [m.peak for m in ours], theirs),
    ]
    described = [m.metadata for m in ours if m.metadata is not None]
    if described:
        whole = _sample(m.plan + m.metadata.whole for m in ours if m.metadata is not None)
        rows += [
            _time_row(ranks, "rank 0: the same, and metadata", whole, None if theirs is None else theirs.whole),
            _memory_row(ranks, "rank 0: memory with metadata, peak growth", [m.peak for m in described], None),
        ]
    return rows


def _time_row(ranks: int, what: str, ours: Sample, theirs: float | None) -> Row:
    if theirs is not None:
        return beside_peer(what, ours, Sample((theirs,)), at_least=TIMES_LESS if ranks == COMPARED else None)
    if ranks == LIMITED:
        return _within(what, ours, SECONDS_LIMIT)
    return Row(what, ours=duration(ours))


def _within(what: str, ours: Sample, limit: float) -> Row:
    """Ours beside so many seconds."""
    target = f"≤ {duration(Sample((limit,))).partition(' (')[0]}"
    return Row(what, ours=duration(ours), target=target, met=ours.median <= limit)


def _memory_row(ranks: int, what: str, ours: Sequence[int], theirs: Theirs | None) -> Row:
    peak = max(ours)
    row = Row(what, ours=size(peak))
    if ranks == LIMITED:
        row = replace(row, target=f"≤ {size(MEMORY_LIMIT)}", met=peak <= MEMORY_LIMIT)
    return row if theirs is None else replace(row, peer=size(theirs.peak), versus_peer=_times_less(peak, theirs.peak))


def _share_rows(ranks: int, ours: Sequence[Ours], theirs: Theirs | None) -> list[Row]:
    """What a rank sends, and what every rank gets."""
    first = ours[0]
    rows = [_bytes_row("bytes that a rank sends", first.sent, None if theirs is None else theirs.sent)]
    shares = {"who writes what": [m.share for m in ours]}
    if first.metadata is not None:
        shares["metadata"] = [m.metadata.share for m in ours if m.metadata is not None]
    at_least = TIMES_LESS if ranks == COMPARED else None
    for name, share in shares.items():
        what = f"sent to every rank, {name}"
        nbytes = None if theirs is None else theirs.share.nbytes
        rows.append(_bytes_row(f"{what}: bytes", share[0].nbytes, nbytes, at_least))
        took = _sample(one.seconds for one in share)
        rows.append(
            Row(f"{what}: unpickling", ours=duration(took))
            if theirs is None
            else beside_peer(f"{what}: unpickling", took, Sample((theirs.share.seconds,)), at_least=at_least)
        )
    return rows


def _bytes_row(what: str, ours: int, theirs: int | None, at_least: float | None = None) -> Row:
    if theirs is None:
        return Row(what, ours=_nbytes(ours))
    return Row(
        what,
        ours=_nbytes(ours),
        target="" if at_least is None else f"{at_least:g} x less than torch",
        met=None if at_least is None else theirs >= at_least * ours,
        peer=_nbytes(theirs),
        versus_peer=_times_less(ours, theirs),
    )


def _nbytes(count: int) -> str:
    return size(count) if count >= MIB else f"{count / 1024:,.1f} KiB"


def _times_less(ours: float, theirs: float) -> str:
    return f"{theirs / ours:.1f} x less"


def _sample(values: Iterable[float]) -> Sample:
    return Sample(tuple(values))


def _notes(ours: Sequence[Ours], theirs: Theirs | None) -> list[str]:
    parts = {
        "unpickling": _sample(m.unpickled for m in ours),
        "merging": _sample(m.merged for m in ours),
        "pickling who writes what": _sample(m.masked for m in ours),
    }
    described = [m.metadata for m in ours if m.metadata is not None]
    if described:
        parts["describing"] = _sample(m.described for m in described)
        parts["pickling the metadata's template, with all ranks' items unpickled"] = _sample(
            m.pickled for m in described
        )
    notes = [f"ours: {named(parts)}"]
    if theirs is not None:
        notes.append(
            f"torch: unpickling {theirs.unpickled:.2f} s, create_global_plan {theirs.merged:.2f} s, pickling the plans "
            f"{theirs.scattered:.2f} s, pickling the metadata {theirs.pickled:.2f} s"
        )
    return notes


# -- later plans -------------------------------------------------------------------------------------------------------


def _later_part(settings: Settings) -> Part:
    need(settings.tmpfs, RECOGNISED.total_bytes * 5)
    with scratch(settings.tmpfs) as directory:
        later = in_fresh_processes(_measure_later, LaterSpec(directory, settings.repeats))[0]
    plan = "CPU time of Collective.plan(): recognised, and looked up what to copy"
    return Part(
        [_within(plan, later.planned, LATER_LIMIT), _within("of that, recognised", later.recognised, LATER_LIMIT)]
    )


def _measure_later(rank: Rank, spec: LaterSpec) -> Later:
    state = trained(RECOGNISED, rank)
    with closing(Saves(state, memory=spec.memory, save=dcp_mem.save)) as saves:
        saves.save()
        session = open_session(saves.writer.settings)
        assert session is not None
        collective = collective_of(session)
        caller = Caller(saves.writer.settings, session, Alone(), rank.rank, names.COLLECTIVE, saves.newest)
        structure = Structure(state.tree)
        measures: dict[str, Callable[[], float]] = {
            "planned": lambda: _cpu_seconds(lambda: isinstance(collective.plan(caller, state.tree), Planned)),
            "recognised": lambda: _cpu_seconds(lambda: structure.recognise(state.tree) is not None),
        }
        return Later(**rank.in_turn(measures, repeats=spec.repeats, warm_ups=2))


def _cpu_seconds(work: Callable[[], bool]) -> float:
    """CPU time of something that has to come out true."""
    with collector_paused():  # as in a save
        start = time.thread_time()
        is_done = work()
        took = time.thread_time() - start
    assert is_done
    return took
