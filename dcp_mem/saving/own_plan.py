"""Saves by plans of dcp_mem's own (`dcp_mem.save`).

The ranks plan together once, and recognise their state dicts from then on. A warm save exchanges
what every save does (see `agree.py` and `complete.py`), with a plan id in it, and nothing else.
"""

from __future__ import annotations

import copy
import threading
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from dcp_mem.comm.agreement import Attempted, attempt, described, known_to_all
from dcp_mem.common.log import log
from dcp_mem.errors import DcpMemError, RankFailed
from dcp_mem.format.byte_items import stream_of
from dcp_mem.format.catalog import Catalog, SharedCatalog
from dcp_mem.format.frames import QUANTISED, Specs, frame
from dcp_mem.format.torch_names import dtype_named
from dcp_mem.planning.global_plan import WholePlan, merge
from dcp_mem.planning.joint_plan import JointPlan, join_plans, plan_of_rank
from dcp_mem.planning.plain_tensors import SourcesByBlock
from dcp_mem.planning.plan_catalog import WrittenItems, catalog_of_written, share_written
from dcp_mem.planning.plan_columns import ItemKind, LocalPlan, NotDescribable
from dcp_mem.planning.state_structure import Structure
from dcp_mem.runtime.frozen import ItemKey
from dcp_mem.runtime.last_saves import GroupKey, SavedPlan
from dcp_mem.runtime.session import Session
from dcp_mem.saving.frozen import WHY_NOT_WITH_PARITY, Split, warn_without_effect
from dcp_mem.saving.frozen_apart import frozen_apart
from dcp_mem.saving.plan import expected_tail
from dcp_mem.saving.plan_requests import PlanRequest, ToldPlan
from dcp_mem.saving.stage import stage
from dcp_mem.saving.values import (
    Agreed,
    NoCommonPlan,
    Planned,
    SaveContext,
    Staged,
    Unplanned,
)

_PLANS_KEPT = 4
_REQUESTS_KEPT = 8
_Written = tuple[WrittenItems, ...]
"""What a rank has written to each of its segments."""


class OwnPlanItems:
    """The items of a state dict, by a plan of dcp_mem's own: an ItemProvider for one save."""

    def __init__(
        self,
        plans: OwnPlans,
        state: Attempted[Mapping[str, Any]],
        *,
        why_not: str = "",
        to_lowest_rank: bool = False,
    ) -> None:
        """Take what is to be saved.

        Args:
            plans: This rank's plans; a new one is added where none fits.
            state: The state dict, or why there is none.
            why_not: Why only DCP's planner can plan this; "" where dcp_mem may.
            to_lowest_rank: Whether the first rank that holds a chunk writes it; otherwise the bytes
                are balanced.
        """
        self._plans, self._state = plans, state
        self._why_not, self._to_lowest_rank = why_not, to_lowest_rank
        self._is_new = False
        self._wanted = ""
        self._structure: Structure | None = None  # of what `plan` has looked at

    def plan(self, context: SaveContext) -> Planned | Unplanned:
        """Recognise the state dict, or look at its structure."""
        if self._why_not:
            return Unplanned(self._why_not)
        planned = self._plans.plan(
            context, self._state.value, self._wanted, to_lowest_rank=self._to_lowest_rank
        )
        if isinstance(planned, Unplanned):
            self._structure = planned.structure
        else:
            self._structure = _rows(planned).structure
        return planned

    def find_common_plan(self, context: SaveContext, why_not: str, in_common: str) -> bool:
        """Turn to a plan that fits on every rank, or else make one with all ranks.

        Returns:
            False where only DCP's planner can plan this.

        Raises:
            NoCommonPlan: The state dict differs each time it is looked at.
        """
        if why_not:
            return False
        if self._is_new:
            raise NoCommonPlan("a structure that is another each time it is looked at") from None
        self._wanted = "" if self._wanted else in_common
        if not self._wanted:
            assert self._structure is not None
            self._plans.plan_together(context, self._structure, to_lowest_rank=self._to_lowest_rank)
            self._is_new = True
        return True

    def stage(self, context: SaveContext, agreed: Agreed, planned: Planned) -> Staged:
        """Copy this rank's part of the state dict into a slot."""
        return stage(context, agreed, planned)

    def has_changed(self, saved: SavedPlan | None) -> bool:
        """Return whether the plan was made for this save."""
        return self._is_new

    def catalog_source(self, planned: Planned) -> CatalogOfOwnPlan:
        """Return what makes a catalog of the global plan and the ranks' rows."""
        return catalog_source_of(planned)

    def settle(self, saved: SavedPlan) -> None:
        """Do nothing: the plan is kept already."""


