"""Which files are assembled after a loss of nodes: lost segments, and missing copies.

As in `plan`, all functions are pure, and every rank computes the same plans. Large segments come
first; each goes to the node that has the fewest bytes by then. A copy goes to a failure domain that
has none yet, if there is such a domain.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from dcp_mem.format import names
from dcp_mem.format.segments import Segments
from dcp_mem.policy.election import ElectedCheckpoint
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
    receiving, sending, found = _Loads(), _Loads(), []
    for segment, node in _homes(lost, node_nbytes).items():
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
    receiving, sending, found = _Loads(), _Loads(), []
    for index, node in _missing(having, segments.nbytes, domain_of, copies):
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


class _Loads:
    """The bytes that each taker has got; more goes to the one that has least, or to the first."""

    def __init__(self) -> None:
        self._taken: dict[int, int] = {}

    def add(self, one: int, nbytes: int) -> None:
        """Count bytes that a taker has got, besides those counted before."""
        self._taken[one] = self._taken.get(one, 0) + nbytes

    def give(self, among: Collection[int], nbytes: int) -> int:
        """Return the taker that takes so many bytes more."""
        one = min(among, key=lambda one: (self._taken.get(one, 0), one))
        self.add(one, nbytes)
        return one


def _homes(lost: Mapping[int, int], held: Sequence[int]) -> dict[int, int]:
    """Return the node on which each lost segment comes back."""
    loads = _Loads()
    for node, nbytes in enumerate(held):
        loads.add(node, nbytes)
    return {
        rank: loads.give(range(len(held)), nbytes)
        for rank, nbytes in sorted(lost.items(), key=lambda one: (-one[1], one[0]))
    }


def _missing(
    having: Sequence[Collection[int]], nbytes: Sequence[int], domains: Sequence[str], copies: int
) -> list[tuple[int, int]]:
    """Choose which segments are copied to which nodes, as (segment, node).

    `copies`: how many copies each segment has in the end, beside one original.
    """
    loads, found = _Loads(), []
    for nodes, size in zip(having, nbytes, strict=True):
        for node in nodes:
            loads.add(node, size)
    for segment in sorted(range(len(having)), key=lambda segment: (-nbytes[segment], segment)):
        nodes = set(having[segment])
        while len(nodes) < min(copies + 1, len(domains)):
            free = [node for node in range(len(domains)) if node not in nodes]
            used = {domains[node] for node in nodes}
            in_new_domains = [node for node in free if domains[node] not in used]
            node = loads.give(in_new_domains or free, nbytes[segment])
            nodes.add(node)
            found.append((segment, node))
    return found
