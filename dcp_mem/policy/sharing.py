"""Decide which rank reads which bytes of a checkpoint, and sends them to which other ranks.

Decided from what each rank needs, which nodes have what in memory, and how much room each node has
for a window: memory that its ranks share, through which bytes pass batch by batch. The rules:

1. Bytes that one rank alone needs, and that no node has in memory, this rank reads from storage.
2. Bytes that several ranks of a node need come into the node's window once.
3. Across nodes, one rank reads such bytes from storage and sends them to the windows of the others.
4. Bytes that nodes have in memory don't come from storage: a rank of such a node sends them, once
   to each node that needs them; to a single rank directly, to several through their node's window.
5. Reading, sending and receiving go to the rank that has done least by then.
6. A node without room for a window reads all by itself. Where it needs other nodes' memory, that is
   an error (`NoRoom`).

Only rule 3 looks at several nodes' needs at once. Where it doesn't apply, each node shares out by
itself what its own ranks need (`share_out_on_node`), and asks ranks of other nodes for it; what all
nodes have decided for a rank is joined (`joined_share`). Else one rank decides for all
(`share_out`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, repeat, zip_longest
from typing import NamedTuple

from dcp_mem.policy.pieces import PIECE, Extent, cut, merged

_MOST_PIECES = 1 << 15
"""Pieces, about, into which all that goes to single ranks is cut."""
Edges = Callable[[str], Sequence[int] | None]
"""Returns where a segment may be cut, ascending; None for anywhere."""
Extents = Mapping[str, Sequence[Extent]]
"""Bytes of segments, by file; what one rank needs is merged."""


@dataclass(frozen=True, slots=True)
class Need:
    """The bytes that a rank needs, and the room of its node.

    Attributes:
        node: The node's name.
        extents: The bytes that the rank needs.
        window_nbytes: The bytes that its node has for a window.
    """

    node: str
    extents: Extents
    window_nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPiece:
    """Bytes [start, stop) of a segment that come into a node's window once.

    Attributes:
        place: Where in the window they begin.
        by: The rank of the node that brings them there.
        origin: The rank that it gets them from; None for storage, or its own node's memory.
        to: Ranks of other nodes that it sends them to.
        is_held: They come from a node's memory. The rank that sends them has them there; they don't
            come into its own node's window.
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
        """Whether they come into the node's window."""
        return self.origin is not None or not self.is_held


class PeerPiece(NamedTuple):
    """Bytes [start, stop) of a segment, sent from a node's memory to the only rank in need.

    A plain tuple, because there are many, which are sent to their ranks.

    Attributes:
        peer: In the sender's share, the receiver; in the receiver's share, the sender.
    """

    peer: int
    file: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadShare:
    """One rank's share of a load.

    Attributes:
        alone: What it reads from storage for itself.
        batches: What comes into its node's window, batch by batch.
        window_nbytes: What the largest batch takes.
        makes_window: Whether this rank makes the window for its node.
        passes_on: Whether nodes send each other anything in any batch.
        sends: What it sends to single ranks, in the same order in which they receive it.
        receives: What it receives as the only rank that needs it.
        is_passing: Whether any rank sends anything to a single rank.
    """

    alone: Extents = field(default_factory=dict)
    batches: Sequence[Sequence[SharedPiece]] = ()
    window_nbytes: int = 0
    makes_window: bool = False
    passes_on: bool = False
    sends: Sequence[PeerPiece] = ()
    receives: Sequence[PeerPiece] = ()
    is_passing: bool = False

    @property
    def totals(self) -> LoadTotals:
        """What all ranks of the load must know of this share."""
        return LoadTotals(len(self.batches), self.passes_on, self.is_passing)

    def within(self, totals: LoadTotals) -> LoadShare:
        """Return the share as part of a load: with as many batches, some of them empty.

        Args:
            totals: Of all ranks' shares.
        """
        missing = totals.batches - len(self.batches)
        return replace(
            self,
            batches=[*self.batches, *([] for _ in range(missing))],
            passes_on=totals.passes_on,
            is_passing=totals.is_passing,
        )


