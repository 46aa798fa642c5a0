"""Many bytes between two ranks: what connects them, and TCP, which does so everywhere.

`transport=` names TCP, or what another package offers by an entry point (`config`). Where that
doesn't work between two ranks, both of them take TCP.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from functools import cache
from typing import Any, Protocol

from dcp_mem.comm.addresses import listening_socket
from dcp_mem.comm.collectives import Channel
from dcp_mem.comm.greetings import Door, accepted, dialled
from dcp_mem.comm.link import Link
from dcp_mem.comm.timed_store import MeetingPlace
from dcp_mem.common.log import log
from dcp_mem.common.value_class import value_class
from dcp_mem.config import transport_point
from dcp_mem.errors import ConfigError

_LAST_PART = 0.1
"""The part of the time-out in which a wait that fails has been in vain for all of it."""


@value_class(kw_only=True)
class Pair:
    """Two ranks that are to be connected, from the view of one of them."""

    store: MeetingPlace  # of these two ranks, and no others
    is_sender: bool  # whether this rank is the first one of the two
    seconds: float  # how long connecting may take, and then each message may wait
    # called where a wait for the peer has taken that long, in vain
    on_silence: Callable[[], None] = lambda: None

    def note_silence(self, deadline: float) -> None:
        """Tell of a failed wait for the peer, if that took until about the deadline."""
        if time.monotonic() >= deadline - _LAST_PART * self.seconds:
            self.on_silence()


class Transport(Protocol):
    """A way to move many bytes between two ranks; `Channel` says what its channels promise."""

    def __call__(self, pair: Pair, /) -> Channel:
        """Connect; return this rank's end once the peer has connected too.

        After a failure, the same two ranks may connect again, by a fresh name in the store.

        Args:
            pair: The ranks.

        Raises:
            TransportUnusable: The peer is there, but it doesn't work between these two; both ranks
                raise it.
            RuntimeError: The peer doesn't come, or is gone.
        """


class TransportUnusable(RuntimeError):
    """A transport doesn't work between two ranks, and says why, on both of them.

    `is_expected`: whether that is nothing to log.
    """

    def __init__(self, why: str, *, is_expected: bool = False) -> None:
        super().__init__(why)
        self.is_expected = is_expected


@cache
def transport(name: str) -> Transport:
    """Return what a name stands for as `transport=`.

    Raises ConfigError.
    """
    point = transport_point(name)
    try:
        found: Transport = point.load()
    except Exception as error:
        raise ConfigError(
            f"transport={name!r} is {point.value}, which can't be imported: {error}"
        ) from error
    return found


def connected(choice: str, pair: Pair) -> Channel:
    """Connect two ranks by the transport of choice, or by TCP where that doesn't work.

    Raises ConfigError, RuntimeError.
    """
    try:
        return transport(choice)(pair)
    except TransportUnusable as error:
        _say_why(choice, error)
    return transport("tcp")(pair)


def _say_why(choice: str, error: TransportUnusable) -> None:
    """Log why a transport isn't used, once for each kind of reason."""
    kind = str(error).partition(":")[0]
    if error.is_expected or kind in _said:
        return
    _said.add(kind)
    log.warning("transport=%r: copies and loads go over TCP, since %s", choice, error)


_said = set[str]()


def met(pair: Pair, key: str = "address", deadline: float | None = None) -> socket.socket:
    """Return a connection between the two ranks; both of them call this.

    `key`: under which the first one leaves its address, once. `deadline`: until when, in seconds of
    the monotonic clock; None for as long as connecting may take. Raises RuntimeError.
    """
    deadline = time.monotonic() + pair.seconds if deadline is None else deadline
    try:
        if pair.is_sender:
            with closing(Door(listening_socket())) as door:
                pair.store.set(key, json.dumps([*door.address, door.token.hex()]))
                return accepted(door, deadline, pair.store.look)[1]
        host, port, token = json.loads(pair.store.get(key, deadline))
        return dialled((host, port), bytes.fromhex(token), deadline, pair.store.look)
    except Exception:
        pair.note_silence(deadline)
        raise


class TcpChannel(Link):
    """One rank's end of a channel over TCP."""

    def __init__(self, pair: Pair, /) -> None:
        """Connect, and return once the other rank has connected too.

        Raises RuntimeError.
        """
        super().__init__(met(pair), pair.seconds, pair.on_silence)

    def registered(self, memory: Any) -> AbstractContextManager[None]:
        """Do nothing: sockets take any memory."""
        return nullcontext()
