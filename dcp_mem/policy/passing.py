"""Decide what nodes fetch from storage once and pass on to each other, without one rank for all.

The steps, of each node's leader, which is its first rank:

1. It asks for each segment that its node needs. Whom it asks follows from the segment's name: its
   home, one of the leaders (`requests`).
2. A home finds the bytes that several nodes need, and tells these nodes of each other (`joint`).
3. Nodes that need the same bytes are a set. Each of them cuts these bytes into pieces, and deals
   them to the ranks of the set, by the same rules (`JointPieces`).
4. Pieces come batch by batch, and a batch is the same one on all nodes. Each set spreads its pieces
   evenly over all batches. So a leader sees what comes to its node in each batch, though it doesn't
   know the other nodes' sets. The leaders try numbers of batches, ascending, until every node's
   window has room for each batch (`batch_counts`, `fits`).

What one node alone needs isn't decided here (`sharing.py`).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from heapq import heapreplace
from itertools import zip_longest
from typing import NamedTuple

from dcp_mem.common.sendable import sendable
from dcp_mem.policy.needs import Edges, Extents, spans
from dcp_mem.policy.pieces import PIECE, Extent, cut, least_window, merged
from dcp_mem.policy.shares import SharedPiece

MOST_TRIES = 40
"""Numbers of batches that are tried. After the last one, each node fetches for itself."""
_PIECES_OF_WINDOW = 8
"""Pieces for which a window has room. With fewer, sets of nodes get into each other's way."""
NodeSet = tuple[range, ...]
"""The leaders of nodes, as runs of equal steps: as a rule one run, of two nodes or of thousands."""


@sendable
class LoadNode(NamedTuple):
    """A node that takes part in a load. A plain tuple, because it is sent to all ranks."""

    ranks: tuple[int, ...]  # its ranks, ascending; the first is its leader
    window_nbytes: int  # the bytes that it has for a window

    def join(self, other: LoadNode) -> LoadNode:
        """Join what is known of some of its ranks and of others."""
        ranks = tuple(sorted((*self.ranks, *other.ranks)))
        return LoadNode(ranks, min(self.window_nbytes, other.window_nbytes))

    @property
    def passes_on(self) -> bool:
        """Whether its window has room for what comes from other nodes."""
        return self.window_nbytes >= least_window()


def join_nodes(
    one: dict[str, LoadNode] | None, other: dict[str, LoadNode] | None
) -> dict[str, LoadNode] | None:
    """Join the nodes, by name, that two sets of ranks know; None: a rank has failed."""
    if one is None or other is None:
        return None
    both = one.keys() & other.keys()
    return {**one, **other, **{node: one[node].join(other[node]) for node in both}}


@sendable
class JointSpan(NamedTuple):
    """Bytes [start, stop) of a segment that several nodes need. Plain tuples, which are sent."""

    file: str
    start: int
    stop: int
    nodes: NodeSet


def requests(
    needs: Sequence[Extents], leaders: Sequence[int]
) -> dict[int, dict[str, list[Extent]]]:
    """Return what a leader asks of each home.

    `leaders`: of all nodes that pass on, ascending.
    """
    wanted: dict[str, list[Extent]] = {}
    for extents in needs:
        for file, of_file in extents.items():
            wanted.setdefault(file, []).extend(of_file)
    found: dict[int, dict[str, list[Extent]]] = {}
    for file, of_file in wanted.items():
        home = leaders[zlib.crc32(file.encode()) % len(leaders)]
        found.setdefault(home, {})[file] = merged(of_file, 1)
    return found


def joint(asked: Mapping[int, Extents]) -> dict[int, list[JointSpan]]:
    """Return what a home tells the leaders: the bytes that their nodes need and others too."""
    sets: dict[tuple[int, ...], NodeSet] = {}
    found: dict[int, list[JointSpan]] = {}
    for file, of_file in spans(asked):
        for (start, stop), leaders in of_file:
            if len(leaders) > 1:
                nodes = sets.get(leaders) or sets.setdefault(leaders, _as_runs(leaders))
                span = JointSpan(file, start, stop, nodes)
                for leader in leaders:
                    found.setdefault(leader, []).append(span)
    return found


def _as_runs(numbers: Sequence[int]) -> NodeSet:
    runs: list[range] = []
    for number in numbers:
        if runs and number == runs[-1].stop:
            runs[-1] = range(runs[-1].start, number + runs[-1].step, runs[-1].step)
        elif runs and len(runs[-1]) == 1:
            first = runs[-1].start
            runs[-1] = range(first, 2 * number - first, number - first)
        else:
            runs.append(range(number, number + 1))
    return tuple(runs)


