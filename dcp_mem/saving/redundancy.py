"""Copies or parity of a complete checkpoint are set up: what can be made, and slots for it.

The replicator's thread does the rest, in the background.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import compress

from dcp_mem.comm import held_store
from dcp_mem.common.log import log
from dcp_mem.common.values import Outcome
from dcp_mem.format import names
from dcp_mem.format.manifest import Manifest, ReplicationRecord
from dcp_mem.memory.locks import end_lease, share
from dcp_mem.policy.slots import capacity_for
from dcp_mem.replicating.plan import file_plans, incoming, incoming_seconds
from dcp_mem.replicating.replicator import Replication
from dcp_mem.replicating.task import ReplicationTask, abandon_all, newest_replicated, slot_for
from dcp_mem.saving.plan import TAIL_ROOM
from dcp_mem.saving.retention import apply_retention
from dcp_mem.saving.values import Agreed, Completed, SaveContext


def replication_of(context: SaveContext, completed: Completed) -> Replication | None:
    """Set up what makes a complete checkpoint safe on other nodes, if that is wanted.

    Nothing is raised: the checkpoint is complete, whatever this may be. Where there can be no
    replication, the record of the checkpoint says why.

    Returns what the replicator is to do; None where there is nothing.
    """
    if not context.settings.redundancy:
        return None
    agreed, manifest = completed.agreed, completed.manifest
    try:
        why_not, remark = _obstacles(context, agreed)
        if not why_not:
            return _set_up(context, completed, remark)
        record = ReplicationRecord(save_id=manifest.save_id, outcome=Outcome.SKIPPED, error=why_not)
        _write_down(context, agreed, record, manifest)
    except Exception as error:
        log.warning(
            "the replication of %s could not begin on this rank", manifest.name, exc_info=True
        )
        record = ReplicationRecord(
            save_id=manifest.save_id, outcome=Outcome.FAILED, error=f"it could not begin: {error}"
        )
        with suppress(OSError):
            _write_down(context, agreed, record, manifest)
    return None


def _obstacles(context: SaveContext, agreed: Agreed) -> tuple[str, str]:
    """Return why there will be no copies (or parity), and why fewer than wanted; "" for neither."""
    nodes, wanted = agreed.topology.node_count, context.settings.redundancy
    if nodes == 1:
        text = "all ranks that save together run on one node"
        _warn_once(context, f"{wanted} makes no copies: {text}")
        return text, ""
    if not agreed.may_replicate:
        return "the replication of an older checkpoint was under way", ""
    found = wanted.on(nodes)
    if found == wanted:
        return "", ""
    text = f"the ranks run on {nodes} nodes, which is enough for {found}"
    _warn_once(context, f"{wanted}: {text}")
    return "", text


def _warn_once(context: SaveContext, text: str) -> None:
    """Log what would be the same at every save, and on every rank."""
    if context.ranks.rank == 0 and context.session.last_saves.is_first_warning(text):
        log.warning(text)


def _write_down(
    context: SaveContext, agreed: Agreed, record: ReplicationRecord, manifest: Manifest
) -> None:
    """Record what became of the copies, once on each node, for those who wait for them."""
    if agreed.topology.is_leader:
        context.session.memory.record_replication(manifest, record)


def _set_up(context: SaveContext, completed: Completed, remark: str) -> Replication:
    """Claim slots for what comes to this rank, connect, and keep the checkpoint in memory."""
    session, settings = context.session, context.settings
    topology, manifest = completed.agreed.topology, completed.manifest
    rooms, made = _rooms(manifest), completed.agreed.redundancy
    seconds = _second_rooms(manifest)
    sizes = incoming(topology.nodes, topology.domains, rooms, made)
    session.last_saves.expected_copies[context.group] = sizes[topology.rank]
    ranks = context.ranks.dedicated(
        f"replicate {settings.job}",
        settings.replication_timeout,
        "DCP_MEM_REPLICATION_TIMEOUT",
        manifest.save_id,
    )
    ranks.set_nodes(topology.nodes)
    with ExitStack() as unless_set_up:
        unless_set_up.callback(ranks.leave, "it could not begin")
        lease = _lease_on(context, manifest)
        unless_set_up.callback(os.close, lease)
        unless_set_up.callback(end_lease, lease)
        plans = file_plans(
            topology.rank, topology.nodes, topology.domains, rooms, made, manifest.segments, seconds
        )
        earlier = newest_replicated(session.memory, manifest) if any(seconds) else None
        had = set() if earlier is None else set(map(names.rank_of, earlier.segment_files()))
        slots = {
            plan.file: slot_for(session.slots, plan)
            for plan in plans
            if plan.receiver == topology.rank
            # A copy that lies here already is shared, as a rule.
            and not (plan.is_second and names.rank_of(plan.file) in had)
        }
        unless_set_up.callback(abandon_all, session.slots, slots.values())
        frozen = completed.staged.frozen
        task = ReplicationTask(
            call=manifest.save_id,
            manifest=manifest,
            ranks=ranks,
            plans=plans,
            slots=slots,
            own_slot=completed.staged.slot,
            timeout=settings.replication_timeout,
            transport=settings.transport,
            claim=partial(slot_for, session.slots),
            stale=frozenset(session.frozen.stale),
            on_replicated=_nothing if frozen is None else frozen.segment.note_replicated,
            store=held_store(),
        )
        unless_set_up.pop_all()

    def retain(is_replicated: bool) -> None:
        apply_retention(
            session.memory,
            context.scope,
            settings.keep_memory,
            gets_copies=True,
            persists_all=settings.persists_all,
            made=manifest.save_id,
        )

    return Replication(
        task=task,
        redundancy=made,
        lease=lease,
        is_leader=topology.is_leader,
        remark=remark,
        on_recorded=retain,
    )


def _nothing() -> None:
    return


def _lease_on(context: SaveContext, manifest: Manifest) -> int:
    """Return a descriptor that keeps the checkpoint in memory."""
    directory = context.session.memory.checkpoint_directory(manifest.name)
    path = os.path.join(directory, names.manifest_file(manifest.scope))
    lease = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    share(lease)
    return lease


def copies_here(agreed: Agreed, manifest: Manifest) -> tuple[Sequence[Sequence[int]], int]:
    """Return what copies and parity of other nodes' files take on this node.

    By rank, the bytes of each slot that this node's ranks set aside for a checkpoint, nothing for
    ranks of other nodes; and what copies of frozen tensors take, for all checkpoints.
    """
    topology, made = agreed.topology, agreed.redundancy
    nodes, domains = topology.nodes, topology.domains
    if not made:
        return [() for _ in nodes], 0
    is_here = [node == nodes[topology.rank] for node in nodes]
    sizes = incoming(nodes, domains, _rooms(manifest), made)
    seconds = incoming_seconds(nodes, domains, _second_rooms(manifest), made)
    shared = sum(map(sum, compress(seconds, is_here))) if made.copies else 0
    return [of_rank if here else () for here, of_rank in zip(is_here, sizes, strict=True)], shared


def _rooms(manifest: Manifest) -> tuple[int, ...]:
    """Return the bytes that each rank's slot takes."""
    nbytes = manifest.segments.nbytes[: manifest.world_size]
    return tuple(capacity_for(one + TAIL_ROOM) for one in nbytes)


def _second_rooms(manifest: Manifest) -> tuple[int, ...]:
    """Return the bytes that the slot of each rank's frozen tensors takes; 0 for none."""
    rooms, segments = [0] * manifest.world_size, manifest.segments
    for index in range(manifest.world_size, len(segments)):
        rooms[names.home_rank(segments.rank[index])] = capacity_for(segments.nbytes[index])
    return tuple(rooms)
