"""Connections of one rank to other ranks, each made when the rank first needs it.

Of two ranks, the one with the lower number listens. It puts its address into the store once; the
other one looks the address up and connects. So a rank that talks to its parent and children in a
tree has as many connections, whatever the number of ranks, and the store has one key per rank that
listens.

A connection opens with a greeting, by which both ranks prove that they belong to the job.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from weakref import WeakSet

from dcp_mem.comm.addresses import is_out_of_files, listening_socket
from dcp_mem.comm.greetings import Door, greet
from dcp_mem.comm.timed_store import FIRST_PAUSE, LONGEST_PAUSE, LOOK_SECONDS, TimedStore

_GRACE_SECONDS = 5.0
"""How long an address where nobody answers may be one of before a restart, in the same store."""
_KEEPALIVE = {
    socket.TCP_KEEPIDLE: 60,
    socket.TCP_KEEPINTVL: 15,
    socket.TCP_KEEPCNT: 8,
}
"""A peer's machine that is gone without a word is noticed within three minutes."""


ENDED = "its connection has closed: the process has ended, or has left the call"


class PeerLost(RuntimeError):
    """Another rank is gone, or silent."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(f"rank {rank}: {text}")
        self.rank, self.text = rank, text


class Peers:
    """One rank's connections to other ranks of a set."""

    def __init__(
        self,
        name: str,
        rank: int,
        store: TimedStore,
        have_given_up: Callable[[], bool],
        look: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Describe the connections; none is made yet.

        `name`: the same on all ranks of the set, and of no other connections before.
        `have_given_up`: returns whether a rank has noted that the set is broken. `look`: called
        with the rank that is awaited, about once a second.
        """
        self._name, self._rank, self._store = name, rank, store
        self._have_given_up, self._look = have_given_up, look
        self._sockets: dict[int, socket.socket] = {}
        self._door: Door | None = None
        _all_peers.add(self)

    def connected(self, ranks: Sequence[int], deadline: float) -> list[socket.socket]:
        """Return the connections to these ranks, in this order; make those that there aren't.

        Each of the ranks calls this with this rank among its own.

        `deadline`: until when to wait, in seconds of the monotonic clock. Raises PeerLost,
        RuntimeError.
        """
        missing = [rank for rank in ranks if rank not in self._sockets]
        if missing:
            try:
                self._connect(missing, deadline)
            except OSError as error:
                if is_out_of_files(error):
                    raise RuntimeError(f"connecting to rank {missing[0]}: {error}") from None
                raise
        return [self._sockets[rank] for rank in ranks]

    def look(self) -> None:
        """Look whether a connection has closed, and nothing is left to read of it.

        Raises PeerLost.
        """
        for rank, connection in list(self._sockets.items()):
            try:
                is_there = bool(connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
            except BlockingIOError:
                continue
            except OSError:
                is_there = False
            if not is_there:
                raise PeerLost(rank, ENDED)

    def close(self) -> None:
        """Close all connections; what has been sent still arrives."""
        for connection in self._sockets.values():
            connection.close()
        if self._door is not None:
            self._door.close()
        self._door = None
        self._sockets.clear()

    def _connect(self, ranks: Sequence[int], deadline: float) -> None:
        higher = [rank for rank in ranks if rank > self._rank]
        # Listening first: two ranks that wait for each other's address would wait for ever.
        if higher and self._door is None:
            self._listen()
        for rank in ranks:
            if rank < self._rank:
                self._sockets[rank] = self._dialled(rank, deadline)
        self._accept(higher, deadline)

    def _listen(self) -> None:
        self._door = Door(listening_socket())
        address = json.dumps([*self._door.address, self._door.token.hex()])
        self._store.set(self._key(self._rank), address)

    def _key(self, rank: int) -> str:
        return f"{self._name}/address/{rank}"

    def _dialled(self, rank: int, deadline: float) -> socket.socket:
        address = self._address_of(rank, deadline)
        until = min(deadline, _now() + _GRACE_SECONDS)
        try:
            return self._dial(rank, address, deadline)
        except PeerLost:
            newer = self._newer_address(rank, address, until)
            if newer is None:
                raise
        return self._dial(rank, newer, deadline)

    def _newer_address(self, rank: int, address: bytes, until: float) -> bytes | None:
        """Return another address that the rank puts into the store by then; None for none."""
        while (found := self._store.get(self._key(rank))) == address:
            if _now() >= until:
                return None
            time.sleep(LONGEST_PAUSE / 5)
        return found

    def _dial(self, rank: int, address: bytes, deadline: float) -> socket.socket:
        host, port, token = json.loads(address)
        try:
            connection = socket.create_connection((host, port), max(deadline - _now(), 0.001))
        except OSError as error:
            if is_out_of_files(error):
                raise
            raise PeerLost(rank, f"can't be reached at {host}, port {port}: {error}") from None
        try:
            key, look = bytes.fromhex(token), partial(self._look_at, rank)
            greet(connection, (host, port), key, self._rank, deadline, look)
        except TimeoutError:
            raise PeerLost(rank, "it has not come to this call in time") from None
        except OSError as error:
            where = f"{host}, port {port}"
            raise PeerLost(rank, f"its connection has closed at {where}: {error}") from None
        return tuned(connection)

    def _address_of(self, rank: int, deadline: float) -> bytes:
        """Return what a rank has put into the store; wait for it."""
        # It asks time and again: a call that waits for a key blocks whoever shares the connection.
        key, pause, looked = self._key(rank), FIRST_PAUSE, _now()
        while not self._store.check(key):
            if _now() >= deadline:
                raise PeerLost(rank, "it has not come to this call in time")
            self._look(rank)
            if _now() - looked >= LOOK_SECONDS:
                self._check_that_none_has_given_up()
                looked = _now()
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        return self._store.get(key)

    def _accept(self, ranks: Sequence[int], deadline: float) -> None:
        """Accept connections until all of these ranks have one."""
        looked = _now()
        while missing := [rank for rank in ranks if rank not in self._sockets]:
            left = deadline - _now()
            if left <= 0:
                raise PeerLost(missing[0], "it has not come to this call in time")
            self._look(missing[0])
            assert self._door is not None
            come = self._door.welcome(min(left, LOOK_SECONDS))
            if come is not None and come[0] in missing:
                self._sockets[come[0]] = tuned(come[1])
            elif come is not None:
                come[1].close()
            if _now() - looked >= LOOK_SECONDS:
                self._check_that_none_has_given_up()
                looked = _now()

    def _look_at(self, rank: int) -> None:
        self._look(rank)
        self._check_that_none_has_given_up()

    def _check_that_none_has_given_up(self) -> None:
        if self._have_given_up():
            raise RuntimeError("other ranks have given up meanwhile")


def _now() -> float:
    return time.monotonic()


def tuned(connection: socket.socket) -> socket.socket:
    """Have a connection not block, send small messages at once, and notice a lost machine."""
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    return connection


def drop(views: list[memoryview], nbytes: int) -> None:
    """Take so many bytes, which have moved, from the front of a list of buffers."""
    count = 0
    while nbytes and nbytes >= len(views[count]):
        nbytes -= len(views[count])
        count += 1
    del views[:count]
    if nbytes:
        views[0] = views[0][nbytes:]


_all_peers = WeakSet[Peers]()


def _close_inherited() -> None:
    """Close a forked child's copies: they would keep a dead rank's connections open."""
    for peers in list(_all_peers):
        peers.close()


os.register_at_fork(after_in_child=_close_inherited)
