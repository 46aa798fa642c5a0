"""The values that the stages of a save hand to each other, in the order of the stages."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field, replace
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from dcp_mem.comm import Ranks
from dcp_mem.comm.agreement import known_to_all
from dcp_mem.common.sendable import sendable
from dcp_mem.common.value_class import value_class
from dcp_mem.common.values import SaveInfo, Segment
from dcp_mem.config import Settings
from dcp_mem.errors import DcpMemError
from dcp_mem.format.catalog import Catalog
from dcp_mem.format.catalog_conversion import RankItems
from dcp_mem.format.layout import Layout, align
from dcp_mem.format.manifest import Manifest
from dcp_mem.memory.slot import Slot
from dcp_mem.planning.plain_tensors import Sources
from dcp_mem.planning.state_structure import Structure
from dcp_mem.planning.tensor_choice import TensorRule
from dcp_mem.policy.admission import NodeMemory
from dcp_mem.policy.order import UNNUMBERED, SaveNumber
from dcp_mem.policy.persistence import Persisted
from dcp_mem.policy.redundancy import Redundancy
from dcp_mem.policy.slots import FreeSlot, SlotNeed
from dcp_mem.runtime.frozen import FilledFrozen, FrozenItems, ItemKey
from dcp_mem.runtime.last_saves import GroupKey, PlanKey, SavedPlan
from dcp_mem.runtime.layouts import PlanLayout
from dcp_mem.runtime.session import Session
from dcp_mem.runtime.topology import Topology


@value_class(kw_only=True)
class SaveContext:
    """One rank's part in one save: what all stages need, and none of them changes."""

    settings: Settings
    session: Session  # what this process keeps of the job between saves
    ranks: Ranks
    rank: int  # this rank's number as DCP counts for this call; its segment is named by it
    scope: str  # "" or the rank that saves alone
    name: str
    # What this rank's training loop says of the checkpoint. Rank 0's word counts.
    info: SaveInfo = field(default_factory=SaveInfo)
    frozen: TensorRule | None = None  # tells which tensors are declared frozen; None where none are
    has_copies: bool = False  # whether the state dict is a private copy of the caller's

    @property
    def group(self) -> GroupKey:
        """Key of the ranks that save together."""
        return self.scope, self.ranks.key

    def plan_key(self, plan_id: str) -> PlanKey:
        """Return the key by which the session remembers saves of a plan."""
        return (*self.group, plan_id)

    def redundancy_on(self, topology: Topology) -> Redundancy:
        """Return the redundancy that is wanted, as far as there are nodes for it."""
        return self.settings.redundancy.on(topology.node_count)


# -- plan ------------------------------------------------------------------------------------------


class Items:
    """The items of a plan: their values and indexes, and the catalog that lists them.

    The stages only hand the items on. Of a catalog each rank makes its parts; rank 0 joins them.
    """

    def resolve(self, item: Any) -> Any:
        """Return the tensor to copy, or an io.BytesIO for a byte item."""
        raise AssertionError(f"{item} lies in its slot already")

    def index(self, item: Any) -> MetadataIndex:
        """Return what DCP knows the item by."""
        raise NotImplementedError

    def fingerprint(self, items: Sequence[Any]) -> int:
        """Return a number that is the same for the same names and offsets in the same order."""
        return hash(tuple(items))

    def part(self, rank: int, items: Sequence[Any], layout: Layout) -> Any:
        """Return what a segment of these items is, for the catalog."""
        return RankItems(rank, list(map(self.index, items)), layout)

    def share(self, parts: Sequence[Any]) -> Sequence[Any]:
        """Return some segments' parts, with what is equal in several of them as one object."""
        return parts

    def catalog(self, parts: Sequence[Any]) -> Catalog:
        """Return the catalog of all segments, in their order. Called on rank 0."""
        raise NotImplementedError


TAIL_ROOM = 1 << 20
"""Bytes reserved behind a layout for byte items, whose sizes no plan tells."""