@dataclass(eq=False, kw_only=True)
class _Plan:
    """One rank's part of a plan that all ranks made together.

    Attributes:
        plan_id: The same on all ranks.
        group: Which ranks.
        structure: Of the state dict; recognises others like it.
        tensors: Rows of the local plan that this rank writes, in order; like `objects`.
        objects: Rows that are byte items.
        is_written: Of each tensor of the local plan, whether it is among `tensors`.
        specs: Dtypes and shapes of `tensors`, and of whatever is recognised.
        is_strided: Whether all tensors are.
        is_complex: Whether any tensor is.
        whole: The plan of all ranks, on the coordinator.
        to_lowest_rank: Whether the first rank that holds a chunk writes it.
        split: Which of `tensors` were frozen at the last save; None where none were.
        told: The request that another process has answered with this plan; None for plans of this
            process's saves.
        tail_nbytes: What the last copy's byte items took, where another process saved it.
    """

    plan_id: str
    group: GroupKey
    structure: Structure
    tensors: Sequence[int]
    objects: Sequence[int]
    is_written: Sequence[bool]
    specs: Specs
    is_strided: bool
    is_complex: bool
    whole: WholePlan | None
    to_lowest_rank: bool
    split: Split | None = None
    told: PlanRequest | None = None
    tail_nbytes: int = 0

    @cached_property
    def keys(self) -> Sequence[ItemKey]:
        """Name and offset of each of `tensors`."""
        local = self.structure.plan
        return [
            (local.names[name], tuple(offset[:dimensions]))
            for name, offset, dimensions in zip(
                local.name[self.tensors].tolist(),
                local.offset[self.tensors].tolist(),
                local.dimensions[self.tensors].tolist(),
                strict=True,
            )
        ]


