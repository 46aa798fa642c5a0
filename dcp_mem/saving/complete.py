"""Third stage: receipts are exchanged, and the checkpoint becomes COMPLETE on every node."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch.distributed.checkpoint.metadata import Metadata

from dcp_mem import faults
from dcp_mem.errors import RankFailed
from dcp_mem.format.checksums import checksum
from dcp_mem.format.manifest import Manifest
from dcp_mem.format.metadata import MetadataTemplate, RankItems, make_template
from dcp_mem.saving.agree import keep_no_more
from dcp_mem.saving.values import Attempt, Caller, Outcome, Staged
from dcp_mem.session import SavedPlan
from dcp_mem.values import Segment


@dataclass(frozen=True, slots=True)
class _Receipt:
    segment: Segment
    changed: bool


def complete(
    caller: Caller,
    attempt: Attempt,
    staged: Staged | Exception,
    metadata: Callable[[], Metadata],
    structure_changed: bool,
) -> tuple[Manifest, Staged]:
    """Exchange receipts and mark the checkpoint COMPLETE on every node; on return this node can restore it.

    staged: this rank's segment, or why it has none. metadata: makes the global metadata; asked of the
    coordinator, and only when the plan changed. Raises on all ranks where any of them failed.
    """
    try:
        return _complete(caller, attempt, staged, metadata, structure_changed)
    except BaseException:
        caller.session.swept = False
        raise
    finally:
        if isinstance(staged, Staged):
            caller.session.slots.share(staged.slot)


def _complete(
    caller: Caller,
    attempt: Attempt,
    staged: Staged | Exception,
    metadata: Callable[[], Metadata],
    structure_changed: bool,
) -> tuple[Manifest, Staged]:
    receipts = _exchange_receipts(caller, staged, structure_changed)
    assert isinstance(staged, Staged)
    faults.point("complete.receipts")
    saved = caller.session.saved.get(caller.plan_key)
    if saved is None or any(receipt.changed for receipt in receipts):
        saved = _new_saved_plan(caller, staged, metadata)
        caller.session.heap_grew = True
    elif saved.tail != staged.segment.tail:
        saved = replace(saved, tail=staged.segment.tail)
    manifest = _manifest(caller, attempt, [receipt.segment for receipt in receipts])
    manifest = _publish_on_all_nodes(caller, attempt, manifest, saved.template)
    if attempt.topology.is_leader:
        keep_no_more(caller.session.memory, caller.scope, caller.settings.keep)
        faults.point("complete.evicted")
    caller.session.saved[caller.plan_key] = saved
    caller.session.persisted.note(attempt.persist)
    return manifest, staged


def _exchange_receipts(caller: Caller, staged: Staged | Exception, structure_changed: bool) -> list[_Receipt]:
    if isinstance(staged, Staged):
        changed = structure_changed or _differs(caller.session.saved.get(caller.plan_key), staged)
        mine = Outcome(_Receipt(staged.segment, changed))
    else:
        mine = Outcome(error=f"{type(staged).__name__}: {staged}")
    outcomes = caller.ranks.exchange(mine)
    failures = [(rank, outcome.error) for rank, outcome in enumerate(outcomes) if outcome.error]
    if failures:
        caller.session.swept = False
        if not isinstance(staged, Staged):
            raise staged
        caller.session.slots.abandon(staged.slot)
        raise RankFailed(f"saving {caller.name}", failures)
    return [outcome.value for outcome in outcomes if outcome.value is not None]


def _differs(saved: SavedPlan | None, staged: Staged) -> bool:
    return (
        saved is None
        or saved.layout != staged.segment.layout
        or len(saved.tail) != len(staged.segment.tail)
        or saved.items != staged.plan.fingerprint(staged.items)
    )


def _new_saved_plan(caller: Caller, staged: Staged, metadata: Callable[[], Metadata]) -> SavedPlan:
    """The coordinator makes the metadata template from everyone's items; everyone gets it."""
    extents = list(zip(staged.offsets, staged.lengths, strict=True))
    indexes = list(map(staged.plan.index, staged.items))
    gathered = caller.ranks.gather(RankItems(caller.rank, indexes, extents, len(staged.layout.layout)))
    outcome: Outcome[MetadataTemplate] = Outcome()
    if caller.ranks.rank == 0:
        try:
            outcome = Outcome(make_template(metadata(), gathered))
        except Exception as error:
            outcome = Outcome(error=f"{type(error).__name__}: {error}")
    outcome = caller.ranks.broadcast(outcome)
    if outcome.value is None:
        raise RankFailed(f"describing {caller.name}", [(0, outcome.error)])
    return SavedPlan(
        outcome.value,
        staged.plan.fingerprint(staged.items),
        staged.segment.layout,
        staged.segment.tail,
    )


def _manifest(caller: Caller, attempt: Attempt, segments: Sequence[Segment]) -> Manifest:
    return Manifest(
        name=caller.name,
        save_id=attempt.save_id,
        scope=caller.scope,
        job=caller.settings.job,
        created=attempt.created,
        world_size=caller.ranks.size,
        persist=attempt.persist,
        committer=segments[0].node,
        segments=tuple(segments),
        metadata_crc=0,
        stage_seconds=time.monotonic() - attempt.started,
    )


def _publish_on_all_nodes(caller: Caller, attempt: Attempt, manifest: Manifest, template: MetadataTemplate) -> Manifest:
    """Publish on this node, if this rank leads it; no node gives up an older checkpoint before all have this one.

    No rank of an own plan goes on before that either. (DCP keeps its ranks together by itself, until `finish`.)
    """
    outcome: Outcome[Manifest] = Outcome(manifest)
    failure: Exception | None = None
    if attempt.topology.is_leader:
        try:
            outcome = Outcome(_publish(caller, manifest, template))
        except Exception as error:
            failure, outcome = error, Outcome(error=f"{type(error).__name__}: {error}")
    errors = [outcome.error]
    if len(set(attempt.topology.nodes)) > 1 or caller.plan_id:
        errors = caller.ranks.exchange(outcome.error)
    if failure is not None:
        raise failure
    failures = [(rank, error) for rank, error in enumerate(errors) if error]
    if failures or outcome.value is None:
        raise RankFailed(f"publishing {caller.name}", failures)
    return outcome.value


def _publish(caller: Caller, manifest: Manifest, template: MetadataTemplate) -> Manifest:
    memory = caller.session.memory
    memory.make_checkpoint_directory(caller.name)
    replaced = [held for held in memory.find(caller.name) if held.manifest.scope == caller.scope]
    metadata = template.render(manifest.save_id, manifest.tails)
    manifest = replace(manifest, metadata_crc=checksum(metadata))
    memory.publish_metadata(manifest, metadata)
    faults.point("complete.metadata")
    memory.publish(manifest)
    faults.point("complete.manifest")
    memory.show_to_stock_readers(manifest)
    for held in replaced:
        memory.retire_replaced(held)
    return manifest
