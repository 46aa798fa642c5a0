"""Collectives along a tree: the ranks join, exchange, gather, broadcast, scatter and route values.

They work over any wire that carries bytes between a rank and its neighbours in the tree. Nothing
comes down the tree before all ranks below have come to the call, be it with an empty message: a
value that was sent to a rank which never comes would be taken for received.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Protocol, TypeVar

from dcp_mem import errors
from dcp_mem.comm.collectives import Join, Share
from dcp_mem.comm.tree import Tree
from dcp_mem.common.sendable import decoded, encoded, sendable_as

T = TypeVar("T")
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
    for received in wire.receive(tree.children):
        value = join(value, decoded(received))
    if tree.parent is not None:
        wire.send([tree.parent], encoded(value))
    return _sent_down(wire, tree, value)


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


def _sent_down(wire: Wire, tree: Tree, value: T) -> T:
    """Send the root's value down the tree; return it on every rank."""
    if tree.parent is None:
        wire.send(tree.children, encoded(value))
        return value
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
    found: dict[int, T] = {tree.rank: value}
    for received in wire.receive(tree.children):
        found.update(decoded(received))
    ranks = sorted(found)
    values = share([found[rank] for rank in ranks])
    if tree.parent is None:
        return list(values)
    wire.send([tree.parent], encoded(dict(zip(ranks, values, strict=True))))
    return []


def reduce(wire: Wire, tree: Tree, value: T, join: Join[T]) -> T | None:
    """Join all ranks' values; return the result on the root, and None on the other ranks.

    `join`: called on each rank that has children, with its value and theirs.
    """
    received = [decoded(one) for one in wire.receive(tree.children)]
    joined = join([value, *received]) if received else value
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
