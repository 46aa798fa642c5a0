"""Ahead of the first save: lay out its segments and fault their pages in, in the background."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.planner import SavePlanner, WriteItemType

from dcp_mem.errors import RankFailed
from dcp_mem.format.frames import Specs
from dcp_mem.memory.slots import capacity_for
from dcp_mem.replicating.transfers import incoming
from dcp_mem.saving.agree import redundancy_on
from dcp_mem.saving.plan import TAIL_ROOM, expected_specs
from dcp_mem.saving.values import Caller, Outcome


@dataclass(frozen=True, slots=True)
class Preparation:
    """Slots that are being made ready."""

    thread: threading.Thread

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the slots are ready; False if `timeout` seconds weren't enough."""
        self.thread.join(timeout)
        return not self.thread.is_alive()


def prepare(caller: Caller, state_dict: dict[str, Any], planner: SavePlanner) -> Preparation:
    """Plan a save of this state on all ranks, without saving, and prefault slots of its layout. Raises RankFailed."""
    coordinator = caller.ranks.rank == 0
    if getattr(planner, "_enable_plan_caching", False):
        planner = copy.copy(planner)  # torch would take what is planned here for the plan of a save
        planner._enable_plan_caching = False  # type: ignore[attr-defined]
    planner.set_up_planner(state_dict=state_dict, storage_meta=None, is_coordinator=coordinator)
    plans = caller.ranks.gather(planner.create_local_plan())
    outcome: Outcome[list[Specs]] = Outcome()
    if coordinator:
        try:
            outcome = Outcome([_specs(plan.items) for plan in planner.create_global_plan(plans)[0]])
        except Exception as error:
            outcome = Outcome(error=f"{type(error).__name__}: {error}")
    outcome = caller.ranks.broadcast(outcome)
    if outcome.value is None:
        raise RankFailed("planning", [(0, outcome.error)])
    plan_layout = caller.session.plan_layout(outcome.value[caller.ranks.rank])
    room = plan_layout.layout.nbytes + TAIL_ROOM
    copies = _expected_copies(caller, room)
    return Preparation(caller.session.prefault(plan_layout, room, caller.settings.keep + 1, copies))


def _expected_copies(caller: Caller, room: int) -> Sequence[int]:
    """Sizes of what will come to this rank from others. room: what its own segment takes."""
    topology = caller.session.topology(caller.ranks, caller.settings.failure_domain)
    redundancy = redundancy_on(caller, topology)
    if not redundancy:
        return ()
    sizes = tuple(caller.ranks.exchange(capacity_for(room)))
    mine = incoming(topology.nodes, topology.domains, sizes, redundancy)[topology.rank]
    caller.session.expected_copies[caller.group] = mine
    return mine


def _specs(items: Sequence[Any]) -> Specs:
    return expected_specs([item for item in items if item.type != WriteItemType.BYTE_IO])