class LoadTotals(NamedTuple):
    """What all ranks of a load go through together. A plain tuple, because it is sent to all ranks.

    Attributes:
        batches: Batches of the rank that has most.
        passes_on: As in `LoadShare`.
        is_passing: As in `LoadShare`.
    """

    batches: int
    passes_on: bool
    is_passing: bool

    def join(self, other: LoadTotals) -> LoadTotals:
        """Join what is known of two sets of ranks.

        Args:
            other: Of the other ranks.
        """
        return LoadTotals(
            max(self.batches, other.batches),
            self.passes_on or other.passes_on,
            self.is_passing or other.is_passing,
        )


class NoRoom(Exception):
    """A node needs bytes of other nodes' memory and has no room for a window.

    Args:
        node: The node's name.
        nbytes: The bytes that the window would take at least.
    """

    def __init__(self, node: str, nbytes: int) -> None:
        super().__init__(node, nbytes)
        self.node, self.nbytes = node, nbytes


def share_out(
    needs: Sequence[Need],
    edges: Edges,
    *,
    across_nodes: bool,
    holders: Callable[[str], Sequence[int]] = lambda file: (),
) -> list[LoadShare]:
    """Return every rank's share of a load; each byte leaves storage as seldom as can be.

    The stages:

    1. Cut what is needed where the ranks that need it change.
    2. Give what lies in a node's memory to a rank of it to send (`send_later`); else give what
       several ranks need to one of them (`share`), and the rest to the ranks themselves.
    3. Order what is sent, so that nodes don't all ask the same node first (`send`).

    Args:
        needs: What each rank needs.
        edges: Called only for segments that are shared.
        across_nodes: Whether bytes that several nodes need are read from storage once, not once by
            each.
        holders: Returns the ranks whose node has a segment in memory; they don't need it from
            others.

    Raises:
        NoRoom: A node needs bytes of other nodes' memory and has no room for a window.
    """
    by_rank = dict(enumerate(needs))
    shares = _shared_out(_Shares(by_rank), by_rank, edges, holders, across_nodes=across_nodes)
    totals = LoadTotals(0, passes_on=False, is_passing=False)
    for share in shares.values():
        totals = totals.join(share.totals)
    return [shares[rank].within(totals) for rank in by_rank]


def share_out_on_node(
    needs: Mapping[int, Need],
    edges: Edges,
    *,
    holders: Callable[[str], Sequence[int]] = lambda file: (),
    turn: int = 0,
) -> dict[int, LoadShare]:
    """Return the shares that follow from what one node's ranks need, for whichever ranks have one.

    The ranks that send are chosen by what they send to this node. What other nodes ask of them
    isn't known; `turn` has nodes that need little ask different ranks for it.

    Args:
        needs: What each rank of the node needs, by rank.
        edges: As for `share_out`.
        holders: As for `share_out`.
        turn: The node's number among the nodes.

    Returns:
        Shares by rank, to be joined with those that follow from other nodes' needs.

    Raises:
        NoRoom: The node needs bytes of other nodes' memory and has no room for a window.
    """
    return _shared_out(_Shares(needs, turn), needs, edges, holders, across_nodes=False)


def joined_share(parts: Sequence[LoadShare]) -> LoadShare:
    """Return the share of a rank, from the parts of it that nodes have decided by themselves.

    The messages between two ranks stay in their order: one node decides on all of them.

    Args:
        parts: The parts.
    """
    if len(parts) == 1:
        return parts[0]
    return LoadShare(
        alone={file: extents for part in parts for file, extents in part.alone.items()},
        batches=_side_by_side(*(part.batches for part in parts)),
        window_nbytes=max((part.window_nbytes for part in parts), default=0),
        makes_window=any(part.makes_window for part in parts),
        passes_on=any(part.passes_on for part in parts),
        sends=[piece for part in parts for piece in part.sends],
        receives=[piece for part in parts for piece in part.receives],
        is_passing=any(part.is_passing for part in parts),
    )


def _shared_out(
    shares: _Shares,
    needs: Mapping[int, Need],
    edges: Edges,
    holders: Callable[[str], Sequence[int]],
    *,
    across_nodes: bool,
) -> dict[int, LoadShare]:
    """Share out what these ranks need; see `share_out`."""
    for file, spans in _spans(needs):
        holding = holders(file)
        for extent, ranks in spans:
            if holding:
                shares.send_later(file, extent, ranks, holding)
                continue
            for group in shares.groups(ranks, across_nodes):
                if len(group) == 1:
                    shares.alone.setdefault(group[0], {}).setdefault(file, []).append(extent)
                else:
                    for start, stop in cut(extent, edges(file)):
                        shares.share(file, start, stop, group)
    shares.send(edges)
    return shares.result()


