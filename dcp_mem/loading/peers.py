"""One rank's part in a load of several: it reads, receives and gives pieces of segments.

Each pair of ranks on two nodes has a channel for the length of a load (`comm.transfer`), each pair
on one node a connection made for the load, and each direction a thread. What several ranks of a
node need, one of them reads, or receives, and gives to the others at once. These wait for nothing
else: so no ranks wait for each other in a circle, and a rank keeps a few chunks at a time.

What a neighbour gives, once the taker has dialled and greeted it:

    giver -> taker   per chunk: the number of the piece, and where in it; then the bytes

Both know the pieces between them in the same order; chunks come in any order. Who dies, or stops,
closes its connections: the others learn of it at once.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import field
from functools import partial
from typing import NamedTuple

import numpy as np

from dcp_mem.comm import Ranks
from dcp_mem.comm.agreement import described
from dcp_mem.comm.collectives import Channel
from dcp_mem.comm.greetings import Address, Door, accepted, dialled
from dcp_mem.comm.link import ENDED
from dcp_mem.comm.peers import PeerLost
from dcp_mem.comm.timed_store import NotCome
from dcp_mem.comm.transfer import CHUNK, IncomingChunk, OutgoingChunk, receive, send
from dcp_mem.common import faults
from dcp_mem.common.parallel import daemon, in_parallel
from dcp_mem.common.value_class import value_class
from dcp_mem.config import exchange_timeout
from dcp_mem.format import names
from dcp_mem.format.checksums import checksum
from dcp_mem.loading.fetch import Fetcher, fetch_all, fetch_piece
from dcp_mem.loading.pending import PendingItem, PendingItems
from dcp_mem.loading.sources.memory import MemorySource
from dcp_mem.policy.sharing import LoadShare, Piece

NEAR_CHUNK = 4 << 20
"""Bytes that are given at a time: enough to be worth it, and few enough for the cache."""
_HEADER = struct.Struct("<IQI")
Settle = Callable[[], list[PendingItem]]
"""Has bytes go where they belong; returns the items that are complete then."""
Broken = tuple[int, str]
"""The rank to which a connection broke, and why."""
_AT_ONCE = 8
"""Pieces that the ranks of a node read at once for each other."""
_KEPT = 2
"""Pieces that wait for a rank of another node to take them."""
_MOST_SCRATCH, _LEAST_CHUNK = 64 << 20, 1 << 20
"""Bytes of the chunks that come in turn from all nodes that pass on what they have read."""


@value_class(kw_only=True)
class LoadGroup:
    """The ranks that load a checkpoint together."""

    ranks: Ranks
    memory_root: str
    across_nodes: bool = False  # whether nodes send each other what they have fetched from storage
    is_held: bool = False  # whether some node has each segment in memory; the same on all ranks
    # what this rank's node has of the checkpoint, for itself and others
    memory: MemorySource | None = None
    # for each segment, the ranks whose nodes have it in memory
    holders: Mapping[int, Sequence[int]] = field(default_factory=dict)
    # what moves bytes that one rank alone needs of another node
    transport: str = "tcp"

    def holding(self, file: str) -> Sequence[int]:
        """Return the ranks whose nodes have the segment in memory."""
        return self.holders.get(names.rank_of(file), ())


DoorKey = tuple[Address, bytes]
"""A door's address and token."""


@value_class(kw_only=True)
class Agreed:
    """One rank's share of a load and the others' doors, as the ranks have agreed on them."""

    share: LoadShare
    doors: Mapping[int, DoorKey | None]  # of the ranks of this node; this one's may be None
    nodes: int  # how many there are
    token: str  # of this load alone, the same on all ranks


