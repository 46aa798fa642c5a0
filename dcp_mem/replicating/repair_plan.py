"""Which files are assembled after a loss of nodes.

As in `plan`, all functions are pure, and every rank computes the same plans.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dcp_mem.format import names
from dcp_mem.format.segments import Segments
from dcp_mem.policy import repair
from dcp_mem.policy.election import ElectedCheckpoint
from dcp_mem.policy.repair import Loads
from dcp_mem.replicating.plan import (
    FilePart,
    FilePlan,
    copy_plan,
    members_of,
    parity_plan,
    stripes_over,
)

Holders = Mapping[int, Sequence[int]]
"""Of each segment, the ranks whose nodes have it."""


def lost_segments(
    nodes: Sequence[str], segments: Segments, choice: ElectedCheckpoint
) -> list[FilePlan]:
    """Return plans to rebuild lost segments from parity, on the nodes that have the least bytes."""
    members, node_of = _numbered(nodes)
    holders = choice.holders or {}
    node_nbytes = [0] * len(members)
    for segment, ranks in holders.items():
        for node in {node_of[rank] for rank in ranks}:
            node_nbytes[node] += segments.nbytes[segment]
    lost = {rank: segments.nbytes[rank] for rank in choice.lost}
    receiving, sending, found = Loads(), Loads(), []
    for segment, node in repair.homes(lost, node_nbytes).items():
        nbytes = segments.nbytes[segment]
        receiver = receiving.give(members[node], nbytes)
        parts = []
        for term in choice.lost[segment]:
            if term.is_stripe:
                file, ranks = choice.parity[term.of]
            else:
                file, ranks = names.segment_file(term.of, segments.save_id), holders[term.of]
            sender = receiver if receiver in ranks else sending.give(ranks, term.stop - term.start)
            parts.append(
                FilePart(
                    sender=sender, file=file, start=term.start, stop=term.stop, place=term.place
                )
            )
        found.append(
            FilePlan(
                receiver=receiver,
                file=names.segment_file(segment, segments.save_id),
                nbytes=nbytes,
                slot_nbytes=nbytes,
                parts=tuple(parts),
            )
        )
    return found


def missing_copies(
    nodes: Sequence[str], domains: Sequence[str], segments: Segments, holders: Holders, copies: int
) -> list[FilePlan]:
    """Return plans for missing copies; the ranks that have a segment take turns in sending it."""
    members, node_of = _numbered(nodes)
    having = [{node_of[rank] for rank in holders[number]} for number in segments.rank]
    domain_of = [domains[ranks[0]] for ranks in members]
    receiving, sending, found = Loads(), Loads(), []
    for index, node in repair.missing_copies(having, segments.nbytes, domain_of, copies):
        number, nbytes = segments.rank[index], segments.nbytes[index]
        receiver = receiving.give(members[node], nbytes)
        sender = sending.give(holders[number], nbytes)
        found.append(
            copy_plan(segments, number, sender=sender, receiver=receiver, slot_nbytes=nbytes)
        )
    return found


def all_parity(
    nodes: Sequence[str], domains: Sequence[str], segments: Segments, holders: Holders, k: int
) -> list[FilePlan]:
    """Return plans for all parity that the nodes are to keep, of the segments where they are now. A
    segment that several nodes have counts for one of them.
    """
    members, node_of = _numbered(nodes)
    homes: list[dict[int, int]] = [{} for _ in members]
    senders = {}
    for segment, ranks in sorted(holders.items()):
        node = node_of[segment if segment in ranks else min(ranks)]
        senders[segment] = (
            segment if segment in ranks else members[node][segment % len(members[node])]
        )
        homes[node][segment] = segments.nbytes[segment]
    found = stripes_over(homes, members, [domains[ranks[0]] for ranks in members], k)
    return [parity_plan(stripe, stripe.nbytes, segments, senders) for stripe in found]


def _numbered(nodes: Sequence[str]) -> tuple[list[list[int]], dict[int, int]]:
    """Return the ranks of each node, and each rank's node, as a number."""
    members = list(members_of(nodes).values())
    return members, {rank: node for node, ranks in enumerate(members) for rank in ranks}