_Span = tuple[Extent, tuple[int, ...]]
"""Bytes of a segment, and the ranks that need them."""


def _spans(needs: Mapping[int, Need]) -> Iterator[tuple[str, Iterator[_Span]]]:
    """Yield the needed bytes of each segment, cut where the ranks that need them change."""
    needed: dict[str, list[tuple[int, Sequence[Extent]]]] = {}
    for rank, need in needs.items():
        for file, extents in need.extents.items():
            needed.setdefault(file, []).append((rank, extents))
    for file, of_file in sorted(needed.items()):
        if len(of_file) == 1:
            rank, extents = of_file[0]
            yield file, zip(extents, repeat((rank,)))
        else:
            yield file, _spans_of(_events(of_file))


def _events(
    needed: Sequence[tuple[int, Sequence[Extent]]],
) -> Mapping[int, tuple[list[int], list[int]]]:
    """Return, for each place in a segment, the ranks whose needs begin there and end there.

    Args:
        needed: Ranks, and the bytes that each of them needs.
    """
    events: dict[int, tuple[list[int], list[int]]] = {}
    for rank, extents in needed:
        for start, stop in extents:
            events.setdefault(start, ([], []))[0].append(rank)
            events.setdefault(stop, ([], []))[1].append(rank)
    return events


def _spans_of(
    events: Mapping[int, tuple[list[int], list[int]]],
) -> Iterator[_Span]:
    """Yield the needed ranges of one segment, with the ranks that need them.

    Args:
        events: As `_events` returns them.
    """
    active: set[int] = set()
    for place, following in pairwise(sorted(events)):
        begins, ends = events[place]
        active.difference_update(ends)
        active.update(begins)
        if active:
            yield (place, following), tuple(sorted(active))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sending:
    """Bytes of a segment that a rank which has them sends to others.

    Attributes:
        turn: Number of the first receiver's node.
        group: The receivers.
        holding: The ranks whose node has the segment.
    """

    turn: int
    file: str
    extent: Extent
    group: Sequence[int]
    holding: Sequence[int]

    @property
    def nbytes(self) -> int:
        return self.extent[1] - self.extent[0]


