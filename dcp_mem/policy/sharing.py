"""Decide which rank reads which bytes of a checkpoint, and sends them to which other ranks.

Each node decides for itself what its own ranks need: from that, from which nodes have what in
memory, and from its room for a window: memory that its ranks share, through which bytes pass batch
by batch. It asks ranks of other nodes for what they have; what all nodes have decided for a rank is
joined (`joined_share`). The rules:

1. Bytes that one rank alone needs, and that no node has in memory, this rank reads from storage.
2. Bytes that several ranks of a node need come into the node's window once.
3. Bytes that nodes have in memory don't come from storage: a rank of such a node sends them, once
   to each node that needs them; to a single rank directly, to several through their node's window.
4. Reading, sending and receiving go to the rank that has done least by then.
5. A node without room for a window reads all by itself. Where it needs other nodes' memory, that is
   an error (`NoRoom`).

What nodes fetch from storage together has been decided before (`passing.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from dcp_mem.policy.needs import Edges, Need, spans
from dcp_mem.policy.pieces import PIECE, Extent, cut, least_window, merged, without
from dcp_mem.policy.shares import Batches, LoadShare, PeerPiece, SharedPiece, side_by_side

_MOST_PIECES = 1 << 15
"""Pieces, about, into which all that goes to single ranks is cut."""


class NoRoom(Exception):
    """A node needs bytes of other nodes' memory and has no room for a window.

    `nbytes`: the bytes that the window would take at least.
    """

    def __init__(self, node: str, nbytes: int) -> None:
        super().__init__(node, nbytes)
        self.node, self.nbytes = node, nbytes


def share_out_on_node(
    needs: Mapping[int, Need],
    edges: Edges,
    *,
    holders: Callable[[str], Sequence[int]] = lambda file: (),
    turn: int = 0,
    passed: Sequence[Sequence[SharedPiece]] = (),
) -> dict[int, LoadShare]:
    """Return the shares that follow from what one node's ranks need, for whichever ranks have one.

    The stages:

    1. Place what the node fetches together with others in its window (`place`).
    2. Cut what else is needed where the ranks that need it change.
    3. Give what lies in a node's memory to a rank of it to send (`send_later`); else give what
       several ranks need to one of them (`share`), and the rest to the ranks themselves.
    4. Order what is sent, so that nodes don't all ask the same node first (`send`).

    The ranks that send are chosen by what they send to this node. What other nodes ask of them
    isn't known; `turn` has nodes that need little ask different ranks for it.

    `holders`: returns the ranks whose node has a segment in memory; they don't need it from others.
    Returns shares by rank, to be joined with those that follow from other nodes' needs. Raises
    NoRoom.
    """
    shares = _Shares(needs, turn)
    for number, pieces in enumerate(passed):
        for piece in pieces:
            shares.place(number, piece)
    for file, of_file in spans(_not_passed(needs, passed)):
        holding = holders(file)
        for extent, ranks in of_file:
            if holding:
                shares.send_later(file, extent, ranks, holding)
            elif len(ranks) == 1 or not shares.has_window:
                shares.leave(file, extent, ranks)
            else:
                for part in cut(extent, edges(file)):
                    shares.share(file, part, ranks)
    shares.send(edges)
    return shares.result()


def _not_passed(
    needs: Mapping[int, Need], passed: Sequence[Sequence[SharedPiece]]
) -> Mapping[int, Mapping[str, Sequence[Extent]]]:
    """Return what ranks need beside what comes together with other nodes."""
    coming: dict[str, list[Extent]] = {}
    for pieces in passed:
        for piece in pieces:
            coming.setdefault(piece.file, []).append((piece.start, piece.stop))
    merged_coming = {file: merged(extents, 1) for file, extents in coming.items()}
    return {
        rank: {
            file: without(extents, merged_coming[file]) if file in merged_coming else extents
            for file, extents in need.extents.items()
        }
        for rank, need in needs.items()
    }


@dataclass(frozen=True, slots=True)
class _Sending:
    """Bytes of a segment that a rank which has them sends to others."""

    file: str
    extent: Extent
    group: Sequence[int]
    holding: Sequence[int]

    @property
    def nbytes(self) -> int:
        return self.extent[1] - self.extent[0]


class _Shares:
    """The shares that follow from one node's needs, while they are decided."""

    def __init__(self, needs: Mapping[int, Need], turn: int) -> None:
        self._members = list(needs)
        self._node = next((need.node for need in needs.values()), "")
        self._turn = turn
        self._window = _Window(min((need.window_nbytes for need in needs.values()), default=0))
        self._alone: dict[int, dict[str, list[Extent]]] = {}
        # Bytes that each rank has read from storage, received and sent so far.
        self._fetched = Counter[int]()
        self._received = Counter[int]()
        self._sent = Counter[int]()
        self._sends: dict[int, list[PeerPiece]] = {}
        self._receives: dict[int, list[PeerPiece]] = {}
        # What comes into the node's window, and what each other rank sends there.
        self._coming: Batches = []
        self._going: dict[int, Batches] = {}
        self._to_send: list[_Sending] = []
        self._passes_on = False

    @property
    def has_window(self) -> bool:
        """Whether the node's window has room for more than a piece at a time."""
        return self._window.limit >= least_window()

    def place(self, batch: int, piece: SharedPiece) -> None:
        """Place a piece that this node and others fetch together in the node's window."""
        nbytes = piece.stop - piece.start
        self._passes_on = True
        (self._fetched if piece.origin is None else self._received)[piece.by] += nbytes
        self._bring(piece.file, (piece.start, piece.stop), batch, piece.by, piece.origin, piece.to)

    def leave(self, file: str, extent: Extent, ranks: Sequence[int]) -> None:
        """Have these bytes read from storage by each of the ranks that need them."""
        for rank in ranks:
            self._alone.setdefault(rank, {}).setdefault(file, []).append(extent)

    def share(self, file: str, extent: Extent, ranks: Sequence[int]) -> None:
        """Have one rank read these bytes into the node's window."""
        nbytes = extent[1] - extent[0]
        # A single item of a checkpoint that torch wrote, for instance, can't be cut.
        if nbytes > self._window.limit:
            self.leave(file, extent, ranks)
            return
        fetcher = min(self._members, key=self._fetched.__getitem__)
        self._fetched[fetcher] += nbytes
        self._bring(file, extent, self._window.first_batch(nbytes), fetcher)

    def send_later(
        self, file: str, extent: Extent, group: Sequence[int], holding: Sequence[int]
    ) -> None:
        """Note bytes that a rank whose node has them sends to the group."""
        self._to_send.append(_Sending(file, extent, group, holding))

    def send(self, edges: Edges) -> None:
        """Give out what is to be sent.

        Each node begins with another segment, so that they don't all ask the same node first.
        """
        files = {
            file: number
            for number, file in enumerate(dict.fromkeys(one.file for one in self._to_send))
        }
        self._to_send.sort(
            key=lambda one: ((files[one.file] - self._turn) % len(files), one.file, one.extent)
        )
        alone = sum(one.nbytes for one in self._to_send if len(one.group) == 1)
        for whole in self._to_send:
            # Windows have room for pieces. Single ranks get bytes from several others at once, if
            # there are pieces enough; too many of them would take the leader seconds.
            is_alone = len(whole.group) == 1
            most = max(PIECE, alone // _MOST_PIECES if is_alone else 0)
            for extent in (
                [whole.extent]
                if whole.nbytes <= most
                else cut(whole.extent, edges(whole.file), most)
            ):
                if is_alone:
                    self._send_to_one(whole, extent, whole.group[0])
                else:
                    self._send_to_window(whole, extent)

    def _send_to_window(self, sending: _Sending, extent: Extent) -> None:
        """Have these bytes, which several ranks need, sent to the node's window."""
        nbytes = extent[1] - extent[0]
        if nbytes > self._window.limit:
            raise NoRoom(self._node, 2 * nbytes)
        batch = self._window.first_batch(nbytes)
        sender = self._sender(sending.holding, nbytes)
        by = min(self._members, key=self._received.__getitem__)
        self._received[by] += nbytes
        self._passes_on = True
        _put(
            self._going.setdefault(sender, []),
            batch,
            SharedPiece(
                file=sending.file,
                start=extent[0],
                stop=extent[1],
                place=0,
                by=sender,
                to=(by,),
                is_held=True,
            ),
        )
        self._bring(sending.file, extent, batch, by, sender, is_held=True)

    def _bring(
        self,
        file: str,
        extent: Extent,
        batch: int,
        by: int,
        origin: int | None = None,
        to: tuple[int, ...] = (),
        *,
        is_held: bool = False,
    ) -> None:
        """Have a rank bring these bytes into the node's window."""
        piece = SharedPiece(
            file=file,
            start=extent[0],
            stop=extent[1],
            place=self._window.put(batch, extent[1] - extent[0]),
            by=by,
            origin=origin,
            to=to,
            is_held=is_held,
        )
        _put(self._coming, batch, piece)

    def _send_to_one(self, sending: _Sending, extent: Extent, rank: int) -> None:
        """Have these bytes sent to the only rank of the node that needs them."""
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
            for rank in dict.fromkeys((*self._members, *self._sends, *self._going))
        }

    def _share_of(self, rank: int) -> LoadShare:
        is_member = rank in self._members
        coming = self._coming if is_member else []
        window_nbytes = self._window.most if is_member else 0
        sends, receives = self._sends.get(rank, []), self._receives.get(rank, [])
        return LoadShare(
            alone={file: merged(extents, 1) for file, extents in self._alone.get(rank, {}).items()},
            batches=side_by_side(coming, self._going.get(rank, [])),
            window_nbytes=window_nbytes,
            makes_window=window_nbytes > 0 and rank == self._members[0],
            passes_on=self._passes_on,
            sends=sends,
            receives=receives,
            is_passing=bool(sends or receives),
        )


def _put(batches: Batches, number: int, piece: SharedPiece) -> None:
    batches.extend([] for _ in range(number + 1 - len(batches)))
    batches[number].append(piece)


@dataclass(slots=True)
class _Window:
    """A window that is filled batch by batch."""

    limit: int
    batch: int = 0  # the first batch that may still have room
    filled: list[int] = field(default_factory=list)  # bytes that each batch has taken so far

    @property
    def most(self) -> int:
        """Bytes of the fullest batch."""
        return max(self.filled, default=0)

    def first_batch(self, nbytes: int) -> int:
        """Return the first batch, from the one before on, with room for so many bytes."""
        while self.batch < len(self.filled) and self.filled[self.batch] + nbytes > self.limit:
            self.batch += 1
        return self.batch

    def put(self, batch: int, nbytes: int) -> int:
        """Return the place of so many bytes in a batch."""
        self.filled.extend(0 for _ in range(batch + 1 - len(self.filled)))
        place = self.filled[batch]
        self.filled[batch] += nbytes
        return place
