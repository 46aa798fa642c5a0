"""Saves by plans of dcp_mem's own (`dcp_mem.save`).

The ranks plan together once, and recognise their state dicts from then on. A warm save exchanges
what every save does (see `agree.py` and `complete.py`), with a plan id in it, and nothing else.
"""

from __future__ import annotations

import io
import time
import uuid
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from dcp_mem.comm.agreement import Attempted, attempt, described
from dcp_mem.common.log import log
from dcp_mem.errors import RankFailed
from dcp_mem.format.catalog import Catalog
from dcp_mem.format.frames import Specs
from dcp_mem.format.torch_names import dtype_named
from dcp_mem.planning.global_plan import GlobalPlan, merge
from dcp_mem.planning.plain_tensors import Addresses
from dcp_mem.planning.plan_catalog import WrittenItems, catalog_of_plan, share_written
from dcp_mem.planning.plan_columns import ItemKind, NotDescribable, share_columns
from dcp_mem.planning.state_structure import Structure
from dcp_mem.runtime.last_saves import GroupKey, SavedPlan
from dcp_mem.runtime.session import Session
from dcp_mem.saving.plan import expected_tail
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


class OwnPlanItems:
    """The items of a state dict, by a plan of dcp_mem's own: an ItemProvider for one save."""

    def __init__(self, plans: OwnPlans, state: Attempted[Mapping[str, Any]]) -> None:
        """Take what is to be saved.

        Args:
            plans: This rank's plans; a new one is added where none fits.
            state: The state dict, or why there is none.
        """
        self._plans, self._state = plans, state
        self._is_new = False
        self._wanted = ""

    def plan(self, context: SaveContext) -> Planned | Unplanned:
        """Recognise the state dict, or look at its structure."""
        return self._plans.plan(context, self._state.value, self._wanted)

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
            self._plans.plan_together(context)
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
        return self._plans.catalog_source(planned.plan_id)

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
    whole: GlobalPlan | None


class OwnPlans:
    """One rank's part of the last few plans that ranks made together; kept like the session."""

    def __init__(self) -> None:
        self._plans: OrderedDict[str, _Plan] = OrderedDict()
        self._structure: Structure | None = None  # of what `plan` looked at last

    def plan(
        self, context: SaveContext, state: Mapping[str, Any], wanted: str = ""
    ) -> Planned | Unplanned:
        """Return this rank's part of saving a state dict, by a plan that fits it, if there is one.

        Args:
            context: Of the save.
            state: The state dict.
            wanted: Id of the plan to take if it fits; the last one otherwise.
        """
        plans = [plan for plan in reversed(self._plans.values()) if plan.group == context.group]
        for plan in sorted(plans, key=lambda plan: plan.plan_id != wanted):
            planned = self._planned(context, plan, state)
            if planned is not None:
                return planned
        try:
            structure = self._structure = Structure(state)
        except NotDescribable as reason:
            return Unplanned(str(reason))
        for plan in plans:
            if plan.structure.plan.is_same(structure.plan):
                # What differs doesn't count: the type of a byte item, say.
                self._replace(plan.structure, structure)
                return self._planned(context, plan, state) or Unplanned()
        return Unplanned()

    def plan_together(self, context: SaveContext) -> None:
        """Make one plan of what `plan` looked at last on all ranks.

        1. Gather the local plans on rank 0.
        2. Rank 0 merges them: that settles which rank writes what.
        3. Scatter which rows each rank writes, or why the plans don't fit together.

        Args:
            context: This rank's part in the save; its `ranks` make the plan.

        Raises:
            RankFailed: The local plans don't fit together; on all ranks.
        """
        started = time.monotonic()
        ranks, structure = context.ranks, self._own_structure(context)
        gathered = ranks.gather(structure.plan, share_columns)
        whole: GlobalPlan | None = None
        parts: Sequence[tuple[str, bytes, str]] = ()
        if ranks.rank == 0:
            merged = attempt(lambda: _merged(gathered))
            if merged.error is None:
                whole, parts = merged.value
            else:
                parts = [("", b"", described(merged.error))] * len(gathered)
        plan_id, mask, error = ranks.scatter(parts)
        if error:
            raise RankFailed(f"planning {context.name}", [(0, error)])
        self._plans[plan_id] = _plan_of(plan_id, context.group, structure, mask, whole)
        self._drop_oldest(context.session)
        seconds = time.monotonic() - started
        log.info("planned %s with %d ranks in %.2f s", context.name, ranks.size, seconds)

    def catalog_source(self, plan_id: str) -> CatalogOfOwnPlan:
        """Return what makes the catalog of a plan.

        Args:
            plan_id: Of a plan that is kept here.
        """
        return CatalogOfOwnPlan(self._plans[plan_id].whole)

    def _own_structure(self, context: SaveContext) -> Structure:
        """Return the structure looked at last; a known plan's, if it is the same."""
        structure = self._structure
        assert structure is not None
        known = (plan.structure for plan in self._plans.values() if plan.group == context.group)
        return next((one for one in known if one.plan.is_same(structure.plan)), structure)

    def _replace(self, known: Structure, structure: Structure) -> None:
        for plan in self._plans.values():
            if plan.structure is known:
                plan.structure = structure

    def _drop_oldest(self, session: Session) -> None:
        while len(self._plans) > _PLANS_KEPT:
            plan_id, plan = self._plans.popitem(last=False)
            session.last_saves.plans.pop((*plan.group, plan_id), None)

    def _planned(
        self, context: SaveContext, plan: _Plan, state: Mapping[str, Any]
    ) -> Planned | None:
        planned = _planned(context, plan, state)
        if planned is None:
            return None
        self._plans.move_to_end(plan.plan_id)
        self._structure = plan.structure
        others = [
            other.plan_id
            for other in self._plans.values()
            if other is not plan and other.group == plan.group and other.structure is plan.structure
        ]
        return replace(planned, other_plan_ids=tuple(others))


