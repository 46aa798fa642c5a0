"""Second exchange of a save: receipts are joined, and the checkpoint becomes COMPLETE."""

from __future__ import annotations

import operator
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import Any, NamedTuple

from dcp_mem.comm.agreement import (
    Attempted,
    Failures,
    attempt,
    attempt_or_log,
    joined,
    on_rank_0,
    raise_together,
)
from dcp_mem.common import faults
from dcp_mem.common.sendable import sendable
from dcp_mem.format import names
from dcp_mem.format.catalog import catalog_key
from dcp_mem.format.manifest import Manifest
from dcp_mem.format.segments import Segments, Tail
from dcp_mem.runtime.last_saves import SavedPlan
from dcp_mem.saving.retention import apply_retention
from dcp_mem.saving.values import (
    Agreed,
    Completed,
    Items,
    Planned,
    SaveContext,
    Staged,
)


@sendable
class _Receipts(NamedTuple):
    """The receipts of some ranks, joined; small if nothing has changed since the last save.

    A tuple, which is sent by position: each save sends one.
    """

    last: str  # id of the last save by this plan, as far as each rank knows
    is_new: bool  # whether some segment isn't made as it was then
    tails: tuple[tuple[int, Tail], ...]  # (rank, tail) of the ranks whose tails lie elsewhere
    failures: Failures

    def join(self, other: _Receipts) -> _Receipts:
        """Return what two sets of ranks say together."""
        return _Receipts(
            self.last,
            self.is_new or other.is_new or self.last != other.last,
            self.tails + other.tails,
            joined(self.failures, other.failures),
        )


def complete(
    context: SaveContext,
    agreed: Agreed,
    planned: Planned,
    staged: Attempted[Staged],
) -> Completed:
    """Mark the checkpoint COMPLETE on every node; on return this node can restore it.

    1. Receipts: what differs from the last save, and what failed, in one exchange (invariant 8).
    2. Describe: segments and catalog are the last save's, or the coordinator makes new ones.
    3. Publish: each node's leader writes the manifest. No node drops an older checkpoint before all
       have this.
    4. Retain: each node's leader evicts what the policy doesn't keep.
    5. Remember what the next save may go by.

    Raises RankFailed.
    """
    session, topology = context.session, agreed.topology
    key = context.plan_key(planned.plan_id)
    last = session.last_saves.plans.get(key)
    is_shared = staged.error is not None
    try:
        receipts = _exchange_receipts(context, staged, last, is_new=planned.is_new)
        faults.point("complete.receipts")
        # Before the checkpoint is there: from then on its segments may be flushed.
        _share(context, staged.value)
        is_shared = True
        saved, catalog = _same_as(last, agreed, receipts), None
        if saved is None:
            saved, catalog = _described(context, agreed, staged.value)
        manifest = _manifest(context, agreed, saved)
        _publish_on_all_nodes(context, agreed, manifest, catalog)
        if topology.is_leader:
            _retain(context, agreed)
            faults.point("complete.evicted")
        saved = replace(saved, save_id=agreed.save_id)
        _remember(context, planned, saved)
        save = (context.name, agreed.save_id)
        session.frozen.remember(context.group, staged.value.frozen, save)
        session.numbers.count(manifest)
        session.last_saves.is_clean = True
        return Completed(manifest, agreed, staged.value, saved)
    finally:
        if not is_shared:
            _share(context, staged.value)


# -- receipts --------------------------------------------------------------------------------------


def _exchange_receipts(
    context: SaveContext,
    staged: Attempted[Staged],
    last: SavedPlan | None,
    *,
    is_new: bool,
) -> _Receipts:
    """Join all ranks' receipts. Raises on all ranks where any of them has failed."""
    rank = context.ranks.rank
    if staged.error is None:
        receipt = _receipt(rank, staged.value, last, is_new=is_new)
    else:
        receipt = _Receipts("", False, (), staged.failures(rank))
    receipts = context.ranks.all_reduce(receipt, _Receipts.join)
    if receipts.failures and staged.error is None:
        context.session.slots.abandon(staged.value.slot)
        if staged.value.frozen is not None:
            staged.value.frozen.give_back()
    raise_together(f"saving {context.name}", receipts.failures, staged.error)
    return receipts


def _receipt(rank: int, staged: Staged, last: SavedPlan | None, *, is_new: bool) -> _Receipts:
    tail = staged.segment.tail
    if last is None:
        return _Receipts("", True, (), ())
    is_elsewhere = last.segments.tail[rank] != tail
    is_new = is_new or _differs(last, staged, rank)
    return _Receipts(last.save_id, is_new, ((rank, tail),) if is_elsewhere else (), ())


def _differs(last: SavedPlan, staged: Staged, rank: int) -> bool:
    return (
        last.segments.layout[rank] != staged.segment.layout
        or len(last.segments.tail[rank]) != len(staged.segment.tail)
        or last.items != _fingerprint(staged)
    )


def _fingerprint(staged: Staged) -> int:
    """Return a number that is the same for the same items in the same order in each segment."""
    items = staged.items.fingerprint(staged.order)
    if staged.frozen is None:
        return items
    frozen = staged.frozen.items
    return hash((items, frozen.layout.described.key, *frozen.keys))


def _share(context: SaveContext, staged: Staged) -> None:
    """Let readers and the agent in to this rank's segments."""
    context.session.slots.share(staged.slot)
    if staged.frozen is not None:
        staged.frozen.share()


