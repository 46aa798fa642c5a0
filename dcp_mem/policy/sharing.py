"""Who fetches what from storage, where several ranks need the same bytes of a checkpoint, and who sends what it has in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from dcp_mem.policy.pieces import PIECE, Extent, cut, merged

Extents = Mapping[str, Sequence[Extent]]
"""Bytes of segments, by file; what one rank needs is merged."""


@dataclass(frozen=True, slots=True)
class Need:
    """What a rank brings: its node, what it needs, and the bytes that its node has for what several ranks share."""

    node: str
    extents: Extents
    window_nbytes: int


@dataclass(frozen=True, slots=True)
class Shared:
    """Bytes [start, stop) of a segment that come into a node's window, at `place`, once.

    by: the rank of the node that brings them there. origin: the rank that it gets them from, None: from storage.
    to: ranks of other nodes that it sends them to. is_held: the rank that sends them has them in its node's memory; they
    don't come into its own node's window then.
    """

    file: str
    start: int
    stop: int
    place: int
    by: int
    origin: int | None = None
    to: tuple[int, ...] = ()
    is_held: bool = False

    @property
    def comes_in(self) -> bool:
        """Whether it comes into the node's window."""
        return self.origin is not None or not self.is_held


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's part. alone: what it fetches for itself. batches: what comes into its node's window, batch by batch.

    window_nbytes: what a batch takes at most. makes_window: whether it is this rank that makes the window for its node.
    passes_on: whether in any batch nodes send each other anything.
    """

    alone: Extents = field(default_factory=dict)
    batches: Sequence[Sequence[Shared]] = ()
    window_nbytes: int = 0
    makes_window: bool = False
    passes_on: bool = False


class NoRoom(Exception):
    """A node needs bytes of other nodes' memory and has no room for a window. nbytes: what it would take at least."""

    def __init__(self, node: str, nbytes: int) -> None:
        super().__init__(node, nbytes)
        self.node, self.nbytes = node, nbytes


def share_out(
    needs: Sequence[Need],
    edges: Callable[[str], Sequence[int] | None],
    *,
    across_nodes: bool,
    holders: Callable[[str], Sequence[int]] = lambda file: (),
) -> list[Part]:
    """Every rank's part, so that storage gives each byte once for each node, or once in all.

    holders: ranks that have a segment in their node's memory, and don't need it from others. Each byte of such a segment
    leaves one of them once for each node that needs it. Raises NoRoom.

    edges: where a segment may be cut, ascending; None: anywhere. Asked only for segments that are shared. Bytes that one rank
    alone needs are its own affair, and so is everything on a node that has no room for a window.
    """
    work = _Work(needs)
    for file in sorted({file for need in needs for file in need.extents}):
        holding = holders(file)
        for extent, ranks in _spans(needs, file):
            for start, stop in cut(extent, edges(file)) if holding else ():
                work.send(file, start, stop, ranks, holding)
            for group in () if holding else work.groups(ranks, across_nodes):
                if len(group) == 1:
                    work.alone[group[0]].setdefault(file, []).append(extent)
                else:
                    for start, stop in cut(extent, edges(file)):
                        work.share(file, start, stop, group)
    return work.parts()


def _spans(needs: Sequence[Need], file: str) -> Iterator[tuple[Extent, tuple[int, ...]]]:
    """The needed bytes, cut where the ranks that need them change, with these ranks."""
    events: dict[int, tuple[list[int], list[int]]] = {}
    for rank, need in enumerate(needs):
        for start, stop in need.extents.get(file, ()):
            events.setdefault(start, ([], []))[0].append(rank)
            events.setdefault(stop, ([], []))[1].append(rank)
    active: set[int] = set()
    for place, following in pairwise(sorted(events)):
        begins, ends = events[place]
        active.difference_update(ends)
        active.update(begins)
        if active:
            yield (place, following), tuple(sorted(active))