_own_plans: WeakKeyDictionary[Session, OwnPlans] = WeakKeyDictionary()


def own_plans_of(session: Session) -> OwnPlans:
    """Return the plans that belong to this process's session of a job.

    Args:
        session: What this process keeps of the job.
    """
    plans = _own_plans.get(session)
    if plans is None:
        plans = _own_plans[session] = OwnPlans()
    return plans


def _merged(plans: Sequence[Any]) -> tuple[GlobalPlan, Sequence[tuple[str, bytes, str]]]:
    """Merge all ranks' plans; return the global plan, and for each rank which rows it writes."""
    whole, plan_id = merge(plans), uuid.uuid4().hex[:16]
    return whole, [
        (plan_id, _mask(len(plan), whole.rows_of(rank)), "") for rank, plan in enumerate(plans)
    ]


def _mask(count: int, rows: Any) -> bytes:
    """Return these rows among so many, as bits."""
    mask = np.zeros(count, bool)
    mask[rows] = True
    return np.packbits(mask).tobytes()


def _plan_of(
    plan_id: str,
    group: GroupKey,
    structure: Structure,
    mask: bytes,
    whole: GlobalPlan | None,
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
    )


def _planned(context: SaveContext, plan: _Plan, state: Mapping[str, Any]) -> Planned | None:
    """Return this rank's part of a plan; None if the state dict doesn't fit it."""
    layout = context.session.layouts.of(plan.specs)
    addresses = (
        Addresses(plan.is_written, plan.is_complex) if layout.is_plain and plan.is_strided else None
    )
    leaves = plan.structure.recognise(state, addresses.look_at if addresses is not None else None)
    if leaves is None:
        return None
    items = _RowItems(plan, plan.structure.item_values(leaves))
    tail_nbytes = expected_tail(context, plan.plan_id, plan.objects, items.resolve)
    return Planned(
        items=items,
        tensors=plan.tensors,
        objects=plan.objects,
        layout=layout,
        nbytes=layout.layout.nbytes + tail_nbytes,
        sources=addresses.found if addresses is not None else None,
        plan_id=plan.plan_id,
    )


class CatalogOfOwnPlan:
    """A catalog of the global plan, and of what each rank says where its rows lie.

    Args:
        whole: The global plan on rank 0; None on the other ranks.
    """

    def __init__(self, whole: GlobalPlan | None) -> None:
        self._whole = whole

    def part(self, rank: int, staged: Staged) -> WrittenItems:
        """Return the rows that this rank has written, and where they lie."""
        return WrittenItems(rank, np.array(staged.order, np.int64), staged.layout.described)

    def share(self, parts: Sequence[WrittenItems]) -> Sequence[WrittenItems]:
        """Return the parts, with equal layouts as one object."""
        return share_written(parts)

    def catalog(self, parts: Sequence[WrittenItems]) -> Catalog:
        """Join the parts with the global plan."""
        assert self._whole is not None
        return catalog_of_plan(self._whole, parts)


class _RowItems:
    """Items that are rows of the local plan, and stand for parts of the state dict's leaves."""

    def __init__(self, plan: _Plan, parts: Sequence[Any]) -> None:
        self._plan, self._parts = plan, parts
        self._local = plan.structure.plan

    def resolve(self, item: int) -> Any:
        part = self._parts[item]
        if self._local.kind[item] == ItemKind.OBJECT:
            stream = io.BytesIO()
            torch.save(part, stream)
            return stream
        return part

    def index(self, item: int) -> MetadataIndex:
        local = self._local
        fqn = local.names[local.name[item]]
        if local.kind[item] == ItemKind.OBJECT:
            return MetadataIndex(fqn)
        return MetadataIndex(fqn, torch.Size(local.offset[item, : local.dimensions[item]].tolist()))

    def fingerprint(self, items: Sequence[int]) -> int:
        return hash((self._plan.plan_id, len(items)))
