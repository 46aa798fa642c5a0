"""The process's heap: the cycle collector kept out of the way, and free memory returned."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Pauses:
    """The threads that have paused the collector; the last of them lets it go on."""

    def __init__(self) -> None:
        # Reentrant: a garbage collection or a signal handler may come in between.
        self._guard = threading.RLock()
        self._of_thread: dict[int, int] = {}
        self._was_enabled = False

    def begin(self) -> None:
        with self._guard:
            if not self._of_thread:
                self._was_enabled = gc.isenabled()
                gc.disable()
            here = threading.get_ident()
            self._of_thread[here] = self._of_thread.get(here, 0) + 1

    def end(self) -> None:
        with self._guard:
            here = threading.get_ident()
            self._of_thread[here] -= 1
            if not self._of_thread[here]:
                del self._of_thread[here]
            self._go_on()

    def forget_other_threads(self) -> None:
        """After a fork: only the forking thread lives on."""
        self._guard = threading.RLock()
        here = threading.get_ident()
        had, own = bool(self._of_thread), self._of_thread.get(here, 0)
        self._of_thread = {here: own} if own else {}
        if had:
            self._go_on()

    def _go_on(self) -> None:
        if not self._of_thread and self._was_enabled:
            gc.enable()


_pauses = _Pauses()
os.register_at_fork(after_in_child=_pauses.forget_other_threads)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the cycle collector, for as long as any thread is in such a block.

    It would walk a large plan, or metadata, again and again while its objects are made.
    """
    _pauses.begin()
    try:
        yield
    finally:
        _pauses.end()


def give_back_heap() -> None:
    """Return freed memory to the system.

    Describing a plan of 20,000 tensors takes and frees tens of megabytes.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, others don't
    if trim is not None:
        trim(0)
