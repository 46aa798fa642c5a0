"""Who fetches what from storage, where several ranks need the same bytes of a checkpoint, and who sends what it has in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
class Passed:
    """Bytes [start, stop) of a segment on their way from the memory of a rank's node to a rank that alone needs them.

    peer: who gets them, or who sends them.
    """

    peer: int
    file: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's part. alone: what it fetches for itself. batches: what comes into its node's window, batch by batch.

    window_nbytes: what a batch takes at most. makes_window: whether it is this rank that makes the window for its node.
    passes_on: whether in any batch nodes send each other anything. sends, receives: what passes between two ranks, in the
    same order for both. is_passing: whether anything does so between any two.
    """

    alone: Extents = field(default_factory=dict)
    batches: Sequence[Sequence[Shared]] = ()
    window_nbytes: int = 0
    makes_window: bool = False
    passes_on: bool = False
    sends: Sequence[Passed] = ()
    receives: Sequence[Passed] = ()
    is_passing: bool = False


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
    for file, extent, ranks in _spans(needs):
        holding = holders(file)
        if holding:
            work.send_later(file, cut(extent, edges(file)), ranks, holding)
        else:
            for group in work.groups(ranks, across_nodes):
                if len(group) == 1:
                    work.alone[group[0]].setdefault(file, []).append(extent)
                else:
                    for start, stop in cut(extent, edges(file)):
                        work.share(file, start, stop, group)
    work.send()
    return work.parts()


def _spans(needs: Sequence[Need]) -> Iterator[tuple[str, Extent, tuple[int, ...]]]:
    """The needed bytes of each segment, cut where the ranks that need them change, with these ranks."""
    events: dict[str, dict[int, tuple[list[int], list[int]]]] = {}
    for rank, need in enumerate(needs):
        for file, extents in need.extents.items():
            of_file = events.setdefault(file, {})
            for start, stop in extents:
                of_file.setdefault(start, ([], []))[0].append(rank)
                of_file.setdefault(stop, ([], []))[1].append(rank)
    for file in sorted(events):
        for extent, ranks in _spans_of(events[file]):
            yield file, extent, ranks


