"""Decide which rank reads which bytes of a checkpoint, and which ranks it gives them to.

Each node's leader, its first rank, decides what its own ranks need, by that and by which nodes have
what in memory. It asks ranks of other nodes for what they have; a rank joins what all leaders ask
of it. The rules:

1. Bytes that one rank alone needs, and that no node has in memory, this rank reads from storage.
2. Bytes that several ranks of a node need come to one of them, which gives them to the others.
3. Bytes that nodes have in memory don't come from storage: a rank of such a node sends them, once
   to each node that needs them.
4. With `broadcast=True`, one rank in all reads what several nodes need, and sends it once to each
   of the other nodes. No rank sees what all need: a leader asks the home of each segment, which is
   a leader that follows from the segment's name (`requests`); homes tell these nodes of each other
   (`joint`), and each of them cuts and deals the same bytes by the same rules (`dealt`).
5. Reading, sending and receiving go to the rank that has done least by then.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from heapq import heapreplace
from itertools import pairwise, repeat, zip_longest
from typing import NamedTuple

from dcp_mem.common.sendable import sendable
from dcp_mem.common.value_class import value_class
from dcp_mem.policy.pieces import PIECE, Extent, cut, merged

_MOST_PIECES = 1 << 15
"""Pieces, about, into which all that other nodes' memory sends to a node is cut."""
_PASSED = -1
"""In the place of a rank: bytes that come together with other nodes."""
Edges = Callable[[str], Sequence[int] | None]
"""Returns where a segment may be cut, ascending; None for anywhere."""
Extents = Mapping[str, Sequence[Extent]]
"""Bytes of segments, by file; what one rank needs is merged."""
Span = tuple[Extent, tuple[int, ...]]
"""Bytes of a segment, and who needs them."""
Nodes = dict[str, tuple[int, ...]]
"""The ranks of each node, ascending; the first one is its leader."""
NodeSet = tuple[range, ...]
"""The leaders of nodes, as runs of equal steps: as a rule one run, of two nodes or of thousands."""


@sendable
class Piece(NamedTuple):
    """Bytes [start, stop) of a segment, as one rank gets them. Plain tuples, as many are sent."""

    file: str
    extent: Extent
    # the rank that it gets them from; None: it has them in its node's memory, else it reads them
    origin: int | None = None
    to: tuple[int, ...] = ()  # the ranks that it gives them to

    @property
    def start(self) -> int:
        return self.extent[0]

    @property
    def stop(self) -> int:
        return self.extent[1]


@sendable
@value_class
class LoadShare:
    """One rank's share of a load."""

    alone: Extents = field(default_factory=dict)  # what it reads from storage for itself alone
    # in the order in which each other rank gives, or gets, those that it has in common with it
    pieces: Sequence[Piece] = ()


def join_nodes(one: Nodes | None, other: Nodes | None) -> Nodes | None:
    """Join the nodes that two sets of ranks know; None: a rank has failed."""
    if one is None or other is None:
        return None
    both = one.keys() & other.keys()
    return {**one, **other, **{node: tuple(sorted((*one[node], *other[node]))) for node in both}}


def share_out_on_node(
    needs: Mapping[int, Extents],
    edges: Edges,
    *,
    holders: Callable[[str], Sequence[int]] = lambda file: (),
    turn: int = 0,
    passed: Sequence[tuple[int, Piece]] = (),
) -> dict[int, LoadShare]:
    """Return the shares, by rank, that follow from what one node's ranks need.

    What is needed is cut where the ranks that need it change. The ranks that send are chosen by
    what they send to this node; what other nodes ask of them isn't known. `turn` has nodes begin
    with different segments and senders.

    `holders`: returns the ranks whose node has a segment in memory; they don't need it from others.
    `passed`: what `dealt` returns.
    """
    shares, to_send = _Shares(needs, turn), list[_Sending]()
    coming: dict[str, list[Extent]] = {}
    for by, piece in passed:
        shares.bring(by, piece, _in_need(needs, piece))
        coming.setdefault(piece.file, []).append(piece.extent)
    comes_along = {file: merged(extents, 1) for file, extents in coming.items()}
    for file, of_file in spans({_PASSED: comes_along, **needs}):
        holding = holders(file)
        for extent, ranks in of_file:
            if ranks[0] == _PASSED:
                continue
            if holding:
                to_send.append(_Sending(file, extent, ranks, holding))
            elif len(ranks) == 1:
                shares.leave(file, extent, ranks[0])
            else:
                for part in cut(extent, edges(file)):
                    shares.read(file, part, ranks)
    shares.send(to_send, edges)
    return shares.result()


