"""Saves that DCP drives and dcp_mem plans: `dcp.save` without the cost of torch's planning.

DCP's planner describes every tensor to every rank, on every save. Here a stand-in answers DCP with
empty plans in the planner's place, and the ranks go by a plan of dcp_mem's own (`own_plan.py`). The
order of DCP's contract stays: the ranks plan and agree in its first step, and nothing is complete
before `write_data`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from dcp_mem.comm.agreement import Attempted
from dcp_mem.comm.dcp_call import PlanningCall
from dcp_mem.common.log import log
from dcp_mem.runtime.session import Session
from dcp_mem.saving.ahead import AheadCopy, StagedState, staged_in
from dcp_mem.saving.own_plan import OwnPlanItems, own_plans_of
from dcp_mem.saving.pipeline import Settled, settle
from dcp_mem.saving.returned_metadata import ReturnedMetadata
from dcp_mem.saving.values import ItemProvider, NoCommonPlan, SaveContext


class DcpTakeover:
    """One `dcp.save` whose planning dcp_mem takes over, if all ranks can.

    Attributes:
        staged: What is saved, where `dcp.async_save` has staged it.
        items: What is saved; set once all ranks have agreed, like `settled`.
        settled: What they agreed on; None where the save is skipped.
        is_planned: Whether dcp_mem plans the save, on all ranks. Otherwise DCP's planner does.
    """

    def __init__(self, call: PlanningCall) -> None:
        """Put a stand-in in place of DCP's planner, where dcp_mem can plan as that would.

        Args:
            call: The planning step of DCP.
        """
        self.staged = staged_in(call.state_dict)
        self._ahead: AheadCopy | None = None
        self._state: Attempted[Mapping[str, Any]] = Attempted((call.state_dict,))
        if self.staged is not None:
            self._take_staged(call, self.staged)
        planner = planner_of(call.planner)  # There is a stand-in if DCP has asked before.
        self._why_not = why_not_own_plan(planner)
        if not call.has_usual_coordinator:
            self._why_not = "a coordinator other than rank 0"
        self._stand_in: _StandIn | None = None
        if not self._why_not:
            self._stand_in = _StandIn(planner)
            call.replace_planner(self._stand_in)
        self.items: ItemProvider | None = None
        self.settled: Settled | None = None
        self.is_planned = False

    def _take_staged(self, call: PlanningCall, staged: StagedState) -> None:
        """Have DCP, too, go on with what is staged in the place of what stands for it."""
        content = staged.take()
        found = content.value if content.error is None else {}
        state: dict[str, Any] = {}
        if isinstance(found, AheadCopy):
            self._ahead = found
        else:
            state = found
        self._state = Attempted((state,), content.error)
        call.replace_state_dict(state)

    def settle(self, context: SaveContext) -> None:
        """Plan, and agree on the save, with all ranks; leave it to DCP's planner if one can't.

        Args:
            context: This rank's part in the save.

        Raises:
            Exception: What `settle` of the pipeline raises.
        """
        self.items = self._provider(context)
        self._state = Attempted(({},))
        try:
            self.settled = settle(context, self.items)
        except NoCommonPlan as reason:
            self.items = None
            note_torch_plans(context.session, context.name, reason.why_not)
            return
        assert self._stand_in is not None
        self.is_planned = self._stand_in.is_planned = True
        if self.settled is None:
            self.give_up()
        else:
            self._stand_in.metadata = ReturnedMetadata(self.settled.agreed.save_id)

    def give_up(self) -> None:
        """Give back what has been copied ahead: the save has failed, or is skipped."""
        if self._ahead is not None:
            self._ahead.give_back()

    def _provider(self, context: SaveContext) -> ItemProvider:
        if self._ahead is not None:
            return self._ahead
        return OwnPlanItems(
            own_plans_of(context.session),
            self._state,
            why_not=self._why_not,
            to_lowest_rank=self._stand_in is not None and self._stand_in.saves_to_lowest_rank,
        )

    @property
    def metadata(self) -> ReturnedMetadata | None:
        """What `dcp.save` will return; None for a save that is skipped."""
        made = self._stand_in.metadata if self._stand_in is not None else None
        return made if isinstance(made, ReturnedMetadata) else None


def why_not_own_plan(planner: SavePlanner | None) -> str:
    """Return why a save needs DCP's planner; "" where dcp_mem plans as that planner would.

    Args:
        planner: As given to `dcp.save`.
    """
    if planner is None:
        return ""
    if type(planner) is not DefaultSavePlanner:
        return f"a planner of its own, {type(planner).__name__}"
    if not (planner.flatten_state_dict and planner.flatten_sharded_tensors):
        return "a DefaultSavePlanner that doesn't flatten"
    return ""


def saves_to_lowest_rank(planner: SavePlanner | None) -> bool:
    """Return whether a chunk that several ranks hold is to be written by the first of them.

    Args:
        planner: As given to `dcp.save`.
    """
    return bool(getattr(planner, "dedup_save_to_lowest_rank", False))


def note_torch_plans(session: Session, name: str, why: str) -> None:
    """Log why torch's planner plans a save; the same reason once.

    Args:
        session: This process's session of the job.
        name: Of the checkpoint.
        why: The reason.
    """
    if session.last_saves.is_first_warning(f"torch plans: {why}"):
        log.info("%s, and what follows it, is planned by torch, which takes longer: %s", name, why)


class _StandIn(SavePlanner):
    """Answers DCP in its planner's place, once dcp_mem has planned; else DCP's planner answers.

    Attributes:
        planner: DCP's.
        metadata: Of the save, for DCP to return.
        is_planned: Whether dcp_mem has planned.
    """

    def __init__(self, planner: SavePlanner) -> None:
        self.planner = planner
        self.metadata: Metadata = Metadata({})
        self.is_planned = False
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

    def create_local_plan(self) -> SavePlan:
        set_up, self._set_up = self._set_up, None
        if self.is_planned:
            return SavePlan([])
        if set_up is not None:
            self.planner.set_up_planner(**set_up)
        return self.planner.create_local_plan()

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        if self.is_planned:
            return all_plans, self.metadata
        return self.planner.create_global_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan if self.is_planned else self.planner.finish_plan(new_plan)

    def resolve_data(self, write_item: Any) -> Any:
        return self.planner.resolve_data(write_item)


def planner_of(planner: SavePlanner) -> SavePlanner:
    """Return DCP's planner, where a stand-in has taken its place.

    Args:
        planner: As DCP hands it to `write_data`.
    """
    return planner.planner if isinstance(planner, _StandIn) else planner