DCP_PLAN = "dcp"
"""Plan id of whatever DCP has planned: it hands the parts of one plan to all ranks."""

STREAMS_PLAN = "streams"
"""Plan id of saves of streams: there is nothing to plan about them."""


@value_class
class Unplanned:
    """A state dict that isn't part of a plan of all ranks yet."""

    why_not: str = ""  # why only DCP's planner can make a plan of it; "" where dcp_mem can
    # what a plan would be made of; None where only DCP's planner can make one
    structure: Structure | None = None


@value_class(kw_only=True)
class Planned:
    """This rank's part of a plan of all ranks, taken apart."""

    items: Items
    tensors: Sequence[Any]  # items that are tensors, in the order of the layout
    objects: Sequence[Any]
    layout: PlanLayout
    nbytes: int  # what the segment will take, as far as plan and last save can tell
    # the tensors themselves, where all of them can be copied as bytes; None where they have to be
    # looked at one by one
    sources: Sources | None = None
    plan_id: str = DCP_PLAN  # which plan of all ranks this is a part of
    other_plan_ids: tuple[str, ...] = ()  # plans that would fit here just as well
    is_new: bool = False  # whether the catalog of the last save by this plan no longer holds, here
    # returns the slot that all of it lies in already; None: it is to be copied
    filled: Callable[[], Filled] | None = None
    # further tensors, which have a segment of their own; None where there are none
    frozen: FrozenItems | None = None

    @property
    def claims(self) -> list[SlotNeed]:
        """The slots that staging claims, in this order."""
        if self.filled is not None:
            return []
        claims = [SlotNeed(self.nbytes + TAIL_ROOM, self.layout.frames)]
        if self.frozen is not None and self.copied_frozen_nbytes:
            claims.insert(0, SlotNeed(self.copied_frozen_nbytes, self.frozen.layout.frames))
        return claims

    @property
    def copied_frozen_nbytes(self) -> int:
        """Bytes of frozen tensors that are copied: 0 where the last segment of them is shared."""
        if self.frozen is None or self.frozen.known is not None:
            return 0
        return self.frozen.layout.layout.nbytes

    @property
    def unreplicated_frozen_nbytes(self) -> int:
        """Bytes of frozen tensors that other nodes have no copies of, as far as this rank knows."""
        if self.frozen is None:
            return 0
        known = self.frozen.known
        return 0 if known is not None and known.is_replicated else self.frozen.layout.layout.nbytes


def frozen_apart(
    context: SaveContext,
    planned: Planned,
    keys: Sequence[ItemKey],
    tensors: Sequence[torch.Tensor],
) -> Planned:
    """Return the same part of a plan with the frozen tensors apart, where there are enough."""
    assert context.frozen is not None
    known, whole, sources = context.session.frozen, planned.layout, planned.sources
    split = known.split(context.frozen, keys, tensors, whole)
    if split is None:
        return planned
    frozen = FrozenItems(
        rows=list(compress(planned.tensors, split.is_frozen)),
        keys=list(compress(keys, split.is_frozen)),
        tensors=list(compress(tensors, split.is_frozen)),
        layout=split.frozen,
        sources=None if sources is None else sources.only(split.is_frozen),
        is_lasting=not context.has_copies,  # those of a copy the next save won't find
    )
    if frozen.is_lasting:
        frozen = replace(frozen, known=known.segment_of(context.group, frozen))
    return replace(
        planned,
        tensors=list(compress(planned.tensors, split.is_other)),
        layout=split.others,
        nbytes=planned.nbytes - whole.layout.nbytes + split.others.layout.nbytes,
        sources=None if sources is None else sources.only(split.is_other),
        frozen=frozen,
    )


