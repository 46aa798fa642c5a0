"""What waits for a store, with patience of our own.

What TCPStore knows of time-outs is for waiting for keys. Where its host is gone without a word, `check`, `compare_set` and
whoever connects through it wait for as long as TCP does, which is a quarter of an hour and more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


class Prompt:
    """Does one thing at a time, within so many seconds or not at all."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._thread: threading.Thread | None = None

    def do(self, act: Callable[[], T]) -> T:
        """What `act` returns, or raises. Raises RuntimeError where it takes too long, or what was begun earlier still does."""
        if self._thread is not None and self._thread.is_alive():  # whoever asks now only waits behind it
            raise RuntimeError("the store that the ranks met in still doesn't answer")
        answers: list[T] = []
        errors: list[Exception] = []

        def work() -> None:
            try:
                answers.append(act())
            except Exception as error:
                errors.append(error)

        # A daemon, lest it keep the process from ending.
        self._thread = threading.Thread(target=work, name="dcp_mem-ask", daemon=True)
        self._thread.start()
        self._thread.join(self._seconds)
        if errors:
            raise errors[0]
        if not answers:
            raise RuntimeError(f"the store that the ranks met in did not answer within {self._seconds:.0f} s")
        return answers[0]


class PromptStore:
    """Questions to a store. All of them raise RuntimeError where it is gone, or silent for so many seconds."""

    def __init__(self, store: dist.Store, seconds: float) -> None:
        self._store, self._prompt = store, Prompt(seconds)

    def check(self, key: str) -> bool:
        """Whether the key is there."""
        return self._prompt.do(lambda: bool(self._store.check([key])))

    def get(self, key: str) -> bytes:
        return self._prompt.do(lambda: bytes(self._store.get(key)))

    def compare_set(self, key: str, expected: str, wanted: str) -> bytes:
        return self._prompt.do(lambda: bytes(self._store.compare_set(key, expected, wanted)))


def connected(store: dist.Store, rank: int, size: int, seconds: float) -> dist.ProcessGroupGloo:
    """A gloo group of ranks that meet in the store. Raises RuntimeError where they don't within about twice as many seconds."""
    timeout = timedelta(seconds=seconds)
    return Prompt(2 * seconds).do(lambda: dist.ProcessGroupGloo(store, rank, size, timeout))


def connection_of_its_own(store: dist.Store, seconds: float) -> dist.Store:
    """The same store, without its prefixes, for a thread that may have to wait there: who shares a connection waits as well.

    Raises RuntimeError where its host is gone, or silent for so many seconds.
    """
    return Prompt(seconds).do(lambda: _cloned(store))


def _cloned(store: dist.Store) -> dist.Store:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if hasattr(store, "clone"):  # torch 2.7
        cloned: dist.Store = store.clone()
        return cloned
    if isinstance(store, dist.TCPStore):
        return dist.TCPStore(store.host, store.port, is_master=False, wait_for_workers=False)
    # FileStore.path is declared by newer ones only
    return dist.FileStore(getattr(store, "path", ""), -1) if isinstance(store, dist.FileStore) else store
