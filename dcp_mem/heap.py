"""Memory of this process's own: the cycle collector kept out of the way, the heap given back."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Keep the collector from walking a large plan, or metadata, again and again as their objects are made."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def give_back_heap() -> None:
    """Return to the system what describing a large plan has taken and freed: tens of megabytes at 20,000 tensors."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, others don't
    if trim is not None:
        trim(0)
