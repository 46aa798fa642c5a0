"""The background work after a checkpoint is complete: flush, copies, new slots."""

from __future__ import annotations

from functools import partial

from dcp_mem.comm.agreement import attempt_or_log
from dcp_mem.format.names import FROZEN
from dcp_mem.policy.admission import most_at_once
from dcp_mem.policy.slots import capacity_for
from dcp_mem.runtime.prefaulting import NodeNeeds, SlotSizes
from dcp_mem.saving.complete import concerns_flusher
from dcp_mem.saving.first_save import name_refused
from dcp_mem.saving.plan import TAIL_ROOM
from dcp_mem.saving.redundancy import incoming_sizes, replication_of, shared_nbytes
from dcp_mem.saving.retention import records_nbytes
from dcp_mem.saving.values import Completed, SaveContext

_LARGE = 32 << 20


def start_background_work(context: SaveContext, completed: Completed) -> None:
    """Start what training needn't wait for; what fails is logged only, as the ranks have voted.

    1. Byte items that no load would restore are named, at the first save of a structure.
    2. The node's leader has `.metadata` put beside the checkpoint, for stock readers, and wakes the
       agent, which makes checksums and flushes.
    3. Copies or parity on other nodes are set up.
    4. Slots for the next saves are made ready.
    5. Frozen tensors are held against their segment, now and then.
    6. The copies begin: last, for they take the cores that all this runs on.
    """
    session, staged = context.session, completed.staged
    behind = partial(attempt_or_log, f"{context.name} is complete, but this has failed behind it")
    behind(partial(name_refused, staged))  # while the slot is held
    behind(partial(_tell, context, completed))
    replication = behind(partial(replication_of, context, completed))
    takes_slots = replication is not None and replication.task.makes_slots
    try:
        behind(partial(_prefault_spare_slots, context, completed, takes_slots=takes_slots))
        is_persisted = completed.agreed.persist
        behind(partial(session.frozen.compare_if_due, staged.frozen, is_persisted=is_persisted))
    finally:
        if replication is not None:
            behind(partial(session.replicator.start, replication))


def _tell(context: SaveContext, completed: Completed) -> None:
    session, manifest = context.session, completed.manifest
    if not completed.agreed.topology.is_leader:
        return
    session.publisher.show(manifest)
    if concerns_flusher(context, manifest):
        session.wake_agent(context.settings)
    else:
        session.tell_nodes(context.settings)
    session.agent.sum_up(context.settings)


def _prefault_spare_slots(context: SaveContext, completed: Completed, *, takes_slots: bool) -> None:
    """Have slots ready for the next saves.

    `takes_slots`: whether copies of this checkpoint are about to take new slots.
    """
    settings, session, staged = context.settings, context.session, completed.staged
    topology, manifest = completed.agreed.topology, completed.manifest
    incoming = incoming_sizes(context, topology, manifest)
    copies_nbytes = sum(map(sum, incoming))
    here = manifest.of_node(staged.segment.node)
    own_nbytes = sum(capacity_for(one.nbytes + TAIL_ROOM) for one in here if one.rank < FROZEN)
    frozen_nbytes = sum(capacity_for(one.nbytes) for one in here if one.rank >= FROZEN)
    node_nbytes = own_nbytes + copies_nbytes
    frozen_nbytes += shared_nbytes(context, topology, manifest)
    most_nbytes = most_at_once(settings.keep, any(incoming)) * node_nbytes + frozen_nbytes
    if topology.is_leader and session.last_saves.is_trim_due(most_nbytes):
        session.memory.trim(most_nbytes)
    if staged.frozen is not None:  # what was frozen before may have left a slot of its size
        session.slots.drop_larger(2 * (staged.segment.nbytes + _LARGE))
    sizes = SlotSizes(
        staged.segment.nbytes + TAIL_ROOM, staged.layout, incoming[context.ranks.rank]
    )
    is_unlimited = settings.memory_limit is None
    needs = NodeNeeds(
        checkpoint=node_nbytes,
        records=0 if is_unlimited else records_nbytes(session.memory.find(manifest.name)),
        pending=copies_nbytes if takes_slots else 0,
    )
    session.prefaulting.fill_up(settings, sizes, needs, rank=context.rank)
