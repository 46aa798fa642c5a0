"""Calls to a store that end in time.

TCPStore's own time-outs are for waiting for keys. Where its host is gone without a word, `check`,
`compare_set` and connecting through it wait for as long as TCP does, a quarter of an hour or more.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

import torch.distributed as dist

from dcp_mem.common.parallel import KeptThreads

T = TypeVar("T")
FIRST_PAUSE, LONGEST_PAUSE = 0.001, 0.5
"""Seconds between two looks for a key that isn't there yet; each is twice the one before."""
LOOK_SECONDS = 1.0
"""How often a rank that waits for another one looks whether that is in vain."""


class NotCome(RuntimeError):
    """The peer has not come in time."""

    def __init__(self, why: str = "it has not come to this call in time") -> None:
        super().__init__(why)


class TimedCalls:
    """Makes one call at a time, for all threads, and gives up on it after some seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._turn = threading.Lock()
        self._thread = KeptThreads(1, "dcp_mem-ask")
        self._hanging: Future[None] | None = None
        self._home = 0  # the process that waits for it; a forked child has no such thread

    def do(self, act: Callable[[], T], seconds: float | None = None) -> T:
        """Return what `act` returns, or raise what it raises.

        `act`: called in a thread, which is left behind where it takes too long. `seconds`: the most
        that this call may take; None: as any call. Raises RuntimeError.
        """
        with self._turn:
            # A call behind one that hangs would only hang as well.
            if self._hanging is not None and self._home == os.getpid():
                if not self._hanging.done():
                    raise RuntimeError("the store that the ranks met in still doesn't answer")
                self._hanging = None
            return self._done(act, self._seconds if seconds is None else seconds)

    def _done(self, act: Callable[[], T], limit: float) -> T:
        answers: list[T] = []
        asked = self._thread.submit(lambda: answers.append(act()))
        if not wait([asked], limit).done:
            self._hanging, self._home = asked, os.getpid()
            raise RuntimeError(
                f"the store that the ranks met in did not answer within {limit:.0f} s"
            )
        try:
            asked.result()
        finally:
            del asked  # an error's traceback has this frame
        return answers[0]


class BorrowedStore:
    """A default group's store, for as long as the group is there.

    Rank 0's process may serve the store. A reference that outlived the group would keep the server
    alive, and torch gives the next groups under the same port a server that the process still has:
    with the addresses of the ranks as they were before.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store = weakref.ref(store)

    def __call__(self) -> dist.Store:
        """Return the store.

        Raises RuntimeError.
        """
        if (store := self._store()) is None:
            raise RuntimeError("the process group that the ranks met in has been destroyed")
        return store


class TimedStore:
    """A store whose calls raise RuntimeError where it is gone, or silent for some seconds.

    No call waits for a key, so any number of threads may share a connection.

    `store`: a connection on which nobody waits for keys, or one that is borrowed.
    """

    def __init__(self, store: dist.Store | BorrowedStore, seconds: float) -> None:
        self._borrowed: Callable[[], dist.Store] = (
            store if isinstance(store, BorrowedStore) else lambda: store
        )
        self._calls = TimedCalls(seconds)
        self.seconds = seconds

    @property
    def _store(self) -> dist.Store:
        return self._borrowed()

    def check(self, key: str, seconds: float | None = None) -> bool:
        """Return whether the store has the key.

        `seconds`: the most that this call may take; None: as any call.
        """
        return self._calls.do(lambda: bool(self._store.check([key])), seconds)

    def get(self, key: str, seconds: float | None = None) -> bytes:
        """Return the value of a key that is there.

        `seconds`: the most that this call may take; None: as any call.
        """
        return self._calls.do(lambda: bytes(self._store.get(key)), seconds)

    def set(self, key: str, value: str, seconds: float | None = None) -> None:
        """Set a key's value.

        `seconds`: the most that this call may take; None: as any call.
        """
        self._calls.do(lambda: self._store.set(key, value), seconds)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; return what it is then."""
        return self._calls.do(lambda: int(self._store.add(key, amount)))

    def compare_set(
        self, key: str, expected: str, wanted: str, seconds: float | None = None
    ) -> bytes:
        """Set a key to `wanted` if it has the expected value; return what it has then.

        `expected`: the value to replace; "" where the key isn't there yet. `seconds`: the most that
        this call may take; None: as any call.
        """
        return self._calls.do(
            lambda: bytes(self._store.compare_set(key, expected, wanted)), seconds
        )

    def awaited(self, key: str, deadline: float, look: Callable[[], None]) -> bytes:
        """Return a key's value; wait for it, until this second of the monotonic clock.

        It asks time and again: who waits for a key blocks whoever shares the connection. `look`:
        called about once a second meanwhile; raises where waiting is in vain. Raises NotCome,
        RuntimeError.
        """
        pause, looked = FIRST_PAUSE, time.monotonic()
        while not self.check(key):
            now = time.monotonic()
            if now >= deadline:
                raise NotCome
            if now - looked >= LOOK_SECONDS:
                look()
                looked = now
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        return self.get(key)


class MeetingPlace:
    """Where two ranks leave each other what they need to connect, in the store of the job.

    Torch looks up the name of each new connection's address, on both ends; where the network has no
    answer to that, it takes seconds. So what connects for a moment shares a connection.
    """

    def __init__(
        self, store: TimedStore, prefix: str, look: Callable[[], None] = lambda: None
    ) -> None:
        """Describe it.

        `look`: called about once a second while a rank waits; raises where that is in vain.
        """
        self._store, self._prefix, self.look = store, prefix, look

    def set(self, key: str, value: str) -> None:
        """Set a key's value."""
        self._store.set(self._prefix + key, value)

    def get(self, key: str, deadline: float) -> bytes:
        """Return a key's value; wait for it, until this second of the monotonic clock.

        Raises NotCome, RuntimeError.
        """
        return self._store.awaited(self._prefix + key, deadline, self.look)


def own_connection(store: dist.Store, seconds: float) -> dist.Store:
    """Return another connection to the same store, without its prefixes.

    Who shares a connection with somebody that waits for a key in the store, waits as well.

    Raises RuntimeError.
    """
    return TimedCalls(seconds).do(lambda: _cloned(store))


def _cloned(store: dist.Store) -> dist.Store:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if hasattr(store, "clone"):  # torch 2.7
        cloned: dist.Store = store.clone()
        return cloned
    if isinstance(store, dist.TCPStore):
        return dist.TCPStore(store.host, store.port, is_master=False, wait_for_workers=False)
    # FileStore.path is declared by newer ones only
    return (
        dist.FileStore(getattr(store, "path", ""), -1)
        if isinstance(store, dist.FileStore)
        else store
    )
