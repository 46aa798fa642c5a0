"""Before anything is agreed: this rank's part of DCP's plan is taken apart, and laid out.

Plans of contiguous tensors, and of DTensors made of such, take a fast path, on which the loops over
the items run in C and touch as little of them as they can: twenty thousand tensors one by one,
through the planner, take longer than the copy of their gigabyte.
"""

from __future__ import annotations

import io
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import compress
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from dcp_mem.format.catalog import Catalog
from dcp_mem.format.catalog_conversion import RankItems, catalog_of
from dcp_mem.format.frames import Specs
from dcp_mem.format.layout import align
from dcp_mem.planning.plain_tensors import Sources, sources_of
from dcp_mem.planning.shard_marks import have_own_marks
from dcp_mem.policy.slots import SlotNeed
from dcp_mem.runtime.frozen import FrozenItems, ItemKey, Split
from dcp_mem.saving.values import DCP_PLAN, IndexedItems, Planned, SaveContext

TAIL_ROOM = 1 << 20
"""Bytes reserved behind a layout for byte items, whose sizes no plan tells."""

_TYPE, _FQN, _OFFSET = map(operator.attrgetter, ("type", "index.fqn", "index.offset"))
_PLANNED_DTYPE = operator.attrgetter("tensor_data.properties.dtype")
_PLANNED_SHAPE = operator.attrgetter("tensor_data.chunk.sizes")
_DTYPE, _SHAPE = operator.attrgetter("dtype"), operator.attrgetter("shape")
_RESOLVING = ("resolve_data", "lookup_object", "transform_object")
_PLANNING = ("create_local_plan", "create_global_plan", "_create_global_plan", "finish_plan")


def plan_segment(
    context: SaveContext, plan: SavePlan, planner: SavePlanner, items: PlannerItems
) -> Planned:
    """Find, or make, the layout of this rank's part of a plan."""
    kinds = list(map(_TYPE, plan.items))
    is_object = [kind is WriteItemType.BYTE_IO for kind in kinds]
    objects = list(compress(plan.items, is_object))
    tensors = list(compress(plan.items, map(operator.not_, is_object)))
    is_shard = [kind is WriteItemType.SHARD for kind in kinds if kind is not WriteItemType.BYTE_IO]
    sources = _sources(tensors, is_shard, planner)
    found = specs_of(sources.tensors) if sources is not None else None
    is_known = found is not None and not any(is_shard) and _plans_as_is(planner)
    layout = context.session.layouts.of(
        found if found is not None and is_known else expected_specs(tensors)
    )
    if not layout.is_plain or found != layout.expected:
        sources = None
    tail_nbytes = expected_tail(context, DCP_PLAN, objects, planner.resolve_data)
    return Planned(
        items=items,
        tensors=tensors,
        objects=objects,
        layout=layout,
        nbytes=layout.layout.nbytes + tail_nbytes,
        sources=sources,
    )


def claims_of(planned: Planned) -> list[SlotNeed]:
    """Return the slots that staging claims for this rank's part of a plan, in this order."""
    if planned.filled is not None:
        return []
    claims = [SlotNeed(planned.nbytes + TAIL_ROOM, planned.layout.frames)]
    if planned.frozen is not None and planned.copied_frozen_nbytes:
        claims.insert(0, SlotNeed(planned.copied_frozen_nbytes, planned.frozen.layout.frames))
    return claims


def frozen_apart(
    context: SaveContext,
    planned: Planned,
    keys: Sequence[ItemKey],
    tensors: Sequence[torch.Tensor],
    last: Split | None = None,
) -> tuple[Planned, Split | None]:
    """Return the same part of a plan with the frozen tensors apart, where there are enough of them.

    Returns the part of the plan, and how its tensors were divided; None where they weren't.
    """
    assert context.frozen is not None
    known, whole = context.session.frozen, planned.layout
    parts = known.split(context.frozen, keys, tensors, whole, last)
    if parts is None:
        return planned, None
    sources = planned.sources
    is_frozen, is_other = parts.is_frozen, list(map(operator.not_, parts.is_frozen))
    frozen = FrozenItems(
        rows=list(compress(planned.tensors, is_frozen)),
        keys=parts.keys,
        tensors=list(compress(tensors, is_frozen)),
        layout=parts.frozen,
        sources=None if sources is None else sources.only(is_frozen),
        is_lasting=not context.has_copies,  # those of a copy the next save won't find
    )
    if frozen.is_lasting:
        frozen = known.with_known_segment(context.group, frozen)
    others = replace(
        planned,
        tensors=list(compress(planned.tensors, is_other)),
        layout=parts.others,
        nbytes=planned.nbytes - whole.layout.nbytes + parts.others.layout.nbytes,
        sources=None if sources is None else sources.only(is_other),
        frozen=frozen,
        group=context.group,
    )
    return others, parts


