"""What ranks do with each other's values along a tree: join them, gather them, hand them out.

Any wire will do that carries bytes between a rank and its neighbours in the tree.
"""

from __future__ import annotations

import io
import pickle
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from dcp_mem.ranks.base import Share
from dcp_mem.ranks.tree import Tree

T = TypeVar("T")
_QUICKLY = 1


class Wire(Protocol):
    """Carries bytes between this rank and others; what two ranks send each other arrives in order."""

    def send(self, ranks: Sequence[int], data: Any) -> None:
        """Send the same bytes (anything with a buffer) to each of these ranks."""

    def receive(self, ranks: Sequence[int]) -> list[Any]:
        """The next bytes (anything with a buffer) from each of these ranks, in their order."""


def all_reduce(wire: Wire, tree: Tree, value: T, join: Callable[[T, T], T]) -> T:
    """Every rank gets all ranks' values, joined. join: in any order, any of them with any other."""
    for received in wire.receive(tree.children):
        value = join(value, pickle.loads(received))
    if tree.parent is not None:
        wire.send([tree.parent], dumped(value))
    return broadcast(wire, tree, value)


def broadcast(wire: Wire, tree: Tree, value: T) -> T:
    """Every rank gets the root's value."""
    if tree.parent is None:
        wire.send(tree.children, dumped(value))
        return value
    (received,) = wire.receive([tree.parent])
    wire.send(tree.children, received)
    received_value: T = pickle.loads(received)
    return received_value


def tell_leaders(wire: Wire, tree: Tree, data: bytes) -> Any:
    """Each node's leader gets the root's bytes, with which the root calls this; None on the other ranks."""
    if not tree.is_leader:
        return None
    if tree.parent is None:
        if tree.leaders:
            wire.send(tree.leaders, zlib.compress(data, _QUICKLY))
        return data
    (packed,) = wire.receive([tree.parent])
    wire.send(tree.leaders, packed)
    return zlib.decompress(packed)


def gather(wire: Wire, tree: Tree, value: T, share: Share[T]) -> list[T]:
    """The root gets every rank's value, by rank; the others an empty list."""
    found: dict[int, T] = {tree.rank: value}
    for received in wire.receive(tree.children):
        found.update(pickle.loads(received))
    ranks = sorted(found)
    values = share([found[rank] for rank in ranks])
    if tree.parent is None:
        return list(values)
    wire.send([tree.parent], dumped(dict(zip(ranks, values, strict=True))))
    return []


def scatter(wire: Wire, tree: Tree, values: Sequence[T]) -> T:
    """Every rank gets the value that the root has for it. values: of all ranks, at the root."""
    mine: Mapping[int, T] = dict(enumerate(values))
    if tree.parent is not None:
        (received,) = wire.receive([tree.parent])
        mine = pickle.loads(received)
    for ranks in tree.below:
        wire.send(ranks[:1], dumped({rank: mine[rank] for rank in ranks}))
    return mine[tree.rank]


def dumped(value: Any) -> memoryview:
    """As it goes over the wire. Peers are the ranks of this very job; DCP pickles between them as well."""
    stream = io.BytesIO()
    pickle.dump(value, stream, protocol=5)
    return stream.getbuffer()  # torch asks for a buffer that may be written to
