"""Saves that DCP drives and dcp_mem plans: `dcp.save` without the cost of torch's planning.

DCP's planner describes every tensor to every rank, on every save. Here a stand-in answers DCP with
empty plans in the planner's place, and the ranks go by a plan of dcp_mem's own (`own_plans.py`).
The order of DCP's contract stays: the ranks plan and agree in its first step, and nothing is
complete before `write_data`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from dcp_mem.comm import Ranks, SingleRank
from dcp_mem.comm.agreement import Attempted, attempt, leaving_on_error
from dcp_mem.comm.bridge.calls import PlanningCall
from dcp_mem.common.log import log
from dcp_mem.common.values import SaveInfo
from dcp_mem.errors import DcpMemError, picklable
from dcp_mem.format.catalog import Catalog
from dcp_mem.format.catalog_conversion import metadata_of
from dcp_mem.format.manifest import Manifest
from dcp_mem.format.metadata import LazyMetadata
from dcp_mem.planning.contradictions import PlanInvalid
from dcp_mem.planning.wrapper_tensors import class_name
from dcp_mem.runtime.session import Session
from dcp_mem.saving.ahead import AheadCopy, StagedState, not_refused, staged_in
from dcp_mem.saving.own_plans import OwnPlanItems, own_plans_of
from dcp_mem.saving.pipeline import Settled, settle
from dcp_mem.saving.values import NoCommonPlan, SaveContext


class DcpTakeover:
    """One `dcp.save` whose planning dcp_mem takes over, if all ranks can.

    `staged`: what is saved, where `dcp.async_save` has staged it. `settled`: what all ranks have
    agreed on; None where the save is skipped. `is_planned`: whether dcp_mem plans the save, on all
    ranks. Otherwise DCP's planner does.
    """

    def __init__(self, call: PlanningCall) -> None:
        """Put a stand-in in place of DCP's planner, where dcp_mem can plan as that would."""
        self._exchanges = call.exchanges
        self._exchanges.only_errors()
        self.staged = staged_in(call.state_dict)
        self._ahead: AheadCopy | None = None
        self._put_in_place: Mapping[str, Any] | None = None  # of what stands for a staged state
        self._state: Attempted[Mapping[str, Any]] = attempt(lambda: not_refused(call.state_dict))
        self._refusal = self._state.error  # why nothing could be staged
        if self.staged is not None:
            self._take_staged(call, self.staged)
        planner = planner_of(call.planner)  # There is a stand-in if DCP has asked before.
        self._why_not = why_not_own_plan(planner)
        if not call.has_usual_coordinator:
            self._why_not = "a coordinator other than rank 0"
        # Also where DCP's planner plans: the ranks are told when it raises.
        self._stand_in = _StandIn(planner)
        call.replace_planner(self._stand_in)
        self.settled: Settled | None = None
        self.is_planned = False

    def _take_staged(self, call: PlanningCall, staged: StagedState) -> None:
        """Have DCP, too, go on with what is staged in the place of what stands for it."""
        content = staged.take()
        self._refusal = content.error
        found = content.value if content.error is None else {}
        state: dict[str, Any] = {}
        if isinstance(found, AheadCopy):
            self._ahead = found
        else:
            state = found
        self._state, self._put_in_place = Attempted((state,), content.error), state
        call.replace_state_dict(state)

    def has_taken(self, call: PlanningCall) -> bool:
        """Return whether this save's staged state was taken up before: DCP has asked twice."""
        return self._put_in_place is not None and call.state_dict is self._put_in_place

    def enter(self, ranks: Ranks) -> None:
        """Take note of the ranks that save together, which DCP's planner must not leave waiting."""
        self._stand_in.ranks = ranks

    def settle(self, context: SaveContext) -> None:
        """Plan, and agree on the save, with all ranks; leave it to DCP's planner if one can't.

        Raises Exception.
        """
        items = self._ahead or OwnPlanItems(
            own_plans_of(context.session),
            self._state,
            why_not=self._why_not,
            to_lowest_rank=self._stand_in.saves_to_lowest_rank,
        )
        self._state = Attempted(({},))
        try:
            self.settled = settle(context, items.plan, items.find_common_plan)
        except NoCommonPlan as reason:
            self.leave_to_torch()
            note_torch_plans(context.session, context.name, reason.why_not)
            return
        self.is_planned = self._stand_in.is_planned = True
        if self.settled is None:
            self.give_up()
        else:
            self._stand_in.metadata = ReturnedMetadata()

    def leave_to_torch(self) -> None:
        """Have torch's planner plan the save, and its plans exchanged. All ranks call this."""
        self._stand_in.refusal = self._refusal
        self._exchanges.everything()

    def give_up(self) -> None:
        """Give back what has been copied already: the save has failed, or is skipped."""
        self.settled = None  # it refers to the caller's tensors
        if self._ahead is not None:
            self._ahead.give_back()

    @property
    def metadata(self) -> ReturnedMetadata | None:
        """The metadata that `dcp.save` will return; None for a save that is skipped."""
        made = self._stand_in.metadata
        return made if isinstance(made, ReturnedMetadata) else None