class PlannerItems(IndexedItems):
    """Items of a plan that DCP's planner made, whose metadata is asked for on rank 0."""

    def __init__(self, planner: SavePlanner, metadata: Callable[[], Metadata]) -> None:
        self.resolve, self.index = planner.resolve_data, operator.attrgetter("index")
        self._metadata = metadata

    def fingerprint(self, items: Sequence[WriteItem]) -> int:
        """Return a hash of names and offsets; the items themselves would hold megabytes."""
        return hash((*map(_FQN, items), *map(_OFFSET, items)))

    def catalog(self, parts: Sequence[RankItems]) -> Catalog:
        return catalog_of(self._metadata(), parts)


def resolves_as_is(planner: SavePlanner) -> bool:
    """Return whether a planner hands over what its state dict has, unchanged."""
    return _has_default(planner, _RESOLVING)


def item_key(item: WriteItem) -> ItemKey:
    """Return name and offset of an item that is a tensor."""
    return item.index.fqn, tuple(item.index.offset or ())


def expected_tail(
    context: SaveContext, plan_id: str, objects: Sequence[Any], resolve: Callable[[Any], Any]
) -> int:
    """Return the bytes that the byte items will take, as far as that is worth knowing ahead.

    They are those of the last save. Where there is a memory limit to keep, they are measured: they
    may have grown.

    `resolve`: makes an item's bytes.
    """
    saved = context.session.last_saves.plans.get(context.plan_key(plan_id))
    last = 0
    if saved is not None:
        last = sum(align(nbytes) for _, nbytes in saved.segments.tail[context.ranks.rank])
    if context.settings.memory_limit is None:
        return last
    streams = (resolve(item) for item in objects)
    return max(
        last,
        sum(align(one.getbuffer().nbytes) for one in streams if isinstance(one, io.BytesIO)),
    )


def expected_specs(tensors: Sequence[WriteItem]) -> Specs:
    """Return dtypes and shapes as the plan has them."""
    return Specs(list(map(_PLANNED_DTYPE, tensors)), list(map(_PLANNED_SHAPE, tensors)))


def specs_of(tensors: Sequence[torch.Tensor]) -> Specs:
    """Return dtypes and shapes as the tensors have them."""
    return Specs(list(map(_DTYPE, tensors)), list(map(_SHAPE, tensors)))


def _sources(
    items: Sequence[WriteItem], is_shard: Sequence[bool], planner: SavePlanner
) -> Sources | None:
    """Return what items stand for, if the planner leaves it as it is and bytes can be copied."""
    if not resolves_as_is(planner):
        return None
    found = list(map(planner.state_dict.get, map(_FQN, items)))  # type: ignore[attr-defined]
    if have_own_marks([one for one in found if isinstance(one, torch.Tensor)]):
        return None  # torch is asked where the values of each item lie
    if any(is_shard):
        if [type(one) is DTensor for one in found] != is_shard:
            return None
        found = [
            one._local_tensor if shard else one for one, shard in zip(found, is_shard, strict=True)
        ]
        if have_own_marks(found):
            return None
    return sources_of(found)


def _plans_as_is(planner: SavePlanner) -> bool:
    """Tell whether the plan is known to have the tensors' own dtypes and shapes."""
    return _has_default(planner, _PLANNING) and not getattr(planner, "_enable_plan_caching", False)


def _has_default(planner: SavePlanner, hooks: Sequence[str]) -> bool:
    return all(
        getattr(type(planner), hook, None) is getattr(DefaultSavePlanner, hook, None)
        for hook in hooks
    )
