"""The tree along which the ranks of a save or load relay their values, with nodes kept together.

Each node's first rank is its leader and relays for the node's other ranks; the leaders form a tree
of their own below rank 0. So a value crosses to a node once, and a rank has few children.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_FAN_OUT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """One rank's position in the tree.

    Attributes:
        parent: None at the root.
        leaders_below: For each child on another node, all ranks in its subtree, the child first.
        neighbours_below: For each child on this node, the child alone.
        is_leader: Whether this rank is the first one of its node.
    """

    rank: int
    parent: int | None
    leaders_below: Sequence[Sequence[int]] = ()
    neighbours_below: Sequence[Sequence[int]] = ()
    is_leader: bool = True

    @property
    def below(self) -> Sequence[Sequence[int]]:
        """For each child, all ranks in its subtree, the child first."""
        return (*self.leaders_below, *self.neighbours_below)

    @property
    def children(self) -> list[int]:
        """The ranks that this rank exchanges values with, apart from its parent."""
        return [ranks[0] for ranks in self.below]

    @property
    def leaders(self) -> list[int]:
        """The children that lead nodes of their own."""
        return [ranks[0] for ranks in self.leaders_below]


def tree_of(nodes: Sequence[str], rank: int) -> Tree:
    """Return a rank's position in the tree.

    Args:
        nodes: The node of every rank, by rank.
        rank: The rank in question.
    """
    members: dict[str, list[int]] = {}
    for member, node in enumerate(nodes):
        members.setdefault(node, []).append(member)
    leaders = [ranks[0] for ranks in members.values()]  # in the order of their ranks, rank 0 first
    node_members = members[nodes[rank]]
    if node_members[0] != rank:
        return Tree(rank=rank, parent=node_members[0], is_leader=False)
    position = leaders.index(rank)
    leaders_below = [
        [
            member
            for descendant in _subtree(child, len(leaders))
            for member in members[nodes[leaders[descendant]]]
        ]
        for child in _children(position, len(leaders))
    ]
    return Tree(
        rank=rank,
        parent=leaders[(position - 1) // _FAN_OUT] if position else None,
        leaders_below=leaders_below,
        neighbours_below=[[neighbour] for neighbour in node_members[1:]],
    )


def _children(position: int, count: int) -> range:
    return range(position * _FAN_OUT + 1, min(position * _FAN_OUT + 1 + _FAN_OUT, count))


def _subtree(position: int, count: int) -> Iterator[int]:
    yield position
    for child in _children(position, count):
        yield from _subtree(child, count)
