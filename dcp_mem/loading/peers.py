"""One rank's part in a load of several: it reads, receives and gives pieces of segments.

Each pair of ranks on two nodes has a channel for the length of a load (`comm.transfer`), each pair
on one node a socket made for the load, and each direction a thread. What several ranks of a node
need, one of them reads, or receives, and gives to the others at once. These wait for nothing else:
so no ranks wait for each other in a circle, and a rank keeps a few chunks at a time.

What a neighbour gives, over Unix sockets:

    taker -> giver   who it is: the load's token, and its rank
    giver -> taker   per chunk: the number of the piece, where in it, how many bytes, and the bytes

Both know the pieces between them in the same order; chunks come in any order. Who dies, or stops,
closes its sockets: the others learn of it at once. Only processes of the same user are heard.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dcp_mem.comm import Ranks
from dcp_mem.comm.agreement import described
from dcp_mem.comm.collectives import Channel
from dcp_mem.comm.peers import PeerLost
from dcp_mem.comm.timed_store import LOOK_SECONDS
from dcp_mem.comm.transfer import CHUNK, IncomingChunk, OutgoingChunk, receive, send
from dcp_mem.common import faults
from dcp_mem.common.parallel import in_parallel
from dcp_mem.common.value_class import value_class
from dcp_mem.config import exchange_timeout
from dcp_mem.errors import RankFailed
from dcp_mem.format.checksums import checksum
from dcp_mem.loading.fetch import Fetcher, fetch_all
from dcp_mem.loading.pending import PendingItems
from dcp_mem.loading.sources.memory import MemorySource
from dcp_mem.policy.sharing import LoadShare, Piece

NEAR_CHUNK = 4 << 20
"""Bytes that are given at a time: enough to be worth it, and few enough for the cache."""
_HEADER = struct.Struct("<IQI")
_RANK = struct.Struct("<I")
_GREETING_SECONDS = 5.0
Scratch = npt.NDArray[np.uint8]
_AT_ONCE = 8
"""Pieces that the ranks of a node read at once for each other."""
_KEPT = 2
"""Pieces that wait for a rank of another node to take them."""
_MOST_SCRATCH, _LEAST_CHUNK = 64 << 20, 1 << 20
"""Bytes of the chunks that come in turn from all nodes that pass on what they have read."""


@value_class(kw_only=True)
class LoadPeers:
    """The ranks that a rank loads with, and what a load has anew."""

    ranks: Ranks
    doors: Mapping[int, str]  # of the ranks of this node
    nodes: int  # how many there are
    token: str
    transport: str  # what moves bytes between nodes
    memory: MemorySource | None  # what this rank's node has of the checkpoint
    is_held: Callable[[str], bool]  # whether some node has a segment in memory


class PeerTransfer:
    """The transfers of one rank to and from other ranks.

    Errors are kept: which rank's fault they are is known when all threads have ended.
    """

    def __init__(
        self,
        peers: LoadPeers,
        door: Door | None,
        share: LoadShare,
        fetcher: Fetcher,
        pending: PendingItems,
    ) -> None:
        self._peers, self._door, self._share = peers, door, share
        self._fetcher, self._pending = fetcher, pending
        self._rank = peers.ranks.rank
        to, self._origins = dict[int, list[Piece]](), dict[int, list[Piece]]()
        for piece in share.pieces:
            for rank in piece.to:
                to.setdefault(rank, []).append(piece)
            if piece.origin is not None:
                self._origins.setdefault(piece.origin, []).append(piece)
        self._far = {rank: pieces for rank, pieces in to.items() if rank not in peers.doors}
        # By neighbour: the number of each piece, of those that it gets from this rank.
        self._numbers = {
            rank: {piece[:2]: number for number, piece in enumerate(pieces)}
            for rank, pieces in to.items()
            if rank in peers.doors
        }
        # What was read and waits to be sent, by the rank of another node that gets it.
        self._waiting = {rank: deque[_ReadPiece]() for rank in self._far}
        self._channels: list[Channel] = []
        self._changed, self._has_stopped = threading.Condition(), False
        self._own_error: Exception | None = None
        self._broken: list[tuple[int, str]] = []

    def run(self) -> None:
        """Do this rank's share; return when all of it has ended."""
        acts: list[tuple[int, Callable[[], None]]] = [
            (rank, partial(self._send, rank, pieces)) for rank, pieces in self._far.items()
        ]
        acts += [
            (
                rank,
                partial(self._take if rank in self._peers.doors else self._receive, rank, pieces),
            )
            for rank, pieces in self._origins.items()
        ]
        if self._numbers:
            acts.append((self._rank, self._welcome))
        threads = list[threading.Thread]()
        try:
            for number, (peer, act) in enumerate(acts):
                thread = threading.Thread(
                    target=self._guarded, args=(peer, act), name="dcp_mem-pass", daemon=True
                )
                try:
                    thread.start()
                except Exception as error:
                    self._stop(own=error)
                    for left in acts[number:]:  # their peers learn of it as connections close
                        self._guarded(*left)
                    return
                threads.append(thread)
            self._guarded(self._rank, self._read)
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

    def raise_own(self) -> None:
        """Raise what went wrong on this rank."""
        if self._own_error is not None:
            raise self._own_error

    def raise_broken(self) -> None:
        """Raise for connections that broke, though no rank has failed.

        Raises RankFailed.
        """
        if self._broken:
            raise RankFailed("sharing what several ranks load", self._broken)

    # -- how it ends -------------------------------------------------------------------------------

    def _guarded(self, peer: int, act: Callable[[], object]) -> None:
        try:
            act()
        except _OwnError as error:
            self._stop(own=error.cause)
        except PeerLost as error:
            self._stop(broken=(error.rank, error.text))
        except Exception as error:
            self._stop(broken=(peer, described(error).split("\n")[0]))

    def _stop(self, *, own: Exception | None = None, broken: tuple[int, str] | None = None) -> None:
        """End all that goes on, for the first thing that goes wrong: the rest follows from it."""
        with self._changed:
            if self._has_stopped:
                return
            self._has_stopped, self._own_error = True, own
            self._broken += [broken] if broken is not None else []
            self._changed.notify_all()
        if self._door is not None:
            self._door.close()

    def _raise_if_stopped(self) -> None:
        if self._has_stopped:
            raise _LoadFailed("the load has failed elsewhere")

    # -- from storage ------------------------------------------------------------------------------

    def _read(self) -> None:
        """Read from storage, first what others wait for; hand that on."""
        pieces = [
            piece
            for piece in self._share.pieces
            if piece.origin is None and not self._peers.is_held(piece.file)
        ]
        at_once = max(1, _AT_ONCE // len(self._peers.doors))
        for read in in_parallel(self._read_one, pieces, at_once=at_once):
            for rank in read.piece.to:
                if rank in self._far:
                    self._put(self._waiting[rank], read)
        with _as_own_error():
            fetch_all(self._fetcher, self._pending, self._share.alone)

    def _read_one(self, piece: Piece) -> _ReadPiece:
        self._raise_if_stopped()
        scratch = np.empty(piece.stop - piece.start, np.uint8)
        with _as_own_error():
            self._fetcher.fetch(piece.file, piece.start, [scratch.data])
        self._give(piece, piece.start, scratch.data)
        with _as_own_error():
            self._pending.take(piece.file, piece.start, piece.stop, scratch.ctypes.data)
            faults.point("load.batch")
        is_sent = any(rank in self._far for rank in piece.to)
        cuts = self._cut(piece) if is_sent else ()
        return _ReadPiece(
            piece, scratch.data, [checksum(scratch.data[slice(*one)]) for one in cuts]
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
        if not self._peers.is_held(piece.file):  # then as many nodes may send as there are
            nbytes = min(CHUNK, max(_MOST_SCRATCH // self._peers.nodes, _LEAST_CHUNK))
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
        peers = self._peers
        channel = peers.ranks.channel(sender, receiver, peers.token, peers.transport)
        try:
            act(channel)
        except BaseException:
            channel.close()
            raise
        self._channels.append(channel)

    def _outgoing(self, receiver: int, pieces: Sequence[Piece]) -> Iterator[OutgoingChunk]:
        memory = self._peers.memory
        for piece in pieces:
            if self._peers.is_held(piece.file):
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
        """Yield where chunks go: into the tensor that takes them all, else into scratch memory."""
        free: list[Scratch] = []
        for piece in pieces:
            for low, high in self._cut(piece):
                start, stop = piece.start + low, piece.start + high
                data = None if piece.to else self._pending.place_for(piece.file, start, stop)
                if data is not None:
                    accept = partial(self._mark_received, piece.file, start, stop)
                else:
                    scratch = free.pop() if free else np.empty(CHUNK, np.uint8)
                    data = scratch.data[: stop - start]
                    accept = partial(self._accept, piece, start, data, scratch, free)
                yield IncomingChunk(data, partial(checksum, data), accept)
                faults.point("load.batch")

    def _mark_received(self, file: str, start: int, stop: int) -> None:
        with _as_own_error():
            self._pending.mark_received(file, start, stop)

    def _accept(
        self, piece: Piece, start: int, data: memoryview, scratch: Scratch, free: list[Scratch]
    ) -> None:
        self._give(piece, start, data)
        with _as_own_error():
            self._pending.take(piece.file, start, start + len(data), scratch.ctypes.data)
        free.append(scratch)

    # -- on the node -------------------------------------------------------------------------------

    def _welcome(self) -> None:
        assert self._door is not None
        token, neighbours = self._peers.token.encode(), self._numbers.keys()
        self._door.welcome(token, neighbours, exchange_timeout(), self._peers.ranks.look)

    def _give(self, piece: Piece, start: int, data: memoryview) -> None:
        """Give neighbours what this rank has got of a piece."""
        for rank in piece.to:
            if rank in self._numbers:
                assert self._door is not None
                number = self._numbers[rank][piece[:2]]
                self._door.give(rank, number, start - piece.start, data)

    def _take(self, origin: int, pieces: Sequence[Piece]) -> None:
        """Take what a neighbour gives."""
        token = self._peers.token.encode()
        giver = Giver(origin, self._peers.doors[origin], token, self._rank, exchange_timeout())
        left, scratch = sum(piece.stop - piece.start for piece in pieces), bytearray()
        with closing(giver):
            while left:
                self._raise_if_stopped()
                number, offset, nbytes = giver.header()
                file, (start, stop), *_ = pieces[number]
                low, high = start + offset, start + offset + nbytes
                if not start <= low < high <= stop:
                    raise PeerLost(origin, "it speaks otherwise")
                data = self._pending.place_for(file, low, high)
                is_direct = data is not None
                if data is None:
                    scratch = scratch if len(scratch) >= nbytes else bytearray(nbytes)
                    data = memoryview(scratch)[:nbytes]
                giver.receive(data)
                with _as_own_error():
                    if is_direct:
                        self._pending.mark_received(file, low, high)
                    else:
                        address = np.frombuffer(data, np.uint8).ctypes.data
                        self._pending.take(file, low, high, address)
                left -= nbytes


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
    except Exception as error:
        raise _OwnError(error) from error


# -- neighbours ------------------------------------------------------------------------------------


def network_namespace() -> int:
    """Return the number of what a node's sockets are in: containers may share tmpfs alone."""
    return os.stat("/proc/self/ns/net").st_ino


class Door:
    """Where other ranks of the node connect to this one, to take what it gives them."""

    def __init__(self) -> None:
        # Without a file: nothing is left after a kill.
        self.name = f"dcp_mem-{uuid.uuid4().hex}"
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.bind(f"\0{self.name}")
            self._socket.listen(socket.SOMAXCONN)
        except BaseException:
            self._socket.close()
            raise
        self._takers: dict[int, _Taker] = {}
        self._changed = threading.Condition()
        self._is_closed = False

    def welcome(
        self, token: bytes, ranks: Collection[int], seconds: float, look: Callable[[], None]
    ) -> None:
        """Accept connections until all of these ranks have come.

        `seconds`: how long to wait for one, and then for it to take more. `look`: called about once
        a second meanwhile; raises where waiting is in vain. Raises OSError.
        """
        awaited, deadline = set(ranks), time.monotonic() + seconds
        self._socket.settimeout(LOOK_SECONDS)
        while awaited:
            try:
                connection, _ = self._socket.accept()
            except TimeoutError:
                look()
                if time.monotonic() >= deadline:
                    raise
                continue
            rank = _welcomed(connection, token)
            if rank is None or rank not in awaited:
                connection.close()
                continue
            awaited.remove(rank)
            connection.settimeout(seconds)
            with self._changed:
                self._takers[rank] = _Taker(rank, connection)
                self._changed.notify_all()
                if self._is_closed:
                    connection.close()

    def give(self, rank: int, number: int, offset: int, data: memoryview) -> None:
        """Give a rank bytes of a piece; wait for the rank to come.

        `number`: of the piece, of those that it gets from this rank. Raises PeerLost.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or rank in self._takers)
            if self._is_closed:
                raise PeerLost(rank, "this rank has left the load")
        for start in range(0, len(data), NEAR_CHUNK):
            self._takers[rank].give(number, offset + start, data[start : start + NEAR_CHUNK])

    def close(self) -> None:
        """Close all connections, in whatever threads they are waited for."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            takers = [taker.connection for taker in self._takers.values()]
        for one in (self._socket, *takers):
            _shut(one)
            one.close()


class _Taker:
    """A rank that takes what this one gives; several threads may give."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self._rank, self.connection, self._lock = rank, connection, threading.Lock()

    def give(self, number: int, offset: int, data: memoryview) -> None:
        try:
            with self._lock:
                self.connection.sendall(_HEADER.pack(number, offset, len(data)))
                self.connection.sendall(data)
        except OSError as error:
            raise PeerLost(self._rank, f"its connection has closed: {error}") from None


class Giver:
    """A rank of this node, from which this one takes."""

    def __init__(self, rank: int, name: str, token: bytes, own_rank: int, seconds: float) -> None:
        """Connect. Raises PeerLost.

        `seconds`: how long the giver may be silent.
        """
        self._rank = rank
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.settimeout(seconds)
            self._socket.connect(f"\0{name}")
            if not _is_own_user(self._socket):
                raise OSError("another user's process is at its place")
            self._socket.sendall(token + _RANK.pack(own_rank))
        except OSError as error:
            self.close()
            raise self._lost(error) from None

    def header(self) -> tuple[int, int, int]:
        """Return the number of the piece that comes next, where in it, and how many bytes."""
        found = bytearray(_HEADER.size)
        self.receive(memoryview(found))
        number, offset, nbytes = _HEADER.unpack(found)
        return number, offset, nbytes

    def receive(self, data: memoryview) -> None:
        """Fill this memory. Raises PeerLost."""
        try:
            _fill(self._socket, data)
        except OSError as error:
            raise self._lost(error) from None

    def close(self) -> None:
        _shut(self._socket)
        self._socket.close()

    def _lost(self, error: OSError) -> PeerLost:
        return PeerLost(self._rank, f"its connection has closed: {error}")


def _shut(connection: socket.socket) -> None:
    """Wake whoever waits for a socket."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # it isn't connected any more
        return


def _welcomed(connection: socket.socket, token: bytes) -> int | None:
    """Return the rank that has come; None for a stranger."""
    greeting = bytearray(len(token) + _RANK.size)
    try:
        connection.settimeout(_GREETING_SECONDS)
        if not _is_own_user(connection):
            return None
        _fill(connection, memoryview(greeting))
    except OSError:
        return None
    (rank,) = _RANK.unpack(greeting[len(token) :])
    return int(rank) if greeting.startswith(token) else None


def _is_own_user(connection: socket.socket) -> bool:
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return bool(struct.unpack("iII", found)[1] == os.geteuid())


def _fill(connection: socket.socket, data: memoryview) -> None:
    at = 0
    while at < len(data):
        count = connection.recv_into(data[at:])
        if not count:
            raise ConnectionError("the process has ended, or has left the load")
        at += count
