"""What the ranks' common plan costs: rank 0 of many, simulated in one process, and recognition from then on.

What the other ranks send lies ready, as they would send it along the tree, eight ranks on a node; from there on rank 0 and a
few others do what they do in a save, but for the wire. Torch's planner gets the same state dicts. Torch's part of a rank's
metadata is what its `dcp.save` broadcasts at the end.
"""

from __future__ import annotations

import io
import operator
import pickle
import time
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex

import dcp_mem
from benchmarks.clock import seconds
from benchmarks.others import Place, nodes_of
from benchmarks.ours import Saves
from benchmarks.processes import in_fresh_processes
from benchmarks.procfs import Growth
from benchmarks.report import Part, Row, Section, attempt, beside_peer, duration, named, size, within
from benchmarks.samples import Sample
from benchmarks.scratch import need, scratch
from benchmarks.settings import GIB, MIB
from benchmarks.simulated import SAVE_ID, Model
from benchmarks.states import Workload, trained
from dcp_mem.format import names
from dcp_mem.format.catalog import Catalog, catalog_key
from dcp_mem.format.pickled import template_of
from dcp_mem.heap import collector_paused
from dcp_mem.memory.catalogs import Catalogs
from dcp_mem.planning.columns import share_columns
from dcp_mem.planning.describe import describe, shared
from dcp_mem.planning.local import Structure
from dcp_mem.planning.merge import merge
from dcp_mem.ranks import Alone, passing
from dcp_mem.ranks.passing import dumped
from dcp_mem.saving.collective import _mask, collective_of
from dcp_mem.saving.values import Caller, Planned
from dcp_mem.session import open_session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    import torch
    from torch.distributed.checkpoint.planner import SavePlan

    from benchmarks.processes import Rank
    from benchmarks.settings import Settings
    from dcp_mem.planning.describe import Written
    from dcp_mem.planning.merge import GlobalPlan
    from dcp_mem.ranks.base import Share
    from dcp_mem.values import Segment

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
MOST_SHOWN = LIMITED
"""`.metadata` of more is gigabytes, ours and torch's alike."""
BYTES_PER_RANK = 3 * MIB
"""Of memory: more than any of them takes."""
TENSORS = 20_000
RECOGNISED = Workload(20 * MIB, TENSORS)
LATER_LIMIT = 0.020
LOOKS = 5


@dataclass(frozen=True, slots=True)
class Spec:
    ranks: int
    directory: Path


