"""Saves by plans of dcp_mem's own (`dcp_mem.save`), and the last few of these plans.

The ranks plan together once, and recognise their state dicts from then on. A warm save exchanges
what every save does (see `agree.py` and `complete.py`), with a plan id in it, and nothing else.
"""

from __future__ import annotations

import copy
import logging
import threading
import time
import uuid
import zlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, reduce
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from dcp_mem.comm import Ranks
from dcp_mem.comm.agreement import (
    Attempted,
    Failures,
    attempt,
    described,
    joined,
    known_to_all,
    raise_together,
)
from dcp_mem.common.log import log, log_once
from dcp_mem.format.byte_items import is_plain_value, stream_of
from dcp_mem.format.catalog import Catalog
from dcp_mem.format.frames import QUANTISED, Specs, frame
from dcp_mem.format.layout import Layout
from dcp_mem.format.torch_names import dtype_named
from dcp_mem.planning.entries import first_of
from dcp_mem.planning.global_plan import GlobalPlan, merge
from dcp_mem.planning.joint_plan import JointPlan, join_plans, plan_of_rank
from dcp_mem.planning.plain_tensors import SourcesByBlock
from dcp_mem.planning.plan_catalog import WrittenItems, catalog_of_written, share_written
from dcp_mem.planning.plan_columns import ItemKind, NotDescribable
from dcp_mem.planning.state_structure import Structure
from dcp_mem.runtime.frozen import ItemKey
from dcp_mem.runtime.last_saves import GroupKey
from dcp_mem.runtime.session import Session
from dcp_mem.saving.values import (
    Items,
    NoCommonPlan,
    Planned,
    SaveContext,
    Unplanned,
    expected_tail,
    frozen_apart,
)

_PLANS_KEPT = 4


class OwnPlanItems:
    """The items of a state dict, by a plan of dcp_mem's own, for one save."""

    def __init__(
        self,
        plans: OwnPlans,
        state: Attempted[Mapping[str, Any]],
        *,
        why_not: str = "",
        to_lowest_rank: bool = False,
    ) -> None:
        """Take what is to be saved.

        `plans`: this rank's plans; a new one is added where none fits. `why_not`: why only DCP's
        planner can plan this; "" where dcp_mem may. `to_lowest_rank`: whether the first rank that
        holds a chunk writes it; otherwise the bytes are balanced.
        """
        self._plans, self._state = plans, state
        self._why_not, self._to_lowest_rank = why_not, to_lowest_rank
        self._is_new = False
        self._wanted = ""
        self._structure: Structure | None = None  # of what `plan` has looked at

    def plan(self, context: SaveContext) -> Planned | Unplanned:
        """Recognise the state dict, or look at its structure."""
        if self._why_not:
            return Unplanned(self._why_not)
        planned = self._plans.plan(
            context, self._state.value, self._wanted, to_lowest_rank=self._to_lowest_rank
        )
        if isinstance(planned, Unplanned):
            self._structure = planned.structure
            return planned
        self._structure = rows_of(planned).structure
        return replace(planned, is_new=self._is_new)

    def find_common_plan(self, context: SaveContext, reason: NoCommonPlan) -> bool:
        """Turn to a plan that fits on every rank, or else make one with all ranks.

        Returns False where only DCP's planner can plan this. Raises NoCommonPlan, DcpMemError.
        """
        if reason.copied_on:
            raise reason.refusal(context.name) from None
        if reason.why_not:
            return False
        if self._is_new:
            why = "a structure that is another each time it is looked at"
            raise known_to_all(NoCommonPlan(why)) from None
        self._wanted = "" if self._wanted else reason.in_common
        if not self._wanted:
            assert self._structure is not None
            self._plans.plan_together(context, self._structure, to_lowest_rank=self._to_lowest_rank)
            _name_differing(context.ranks, self._structure, self._state.value)
            self._is_new = True
        return True