class OwnPlans:
    """One rank's part of the last few plans that ranks made together; kept like the session.

    Any thread may recognise a state dict (`plan`); plans are made in a save's turn.
    """

    def __init__(self) -> None:
        self._plans: OrderedDict[str, _Plan] = OrderedDict()
        self._guard = threading.Lock()  # not held while state dicts are looked at, or planned
        self._requests: deque[tuple[GroupKey, PlanRequest]] = deque(maxlen=_REQUESTS_KEPT)
        self._told: dict[str, list[PlanRequest]] = {}

    def plan(
        self,
        context: SaveContext,
        state: Mapping[str, Any],
        wanted: str = "",
        *,
        to_lowest_rank: bool = False,
    ) -> Planned | Unplanned:
        """Return this rank's part of saving a state dict, by a plan that fits it, if there is one.

        Args:
            context: Of the save.
            state: The state dict.
            wanted: Id of the plan to take if it fits; the last one otherwise.
            to_lowest_rank: As `plan_together` was told.
        """
        planned = self.recognised(context, state, wanted, to_lowest_rank=to_lowest_rank)
        if planned is not None:
            return planned
        try:
            structure = Structure(state)
            _check_dtypes(structure)
        except NotDescribable as reason:
            return Unplanned(str(reason))
        for plan in self._like(context.group, to_lowest_rank)[::-1]:
            if plan.structure.plan.is_same(structure.plan):
                # What differs doesn't count: the type of a byte item, say.
                self._replace(plan.structure, structure)
                planned = self._planned(context, plan, state)
                return planned or Unplanned(structure=structure)
        return Unplanned(structure=structure)

    def plan_together(
        self, context: SaveContext, structure: Structure, *, to_lowest_rank: bool = False
    ) -> None:
        """Make one plan of all ranks' state dicts.

        1. Join the local plans on their way up the tree.
        2. Rank 0 merges them: that settles which rank writes what.
        3. Scatter which rows each rank writes, or why the plans don't fit together.

        Args:
            context: This rank's part in the save; its `ranks` make the plan.
            structure: Of this rank's state dict, as `plan` has found it.
            to_lowest_rank: Whether the first rank that holds a chunk writes it; rank 0's word
                counts.

        Raises:
            RankFailed: The local plans don't fit together; on all ranks.
        """
        started = time.monotonic()
        structure = self._known(context, structure, to_lowest_rank)
        plan_id, mask, whole = self._merge_on_rank_0(
            context, structure.plan, to_lowest_rank=to_lowest_rank
        )
        plan = _plan_of(plan_id, context.group, structure, mask, whole, to_lowest_rank)
        self._keep(plan, context.session)
        seconds = time.monotonic() - started
        log.info("planned %s with %d ranks in %.2f s", context.name, context.ranks.size, seconds)

    def _merge_on_rank_0(
        self, context: SaveContext, part: LocalPlan | _Refusal, *, to_lowest_rank: bool
    ) -> tuple[str, bytes, WholePlan | None]:
        """Return the plan's id, which rows this rank writes, and on rank 0 the whole plan."""
        ranks = context.ranks
        joined = ranks.reduce(_part_of_joint_plan(ranks.rank, part), _joined)
        whole: WholePlan | None = None
        parts: Sequence[tuple[str, bytes, str]] = ()
        if ranks.rank == 0:
            merged = attempt(lambda: _merged(joined, to_lowest_rank))
            if merged.error is None:
                whole, parts = merged.value
            else:
                parts = [("", b"", described(merged.error))] * ranks.size
        plan_id, mask, error = ranks.scatter(parts)
        if error:
            raise known_to_all(RankFailed(f"planning {context.name}", [(0, error)]))
        return plan_id, mask, whole

    def recognised(
        self,
        context: SaveContext,
        state: Mapping[str, Any],
        wanted: str = "",
        *,
        to_lowest_rank: bool = False,
    ) -> Planned | None:
        """Return this rank's part of saving a state dict by a plan that fits it.

        Args:
            context: Of the save.
            state: The state dict.
            wanted: Id of the plan to take if it fits; the last one otherwise.
            to_lowest_rank: As `plan_together` was told.

        Returns:
            None where no plan fits.
        """
        plans = self._like(context.group, to_lowest_rank)[::-1]
        for plan in sorted(plans, key=lambda plan: plan.plan_id != wanted):
            planned = self._planned(context, plan, state)
            if planned is not None:
                return planned
        return None

    def forget(self, plan_id: str) -> None:
        """Forget a plan, so that the next save plans anew.

        Args:
            plan_id: Of the plan.
        """
        with self._guard:
            self._plans.pop(plan_id, None)
            self._withdraw(plan_id)

    # -- plans that another process makes ----------------------------------------------------------

    def request(self, context: SaveContext) -> PlanRequest:
        """Return a request for the plan of a save that another process makes.

        Args:
            context: Of the save, as far as this process knows it.
        """
        request = PlanRequest()
        with self._guard:
            self._requests.append((context.group, request))
        return request

    def learn(self, context: SaveContext, state: Mapping[str, Any]) -> bool:
        """Keep a plan that another process has made of a state like this one, if it has come.

        Args:
            context: As given to `request`.
            state: The state dict.
        """
        with self._guard:
            asked = [request for group, request in self._requests if group == context.group]
        told = [(request, one) for request in asked if (one := request.answered) is not None]
        if not told:
            return False
        try:
            structure = Structure(state)
        except (NotDescribable, ValueError):  # raised where the ranks plan
            return False
        for request, one in told[::-1]:
            if one.local.is_same(structure.plan):
                plan = _plan_of(
                    one.plan_id, context.group, structure, one.mask, None, one.to_lowest_rank
                )
                plan.told = request
                self._keep(plan, context.session)
                with self._guard:  # what others ask for the same plan isn't needed any more
                    same = {request for request, other in told if other.plan_id == one.plan_id}
                    kept = [asked for asked in self._requests if asked[1] not in same]
                    self._requests = deque(kept, maxlen=_REQUESTS_KEPT)
                return True
        return False

    def tell(self, plan_id: str, request: PlanRequest, session: Session) -> None:
        """Answer the request of another process, where that can copy by the plan.

        Args:
            plan_id: Of the plan.
            request: That came with the state dict.
            session: This process's session of the job.
        """
        with self._guard:
            plan = self._plans.get(plan_id)
        if plan is None or not session.layouts.of(plan.specs).is_plain:
            return
        written = np.zeros(len(plan.structure.plan), bool)
        written[[*plan.tensors, *plan.objects]] = True
        mask = np.packbits(written).tobytes()
        with self._guard:
            if plan_id in self._plans:
                told = self._told.setdefault(plan_id, [])
                told.append(request)
                request.answer(ToldPlan(plan_id, plan.structure.plan, mask, plan.to_lowest_rank))
                while len(told) > _REQUESTS_KEPT:
                    told.pop(0).withdraw()

    def note_tail(self, plan_id: str, nbytes: int) -> None:
        """Take note of what a copy's byte items took, for the next one's slot.

        Args:
            plan_id: Of the plan that was copied by.
            nbytes: Of all byte items.
        """
        with self._guard:
            plan = self._plans.get(plan_id)
            if plan is not None:
                plan.tail_nbytes = nbytes

    def written_by(self, context: SaveContext, plan_id: str) -> Planned | None:
        """Return this rank's part of saving what another process has written by a plan.

        Args:
            context: Of the save.
            plan_id: Of the plan.

        Returns:
            None where these ranks don't have that plan.
        """
        plan = next((one for one in self._like(context.group) if one.plan_id == plan_id), None)
        if plan is None:
            return None
        with self._guard:
            if plan_id in self._plans:
                self._plans.move_to_end(plan_id)
        layout = context.session.layouts.of(plan.specs)
        return Planned(
            items=_RowItems(plan, plan.structure, ()),
            tensors=plan.tensors,
            objects=plan.objects,
            layout=layout,
            nbytes=layout.layout.nbytes,
            plan_id=plan_id,
            group=context.group,
        )

    def _withdraw(self, plan_id: str) -> None:
        """Have no other process copy by a plan any more."""
        for request in self._told.pop(plan_id, ()):
            request.withdraw()

    # -- keeping them ------------------------------------------------------------------------------

    def refuse_to_plan(self, context: SaveContext, why: str) -> None:
        """Have `plan_together` fail on the other ranks, which call it now.

        Args:
            context: This rank's part in the save.
            why: For the other ranks.

        Raises:
            RankFailed: The plan has failed.
        """
        refusal = _Refusal(context.ranks.rank, why)
        self._merge_on_rank_0(context, refusal, to_lowest_rank=False)

    def _like(self, group: GroupKey, to_lowest_rank: bool | None = None) -> list[_Plan]:
        """Return the plans of a group of ranks, the last used one last."""
        with self._guard:
            return [
                plan
                for plan in self._plans.values()
                if plan.group == group
                and to_lowest_rank in (None, plan.to_lowest_rank)
                and (plan.told is None or plan.told.is_answered)
            ]

    def _known(self, context: SaveContext, structure: Structure, to_lowest_rank: bool) -> Structure:
        """Return a known plan's structure, if it is the same; else this one."""
        known = (plan.structure for plan in self._like(context.group, to_lowest_rank))
        return next((one for one in known if one.plan.is_same(structure.plan)), structure)

    def _replace(self, known: Structure, structure: Structure) -> None:
        with self._guard:
            for plan in self._plans.values():
                if plan.structure is known:
                    plan.structure = structure

    def _keep(self, made: _Plan, session: Session) -> None:
        """Keep a plan, and drop the oldest ones."""
        with self._guard:
            self._plans[made.plan_id] = made
            while len(self._plans) > _PLANS_KEPT:
                plan_id, plan = self._plans.popitem(last=False)
                self._withdraw(plan_id)
                session.last_saves.plans.pop((*plan.group, plan_id), None)

    def _planned(
        self, context: SaveContext, plan: _Plan, state: Mapping[str, Any]
    ) -> Planned | None:
        structure = plan.structure  # another thread may replace it by one that is the same
        planned = _planned(context, plan, structure, state)
        if planned is None:
            return None
        with self._guard:
            if plan.plan_id in self._plans:
                self._plans.move_to_end(plan.plan_id)
        others = [
            other.plan_id
            for other in self._like(plan.group, plan.to_lowest_rank)
            if other is not plan and other.structure is structure
        ]
        return replace(planned, other_plan_ids=tuple(others))