@dataclass(frozen=True, slots=True)
class Got:
    """What another rank gets of plan and metadata: bytes, and seconds to make sense of them and to pass them on.

    parts: the bytes, by what they are.
    """

    parts: Mapping[str, int]
    seconds: float

    @property
    def nbytes(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class Shown:
    """`.metadata` of a plan, made from the catalog behind the training loop."""

    nbytes: int
    seconds: float
    peak: int


@dataclass(frozen=True, slots=True)
class Ours:
    """Seconds of rank 0, by step, and bytes. sent: by each other rank. peak: growth of memory, with all that was received.

    leader: of those that speak for other nodes too, the one that speaks for the most. neighbour: a rank of rank 0's node.
    """

    steps: Mapping[str, float]
    sent: int
    received: int
    peak: int
    leader: Got
    neighbour: Got
    shown: Shown | None

    @property
    def whole(self) -> float:
        return sum(self.steps.values())


@dataclass(frozen=True, slots=True)
class Theirs:
    """The same of torch's planner, whose plan has its metadata in it; storage data is filled in as its writers do."""

    sent: int
    unpickled: float
    merged: float
    scattered: float
    peak: int
    pickled: float
    nbytes: int
    share_seconds: float

    @property
    def whole(self) -> float:
        return self.unpickled + self.merged + self.scattered + self.pickled


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
    ours = []
    for _ in range(restarts):
        with scratch(settings.tmpfs) as directory:
            ours += in_fresh_processes(_measure, Spec(ranks, directory))
    theirs = in_fresh_processes(_measure_torch, ranks)[0] if ranks in PEER_RANKS else None
    rows = [*_rank_0_rows(ranks, ours, theirs), *_other_rows(ranks, ours, theirs), *_info_rows(ours, theirs)]
    return Part(rows, _notes(ours, theirs))


class _Steps:
    """Seconds by name of the step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def take(self, name: str, work: Callable[[], T]) -> T:
        answer, self.seconds[name] = _timed(work)
        return answer


def _measure(rank: Rank, spec: Spec) -> Ours:
    model, nodes = Model(spec.ranks, ITEMS), nodes_of(spec.ranks)
    growth, steps = Growth(), _Steps()
    place = Place(nodes, 0)
    received = _send_up(place, model.local_plan, share_columns)
    with collector_paused():  # as in a save
        whole = _plan_together(place, model, steps)
        planned = place.group.sent_bytes()
        written = model.written(whole)
        segments = model.segments(written, nodes)
        received += _tell_segments(place, segments, steps)
        with_segments = place.group.sent_bytes()
        received += _send_up(place, written.__getitem__, shared)
        data = _describe(place, whole, written[0], steps, spec.directory / "rank-0")
        peak = growth.peak
        del whole, written
        get = partial(_get, place, nodes, planned, with_segments, spec.directory)
        return Ours(
            steps=steps.seconds,
            sent=len(dumped(model.local_plan(1))),
            received=received,
            peak=peak,
            leader=get(place.tree.leaders[0]),
            neighbour=get(place.tree.children[-1]),
            shown=_show(growth, data, segments) if spec.ranks <= MOST_SHOWN else None,
        )


def _send_up(place: Place, value_of: Callable[[int], T], share: Share[T]) -> int:
    """What a gather brings to this rank from its children: bundles, in which equal parts are shared. Their bytes."""
    nbytes = 0
    for ranks in place.tree.below:
        bundle = dumped(dict(zip(ranks, share([value_of(rank) for rank in ranks]), strict=True)))
        place.group.arrive(ranks[0], bundle)
        nbytes += len(bundle)
    return nbytes


def _tell_segments(place: Place, segments: Sequence[Segment], steps: _Steps) -> int:
    """What all ranks' segments bring to rank 0, joined on their way; everybody gets them all."""
    nbytes = 0
    for ranks in place.tree.below:
        found = dumped({rank: segments[rank] for rank in ranks})
        place.group.arrive(ranks[0], found)
        nbytes += len(found)
    mine = {0: segments[0]}
    steps.take("segments joined", lambda: passing.all_reduce(place.wire, place.tree, mine, operator.or_))
    return nbytes


def _plan_together(place: Place, model: Model, steps: _Steps) -> GlobalPlan:
    """Collective.plan_together on rank 0."""
    mine = model.local_plan(0)
    plans = steps.take(
        "plans unpickled and shared", lambda: passing.gather(place.wire, place.tree, mine, share_columns)
    )
    whole = steps.take("merged", lambda: merge(plans))
    steps.take(
        "who writes what, pickled",
        lambda: passing.scatter(place.wire, place.tree, _masks(whole, list(map(len, plans)))),
    )
    return whole


def _masks(whole: GlobalPlan, lengths: Sequence[int]) -> list[tuple[str, bytes, str]]:
    return [("0" * 16, _mask(length, whole.rows_of(rank)), "") for rank, length in enumerate(lengths)]


def _describe(place: Place, whole: GlobalPlan, mine: Written, steps: _Steps, directory: Path) -> bytes:
    """What rank 0 does, once all have staged, until its node has the catalog; returns that."""
    directory.mkdir()
    catalogs = Catalogs(str(directory))
    parts = steps.take(
        "what is written unpickled and shared", lambda: passing.gather(place.wire, place.tree, mine, shared)
    )
    catalog = steps.take("described", lambda: describe(whole, parts))
    data = steps.take("catalog packed", catalog.to_bytes)

    def told() -> None:
        passing.broadcast(place.wire, place.tree, (catalog_key(data), ""))
        catalogs.put(passing.tell_leaders(place.wire, place.tree, data))

    steps.take("catalog named, told, put", told)
    return data


def _get(
    root: Place,
    nodes: Sequence[str],
    planned: Mapping[int, int],
    with_segments: Mapping[int, int],
    directory: Path,
    rank: int,
) -> Got:
    """What a child of rank 0 gets in all this, and how long it takes for that.

    planned, with_segments: bytes sent by the time that the ranks knew who writes what, and of all segments.
    """
    sent = root.group.sent[rank]
    parts = {
        "who writes what": planned[rank],
        "the segments of all ranks": with_segments[rank] - planned[rank],
        "the catalog, or its name": root.group.sent_bytes()[rank] - with_segments[rank],
    }
    looks = [_take_in(nodes, rank, sent, directory / f"{rank}-{look}") for look in range(LOOKS)]
    return Got(parts, median(looks))


def _take_in(nodes: Sequence[str], rank: int, sent: Sequence[torch.Tensor], directory: Path) -> float:
    place = Place(nodes, rank)
    directory.mkdir()
    catalogs = Catalogs(str(directory))
    place.group.ready[0].extend(sent)

    def work() -> None:
        passing.scatter(place.wire, place.tree, [])
        passing.broadcast(place.wire, place.tree, {})
        passing.broadcast(place.wire, place.tree, ("", ""))
        received = passing.tell_leaders(place.wire, place.tree, b"")
        if received is not None:
            catalogs.put(received)

    return seconds(work)


def _show(growth: Growth, data: bytes, segments: Sequence[Segment]) -> Shown:
    """What is done for torch's own readers, at some time after the save."""
    tails = {segment.rank: segment.tail for segment in segments}
    made, took = _timed(lambda: template_of(Catalog.from_bytes(data)).render(SAVE_ID, tails))
    return Shown(len(made), took, growth.peak)


def _measure_torch(rank: Rank, ranks: int) -> Theirs:
    theirs, message = _plan_as_torch(Model(ranks, ITEMS), ranks)
    # The plans are gone: other ranks don't have them.
    return replace(theirs, share_seconds=median(seconds(lambda: pickle.loads(message)) for _ in range(2)))


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
    return Theirs(sent, unpickled, merged, scattered, peak, pickled, len(message), 0.0), message


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


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    start = time.perf_counter()
    answer = work()
    return answer, time.perf_counter() - start


def _rank_0_rows(ranks: int, ours: Sequence[Ours], theirs: Theirs | None) -> list[Row]:
    """Rank 0's time and memory in all, from the plans that it is sent to a catalog that is told and put."""
    what, whole = "rank 0: plan and catalog, in all", _sample(m.whole for m in ours)
    if theirs is not None:
        at_least = TIMES_LESS if ranks == COMPARED else None
        time_row = beside_peer(what, whole, Sample((theirs.whole,)), at_least=at_least)
    elif ranks == LIMITED:
        time_row = within(what, whole, SECONDS_LIMIT)
    else:
        time_row = Row(what, ours=duration(whole))
    peak = max(m.peak for m in ours)
    memory_row = Row("rank 0: memory for that, peak growth", ours=size(peak))
    if ranks == LIMITED:
        memory_row = replace(memory_row, target=f"≤ {size(MEMORY_LIMIT)}", met=peak <= MEMORY_LIMIT)
    if theirs is not None:
        memory_row = replace(memory_row, peer=size(theirs.peak), versus_peer=_times_less(peak, theirs.peak))
    return [time_row, memory_row]


def _other_rows(ranks: int, ours: Sequence[Ours], theirs: Theirs | None) -> list[Row]:
    """What other ranks get, and the time that it takes them; torch sends each of them all metadata."""
    at_least = TIMES_LESS if ranks == COMPARED else None
    rows = []
    for who, got in (
        ("a node's leader", [m.leader for m in ours]),
        ("another rank", [m.neighbour for m in ours]),
    ):
        nbytes = None if theirs is None else theirs.nbytes
        rows.append(_bytes_row(f"{who}: bytes that it gets", got[0].nbytes, nbytes, at_least))
        what, took = f"{who}: time for that", _sample(one.seconds for one in got)
        rows.append(
            Row(what, ours=duration(took))
            if theirs is None
            else beside_peer(what, took, Sample((theirs.share_seconds,)), at_least=at_least)
        )
    return rows


def _info_rows(ours: Sequence[Ours], theirs: Theirs | None) -> list[Row]:
    """What a rank sends, and what is made behind the training loop."""
    sent, nbytes, pickled = (None, None, None) if theirs is None else (theirs.sent, theirs.nbytes, theirs.pickled)
    rows = [_bytes_row("bytes that a rank sends of its plan", ours[0].sent, sent)]
    shown = [m.shown for m in ours if m.shown is not None]
    if shown:
        what, took = "`.metadata`: catalog read, pickle made", _sample(one.seconds for one in shown)
        rows += [
            _bytes_row("`.metadata`, made in the background: bytes", shown[0].nbytes, nbytes),
            Row(what, ours=duration(took)) if pickled is None else beside_peer(what, took, Sample((pickled,))),
            Row("`.metadata`: memory, peak growth", ours=size(max(one.peak for one in shown))),
        ]
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
    steps = {name: _sample(m.steps[name] for m in ours) for name in ours[0].steps}
    first = ours[0]
    notes = [
        f"rank 0: {named(steps)}; it is sent {_nbytes(first.received)}",
        f"a node's leader gets {_listed(first.leader)}; another rank {_listed(first.neighbour)}",
    ]
    if theirs is not None:
        notes.append(
            f"torch: unpickling {theirs.unpickled:.2f} s, create_global_plan {theirs.merged:.2f} s, pickling the plans "
            f"{theirs.scattered:.2f} s, pickling the metadata {theirs.pickled:.2f} s"
        )
    return notes


def _listed(got: Got) -> str:
    return ", ".join(f"{name} {_nbytes(nbytes)}" for name, nbytes in got.parts.items())


# -- later plans -------------------------------------------------------------------------------------------------------


def _later_part(settings: Settings) -> Part:
    need(settings.tmpfs, RECOGNISED.total_bytes * 5)
    with scratch(settings.tmpfs) as directory:
        later = in_fresh_processes(_measure_later, LaterSpec(directory, settings.repeats))[0]
    plan = "CPU time of Collective.plan(): recognised, and looked up what to copy"
    return Part(
        [within(plan, later.planned, LATER_LIMIT), within("of that, recognised", later.recognised, LATER_LIMIT)]
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
