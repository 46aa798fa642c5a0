"""The room for a save: memory used on each node, slots that it claims, slots given back first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from dcp_mem.comm.agreement import Attempted, attempt, described, raise_together
from dcp_mem.common.value_class import value_class
from dcp_mem.memory.checkpoint import LocalCheckpoint
from dcp_mem.memory.links import drop_dead_links
from dcp_mem.policy.admission import NodeMemory, Verdict, admit, still_full
from dcp_mem.policy.facts import CheckpointFacts
from dcp_mem.policy.slots import SlotNeed, capacity_for, growth
from dcp_mem.replicating.plan import incoming, incoming_seconds
from dcp_mem.runtime.topology import Topology
from dcp_mem.saving.retention import kept_checkpoints, records_nbytes
from dcp_mem.saving.values import Planned, RankReport, SaveContext, Unplanned

T = TypeVar("T")


def own_claims(planned: Attempted[Planned | Unplanned]) -> list[SlotNeed]:
    """Return the slots that staging will claim, in this order.

    `planned`: this rank's part of the plan, or why it has none.
    """
    if planned.error is not None or not isinstance(planned.value, Planned):
        return []
    return planned.value.claims


def kept_on(
    context: SaveContext,
    topology: Topology,
    checkpoints: Sequence[LocalCheckpoint],
    *,
    in_detail: bool = True,
) -> tuple[CheckpointFacts, ...]:
    """Return checkpoints of this node as retention sees them; `checkpoints`: newest first."""
    return kept_checkpoints(
        checkpoints,
        context.scope,
        context.settings.keep_memory,
        gets_copies=bool(context.redundancy_on(topology)),
        persists_all=context.settings.persists_all,
        in_detail=in_detail,
    )


def node_memory(context: SaveContext, topology: Topology) -> NodeMemory:
    """Return this node's memory, as far as its leader can tell."""
    memory, limit = context.session.memory, context.settings.memory_limit
    checkpoints = memory.checkpoints()
    return NodeMemory(
        kept=kept_on(context, topology, checkpoints),
        used=memory.allocated_bytes(),
        spare=0,
        free=memory.free_bytes(),
        limit=limit,
        needed=0,
        records=0 if limit is None else records_nbytes(checkpoints),
        is_lent=drop_dead_links(memory.links),
    )


def with_node(context: SaveContext, topology: Topology, report: RankReport) -> RankReport:
    """Add this rank's node, if it leads it, now that no rank makes spare slots any more."""
    if report.error or not report.plan_id or not topology.is_leader:
        return report
    found = attempt(lambda: node_memory(context, topology))
    if found.error is not None:
        return RankReport(name=context.name, error=described(found.error))
    return replace(report, node=found.value)


def give_back(
    context: SaveContext,
    topology: Topology,
    planned: Attempted[Planned | Unplanned],
    reports: Sequence[RankReport],
) -> Verdict | None:
    """Give back the memory of slots that the save won't claim, and see whether there is room now.

    Returns why there is none; None where there is. Raises RankFailed.
    """
    session, rank = context.session, context.ranks.rank
    copies = copies_for(context, topology, reports)
    claims = [*own_claims(planned), *map(SlotNeed, (*copies.shared[rank], *copies.own[rank]))]

    def grown() -> int:
        session.slots.keep_only(claims)
        return growth(claims, [one for one in session.slots.free() if one.is_held])

    grows = _told(context, grown)  # once all have, their nodes' memory is looked at
    memory = session.memory
    after = _told(
        context,
        lambda: (memory.allocated_bytes(), memory.free_bytes() if topology.is_leader else 0),
    )
    nodes = [
        replace(
            report.node,
            used=after[leader][0],
            free=after[leader][1],
            needed=sum(grows[one] for one in topology.neighbours(topology.nodes[leader])),
        )
        for leader, report in enumerate(reports)
        if report.node is not None
    ]
    return still_full(nodes)


def _told(context: SaveContext, look: Callable[[], T]) -> list[T]:
    """Return what each rank finds; raise on all where one of them fails."""
    mine = attempt(look)
    failures = mine.failures(context.ranks.rank)
    told = context.ranks.exchange((failures, () if failures else (mine.value,)))
    failed = tuple(one for each, _ in told for one in each)
    raise_together(f"preparing {context.name or 'memory'}", failed, mine.error)
    return [found[0] for _, found in told if found]


