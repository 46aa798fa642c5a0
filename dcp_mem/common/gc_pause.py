"""The process's heap: the cycle collector kept out of the way, and free memory returned."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from contextlib import AbstractContextManager


class _Pauses(AbstractContextManager[None]):
    """The threads that have paused the collector; the last of them lets it go on."""

    def __init__(self) -> None:
        # Reentrant: a garbage collection or a signal handler may come in between.
        self._guard = threading.RLock()
        self._of_thread: dict[int, int] = {}
        self._was_enabled = False

    def __enter__(self) -> None:
        with self._guard:
            if not self._of_thread:
                self._was_enabled = gc.isenabled()
                gc.disable()
            here = threading.get_ident()
            self._of_thread[here] = self._of_thread.get(here, 0) + 1

    def __exit__(self, *_: object) -> None:
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


def collector_paused() -> AbstractContextManager[None]:
    """Pause the cycle collector, for as long as any thread is in such a block.

    It would walk a large plan, or metadata, again and again while its objects are made.
    """
    return _pauses


class GrownHeap:
    """Heap that describing a plan has taken and freed: tens of megabytes for 20,000 tensors.

    Any thread may call anything: at worst, memory is given back twice, or at the next save.
    """

    def __init__(self) -> None:
        self._has_grown = False

    def note_growth(self) -> None:
        """Remember that a plan was described."""
        self._has_grown = True

    def trim(self) -> None:
        """Give back what is free by now; more may be free at the next save."""
        if self._has_grown:
            trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, others don't
            if trim is not None:
                trim(0)

    def settle(self) -> None:
        """Give back what is free, once after a plan was described: all of it is by now."""
        self.trim()
        self._has_grown = False
