"""Saves by plans of dcp_mem's own (`dcp_mem.save`), and the last few of these plans.

The ranks plan together once, and recognise their state dicts from then on. A warm save exchanges
what every save does (see `agree.py` and `complete.py`), with a plan id in it, and nothing else.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch

from dcp_mem.comm.agreement import Attempted, attempt, described, known_to_all
from dcp_mem.common.log import log
from dcp_mem.common.sendable import sendable
from dcp_mem.errors import DcpMemError, RankFailed
from dcp_mem.format.frames import QUANTISED, frame
from dcp_mem.format.torch_names import dtype_named
from dcp_mem.planning.global_plan import GlobalPlan, merge
from dcp_mem.planning.joint_plan import JointPlan, join_plans, plan_of_rank
from dcp_mem.planning.plan_columns import LocalPlan, NotDescribable
from dcp_mem.planning.state_structure import Structure
from dcp_mem.runtime.last_saves import GroupKey
from dcp_mem.runtime.session import Session
from dcp_mem.saving.first_save import name_differing
from dcp_mem.saving.own_plan import (
    OwnPlan,
    plan_of,
    planned_by,
    rows_of,
)
from dcp_mem.saving.values import NoCommonPlan, Planned, SaveContext, Unplanned

_PLANS_KEPT = 4


class OwnPlanItems:
    """The items of a state dict, by a plan of dcp_mem's own, for one save."""

    def __init__(
        self,
        plans: OwnPlans,
        state: Attempted[Mapping[str, Any]],
        *,
        why_not: str = "",
        to_lowest_rank: bool = False,
    ) -> None:
        """Take what is to be saved.

        `plans`: this rank's plans; a new one is added where none fits. `why_not`: why only DCP's
        planner can plan this; "" where dcp_mem may. `to_lowest_rank`: whether the first rank that
        holds a chunk writes it; otherwise the bytes are balanced.
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
            return planned
        self._structure = rows_of(planned).structure
        return replace(planned, is_new=self._is_new)

    def find_common_plan(self, context: SaveContext, why_not: str, in_common: str) -> bool:
        """Turn to a plan that fits on every rank, or else make one with all ranks.

        Returns False where only DCP's planner can plan this. Raises NoCommonPlan.
        """
        if why_not:
            return False
        if self._is_new:
            why = "a structure that is another each time it is looked at"
            raise known_to_all(NoCommonPlan(why)) from None
        self._wanted = "" if self._wanted else in_common
        if not self._wanted:
            assert self._structure is not None
            self._plans.plan_together(context, self._structure, to_lowest_rank=self._to_lowest_rank)
            name_differing(context.ranks, self._structure, self._state.value)
            self._is_new = True
        return True


class OwnPlans:
    """One rank's part of the last few plans that ranks made together; kept like the session.

    Any thread may recognise a state dict (`plan`); plans are made in a save's turn.
    """

    def __init__(self) -> None:
        self._plans: OrderedDict[str, OwnPlan] = OrderedDict()
        self._guard = threading.Lock()  # not held while state dicts are looked at, or planned

    def plan(
        self,
        context: SaveContext,
        state: Mapping[str, Any],
        wanted: str = "",
        *,
        to_lowest_rank: bool = False,
    ) -> Planned | Unplanned:
        """Return this rank's part of saving a state dict, by a plan that fits it, if there is one.

        `wanted`: id of the plan to take if it fits; the last one otherwise.
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

        `context`: this rank's part in the save; its `ranks` make the plan. `to_lowest_rank`:
        whether the first rank that holds a chunk writes it; rank 0's word counts. Raises
        RankFailed.
        """
        started = time.monotonic()
        structure = self._known(context, structure, to_lowest_rank)
        plan_id, mask, whole = self._merge_on_rank_0(
            context, structure.plan, to_lowest_rank=to_lowest_rank
        )
        plan = plan_of(plan_id, context.group, structure, mask, whole, to_lowest_rank)
        self._keep(plan, context.session)
        seconds = time.monotonic() - started
        log.info("planned %s with %d ranks in %.2f s", context.name, context.ranks.size, seconds)

    def _merge_on_rank_0(
        self, context: SaveContext, part: LocalPlan | _Refusal, *, to_lowest_rank: bool
    ) -> tuple[str, bytes, GlobalPlan | None]:
        """Return the plan's id, which rows this rank writes, and on rank 0 the whole plan."""
        ranks = context.ranks
        joined = ranks.reduce(_part_of_joint_plan(ranks.rank, part), _joined)
        whole: GlobalPlan | None = None
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

        `wanted`: id of the plan to take if it fits; the last one otherwise. Returns None where no
        plan fits.
        """
        plans = self._like(context.group, to_lowest_rank)[::-1]
        for plan in sorted(plans, key=lambda plan: plan.plan_id != wanted):
            planned = self._planned(context, plan, state)
            if planned is not None:
                return planned
        return None

    def forget(self, plan_id: str) -> None:
        """Forget a plan, so that the next save plans anew."""
        with self._guard:
            self._plans.pop(plan_id, None)

    def refuse_to_plan(self, context: SaveContext, why: str) -> None:
        """Have `plan_together` fail on the other ranks, which call it now.

        Raises RankFailed.
        """
        refusal = _Refusal(context.ranks.rank, why)
        self._merge_on_rank_0(context, refusal, to_lowest_rank=False)

    # -- keeping them ------------------------------------------------------------------------------

    def _like(self, group: GroupKey, to_lowest_rank: bool) -> list[OwnPlan]:
        """Return the plans of a group of ranks, the last used one last."""
        with self._guard:
            return [
                plan
                for plan in self._plans.values()
                if plan.group == group and plan.to_lowest_rank == to_lowest_rank
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

    def _keep(self, made: OwnPlan, session: Session) -> None:
        """Keep a plan, and drop the oldest ones."""
        with self._guard:
            self._plans[made.plan_id] = made
            while len(self._plans) > _PLANS_KEPT:
                plan_id, plan = self._plans.popitem(last=False)
                session.last_saves.plans.pop((*plan.group, plan_id), None)

    def _planned(
        self, context: SaveContext, plan: OwnPlan, state: Mapping[str, Any]
    ) -> Planned | None:
        structure = plan.structure  # another thread may replace it by one that is the same
        planned = planned_by(context, plan, structure, state)
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


@sendable
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
    """Return the plans that belong to this process's session of a job."""
    with _guard:
        found = _own_plans.get(session)
        if found is None:
            found = _own_plans[session] = OwnPlans()
        return found


def _merged(
    joined: JointPlan | _Refusal | None, to_lowest_rank: bool
) -> tuple[GlobalPlan, Sequence[tuple[str, bytes, str]]]:
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
