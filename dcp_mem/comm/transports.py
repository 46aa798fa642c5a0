"""Many bytes between two ranks: what connects them, and gloo, which does so everywhere.

`transport=` names gloo, or what another package offers by an entry point (`config`). Where that
doesn't work between two ranks, both of them take gloo.

A channel over gloo is a gloo group of two ranks. In a larger group, gloo breaks off every
connection as soon as one message has waited for too long; in a group of two only these two notice.
It also has a thread of its own, where a larger group has one for all its messages.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist

from dcp_mem.comm.collectives import Channel
from dcp_mem.comm.timed_store import TimedCalls
from dcp_mem.common.log import log
from dcp_mem.config import transport_point
from dcp_mem.errors import ConfigError

T = TypeVar("T")
_TAG = 0x64638
_LAZY_VARIABLE = "TORCH_GLOO_LAZY_INIT"
_WHOLE = 0.9
"""The part of the time-out from which on a failed wait has taken all of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two ranks that are to be connected, from the view of one of them."""

    store: dist.Store  # where these two ranks meet, and no others
    is_sender: bool  # whether this rank is the first one of the two
    seconds: float  # how long connecting may take, and then each message may wait
    # called where a wait for the peer has taken that long, in vain
    on_silence: Callable[[], None] = lambda: None


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
    """Connect two ranks by the transport of choice, or by gloo where that doesn't work.

    Raises ConfigError, RuntimeError.
    """
    try:
        return transport(choice)(pair)
    except TransportUnusable as error:
        _say_why(choice, error)
    return GlooChannel(pair)


def _say_why(choice: str, error: TransportUnusable) -> None:
    """Log why a transport isn't used, once for each kind of reason."""
    kind = str(error).partition(":")[0]
    if error.is_expected or kind in _said:
        return
    _said.add(kind)
    log.warning("transport=%r: copies and loads go over gloo, since %s", choice, error)


_said = set[str]()


# -- gloo ------------------------------------------------------------------------------------------


class GlooChannel:
    """One rank's end of a channel."""

    def __init__(self, pair: Pair, /) -> None:
        """Connect, and return once the other rank has connected too.

        Raises RuntimeError.
        """
        self._peer = 1 if pair.is_sender else 0
        self._patience = _Patience(pair.seconds, pair.on_silence)
        meeting = self._meeting = _Meeting(pair.store)
        timeout = timedelta(seconds=pair.seconds)
        # By itself it takes up to twice as long: for the addresses of the others, and for the
        # others. Any: torch declares no methods for a gloo group that isn't registered.
        self._group: Any = self._patience.spent_on(
            lambda: TimedCalls(pair.seconds).do(
                lambda: dist.ProcessGroupGloo(meeting, 1 - self._peer, 2, timeout)
            )
        )
        if os.environ.get(_LAZY_VARIABLE, "0") == "0":  # else gloo connects by the first message
            meeting.end()
        self._messages = WeakSet[_PendingMessage]()

    def send(self, data: Any) -> _PendingMessage:
        """Begin to send the bytes of a buffer.

        `data`: a buffer, left alone until the message is sent.
        """
        return self._pending(self._open_group().send([_tensor(data)], self._peer, _TAG))

    def receive(self, data: Any) -> _PendingMessage:
        """Begin to receive bytes into a buffer."""
        return self._pending(self._open_group().recv([_tensor(data)], self._peer, _TAG))

    def registered(self, memory: Any) -> AbstractContextManager[None]:
        """Do nothing: sockets take any memory."""
        return nullcontext()

    def close(self) -> None:
        """Close the connection, and drop the messages that are still pending."""
        # Each message keeps the connection open, and an error that is kept keeps the frames of the
        # transfer that failed, which have messages.
        for message in list(self._messages):
            message.drop()
        self._group = None

    def _open_group(self) -> Any:
        if self._group is None:
            raise RuntimeError("the channel is closed")
        return self._group

    def _pending(self, work: Any) -> _PendingMessage:
        message = _PendingMessage(work, self._patience)
        self._messages.add(message)
        return message


def _tensor(data: Any) -> torch.Tensor:
    # frombuffer takes no empty buffer
    return (
        torch.frombuffer(data, dtype=torch.uint8)
        if len(data)
        else torch.empty(0, dtype=torch.uint8)
    )


class _Meeting(dist.Store):
    """A store that a group connects by, and doesn't keep.

    A gloo group keeps its store for as long as it lives, and so a socket of this process and one of
    the process that serves the store: for each end of each channel of the whole job.
    """

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store: dist.Store | None = store

    def set(self, key: str, value: str) -> None:
        self._open().set(key, value)

    def get(self, key: str) -> bytes:
        return bytes(self._open().get(key))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        if timeout is None:
            self._open().wait(list(keys))
        else:
            self._open().wait(list(keys), timeout)

    def end(self) -> None:
        """Let the store go."""
        self._store = None

    def _open(self) -> dist.Store:
        if self._store is None:
            raise RuntimeError("the two ranks have met already")
        return self._store


class _Patience:
    """Tells a peer that was silent from one that is gone: a wait for it took the whole time-out."""

    def __init__(self, seconds: float, on_silence: Callable[[], None]) -> None:
        self._seconds, self._on_silence = seconds, on_silence

    def spent_on(self, wait: Callable[[], T]) -> T:
        """Wait, and raise what that raises."""
        started = time.monotonic()
        try:
            return wait()
        except Exception:
            if time.monotonic() - started >= _WHOLE * self._seconds:
                self._on_silence()
            raise


class _PendingMessage:
    """A message that is being sent or received."""

    def __init__(self, work: Any, patience: _Patience) -> None:
        self._work, self._patience = work, patience

    def wait(self) -> None:
        if self._work is None:
            raise RuntimeError("the channel is closed")
        self._patience.spent_on(self._work.wait)

    def drop(self) -> None:
        """Give the message up."""
        self._work = None
