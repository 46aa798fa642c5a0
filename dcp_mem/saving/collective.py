"""The road of `dcp_mem.save`: the ranks plan together once, and by that plan for as long as their state dicts look alike.

A warm save exchanges what every save does (see agree.py and complete.py), with a plan id in it, and nothing else.
"""

from __future__ import annotations

import io
import time
import uuid
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from dcp_mem.errors import RankFailed
from dcp_mem.events import log
from dcp_mem.format.catalog import Catalog
from dcp_mem.format.frames import Specs
from dcp_mem.format.torch_names import dtype_named
from dcp_mem.planning.columns import Kind, NotDescribable, share_columns
from dcp_mem.planning.describe import Written, describe, shared
from dcp_mem.planning.local import Structure
from dcp_mem.planning.merge import GlobalPlan, merge
from dcp_mem.planning.plain import Addresses
from dcp_mem.saving.plan import expected_tail
from dcp_mem.saving.values import Caller, Planned, Staged, Unplanned
from dcp_mem.session import Session

_PLANS_KEPT = 4


@dataclass(eq=False)
class _Plan:
    """What a rank keeps of a plan that all ranks made together.

    group: which ranks. tensors, objects: rows of the local plan that this rank writes, in order. is_written: of each
    tensor of the local plan, whether it is among those. specs: of those, and of whatever is recognised. is_strided,
    is_complex: whether all of them are, and any of them is. whole: the plan of all ranks, on the coordinator.
    """

    plan_id: str
    group: tuple[str, str]
    structure: Structure
    tensors: Sequence[int]
    objects: Sequence[int]
    is_written: Sequence[bool]
    specs: Specs
    is_strided: bool
    is_complex: bool
    whole: GlobalPlan | None


class Collective:
    """One rank's plans in common with others, kept for as long as its job's session is."""

    def __init__(self) -> None:
        self._plans: OrderedDict[str, _Plan] = OrderedDict()
        self._looked_at: Structure | None = None

    def plan(self, caller: Caller, state: Mapping[str, Any] | Exception, wanted: str = "") -> Planned | Unplanned:
        """This rank's part in saving a state dict, by a plan that fits it where there is one (the wanted one, if it does).

        state: an exception where there is none; it is raised.
        """
        if isinstance(state, Exception):
            raise state
        mine = [plan for plan in reversed(self._plans.values()) if plan.group == caller.group]
        for plan in sorted(mine, key=lambda plan: plan.plan_id != wanted):
            planned = self._planned(caller, plan, state)
            if planned is not None:
                return planned
        try:
            structure = self._looked_at = Structure(state)
        except NotDescribable as reason:
            return Unplanned(str(reason))
        for plan in mine:
            if plan.structure.plan.is_same(structure.plan):
                self._replace(plan.structure, structure)  # what has changed doesn't count: the type of a byte item, say
                return self._planned(caller, plan, state) or Unplanned()
        return Unplanned()

    def _replace(self, known: Structure, structure: Structure) -> None:
        for plan in self._plans.values():
            if plan.structure is known:
                plan.structure = structure

    def plan_together(self, caller: Caller) -> None:
        """Make one plan of what `plan` looked at last. Raises RankFailed on all ranks where it doesn't fit together."""
        started = time.monotonic()
        structure = self._looked_at
        assert structure is not None
        mine = (plan.structure for plan in self._plans.values() if plan.group == caller.group)
        structure = next((known for known in mine if known.plan.is_same(structure.plan)), structure)
        gathered = caller.ranks.gather(structure.plan, share_columns)
        parts: list[tuple[str, bytes, str]] = []
        whole: GlobalPlan | None = None
        if caller.ranks.rank == 0:
            try:
                whole = merge(gathered)
                plan_id = uuid.uuid4().hex[:16]
                parts = [(plan_id, _mask(len(one), whole.rows_of(rank)), "") for rank, one in enumerate(gathered)]
            except Exception as error:
                parts = [("", b"", f"{type(error).__name__}: {error}")] * len(gathered)
        plan_id, mask, trouble = caller.ranks.scatter(parts)
        if trouble:
            raise RankFailed(f"planning {caller.name}", [(0, trouble)])
        self._plans[plan_id] = _plan_of(plan_id, caller.group, structure, mask, whole)
        while len(self._plans) > _PLANS_KEPT:
            dropped, _ = self._plans.popitem(last=False)
            caller.session.saved.pop(replace(caller, plan_id=dropped).plan_key, None)
        log.info("planned %s with %d ranks in %.2f s", caller.name, caller.ranks.size, time.monotonic() - started)

    def describing(self, plan_id: str) -> Describing:
        """How the catalog of a plan comes about."""
        return Describing(self._plans[plan_id].whole)

    def _planned(self, caller: Caller, plan: _Plan, state: Mapping[str, Any]) -> Planned | None:
        planned = _planned(replace(caller, plan_id=plan.plan_id), plan, state)
        if planned is None:
            return None
        self._plans.move_to_end(plan.plan_id)
        self._looked_at = plan.structure
        others = (other for other in self._plans.values() if other is not plan and other.group == plan.group)
        fitting = tuple(other.plan_id for other in others if other.structure is plan.structure)
        return replace(planned, others=fitting)


