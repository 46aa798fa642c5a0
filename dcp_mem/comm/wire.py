"""Messages between a rank and its peers, over TCP connections.

A message is its length, in eight bytes, and its bytes.
"""

from __future__ import annotations

import math
import select
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from dcp_mem.comm.peers import ENDED, PeerLost, Peers, drop
from dcp_mem.comm.timed_store import LOOK_SECONDS

LENGTH_NBYTES = 8
"""Bytes in front of a message, which say how long it is."""
MOST_NBYTES = 1 << 32
"""Bytes of a message, at most."""


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
        view = memoryview(data).cast("B")
        length = memoryview(len(view).to_bytes(LENGTH_NBYTES, "little"))
        deadline = self._deadline_for(ranks)
        self._move(
            [
                _Outgoing(rank, connection, [length, view])
                for rank, connection in self._connections(ranks, deadline)
            ],
            deadline,
        )

    def receive(self, ranks: Sequence[int]) -> list[Any]:
        deadline = self._deadline_for(ranks)
        messages = [
            _Incoming(rank, connection) for rank, connection in self._connections(ranks, deadline)
        ]
        self._move(messages, deadline)
        return [message.body for message in messages]

    def _deadline_for(self, ranks: Sequence[int]) -> float:
        is_parent = bool(ranks) and ranks[0] < self._rank
        return self._deadline + (self._margin if is_parent else -self._margin)

    def _connections(
        self, ranks: Sequence[int], deadline: float
    ) -> list[tuple[int, socket.socket]]:
        return list(zip(ranks, self._peers.connected(ranks, deadline), strict=True))

    def _move(self, flows: Sequence[_Flow], deadline: float) -> None:
        waiting: defaultdict[int, list[_Flow]] = defaultdict(list)
        for flow in flows:
            if not flow.advance():
                waiting[flow.connection.fileno()].append(flow)
        poller = select.poll()
        for descriptor, of_one in waiting.items():
            poller.register(descriptor, _events(of_one))
        while waiting:
            seconds = deadline - time.monotonic()
            ready = poller.poll(math.ceil(min(max(seconds, 0.0), LOOK_SECONDS) * 1000))
            if not ready:
                awaited = next(iter(waiting.values()))[0].rank
                if seconds <= 0:
                    raise self._silent(awaited)
                self._look(awaited)
            for descriptor, _ in ready:
                of_one = [flow for flow in waiting[descriptor] if not flow.advance()]
                if of_one:
                    waiting[descriptor] = of_one
                    poller.modify(descriptor, _events(of_one))
                else:
                    del waiting[descriptor]
                    poller.unregister(descriptor)

    def _silent(self, rank: int) -> PeerLost:
        seconds = time.monotonic() - self._began
        return PeerLost(rank, f"it was silent for {seconds:.0f} s")


class _Flow:
    """Bytes that move in one direction of a connection."""

    events = 0

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank, self.connection = rank, connection

    def advance(self) -> bool:
        """Move what can be moved at once; return whether all has been moved."""
        try:
            return self._moved()
        except BlockingIOError:
            return False
        except OSError as error:
            raise self._closed(str(error)) from None

    def _moved(self) -> bool:
        raise NotImplementedError

    def _closed(self, why: str) -> PeerLost:
        return PeerLost(self.rank, f"its connection has closed: {why}")


class _Outgoing(_Flow):
    """Buffers to send, one behind the other."""

    events = select.POLLOUT

    def __init__(self, rank: int, connection: socket.socket, views: Sequence[memoryview]) -> None:
        super().__init__(rank, connection)
        self._views = [view for view in views if len(view)]

    def _moved(self) -> bool:
        while self._views:
            drop(self._views, self.connection.sendmsg(self._views))
        return True


class _Incoming(_Flow):
    """A message to receive."""

    events = select.POLLIN

    def __init__(self, rank: int, connection: socket.socket) -> None:
        super().__init__(rank, connection)
        self.body = bytearray()
        self._length: bytearray | None = bytearray(LENGTH_NBYTES)
        self._views = [memoryview(self._length)]

    def _moved(self) -> bool:
        while self._views:
            nbytes = self.connection.recv_into(self._views[0])
            if not nbytes:
                raise PeerLost(self.rank, ENDED)
            drop(self._views, nbytes)
            if self._length is not None and not self._views:
                self._expect_body(self._length)
        return True

    def _expect_body(self, length: bytearray) -> None:
        nbytes = int.from_bytes(length, "little")
        if nbytes > MOST_NBYTES:
            raise PeerLost(self.rank, f"it speaks otherwise: a message of {nbytes} bytes")
        self.body, self._length = bytearray(nbytes), None
        if self.body:
            self._views.append(memoryview(self.body))


def _events(flows: Sequence[_Flow]) -> int:
    events = 0
    for flow in flows:
        events |= flow.events
    return events