@dataclass(frozen=True, slots=True)
class _Refusal:
    """Stands for the plan of a rank that can't have another one."""

    rank: int
    why: str


def _part_of_joint_plan(rank: int, part: LocalPlan | _Refusal) -> JointPlan | _Refusal:
    if isinstance(part, _Refusal):
        return part
    made = attempt(lambda: plan_of_rank(rank, part))
    return made.value if made.error is None else _Refusal(rank, described(made.error))


def _joined(parts: Sequence[JointPlan | _Refusal]) -> JointPlan | _Refusal:
    """Return the plans joined, or the refusal of the first rank that refuses."""
    refusals = [one for one in parts if isinstance(one, _Refusal)]
    if refusals:
        return min(refusals, key=lambda one: one.rank)
    return join_plans([one for one in parts if isinstance(one, JointPlan)])


_own_plans: WeakKeyDictionary[Session, OwnPlans] = WeakKeyDictionary()
_guard = threading.Lock()


def own_plans_of(session: Session) -> OwnPlans:
    """Return the plans that belong to this process's session of a job.

    Args:
        session: What this process keeps of the job.
    """
    with _guard:
        return _own_plans.setdefault(session, OwnPlans())


def _merged(
    joined: JointPlan | _Refusal | None, to_lowest_rank: bool
) -> tuple[WholePlan, Sequence[tuple[str, bytes, str]]]:
    """Merge all ranks' plans; return the global plan, and for each rank which rows it writes."""
    assert joined is not None
    if isinstance(joined, _Refusal):
        raise DcpMemError(joined.why)
    whole, plan_id = merge(joined, to_lowest_rank=to_lowest_rank), uuid.uuid4().hex[:12]
    return whole, [(plan_id, mask, "") for mask in whole.masks()]


