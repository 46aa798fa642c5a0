"""Ahead of the first save: its segments are laid out, and slots made ready for them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent import futures
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType

from dcp_mem.comm.agreement import from_all_ranks
from dcp_mem.comm.dcp_call import DcpCall
from dcp_mem.config import Settings
from dcp_mem.format import names
from dcp_mem.format.frames import Specs
from dcp_mem.memory.slots import capacity_for
from dcp_mem.replicating.plan import incoming
from dcp_mem.runtime.prefaulting import SlotSizes
from dcp_mem.runtime.session import Session
from dcp_mem.saving.plan import TAIL_ROOM, expected_specs
from dcp_mem.saving.values import SaveContext


@dataclass(frozen=True, slots=True)
class Preparation:
    """Slots that are being made ready."""

    done: futures.Future[None]

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the slots are ready.

        Args:
            timeout: Seconds; None waits for as long as it takes.

        Returns:
            False if the time ran out first.
        """
        return not futures.wait([self.done], timeout).not_done


def prepare(
    settings: Settings,
    call: DcpCall,
    open_session: Callable[[], Session],
    state_dict: dict[str, Any],
    planner: SavePlanner,
) -> Preparation:
    """Plan a save of this state on all ranks, without saving, and prefault slots of its layout.

    1. Each rank opens its session, and plans; the coordinator makes the global plan. An error on
       any rank is raised on all (invariant 8).
    2. If copies will be made: the ranks tell each other the sizes.
    3. Slots are made ready in the background.

    Args:
        settings: The writer's.
        call: The ranks that will save together.
        open_session: Gives this process's session of the job, and may raise.
        state_dict: As the save will get it.
        planner: As the save will get it.

    Raises:
        Exception: What went wrong on this rank.
        RankFailed: Another rank couldn't plan, or the plans don't fit together.
    """
    ranks = call.ranks
    if getattr(planner, "_enable_plan_caching", False):
        planner = copy.copy(planner)  # torch would take what is planned here for the plan of a save
        planner._enable_plan_caching = False  # type: ignore[attr-defined]
    session: Session | None = None

    def plan_locally() -> SavePlan:
        nonlocal session
        session = open_session()
        planner.set_up_planner(
            state_dict=state_dict, storage_meta=None, is_coordinator=ranks.rank == 0
        )
        return planner.create_local_plan()

    def plan_globally(plans: Sequence[SavePlan]) -> list[Specs]:
        return [_specs(plan.items) for plan in planner.create_global_plan(list(plans))[0]]

    specs = from_all_ranks(ranks, "planning", plan_locally, plan_globally)
    assert session is not None
    context = SaveContext(
        settings=settings,
        session=session,
        ranks=ranks,
        rank=call.rank,
        scope=names.COLLECTIVE,
        name="",
    )
    layout = session.layouts.of(specs[ranks.rank])
    nbytes = layout.layout.nbytes + TAIL_ROOM
    sizes = SlotSizes(nbytes, layout, _expected_copies(context, nbytes))
    return Preparation(session.prefaulting.start(sizes, settings.keep + 1))


def _expected_copies(context: SaveContext, nbytes: int) -> Sequence[int]:
    """Return the bytes of each slot for what will come to this rank.

    Args:
        context: Of the save to come.
        nbytes: What this rank's own segment takes.
    """
    topology = context.session.topology(context.ranks, context.settings.failure_domain)
    redundancy = context.redundancy_on(topology)
    if not redundancy:
        return ()
    sizes = tuple(context.ranks.exchange(capacity_for(nbytes)))
    copies = incoming(topology.nodes, topology.domains, sizes, redundancy)[topology.rank]
    context.session.last_saves.expected_copies[context.group] = copies
    return copies


def _specs(items: Sequence[Any]) -> Specs:
    return expected_specs([item for item in items if item.type != WriteItemType.BYTE_IO])
