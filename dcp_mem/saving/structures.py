"""Saves that DCP has planned: what the coordinator knows of their global plan, and the catalog that comes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from dcp_mem.format.catalog import Catalog
from dcp_mem.format.described import RankItems, catalog_of
from dcp_mem.saving.values import Staged
from dcp_mem.session import SavedPlan


class Structures:
    """What the coordinator knows of the global plan: the metadata that goes with it, and whether it has changed.

    The metadata that DCP will hand to `finish` is built before `write_data`, but not shown to the writer: it is looked up
    in DCP's own frame. Under other drivers of the contract, planners derived from torch's default keep it, and for others
    it is made again from the global plans; `finish` then puts right what differs.
    """

    def __init__(self) -> None:
        self._plans: Sequence[SavePlan] = ()
        self._seen: object = None
        self._given: Metadata | None = None
        self._kept: Metadata | None = None
        self._saved: SavedPlan | None = None
        self._changed = True

    def see(self, plans: Sequence[SavePlan], metadata: Metadata | None) -> None:
        """The global plan of the save that begins. A plan that isn't usable stands for "as before" (torch's plan caching)."""
        self._plans, self._given = plans, metadata
        seen = [_structure(plan) for plan in plans] if all(map(_is_usable, plans)) else None
        self._changed = self._changed or seen != self._seen
        self._seen = seen

    def changed(self, planner: SavePlanner, saved: SavedPlan | None) -> bool:
        """Whether the metadata must be described anew. Always False on ranks that aren't the coordinator.

        saved: what was saved last, perhaps by another writer of the same job.
        """
        if not self._plans:
            return False
        if saved is not self._saved:
            return True
        # Plan caching keeps the very same metadata for as long as nothing changes.
        cached_anew = self._seen is None and self._known(planner) is not self._kept
        return self._changed or cached_anew or _describes_by_itself(planner)

    def describing(self, planner: SavePlanner) -> Describing:
        """How the catalog of this save comes about."""
        return Describing(lambda: self._metadata(planner))

    def _metadata(self, planner: SavePlanner) -> Metadata:
        """The metadata of the global plan, without storage data."""
        known = self._known(planner)
        if known is not None:
            return known
        _, metadata = create_default_global_save_plan(list(self._plans), rewrite_index_hints=False)
        mappings = [plan.planner_data for plan in self._plans if isinstance(plan.planner_data, dict)]
        metadata.planner_data = {key: value for mapping in reversed(mappings) for key, value in mapping.items()} or None
        return metadata

    def settle(self, planner: SavePlanner, saved: SavedPlan) -> None:
        """The checkpoint is complete with this structure."""
        if self._plans:
            self._kept, self._saved, self._changed = self._known(planner), saved, _describes_by_itself(planner)

    def release(self) -> None:
        """Let go of the plans, outside of what the save waits for."""
        self._plans, self._given = (), None
        if self._seen is not None:
            self._kept = None  # plan caching alone asks for it again

    def is_published(self, metadata: Metadata) -> bool:
        """Whether this is the very metadata that went with the checkpoint."""
        return metadata is self._kept

    def _known(self, planner: SavePlanner) -> Metadata | None:
        if self._given is not None:
            return self._given
        kept = getattr(planner, "metadata", None) if isinstance(planner, DefaultSavePlanner) else None
        return kept if isinstance(kept, Metadata) else None


def _describes_by_itself(planner: SavePlanner) -> bool:
    """Whether the planner's metadata may change while its plan doesn't."""
    hooks = ("create_global_plan", "_create_global_plan")
    return any(getattr(type(planner), hook, None) is not getattr(DefaultSavePlanner, hook, None) for hook in hooks)


def _is_usable(plan: SavePlan) -> bool:
    """Whether this is a plan, and not one that stands for the last one (torch's plan caching, 2.7 and later)."""
    return bool(getattr(plan, "usable", True))


def _structure(plan: SavePlan) -> object:
    """A fingerprint of what the metadata of a plan is made of; the thing itself where its planner's data can't be hashed."""
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


class Describing:
    """Each rank says what DCP calls its items; the rest is in DCP's metadata, which the coordinator has."""

    def __init__(self, metadata: Callable[[], Metadata]) -> None:
        self._metadata = metadata

    def part(self, rank: int, staged: Staged) -> RankItems:
        return RankItems(rank, list(map(staged.plan.index, staged.items)), staged.layout.described)

    def share(self, parts: Sequence[RankItems]) -> Sequence[RankItems]:
        return parts

    def catalog(self, parts: Sequence[RankItems]) -> Catalog:
        return catalog_of(self._metadata(), parts)
