"""Collectives along a tree: the ranks join, exchange, gather, broadcast, scatter and route values.

Nodes are kept together in the tree. Each node's first rank is its leader and relays for the node's
other ranks; the leaders form a tree of their own below rank 0, and so do the ranks of a node below
their leader. So a value crosses to a node once, and a rank has at most 16 children, all of which
have higher numbers.

The collectives work over any wire that carries bytes between a rank and its neighbours in the tree.
Nothing comes down the tree before all ranks below have come to the call, be it with an empty
message: a value that was sent to a rank which never comes would be taken for received.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any, Protocol, TypeVar, cast

from dcp_mem import errors
from dcp_mem.comm.collectives import Join, Share
from dcp_mem.common.sendable import decoded, encoded, sendable_as
from dcp_mem.common.value_class import value_class

T = TypeVar("T")
_FAN_OUT = 8
_FAST_COMPRESSION = 1
MOST_UNPACKED = 1 << 32
"""Bytes that the root tells its leaders, at most."""
for _error in vars(errors).values():
    if isinstance(_error, type) and issubclass(_error, errors.DcpMemError):
        sendable_as(_error, attrgetter("args"), _error)


class Wire(Protocol):
    """Carries bytes between this rank and others; messages between two ranks arrive in order."""

    def send(self, ranks: Sequence[int], data: Any) -> None:
        """Send the bytes of a buffer to each of these ranks.

        Args:
            ranks: The receivers.
            data: A buffer.
        """

    def receive(self, ranks: Sequence[int]) -> list[Any]:
        """Return the next bytes from each of these ranks, as buffers, in the order of `ranks`.

        Args:
            ranks: The senders.
        """


def all_reduce(wire: Wire, tree: Tree, value: T, join: Callable[[T, T], T]) -> T:
    """Join all ranks' values; return the result on every rank."""
    return _sent_down(wire, tree, reduce(wire, tree, value, partial(functools.reduce, join)))


def exchange(wire: Wire, tree: Tree, value: T) -> list[T]:
    """Return every rank's value on every rank, by rank."""
    return _sent_down(wire, tree, gather(wire, tree, value, list))


def broadcast(wire: Wire, tree: Tree, value: T) -> T:
    """Return the root's value on every rank."""
    _await(wire, tree.parent, tree.children)
    return _sent_down(wire, tree, value)


def _await(wire: Wire, parent: int | None, children: Sequence[int]) -> None:
    """Return when all ranks below have come to the call; tell the parent so."""
    wire.receive(children)
    if parent is not None:
        wire.send([parent], b"")


def _sent_down(wire: Wire, tree: Tree, value: T | None) -> T:
    """Send the root's value down the tree; return it on every rank."""
    if tree.parent is None:
        wire.send(tree.children, encoded(value))
        return cast("T", value)
    (received,) = wire.receive([tree.parent])
    wire.send(tree.children, received)
    received_value: T = decoded(received)
    return received_value


def tell_leaders(wire: Wire, tree: Tree, data: bytes) -> Any:
    """Return the root's bytes on each node's leader; return None on the other ranks.

    `data`: the root's bytes; ignored on the other ranks.
    """
    if not tree.is_leader:
        return None
    _await(wire, tree.parent, tree.leaders)
    if tree.parent is None:
        if tree.leaders:
            wire.send(tree.leaders, zlib.compress(data, _FAST_COMPRESSION))
        return data
    (packed,) = wire.receive([tree.parent])
    wire.send(tree.leaders, packed)
    unpacking = zlib.decompressobj()
    return unpacking.decompress(packed, MOST_UNPACKED)


def gather(wire: Wire, tree: Tree, value: T, share: Share[T]) -> list[T]:
    """Return every rank's value on the root, by rank; return an empty list on the other ranks.

    `share`: called on each rank with the values of its subtree, before they are sent on.
    """

    def join(parts: Sequence[dict[int, T]]) -> dict[int, T]:
        found = dict(sorted(chain.from_iterable(part.items() for part in parts), key=itemgetter(0)))
        return dict(zip(found, share(list(found.values())), strict=True))

    found = reduce(wire, tree, {tree.rank: value}, join)
    return [] if found is None else list(found.values())


def reduce(wire: Wire, tree: Tree, value: T, join: Join[T]) -> T | None:
    """Join all ranks' values; return the result on the root, and None on the other ranks.

    `join`: called on each rank that has children, with its value and theirs.
    """
    received = [decoded(one) for one in wire.receive(tree.children)]
    joined: T = join([value, *received]) if received else value
    if tree.parent is None:
        return joined
    wire.send([tree.parent], encoded(joined))
    return None


def scatter(wire: Wire, tree: Tree, values: Sequence[T]) -> T:
    """Return on each rank the value that the root has for it."""
    _await(wire, tree.parent, tree.children)
    by_rank: Mapping[int, T] = dict(enumerate(values))
    if tree.parent is not None:
        (received,) = wire.receive([tree.parent])
        by_rank = decoded(received)
    for ranks in tree.below:
        wire.send(ranks[:1], encoded({rank: by_rank[rank] for rank in ranks}))
    return by_rank[tree.rank]


def route(wire: Wire, tree: Tree, values: Mapping[int, T]) -> list[tuple[int, T]]:
    """Bring values from any ranks to any ranks; return (sender, value) of those for this rank.

    A value rises no further than to the first rank that has its receiver below it, and only sender
    and receiver open it.
    """
    parcels: _Parcels = {}
    for rank, value in values.items():
        parcels[rank] = [(tree.rank, encoded(value))]
    for received in wire.receive(tree.children):
        _add(parcels, decoded(received))
    if tree.parent is not None:
        here = {tree.rank}.union(*tree.below)
        outside = parcels.keys() - here
        wire.send([tree.parent], encoded({rank: parcels.pop(rank) for rank in outside}))
        (received,) = wire.receive([tree.parent])
        _add(parcels, decoded(received))
    for ranks in tree.below:
        below = {rank: parcels[rank] for rank in ranks if rank in parcels}
        wire.send(ranks[:1], encoded(below))
    arrived = sorted(parcels.get(tree.rank, ()))
    return [(sender, decoded(data)) for sender, data in arrived]


_Parcels = dict[int, list[tuple[int, bytes]]]
"""By receiver: senders, and values as bytes."""


def _add(parcels: _Parcels, others: _Parcels) -> None:
    for rank, of_rank in others.items():
        parcels.setdefault(rank, []).extend(of_rank)


# -- the tree --------------------------------------------------------------------------------------


@value_class(kw_only=True)
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
