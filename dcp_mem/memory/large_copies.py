"""Copies of large pieces of memory, in the way that is quicker on this machine.

There are two ways: the C library's `memmove`, and a loop of numpy's, which moves 16 bytes at a
time. For pieces that no cache holds, the loop takes 10 to 20 % less on AMD's EPYC processors; on
others, or beyond some size, it may take more. So the first pieces of a process go alternately in
one way and in the other, and are timed. Once one way is clearly the quicker for pieces of about a
size, all others of that size go in it.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

LEAST_NBYTES = 1 << 20
"""Size of a large piece. For smaller ones, setting up the loop costs more than it saves."""
_TRIES = 16
"""Pieces to copy in each way before the two are compared."""
_CLEAR_GAIN = 0.05
"""Share of its time that a way has to save beside the other, to be chosen."""

Way = Callable[[int, int, int], object]
"""Copies memory: (destination address, source address, bytes)."""

memmove = ctypes.CDLL(None).memmove
"""The C library's, as a `Way`; it runs outside the interpreter lock."""
memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
memmove.restype = None


def by_loop(destination: int, source: int, nbytes: int) -> None:
    """Copy memory by numpy's loop, outside the interpreter lock."""
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
    """Copies large pieces, and finds out how; any thread may call it at any time."""

    def __init__(
        self,
        ways: tuple[Way, Way] = (memmove, by_loop),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._ways, self._clock = ways, clock
        self._chosen: dict[int, Way] = {}
        self._trials: dict[int, _Trial] = {}

    def copy(self, destination: int, source: int, nbytes: int) -> None:
        """Copy a large piece of memory."""
        size = nbytes.bit_length()
        way = self._chosen.get(size)
        if way is not None:
            way(destination, source, nbytes)
            return
        trial = self._trials.setdefault(size, _Trial())
        number = trial.begin()
        start = self._clock()
        self._ways[number](destination, source, nbytes)
        quicker = trial.end(number, (self._clock() - start) / nbytes)
        if quicker is not None:
            self._chosen[size] = self._ways[quicker]


class _Trial:
    """Pieces of about a size that are copied in two ways, to find out which is the quicker."""

    def __init__(self) -> None:
        self._begun = 0
        self._took: tuple[list[float], list[float]] = [], []  # seconds for each byte

    def begin(self) -> int:
        """Return the number of the way to take; others may begin before this one ends."""
        self._begun += 1
        return self._begun % 2

    def end(self, number: int, seconds: float) -> int | None:
        """Note how long a piece took; return the number of the quicker way, if one clearly is."""
        took = self._took  # asked once: another thread may begin anew at any time
        took[number].append(seconds)
        if min(map(len, took)) < _TRIES:
            return None
        self._took = [], []
        return clearly_quicker(*took)


def clearly_quicker(first: Sequence[float], second: Sequence[float]) -> int | None:
    """Return which of two ways to copy takes clearly less: 0, 1, or None for neither.

    Their lower quartiles are compared: any piece may be held up, by another thread of Python or by
    what else the machine does.
    """
    quartiles = [sorted(took)[len(took) // 4] for took in (first, second)]
    if max(quartiles) * (1 - _CLEAR_GAIN) <= min(quartiles):
        return None
    return quartiles.index(min(quartiles))