class ReturnedMetadata(LazyMetadata):
    """The metadata that a save returns, on each rank: made when somebody looks at it.

    For twenty thousand tensors that takes longer than the save. DCP has to be given it before the
    save is complete.
    """

    def __new__(cls, **changed: Any) -> Any:
        # dataclasses.replace calls this with fields, and gets a plain Metadata.
        return Metadata(**changed) if changed else object.__new__(cls)

    def __init__(self) -> None:
        """Stand for the metadata of a save that isn't complete yet."""

        def make() -> Metadata:
            raise DcpMemError("the checkpoint isn't complete, so it has no metadata")

        super().__init__(make)

    def settle(self, session: Session, manifest: Manifest, info: SaveInfo) -> ReturnedMetadata:
        """Note the complete checkpoint, and keep its catalog mapped while this is in use."""
        catalog = session.catalogs.find(manifest.catalog) or b""
        self.__dict__["_of_checkpoint"] = manifest, info
        self.__dict__["_make"] = lambda: metadata_of(
            Catalog.from_bytes(catalog), manifest.save_id, manifest.tails, manifest.name
        )
        return self

    @property
    def made(self) -> tuple[Manifest, SaveInfo]:
        """The checkpoint's manifest, and what its coordinator's training loop said of it."""
        made: tuple[Manifest, SaveInfo] = self.__dict__["_of_checkpoint"]
        return made


def why_not_own_plan(planner: SavePlanner | None) -> str:
    """Return why a save needs DCP's planner; "" where dcp_mem plans as that planner would."""
    if planner is None:
        return ""
    if type(planner) is not DefaultSavePlanner:
        return f"a planner of its own, {type(planner).__name__}"
    if not (planner.flatten_state_dict and planner.flatten_sharded_tensors):
        return "a DefaultSavePlanner that doesn't flatten"
    return ""


def saves_to_lowest_rank(planner: SavePlanner | None) -> bool:
    """Return whether a chunk that several ranks hold is to be written by the first of them."""
    return bool(getattr(planner, "dedup_save_to_lowest_rank", False))


def note_torch_plans(session: Session, name: str, why: str) -> None:
    """Log why torch's planner plans a save; the same reason once."""
    if session.last_saves.is_first_warning(f"torch plans: {why}"):
        log.info("%s, and what follows it, is planned by torch, which takes longer: %s", name, why)


class _StandIn(SavePlanner):
    """Answers DCP in its planner's place, once dcp_mem has planned; else DCP's planner answers.

    DCP passes on to all ranks what its planner raises in the planning step, but between
    `set_up_planner` and that exchange, and behind `finish_plan`, lie exchanges of the writer's. So
    the planner is set up behind the first of these, and the ranks are left where `finish_plan`
    raises.

    `ranks`: that save together; None as long as they aren't known. `metadata`: of the save, for DCP
    to return. `refusal`: why there is nothing to plan; raised where DCP hands it to all ranks.
    """

    def __init__(self, planner: SavePlanner) -> None:
        self.planner = planner
        self.ranks: Ranks | None = None
        self.metadata: Metadata = Metadata({})
        self.is_planned = False
        self.refusal: Exception | None = None
        self._set_up: dict[str, Any] | None = None

    @property
    def saves_to_lowest_rank(self) -> bool:
        return saves_to_lowest_rank(self.planner)

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        self._set_up = {
            "state_dict": state_dict,
            "storage_meta": storage_meta,
            "is_coordinator": is_coordinator,
        }

    @picklable
    def create_local_plan(self) -> SavePlan:
        set_up, self._set_up = self._set_up, None
        if self.is_planned:
            return SavePlan([])
        if self.refusal is not None:
            raise self.refusal
        if set_up is not None:
            _set_up(self.planner, set_up)
        try:
            return self.planner.create_local_plan()
        except Exception:
            _name_unplannable(self.planner)
            raise

    @picklable
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        if self.is_planned:
            return all_plans, self.metadata
        if isinstance(self.planner, DefaultSavePlanner):
            _refuse_contradictions(all_plans)
        return self.planner.create_global_plan(all_plans)

    @picklable
    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        if self.is_planned:
            return new_plan
        with leaving_on_error(self.ranks or SingleRank()):
            return self.planner.finish_plan(new_plan)

    def resolve_data(self, write_item: Any) -> Any:
        return self.planner.resolve_data(write_item)


def _name_unplannable(planner: SavePlanner) -> None:
    """Log which entries torch's planner fails with: its errors don't tell."""
    state = planner.state_dict if type(planner) is DefaultSavePlanner else {}
    for name, leaf in state.items():
        plan = attempt(partial(create_default_local_save_plan, {name: leaf}, is_coordinator=False))
        if plan.error is not None:
            log.error("torch can't plan %s, which is %s: %s", name, class_name(leaf), plan.error)


def _refuse_contradictions(plans: Sequence[SavePlan]) -> None:
    """Raise PlanInvalid for tensors that ranks have in different sizes; torch would save one."""
    sizes: dict[str, torch.Size] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            if item.tensor_data is not None:
                size = item.tensor_data.size
                if sizes.setdefault(item.index.fqn, size) != size:
                    raise PlanInvalid(
                        f"{item.index.fqn}: rank {rank} has a tensor of {list(size)}, "
                        f"another rank one of {list(sizes[item.index.fqn])}"
                    )


def _set_up(planner: SavePlanner, arguments: Mapping[str, Any]) -> None:
    """Set a planner up as DCP does, which knows planners of before `storage_meta`."""
    known = inspect.signature(planner.set_up_planner).parameters
    if "storage_meta" in known or any(one.kind is one.VAR_KEYWORD for one in known.values()):
        planner.set_up_planner(**arguments)
    else:
        planner.set_up_planner(arguments["state_dict"], arguments["is_coordinator"])


def planner_of(planner: SavePlanner) -> SavePlanner:
    """Return DCP's planner, where a stand-in has taken its place."""
    return planner.planner if isinstance(planner, _StandIn) else planner