def _check_dtypes(structure: Structure) -> None:
    """Raise NotDescribable for a dtype that torch can't save; its planner has the error to raise.

    A plan with such a dtype would fail where it is compared with later state dicts.
    """
    for dtype in {dtype_named(one.dtype) for one in structure.plan.table} - QUANTISED:
        if why_not := _why_not_saved(dtype):
            raise NotDescribable(f"a tensor of {dtype}, which torch can't save: {why_not}")


@cache
def _why_not_saved(dtype: torch.dtype) -> str:
    try:
        frame(dtype, (0,))
    except Exception as error:
        return described(error)
    return ""


def _plan_of(
    plan_id: str,
    group: GroupKey,
    structure: Structure,
    mask: bytes,
    whole: WholePlan | None,
    to_lowest_rank: bool,
) -> _Plan:
    local = structure.plan
    written = np.unpackbits(np.frombuffer(mask, np.uint8), count=len(local)).astype(bool)
    is_object = local.kind == ItemKind.OBJECT
    tensors = np.flatnonzero(written & ~is_object)
    shapes = [
        torch.Size(extent[:dimensions])
        for extent, dimensions in zip(
            local.extent[tensors].tolist(), local.dimensions[tensors].tolist(), strict=True
        )
    ]
    properties = [local.table[number] for number in local.properties[tensors].tolist()]
    dtypes = [dtype_named(one.dtype) for one in properties]
    return _Plan(
        plan_id=plan_id,
        group=group,
        structure=structure,
        tensors=tensors.tolist(),
        objects=np.flatnonzero(written & is_object).tolist(),
        is_written=written[~is_object].tolist(),
        specs=Specs(dtypes, shapes),
        is_strided={one.layout for one in properties} <= {str(torch.strided)},
        is_complex=any(dtype.is_complex for dtype in set(dtypes)),
        whole=whole,
        to_lowest_rank=to_lowest_rank,
    )