def collective_of(session: Session) -> Collective:
    """The plans in common of this process's session of a job."""
    if session.collective is None:
        session.collective = Collective()
    assert isinstance(session.collective, Collective)
    return session.collective


def _mask(count: int, rows: Any) -> bytes:
    mask = np.zeros(count, bool)
    mask[rows] = True
    return np.packbits(mask).tobytes()


def _plan_of(
    plan_id: str, group: tuple[str, str], structure: Structure, mask: bytes, whole: GlobalPlan | None
) -> _Plan:
    local = structure.plan
    written = np.unpackbits(np.frombuffer(mask, np.uint8), count=len(local)).astype(bool)
    is_object = local.kind == Kind.OBJECT
    tensors = np.flatnonzero(written & ~is_object)
    shapes = [
        torch.Size(extent[:dimensions])
        for extent, dimensions in zip(local.extent[tensors].tolist(), local.dimensions[tensors].tolist(), strict=True)
    ]
    properties = [local.table[number] for number in local.properties[tensors].tolist()]
    dtypes = [dtype_named(one.dtype) for one in properties]
    return _Plan(
        plan_id,
        group,
        structure,
        tensors.tolist(),
        np.flatnonzero(written & is_object).tolist(),
        written[~is_object].tolist(),
        Specs(dtypes, shapes),
        {one.layout for one in properties} <= {str(torch.strided)},
        any(dtype.is_complex for dtype in set(dtypes)),
        whole,
    )


def _planned(caller: Caller, plan: _Plan, state: Mapping[str, Any]) -> Planned | None:
    """This rank's part in a plan; None if the state dict doesn't fit it."""
    layout = caller.session.plan_layout(plan.specs)
    addresses = Addresses(plan.is_written, plan.is_complex) if layout.is_plain and plan.is_strided else None
    leaves = plan.structure.recognise(state, addresses.look_at if addresses is not None else None)
    if leaves is None:
        return None
    items = _PartItems(plan, plan.structure.parts_of(leaves))
    nbytes = layout.layout.nbytes + expected_tail(caller, plan.objects, items.resolve)
    sources = addresses.found if addresses is not None else None
    return Planned(items, plan.tensors, plan.objects, layout, nbytes, sources, plan.plan_id)


class Describing:
    """Each rank says which of its rows it has put where; all else is in the global plan, which the coordinator has."""

    def __init__(self, whole: GlobalPlan | None) -> None:
        self._whole = whole

    def part(self, rank: int, staged: Staged) -> Written:
        return Written(rank, np.array(staged.items, np.int64), staged.layout.described)

    def share(self, parts: Sequence[Written]) -> Sequence[Written]:
        return shared(parts)

    def catalog(self, parts: Sequence[Written]) -> Catalog:
        assert self._whole is not None
        return describe(self._whole, parts)


class _PartItems:
    """Items are rows of the local plan, and stand for parts of the state dict's leaves."""

    def __init__(self, plan: _Plan, parts: Sequence[Any]) -> None:
        self._plan, self._parts = plan, parts
        self._local = plan.structure.plan

    def resolve(self, item: int) -> Any:
        part = self._parts[item]
        if self._local.kind[item] == Kind.OBJECT:
            stream = io.BytesIO()
            torch.save(part, stream)
            return stream
        return part

    def index(self, item: int) -> MetadataIndex:
        local = self._local
        fqn = local.names[local.name[item]]
        if local.kind[item] == Kind.OBJECT:
            return MetadataIndex(fqn)
        return MetadataIndex(fqn, torch.Size(local.offset[item, : local.dimensions[item]].tolist()))

    def fingerprint(self, items: Sequence[int]) -> int:
        return hash((self._plan.plan_id, len(items)))