def _in_need(needs: Mapping[int, Extents], piece: Piece) -> list[int]:
    """Return the ranks that need some of a piece."""
    found = []
    for rank, extents in needs.items():
        of_file = extents.get(piece.file, ())
        first = bisect_right(of_file, piece.start, key=lambda extent: extent[1])
        if first < len(of_file) and of_file[first][0] < piece.stop:
            found.append(rank)
    return found


class _Sending(NamedTuple):
    """Bytes of a segment that a rank which has them in memory sends."""

    file: str
    extent: Extent
    ranks: Sequence[int]  # those that need them
    holding: Sequence[int]


class _Shares:
    """The shares that follow from one node's needs, while they are decided."""

    def __init__(self, needs: Mapping[int, Extents], turn: int) -> None:
        self._turn = turn
        self._alone: dict[int, dict[str, list[Extent]]] = {}
        self._pieces: dict[int, list[Piece]] = {rank: [] for rank in needs}
        # Bytes that each rank has read from storage, received and sent so far.
        self._read, self._received, self._sent = Counter[int](), Counter[int](), Counter[int]()

    def leave(self, file: str, extent: Extent, rank: int) -> None:
        """Have the only rank that needs them read these bytes."""
        self._alone.setdefault(rank, {}).setdefault(file, []).append(extent)

    def read(self, file: str, extent: Extent, ranks: Sequence[int]) -> None:
        """Have one rank read these bytes for all that need them."""
        self.bring(min(ranks, key=self._read.__getitem__), Piece(file, extent), ranks)

    def bring(self, by: int, piece: Piece, ranks: Sequence[int]) -> None:
        """Have a rank of this node get a piece, and give it to the others that need it."""
        others = tuple(rank for rank in ranks if rank != by)
        done = self._read if piece.origin is None else self._received
        done[by] += piece.stop - piece.start
        self._pieces[by].append(piece._replace(to=piece.to + others))
        for rank in others:
            self._pieces[rank].append(Piece(piece.file, piece.extent, by))

    def send(self, to_send: list[_Sending], edges: Edges) -> None:
        """Have these bytes sent, from another segment on than other nodes begin with."""
        files = {
            file: number for number, file in enumerate(dict.fromkeys(one[0] for one in to_send))
        }
        to_send.sort(key=lambda one: ((files[one.file] - self._turn) % len(files), one[:2]))
        nbytes = sum(stop - start for _, (start, stop), *_ in to_send)
        # Several ranks send at once, if there are pieces enough; too many would take seconds.
        most = max(PIECE, nbytes // _MOST_PIECES)
        for file, whole, ranks, holding in to_send:
            is_small = whole[1] - whole[0] <= most
            for extent in [whole] if is_small else cut(whole, edges(file), most):
                by = min(ranks, key=self._received.__getitem__)
                sender = self._sender(holding, extent[1] - extent[0])
                self._pieces.setdefault(sender, []).append(Piece(file, extent, None, (by,)))
                self.bring(by, Piece(file, extent, sender), ranks)

    def _sender(self, holding: Sequence[int], nbytes: int) -> int:
        """Return the rank, of those that have the bytes, that has sent least by now."""
        first = self._turn % len(holding)
        sender = min((*holding[first:], *holding[:first]), key=self._sent.__getitem__)
        self._sent[sender] += nbytes
        return sender

    def result(self) -> dict[int, LoadShare]:
        """Return the shares of all ranks that have one."""
        return {
            rank: LoadShare(
                {file: merged(of_file, 1) for file, of_file in self._alone.get(rank, {}).items()},
                pieces,
            )
            for rank, pieces in self._pieces.items()
        }


# -- what several nodes need -----------------------------------------------------------------------


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

    `leaders`: of all nodes, ascending.
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


def dealt(
    leader: int, nodes: Mapping[int, Sequence[int]], told: Sequence[JointSpan], edges: Edges
) -> list[tuple[int, Piece]]:
    """Return the pieces that a node gets together with others, each with the rank that gets it.

    Pieces are in one order on all nodes.

    `nodes`: the ranks of each node, by its leader. `told`: what homes have told this leader.
    """
    by_set: dict[NodeSet, list[JointSpan]] = {}
    for span in sorted(told, key=lambda span: span[:2]):
        by_set.setdefault(span.nodes, []).append(span)
    found = list[tuple[int, Piece]]()
    for of_set, of_spans in by_set.items():
        leaders = [one for run in of_set for one in run]
        readers = [
            (of, rank)
            for in_turn in zip_longest(*(nodes[of] for of in leaders))
            for of, rank in zip(leaders, in_turn, strict=True)
            if rank is not None
        ]
        first = zlib.crc32(repr(of_set).encode())  # sets begin with different ranks
        has_read = [(0, number) for number in range(len(readers))]  # a heap, the idlest first
        for file, start, stop in _cut_up(of_spans, edges):
            nbytes, number = has_read[0]
            heapreplace(has_read, (nbytes + stop - start, number))
            turn = first + number
            home, reader = readers[turn % len(readers)]
            # A reader sends to one rank of each other node.
            getting = {of: nodes[of][turn % len(nodes[of])] for of in leaders if of != home}
            found.append(
                (reader, Piece(file, (start, stop), None, tuple(getting.values())))
                if home == leader
                else (getting[leader], Piece(file, (start, stop), reader))
            )
    return sorted(found, key=lambda one: one[1][:2])


def _cut_up(of_spans: Sequence[JointSpan], edges: Edges) -> Iterator[tuple[str, int, int]]:
    for file, start, stop, _ in of_spans:
        for extent in cut((start, stop), edges(file)):
            yield file, *extent


# -- who needs what --------------------------------------------------------------------------------


def spans(needs: Mapping[int, Extents]) -> Iterator[tuple[str, Iterator[Span]]]:
    """Yield the needed bytes of each segment, cut where those who need them change."""
    needed: dict[str, list[tuple[int, Sequence[Extent]]]] = {}
    for number, of_one in needs.items():
        for file, extents in of_one.items():
            needed.setdefault(file, []).append((number, extents))
    for file, of_file in sorted(needed.items()):
        if len(of_file) == 1:
            number, extents = of_file[0]
            yield file, zip(extents, repeat((number,)))
        else:
            yield file, _spans_of(of_file)


def _spans_of(needed: Sequence[tuple[int, Sequence[Extent]]]) -> Iterator[Span]:
    """Yield the needed ranges of one segment, with those who need them."""
    events: dict[int, tuple[list[int], list[int]]] = {}  # whose needs begin, and end, at a place
    for number, extents in needed:
        for start, stop in extents:
            events.setdefault(start, ([], []))[0].append(number)
            events.setdefault(stop, ([], []))[1].append(number)
    active: set[int] = set()
    for place, following in pairwise(sorted(events)):
        begins, ends = events[place]
        active.difference_update(ends)
        active.update(begins)
        if active:
            yield (place, following), tuple(sorted(active))
