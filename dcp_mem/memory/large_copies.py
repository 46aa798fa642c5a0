"""Copies of large pieces of memory, in the way that is quicker on this machine.

There are two ways: the C library's `memmove`, and a loop of numpy's, which moves 16 bytes at a
time. For pieces that no cache holds, the loop takes 10 to 20 % less on AMD's EPYC processors; on
others it may take more. So the first pieces of a process are copied in both ways by turns, and
timed; all others are copied in the quicker way.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dcp_mem.common.log import log

LEAST_NBYTES = 1 << 20
"""Of a large piece. For smaller ones, setting up the loop costs more than it saves."""
_TRIES = 16
"""In each way; half of them may be held up by other work of this machine."""
_LEAST_GAIN = 0.03
"""Of the time: the loop has to save so much."""

Way = Callable[[int, int, int], object]
"""Copies memory: (destination address, source address, bytes)."""

memmove = ctypes.CDLL(None).memmove
"""The C library's, as a `Way`; it runs outside the interpreter lock."""
memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
memmove.restype = None


def by_loop(destination: int, source: int, nbytes: int) -> None:
    """Copy memory by numpy's loop, outside the interpreter lock.

    Args:
        destination: Address of the copy.
        source: Address of the piece, which doesn't overlap the copy.
        nbytes: Length of both.
    """
    np.positive(np.asarray(_Bytes(source, nbytes)), out=np.asarray(_Bytes(destination, nbytes)))


class _Bytes:
    """Memory at an address, for numpy."""

    __slots__ = ("__array_interface__",)

    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "typestr": "|i1",
            "shape": (nbytes,),
            "data": (address, False),
        }


class LargeCopies:
    """Copies large pieces, and finds out how; any thread may call it at any time.

    Args:
        usual: A way to copy.
        other: Another one, which has to be the quicker by `_LEAST_GAIN`.
        clock: Returns seconds.
    """

    def __init__(
        self,
        usual: Way = memmove,
        other: Way = by_loop,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._usual, self._other, self._clock = usual, other, clock
        self._took: tuple[list[float], list[float]] = [], []
        self._chosen: Way | None = None

    def copy(self, destination: int, source: int, nbytes: int) -> None:
        """Copy a large piece of memory.

        Args:
            destination: Address of the copy.
            source: Address of the piece, which doesn't overlap the copy.
            nbytes: Length of both; at least `LEAST_NBYTES`.
        """
        if self._chosen is not None:
            self._chosen(destination, source, nbytes)
            return
        usual, other = self._took
        way, took = (self._usual, usual) if len(usual) <= len(other) else (self._other, other)
        start = self._clock()
        way(destination, source, nbytes)
        took.append((self._clock() - start) / nbytes)
        if min(len(usual), len(other)) >= _TRIES:
            self._chosen = self._other if is_quicker(other, usual) else self._usual
            log.debug("large pieces of memory are copied by %s", self._chosen)


def is_quicker(one: Sequence[float], other: Sequence[float]) -> bool:
    """Return whether one way to copy is clearly quicker than another one.

    Args:
        one: Seconds for each byte, copy by copy.
        other: Those of the other way.
    """
    return statistics.median(one) < (1 - _LEAST_GAIN) * statistics.median(other)