def expected_tail(
    context: SaveContext, plan_id: str, objects: Sequence[Any], resolve: Callable[[Any], Any]
) -> int:
    """Return the bytes that the byte items will take, as far as that is worth knowing ahead.

    They are those of the last save. Where there is a memory limit to keep, they are measured: they
    may have grown.

    `resolve`: makes an item's bytes.
    """
    saved = context.session.last_saves.plans.get(context.plan_key(plan_id))
    last = 0
    if saved is not None:
        last = sum(align(nbytes) for _, nbytes in saved.segments.tail[context.ranks.rank])
    if context.settings.memory_limit is None:
        return last
    streams = (resolve(item) for item in objects)
    return max(
        last,
        sum(align(one.getbuffer().nbytes) for one in streams if isinstance(one, io.BytesIO)),
    )


# -- agree -----------------------------------------------------------------------------------------


Proposal = tuple[Any, ...]
"""The coordinator's proposal for a save.

Save id, whether to persist the checkpoint, its time, the generation that the run goes on with (0 to
begin one) and the run's token in one number, and the fields of the manifest's `persisted`, or None.
The fields of SaveInfo follow, and what the manifest has as `replaces`; where both are empty they
are left out of the plain tuple.
"""

_RUNS = 1 << 32


def packed_run(generation: int, run: str) -> int:
    """Return generation and token of a run as one number."""
    return generation * _RUNS + int(run, 16)


def unpacked_run(packed: int) -> tuple[int, str]:
    """Return generation and token of a run."""
    generation, run = divmod(packed, _RUNS)
    return generation, f"{run:08x}"


@sendable
@value_class(kw_only=True)
class RankReport:
    """One rank's report before it stages: its needs, and its objections to the save."""

    name: str
    proposal: Proposal | None = None
    needed: int = 0  # bytes of the slot for this rank's segment
    frozen: int = 0  # bytes of another slot, for frozen tensors that are copied; 0 for none
    # bytes of the slots that other nodes set aside for copies of these; 0 where they have them
    shared: int = 0
    slots: tuple[FreeSlot, ...] = ()  # free slots that this rank could claim, the largest first
    is_written: bool = False  # whether this rank has claimed and filled its own slots already
    # of the rank's node; from the node's leader alone, as what follows, and only at length
    node: NodeMemory | None = None
    exists: bool = False  # whether the checkpoint is there already, and must not be overwritten
    has_too_many: bool = False  # whether something must leave memory before it is staged
    # the greatest number that the rank knows of; of the node's memory, from its leader
    newest: SaveNumber = UNNUMBERED
    plan_id: str = ""
    other_plan_ids: tuple[str, ...] = ()  # plans that would fit here just as well
    why_not: str = ""
    error: str = ""  # what went wrong; "" for nothing


@sendable
class Ballot(NamedTuple):
    """The reports of some ranks, joined; about as small as this however many ranks there are.

    A tuple, which is sent by position: each save sends one.
    """

    name: bytes
    plan_id: str  # "" where the ranks have no plan in common
    is_usual: bool  # whether no rank sees anything against staging at once, but for plans
    newest: int  # the greatest number that a rank knows of, packed
    proposal: Proposal | None
    other_plan_ids: tuple[str, ...] = ()  # plans that fit on every rank as well
    # (rank, why only DCP's planner can plan its state dict); of one rank at most
    why_not: tuple[tuple[int, str], ...] = ()
    # whether some rank still has copies of an older checkpoint under way
    is_replicating: bool = False
    copied_on: tuple[int, ...] = ()  # the first rank that has copied by its plan already

    def join(self, other: Ballot) -> Ballot:
        """Return what two sets of ranks say together."""
        fitting = {self.plan_id, *self.other_plan_ids} & {other.plan_id, *other.other_plan_ids}
        plan_id = self.plan_id if self.plan_id == other.plan_id else ""
        return Ballot(
            name=self.name,
            plan_id=plan_id,
            is_usual=self.name == other.name and self.is_usual and other.is_usual,
            newest=max(self.newest, other.newest),
            proposal=self.proposal or other.proposal,
            other_plan_ids=tuple(sorted(fitting - {plan_id, ""})),
            why_not=tuple(sorted(self.why_not + other.why_not)[:1]),
            is_replicating=self.is_replicating or other.is_replicating,
            copied_on=tuple(sorted(self.copied_on + other.copied_on)[:1]),
        )