class _Shares:
    """The shares of all ranks while they are given out.

    Args:
        needs: Of each rank that needs something; others may have to send.
        turn: Number of the first of these ranks' nodes, among all nodes.
    """

    def __init__(self, needs: Mapping[int, Need], turn: int = 0) -> None:
        self.alone: dict[int, dict[str, list[Extent]]] = {}
        self._nodes = {rank: need.node for rank, need in needs.items()}
        self._members: dict[str, list[int]] = {}
        for rank, node in self._nodes.items():
            self._members.setdefault(node, []).append(rank)
        self._turn = turn
        self._numbers = {node: number for number, node in enumerate(self._members, turn)}
        self._window_nbytes = {
            node: min(needs[rank].window_nbytes for rank in members)
            for node, members in self._members.items()
        }
        # Bytes that each rank has read from storage, received and sent so far.
        self._fetched = Counter[int]()
        self._received = Counter[int]()
        self._sent = Counter[int]()
        self._windows = {node: _Window(nbytes) for node, nbytes in self._window_nbytes.items()}
        self._sends: dict[int, list[PeerPiece]] = {}
        self._receives: dict[int, list[PeerPiece]] = {}
        # What comes into each node's window, and what each rank sends to windows of other nodes.
        self._coming: dict[str, _Batches] = {}
        self._going: dict[int, _Batches] = {}
        self._to_send: list[_Sending] = []
        self._passes_on = False

    def groups(self, ranks: Sequence[int], across_nodes: bool) -> list[list[int]]:
        """Return the ranks in groups, each of which gets its bytes from storage once."""
        by_node: dict[str, list[int]] = {}
        for rank in ranks:
            by_node.setdefault(self._nodes[rank], []).append(rank)
        roomy = [
            members for node, members in by_node.items() if self._window_nbytes[node] >= 2 * PIECE
        ]
        singles = [
            [rank]
            for node, members in by_node.items()
            if self._window_nbytes[node] < 2 * PIECE
            for rank in members
        ]
        if across_nodes and roomy:
            return [[rank for members in roomy for rank in members], *singles]
        return [*roomy, *singles]

    def share(self, file: str, start: int, stop: int, group: Sequence[int]) -> None:
        """Have one rank read these bytes, for the windows of all nodes of the group."""
        nbytes, nodes = stop - start, list(dict.fromkeys(self._nodes[rank] for rank in group))
        windows = {node: self._windows[node] for node in nodes}
        # A single item of a checkpoint that torch wrote, for instance, can't be cut.
        if any(nbytes > window.limit for window in windows.values()):
            for rank in group:
                self.alone.setdefault(rank, {}).setdefault(file, []).append((start, stop))
            return
        batch = max(window.first_batch(nbytes) for window in windows.values())
        fetcher = min(
            (rank for node in nodes for rank in self._members[node]),
            key=lambda rank: self._fetched[rank],
        )
        by = {
            node: fetcher if node == self._nodes[fetcher] else self._idlest(node) for node in nodes
        }
        to = tuple(rank for rank in by.values() if rank != fetcher)
        self._fetched[fetcher] += nbytes
        for rank in to:
            self._received[rank] += nbytes
        self._passes_on = self._passes_on or bool(to)
        for node, window in windows.items():
            is_fetched = by[node] == fetcher
            origin, sent_to = (None, to) if is_fetched else (fetcher, ())
            _put(
                self._coming.setdefault(node, []),
                batch,
                SharedPiece(
                    file=file,
                    start=start,
                    stop=stop,
                    place=window.put(batch, nbytes),
                    by=by[node],
                    origin=origin,
                    to=sent_to,
                ),
            )

    def send_later(
        self, file: str, extent: Extent, group: Sequence[int], holding: Sequence[int]
    ) -> None:
        """Note bytes that ranks whose node has them send to all nodes of the group."""
        turn = self._numbers[self._nodes[group[0]]]
        self._to_send.append(
            _Sending(turn=turn, file=file, extent=extent, group=group, holding=holding)
        )

    def send(self, edges: Edges) -> None:
        """Give out what is to be sent.

        Each node begins with another segment, so that they don't all ask the same node first.

        Args:
            edges: As for `share_out`.
        """
        files = {
            file: number
            for number, file in enumerate(dict.fromkeys(one.file for one in self._to_send))
        }
        self._to_send.sort(
            key=lambda one: ((files[one.file] - one.turn) % len(files), one.file, one.extent)
        )
        alone = sum(
            one.nbytes * len(one.group) for one in self._to_send if self._goes_to_single_ranks(one)
        )
        for whole in self._to_send:
            # Windows have room for pieces. Single ranks get bytes from several others at once, if
            # there are pieces enough; too many of them would take rank 0 of a large job seconds.
            most = PIECE
            if self._goes_to_single_ranks(whole):
                most = max(PIECE, alone // _MOST_PIECES)
            if whole.nbytes <= most:
                self._send(whole, whole.extent)
                continue
            for extent in cut(whole.extent, edges(whole.file), most):
                self._send(whole, extent)

    def _goes_to_single_ranks(self, sending: _Sending) -> bool:
        group = sending.group
        return len(group) == 1 or len({self._nodes[rank] for rank in group}) == len(group)

    def _send(self, sending: _Sending, extent: Extent) -> None:
        if len(sending.group) == 1:  # as a rule, and for thousands of ranks
            self._send_to_one(sending, extent, sending.group[0])
            return
        by_node: dict[str, list[int]] = {}
        for rank in sending.group:
            by_node.setdefault(self._nodes[rank], []).append(rank)
        for ranks in by_node.values():
            if len(ranks) == 1:
                self._send_to_one(sending, extent, ranks[0])
        nodes = [node for node, ranks in by_node.items() if len(ranks) > 1]
        if nodes:
            self._send_to_windows(sending, extent, nodes)

    def _send_to_windows(self, sending: _Sending, extent: Extent, nodes: Sequence[str]) -> None:
        """Have these bytes sent to the windows of nodes of which several ranks need them."""
        file, (start, stop) = sending.file, extent
        nbytes = stop - start
        windows = {node: self._windows[node] for node in nodes}
        for node, window in windows.items():
            if nbytes > window.limit:
                raise NoRoom(node, 2 * nbytes)
        batch = max(window.first_batch(nbytes) for window in windows.values())
        sender = self._sender(sending.holding, nbytes * len(windows))
        by = {node: self._idlest(node) for node in windows}
        self._passes_on = True
        _put(
            self._going.setdefault(sender, []),
            batch,
            SharedPiece(
                file=file,
                start=start,
                stop=stop,
                place=0,
                by=sender,
                to=tuple(by.values()),
                is_held=True,
            ),
        )
        for node, rank in by.items():
            self._received[rank] += nbytes
            place = windows[node].put(batch, nbytes)
            _put(
                self._coming.setdefault(node, []),
                batch,
                SharedPiece(
                    file=file,
                    start=start,
                    stop=stop,
                    place=place,
                    by=rank,
                    origin=sender,
                    is_held=True,
                ),
            )

    def _send_to_one(self, sending: _Sending, extent: Extent, rank: int) -> None:
        """Have these bytes sent to the only rank of its node that needs them."""
        file, (start, stop) = sending.file, extent
        sender = self._sender(sending.holding, stop - start)
        self._sends.setdefault(sender, []).append(PeerPiece(rank, file, start, stop))
        self._receives.setdefault(rank, []).append(PeerPiece(sender, file, start, stop))

    def _sender(self, holding: Sequence[int], nbytes: int) -> int:
        """Return the rank, of those that have the bytes, that has sent least by now."""
        first = self._turn % len(holding)
        sender = min((*holding[first:], *holding[:first]), key=self._sent.__getitem__)
        self._sent[sender] += nbytes
        return sender

    def result(self) -> dict[int, LoadShare]:
        """Return the shares of all ranks that have one."""
        return {
            rank: self._share_of(rank)
            for rank in dict.fromkeys((*self._nodes, *self._sends, *self._going))
        }

    def _share_of(self, rank: int) -> LoadShare:
        node = self._nodes.get(rank, "")
        window_nbytes = self._windows[node].most if node in self._windows else 0
        coming, going = self._coming.get(node, []), self._going.get(rank, [])
        sends, receives = self._sends.get(rank, []), self._receives.get(rank, [])
        return LoadShare(
            alone={file: merged(extents, 1) for file, extents in self.alone.get(rank, {}).items()},
            batches=_side_by_side(coming, going) if going else coming,
            window_nbytes=window_nbytes,
            makes_window=window_nbytes > 0 and rank == self._members[node][0],
            passes_on=self._passes_on,
            sends=sends,
            receives=receives,
            is_passing=bool(sends or receives),
        )

    def _idlest(self, node: str) -> int:
        return min(self._members[node], key=lambda rank: self._received[rank])


_Batches = list[list[SharedPiece]]


def _put(batches: _Batches, number: int, piece: SharedPiece) -> None:
    batches.extend([] for _ in range(number + 1 - len(batches)))
    batches[number].append(piece)


def _side_by_side(*several: Sequence[Sequence[SharedPiece]]) -> _Batches:
    """Return batches that have what the batches of the same number have."""
    return [
        [piece for pieces in of_number for piece in pieces]
        for of_number in zip_longest(*several, fillvalue=())
    ]


@dataclass(slots=True)
class _Window:
    """A window that is filled batch by batch.

    Attributes:
        limit: Bytes that it may take.
        most: Bytes that the fullest batch has taken so far.
    """

    limit: int
    batch: int = 0
    filled: int = 0
    most: int = 0

    def first_batch(self, nbytes: int) -> int:
        """Return the first batch with room for so many bytes; an empty window takes anything."""
        return (
            self.batch if not self.filled or self.filled + nbytes <= self.limit else self.batch + 1
        )

    def put(self, batch: int, nbytes: int) -> int:
        """Return the place of so many bytes in a batch that isn't earlier than the last one."""
        if batch > self.batch:
            self.batch, self.filled = batch, 0
        place, self.filled = self.filled, self.filled + nbytes
        self.most = max(self.most, self.filled)
        return place
