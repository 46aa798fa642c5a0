"""CRC32C of a segment's blocks, computed while its bytes pass by in parts.

Items are cut into blocks so that a reader who needs little of a large one can check what he reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from fastcrc.crc32 import iscsi

Crcs = npt.NDArray[np.uint32]
Extents = npt.NDArray[np.int64]
BLOCK = 1 << 20
_POLYNOMIAL = 0x82F63B78


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """What has a checksum of its own: items, cut every BLOCK bytes, in their order; an empty item is one empty block.

    first: of each item, the number of its first block, and at the end how many blocks there are.
    """

    offsets: Extents
    lengths: Extents
    first: Extents


def blocks_of(offsets: Extents, lengths: Extents) -> Blocks:
    """The blocks of items that lie at these places of a segment."""
    counts = np.maximum(-(-lengths // BLOCK), 1)
    first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    number = np.arange(first[-1]) - np.repeat(first[:-1], counts)
    starts = np.repeat(offsets, counts) + number * BLOCK
    stops = np.minimum(starts + BLOCK, np.repeat(offsets + lengths, counts))
    return Blocks(starts, stops - starts, first)


class BlockChecksums:
    """CRC32C of each block of a segment, fed with the segment's parts in any order and from several threads."""

    def __init__(self, blocks: Blocks) -> None:
        self._offsets, self._lengths, self._ends = blocks.offsets, blocks.lengths, blocks.offsets + blocks.lengths
        self._crcs = np.zeros(len(blocks.offsets), dtype="<u4")
        self._pieces: dict[int, dict[int, tuple[int, int]]] = {}

    def add(self, start: int, data: memoryview) -> int:
        """Take the segment's bytes from `start` on; returns their own CRC32C."""
        stop, whole, done = start + len(data), 0, start
        first, end = np.searchsorted(self._ends, start, "right"), np.searchsorted(self._offsets, stop, "left")
        for block in range(int(first), int(end)):
            low, high = max(int(self._offsets[block]), start), min(int(self._ends[block]), stop)
            if low == high:
                continue
            crc = checksum(data[low - start : high - start])
            if high - low == self._lengths[block]:
                self._crcs[block] = crc
            else:
                self._pieces.setdefault(block, {})[low] = crc, high - low
            if high - low == BLOCK:  # joining costs less than reading it again, for a length that occurs often
                whole = _moved_on(checksum(data[done - start : low - start], whole), BLOCK) ^ crc
            else:  # now, while the processor's cache has it
                whole = checksum(data[done - start : high - start], whole)
            done = high
        return checksum(data[done - start :], whole)

    def result(self) -> Crcs:
        """What was asked for, once all parts were given."""
        for block, pieces in self._pieces.items():
            joined = 0
            for _, (crc, nbytes) in sorted(pieces.items()):
                joined = combined(joined, crc, nbytes)
            self._crcs[block] = joined
        return self._crcs


def checksum(data: bytes | memoryview, before: int = 0) -> int:
    """CRC32C of data held whole, or of what has the checksum `before` and data behind it."""
    return iscsi(data, before)  # the name by which catalogues of checksums know this one


def combined(first: int, second: int, nbytes: int) -> int:
    """CRC32C of two pieces behind each other, from theirs and the length of the second."""
    return _times(_power_of_x(8 * nbytes), first) ^ second


def _moved_on(crc: int, nbytes: int) -> int:
    """The same as `combined` with zeros behind, by look-up: for one length that is asked for again and again."""
    a, b, c, d = _tables(nbytes)
    return a[crc & 0xFF] ^ b[crc >> 8 & 0xFF] ^ c[crc >> 16 & 0xFF] ^ d[crc >> 24]


@lru_cache(maxsize=4)
def _tables(nbytes: int) -> tuple[list[int], ...]:
    """What becomes of each byte of a CRC32C by zeros behind."""
    power = _power_of_x(8 * nbytes)
    return tuple([_times(power, byte << shift) for byte in range(256)] for shift in (0, 8, 16, 24))


def _times(a: int, b: int) -> int:
    """Product of two polynomials over GF(2) modulo CRC32C's, bits reflected as in a CRC."""
    product = 0
    while a:
        if a & 1 << 31:
            product ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


@lru_cache(maxsize=64)
def _power_of_x(exponent: int) -> int:
    result, square = 1 << 31, 1 << 30  # x to the 0, x to the 1
    while exponent:
        if exponent & 1:
            result = _times(square, result)
        square = _times(square, square)
        exponent >>= 1
    return result
