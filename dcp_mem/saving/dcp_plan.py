"""Saves that DCP has planned: their items, and what is known of the global plan."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from dcp_mem.common.values import Outcome
from dcp_mem.format.catalog_conversion import RankItems, catalog_of
from dcp_mem.format.manifest import FlushRecord, Manifest
from dcp_mem.format.metadata import StorageInfo, with_storage
from dcp_mem.runtime.frozen import WHY_NOT_WITH_PARITY
from dcp_mem.runtime.last_saves import SavedPlan
from dcp_mem.saving.plan import PlannerItems, frozen_apart, item_key, plan_segment, resolves_as_is
from dcp_mem.saving.values import DCP_PLAN, Planned, SaveContext, Staged, places_in


def dcp_planned(
    context: SaveContext, plan: SavePlan, planner: SavePlanner, tracker: DcpPlanTracker
) -> Planned:
    """Take apart this rank's part of a plan that DCP has made."""
    items = PlannerItems(planner, partial(tracker.metadata, planner))
    planned = replace(
        plan_segment(context, plan, planner, items),
        is_new=tracker.has_changed(
            planner, context.session.last_saves.plans.get(context.plan_key(DCP_PLAN))
        ),
    )
    if context.frozen is None:
        return planned
    why_not = _why_not_frozen(context, planner)
    if why_not:
        context.session.frozen.warn_without_effect(why_not)
        return planned
    keys, tensors = list(map(item_key, planned.tensors)), map(planner.resolve_data, planned.tensors)
    return frozen_apart(context, planned, keys, list(tensors))[0]  # type: ignore[arg-type]


def _why_not_frozen(context: SaveContext, planner: SavePlanner) -> str:
    """Return why no tensor can be told to be the same as at the last save; "" where some may be."""
    if context.settings.redundancy.parity:
        return WHY_NOT_WITH_PARITY
    if not resolves_as_is(planner):
        return f"{type(planner).__name__} makes the tensors of each save anew"
    if context.has_copies:
        return "torch plans this asynchronous save, of private copies"
    return ""


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