def _spans_of(events: Mapping[int, tuple[list[int], list[int]]]) -> Iterator[tuple[Extent, tuple[int, ...]]]:
    """events: at each place, the ranks whose needs begin and end there."""
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
        self._numbers = {node: number for number, node in enumerate(self._members)}
        self._window = {
            node: min(needs[rank].window_nbytes for rank in members) for node, members in self._members.items()
        }
        self._fetched, self._received, self._sent = [0] * len(needs), [0] * len(needs), [0] * len(needs)
        self._shared = {node: _Room(nbytes) for node, nbytes in self._window.items()}
        self._sends: list[list[Passed]] = [[] for _ in needs]
        self._receives: list[list[Passed]] = [[] for _ in needs]
        self._batches: dict[str, list[list[Shared]]] = {node: [] for node in self._members}
        self._to_send: list[tuple[int, str, Extent, Sequence[int], Sequence[int]]] = []
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
        rooms = {node: self._shared[node] for node in nodes}
        if any(nbytes > room.limit for room in rooms.values()):  # a single item of a foreign checkpoint, say
            for rank in group:
                self.alone[rank].setdefault(file, []).append((start, stop))
            return
        batch = max(room.first_batch(nbytes) for room in rooms.values())
        fetcher = min((rank for node in nodes for rank in self._members[node]), key=lambda rank: self._fetched[rank])
        by = {node: fetcher if node == self._nodes[fetcher] else self._idlest(node) for node in nodes}
        to = tuple(rank for rank in by.values() if rank != fetcher)
        self._fetched[fetcher] += nbytes
        for rank in to:
            self._received[rank] += nbytes
        self._passes_on = self._passes_on or bool(to)
        for node, room in rooms.items():
            is_fetched = by[node] == fetcher
            origin, sent_to = (None, to) if is_fetched else (fetcher, ())
            self._add(node, batch, Shared(file, start, stop, room.put(batch, nbytes), by[node], origin, sent_to))

    def send_later(self, file: str, pieces: Iterable[Extent], group: Sequence[int], holding: Sequence[int]) -> None:
        """Have these bytes sent by a rank whose node has them, to all nodes of the group; `send` gives them out."""
        turn = self._numbers[self._nodes[group[0]]]
        for piece in pieces:
            self._to_send.append((turn, file, piece, group, holding))

    def send(self) -> None:
        """Give out what is to be sent. Each node begins with another segment, so that not all ask the same node first."""
        files = {file: number for number, file in enumerate(dict.fromkeys(one[1] for one in self._to_send))}
        self._to_send.sort(key=lambda one: ((files[one[1]] - one[0]) % len(files), one[1], one[2]))
        for _, file, (start, stop), group, holding in self._to_send:
            self._send(file, start, stop, group, holding)

    def _send(self, file: str, start: int, stop: int, group: Sequence[int], holding: Sequence[int]) -> None:
        nbytes = stop - start
        by_node: dict[str, list[int]] = {}
        for rank in group:
            by_node.setdefault(self._nodes[rank], []).append(rank)
        for ranks in by_node.values():
            if len(ranks) == 1:
                self._pass(file, start, stop, ranks[0], holding)
        rooms = {node: self._shared[node] for node, ranks in by_node.items() if len(ranks) > 1}
        if not rooms:
            return
        for node, room in rooms.items():
            if nbytes > room.limit:
                raise NoRoom(node, 2 * nbytes)
        batch = max(room.first_batch(nbytes) for room in rooms.values())
        sender = self._sender(holding, nbytes * len(rooms))
        by = {node: self._idlest(node) for node in rooms}
        self._passes_on = True
        self._add(
            self._nodes[sender], batch, Shared(file, start, stop, 0, sender, None, tuple(by.values()), is_held=True)
        )
        for node, rank in by.items():
            self._received[rank] += nbytes
            place = rooms[node].put(batch, nbytes)
            self._add(node, batch, Shared(file, start, stop, place, rank, sender, is_held=True))

    def _pass(self, file: str, start: int, stop: int, rank: int, holding: Sequence[int]) -> None:
        sender = self._sender(holding, stop - start)
        self._sends[sender].append(Passed(rank, file, start, stop))
        self._receives[rank].append(Passed(sender, file, start, stop))

    def _sender(self, holding: Sequence[int], nbytes: int) -> int:
        """Who of those that have it sends so many bytes."""
        sender = min(holding, key=lambda rank: (self._sent[rank], rank))
        self._sent[sender] += nbytes
        return sender

    def _add(self, node: str, batch: int, piece: Shared) -> None:
        batches = self._batches[node]
        batches.extend([] for _ in range(batch + 1 - len(batches)))
        batches[batch].append(piece)

    def parts(self) -> list[Part]:
        """Every rank passes equally many batches, whether something comes to its node in them or not."""
        count, is_passing = max(map(len, self._batches.values())), any(self._sends)
        for batches in self._batches.values():
            batches.extend([] for _ in range(count - len(batches)))
        return [
            Part(
                {file: merged(extents, 1) for file, extents in alone.items()},
                self._batches[node],
                self._shared[node].most,
                self._shared[node].most > 0 and rank == self._members[node][0],
                self._passes_on,
                self._sends[rank],
                self._receives[rank],
                is_passing,
            )
            for rank, (alone, node) in enumerate(zip(self.alone, self._nodes, strict=True))
        ]

    def _idlest(self, node: str) -> int:
        return min(self._members[node], key=lambda rank: self._received[rank])


@dataclass(slots=True)
class _Room:
    """A window that is filled batch by batch. most: what any batch has taken so far."""

    limit: int
    batch: int = 0
    filled: int = 0
    most: int = 0

    def first_batch(self, nbytes: int) -> int:
        """The first batch that so many bytes more fit into; an empty window takes anything."""
        return self.batch if not self.filled or self.filled + nbytes <= self.limit else self.batch + 1

    def put(self, batch: int, nbytes: int) -> int:
        """The place of so many bytes in that batch, which isn't earlier than the last one."""
        if batch > self.batch:
            self.batch, self.filled = batch, 0
        place, self.filled = self.filled, self.filled + nbytes
        self.most = max(self.most, self.filled)
        return place
