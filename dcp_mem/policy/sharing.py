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
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from dcp_mem.policy.pieces import PIECE, Extent, cut, merged

_MOST_PIECES = 1 << 15
"""Pieces, about, into which all that goes to single ranks is cut."""
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


@dataclass(frozen=True, slots=True)
class PeerPiece:
    """Bytes [start, stop) of a segment, sent from a node's memory to the only rank in need.

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
    edges: Callable[[str], Sequence[int] | None],
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
        edges: Returns where a segment may be cut, ascending; None for anywhere. Called only for
            segments that are shared.
        across_nodes: Whether bytes that several nodes need are read from storage once, not once by
            each.
        holders: Returns the ranks whose node has a segment in memory; they don't need it from
            others.

    Raises:
        NoRoom: A node needs bytes of other nodes' memory and has no room for a window.
    """
    shares = _Shares(needs)
    for file, extent, ranks in _spans(needs):
        holding = holders(file)
        if holding:
            shares.send_later(file, extent, ranks, holding)
        else:
            for group in shares.groups(ranks, across_nodes):
                if len(group) == 1:
                    shares.alone[group[0]].setdefault(file, []).append(extent)
                else:
                    for start, stop in cut(extent, edges(file)):
                        shares.share(file, start, stop, group)
    shares.send(edges)
    return shares.result()


def _spans(needs: Sequence[Need]) -> Iterator[tuple[str, Extent, tuple[int, ...]]]:
    """Yield the needed bytes of each segment, cut where the ranks that need them change."""
    needed: dict[str, list[tuple[int, Sequence[Extent]]]] = {}
    for rank, need in enumerate(needs):
        for file, extents in need.extents.items():
            needed.setdefault(file, []).append((rank, extents))
    for file, of_file in sorted(needed.items()):
        if len(of_file) == 1:
            rank, extents = of_file[0]
            for extent in extents:
                yield file, extent, (rank,)
            continue
        for extent, ranks in _spans_of(_events(of_file)):
            yield file, extent, ranks


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
) -> Iterator[tuple[Extent, tuple[int, ...]]]:
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
    """The shares of all ranks while they are given out."""

    def __init__(self, needs: Sequence[Need]) -> None:
        self.alone: list[dict[str, list[Extent]]] = [{} for _ in needs]
        self._nodes = [need.node for need in needs]
        self._members: dict[str, list[int]] = {}
        for rank, node in enumerate(self._nodes):
            self._members.setdefault(node, []).append(rank)
        self._numbers = {node: number for number, node in enumerate(self._members)}
        self._window_nbytes = {
            node: min(needs[rank].window_nbytes for rank in members)
            for node, members in self._members.items()
        }
        # Bytes that each rank has read from storage, received and sent so far.
        self._fetched = [0] * len(needs)
        self._received = [0] * len(needs)
        self._sent = [0] * len(needs)
        self._windows = {node: _Window(nbytes) for node, nbytes in self._window_nbytes.items()}
        self._sends: list[list[PeerPiece]] = [[] for _ in needs]
        self._receives: list[list[PeerPiece]] = [[] for _ in needs]
        self._batches: dict[str, list[list[SharedPiece]]] = {node: [] for node in self._members}
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
                self.alone[rank].setdefault(file, []).append((start, stop))
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
            self._add(
                node,
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

    def send(self, edges: Callable[[str], Sequence[int] | None]) -> None:
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
        self._add(
            self._nodes[sender],
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
            self._add(
                node,
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
        self._sends[sender].append(PeerPiece(rank, file, start, stop))
        self._receives[rank].append(PeerPiece(sender, file, start, stop))

    def _sender(self, holding: Sequence[int], nbytes: int) -> int:
        """Return the rank, of those that have the bytes, that has sent least by now."""
        _, sender = min(zip(map(self._sent.__getitem__, holding), holding, strict=True))
        self._sent[sender] += nbytes
        return sender

    def _add(self, node: str, batch: int, piece: SharedPiece) -> None:
        batches = self._batches[node]
        batches.extend([] for _ in range(batch + 1 - len(batches)))
        batches[batch].append(piece)

    def result(self) -> list[LoadShare]:
        """Return all shares; all ranks have equally many batches, some of them empty."""
        count, is_passing = max(map(len, self._batches.values())), any(self._sends)
        for batches in self._batches.values():
            batches.extend([] for _ in range(count - len(batches)))
        return [
            LoadShare(
                alone={file: merged(extents, 1) for file, extents in alone.items()},
                batches=self._batches[node],
                window_nbytes=self._windows[node].most,
                makes_window=self._windows[node].most > 0 and rank == self._members[node][0],
                passes_on=self._passes_on,
                sends=self._sends[rank],
                receives=self._receives[rank],
                is_passing=is_passing,
            )
            for rank, (alone, node) in enumerate(zip(self.alone, self._nodes, strict=True))
        ]

    def _idlest(self, node: str) -> int:
        return min(self._members[node], key=lambda rank: self._received[rank])


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
