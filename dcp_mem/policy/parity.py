"""Which nodes keep parity of each other's bytes, of which bytes, and what brings a lost node's back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Group = Mapping[int, int]
"""The nodes of a group, with the bytes that each makes: its segments, laid behind each other."""


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
class Rebuilding:
    """How a lost piece comes back: the XOR of the parity that `holder` keeps and the pieces, zero-padded; cut to its length."""

    lost: Piece
    holder: int
    pieces: tuple[Piece, ...]


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


def rebuilding(group: Group, lost: int) -> list[Rebuilding]:
    """How the bytes of a lost node come back from the others of its group: piece by piece, in their order."""
    return [
        Rebuilding(
            piece(group, lost, holder),
            holder,
            tuple(one for one in pieces_for(group, holder) if one.node != lost),
        )
        for holder in sorted(group.keys() - {lost})
    ]