def node_memories(
    context: SaveContext, topology: Topology, reports: Sequence[RankReport]
) -> list[NodeMemory]:
    """Return the memory of every node, with what its ranks need of it."""
    copies = copies_for(context, topology, reports)
    nodes = []
    for leader, report in enumerate(reports):
        if report.node is not None:
            ranks = topology.neighbours(topology.nodes[leader])
            needed = sum(
                reports[rank].needed + reports[rank].frozen + copies.nbytes(rank) for rank in ranks
            )
            spare = sum(one.capacity for one in report.slots if not one.is_held)
            spare += sum(_spare_of(reports[rank]) for rank in ranks)
            nodes.append(replace(report.node, needed=needed, spare=spare))
    return nodes


def _spare_of(report: RankReport) -> int:
    """Return the bytes of what a rank holds and may claim, or has filled for this save already."""
    spare = sum(one.capacity for one in report.slots if one.is_held)
    return spare + (report.needed + report.frozen if report.is_written else 0)


@value_class
class IncomingCopies:
    """The copies that will come to each rank: by rank, the bytes of each slot for one."""

    own: Sequence[Sequence[int]]
    shared: Sequence[Sequence[int]]

    def nbytes(self, rank: int) -> int:
        """Return the bytes of all slots for them on a rank."""
        return sum(self.own[rank]) + sum(self.shared[rank])


def copies_for(
    context: SaveContext, topology: Topology, reports: Sequence[RankReport]
) -> IncomingCopies:
    """Return the copies that will come to the ranks."""
    nodes, domains, made = topology.nodes, topology.domains, context.redundancy_on(topology)
    needed, shared = (tuple(one.needed for one in reports), tuple(one.shared for one in reports))
    return IncomingCopies(
        incoming(nodes, domains, needed, made), incoming_seconds(nodes, domains, shared, made)
    )


@value_class(kw_only=True)
class Expected:
    """The room for the next save, and what it needs."""

    copies: Sequence[int]  # bytes of each slot for what will come to this rank
    node_nbytes: int  # what a checkpoint's slots take on this node, copies included
    base_nbytes: int  # what slots for frozen tensors, and copies of them, take on this node once
    records_nbytes: int  # what a checkpoint's other files take on this node
    room: int  # for how many more checkpoints this node has memory, beside the free slots
    verdict: Verdict


def expect(
    context: SaveContext, topology: Topology, claims: Attempted[tuple[int, int]]
) -> Expected:
    """Exchange what the ranks will claim, and hold it against their nodes' memory.

    `claims`: bytes of this rank's own slot, and of one for frozen tensors; or why neither is known.
    Raises Exception, RankFailed.
    """
    session = context.session

    def report() -> RankReport:
        session.prefaulting.stop()
        own, frozen = claims.value
        found = RankReport(
            name=context.name,
            needed=capacity_for(own),
            frozen=capacity_for(frozen),
            shared=capacity_for(frozen),
            slots=tuple(session.slots.free()),
        )
        if not topology.is_leader:
            return found
        return replace(found, node=node_memory(context, topology))

    reports = _told(context, report)
    nodes = node_memories(context, topology, reports)
    leaders = [leader for leader, one in enumerate(reports) if one.node is not None]
    here = topology.neighbours(topology.nodes[topology.rank])
    (node,) = (node for leader, node in zip(leaders, nodes, strict=True) if leader in here)
    copies = copies_for(context, topology, reports)
    base = sum(reports[rank].frozen + sum(copies.shared[rank]) for rank in here)
    per_checkpoint = max(node.needed - base, 1)
    # The other files of the newest checkpoint may still come, and so do those of the next one.
    left = node.room - node.used - base - 2 * node.records
    return Expected(
        copies=copies.own[topology.rank],
        node_nbytes=per_checkpoint,
        base_nbytes=base,
        records_nbytes=node.records,
        room=max(0, left // per_checkpoint),
        verdict=admit(nodes, context.settings.keep),
    )
