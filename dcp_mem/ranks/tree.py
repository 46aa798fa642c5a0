"""Who passes on to whom, where the ranks of a save or load send each other values: a tree, with nodes kept together.

Each node's first rank speaks for its neighbours; these leaders form a tree of their own below rank 0. So a value crosses
between nodes once for each node, and no rank ever hears from more than a few others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_FAN_OUT = 8


@dataclass(frozen=True, slots=True)
class Tree:
    """One rank's place. parent: None at the root.

    leaders_below, neighbours_below: of each child, all ranks that it speaks for, itself first.
    """

    rank: int
    parent: int | None
    leaders_below: Sequence[Sequence[int]] = ()
    neighbours_below: Sequence[Sequence[int]] = ()
    is_leader: bool = True

    @property
    def below(self) -> Sequence[Sequence[int]]:
        return (*self.leaders_below, *self.neighbours_below)

    @property
    def children(self) -> list[int]:
        return [ranks[0] for ranks in self.below]

    @property
    def leaders(self) -> list[int]:
        """Children that lead a node of their own."""
        return [ranks[0] for ranks in self.leaders_below]


def tree_of(nodes: Sequence[str], rank: int) -> Tree:
    """The place of a rank. nodes: of every rank, the node that it runs on."""
    members: dict[str, list[int]] = {}
    for other, node in enumerate(nodes):
        members.setdefault(node, []).append(other)
    leaders = [ranks[0] for ranks in members.values()]  # in the order of their ranks, rank 0 first
    mine = members[nodes[rank]]
    if mine[0] != rank:
        return Tree(rank, mine[0], is_leader=False)
    position = leaders.index(rank)
    parent = leaders[(position - 1) // _FAN_OUT] if position else None
    of_leaders = [
        [other for leader in _subtree(child, len(leaders)) for other in members[nodes[leaders[leader]]]]
        for child in _children(position, len(leaders))
    ]
    return Tree(rank, parent, of_leaders, [[neighbour] for neighbour in mine[1:]])


def _children(position: int, count: int) -> range:
    return range(position * _FAN_OUT + 1, min(position * _FAN_OUT + 1 + _FAN_OUT, count))


def _subtree(position: int, count: int) -> Iterator[int]:
    yield position
    for child in _children(position, count):
        yield from _subtree(child, count)