class OwnPlans:
    """One rank's part of the last few plans that ranks made together; kept like the session.

    Any thread may recognise a state dict (`plan`); plans are made in a save's turn.
    """

    def __init__(self) -> None:
        self._plans: OrderedDict[str, OwnPlan] = OrderedDict()
        self._guard = threading.Lock()  # not held while state dicts are looked at, or planned

    def plan(
        self,
        context: SaveContext,
        state: Mapping[str, Any],
        wanted: str = "",
        *,
        to_lowest_rank: bool = False,
    ) -> Planned | Unplanned:
        """Return this rank's part of saving a state dict, by a plan that fits it, if there is one.

        `wanted`: id of the plan to take if it fits; the last one otherwise.
        """
        planned = self.recognised(context, state, wanted, to_lowest_rank=to_lowest_rank)
        if planned is not None:
            return planned
        try:
            structure = Structure(state)
            _check_dtypes(structure)
        except NotDescribable as reason:
            return Unplanned(str(reason))
        for plan in self._like(context.group, to_lowest_rank)[::-1]:
            if plan.structure.plan.is_same(structure.plan):
                # What differs doesn't count: the type of a byte item, say.
                self._replace(plan.structure, structure)
                planned = self._planned(context, plan, state)
                return planned or Unplanned(structure=structure)
        return Unplanned(structure=structure)

    def plan_together(
        self, context: SaveContext, structure: Structure, *, to_lowest_rank: bool = False
    ) -> None:
        """Make one plan of all ranks' state dicts.

        1. Join the local plans on their way up the tree.
        2. Rank 0 merges them: that settles which rank writes what.
        3. Scatter which rows each rank writes, or why the plans don't fit together.

        `context`: this rank's part in the save; its `ranks` make the plan. `to_lowest_rank`:
        whether the first rank that holds a chunk writes it; rank 0's word counts. Raises
        RankFailed.
        """
        started = time.monotonic()
        structure = self._known(context, structure, to_lowest_rank)
        ranks, whole = context.ranks, None
        own = attempt(lambda: plan_of_rank(ranks.rank, structure.plan))
        part = own.failures(ranks.rank), None if own.error is not None else own.value
        found = ranks.reduce(part, _joined)
        parts: Sequence[tuple[str, bytes, Failures]] = ()
        if found is not None:
            failures, plans = found
            masks: Sequence[bytes] = [b""] * ranks.size
            if plans is not None:
                merged = attempt(lambda: _merged(plans, to_lowest_rank))
                failures = merged.failures(0)
                if merged.error is None:
                    whole, masks = merged.value
            plan_id = uuid.uuid4().hex[:12]
            parts = [(plan_id, mask, failures) for mask in masks]
        plan_id, mask, failures = ranks.scatter(parts)
        raise_together(f"planning {context.name}", failures)
        plan = plan_of(plan_id, context.group, structure, mask, whole, to_lowest_rank)
        self._keep(plan, context.session)
        seconds = time.monotonic() - started
        log.info("planned %s with %d ranks in %.2f s", context.name, context.ranks.size, seconds)

    def recognised(
        self,
        context: SaveContext,
        state: Mapping[str, Any],
        wanted: str = "",
        *,
        to_lowest_rank: bool = False,
    ) -> Planned | None:
        """Return this rank's part of saving a state dict by a plan that fits it.

        `wanted`: id of the plan to take if it fits; the last one otherwise. Returns None where no
        plan fits.
        """
        plans = self._like(context.group, to_lowest_rank)[::-1]
        for plan in sorted(plans, key=lambda plan: plan.plan_id != wanted):
            planned = self._planned(context, plan, state)
            if planned is not None:
                return planned
        return None

    def forget(self, plan_id: str) -> None:
        """Forget a plan, so that the next save plans anew."""
        with self._guard:
            self._plans.pop(plan_id, None)

    # -- keeping them ------------------------------------------------------------------------------

    def _like(self, group: GroupKey, to_lowest_rank: bool) -> list[OwnPlan]:
        """Return the plans of a group of ranks, the last used one last."""
        with self._guard:
            return [
                plan
                for plan in self._plans.values()
                if plan.group == group and plan.to_lowest_rank == to_lowest_rank
            ]

    def _known(self, context: SaveContext, structure: Structure, to_lowest_rank: bool) -> Structure:
        """Return a known plan's structure, if it is the same; else this one."""
        known = (plan.structure for plan in self._like(context.group, to_lowest_rank))
        return next((one for one in known if one.plan.is_same(structure.plan)), structure)

    def _replace(self, known: Structure, structure: Structure) -> None:
        with self._guard:
            for plan in self._plans.values():
                if plan.structure is known:
                    plan.structure = structure

    def _keep(self, made: OwnPlan, session: Session) -> None:
        """Keep a plan, and drop the oldest ones."""
        with self._guard:
            self._plans[made.plan_id] = made
            while len(self._plans) > _PLANS_KEPT:
                plan_id, plan = self._plans.popitem(last=False)
                session.last_saves.plans.pop((*plan.group, plan_id), None)

    def _planned(
        self, context: SaveContext, plan: OwnPlan, state: Mapping[str, Any]
    ) -> Planned | None:
        structure = plan.structure  # another thread may replace it by one that is the same
        planned = planned_by(context, plan, structure, state)
        if planned is None:
            return None
        with self._guard:
            if plan.plan_id in self._plans:
                self._plans.move_to_end(plan.plan_id)
        others = [
            other.plan_id
            for other in self._like(plan.group, plan.to_lowest_rank)
            if other is not plan and other.structure is structure
        ]
        return replace(planned, other_plan_ids=tuple(others))


