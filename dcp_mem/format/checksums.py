"""CRC32C of items, computed while a segment's bytes pass by in parts."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

Crcs = npt.NDArray[np.uint32]
Extents = npt.NDArray[np.int64]
_POLYNOMIAL = 0x82F63B78


class ItemChecksums:
    """CRC32C of each item of a segment, fed with the segment's parts in any order and from several threads.

    offsets, lengths: the items' extents in bytes, ascending and without overlap.
    """

    def __init__(self, offsets: Extents, lengths: Extents) -> None:
        self._offsets, self._lengths, self._ends = offsets, lengths, offsets + lengths
        self._crcs = np.zeros(len(offsets), dtype="<u4")
        self._pieces: dict[int, dict[int, tuple[int, int]]] = {}

    def add(self, start: int, data: memoryview) -> int:
        """Take the segment's bytes from `start` on; returns their own CRC32C."""
        stop = start + len(data)
        first, end = np.searchsorted(self._ends, start, "right"), np.searchsorted(self._offsets, stop, "left")
        for item in range(int(first), int(end)):
            low, high = max(int(self._offsets[item]), start), min(int(self._ends[item]), stop)
            crc = checksum(data[low - start : high - start])
            if high - low == self._lengths[item]:
                self._crcs[item] = crc
            else:
                self._pieces.setdefault(item, {})[low] = crc, high - low
            if high - low == len(data) > 0:
                return crc
        return checksum(data)

    def result(self) -> Crcs:
        """What was asked for, once all parts were given."""
        for item, pieces in self._pieces.items():
            joined = 0
            for _, (crc, nbytes) in sorted(pieces.items()):
                joined = combined(joined, crc, nbytes)
            self._crcs[item] = joined
        return self._crcs


def checksum(data: bytes | memoryview) -> int:
    """CRC32C of data held whole."""
    return int(crc32c(data))


def combined(first: int, second: int, nbytes: int) -> int:
    """CRC32C of two pieces behind each other, from theirs and the length of the second."""
    return _times(_power_of_x(8 * nbytes), first) ^ second


def _times(a: int, b: int) -> int:
    """Product of two polynomials over GF(2) modulo CRC32C's, bits reflected as in a CRC."""
    product = 0
    while a:
        if a & 1 << 31:
            product ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


def _power_of_x(exponent: int) -> int:
    result, square = 1 << 31, 1 << 30  # x to the 0, x to the 1
    while exponent:
        if exponent & 1:
            result = _times(square, result)
        square = _times(square, square)
        exponent >>= 1
    return result
