"""Decide which nodes keep parity of which bytes, and what brings a lost segment back.

Decided from the nodes' failure domains and the sizes of their segments. The rules:

1. Nodes form groups of at most k + 1; nodes of one failure domain are spread over the groups.
2. A node's segments, laid behind each other, are cut into as many pieces as its group has other
   nodes, of equal size to within a byte; each piece goes into the parity of one of these nodes.
3. A node's parity is the XOR of the pieces for it, filled up with zeros to the longest. Its ranks
   share it out among themselves as stripes.
4. A lost segment is the XOR of stripes and of the other nodes' pieces in them, as long as only one
   node of the group is lost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from dcp_mem.common.sendable import sendable
from dcp_mem.common.value_class import value_class

Group = Mapping[int, int]
"""The nodes of a group, with the bytes of each: its segments, laid behind each other."""
Segments = Mapping[int, int]
"""Bytes of segments, by their ranks."""


@value_class
class Piece:
    """Bytes [start, stop) of a node's segments, laid behind each other."""

    node: int
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Length of the piece."""
        return self.stop - self.start


@sendable
@value_class
class Share:
    """Bytes [start, stop) of a rank's segment that are part of a stripe."""

    rank: int
    start: int
    stop: int
    place: int


@sendable
@value_class
class Stripe:
    """The parity that a rank keeps: the XOR of its shares; bytes that no share covers are zero."""

    keeper: int
    nbytes: int
    shares: tuple[Share, ...]


@sendable
@value_class(kw_only=True)
class Term:
    """Bytes whose XOR with those of the other terms is a lost segment."""

    is_stripe: bool  # they are bytes of a stripe, not of a segment
    of: int  # the number of the stripe, or the rank of the segment
    start: int
    stop: int
    place: int


def groups(domains: Sequence[str], k: int) -> list[tuple[int, ...]]:
    """Return the nodes in groups of at most k + 1, of sizes as equal as can be.

    A domain's nodes are spread over all groups: a domain with no more nodes than there are groups
    has no two of them in one. No node is left alone, so for k = 1 an odd node makes a group of
    three.

    `k`: over how many other nodes a node's bytes have parity; at least 1.
    """
    members = defaultdict[str, list[int]](list)
    for node, domain in enumerate(domains):
        members[domain].append(node)
    one_by_one = [node for nodes in members.values() for node in nodes]
    number = max(1, min(-(-len(domains) // (k + 1)), len(domains) // 2))
    return [tuple(sorted(one_by_one[first::number])) for first in range(number)]


def piece(group: Group, node: int, holder: int) -> Piece:
    """Return the piece of a node's bytes that goes into the parity that `holder` keeps.

    `group`: the nodes of the group, with their bytes. `node`: the node whose bytes they are.
    """
    holders = sorted(group.keys() - {node})
    index, count = holders.index(holder), len(holders)
    return Piece(node, group[node] * index // count, group[node] * (index + 1) // count)


def pieces_for(group: Group, holder: int) -> tuple[Piece, ...]:
    """Return the pieces, one of each other node, whose XOR is a node's parity.

    `group`: the nodes of the group, with their bytes.
    """
    return tuple(piece(group, node, holder) for node in sorted(group.keys() - {holder}))


def parity_nbytes(group: Group, holder: int) -> int:
    """Return the bytes of the parity that a node keeps.

    `group`: the nodes of the group, with their bytes.
    """
    return max((one.nbytes for one in pieces_for(group, holder)), default=0)


def stripes(
    group: Group, segments: Mapping[int, Segments], keepers: Mapping[int, Sequence[int]]
) -> list[Stripe]:
    """Return the parity of a group, shared out among the ranks of the nodes that keep it.

    `group`: the nodes of the group, with their bytes. `segments`: for each node, the bytes of its
    ranks' segments, in their order; their sum is the group's figure.
    """
    found = []
    for holder in sorted(group):
        nbytes, ranks = parity_nbytes(group, holder), keepers[holder]
        for index, rank in enumerate(ranks):
            low, high = nbytes * index // len(ranks), nbytes * (index + 1) // len(ranks)
            shares = [
                share
                for one in pieces_for(group, holder)
                for share in _shares(
                    segments[one.node],
                    one.start + low,
                    min(one.start + high, one.stop),
                    one.start + low,
                )
            ]
            if high > low:
                found.append(Stripe(rank, high - low, tuple(shares)))
    return found


def steady_nbytes(nbytes: int) -> int:
    """Return a length for a segment that stays the same where its byte items vary a little.

    Stripes that are cut by it lie where they lay for the checkpoint before. It is at most 1/256
    more.
    """
    unit = 1 << (nbytes // 512).bit_length()
    return -(-nbytes // unit) * unit


def clipped(stripe: Stripe, nbytes: Sequence[int]) -> Stripe:
    """Return a stripe without the bytes behind its segments' ends."""
    shares = (replace(one, stop=min(one.stop, nbytes[one.rank])) for one in stripe.shares)
    return replace(stripe, shares=tuple(one for one in shares if one.start < one.stop))


def _shares(segments: Segments, start: int, stop: int, origin: int) -> Iterator[Share]:
    """Yield a stripe's shares in bytes [start, stop) of segments laid behind each other."""
    end = 0
    for rank, nbytes in segments.items():
        begin, end = end, end + nbytes
        low, high = max(begin, start), min(end, stop)
        if low < high:
            yield Share(rank, low - begin, high - begin, low - origin)


def rebuilding(
    lost: int, nbytes: int, known: Sequence[Stripe], held: Collection[int]
) -> list[Term] | None:
    """Return the terms whose XOR is a lost segment; None where some of its bytes can't be had."""
    terms: list[Term] = []
    reached = 0
    of_lost = (
        (share, number)
        for number, stripe in enumerate(known)
        for share in stripe.shares
        if share.rank == lost
    )
    for share, number in sorted(of_lost, key=lambda one: (one[0].start, one[0].stop)):
        if share.start > reached:
            return None
        if share.stop <= reached:
            continue
        low, high = share.place + reached - share.start, share.place + share.stop - share.start
        found = [Term(is_stripe=True, of=number, start=low, stop=high, place=reached)]
        for other in known[number].shares:
            first, last = max(low, other.place), min(high, other.place + other.stop - other.start)
            if other is not share and first < last:
                start = other.start + first - other.place
                found.append(
                    Term(
                        is_stripe=False,
                        of=other.rank,
                        start=start,
                        stop=start + last - first,
                        place=reached + first - low,
                    )
                )
        if all(term.is_stripe or term.of in held for term in found):
            terms += found
            reached = share.stop
    return terms if reached >= nbytes else None