_Part = tuple[Failures, JointPlan | None]
"""The plans of some ranks, joined; or why those of some can't be, and None."""


def _joined(parts: Sequence[_Part]) -> _Part:
    failures = reduce(joined, [failures for failures, _ in parts])
    plans = [plan for _, plan in parts if plan is not None]
    return failures, None if failures else join_plans(plans)


def _merged(plans: JointPlan, to_lowest_rank: bool) -> tuple[GlobalPlan, Sequence[bytes]]:
    whole = merge(plans, to_lowest_rank=to_lowest_rank)
    return whole, whole.masks()


_own_plans: WeakKeyDictionary[Session, OwnPlans] = WeakKeyDictionary()
_guard = threading.Lock()


def own_plans_of(session: Session) -> OwnPlans:
    """Return the plans that belong to this process's session of a job."""
    with _guard:
        found = _own_plans.get(session)
        if found is None:
            found = _own_plans[session] = OwnPlans()
        return found


def _check_dtypes(structure: Structure) -> None:
    """Raise NotDescribable for a dtype that torch can't save; its planner has the error to raise.

    A plan with such a dtype would fail where it is compared with later state dicts.
    """
    for dtype in {dtype_named(one.dtype) for one in structure.plan.table} - QUANTISED:
        if why_not := _why_not_saved(dtype):
            raise NotDescribable(f"a tensor of {dtype}, which torch can't save: {why_not}")


@cache
def _why_not_saved(dtype: torch.dtype) -> str:
    try:
        frame(dtype, (0,))
    except Exception as error:
        return described(error)
    return ""


# -- one plan --------------------------------------------------------------------------------------


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
    )
    if context.frozen is None:
        return planned
    return frozen_apart(context, planned, plan.keys, items.tensors(planned.tensors))


def rows_of(planned: Planned) -> RowItems:
    items = planned.items
    assert isinstance(items, RowItems)
    return items


class RowItems(Items):
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

    def share(self, parts: Sequence[WrittenItems]) -> Sequence[WrittenItems]:
        return share_written(parts)

    def catalog(self, parts: Sequence[WrittenItems]) -> Catalog:
        assert self._whole is not None
        return catalog_of_written(self._whole, parts)


# -- values that differ ----------------------------------------------------------------------------


def _name_differing(ranks: Ranks, structure: Structure, state: Mapping[str, Any]) -> None:
    """Name, on rank 0, plain values that aren't the same on all ranks; one exchange, by all."""
    if ranks.size == 1:
        return
    seen = attempt(lambda: _digests(structure, state))
    digests = ranks.reduce(seen.value if seen.error is None else {}, _joined_digests)
    differing = [name for name, digest in (digests or {}).items() if digest is None]
    if differing:
        log_once(
            f"{first_of(differing)} differ from rank to rank, and one rank's values are saved for "
            'all: give each rank\'s an entry of its own, such as f"rank-{rank}"',
            logging.WARNING,
        )


def _digests(structure: Structure, state: Mapping[str, Any]) -> dict[str, int | None]:
    plan, leaves = structure.plan, structure.recognise(state)
    if leaves is None:
        return {}
    values = structure.item_values(leaves)
    found: dict[str, int | None] = {}
    for row in (plan.kind == ItemKind.OBJECT).nonzero()[0].tolist():
        if is_plain_value(values[row]):
            found[plan.names[plan.name[row]]] = zlib.crc32(repr(values[row]).encode())
    return found


def _joined_digests(parts: Sequence[dict[str, int | None]]) -> dict[str, int | None]:
    found: dict[str, int | None] = {}
    for part in parts:
        for name, digest in part.items():
            found[name] = digest if found.get(name, digest) == digest else None
    return found
