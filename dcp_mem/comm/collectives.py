"""The calls that a set of ranks makes together: collective calls and channels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import field
from typing import Any, Protocol, TypeVar

from dcp_mem.common.value_class import value_class

T = TypeVar("T")
Share = Callable[[Sequence[T]], Sequence[T]]
"""Makes equal parts of several values the same object, so that they are sent, and kept, once."""

Join = Callable[[Sequence[T]], T]
"""Joins the values of some ranks to one, whatever the order of the ranks."""


class PendingMessage(Protocol):
    """A message that is being sent or received."""

    def wait(self) -> None:
        """Return once the message has been sent, or received.

        Raises:
            RuntimeError: The other rank is gone, or silent for too long.
        """


class Channel(Protocol):
    """One rank's end of a connection between two ranks, for many bytes.

    What every channel promises, over whatever transport:

    - Order: the nth message that is sent fills the nth one that is received. Both ranks name the
      same lengths.
    - Progress: several messages may be pending in both directions. They make progress while both
      ranks wait for any of them. One that is sent may be waited for until the peer receives it, so
      two ranks that send to each other begin to receive before they wait.
    - Errors: a rank that is killed or closes its end fails the other's waits at once, at least
      those for messages that haven't begun to come. A rank that is silent fails them after the
      time-out. A channel that has failed stays so. It disturbs no other call or channel.
    - Memory: a message's memory must stay as it is until the message has been waited for. Once
      `close` has returned, none of it is written to any more.
    - Integrity is not promised: `transfer` sends checksums beside the bytes.

    A forked child must not use its parent's channels; whatever it does, and however it ends, they
    go on.
    """

    def send(self, data: Any) -> PendingMessage:
        """Begin to send the bytes of a buffer; several messages may be pending.

        Args:
            data: A buffer, left alone until the message is sent.
        """

    def receive(self, data: Any) -> PendingMessage:
        """Begin to receive bytes into a buffer; several messages may be pending.

        Args:
            data: A writable buffer of the message's length.
        """

    def registered(self, memory: Any) -> AbstractContextManager[None]:
        """Make memory known to what moves the bytes, for the length of a context.

        Messages of parts of it cost less then. None of them may be pending when the context ends.

        Args:
            memory: A buffer, which stays mapped, and no part of whose file is cut off meanwhile.
        """

    def close(self) -> None:
        """Close this end, and give up pending messages; the other rank's messages fail at once.

        It may be called more than once.
        """


class Ranks(Protocol):
    """A fixed set of ranks. All of them make the same collective calls in the same order.

    Every collective call raises RankFailed where a rank has left, is gone, or stays away for
    longer than the time-out.
    """

    @property
    def rank(self) -> int:
        """This rank's number in the set."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    @property
    def key(self) -> str:
        """A text that tells this set of ranks from others of this process."""

    @property
    def cache(self) -> dict[str, Any]:
        """A cache of facts about the ranks; emptied when the set breaks."""

    @property
    def is_connected(self) -> bool:
        """Whether the ranks have connected to each other."""

    def leave(self, why: str) -> None:
        """Leave the set: the other ranks' next call raises RankFailed with this reason.

        Called by a rank that won't make its next collective call, so that no rank waits for it.

        Args:
            why: The reason, for people.
        """

    def look(self) -> None:
        """Look whether a rank is known to be gone; called about once a second by who waits for one.

        Raises:
            PeerLost: One is.
        """

    def set_nodes(self, nodes: Sequence[str]) -> None:
        """Relay values by way of each node's first rank from now on.

        Args:
            nodes: The node of every rank, by rank.
        """

    def exchange(self, value: T) -> list[T]:
        """Return every rank's value on every rank, by rank.

        Args:
            value: This rank's value.
        """

    def all_reduce(self, value: T, join: Callable[[T, T], T]) -> T:
        """Join all ranks' values to one; return it on every rank.

        Args:
            value: This rank's value.
            join: Joins two values; called in any order.
        """

    def gather(self, value: T, share: Share[T] = ...) -> list[T]:
        """Return every rank's value on rank 0, by rank; return an empty list on the other ranks.

        Args:
            value: This rank's value.
            share: Called with a list of values on their way, to have equal ones as one object.
        """

    def reduce(self, value: T, join: Join[T]) -> T | None:
        """Join all ranks' values on their way; return the result on rank 0, None on other ranks.

        Args:
            value: This rank's value.
            join: Called with values of some ranks, or joined ones; it must not raise.
        """

    def broadcast(self, value: T) -> T:
        """Return rank 0's value on every rank.

        Args:
            value: Rank 0's value; ignored on the other ranks.
        """

    def scatter(self, values: Sequence[T]) -> T:
        """Return on each rank the value that rank 0 has for it.

        Args:
            values: By rank; only rank 0's count.
        """

    def route(self, values: Mapping[int, T]) -> list[tuple[int, T]]:
        """Bring values to any ranks; return (sender, value) of those for this rank, by sender.

        Args:
            values: This rank's values, by receiver; it may be one of them.
        """

    def tell_leaders(self, data: bytes) -> Any:
        """Return rank 0's bytes, as any buffer, on each node's leader; return None elsewhere.

        Args:
            data: Rank 0's bytes; ignored on the other ranks.
        """

    def dedicated(self, purpose: str, seconds: float, variable: str, call: str = "") -> Ranks:
        """Return the same ranks on connections of their own, for a thread that works beside saves.

        All ranks ask in the same order, while none is in a call on the connections that it got
        before. Connections that broke, or that a rank has left, are made again.

        Args:
            purpose: What the connections are for; each purpose has its own.
            seconds: How long a rank waits for another.
            variable: The environment variable that sets this, for the texts of errors.
            call: What they are asked for this time, by a name that all ranks have agreed on: a rank
                that failed before it asked is in step again the next time. "": they are counted.
        """

    def channel(
        self, sender: int, receiver: int, once: str = "", transport: str = "tcp"
    ) -> Channel:
        """Return the channel from one rank to another, connecting it where there is none.

        Both ranks ask for it, in any thread. It is kept for as long as the set is whole.

        Args:
            sender: One of the two ranks; this rank or its peer.
            receiver: The other one.
            once: A name that no channel had before, for a channel that isn't kept.
            transport: What moves the bytes, as in `Settings`; the same on both ranks.

        Raises:
            RuntimeError: The other rank doesn't come.
        """


