"""Saves that DCP has planned: their items, and what is known of the global plan.

Plans of contiguous tensors, and of DTensors made of such, take a fast path, on which the loops over
the items run in C and touch as little of them as they can: twenty thousand tensors one by one,
through the planner, take longer than the copy of their gigabyte.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import compress
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from dcp_mem.common.values import Outcome
from dcp_mem.format.catalog import Catalog
from dcp_mem.format.catalog_conversion import RankItems, catalog_of
from dcp_mem.format.frames import Specs
from dcp_mem.format.manifest import FlushRecord, Manifest
from dcp_mem.format.metadata import StorageInfo, with_storage
from dcp_mem.planning.plain_tensors import Sources, sources_of
from dcp_mem.planning.shard_marks import have_own_marks
from dcp_mem.runtime.frozen import ItemKey
from dcp_mem.runtime.last_saves import SavedPlan
from dcp_mem.saving.values import (
    DCP_PLAN,
    Items,
    Planned,
    SaveContext,
    Staged,
    expected_tail,
    frozen_apart,
    places_in,
)

_TYPE, _FQN, _OFFSET = map(operator.attrgetter, ("type", "index.fqn", "index.offset"))
_PLANNED_DTYPE = operator.attrgetter("tensor_data.properties.dtype")
_PLANNED_SHAPE = operator.attrgetter("tensor_data.chunk.sizes")
_DTYPE, _SHAPE = operator.attrgetter("dtype"), operator.attrgetter("shape")
_RESOLVING = ("resolve_data", "lookup_object", "transform_object")
_PLANNING = ("create_local_plan", "create_global_plan", "_create_global_plan", "finish_plan")


def dcp_planned(
    context: SaveContext, plan: SavePlan, planner: SavePlanner, tracker: DcpPlanTracker
) -> Planned:
    """Take apart this rank's part of a plan that DCP has made."""
    items = PlannerItems(planner, partial(tracker.metadata, planner))
    saved = context.session.last_saves.plans.get(context.plan_key(DCP_PLAN))
    is_new = tracker.has_changed(planner, saved)
    planned = _planned(context, plan, planner, items, is_new=is_new)
    if context.frozen is None:
        return planned
    if why_not := _why_not_frozen(context, planner):
        context.session.last_saves.warn_once(f"frozen= has no effect: {why_not}")
        return planned
    keys, tensors = list(map(item_key, planned.tensors)), map(planner.resolve_data, planned.tensors)
    return frozen_apart(context, planned, keys, list(tensors))  # type: ignore[arg-type]


def _why_not_frozen(context: SaveContext, planner: SavePlanner) -> str:
    """Return why no tensor can be told to be the same as at the last save; "" where some may be."""
    if not resolves_as_is(planner):
        return f"{type(planner).__name__} makes the tensors of each save anew"
    if context.has_copies:
        return "torch plans this asynchronous save, of private copies"
    return ""


def _planned(
    context: SaveContext, plan: SavePlan, planner: SavePlanner, items: PlannerItems, *, is_new: bool
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
        is_new=is_new,
    )


class PlannerItems(Items):
    """Items of a plan that DCP's planner made, whose metadata is asked for on rank 0."""

    def __init__(self, planner: SavePlanner, metadata: Callable[[], Metadata]) -> None:
        self._planner, self._metadata = planner, metadata

    def resolve(self, item: WriteItem) -> Any:
        return self._planner.resolve_data(item)

    def index(self, item: WriteItem) -> MetadataIndex:
        return item.index

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


class DcpPlanTracker:
    """The coordinator's view of DCP's global plan: its metadata, and whether it has changed.

    The metadata that DCP will hand to `finish` is made before `write_data`, but not shown to the
    writer: it is looked up in DCP's own frame. Under other drivers of the contract, planners
    derived from torch's default keep it; for other planners it is made again from the global plans.
    `finish` then puts right what differs.
    """

    def __init__(self) -> None:
        self._plans: Sequence[SavePlan] = ()
        self._structure: object = None
        self._given: Metadata | None = None
        self._kept: Metadata | None = None
        self._saved: SavedPlan | None = None
        self._has_changed = True

    def see(self, plans: Sequence[SavePlan], metadata: Metadata | None) -> None:
        """Take note of the global plan of the save that begins.

        `plans`: of all ranks. One that isn't usable stands for "as before" (torch's plan caching).
        """
        self._plans, self._given = plans, metadata
        structure = [_structure(plan) for plan in plans] if all(map(_is_usable, plans)) else None
        self._has_changed = self._has_changed or structure != self._structure
        self._structure = structure

    def has_changed(self, planner: SavePlanner, saved: SavedPlan | None) -> bool:
        """Return whether the metadata must be described again; False but on the coordinator.

        `saved`: what was saved last by DCP's plans, perhaps through another writer of the same job.
        """
        if not self._plans:
            return False
        if saved is not self._saved:
            return True
        # Plan caching keeps the very same metadata for as long as nothing changes.
        is_cached_anew = self._structure is None and self._known(planner) is not self._kept
        return self._has_changed or is_cached_anew or _describes_by_itself(planner)

    def metadata(self, planner: SavePlanner) -> Metadata:
        """Return the metadata of the global plan, without storage data."""
        known = self._known(planner)
        if known is not None:
            return known
        _, metadata = create_default_global_save_plan(list(self._plans), rewrite_index_hints=False)
        mappings = [
            plan.planner_data for plan in self._plans if isinstance(plan.planner_data, dict)
        ]
        metadata.planner_data = {
            key: value for mapping in reversed(mappings) for key, value in mapping.items()
        } or None
        return metadata

    def settle(self, planner: SavePlanner, saved: SavedPlan) -> None:
        """Remember that a checkpoint is complete with this structure."""
        if self._plans:
            self._kept, self._saved = self._known(planner), saved
            self._has_changed = _describes_by_itself(planner)

    def release(self) -> None:
        """Let go of the plans; called outside of what the save waits for."""
        self._plans, self._given = (), None
        if self._structure is not None:
            self._kept = None  # plan caching alone asks for it again

    def is_published(self, metadata: Metadata) -> bool:
        """Return whether this is the very metadata that the checkpoint was published with."""
        return metadata is self._kept

    def _known(self, planner: SavePlanner) -> Metadata | None:
        if self._given is not None:
            return self._given
        kept = (
            getattr(planner, "metadata", None) if isinstance(planner, DefaultSavePlanner) else None
        )
        return kept if isinstance(kept, Metadata) else None