class PeerTransfer:
    """The transfers of one rank to and from other ranks.

    Errors are kept: which rank's fault they are is known when all threads have ended.
    """

    def __init__(
        self,
        group: LoadGroup,
        agreed: Agreed,
        door: Door | None,
        fetcher: Fetcher,
        pending: PendingItems,
    ) -> None:
        self._group, self._agreed, self._door = group, agreed, door
        self._fetcher, self._pending = fetcher, pending
        self._rank, near = group.ranks.rank, agreed.doors
        to, self._origins = dict[int, list[Piece]](), dict[int, list[Piece]]()
        for piece in agreed.share.pieces:
            for rank in piece.to:
                to.setdefault(rank, []).append(piece)
            if piece.origin is not None:
                self._origins.setdefault(piece.origin, []).append(piece)
        self._far = {rank: pieces for rank, pieces in to.items() if rank not in near}
        # By neighbour: the number of each piece, of those that it gets from this rank.
        self._numbers = {
            rank: {piece[:2]: number for number, piece in enumerate(pieces)}
            for rank, pieces in to.items()
            if rank in near
        }
        # What was read and waits to be sent, by the rank of another node that gets it.
        self._waiting = {rank: deque[_ReadPiece]() for rank in self._far}
        self._channels: list[Channel] = []
        self._takers: dict[int, tuple[socket.socket, threading.Lock]] = {}
        self._changed, self._has_stopped = threading.Condition(), False
        self._own_error: Exception | None = None
        self._broken: list[Broken] = []

    def run(self) -> list[Broken]:
        """Do this rank's share; return when all of it has ended.

        Returns connections that broke: where no rank has failed, that is what went wrong. Raises
        what went wrong on this rank.
        """
        acts: list[tuple[int, Callable[[], None]]] = [
            (rank, partial(self._send, rank, pieces)) for rank, pieces in self._far.items()
        ]
        for rank, pieces in self._origins.items():
            get = self._take if rank in self._agreed.doors else self._receive
            acts.append((rank, partial(get, rank, pieces)))
        if self._numbers:
            acts.append((self._rank, self._welcome))
        threads = list[threading.Thread]()
        try:
            for peer, act in acts:
                threads.append(daemon(partial(self._guarded, peer, act), "dcp_mem-pass"))
            self._guarded(self._rank, self._read)
        except Exception as error:  # a thread can't be started
            self._stop(own=error)
            for left in acts[len(threads) :]:  # their peers learn of it as connections close
                self._guarded(*left)
        except BaseException:
            self._stop()
            raise
        finally:
            for thread in threads:
                thread.join()
            if self._door is not None:
                self._door.close()
            for channel in self._channels:
                channel.close()
            for connection, _ in self._takers.values():
                connection.close()
        if self._own_error is not None:
            raise self._own_error
        return self._broken

    # -- how it ends -------------------------------------------------------------------------------

    def _guarded(self, peer: int, act: Callable[[], object]) -> None:
        try:
            act()
        except _OwnError as error:
            self._stop(own=error.cause)
        except PeerLost as error:
            self._stop(broken=(error.rank, error.text))
        except Exception as error:
            text = str(error) if isinstance(error, (RuntimeError, OSError)) else described(error)
            self._stop(broken=(peer, text.split("\n")[0]))

    def _stop(self, *, own: Exception | None = None, broken: Broken | None = None) -> None:
        """End all that goes on, for the first thing that goes wrong: the rest follows from it."""
        with self._changed:
            if self._has_stopped:
                return
            self._has_stopped, self._own_error = True, own
            self._broken += [broken] if broken is not None else []
            self._changed.notify_all()
            takers = list(self._takers.values())
        for connection, _ in takers:
            with suppress(OSError):  # wakes whoever gives; it may not be connected any more
                connection.shutdown(socket.SHUT_RDWR)

    def _raise_if_stopped(self) -> None:
        if self._has_stopped:
            raise _LoadFailed("the load has failed elsewhere")

    # -- from storage ------------------------------------------------------------------------------

    def _read(self) -> None:
        """Read from storage, first what others wait for; hand that on."""
        pieces = [
            piece
            for piece in self._agreed.share.pieces
            if piece.origin is None and not self._group.holding(piece.file)
        ]
        at_once = max(1, _AT_ONCE // len(self._agreed.doors))
        for read in in_parallel(self._read_one, pieces, at_once=at_once):
            if read is not None:
                for rank in self._far.keys() & set(read.piece.to):
                    self._put(self._waiting[rank], read)
        with _as_own_error():
            fetch_all(self._fetcher, self._pending, self._agreed.share.alone)

    def _read_one(self, piece: Piece) -> _ReadPiece | None:
        """Read a piece, and give it to neighbours; return it where ranks of other nodes get it."""
        self._raise_if_stopped()
        file, (start, stop), *_ = piece
        if self._far.keys().isdisjoint(piece.to):
            give = partial(self._give, piece)
            self._settle(
                lambda: fetch_piece(
                    self._fetcher, self._pending, file, piece.extent, [piece.extent], give
                )
            )
            return None
        data = np.empty(stop - start, np.uint8)  # a planner may change a tensor before it is sent
        with _as_own_error():
            self._fetcher.fetch(file, start, [data.data])
        self._give(piece, start, data.data)
        self._settle(lambda: self._pending.take(file, start, stop, data))
        return _ReadPiece(
            piece, data.data, [checksum(data.data[slice(*cut)]) for cut in self._cut(piece)]
        )

    def _put(self, line: deque[_ReadPiece], read: _ReadPiece) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._has_stopped or len(line) < _KEPT)
            self._raise_if_stopped()
            line.append(read)
            self._changed.notify_all()

    def _next_of(self, line: deque[_ReadPiece]) -> _ReadPiece:
        with self._changed:
            self._changed.wait_for(lambda: self._has_stopped or line)
            self._raise_if_stopped()
            self._changed.notify_all()
            return line.popleft()

    def _cut(self, piece: Piece) -> list[tuple[int, int]]:
        """Return a piece's chunks, counted from its start: the same on both ranks."""
        nbytes, whole = CHUNK, piece.stop - piece.start
        if not self._group.holding(piece.file):  # then as many nodes may send as there are
            nbytes = min(CHUNK, max(_MOST_SCRATCH // self._agreed.nodes, _LEAST_CHUNK))
        return [(low, min(low + nbytes, whole)) for low in range(0, whole, nbytes)]

    # -- between nodes -----------------------------------------------------------------------------

    def _send(self, receiver: int, pieces: Sequence[Piece]) -> None:
        chunks = self._outgoing(receiver, pieces)
        self._on_channel(
            self._rank, receiver, lambda channel: send(channel, chunks, self._raise_if_stopped)
        )

    def _receive(self, sender: int, pieces: Sequence[Piece]) -> None:
        chunks = self._incoming(pieces)
        self._on_channel(
            sender, self._rank, lambda channel: receive(channel, chunks, self._raise_if_stopped)
        )

    def _on_channel(self, sender: int, receiver: int, act: Callable[[Channel], object]) -> None:
        """Use the channel to a peer; close it if that fails, so that the peer doesn't wait."""
        token, transport = self._agreed.token, self._group.transport
        channel = self._group.ranks.channel(sender, receiver, token, transport)
        try:
            act(channel)
        except BaseException:
            channel.close()
            raise
        self._channels.append(channel)

    def _outgoing(self, receiver: int, pieces: Sequence[Piece]) -> Iterator[OutgoingChunk]:
        memory = self._group.memory
        for piece in pieces:
            if self._group.holding(piece.file):
                for low, high in self._cut(piece):
                    with _as_own_error():
                        assert memory is not None
                        start, stop = piece.start + low, piece.start + high
                        data, crc = memory.checked(piece.file, start, stop)
                    yield OutgoingChunk(data, partial(int, crc))
            else:
                read = self._next_of(self._waiting[receiver])
                for (low, high), crc in zip(self._cut(piece), read.crcs, strict=True):
                    yield OutgoingChunk(read.data[low:high], partial(int, crc))

    def _incoming(self, pieces: Sequence[Piece]) -> Iterator[IncomingChunk]:
        """Yield where chunks go: into the tensor that takes them all, else into a buffer."""
        for piece in pieces:
            for low, high in self._cut(piece):
                start, stop = piece.start + low, piece.start + high
                data, settle = self._pending.room_for(piece.file, start, stop)
                accept = partial(self._accept, piece, start, data, settle)
                yield IncomingChunk(data, partial(checksum, data), accept)

    def _accept(self, piece: Piece, start: int, data: memoryview, settle: Settle) -> None:
        self._give(piece, start, data)
        self._settle(settle)

    def _settle(self, settle: Settle) -> None:
        """Have bytes go where they belong, and deliver the items that are complete then."""
        with _as_own_error():
            for item in settle():
                item.deliver()
            faults.point("load.batch")

    # -- on the node -------------------------------------------------------------------------------

    def _welcome(self) -> None:
        """Accept the neighbours that take from this rank."""
        assert self._door is not None
        awaited, deadline = set(self._numbers), time.monotonic() + exchange_timeout()
        while awaited:
            try:
                rank, connection = accepted(self._door, deadline, self._look)
            except NotCome:
                raise PeerLost(min(awaited), "it doesn't come for what it needs") from None
            if rank not in awaited:
                connection.close()
                continue
            awaited.remove(rank)
            connection.settimeout(exchange_timeout())
            with self._changed:
                self._takers[rank] = connection, threading.Lock()
                self._changed.notify_all()

    def _look(self) -> None:
        self._raise_if_stopped()
        self._group.ranks.look()

    def _give(self, piece: Piece, start: int, data: memoryview) -> None:
        """Give neighbours what this rank has got of a piece."""
        for rank in piece.to:
            if rank not in self._numbers:
                continue
            number = self._numbers[rank][piece[:2]]
            with self._changed:
                while not (self._has_stopped or rank in self._takers):
                    self._changed.wait()
                self._raise_if_stopped()
                connection, lock = self._takers[rank]
            for low in range(0, len(data), NEAR_CHUNK):
                some = data[low : low + NEAR_CHUNK]
                try:
                    with lock:  # several threads give
                        connection.sendall(
                            _HEADER.pack(number, start + low - piece.start, len(some))
                        )
                        connection.sendall(some)
                except OSError as error:
                    raise PeerLost(rank, f"its connection has closed: {error}") from None

    def _take(self, origin: int, pieces: Sequence[Piece]) -> None:
        """Take what a neighbour gives."""
        door = self._agreed.doors[origin]
        assert door is not None
        seconds, header = exchange_timeout(), bytearray(_HEADER.size)
        deadline, look = time.monotonic() + seconds, self._group.ranks.look
        left = sum(piece.stop - piece.start for piece in pieces)
        with closing(dialled(*door, deadline, look, self._rank)) as connection:
            connection.settimeout(seconds)
            while left:
                self._raise_if_stopped()
                _fill(connection, memoryview(header))
                number, offset, nbytes = _HEADER.unpack(header)
                file, (start, stop), *_ = pieces[number]
                low, high = start + offset, start + offset + nbytes
                if not start <= low < high <= stop:
                    raise PeerLost(origin, "it speaks otherwise")
                data, settle = self._pending.room_for(file, low, high)
                _fill(connection, data)
                self._settle(settle)
                left -= nbytes


def _fill(connection: socket.socket, data: memoryview) -> None:
    """Fill memory with what comes."""
    while data:
        count = connection.recv_into(data)
        if not count:
            raise ConnectionError(ENDED)
        data = data[count:]


class _ReadPiece(NamedTuple):
    """A piece that was read from storage, and the CRC32C of each chunk that goes to other nodes."""

    piece: Piece
    data: memoryview
    crcs: Sequence[int]


class _LoadFailed(Exception):
    """The load has failed, and nothing more is to be sent or received."""


class _OwnError(Exception):
    """Something that went wrong on this rank, and not with a connection."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


@contextmanager
def _as_own_error() -> Iterator[None]:
    try:
        yield
    except (PeerLost, _LoadFailed):
        raise
    except Exception as error:
        raise _OwnError(error) from error
