"""Connections of one rank to other ranks, each made when the rank first needs it, and the messages
that collectives send over them.

Of two ranks, the one with the lower number listens. It puts its address into the store once; the
other one looks the address up and connects. So a rank that talks to its parent and children in a
tree has as many connections, whatever the number of ranks, and the store has one key per rank that
listens.

A connection opens with a greeting, by which both ranks prove that they belong to the job.
"""

from __future__ import annotations

import json
import math
import os
import select
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakSet

from dcp_mem.comm.addresses import listening_socket
from dcp_mem.comm.greetings import Door, accepted, dialled
from dcp_mem.comm.link import ENDED, Link, Message
from dcp_mem.comm.timed_store import LONGEST_PAUSE, LOOK_SECONDS, NotCome, TimedStore

_GRACE_SECONDS = 5.0
"""How long an address where nobody answers may be one of before a restart, in the same store."""


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
        self._links: dict[int, Link] = {}
        self._door: Door | None = None
        _all_peers.add(self)

    def connected(self, ranks: Sequence[int], deadline: float) -> list[Link]:
        """Return the connections to these ranks, in this order; make those that there aren't.

        Each of the ranks calls this with this rank among its own.

        `deadline`: until when to wait, in seconds of the monotonic clock. Raises PeerLost,
        RuntimeError.
        """
        missing = [rank for rank in ranks if rank not in self._links]
        # Listening first: two ranks that wait for each other's address would wait for ever.
        if self._door is None and any(rank > self._rank for rank in missing):
            self._listen()
        for rank in missing:
            if rank < self._rank:
                self._dial(rank, deadline)
        while awaited := [rank for rank in ranks if rank not in self._links]:
            self._accept(awaited, deadline)
        return [self._links[rank] for rank in ranks]

    def look(self) -> None:
        """Look whether a connection has closed, and nothing is left to read of it.

        Raises PeerLost.
        """
        for rank, link in list(self._links.items()):
            if link.has_ended:
                raise PeerLost(rank, ENDED)

    def close(self) -> None:
        """Close all connections; what has been sent still arrives."""
        for link in self._links.values():
            link.close()
        if self._door is not None:
            self._door.close()
        self._door = None
        self._links.clear()

    def _listen(self) -> None:
        self._door = Door(listening_socket())
        address = json.dumps([*self._door.address, self._door.token.hex()])
        self._store.set(self._key(self._rank), address)

    def _key(self, rank: int) -> str:
        return f"{self._name}/address/{rank}"

    def _dial(self, rank: int, deadline: float) -> None:
        look = partial(self._look_at, rank)
        try:
            address = self._store.awaited(self._key(rank), deadline, look)
            until = min(deadline, time.monotonic() + _GRACE_SECONDS)
            while True:
                host, port, token = json.loads(address)
                key, to = bytes.fromhex(token), (host, port)
                try:
                    link = Link(dialled(to, key, deadline, look, self._rank))
                    break
                except NotCome:
                    newer = self._newer_address(rank, address, until)
                    if newer is None:
                        raise
                    address = newer
        except NotCome as error:
            raise PeerLost(rank, str(error)) from None
        self._links[rank] = link

    def _newer_address(self, rank: int, address: bytes, until: float) -> bytes | None:
        """Return another address that the rank puts into the store by then; None for none."""
        while (found := self._store.get(self._key(rank))) == address:
            if time.monotonic() >= until:
                return None
            time.sleep(LONGEST_PAUSE / 5)
        return found

    def _accept(self, awaited: Sequence[int], deadline: float) -> None:
        """Accept one connection, be it of one of these ranks or not."""
        assert self._door is not None
        look = partial(self._look_at, awaited[0])
        try:
            rank, connection = accepted(self._door, deadline, look)
        except NotCome as error:
            raise PeerLost(awaited[0], str(error)) from None
        if rank in awaited:
            self._links[rank] = Link(connection)
        else:
            connection.close()

    def _look_at(self, rank: int) -> None:
        self._look(rank)
        if self._have_given_up():
            raise RuntimeError("other ranks have given up meanwhile")


class TcpWire:
    """Carries bytes between this rank and its peers; see `relay.Wire`.

    Where a rank is silent, all ranks time out; the first one to do so names the silent rank for
    all. So a rank waits a little less for higher ranks, its children, than for its parent: the
    silent rank's own neighbour is the first.
    """

    def __init__(
        self,
        peers: Peers,
        rank: int,
        deadline: float,
        margin: float = 0.0,
        look: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Describe the wire.

        `deadline`: until when its messages are waited for, in seconds of the monotonic clock.
        `margin`: seconds by which a rank waits less for higher ranks, and longer for lower ones.
        `look`: called with a rank that is awaited, about once a second.
        """
        self._peers, self._rank = peers, rank
        self._deadline, self._margin, self._look = deadline, margin, look
        self._began = time.monotonic()

    def send(self, ranks: Sequence[int], data: Any) -> None:
        self._move(ranks, lambda link: link.send(data))

    def receive(self, ranks: Sequence[int]) -> list[Any]:
        return [message.body for message in self._move(ranks, Link.receive)]

    def _move(self, ranks: Sequence[int], begin: Callable[[Link], Message]) -> list[Message]:
        """Begin a message to, or from, each of the ranks; return them once all have moved."""
        is_parent = bool(ranks) and ranks[0] < self._rank
        deadline = self._deadline + (self._margin if is_parent else -self._margin)
        links = self._peers.connected(ranks, deadline)
        messages = [begin(link) for link in links]
        waiting, poller = dict[int, tuple[int, Link, Message]](), select.poll()
        for rank, link, message in zip(ranks, links, messages, strict=True):
            if not _is_done(rank, link, message):
                waiting[link.fileno()] = rank, link, message
                poller.register(link, link.events)
        while waiting:
            seconds = deadline - time.monotonic()
            ready = poller.poll(math.ceil(min(max(seconds, 0.0), LOOK_SECONDS) * 1000))
            if not ready:
                awaited = next(iter(waiting.values()))[0]
                if seconds <= 0:
                    raise PeerLost(
                        awaited, f"it was silent for {time.monotonic() - self._began:.0f} s"
                    )
                self._look(awaited)
            for descriptor, _ in ready:
                if _is_done(*waiting[descriptor]):
                    del waiting[descriptor]
                    poller.unregister(descriptor)
        return messages


def _is_done(rank: int, link: Link, message: Message) -> bool:
    if message.is_done:
        return True
    try:
        return link.advance(message)
    except RuntimeError as error:
        raise PeerLost(rank, str(error)) from None


_all_peers = WeakSet[Peers]()


def _close_inherited() -> None:
    """Close a forked child's copies: they would keep a dead rank's connections open."""
    for peers in list(_all_peers):
        peers.close()


os.register_at_fork(after_in_child=_close_inherited)
