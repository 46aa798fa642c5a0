"""Before anything is agreed: a rank's plan is taken apart, and the layout of its segment found.

Plans of plain contiguous CPU tensors, and of DTensors made of such, go a quick road, on which the loops over the items
run in C and touch as little of them as they can: twenty thousand tensors one by one, through the planner, take longer
than the copy of their gigabyte.
"""

from __future__ import annotations

import io
import operator
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from dcp_mem.format.frames import Specs
from dcp_mem.format.layout import align
from dcp_mem.planning.plain import are_plain
from dcp_mem.saving.values import Caller, Planned

TAIL_ROOM = 1 << 20
"""Reserved behind a layout for byte items, whose sizes no plan tells."""

_TYPE, _FQN, _OFFSET = map(operator.attrgetter, ("type", "index.fqn", "index.offset"))
_PLANNED_DTYPE = operator.attrgetter("tensor_data.properties.dtype")
_PLANNED_SHAPE = operator.attrgetter("tensor_data.chunk.sizes")
_DTYPE, _SHAPE = operator.attrgetter("dtype"), operator.attrgetter("shape")
_RESOLVING = ("resolve_data", "lookup_object", "transform_object")
_PLANNING = ("create_local_plan", "create_global_plan", "_create_global_plan", "finish_plan")


def plan_segment(caller: Caller, plan: SavePlan, planner: SavePlanner) -> Planned:
    """Find (or make) the layout of this rank's plan."""
    kinds = list(map(_TYPE, plan.items))
    is_object = [kind is WriteItemType.BYTE_IO for kind in kinds]
    objects = list(compress(plan.items, is_object))
    tensors = list(compress(plan.items, map(operator.not_, is_object)))
    is_shard = [kind is WriteItemType.SHARD for kind in kinds if kind is not WriteItemType.BYTE_IO]
    plain = _handed_out(tensors, is_shard, planner)
    found = specs_of(plain) if plain is not None else None
    is_known = found is not None and not any(is_shard) and _plans_as_is(planner)
    layout = caller.session.plan_layout(found if found is not None and is_known else expected_specs(tensors))
    sources = None
    if plain is not None and layout.is_plain and found == layout.expected:
        sources = list(map(torch.Tensor.data_ptr, plain))
    nbytes = layout.layout.nbytes + expected_tail(caller, objects, planner.resolve_data)
    return Planned(PlannerItems(planner), tensors, objects, layout, nbytes, sources)


class PlannerItems:
    """Items of a plan that DCP's planner made."""

    def __init__(self, planner: SavePlanner) -> None:
        self.resolve = planner.resolve_data
        self.index = operator.attrgetter("index")

    def fingerprint(self, items: Sequence[WriteItem]) -> int:
        return hash((*map(_FQN, items), *map(_OFFSET, items)))  # the items themselves would hold megabytes


def expected_tail(caller: Caller, objects: Sequence[Any], resolve: Callable[[Any], Any]) -> int:
    """Bytes that the byte items will take: those of the last save; else, where there is a limit to keep, measured."""
    saved = caller.session.saved.get(caller.plan_key)
    if saved is not None:
        return sum(align(nbytes) for _, nbytes in saved.segments.tail[caller.ranks.rank])
    if caller.settings.memory_limit is None:
        return 0
    streams = (resolve(item) for item in objects)
    return sum(align(stream.getbuffer().nbytes) for stream in streams if isinstance(stream, io.BytesIO))


def expected_specs(tensors: Sequence[WriteItem]) -> Specs:
    """Dtypes and shapes as the plan has them."""
    return Specs(list(map(_PLANNED_DTYPE, tensors)), list(map(_PLANNED_SHAPE, tensors)))


def _handed_out(
    items: Sequence[WriteItem], is_shard: Sequence[bool], planner: SavePlanner
) -> Sequence[torch.Tensor] | None:
    """What the items stand for, where the planner hands it out as it is, and all of it is plain."""
    if not _has_default(planner, _RESOLVING):
        return None
    found = list(map(planner.state_dict.get, map(_FQN, items)))  # type: ignore[attr-defined]
    if any(is_shard):
        if [type(one) is DTensor for one in found] != is_shard:
            return None
        found = [one._local_tensor if shard else one for one, shard in zip(found, is_shard, strict=True)]
    return found if are_plain(found) else None


def specs_of(tensors: Sequence[torch.Tensor]) -> Specs:
    """Dtypes and shapes as the tensors have them."""
    return Specs(list(map(_DTYPE, tensors)), list(map(_SHAPE, tensors)))


def _plans_as_is(planner: SavePlanner) -> bool:
    """Whether the plan is known to have the very dtypes and shapes of the tensors in the planner's state dict."""
    return _has_default(planner, _PLANNING) and not getattr(planner, "_enable_plan_caching", False)


def _has_default(planner: SavePlanner, hooks: Sequence[str]) -> bool:
    return all(getattr(type(planner), hook, None) is getattr(DefaultSavePlanner, hook, None) for hook in hooks)