def ballot_of(rank: int, report: RankReport, *, has_room: bool, is_replicating: bool) -> Ballot:
    """Return one rank's ballot.

    `is_replicating`: whether it still has copies of an older checkpoint under way.
    """
    return Ballot(
        name=hashlib.sha256(report.name.encode()).digest()[:6],
        plan_id=report.plan_id,
        is_usual=has_room and not (report.error or report.exists),
        newest=report.newest.packed,
        proposal=report.proposal,
        other_plan_ids=report.other_plan_ids,
        why_not=((rank, report.why_not),) if report.why_not else (),
        is_replicating=is_replicating,
        copied_on=(rank,) if report.is_written else (),
    )


@value_class(kw_only=True)
class Agreed:
    """The agreement of all ranks on this save."""

    save_id: str
    created: float  # seconds since the epoch, by the coordinator's clock
    number: SaveNumber  # of the save: its place in the job's order
    run: str
    persist: bool
    topology: Topology
    redundancy: Redundancy  # as far as there are nodes for it
    started: float  # this rank's monotonic clock when the save began
    may_replicate: bool = True  # whether no older checkpoint's replication is in the way
    # what the coordinator's training loop says of the checkpoint
    info: SaveInfo = field(default_factory=SaveInfo)
    replaces: str | None = None
    persisted: Persisted | None = None  # how far the counts of `persist=` are with this save


class NoCommonPlan(Exception):
    """The ranks don't save by the same plan yet, or not any more.

    `why_not`: why the ranks must leave the save to DCP's planner; "" if they need not. `in_common`:
    id of a plan that fits on every rank; "" if there is none. `copied_on`: the first rank that has
    copied by its plan already; none can be found then.
    """

    def __init__(self, why_not: str, in_common: str = "", copied_on: Sequence[int] = ()) -> None:
        super().__init__(why_not, in_common)
        self.why_not, self.in_common, self.copied_on = why_not, in_common, copied_on

    def refusal(self, name: str) -> DcpMemError:
        """Return what all ranks raise where one has copied by its plan already."""
        return known_to_all(
            DcpMemError(
                f"{name} isn't saved: the state dict of some ranks has another structure than that "
                f"of the last save, and that of rank {self.copied_on[0]} hasn't. The next save "
                f"plans anew"
            )
        )


# -- stage and complete ----------------------------------------------------------------------------


@value_class(kw_only=True)
class Filled:
    """A slot that this rank's items have been copied into; not a segment yet."""

    slot: Slot
    layout: PlanLayout
    items: Items
    order: Sequence[Any]  # the items, as they lie in the slot
    tail: tuple[tuple[int, int], ...]  # (offset, bytes) of each item behind the layout
    # another slot, with the frozen items; None where there are none
    frozen: FilledFrozen | None = None

    @property
    def places(self) -> list[tuple[int, int]]:
        """(offset, bytes) of each item in `order`."""
        return [*places_in(self.layout), *self.tail]


def places_in(plan_layout: PlanLayout) -> Iterator[tuple[int, int]]:
    """Yield (offset, bytes) of each item of a layout."""
    layout = plan_layout.layout
    return zip(layout.offsets.tolist(), layout.lengths.tolist(), strict=True)


@value_class(kw_only=True)
class Staged(Filled):
    """This rank's sealed segment, and that of its frozen items."""

    segment: Segment


@value_class
class Completed:
    """A checkpoint that is COMPLETE in the memory of every node, and this rank's part in it."""

    manifest: Manifest
    agreed: Agreed
    staged: Staged
    saved: SavedPlan  # what the next save by this plan may go by