@value_class(kw_only=True)
class SingleRank:
    """One rank on its own: no process group, `no_dist`, or `use_collectives=False`."""

    rank: int = 0
    size: int = 1
    key: str = ""
    cache: dict[str, Any] = field(default_factory=dict)
    is_connected: bool = True

    def leave(self, why: str) -> None:
        return

    def look(self) -> None:
        return

    def set_nodes(self, nodes: Sequence[str]) -> None:
        return

    def exchange(self, value: T) -> list[T]:
        return [value]

    def all_reduce(self, value: T, join: Callable[[T, T], T]) -> T:
        return value

    def gather(self, value: T, share: Share[T] = list) -> list[T]:
        return [value]

    def reduce(self, value: T, join: Join[T]) -> T | None:
        return value

    def broadcast(self, value: T) -> T:
        return value

    def scatter(self, values: Sequence[T]) -> T:
        return values[0]

    def route(self, values: Mapping[int, T]) -> list[tuple[int, T]]:
        return [(self.rank, value) for value in values.values()]

    def tell_leaders(self, data: bytes) -> Any:
        return data

    def dedicated(self, purpose: str, seconds: float, variable: str, call: str = "") -> Ranks:
        return self

    def channel(
        self, sender: int, receiver: int, once: str = "", transport: str = "tcp"
    ) -> Channel:
        raise RuntimeError(f"rank {self.rank} is alone")
