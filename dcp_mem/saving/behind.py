"""What goes on behind training once a checkpoint is complete: its flush, `.metadata`, copies, and the slots of the next saves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult

from dcp_mem.format.described import RankItems, catalog_of
from dcp_mem.format.manifest import FlushRecord, Manifest
from dcp_mem.memory.slots import capacity_for
from dcp_mem.policy.admission import most_at_once
from dcp_mem.saving.plan import TAIL_ROOM
from dcp_mem.saving.replicate import coming_here, replication_of
from dcp_mem.saving.values import Attempt, Caller, Staged


def go_on_behind(caller: Caller, attempt: Attempt, staged: Staged, manifest: Manifest) -> None:
    """Start what goes on behind training: the flush, `.metadata` for stock readers, copies, the slots of the next saves."""
    if attempt.topology.is_leader:
        caller.session.show(manifest)
        if attempt.persist:
            caller.session.wake_agent(caller.settings)
        else:
            caller.session.tell_nodes(caller.settings)
    replication = replication_of(caller, attempt, staged, manifest)
    try:
        _set_slots_aside(caller, attempt, staged, manifest, replication is not None and replication.work.makes_slots)
    finally:
        if replication is not None:
            caller.session.replicator.start(replication)  # last of all: it takes the cores that this runs on


def _set_slots_aside(caller: Caller, attempt: Attempt, staged: Staged, manifest: Manifest, makes_slots: bool) -> None:
    """Have slots ready for the next saves. makes_slots: whether copies of this one are about to take new ones."""
    coming = coming_here(caller, attempt.topology, manifest)
    copies_nbytes = sum(map(sum, coming))
    node_nbytes = sum(capacity_for(segment.nbytes) for segment in manifest.of_node(staged.segment.node)) + copies_nbytes
    if attempt.topology.is_leader:
        caller.session.memory.trim(most_at_once(caller.settings.keep, any(coming)) * node_nbytes)
    room, mine = staged.segment.nbytes + TAIL_ROOM, coming[caller.ranks.rank]
    pending = copies_nbytes if makes_slots else 0
    caller.session.prefault_spares(caller.settings, staged.layout, room, caller.rank, node_nbytes, mine, pending)


def publish_again(
    caller: Caller, manifest: Manifest, metadata: Metadata, results: Sequence[Sequence[WriteResult]]
) -> None:
    """Replace the metadata of a complete checkpoint: its planner handed it over only now."""
    session, memory = caller.session, caller.session.memory
    layouts = session.catalogs.get(manifest.catalog)
    items = [
        RankItems(segment.rank, [result.index for result in of_rank], layouts.layout(segment.rank))
        for segment, of_rank in zip(manifest.segments, results, strict=True)
    ]
    manifest = replace(manifest, catalog=session.catalogs.put(catalog_of(metadata, items).to_bytes()))
    session.catalogs.link(manifest.catalog, memory.checkpoint_directory(manifest.name))
    memory.publish(manifest)
    session.show(manifest)
    for held in memory.find(manifest.name):
        if held.manifest.save_id == manifest.save_id and held.flush.outcome == "durable":
            memory.record_flush(held, FlushRecord(manifest.save_id))  # it was quick, and committed the other one
    if manifest.persist:
        caller.session.wake_agent(caller.settings)
