"""A store that is asked with patience of our own.

What TCPStore knows of time-outs is for waiting for keys. Where its host is gone without a word, `check` and `compare_set` wait
for as long as TCP does, which is a quarter of an hour and more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


class PromptStore:
    """Questions to a store, answered within so many seconds or not at all."""

    def __init__(self, store: dist.Store, seconds: float) -> None:
        self._store, self._seconds = store, seconds
        self._asking: threading.Thread | None = None

    def check(self, key: str) -> bool:
        """Whether the key is there. Raises RuntimeError, as all of these do, where the store is gone or silent."""
        return self._answer(lambda store: bool(store.check([key])))

    def get(self, key: str) -> bytes:
        return self._answer(lambda store: bytes(store.get(key)))

    def compare_set(self, key: str, expected: str, wanted: str) -> bytes:
        return self._answer(lambda store: bytes(store.compare_set(key, expected, wanted)))

    def _answer(self, ask: Callable[[dist.Store], T]) -> T:
        if self._asking is not None and self._asking.is_alive():  # whoever asks now only waits behind it
            raise RuntimeError("the store that the ranks met in still doesn't answer")
        answers: list[T] = []
        errors: list[Exception] = []

        def work() -> None:
            try:
                answers.append(ask(self._store))
            except Exception as error:
                errors.append(error)

        # A daemon, lest it keep the process from ending.
        self._asking = threading.Thread(target=work, name="dcp_mem-ask", daemon=True)
        self._asking.start()
        self._asking.join(self._seconds)
        if errors:
            raise errors[0]
        if not answers:
            raise RuntimeError(f"the store that the ranks met in did not answer within {self._seconds:.0f} s")
        return answers[0]