def batch_counts(fewest: int) -> Iterator[int]:
    """Yield the numbers of batches to try, ascending, until every node's window has room."""
    count = fewest
    for _ in range(MOST_TRIES):
        yield count
        count += max(1, count // 4)


class JointPieces:
    """The pieces that one node and others fetch from storage together."""

    def __init__(
        self,
        leader: int,
        nodes: Mapping[int, LoadNode],
        told: Sequence[JointSpan],
        edges: Edges,
    ) -> None:
        """Cut what several nodes need, and deal it to their ranks.

        `edges`: where segments may be cut.
        """
        self._window_nbytes = nodes[leader].window_nbytes
        by_set: dict[NodeSet, list[JointSpan]] = {}
        for span in sorted(told, key=lambda span: span[:2]):
            by_set.setdefault(span.nodes, []).append(span)
        self._sets = [
            _Dealt(leader, _Set(of_set, nodes), of_spans, edges)
            for of_set, of_spans in by_set.items()
        ]
        self.nbytes = sum(one.nbytes for one in self._sets)

    @property
    def fewest_batches(self) -> int:
        """The batches that it takes, were each of them to fill the window."""
        return -(-self.nbytes // self._window_nbytes)

    def fits(self, count: int) -> bool:
        """Return whether the window has room for what comes in each of so many batches.

        `count`: the batches; 0 where no node has such pieces.
        """
        filled = [0] * count
        for one in self._sets:
            for batch, piece in zip(one.batches(count), one.pieces, strict=True):
                filled[batch] += piece.stop - piece.start
        return max(filled, default=0) <= self._window_nbytes

    def in_batches(self, count: int) -> list[list[SharedPiece]]:
        """Return the pieces of each batch, in the order in which ranks send them to each other.

        `count`: the batches; with 0 there are none.
        """
        found: list[list[SharedPiece]] = [[] for _ in range(count)]
        for one in self._sets if count else ():
            for batch, piece in zip(one.batches(count), one.pieces, strict=True):
                found[batch].append(piece)
        for pieces in found:
            pieces.sort(key=lambda piece: (piece.file, piece.start))
        return found


class _Set:
    """Nodes that need the same bytes, and which of their ranks brings which piece."""

    def __init__(self, of_set: NodeSet, nodes: Mapping[int, LoadNode]) -> None:
        self.leaders = [leader for run in of_set for leader in run]
        self._ranks = {leader: nodes[leader].ranks for leader in self.leaders}
        self.window_nbytes = min(nodes[leader].window_nbytes for leader in self.leaders)
        self.piece_nbytes = min(PIECE, max(self.window_nbytes // _PIECES_OF_WINDOW, 1))
        # Different sets begin with different ranks and batches.
        self.turn = zlib.crc32(repr(of_set).encode())
        fetchers = [
            (leader, rank)
            for in_turn in zip_longest(*self._ranks.values())
            for leader, rank in zip(self.leaders, in_turn, strict=True)
            if rank is not None
        ]
        first = self.turn % len(fetchers)
        # The bytes that each rank fetches: a heap, the idlest first.
        self._fetched = [
            (0, number, leader, rank)
            for number, (leader, rank) in enumerate((*fetchers[first:], *fetchers[:first]))
        ]

    def fetcher(self, nbytes: int) -> tuple[int, int]:
        """Return the rank that fetches the next piece, and its leader before it."""
        fetched, number, leader, rank = self._fetched[0]
        heapreplace(self._fetched, (fetched + nbytes, number, leader, rank))
        return leader, rank

    def receiver(self, leader: int, number: int) -> int:
        """Return the rank of a node that receives the piece of this number, if another fetches."""
        ranks = self._ranks[leader]
        return ranks[(self.turn + number) % len(ranks)]


class _Dealt:
    """The pieces of one set of nodes, as they come to one of these nodes."""

    def __init__(
        self, leader: int, of_set: _Set, of_spans: Sequence[JointSpan], edges: Edges
    ) -> None:
        self._turn = of_set.turn
        self.pieces: list[SharedPiece] = []
        for span in of_spans:
            for start, stop in cut((span.start, span.stop), edges(span.file), of_set.piece_nbytes):
                # A single item of a checkpoint that torch wrote, for instance, can't be cut.
                if stop - start <= of_set.window_nbytes:
                    self._deal(leader, of_set, span.file, start, stop)
        self.nbytes = sum(piece.stop - piece.start for piece in self.pieces)

    def _deal(self, leader: int, of_set: _Set, file: str, start: int, stop: int) -> None:
        number = len(self.pieces)
        by_leader, fetcher = of_set.fetcher(stop - start)
        comes = by_leader != leader
        others = [] if comes else [other for other in of_set.leaders if other != leader]
        self.pieces.append(
            SharedPiece(
                file=file,
                start=start,
                stop=stop,
                place=0,
                by=of_set.receiver(leader, number) if comes else fetcher,
                origin=fetcher if comes else None,
                to=tuple(of_set.receiver(other, number) for other in others),
            )
        )

    def batches(self, count: int) -> list[int]:
        """Return the batch of each piece, of so many: spread evenly."""
        found, place = list[int](), 0
        for piece in self.pieces:
            found.append((place * count // self.nbytes + self._turn) % count)
            place += piece.stop - piece.start
        return found
