"""A rank's plan of what to read from an opened checkpoint, made by itself: no plan is exchanged."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner

from dcp_mem.comm import Ranks
from dcp_mem.comm.agreement import on_all_ranks
from dcp_mem.errors import NotOfOneSave
from dcp_mem.loading.open import OpenCheckpoint
from dcp_mem.memory.cuda_batches import may_copy_to_device
from dcp_mem.planning.load_planner import LocalLoadPlanner
from dcp_mem.planning.reads import Reads


def plan_together(
    ranks: Ranks,
    opened: OpenCheckpoint,
    planner: DefaultLoadPlanner,
    state: Callable[[], dict[str, Any]],
    *,
    is_coordinator: bool,
) -> LoadPlan | Reads:
    """Return this rank's plan, once every rank has one; one all-reduce.

    `state`: returns what to load into, or raises why there is none. Raises Exception, RankFailed.
    """
    return on_all_ranks(
        ranks,
        f"planning the load of {opened.choice.name}",
        lambda: plan_alone(opened, planner, state(), is_coordinator),
    )


def plan_alone(
    opened: OpenCheckpoint,
    planner: DefaultLoadPlanner,
    state: dict[str, Any],
    is_coordinator: bool,
) -> LoadPlan | Reads:
    """Return this rank's plan: by the catalog where that will do, else as DCP has it.

    Raises Exception.
    """
    reads = _plan_by_catalog(opened, planner, state)
    if reads is not None:
        return reads
    planner.set_up_planner(state, opened.metadata, is_coordinator)
    plan = planner.create_global_plan([planner.create_local_plan()])[0]
    return planner.finish_plan(plan)


def plan_again(
    ranks: Ranks,
    opened: OpenCheckpoint,
    planner: LoadPlanner,
    written: Collection[str],
    *,
    is_coordinator: bool,
) -> LoadPlan | Reads:
    """Return this rank's plan for another checkpoint than the planner has planned for.

    `written`: names of what may have been read of other checkpoints, which the plan has to cover:
    the state would be of two checkpoints. Raises NotOfOneSave, Exception, RankFailed.
    """
    assert isinstance(planner, DefaultLoadPlanner)
    begins_anew = isinstance(planner, _EmptyStateDictLoadPlanner)  # it fills the state dict

    def plan() -> LoadPlan | Reads:
        state: dict[str, Any] = planner.original_state_dict
        if begins_anew:
            state.clear()
        found = plan_alone(opened, planner, state, is_coordinator)
        left = set(written).difference(planned_names(found), _taken_out(planner))
        if left and not begins_anew:
            raise NotOfOneSave(opened.choice.name, sorted(left))
        return found

    return on_all_ranks(ranks, f"planning the load of {opened.choice.name}", plan)


def planned_names(plan: LoadPlan | Reads) -> set[str]:
    """Return the flattened names of what a rank is to read."""
    if isinstance(plan, Reads):
        return {one.request.dest_index.fqn for one in plan.everything()}
    return {request.dest_index.fqn for request in plan.items}


def _taken_out(planner: LoadPlanner) -> Collection[str]:
    """Return the names of optional entries that the checkpoint lacks: they leave the state dict."""
    return planner.lacking_names if isinstance(planner, LocalLoadPlanner) else ()


def plans_alone(planner: LoadPlanner) -> bool:
    """Return whether ranks may plan again by themselves.

    They may where the global plan exchanges nothing, as that of torch's default planner.
    """
    default: Callable[..., Any] = DefaultLoadPlanner.create_global_plan
    return isinstance(planner, DefaultLoadPlanner) and type(planner).create_global_plan is default


def _plan_by_catalog(
    opened: OpenCheckpoint, planner: DefaultLoadPlanner, state: dict[str, Any]
) -> Reads | None:
    description = opened.description
    if description.catalog is None or not isinstance(planner, LocalLoadPlanner):
        return None
    return planner.plan(
        state,
        description.catalog,
        description.save_id,
        description.tails,
        into_devices=may_copy_to_device(),
    )
