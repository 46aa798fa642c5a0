"""Which nodes keep parity of each other's bytes, of which bytes, and what brings a lost node's back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

Group = Mapping[int, int]
"""The nodes of a group, with the bytes that each makes: its segments, laid behind each other."""
Segments = Mapping[int, int]
"""Bytes of segments, by their ranks."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [start, stop) of what a node makes."""

    node: int
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Share:
    """Bytes [start, stop) of a rank's segment, and where in a stripe they begin."""

    rank: int
    start: int
    stop: int
    place: int


@dataclass(frozen=True, slots=True)
class Stripe:
    """Parity that one rank keeps: the XOR of these shares, zero where none of them reaches."""

    keeper: int
    nbytes: int
    shares: tuple[Share, ...]


@dataclass(frozen=True, slots=True)
class Term:
    """Bytes [start, stop) of what lies somewhere, one of those whose XOR is a lost segment from `place` on.

    of: the number of a stripe, or the rank of a segment.
    """

    is_stripe: bool
    of: int
    start: int
    stop: int
    place: int


def groups(domains: Sequence[str], k: int) -> list[tuple[int, ...]]:
    """The nodes in groups of at most k + 1, and of equal sizes as far as can be. k: at least 1.

    domains: the failure domain of each node. A domain's nodes are spread over all groups alike: a domain with no more nodes than
    there are groups has no two in one. No node is left alone, so for k = 1 an odd one makes a group of three.
    """
    members = defaultdict[str, list[int]](list)
    for node, domain in enumerate(domains):
        members[domain].append(node)
    one_by_one = [node for nodes in members.values() for node in nodes]
    number = max(1, min(-(-len(domains) // (k + 1)), len(domains) // 2))
    return [tuple(sorted(one_by_one[first::number])) for first in range(number)]


def piece(group: Group, node: int, holder: int) -> Piece:
    """The part of the node's bytes that goes into the parity of another: one for each, of the same size to within a byte."""
    others = sorted(group.keys() - {node})
    index = others.index(holder)
    return Piece(node, group[node] * index // len(others), group[node] * (index + 1) // len(others))


def pieces_for(group: Group, holder: int) -> tuple[Piece, ...]:
    """What the parity that a node keeps is the XOR of, zero-padded to the longest: a piece of each other node."""
    return tuple(piece(group, node, holder) for node in sorted(group.keys() - {holder}))


def parity_nbytes(group: Group, holder: int) -> int:
    """The bytes of the parity that a node keeps."""
    return max((one.nbytes for one in pieces_for(group, holder)), default=0)


def stripes(group: Group, segments: Mapping[int, Segments], keepers: Mapping[int, Sequence[int]]) -> list[Stripe]:
    """The parity of a group, shared out among the ranks of the nodes that keep it.

    segments: of each node, what it has: the bytes of each rank's segment, in their order; they come to the group's. keepers: its
    ranks.
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
                    segments[one.node], one.start + low, min(one.start + high, one.stop), one.start + low
                )
            ]
            if high > low:
                found.append(Stripe(rank, high - low, tuple(shares)))
    return found


def _shares(segments: Segments, start: int, stop: int, origin: int) -> Iterator[Share]:
    """Bytes [start, stop) of segments that are laid behind each other, of a stripe that begins at `origin`."""
    end = 0
    for rank, nbytes in segments.items():
        begin, end = end, end + nbytes
        low, high = max(begin, start), min(end, stop)
        if low < high:
            yield Share(rank, low - begin, high - begin, low - origin)


def rebuilding(lost: int, nbytes: int, known: Sequence[Stripe], held: Collection[int]) -> list[Term] | None:
    """What a lost segment is the XOR of; None where some of it can't be had.

    known: stripes that somebody has. held: ranks whose segments somebody has.
    """
    terms: list[Term] = []
    reached = 0
    mine = ((share, number) for number, stripe in enumerate(known) for share in stripe.shares if share.rank == lost)
    for share, number in sorted(mine, key=lambda one: (one[0].start, one[0].stop)):
        if share.start > reached:
            return None
        if share.stop <= reached:
            continue
        low, high = share.place + reached - share.start, share.place + share.stop - share.start
        found = [Term(True, number, low, high, reached)]
        for other in known[number].shares:
            first, last = max(low, other.place), min(high, other.place + other.stop - other.start)
            if other is not share and first < last:
                start = other.start + first - other.place
                found.append(Term(False, other.rank, start, start + last - first, reached + first - low))
        if all(term.is_stripe or term.of in held for term in found):
            terms += found
            reached = share.stop
    return terms if reached >= nbytes else None
