"""What a set of ranks can do together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
Message = tuple[int, memoryview]
"""The rank that it goes to or comes from, and where its bytes lie or shall lie."""
Share = Callable[[Sequence[T]], Sequence[T]]
"""Makes equal parts of several values the same object, so that they are sent, and kept, once."""


class Passing(Protocol):
    """A message on its way."""

    def wait(self) -> None:
        """Return once it has left, or has come. Raises RuntimeError where the other end is gone, or silent for too long."""


class Line(Protocol):
    """One rank's end of a connection with another, for bulk; what becomes of it is no concern of anybody else.

    Messages arrive in their order, and both ends name the same lengths. data: memory, which stays as it is meanwhile.
    """

    def send(self, data: Any) -> Passing:
        """Begin to send these bytes; several may be on their way."""

    def receive(self, data: Any) -> Passing:
        """Begin to receive bytes into this memory."""

    def close(self) -> None:
        """Hang up: with the last message that somebody still holds, the other end learns of it, and waits no longer."""


class Ranks(Protocol):
    """A fixed set of ranks; all of them make the same calls in the same order.

    A call raises RankFailed where a rank is gone or stays away for longer than the time-out.
    """

    @property
    def rank(self) -> int:
        """This rank's number in the set."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    @property
    def key(self) -> str:
        """Tells this set of ranks from others that this process is in."""

    @property
    def notes(self) -> dict[str, Any]:
        """What its ranks have found out about each other; kept for as long as the set is."""

    @property
    def is_connected(self) -> bool:
        """Whether the ranks have talked to each other before."""

    def leave(self, why: str) -> None:
        """Part from the others, who are told so by an error in their next call: they must not wait for this rank."""

    def arrange(self, nodes: Sequence[str]) -> None:
        """Let each node's first rank speak for its neighbours from now on. nodes: of every rank, its node."""

    def exchange(self, value: T) -> list[T]:
        """Every rank gets every rank's value, by rank."""

    def all_reduce(self, value: T, join: Callable[[T, T], T]) -> T:
        """Every rank gets all ranks' values, joined to one. join: of any two values, in any order."""

    def gather(self, value: T, share: Share[T] = ...) -> list[T]:
        """Rank 0 gets every rank's value, by rank; the others get an empty list."""

    def broadcast(self, value: T) -> T:
        """Every rank gets rank 0's value."""

    def scatter(self, values: Sequence[T]) -> T:
        """Every rank gets the one of rank 0's values that is meant for it."""

    def tell_leaders(self, data: bytes) -> Any:
        """Each node's leader gets rank 0's bytes, or something with the same buffer; None on the other ranks."""

    def swap(self, outgoing: Sequence[Message], incoming: Sequence[Message]) -> None:
        """Send and receive bytes straight from and into memory.

        Between any two ranks, both name what passes in the same order, and with the same lengths.
        """

    def apart(self, purpose: str, seconds: float, variable: str) -> Ranks:
        """The same ranks on connections of their own, where a thread may be busy with something else than saves.

        All ranks ask in the same order, while none is in a call on what they got before; a set that broke, or that a rank has
        left, is made anew. seconds: how long a rank waits for another, by that variable.
        """

    def line(self, sender: int, receiver: int, once: str = "") -> Line:
        """A line from one rank to another, kept for as long as the set is whole; both ask for it, in a thread of any kind.

        once: a name that no line had before, for one that isn't kept. Raises RuntimeError where the other one doesn't come.
        """


@dataclass(frozen=True, slots=True)
class Alone:
    """One rank on its own: no process group, `no_dist`, or `use_collectives=False`."""

    rank: int = 0
    size: int = 1
    key: str = ""
    notes: dict[str, Any] = field(default_factory=dict)
    is_connected: bool = True

    def leave(self, why: str) -> None:
        return

    def arrange(self, nodes: Sequence[str]) -> None:
        return

    def exchange(self, value: T) -> list[T]:
        return [value]

    def all_reduce(self, value: T, join: Callable[[T, T], T]) -> T:
        return value

    def gather(self, value: T, share: Share[T] = list) -> list[T]:
        return [value]

    def broadcast(self, value: T) -> T:
        return value

    def scatter(self, values: Sequence[T]) -> T:
        return values[0]

    def tell_leaders(self, data: bytes) -> Any:
        return data

    def swap(self, outgoing: Sequence[Message], incoming: Sequence[Message]) -> None:
        return

    def apart(self, purpose: str, seconds: float, variable: str) -> Ranks:
        return self

    def line(self, sender: int, receiver: int, once: str = "") -> Line:
        raise RuntimeError(f"rank {self.rank} is alone")
