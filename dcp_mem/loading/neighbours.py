"""Pieces that a rank gives to other ranks of its node, over Unix sockets made for one load.

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
from collections.abc import Callable, Collection

from dcp_mem.comm.peers import PeerLost
from dcp_mem.comm.timed_store import LOOK_SECONDS

NEAR_CHUNK = 4 << 20
"""Bytes that are given at a time: enough to be worth it, and few enough for the cache."""
_HEADER = struct.Struct("<IQI")
_RANK = struct.Struct("<I")
_GREETING_SECONDS = 5.0


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