# -- segments and catalog --------------------------------------------------------------------------


def _same_as(last: SavedPlan | None, agreed: Agreed, receipts: _Receipts) -> SavedPlan | None:
    """Return what was saved last, moved on to this save; None where that doesn't tell all."""
    if last is None or receipts.is_new:
        return None
    return replace(last, segments=last.segments.for_next_save(agreed.save_id, dict(receipts.tails)))


def _described(context: SaveContext, agreed: Agreed, staged: Staged) -> tuple[SavedPlan, Any]:
    """Have the coordinator make the catalog of all ranks' items.

    Returns what is saved, and on each node's leader the catalog's bytes.
    """
    ranks = context.ranks
    second = None if staged.frozen is None else staged.frozen.sealed
    found = ranks.all_reduce({ranks.rank: (staged.segment, second)}, operator.or_)
    firsts, seconds = zip(*(found[rank] for rank in range(ranks.size)), strict=True)
    segments = Segments.of(agreed.save_id, filter(None, (*firsts, *seconds)))
    items = staged.items
    parts = ranks.gather(_parts(context.rank, staged), partial(_share_parts, items))
    in_order = [
        part for place in (0, 1) for of_rank in parts for part in of_rank[place : place + 1]
    ]
    made = attempt(lambda: items.catalog(in_order).to_bytes() if ranks.rank == 0 else b"")
    key = on_rank_0(ranks, f"describing {context.name}", lambda: catalog_key(made.value))
    context.session.heap.note_growth()
    saved = SavedPlan(key, _fingerprint(staged), segments)
    return saved, ranks.tell_leaders(made.value)


def _parts(rank: int, staged: Staged) -> list[Any]:
    """Return what a rank says of its segments, the one with its frozen items last."""
    parts = [staged.items.part(rank, staged.order, staged.layout.described)]
    if staged.frozen is not None:
        frozen, number = staged.frozen.items, rank + names.FROZEN
        parts.append(staged.items.part(number, frozen.rows, frozen.layout.described))
    return parts


def _share_parts(items: Items, parts: Sequence[list[Any]]) -> list[list[Any]]:
    shared = iter(items.share(list(chain.from_iterable(parts))))
    return [list(islice(shared, len(part))) for part in parts]


def _retain(context: SaveContext, agreed: Agreed) -> None:
    """Evict what the policy doesn't keep. All ranks know the checkpoint to be complete by now."""
    retain = partial(
        apply_retention,
        context.session.memory,
        context.scope,
        context.settings.keep_memory,
        gets_copies=bool(agreed.redundancy),
        persists_all=context.settings.persists_all,
        made=agreed.save_id,
    )
    attempt_or_log(f"{context.name} is complete, but older ones stay in memory", retain)


def _manifest(context: SaveContext, agreed: Agreed, saved: SavedPlan) -> Manifest:
    return Manifest(
        name=context.name,
        save_id=agreed.save_id,
        scope=context.scope,
        job=context.settings.job,
        created=agreed.created,
        generation=agreed.number.generation,
        count=agreed.number.count,
        run=agreed.run,
        world_size=context.ranks.size,
        persist=agreed.persist,
        committer=saved.segments.node[0],
        segments=saved.segments,
        catalog=saved.catalog,
        stage_seconds=time.monotonic() - agreed.started,
        step=agreed.info.step,
        metrics=agreed.info.metrics,
        replaces=agreed.replaces,
        persisted=agreed.persisted,
    )


# -- publication -----------------------------------------------------------------------------------


def _publish_on_all_nodes(
    context: SaveContext, agreed: Agreed, manifest: Manifest, catalog: Any
) -> None:
    """Publish on this node, if this rank leads it, and wait until all nodes have.

    No node gives up an older checkpoint before that. And no rank ends its part of the save: until
    the manifest lists its segment, only the lease of a process that saves keeps that from a sweep.

    `catalog`: its bytes; None where this node has it already.
    """
    session, ranks = context.session, context.ranks

    def publish() -> None:
        if agreed.topology.is_leader:
            if catalog is not None:
                session.catalogs.put(catalog)
            session.numbers.keep_newest(manifest)
            is_flushed = concerns_flusher(context, manifest)
            session.announce_run(context.settings, manifest.run, is_flushed=is_flushed)
            session.publisher.publish(manifest, sealed=True)

    published = attempt(publish)
    failures = ranks.all_reduce(published.failures(ranks.rank), joined)
    raise_together(f"publishing {context.name}", failures, published.error)


def concerns_flusher(context: SaveContext, manifest: Manifest) -> bool:
    """Return whether the flusher has something to do for a checkpoint.

    The first one of a run gets the run a generation on storage, wherever the checkpoint is to stay.
    """
    settings = context.settings
    is_first = manifest.count == 1 and not settings.persist.is_never
    is_exported = settings.export is not None and settings.export.of_complete
    return manifest.persist or is_first or is_exported


def _remember(context: SaveContext, planned: Planned, saved: SavedPlan) -> None:
    """Keep what the next save by this plan may go by; drop catalogs that no plan needs."""
    plans, key = context.session.last_saves.plans, context.plan_key(planned.plan_id)
    last = plans.get(key)
    plans[key] = saved
    if last is not None and last.catalog != saved.catalog:
        context.session.catalogs.keep_only({plan.catalog for plan in plans.values()})
