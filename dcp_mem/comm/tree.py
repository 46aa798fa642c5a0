"""The tree along which the ranks of a save or load relay their values, with nodes kept together.

Each node's first rank is its leader and relays for the node's other ranks; the leaders form a tree
of their own below rank 0, and so do the ranks of a node below their leader. So a value crosses to a
node once, and a rank has at most 16 children, all of which have higher numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_FAN_OUT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """One rank's position in the tree."""

    rank: int
    parent: int | None  # None at the root
    # for each child on another node, all ranks in its subtree, the child first
    leaders_below: Sequence[Sequence[int]] = ()
    # for each child on this node, all ranks in its subtree, the child first
    neighbours_below: Sequence[Sequence[int]] = ()
    is_leader: bool = True  # whether this rank is the first one of its node
    depth: int = 0  # how many ranks a value passes from here to the root

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
    """Return a rank's position in the tree."""
    members: dict[str, list[int]] = {}
    for member, node in enumerate(nodes):
        members.setdefault(node, []).append(member)
    leaders = [ranks[0] for ranks in members.values()]  # in the order of their ranks, rank 0 first
    position = leaders.index(members[nodes[rank]][0])
    node_members = members[nodes[rank]]
    place = node_members.index(rank)
    neighbours_below = _ranks_below(place, [[member] for member in node_members])
    depth = _depth(position) + _depth(place)
    if place:
        return Tree(
            rank=rank,
            parent=node_members[_parent(place)],
            neighbours_below=neighbours_below,
            is_leader=False,
            depth=depth,
        )
    return Tree(
        rank=rank,
        parent=leaders[_parent(position)] if position else None,
        leaders_below=_ranks_below(position, list(members.values())),
        neighbours_below=neighbours_below,
        depth=depth,
    )


def _ranks_below(position: int, groups: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return, for each child of a position, the ranks of all groups in its subtree."""
    return [
        [rank for descendant in _subtree(child, len(groups)) for rank in groups[descendant]]
        for child in _children(position, len(groups))
    ]


def _parent(position: int) -> int:
    return (position - 1) // _FAN_OUT


def _depth(position: int) -> int:
    depth = 0
    while position:
        position, depth = _parent(position), depth + 1
    return depth


def _children(position: int, count: int) -> range:
    return range(position * _FAN_OUT + 1, min(position * _FAN_OUT + 1 + _FAN_OUT, count))


def _subtree(position: int, count: int) -> Iterator[int]:
    yield position
    for child in _children(position, count):
        yield from _subtree(child, count)