def _describes_by_itself(planner: SavePlanner) -> bool:
    """Tell whether the planner's metadata may change while its plan doesn't."""
    hooks = ("create_global_plan", "_create_global_plan")
    return any(
        getattr(type(planner), hook, None) is not getattr(DefaultSavePlanner, hook, None)
        for hook in hooks
    )


def _is_usable(plan: SavePlan) -> bool:
    """Tell whether this is a plan, and doesn't stand for the last one (plan caching, torch 2.7)."""
    return bool(getattr(plan, "usable", True))


def _structure(plan: SavePlan) -> object:
    """Return a fingerprint of what a plan's metadata is made of.

    It is the content itself where the planner's data can't be hashed.
    """
    items = tuple(
        (item.index.fqn, item.index.offset, item.type)
        if item.tensor_data is None
        else (
            item.index.fqn,
            item.index.offset,
            item.type,
            item.tensor_data.size,
            item.tensor_data.chunk.sizes,
            item.tensor_data.properties.dtype,
            item.tensor_data.properties.requires_grad,
        )
        for item in plan.items
    )
    data = plan.planner_data
    try:
        return hash(items), hash(tuple(data.items()) if isinstance(data, dict) else data)
    except TypeError:
        return items, data


def republish(
    context: SaveContext,
    manifest: Manifest,
    metadata: Metadata,
    results: Sequence[Sequence[WriteResult]],
) -> None:
    """Give a complete checkpoint the metadata that its planner handed over only now."""
    session, memory = context.session, context.session.memory
    layouts = session.catalogs.get(manifest.catalog)
    indexes: dict[str, list[MetadataIndex]] = {one.file: [] for one in manifest.segments}
    for result in itertools.chain(*results):
        indexes[result.storage_data.relative_path].append(result.index)
    items = [
        RankItems(segment.rank, indexes[segment.file], layouts.layout(segment.rank))
        for segment in manifest.segments
    ]
    catalog = session.catalogs.put(catalog_of(metadata, items).to_bytes())
    manifest = replace(manifest, catalog=catalog)
    session.catalogs.link(manifest.catalog, memory.checkpoint_directory(manifest.name))
    memory.publish(manifest)
    session.publisher.show(manifest)
    for checkpoint in memory.find(manifest.name):
        is_same_save = checkpoint.manifest.save_id == manifest.save_id
        if is_same_save and checkpoint.flush.outcome == Outcome.DURABLE:
            # The flush was quicker, and committed the metadata that is replaced here.
            memory.record_flush(checkpoint, FlushRecord(save_id=manifest.save_id))
    if manifest.persist:
        session.wake_agent(context.settings)


def results_of(staged: Staged) -> list[WriteResult]:
    """Return the write results of all items, for DCP."""
    found = [(staged.segment.file, staged.order, staged.places)]
    if (frozen := staged.frozen) is not None:
        assert frozen.sealed is not None
        found.append((frozen.sealed.file, frozen.items.rows, [*places_in(frozen.items.layout)]))
    return [
        WriteResult(staged.items.index(item), nbytes, StorageInfo(file, offset, nbytes))
        for file, items, places in found
        for item, (offset, nbytes) in zip(items, places, strict=True)
    ]


def fill_in(
    metadata: Metadata, results: Sequence[Sequence[WriteResult]], manifest: Manifest
) -> None:
    """Add to DCP's metadata where each item lies."""
    storage_data = {result.index: result.storage_data for of_rank in results for result in of_rank}
    finished = with_storage(metadata, storage_data, manifest.save_id, manifest.name)
    metadata.storage_data, metadata.storage_meta = finished.storage_data, finished.storage_meta
    if hasattr(metadata, "version"):
        metadata.version = finished.version