def _planned(
    context: SaveContext, plan: _Plan, structure: Structure, state: Mapping[str, Any]
) -> Planned | None:
    """Return this rank's part of a plan; None if the state dict doesn't fit it."""
    layout = context.session.layouts.of(plan.specs)
    sources = None
    if layout.is_plain and plan.is_strided:
        sources = SourcesByBlock(plan.is_written, plan.is_complex)
    leaves = structure.recognise(state, sources.look_at if sources is not None else None)
    if leaves is None:
        return None
    items = _RowItems(plan, structure, structure.item_values(leaves))
    tail_nbytes = max(
        expected_tail(context, plan.plan_id, plan.objects, items.resolve), plan.tail_nbytes
    )
    planned = Planned(
        items=items,
        tensors=plan.tensors,
        objects=plan.objects,
        layout=layout,
        nbytes=layout.layout.nbytes + tail_nbytes,
        sources=sources.found if sources is not None else None,
        plan_id=plan.plan_id,
        group=context.group,
    )
    return planned if context.frozen is None else _without_frozen(context, plan, planned, items)


def _without_frozen(
    context: SaveContext, plan: _Plan, planned: Planned, items: _RowItems
) -> Planned:
    """Return the same part of a plan with the frozen tensors apart."""
    if context.settings.redundancy.parity:
        warn_without_effect(context.session, WHY_NOT_WITH_PARITY)
        return planned
    tensors = items.tensors(planned.tensors)
    # Another thread may set its own at once: each is right.
    planned, plan.split = frozen_apart(context, planned, plan.keys, tensors, plan.split)
    return planned


def _rows(planned: Planned) -> _RowItems:
    items = planned.items
    assert isinstance(items, _RowItems)
    return items


def catalog_source_of(planned: Planned) -> CatalogOfOwnPlan:
    """Return what makes a catalog of a plan of dcp_mem's own.

    Args:
        planned: This rank's part of the plan.
    """
    return CatalogOfOwnPlan(_rows(planned).whole)


class CatalogOfOwnPlan:
    """A catalog of the global plan, and of what each rank says where its rows lie.

    Args:
        whole: The global plan on rank 0; None on the other ranks.
    """

    def __init__(self, whole: WholePlan | None) -> None:
        self._whole = whole

    def part(self, rank: int, staged: Staged) -> _Written:
        """Return the rows that this rank has written to each segment, and where they lie."""
        first = WrittenItems(rank, np.array(staged.order, np.int64), staged.layout.described)
        if staged.frozen is None:
            return (first,)
        items = staged.frozen.filled.items
        rows = np.array(items.rows, np.int64)
        return first, WrittenItems(staged.frozen.segment.rank, rows, items.layout.described)

    def share(self, parts: Sequence[_Written]) -> Sequence[_Written]:
        """Return the parts, with equal layouts as one object."""
        shared = iter(share_written([one for part in parts for one in part]))
        return [tuple(islice(shared, len(part))) for part in parts]

    def catalog(self, parts: Sequence[_Written]) -> Catalog | SharedCatalog:
        """Join the parts with the global plan."""
        assert self._whole is not None
        second = [one for part in parts for one in part[1:]]
        return catalog_of_written(self._whole, [*(part[0] for part in parts), *second])


class _RowItems:
    """Items that are rows of the local plan, and stand for parts of the state dict's leaves.

    Attributes:
        structure: Of the state dict.
        whole: The plan of all ranks, on the coordinator.
    """

    def __init__(self, plan: _Plan, structure: Structure, parts: Sequence[Any]) -> None:
        self.structure, self.whole = structure, plan.whole
        self._plan_id, self._parts = plan.plan_id, parts
        self._local = structure.plan

    def without_values(self) -> _RowItems:
        """Return the same items without the values that they stand for."""
        items = copy.copy(self)
        items._parts = ()
        return items

    def resolve(self, item: int) -> Any:
        part = self._parts[item]
        return part if isinstance(part, torch.Tensor) else stream_of(part)

    def tensors(self, items: Sequence[int]) -> list[torch.Tensor]:
        """Return what items that are tensors stand for."""
        return list(map(self._parts.__getitem__, items))

    def index(self, item: int) -> MetadataIndex:
        local = self._local
        fqn = local.names[local.name[item]]
        if local.kind[item] == ItemKind.OBJECT:
            return MetadataIndex(fqn)
        return MetadataIndex(fqn, torch.Size(local.offset[item, : local.dimensions[item]].tolist()))

    def fingerprint(self, items: Sequence[int]) -> int:
        return hash((self._plan_id, len(items)))
