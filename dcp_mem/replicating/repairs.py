"""What is to be made after a loss of nodes. Pure, and the same on every rank, as in `transfers.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dcp_mem.format import names
from dcp_mem.format.segments import Segments
from dcp_mem.policy import repair
from dcp_mem.policy.election import Choice
from dcp_mem.policy.repair import Loads
from dcp_mem.replicating.transfers import Making, Part, making_of, members_of, stripes_over

Holders = Mapping[int, Sequence[int]]
"""Of each segment, the ranks whose nodes have it."""


def coming_back(nodes: Sequence[str], segments: Segments, choice: Choice) -> list[Making]:
    """How the lost segments of a checkpoint come back from parity, on the nodes that have least. nodes: of every rank."""
    members, number = _numbered(nodes)
    holders = choice.holders or {}
    held = [0] * len(members)
    for segment, ranks in holders.items():
        for node in {number[rank] for rank in ranks}:
            held[node] += segments.nbytes[segment]
    receiving, sending, found = Loads(), Loads(), []
    for segment, node in repair.homes({rank: segments.nbytes[rank] for rank in choice.lost}, held).items():
        nbytes = segments.nbytes[segment]
        receiver = receiving.give(members[node], nbytes)
        parts = []
        for term in choice.lost[segment]:
            if term.is_stripe:
                file, ranks = choice.parity[term.of]
            else:
                file, ranks = names.segment_file(term.of, segments.save_id), holders[term.of]
            sender = receiver if receiver in ranks else sending.give(ranks, term.stop - term.start)
            parts.append(Part(sender, file, term.start, term.stop, term.place))
        found.append(Making(receiver, names.segment_file(segment, segments.save_id), nbytes, nbytes, tuple(parts)))
    return found


def missing_copies(
    nodes: Sequence[str], domains: Sequence[str], segments: Segments, holders: Holders, copies: int
) -> list[Making]:
    """The copies that are missing, each sent by one of those who have the segment, in turns. nodes, domains: of every rank."""
    members, number = _numbered(nodes)
    having = [{number[rank] for rank in holders[segment]} for segment in range(len(segments))]
    domain_of = [domains[ranks[0]] for ranks in members]
    receiving, sending, found = Loads(), Loads(), []
    for segment, node in repair.missing_copies(having, segments.nbytes, domain_of, copies):
        nbytes, file = segments.nbytes[segment], segments[segment].file
        receiver, sender = receiving.give(members[node], nbytes), sending.give(holders[segment], nbytes)
        found.append(Making(receiver, file, nbytes, nbytes, (Part(sender, file, 0, nbytes, 0),)))
    return found


def all_parity(
    nodes: Sequence[str], domains: Sequence[str], segments: Segments, holders: Holders, k: int
) -> list[Making]:
    """The parity that the nodes shall keep, of the segments as they lie now; each counts for one of the nodes that have it."""
    members, number = _numbered(nodes)
    homes: list[dict[int, int]] = [{} for _ in members]
    senders = {}
    for segment, ranks in sorted(holders.items()):
        node = number[segment if segment in ranks else min(ranks)]
        senders[segment] = segment if segment in ranks else members[node][segment % len(members[node])]
        homes[node][segment] = segments.nbytes[segment]
    found = stripes_over(homes, members, [domains[ranks[0]] for ranks in members], k)
    return [making_of(stripe, stripe.nbytes, segments, senders) for stripe in found]


def _numbered(nodes: Sequence[str]) -> tuple[list[list[int]], dict[int, int]]:
    """The ranks of each node, and the node's number of each rank."""
    members = list(members_of(nodes).values())
    return members, {rank: node for node, ranks in enumerate(members) for rank in ranks}
