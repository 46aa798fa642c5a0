"""Ahead of the first save: its segments are laid out, and slots made ready for them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent import futures
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint import planner as planners
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from dcp_mem.comm.agreement import Attempted, attempt, from_all_ranks, known_to_all
from dcp_mem.comm.bridge.calls import DcpCall
from dcp_mem.common.sendable import sendable
from dcp_mem.common.value_class import value_class
from dcp_mem.config import Settings, checked_state
from dcp_mem.errors import MemoryBudgetExceeded
from dcp_mem.format import names
from dcp_mem.format.frames import Specs
from dcp_mem.planning.tensor_choice import TensorRule
from dcp_mem.policy.admission import Admission
from dcp_mem.runtime.frozen import ItemKey
from dcp_mem.runtime.prefaulting import NodeNeeds, SlotSizes
from dcp_mem.runtime.session import Session
from dcp_mem.saving.dcp_plan import expected_specs, item_key, resolves_as_is
from dcp_mem.saving.room import expect
from dcp_mem.saving.values import TAIL_ROOM, SaveContext

for _kind in (
    metadata.ChunkStorageMetadata,
    metadata.MetadataIndex,
    metadata.TensorProperties,
    planners.SavePlan,
    planners.TensorWriteData,
    planners.WriteItem,
    planners.WriteItemType,
    *filter(None, [getattr(planners, "BytesIOWriteData", None)]),  # newer than torch 2.6
):
    sendable(_kind)  # of a planner's own, what is made of other classes is refused by name


@value_class
class Preparation:
    """Slots that are being made ready."""

    done: futures.Future[None] | None

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the slots are ready.

        `timeout`: seconds; None waits for as long as it takes. Returns False if the time ran out
        first.
        """
        return self.done is None or not futures.wait([self.done], timeout).not_done


def prepare(
    settings: Settings,
    call: DcpCall,
    open_session: Callable[[], Session],
    state_dict: dict[str, Any],
    planner: SavePlanner,
    frozen: TensorRule | None,
) -> Preparation:
    """Plan a save of this state on all ranks, without saving, and prefault slots of its layout.

    1. Each rank opens its session, and plans; the coordinator makes the global plan. An error on
       any rank is raised on all (invariant 8).
    2. The ranks tell each other what they will claim: one slot for frozen tensors, which all
       checkpoints share, and for each checkpoint one for the others.
    3. Slots are made ready in the background, as many as the memory limit has room for.

    `frozen`: tells which tensors are declared frozen; None where none have a segment of their own.
    Raises Exception, RankFailed, MemoryBudgetExceeded.
    """
    ranks = call.ranks
    if getattr(planner, "_enable_plan_caching", False):
        planner = copy.copy(planner)  # torch would take what is planned here for the plan of a save
        planner._enable_plan_caching = False  # type: ignore[attr-defined]
    session: Session | None = None
    own_items: dict[ItemKey, Any] = {}

    def plan_locally() -> SavePlan:
        nonlocal session
        session = open_session()
        planner.set_up_planner(
            state_dict=checked_state(state_dict), storage_meta=None, is_coordinator=ranks.rank == 0
        )
        plan = planner.create_local_plan()
        own_items.update({item_key(item): item for item in _tensors(plan)})
        return plan

    def plan_globally(plans: Sequence[SavePlan]) -> list[tuple[Specs, Sequence[ItemKey]]]:
        return [
            (expected_specs(_tensors(plan)), list(map(item_key, _tensors(plan))) if frozen else ())
            for plan in planner.create_global_plan(list(plans))[0]
        ]

    found = from_all_ranks(ranks, "planning", plan_locally, plan_globally)
    assert session is not None
    context = SaveContext(
        settings=settings,
        session=session,
        ranks=ranks,
        rank=call.rank,
        scope=names.COLLECTIVE,
        name="",
        frozen=frozen if resolves_as_is(planner) else None,
    )
    specs, keys = found[ranks.rank]

    def resolve(key: ItemKey) -> torch.Tensor:
        return planner.resolve_data(own_items[key])  # type: ignore[return-value]

    sizes = attempt(lambda: _sizes(context, specs, keys, resolve))
    return Preparation(_reserve(context, sizes))


def _sizes(
    context: SaveContext,
    specs: Specs,
    keys: Sequence[ItemKey],
    resolve: Callable[[ItemKey], torch.Tensor],
) -> SlotSizes:
    """Return what this rank's slots take, but for copies."""
    session, layout = context.session, context.session.layouts.of(specs)
    whole = SlotSizes(layout.layout.nbytes + TAIL_ROOM, layout)
    if context.frozen is None:
        return whole
    parts = session.frozen.split(context.frozen, keys, list(map(resolve, keys)), layout)
    if parts is None:
        return whole
    is_there = session.frozen.has_segment(context.group)
    return SlotSizes(
        parts.others.layout.nbytes + TAIL_ROOM,
        parts.others,
        base=None if is_there else parts.frozen,
    )


def _reserve(context: SaveContext, found: Attempted[SlotSizes]) -> futures.Future[None] | None:
    """Have slots made, as far as there is room. Raises on all ranks where there is none."""
    session, settings = context.session, context.settings
    topology = session.nodes.topology(context.ranks, settings.failure_domain)

    def claims() -> tuple[int, int]:
        base = found.value.base
        return found.value.own, 0 if base is None else base.layout.nbytes

    expected = expect(context, topology, attempt(claims))
    verdict, sizes = expected.verdict, replace(found.value, copies=expected.copies)
    if expected.copies or context.redundancy_on(topology):
        session.last_saves.expected_copies[context.group] = tuple(expected.copies)
    if verdict.action is Admission.FULL and verdict.lasting and settings.memory_limit is not None:
        why = f"a checkpoint of this state can't be prepared for: {verdict.why}"
        raise known_to_all(MemoryBudgetExceeded(verdict.needed, verdict.limit, why))
    needs = NodeNeeds(
        checkpoint=expected.node_nbytes,
        base=expected.base_nbytes,
        records=expected.records_nbytes,
        room=expected.room,
    )
    return session.prefaulting.fill_up(settings, sizes, needs, rank=context.rank)


def _tensors(plan: SavePlan) -> list[WriteItem]:
    return [item for item in plan.items if item.type != WriteItemType.BYTE_IO]
