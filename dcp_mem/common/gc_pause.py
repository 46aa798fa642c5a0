"""The process's heap: the cycle collector kept out of the way, and free memory returned."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the cycle collector.

    It would walk a large plan, or metadata, again and again while its objects are made.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def give_back_heap() -> None:
    """Return freed memory to the system.

    Describing a plan of 20,000 tensors takes and frees tens of megabytes.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, others don't
    if trim is not None:
        trim(0)
