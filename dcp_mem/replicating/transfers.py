"""Which rank sends its segment to whom. Pure, and the same on every rank: it follows from what all of them know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from dcp_mem.policy.placement import Original, place


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy of one segment: the rank that has made it, the one that gets it, on another node, and what that sets aside."""

    sender: int
    receiver: int
    nbytes: int


@lru_cache(maxsize=8)
def copies_of(
    nodes: tuple[str, ...], domains: tuple[str, ...], nbytes: tuple[int, ...], replicas: int
) -> tuple[Copy, ...]:
    """All copies, by sender. Of every rank: its node, that node's failure domain, and what its segment takes.

    Kept for as long as sizes stay as they are, which those of slots do, as a rule. Each node's copies are spread over its ranks.
    """
    members: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        members.setdefault(node, []).append(rank)
    numbers = {node: number for number, node in enumerate(members)}
    originals = [Original(rank, numbers[node], nbytes[rank]) for rank, node in enumerate(nodes)]
    placed = place(originals, [domains[ranks[0]] for ranks in members.values()], possible(nodes, replicas))
    incoming: list[list[int]] = [[] for _ in members]
    for rank, targets in enumerate(placed):
        for target in targets:
            incoming[target].append(rank)
    found = []
    for ranks, senders in zip(members.values(), incoming, strict=True):
        found += _spread(ranks, senders, nbytes)
    return tuple(sorted(found, key=lambda copy: (copy.sender, copy.receiver)))


def possible(nodes: Sequence[str], replicas: int) -> int:
    """How many copies of a segment there can be, with no two on a node."""
    return min(replicas, len(set(nodes)) - 1)


def _spread(ranks: Sequence[int], senders: Sequence[int], nbytes: Sequence[int]) -> list[Copy]:
    """Share what comes to a node out among its ranks, the largest first, each to whoever has least by then."""
    loads = dict.fromkeys(ranks, (0, 0))
    found = []
    for sender in sorted(senders, key=lambda sender: (-nbytes[sender], sender)):
        receiver = min(ranks, key=lambda rank: (loads[rank], rank))
        taken, count = loads[receiver]
        loads[receiver] = taken + nbytes[sender], count + 1
        found.append(Copy(sender, receiver, nbytes[sender]))
    return found
