"""What the ranks' common plan costs rank 0 of many, and what later saves cost that recognise it.

One process plays all ranks, eight on a node. The messages of the other ranks are made beforehand,
as they would come along the tree; then rank 0 and a few other ranks do what they do in a save,
without a network. Torch's planner gets the same state dicts. Its metadata is what its `dcp.save`
broadcasts at the end.
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
from benchmarks.harness.clock import seconds
from benchmarks.harness.played_ranks import RANKS_PER_NODE, Place, nodes_of
from benchmarks.harness.processes import in_fresh_processes
from benchmarks.harness.procfs import Growth
from benchmarks.harness.rank_plans import SAVE_ID, Model
from benchmarks.harness.repeated import Saves
from benchmarks.harness.samples import Sample
from benchmarks.harness.scratch import need, scratch
from benchmarks.harness.settings import GIB, MIB
from benchmarks.harness.states import Workload, trained
from benchmarks.harness.tables import (
    AMOUNT,
    BYTES,
    Figure,
    Part,
    Row,
    Section,
    attempt,
    beside_peer,
    compared,
    named,
    size,
    target_beside_peer,
    within,
)
from dcp_mem.comm import SingleRank, relay
from dcp_mem.common.gc_pause import collector_paused
from dcp_mem.common.sendable import encoded
from dcp_mem.format import names
from dcp_mem.format.catalog import Catalog, catalog_key
from dcp_mem.format.metadata_template import template_of
from dcp_mem.memory.catalogs import Catalogs
from dcp_mem.planning.global_plan import merge
from dcp_mem.planning.joint_plan import JointPlan, join_plans, plan_of_rank
from dcp_mem.planning.plan_catalog import catalog_of_written, share_written
from dcp_mem.planning.state_structure import Structure
from dcp_mem.runtime.session import open_session
from dcp_mem.saving.own_plans import own_plans_of
from dcp_mem.saving.values import Planned, SaveContext

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from torch.distributed.checkpoint.planner import SavePlan

    from benchmarks.harness.processes import Rank
    from benchmarks.harness.settings import Settings
    from dcp_mem.comm.collectives import Share
    from dcp_mem.common.values import Segment
    from dcp_mem.planning.global_plan import GlobalPlan
    from dcp_mem.planning.plan_catalog import WrittenItems

T = TypeVar("T")

TITLE = "Planning together"
ITEMS = 1000
TIMES_BETTER = 20.0
SECONDS_LIMIT = 5.0
MEMORY_LIMIT = GIB
COMPARED, LIMITED, MOST = 256, 1024, 16384
"""Ranks at which there is a target beside torch's planner, from which on there are targets in
seconds and bytes, and the most that are measured."""
PEER_RANKS = (64, COMPARED)
"""Torch's planner takes minutes for more."""
MOST_SHOWN = LIMITED
"""`.metadata` of more ranks is gigabytes, dcp_mem's and torch's alike."""
BYTES_PER_RANK = 3 * MIB
"""Bytes of memory: more than any rank takes. Plans of more than `LIMITED` hardly take more."""
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
    """What another rank gets of plan and metadata.

    Attributes:
        parts: Bytes, by what they are.
        seconds: To read the messages, and to send them on.
    """

    parts: Mapping[str, int]
    seconds: float

    @property
    def nbytes(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class Shown:
    """`.metadata` of a plan, made from the catalog in the background."""

    nbytes: int
    seconds: float
    peak: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpMem:
    """What rank 0 and a few other ranks need with dcp_mem's plan.

    Attributes:
        steps: Seconds of rank 0, by step.
        sent: Bytes that each other rank sends.
        received: Bytes that rank 0 receives.
        peak: Growth of rank 0's memory in bytes, with all that it received.
        leader: The rank that relays messages for the most other nodes.
        leader_joins: Seconds in which that rank joins its plan with those of the ranks below.
        neighbour: A rank on rank 0's node.
    """

    steps: Mapping[str, float]
    sent: int
    received: int
    peak: int
    leader: Got
    leader_joins: float
    neighbour: Got
    shown: Shown | None

    @property
    def whole(self) -> float:
        return sum(self.steps.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Torch:
    """What torch's planner needs: seconds and bytes.

    Its plan has its metadata in it; storage data is filled in as torch's writers do.
    """

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
    sizes = (64, COMPARED, LIMITED) if settings.quick else (64, COMPARED, LIMITED, 4096, MOST)
    parts = [
        attempt(
            "planning",
            f"first plan, {ranks:,} ranks × {ITEMS:,} items",
            partial(_first_part, settings, ranks),
        )
        for ranks in sizes
    ]
    recognition = attempt(
        "planning", f"later plans, {TENSORS:,} tensors", partial(_later_part, settings)
    )
    return Section(TITLE, [*parts, recognition])


# -- the first plan ----------------------------------------------------------------------------


def _first_part(settings: Settings, ranks: int) -> Part:
    need(settings.tmpfs, min(ranks, LIMITED) * BYTES_PER_RANK)
    restarts = settings.restarts if ranks <= LIMITED else 1
    measured = []
    for _ in range(restarts):
        with scratch(settings.tmpfs) as directory:
            measured += in_fresh_processes(_measure, Spec(ranks, directory))
    peer = in_fresh_processes(_measure_torch, ranks)[0] if ranks in PEER_RANKS else None
    rows = [
        *_rank_0_rows(ranks, measured, peer),
        *_other_rows(ranks, measured, peer),
        _joins_row(measured),
        *_info_rows(measured, peer),
    ]
    return Part(rows, _notes(measured, peer))


class _Steps:
    """Seconds by name of the step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def take(self, name: str, work: Callable[[], T]) -> T:
        answer, self.seconds[name] = _timed(work)
        return answer


def _measure(rank: Rank, spec: Spec) -> DcpMem:
    model, nodes = Model(spec.ranks, ITEMS), nodes_of(spec.ranks)
    growth, steps = Growth(), _Steps()
    place = Place(nodes, 0)
    received = _send_plans(place, model)
    with collector_paused():  # as in a save
        whole, masks = _plan_together(place, model, steps)
        planned = place.wire.sent_bytes()
        written = model.written(masks)
        segments = model.segments(written, nodes)
        received += _tell_segments(place, segments, steps)
        with_segments = place.wire.sent_bytes()
        received += _send_up(place, written.__getitem__, share_written)
        data = _describe(place, whole, written[0], steps, spec.directory / "rank-0")
        peak = growth.peak
        del whole, written
        get = partial(_get, place, nodes, planned, with_segments, spec.directory)
        return DcpMem(
            steps=steps.seconds,
            sent=len(encoded(plan_of_rank(1, model.local_plan(1)))),
            received=received,
            peak=peak,
            leader=get(place.tree.leaders[0]),
            leader_joins=_join_as_leader(Place(nodes, place.tree.leaders[0]), model),
            neighbour=get(place.tree.children[-1]),
            shown=_show(growth, data, segments) if spec.ranks <= MOST_SHOWN else None,
        )


def _send_up(place: Place, value_of: Callable[[int], T], share: Share[T]) -> int:
    """Let a rank's children send it what a gather brings, in bundles that share equal parts.

    Returns:
        Bytes of the bundles.
    """
    nbytes = 0
    for ranks in place.tree.below:
        bundle = encoded(dict(zip(ranks, share([value_of(rank) for rank in ranks]), strict=True)))
        place.wire.arrive(ranks[0], bundle)
        nbytes += len(bundle)
    return nbytes


def _send_plans(place: Place, model: Model) -> int:
    """Let a rank's children send it the joint plans of all ranks below.

    Returns:
        Bytes of these plans.
    """
    nbytes = 0
    for ranks in place.tree.below:
        sent = encoded(_joint_plan(model, ranks))
        place.wire.arrive(ranks[0], sent)
        nbytes += len(sent)
    return nbytes


def _joint_plan(model: Model, ranks: Sequence[int]) -> JointPlan:
    """Return the plans of some ranks, joined by nodes and then by nine leaders, as on a tree."""
    ordered = sorted(ranks)
    nodes = (
        ordered[start : start + RANKS_PER_NODE] for start in range(0, len(ordered), RANKS_PER_NODE)
    )
    parts = [
        join_plans([plan_of_rank(rank, model.local_plan(rank)) for rank in node]) for node in nodes
    ]
    while len(parts) > 1:
        parts = [join_plans(parts[start : start + 9]) for start in range(0, len(parts), 9)]
    return parts[0]


def _join_as_leader(place: Place, model: Model) -> float:
    _send_plans(place, model)
    mine = plan_of_rank(place.tree.rank, model.local_plan(place.tree.rank))
    return seconds(lambda: relay.reduce(place.wire, place.tree, mine, join_plans))


def _tell_segments(place: Place, segments: Sequence[Segment], steps: _Steps) -> int:
    """Join all ranks' segments on their way to rank 0, and send them to all ranks.

    Returns:
        Bytes that rank 0 received.
    """
    nbytes = 0
    for ranks in place.tree.below:
        found = encoded({rank: segments[rank] for rank in ranks})
        place.wire.arrive(ranks[0], found)
        nbytes += len(found)
    mine = {0: segments[0]}
    steps.take(
        "segments joined", lambda: relay.all_reduce(place.wire, place.tree, mine, operator.or_)
    )
    return nbytes


def _plan_together(place: Place, model: Model, steps: _Steps) -> tuple[GlobalPlan, list[bytes]]:
    """OwnPlans.plan_together on rank 0."""
    mine = plan_of_rank(0, model.local_plan(0))
    joined = steps.take(
        "plans unpickled and joined",
        lambda: relay.reduce(place.wire, place.tree, mine, join_plans),
    )
    assert joined is not None
    whole = steps.take("merged", lambda: merge(joined))
    masks = steps.take("who writes what", whole.masks)
    steps.take(
        "that, pickled",
        lambda: relay.scatter(place.wire, place.tree, [("0" * 16, mask, "") for mask in masks]),
    )
    return whole, masks


def _describe(
    place: Place, whole: GlobalPlan, mine: WrittenItems, steps: _Steps, directory: Path
) -> bytes:
    """Do what rank 0 does once all ranks have staged, until its node has the catalog; return it."""
    directory.mkdir()
    catalogs = Catalogs(str(directory))
    parts = steps.take(
        "what is written unpickled and shared",
        lambda: relay.gather(place.wire, place.tree, mine, share_written),
    )
    catalog = steps.take("described", lambda: catalog_of_written(whole, parts))
    data = steps.take("catalog packed", catalog.to_bytes)

    def told() -> None:
        relay.broadcast(place.wire, place.tree, (catalog_key(data), ""))
        catalogs.put(relay.tell_leaders(place.wire, place.tree, data))

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
    """Return what a child of rank 0 gets, and how long it takes to read it.

    Args:
        planned: Bytes sent to each rank until it knew who writes what.
        with_segments: Bytes sent to each rank until it knew all segments.
    """
    sent = root.wire.sent[rank]
    parts = {
        "who writes what": planned[rank],
        "the segments of all ranks": with_segments[rank] - planned[rank],
        "the catalog, or its name": root.wire.sent_bytes()[rank] - with_segments[rank],
    }
    looks = [_take_in(nodes, rank, sent, directory / f"{rank}-{look}") for look in range(LOOKS)]
    return Got(parts, median(looks))


def _take_in(nodes: Sequence[str], rank: int, sent: Sequence[Any], directory: Path) -> float:
    place = Place(nodes, rank)
    directory.mkdir()
    catalogs = Catalogs(str(directory))
    place.wire.ready[0].extend(sent)

    def work() -> None:
        relay.scatter(place.wire, place.tree, [])
        relay.broadcast(place.wire, place.tree, {})
        relay.broadcast(place.wire, place.tree, ("", ""))
        received = relay.tell_leaders(place.wire, place.tree, b"")
        if received is not None:
            catalogs.put(received)

    return seconds(work)


def _show(growth: Growth, data: bytes, segments: Sequence[Segment]) -> Shown:
    """Make `.metadata` for torch's own readers, as the background does after the save."""
    tails = {segment.rank: segment.tail for segment in segments}
    made, took = _timed(lambda: template_of(Catalog.from_bytes(data)).render(SAVE_ID, tails))
    return Shown(len(made), took, growth.peak)


def _measure_torch(rank: Rank, ranks: int) -> Torch:
    peer, message = _plan_as_torch(Model(ranks, ITEMS), ranks)
    # The plans are freed: other ranks don't have them.
    return replace(
        peer, share_seconds=median(seconds(lambda: pickle.loads(message)) for _ in range(2))
    )


def _plan_as_torch(model: Model, ranks: int) -> tuple[Torch, bytes]:
    """Return rank 0's part, and the message that all ranks get."""
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
    return Torch(
        sent=sent,
        unpickled=unpickled,
        merged=merged,
        scattered=scattered,
        peak=peak,
        pickled=pickled,
        nbytes=len(message),
        share_seconds=0.0,
    ), message


def _storage_data(final: Sequence[SavePlan]) -> dict[MetadataIndex, _StorageInfo]:
    """Return what torch's writers record about where the items lie."""
    return {
        item.index: _StorageInfo(f"__{rank}_0.distcp", number * MIB, MIB)
        for rank, plan in enumerate(final)
        for number, item in enumerate(plan.items)
    }


def _pickled(value: Any) -> bytes:
    """Pickle as torch.distributed does."""
    stream = io.BytesIO()
    pickle.Pickler(stream).dump(value)
    return stream.getvalue()


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    start = time.perf_counter()
    answer = work()
    return answer, time.perf_counter() - start


def _rank_0_rows(ranks: int, measured: Sequence[DcpMem], peer: Torch | None) -> list[Row]:
    """Rank 0's time and memory, from the plans that it gets until its node has the catalog."""
    what, whole = "rank 0: plan and catalog, in all", _sample(m.whole for m in measured)
    if peer is not None:
        at_least = TIMES_BETTER if ranks == COMPARED else None
        time_row = beside_peer(what, whole, Sample((peer.whole,)), at_least=at_least)
    elif ranks >= LIMITED:
        time_row = within(what, whole, SECONDS_LIMIT)
    else:
        time_row = Row(what, dcp_mem=Figure.of(whole))
    peak = max(m.peak for m in measured)
    memory_row = Row("rank 0: memory for that, peak growth", dcp_mem=_bytes(peak))
    if ranks >= LIMITED:
        memory_row = replace(memory_row, target=f"≤ {size(MEMORY_LIMIT)}", met=peak <= MEMORY_LIMIT)
    if peer is not None:
        memory_row = replace(
            memory_row, peer=_bytes(peer.peak), versus_peer=compared(peak, peer.peak, AMOUNT)
        )
    return [time_row, memory_row]


def _other_rows(ranks: int, measured: Sequence[DcpMem], peer: Torch | None) -> list[Row]:
    """What other ranks get, and their time for it; torch sends all metadata to each rank."""
    at_least = TIMES_BETTER if ranks == COMPARED else None
    rows = []
    for who, got in (
        ("a node's leader", [m.leader for m in measured]),
        ("another rank", [m.neighbour for m in measured]),
    ):
        nbytes = None if peer is None else peer.nbytes
        rows.append(_bytes_row(f"{who}: bytes that it gets", got[0].nbytes, nbytes, at_least))
        what, took = f"{who}: time for that", _sample(one.seconds for one in got)
        rows.append(
            Row(what, dcp_mem=Figure.of(took))
            if peer is None
            else beside_peer(what, took, Sample((peer.share_seconds,)), at_least=at_least)
        )
    return rows


def _joins_row(measured: Sequence[DcpMem]) -> Row:
    took = _sample(m.leader_joins for m in measured)
    return Row("a node's leader: plans of all ranks below joined", dcp_mem=Figure.of(took))


def _info_rows(measured: Sequence[DcpMem], peer: Torch | None) -> list[Row]:
    """What a rank sends, and what is made in the background."""
    sent, nbytes, pickled = (
        (None, None, None) if peer is None else (peer.sent, peer.nbytes, peer.pickled)
    )
    rows = [_bytes_row("bytes that a rank sends of its plan", measured[0].sent, sent)]
    shown = [m.shown for m in measured if m.shown is not None]
    if shown:
        what, took = "`.metadata`: catalog read, pickle made", _sample(one.seconds for one in shown)
        rows += [
            _bytes_row("`.metadata`, made in the background: bytes", shown[0].nbytes, nbytes),
            Row(what, dcp_mem=Figure.of(took))
            if pickled is None
            else beside_peer(what, took, Sample((pickled,))),
            Row("`.metadata`: memory, peak growth", dcp_mem=_bytes(max(one.peak for one in shown))),
        ]
    return rows


def _bytes_row(what: str, measured: int, peer: int | None, at_least: float | None = None) -> Row:
    if peer is None:
        return Row(what, dcp_mem=_bytes(measured))
    return Row(
        what,
        dcp_mem=_bytes(measured),
        target=target_beside_peer(at_least, AMOUNT),
        met=None if at_least is None else peer >= at_least * measured,
        peer=_bytes(peer),
        versus_peer=compared(measured, peer, AMOUNT),
    )


def _bytes(count: int) -> Figure:
    return Figure.of(Sample((count,)), BYTES)


def _sample(values: Iterable[float]) -> Sample:
    return Sample(tuple(values))


def _notes(measured: Sequence[DcpMem], peer: Torch | None) -> list[str]:
    steps = {name: _sample(m.steps[name] for m in measured) for name in measured[0].steps}
    first = measured[0]
    notes = [
        f"rank 0: {named(steps)}; it is sent {size(first.received)}",
        f"a node's leader gets {_listed(first.leader)}; another rank {_listed(first.neighbour)}",
    ]
    if peer is not None:
        notes.append(
            f"torch: unpickling {peer.unpickled:.2f} s, create_global_plan {peer.merged:.2f} s, "
            f"pickling the plans {peer.scattered:.2f} s, pickling the metadata {peer.pickled:.2f} s"
        )
    return notes


def _listed(got: Got) -> str:
    return ", ".join(f"{name} {size(nbytes)}" for name, nbytes in got.parts.items())


# -- later plans -------------------------------------------------------------------------------


def _later_part(settings: Settings) -> Part:
    need(settings.tmpfs, RECOGNISED.total_bytes * 5)
    with scratch(settings.tmpfs) as directory:
        later = in_fresh_processes(_measure_later, LaterSpec(directory, settings.repeats))[0]
    plan = "CPU time of OwnPlans.plan(): recognised, and looked up what to copy"
    return Part(
        [
            within(plan, later.planned, LATER_LIMIT),
            within("of that, recognised", later.recognised, LATER_LIMIT),
        ]
    )


def _measure_later(rank: Rank, spec: LaterSpec) -> Later:
    state = trained(RECOGNISED, rank)
    with closing(Saves(state, memory=spec.memory, save=dcp_mem.save)) as saves:
        saves.save()
        session = open_session(saves.writer.settings)
        assert session is not None
        plans = own_plans_of(session)
        context = SaveContext(
            settings=saves.writer.settings,
            session=session,
            ranks=SingleRank(),
            rank=rank.rank,
            scope=names.COLLECTIVE,
            name=saves.newest,
        )
        structure = Structure(state.tree)
        measures: dict[str, Callable[[], float]] = {
            "planned": lambda: _cpu_seconds(
                lambda: isinstance(plans.plan(context, state.tree), Planned)
            ),
            "recognised": lambda: _cpu_seconds(lambda: structure.recognise(state.tree) is not None),
        }
        return Later(**rank.in_turn(measures, repeats=spec.repeats, warm_ups=2))


def _cpu_seconds(work: Callable[[], bool]) -> float:
    """Return the CPU time of `work`, which has to return True."""
    with collector_paused():  # as in a save
        start = time.thread_time()
        is_done = work()
        took = time.thread_time() - start
    assert is_done
    return took