class _Work:
    """What has been given out so far."""

    def __init__(self, needs: Sequence[Need]) -> None:
        self.alone: list[dict[str, list[Extent]]] = [{} for _ in needs]
        self._nodes = [need.node for need in needs]
        self._members: dict[str, list[int]] = {}
        for rank, node in enumerate(self._nodes):
            self._members.setdefault(node, []).append(rank)
        self._window = {
            node: min(needs[rank].window_nbytes for rank in members) for node, members in self._members.items()
        }
        self._fetched, self._received, self._sent = [0] * len(needs), [0] * len(needs), [0] * len(needs)
        self._filled: dict[str, int] = dict.fromkeys(self._members, 0)
        self._batches: dict[str, list[list[Shared]]] = {node: [[]] for node in self._members}
        self._most: dict[str, int] = dict.fromkeys(self._members, 0)
        self._passes_on = False

    def groups(self, ranks: Sequence[int], across_nodes: bool) -> list[list[int]]:
        """The ranks, in groups that each get bytes from storage once."""
        by_node: dict[str, list[int]] = {}
        for rank in ranks:
            by_node.setdefault(self._nodes[rank], []).append(rank)
        roomy = [members for node, members in by_node.items() if self._window[node] >= 2 * PIECE]
        others = [[rank] for node, members in by_node.items() if self._window[node] < 2 * PIECE for rank in members]
        if across_nodes and roomy:
            return [[rank for members in roomy for rank in members], *others]
        return [*roomy, *others]

    def share(self, file: str, start: int, stop: int, group: Sequence[int]) -> None:
        """Have these bytes fetched by one rank, into the windows of all nodes of the group."""
        nbytes, nodes = stop - start, list(dict.fromkeys(self._nodes[rank] for rank in group))
        if any(self._filled[node] + nbytes > self._window[node] for node in nodes):
            if any(nbytes > self._window[node] for node in nodes):  # a single item of a foreign checkpoint, say
                for rank in group:
                    self.alone[rank].setdefault(file, []).append((start, stop))
                return
            self._begin_batch()
        fetcher = min((rank for node in nodes for rank in self._members[node]), key=lambda rank: self._fetched[rank])
        by = {node: fetcher if node == self._nodes[fetcher] else self._idlest(node) for node in nodes}
        to = tuple(rank for rank in by.values() if rank != fetcher)
        self._fetched[fetcher] += nbytes
        for rank in to:
            self._received[rank] += nbytes
        self._passes_on = self._passes_on or bool(to)
        for node in nodes:
            is_fetched = by[node] == fetcher
            piece = Shared(
                file,
                start,
                stop,
                self._filled[node],
                by[node],
                None if is_fetched else fetcher,
                to if is_fetched else (),
            )
            self._batches[node][-1].append(piece)
            self._filled[node] += nbytes
            self._most[node] = max(self._most[node], self._filled[node])

    def send(self, file: str, start: int, stop: int, group: Sequence[int], holding: Sequence[int]) -> None:
        """Have these bytes sent by a rank whose node has them, to all nodes of the group."""
        nbytes, nodes = stop - start, list(dict.fromkeys(self._nodes[rank] for rank in group))
        for node in nodes:
            if nbytes > self._window[node]:
                raise NoRoom(node, 2 * nbytes)
        if any(self._filled[node] + nbytes > self._window[node] for node in nodes):
            self._begin_batch()
        sender = min(holding, key=lambda rank: (self._sent[rank], rank))
        by = {node: self._idlest(node) for node in nodes}
        self._sent[sender] += nbytes * len(nodes)
        self._passes_on = True
        self._batches[self._nodes[sender]][-1].append(
            Shared(file, start, stop, 0, sender, None, tuple(by.values()), is_held=True)
        )
        for node, rank in by.items():
            self._received[rank] += nbytes
            piece = Shared(file, start, stop, self._filled[node], rank, sender, is_held=True)
            self._batches[node][-1].append(piece)
            self._filled[node] += nbytes
            self._most[node] = max(self._most[node], self._filled[node])

    def parts(self) -> list[Part]:
        is_shared = any(batch for batches in self._batches.values() for batch in batches)
        return [
            Part(
                {file: merged(extents, 1) for file, extents in alone.items()},
                self._batches[node] if is_shared else (),
                self._most[node],
                self._most[node] > 0 and rank == self._members[node][0],
                self._passes_on,
            )
            for rank, (alone, node) in enumerate(zip(self.alone, self._nodes, strict=True))
        ]

    def _idlest(self, node: str) -> int:
        return min(self._members[node], key=lambda rank: self._received[rank])

    def _begin_batch(self) -> None:
        """On all nodes alike: every rank passes all batches."""
        for node in self._members:
            self._batches[node].append([])
            self._filled[node] = 0
