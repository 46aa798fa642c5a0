"""Loads that DCP drives and dcp_mem plans: `dcp.load` without the cost of torch's planning.

DCP's planner makes DCP's metadata of every item, and its plans go to the coordinator and back. Here
a stand-in plans in the planner's place, by the catalog, each rank for itself (`plan.py`), and gives
DCP an empty plan. Where all ranks plan so, DCP exchanges no plan either: a vote tells whether every
rank has one. An error of one rank goes to all ranks as DCP has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner

from dcp_mem.comm import Ranks
from dcp_mem.comm.agreement import leaving_on_error
from dcp_mem.comm.bridge.calls import PlanningCall
from dcp_mem.common.gc_pause import collector_paused
from dcp_mem.errors import picklable
from dcp_mem.format.metadata import LazyMetadata
from dcp_mem.loading.open import OpenCheckpoint
from dcp_mem.loading.plan import plan_alone, plan_together
from dcp_mem.planning.load_planner import LocalLoadPlanner
from dcp_mem.planning.reads import Reads


def take_over(call: PlanningCall) -> _StandIn:
    """Put a stand-in in place of the planner of one `dcp.load`, unless there is one already."""
    stand_in = call.planner if isinstance(call.planner, _StandIn) else _StandIn(call)
    call.replace_planner(stand_in)
    return stand_in


def guard_planner(call: PlanningCall, ranks: Ranks, give_up: Callable[[], None]) -> None:
    """Have the ranks left where DCP's planner raises in front of their exchanges in `read_data`.

    `call`: the planning step of DCP, whose planner isn't a usual one.
    """
    known = call.planner.planner if isinstance(call.planner, _Guarded) else call.planner
    call.replace_planner(_Guarded(known, ranks, give_up))


def why_not_own_plan(planner: LoadPlanner) -> str:
    """Return why a load needs DCP's planner; "" where dcp_mem plans as that planner would."""
    if isinstance(planner, _StandIn):
        return ""  # The metadata is read once more.
    if isinstance(planner, _Guarded):
        planner = planner.planner
    if type(planner) is not DefaultLoadPlanner:
        return f"a planner of its own, {type(planner).__name__}"
    if not (planner.flatten_state_dict and planner.flatten_sharded_tensors):
        return "a DefaultLoadPlanner that doesn't flatten"
    return ""


def taken_over(plan: LoadPlan, planner: LoadPlanner) -> tuple[LoadPlan | Reads, LoadPlanner]:
    """Return what to read, and the planner that resolves it."""
    if isinstance(planner, _Guarded):
        return plan, planner.planner
    if not isinstance(planner, _StandIn):
        return plan, planner
    if planner.reads is None:
        return plan, planner.planner
    return planner.reads, planner.own


class _InPlace(LoadPlanner):
    """Stands in the place of DCP's planner, and hands on to it what it doesn't do itself."""

    def __init__(self, planner: LoadPlanner) -> None:
        self.planner = planner

    def create_local_plan(self) -> LoadPlan:
        return self.planner.create_local_plan()

    def load_bytes(self, read_item: Any, value: Any) -> None:
        self.planner.load_bytes(read_item, value)

    def resolve_tensor(self, read_item: Any) -> Any:
        return self.planner.resolve_tensor(read_item)

    def commit_tensor(self, read_item: Any, tensor: Any) -> None:
        self.planner.commit_tensor(read_item, tensor)


class _Guarded(_InPlace):
    """DCP's planner, whose errors leave no rank waiting, and nothing open."""

    def __init__(self, planner: LoadPlanner, ranks: Ranks, give_up: Callable[[], None]) -> None:
        super().__init__(planner)
        self._ranks, self._give_up = ranks, give_up

    @picklable
    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        with _giving_up(self._give_up):
            self.planner.set_up_planner(*args, **kwargs)

    @picklable
    def create_local_plan(self) -> LoadPlan:
        with _giving_up(self._give_up):
            return self.planner.create_local_plan()

    @picklable
    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        with _giving_up(self._give_up):
            return self.planner.create_global_plan(global_plan)

    @picklable
    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        with _giving_up(self._give_up), leaving_on_error(self._ranks):
            return self.planner.finish_plan(central_plan)


@contextmanager
def _giving_up(give_up: Callable[[], None]) -> Iterator[None]:
    """Call this where the block raises: DCP goes no further with the load."""
    try:
        yield
    except BaseException:
        give_up()
        raise


class _StandIn(_InPlace):
    """Plans in the place of DCP's planner.

    `own`: of dcp_mem; unpickles freely, as DCP's does. `opened`: the checkpoint; None as long as
    there is none. `ranks`: those that load together, if all of them plan by themselves; else None.
    `reads`: what this rank reads; None as long as it hasn't planned.
    """

    def __init__(self, call: PlanningCall) -> None:
        super().__init__(call.planner)
        self.own = LocalLoadPlanner(
            weights_only=False, allow_partial_load=call.planner.allow_partial_load
        )
        self.opened: OpenCheckpoint | None = None
        self.ranks: Ranks | None = None
        self.reads: LoadPlan | Reads | None = None
        self._state, self._is_coordinator = call.state_dict, call.is_coordinator

    def begin(self, opened: OpenCheckpoint, ranks: Ranks | None) -> Metadata:
        """Take note of what to load; return its metadata, made when it is looked at."""
        self.opened, self.ranks = opened, ranks
        return LazyMetadata(lambda: opened.metadata)

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        return

    @picklable
    def create_local_plan(self) -> LoadPlan:
        opened = self.opened
        assert opened is not None
        with _giving_up(opened.close), collector_paused():
            self.reads = self._planned(opened)
        return LoadPlan([])

    def _planned(self, opened: OpenCheckpoint) -> LoadPlan | Reads:
        state, is_coordinator = self._state, self._is_coordinator
        if self.ranks is None:
            return plan_alone(opened, self.own, state, is_coordinator)
        with leaving_on_error(self.ranks):
            return plan_together(
                self.ranks, opened, self.own, lambda: state, is_coordinator=is_coordinator
            )

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan
