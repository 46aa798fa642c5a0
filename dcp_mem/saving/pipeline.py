"""The save, from one end to the other: the same stages, whatever is saved."""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import compress
from weakref import WeakSet

from dcp_mem.comm import held_store
from dcp_mem.comm.agreement import attempt, attempt_or_log
from dcp_mem.common.log import log, log_once
from dcp_mem.common.parallel import daemon
from dcp_mem.common.value_class import value_class
from dcp_mem.common.values import Outcome
from dcp_mem.format import names
from dcp_mem.format.manifest import Manifest, ReplicationRecord
from dcp_mem.format.saved_streams import read_stream, why_refused
from dcp_mem.memory.locks import end_lease, share
from dcp_mem.planning.entries import first_of
from dcp_mem.planning.state_structure import Structure
from dcp_mem.policy.admission import most_at_once
from dcp_mem.policy.slots import capacity_for
from dcp_mem.replicating.plan import file_plans, incoming, incoming_seconds
from dcp_mem.replicating.replicator import Replication
from dcp_mem.replicating.task import (
    ReplicationTask,
    abandon_all,
    newest_replicated,
    nothing,
    slot_for,
)
from dcp_mem.runtime.prefaulting import NodeNeeds, SlotSizes
from dcp_mem.saving.agree import agree
from dcp_mem.saving.complete import complete, concerns_flusher
from dcp_mem.saving.own_plans import RowItems
from dcp_mem.saving.retention import apply_retention, records_nbytes
from dcp_mem.saving.stage import stage
from dcp_mem.saving.values import (
    TAIL_ROOM,
    Agreed,
    Completed,
    NoCommonPlan,
    Planned,
    SaveContext,
    Staged,
    Unplanned,
)

_LARGE = 32 << 20
_MOST_NBYTES = 64 << 20
"""Of byte items that are read back, all together."""
_looked_at: WeakSet[Structure] = WeakSet()

Plan = Callable[[SaveContext], Planned | Unplanned]
"""Returns this rank's part of a save. Asked again once the ranks have found a plan in common."""

FindCommonPlan = Callable[[SaveContext, NoCommonPlan], bool]
"""Has the next plan fit together with that of the other ranks, which all call this.

Returns False where they can't, for the reason that is given.
"""


@value_class
class Settled:
    """A save that all ranks have settled on, and that has written nothing yet."""

    planned: Planned
    agreed: Agreed


def save(
    context: SaveContext, plan: Plan, find_common_plan: FindCommonPlan | None = None
) -> Completed | None:
    """Save what is planned, on all ranks together; return once it is complete in memory.

    What goes wrong on one rank before an exchange travels with the exchange, so that all ranks
    raise together and none is left waiting (invariant 8).

    Returns None where the save was skipped: memory was full. Raises Exception.
    """
    settled = settle(context, plan, find_common_plan)
    return None if settled is None else carry_out(context, settled)


def settle(
    context: SaveContext, plan: Plan, find_common_plan: FindCommonPlan | None = None
) -> Settled | None:
    """Plan until the ranks have a plan in common, and agree on the save.

    1. Plan: this rank's part of the save, and the layout of its segment (`plan.py`).
    2. Agree: all ranks settle on one save, and make room for it (`agree.py`).

    Returns None where the save is skipped: memory is full. Raises NoCommonPlan,
    MemoryBudgetExceeded, CheckpointExists, ConfigError, RankFailed.
    """
    while True:
        planned = attempt(partial(plan, context))
        try:
            agreed = agree(context, planned)
        except NoCommonPlan as reason:
            # Within the clause, which forgets the reason: its traceback keeps this frame, and with
            # it the state dict, until the cycle collector runs.
            if find_common_plan is None or not find_common_plan(context, reason):
                raise
            continue
        if agreed is None:
            if context.ranks.rank == 0:
                context.session.memory.note_skipped(context.name, "memory was full")
            return None
        assert isinstance(planned.value, Planned)  # agree has raised for all else
        return Settled(planned.value, agreed)


def carry_out(context: SaveContext, settled: Settled) -> Completed:
    """Carry out what the ranks have settled on; return once the checkpoint is complete in memory.

    1. Stage: this rank's items are copied into a segment (`stage.py`).
    2. Complete: receipts, catalog, and the manifest on every node (`complete.py`).
    3. Background: flush, copies, slots for the next saves.

    Raises MemoryBudgetExceeded, RankFailed.
    """
    planned, agreed = settled.planned, settled.agreed
    context.session.last_saves.is_clean = False  # until it is complete
    staged = attempt(partial(stage, context, agreed, planned))
    completed = complete(context, agreed, planned, staged)
    start_background_work(context, completed)
    return completed


# -- behind training -------------------------------------------------------------------------------


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
    behind(partial(_name_refused, staged))  # while the slot is held
    behind(partial(_tell, context, completed))
    replication = behind(partial(_replication_of, context, completed))
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
    incoming, shared_nbytes = _copies_here(completed.agreed, manifest)
    copies_nbytes = sum(map(sum, incoming))
    here = manifest.of_node(staged.segment.node)
    own_nbytes = sum(
        capacity_for(one.nbytes + TAIL_ROOM) for one in here if one.rank < names.FROZEN
    )
    frozen_nbytes = sum(capacity_for(one.nbytes) for one in here if one.rank >= names.FROZEN)
    node_nbytes = own_nbytes + copies_nbytes
    frozen_nbytes += shared_nbytes
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


# -- byte items that a load refuses by default -----------------------------------------------------


def _name_refused(staged: Staged) -> None:
    """Name, once per structure, byte items of a rank's segment that a load refuses by default."""
    items = staged.items
    if not isinstance(items, RowItems) or items.structure in _looked_at:
        return
    if staged.slot.descriptor < 0:  # another process has it
        return
    _looked_at.add(items.structure)
    streams, left = [], _MOST_NBYTES
    for item, (offset, nbytes) in zip(staged.order, staged.places, strict=True):
        if items.is_object(item) and nbytes <= left:
            left -= nbytes
            data = os.pread(staged.slot.descriptor, nbytes, offset)
            streams.append((items.index(item).fqn, data))
    if streams:
        daemon(partial(_read_back, streams), "dcp_mem-first-save")


def _read_back(streams: Sequence[tuple[str, bytes]]) -> None:
    refused = {}
    for name, data in streams:
        read = attempt(
            partial(read_stream, io.BytesIO(data), weights_only=True, map_location="cpu")
        )
        if read.error is not None:
            refused[name] = why_refused(read.error)
    if refused:
        name, why = next(iter(refused.items()))
        log_once(
            f"dcp_mem.load will refuse {first_of(refused)} of these checkpoints unless it is given "
            f"weights_only=False: {name} holds more than numbers, texts, containers and tensors "
            f"({why}). Save what it is made of instead",
            logging.WARNING,
        )


# -- copies and parity: what can be made, and slots for it; a thread does the rest --------------


def _replication_of(context: SaveContext, completed: Completed) -> Replication | None:
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
    if context.ranks.rank == 0:
        context.session.last_saves.warn_once(text)


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
            on_replicated=nothing if frozen is None else frozen.segment.note_replicated,
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


def _lease_on(context: SaveContext, manifest: Manifest) -> int:
    """Return a descriptor that keeps the checkpoint in memory."""
    directory = context.session.memory.checkpoint_directory(manifest.name)
    path = os.path.join(directory, names.manifest_file(manifest.scope))
    lease = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    share(lease)
    return lease


def _copies_here(agreed: Agreed, manifest: Manifest) -> tuple[Sequence[Sequence[int]], int]:
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
