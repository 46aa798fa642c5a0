"""One plan of dcp_mem's own: this rank's part of it, and what saves by it go by."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from dcp_mem.format.byte_items import stream_of
from dcp_mem.format.catalog import Catalog
from dcp_mem.format.frames import Specs
from dcp_mem.format.layout import Layout
from dcp_mem.format.torch_names import dtype_named
from dcp_mem.planning.global_plan import GlobalPlan
from dcp_mem.planning.plain_tensors import SourcesByBlock
from dcp_mem.planning.plan_catalog import WrittenItems, catalog_of_written, share_written
from dcp_mem.planning.plan_columns import ItemKind
from dcp_mem.planning.state_structure import Structure
from dcp_mem.runtime.frozen import WHY_NOT_WITH_PARITY, ItemKey, Split
from dcp_mem.runtime.last_saves import GroupKey
from dcp_mem.saving.plan import expected_tail, frozen_apart
from dcp_mem.saving.values import Planned, SaveContext


@dataclass(eq=False, kw_only=True)
class OwnPlan:
    """One rank's part of a plan that all ranks made together."""

    plan_id: str  # the same on all ranks
    group: GroupKey
    structure: Structure  # of the state dict; recognises others like it
    tensors: Sequence[int]  # rows of the local plan that this rank writes, in order; like `objects`
    objects: Sequence[int]
    is_written: Sequence[bool]  # of each tensor of the local plan, whether it is among `tensors`
    specs: Specs  # dtypes and shapes of `tensors`, and of whatever is recognised
    is_strided: bool
    is_complex: bool
    whole: GlobalPlan | None  # the plan of all ranks, on the coordinator
    to_lowest_rank: bool  # whether the first rank that holds a chunk writes it
    # which of `tensors` were frozen at the last save; None where none were
    split: Split | None = None

    @cached_property
    def keys(self) -> Sequence[ItemKey]:
        """Name and offset of each of `tensors`."""
        local = self.structure.plan
        return [
            (local.names[name], tuple(offset[:dimensions]))
            for name, offset, dimensions in zip(
                local.name[self.tensors].tolist(),
                local.offset[self.tensors].tolist(),
                local.dimensions[self.tensors].tolist(),
                strict=True,
            )
        ]


def plan_of(
    plan_id: str,
    group: GroupKey,
    structure: Structure,
    mask: bytes,
    whole: GlobalPlan | None,
    to_lowest_rank: bool,
) -> OwnPlan:
    """Return this rank's part of a plan that the ranks have made.

    `mask`: which rows of its local plan this rank writes, a bit each.
    """
    local = structure.plan
    written = np.unpackbits(np.frombuffer(mask, np.uint8), count=len(local)).astype(bool)
    is_object = local.kind == ItemKind.OBJECT
    tensors = np.flatnonzero(written & ~is_object)
    shapes = [
        torch.Size(extent[:dimensions])
        for extent, dimensions in zip(
            local.extent[tensors].tolist(), local.dimensions[tensors].tolist(), strict=True
        )
    ]
    properties = [local.table[number] for number in local.properties[tensors].tolist()]
    dtypes = [dtype_named(one.dtype) for one in properties]
    return OwnPlan(
        plan_id=plan_id,
        group=group,
        structure=structure,
        tensors=tensors.tolist(),
        objects=np.flatnonzero(written & is_object).tolist(),
        is_written=written[~is_object].tolist(),
        specs=Specs(dtypes, shapes),
        is_strided={one.layout for one in properties} <= {str(torch.strided)},
        is_complex=any(dtype.is_complex for dtype in set(dtypes)),
        whole=whole,
        to_lowest_rank=to_lowest_rank,
    )


def planned_by(
    context: SaveContext, plan: OwnPlan, structure: Structure, state: Mapping[str, Any]
) -> Planned | None:
    """Return this rank's part of a save; None if the state dict doesn't fit the plan.

    `structure`: its structure; another thread may just have given it one that is the same.
    """
    layout = context.session.layouts.of(plan.specs)
    sources = None
    if layout.is_plain and plan.is_strided:
        sources = SourcesByBlock(plan.is_written, plan.is_complex)
    leaves = structure.recognise(state, sources.look_at if sources is not None else None)
    if leaves is None:
        return None
    items = RowItems(plan, structure, structure.item_values(leaves))
    tail_nbytes = expected_tail(context, plan.plan_id, plan.objects, items.resolve)
    planned = Planned(
        items=items,
        tensors=plan.tensors,
        objects=plan.objects,
        layout=layout,
        nbytes=layout.layout.nbytes + tail_nbytes,
        sources=sources.found if sources is not None else None,
        plan_id=plan.plan_id,
        group=context.group,
    )
    return planned if context.frozen is None else _without_frozen(context, plan, planned, items)


def _without_frozen(
    context: SaveContext, plan: OwnPlan, planned: Planned, items: RowItems
) -> Planned:
    """Return the same part of a plan with the frozen tensors apart."""
    if context.settings.redundancy.parity:
        context.session.frozen.warn_without_effect(WHY_NOT_WITH_PARITY)
        return planned
    tensors = items.tensors(planned.tensors)
    # Another thread may set its own at once: each is right.
    planned, plan.split = frozen_apart(context, planned, plan.keys, tensors, plan.split)
    return planned


def rows_of(planned: Planned) -> RowItems:
    items = planned.items
    assert isinstance(items, RowItems)
    return items


class RowItems:
    """Items that are rows of the local plan, and stand for parts of the state dict's leaves."""

    def __init__(self, plan: OwnPlan, structure: Structure, parts: Sequence[Any]) -> None:
        self.structure, self._whole = structure, plan.whole  # that of all ranks, on rank 0
        self._plan_id, self._parts = plan.plan_id, parts
        self._local = structure.plan

    def without_values(self) -> RowItems:
        """Return the same items without the values that they stand for."""
        items = copy.copy(self)
        items._parts = ()
        return items

    def resolve(self, item: int) -> Any:
        part = self._parts[item]
        return part if isinstance(part, torch.Tensor) else stream_of(part)

    def tensors(self, items: Sequence[int]) -> list[torch.Tensor]:
        """Return what items that are tensors stand for."""
        return list(map(self._parts.__getitem__, items))

    def is_object(self, item: int) -> bool:
        return bool(self._local.kind[item] == ItemKind.OBJECT)

    def index(self, item: int) -> MetadataIndex:
        local = self._local
        fqn = local.names[local.name[item]]
        if self.is_object(item):
            return MetadataIndex(fqn)
        return MetadataIndex(fqn, torch.Size(local.offset[item, : local.dimensions[item]].tolist()))

    def fingerprint(self, items: Sequence[int]) -> int:
        return hash((self._plan_id, len(items)))

    def part(self, rank: int, items: Sequence[int], layout: Layout) -> WrittenItems:
        return WrittenItems(rank, np.array(items, np.int64), layout)

    share = staticmethod(share_written)

    def catalog(self, parts: Sequence[WrittenItems]) -> Catalog:
        assert self._whole is not None
        return catalog_of_written(self._whole, parts)
