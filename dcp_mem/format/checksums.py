"""CRC32C of a segment's blocks, computed while its bytes pass by in pieces.

Items are cut into blocks so that a reader that needs little of a large item can check just that.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Protocol

import numpy as np
import numpy.typing as npt
from fastcrc.crc32 import iscsi
from xxhash import xxh3_128

from dcp_mem.common.value_class import value_class

Crcs = npt.NDArray[np.uint32]
Extents = npt.NDArray[np.int64]
BLOCK = 1 << 20
"""Bytes of a block."""
_LARGE = 128 << 10
"""Blocks of so many bytes are read with a call each."""
MOST_RUN = BLOCK + _LARGE
"""Bytes of the longest run of blocks, with what lies between them."""
_POLYNOMIAL = 0x82F63B78


@value_class(eq=False)
class Blocks:
    """The pieces of a segment that have a checksum each: items, cut every `BLOCK` bytes, in order.

    An empty item is one empty block.
    """

    offsets: Extents  # where each block begins in the segment, in bytes
    lengths: Extents
    first: Extents  # for each item the index of its first block; at the end, the number of blocks

    def between(self, first: int, last: int) -> Blocks:
        """Return the blocks [first, last) alone, each as an item of its own."""
        here = slice(first, last)
        return Blocks(self.offsets[here], self.lengths[here], np.arange(last - first + 1))


def blocks_of(offsets: Extents, lengths: Extents) -> Blocks:
    """Return the blocks of items.

    `offsets`: where each item begins in the segment, in bytes.
    """
    counts = np.maximum(-(-lengths // BLOCK), 1)
    first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    number = np.arange(first[-1]) - np.repeat(first[:-1], counts)
    starts = np.repeat(offsets, counts) + number * BLOCK
    stops = np.minimum(starts + BLOCK, np.repeat(offsets + lengths, counts))
    return Blocks(starts, stops - starts, first)


def block_count(lengths: Extents) -> int:
    """Return how many blocks items have."""
    return int(np.maximum(-(-lengths // BLOCK), 1).sum())


def runs_of(blocks: Blocks, numbers: Extents) -> list[tuple[int, int]]:
    """Return blocks in runs that are read with one call: a large block alone, small ones together.

    `numbers`: of the blocks to read, ascending. Returns first and last number of each run, the last
    one included. No run has more than `MOST_RUN` bytes.
    """
    if not len(numbers):
        return []
    is_large = blocks.lengths[numbers] >= _LARGE
    is_cut = (
        is_large[1:]
        | is_large[:-1]
        | (np.diff(numbers) > 1)
        | (np.diff(blocks.offsets[numbers] // BLOCK) > 0)
    )
    ends = np.flatnonzero(is_cut)
    firsts, lasts = numbers[np.append(0, ends + 1)], numbers[np.append(ends, len(numbers) - 1)]
    return list(zip(firsts.tolist(), lasts.tolist(), strict=True))


HASH, HASH_NBYTES = "xxh3_128", 16
"""Of parts, to tell whether they have changed. 32 bits would be too few to go by."""


class Hasher(Protocol):
    """Hashes bytes that come in pieces."""

    def update(self, data: memoryview, /) -> None:
        """Take the next piece."""

    def digest(self) -> bytes:
        """Return the hash of all pieces, of `HASH_NBYTES` bytes."""


def hasher() -> Hasher:
    """Return a new hasher."""
    return xxh3_128()


class BlockChecksums:
    """Computes CRC32C of each block of a segment.

    The segment's bytes may come in any order and from several threads.

    `known`: the checksum that each block should have; None where that isn't known. `is_wrong`:
    whether a block that came in one piece has another checksum than it should.
    """

    def __init__(self, blocks: Blocks, known: Crcs | None = None) -> None:
        self.is_wrong = False
        self._known = known
        self._offsets, self._lengths, self._ends = (
            blocks.offsets,
            blocks.lengths,
            blocks.offsets + blocks.lengths,
        )
        self._crcs = np.zeros(len(blocks.offsets), dtype="<u4")
        self._pieces: dict[int, dict[int, tuple[int, int]]] = {}

    def add(self, start: int, data: memoryview, hasher: Hasher | None = None) -> int:
        """Take a piece of the segment and return the CRC32C of that piece.

        `hasher`: is given the piece as well, while the processor's cache has it.
        """
        stop, whole, done, hashed = start + len(data), 0, start, start
        first, end = (
            np.searchsorted(self._ends, start, "right"),
            np.searchsorted(self._offsets, stop, "left"),
        )
        for block in range(int(first), int(end)):
            low, high = max(int(self._offsets[block]), start), min(int(self._ends[block]), stop)
            if low == high:
                continue
            crc = checksum(data[low - start : high - start])
            if high - low == self._lengths[block]:
                self._crcs[block] = crc
                if self._known is not None and self._known[block] != crc:
                    self.is_wrong = True
            else:
                self._pieces.setdefault(block, {})[low] = crc, high - low
            # Joining costs less than reading the bytes again, for a length that occurs often.
            if high - low == BLOCK:
                whole = _moved_on(checksum(data[done - start : low - start], whole), BLOCK) ^ crc
            else:  # now, while the processor's cache has the bytes
                whole = checksum(data[done - start : high - start], whole)
            done = high
            if hasher is not None and done - hashed >= BLOCK:
                hasher.update(data[hashed - start : done - start])
                hashed = done
        if hasher is not None:
            hasher.update(data[hashed - start :])
        return checksum(data[done - start :], whole)

    def of(self, first: int, last: int) -> Crcs:
        """Return the CRC32C of the blocks [first, last); each must have been added in one piece."""
        return self._crcs[first:last]

    def result(self) -> Crcs:
        """Return the CRC32C of each block; all bytes must have been added."""
        for block, pieces in self._pieces.items():
            joined = 0
            for _, (crc, nbytes) in sorted(pieces.items()):
                joined = combined(joined, crc, nbytes)
            self._crcs[block] = joined
        return self._crcs


checksum = iscsi
"""Returns the CRC32C of data, which catalogues of checksums list as CRC-32/ISCSI.

A second argument is the CRC32C of what lies before the data, if that is to be covered, too.
"""


def combined(first: int, second: int, nbytes: int) -> int:
    """Return the CRC32C of two adjacent pieces."""
    return _times(_power_of_x(8 * nbytes), first) ^ second


def _moved_on(crc: int, nbytes: int) -> int:
    """Return the CRC32C after `nbytes` zero bytes, by tables: for lengths that occur often."""
    a, b, c, d = _tables(nbytes)
    return a[crc & 0xFF] ^ b[crc >> 8 & 0xFF] ^ c[crc >> 16 & 0xFF] ^ d[crc >> 24]


@lru_cache(maxsize=4)
def _tables(nbytes: int) -> tuple[list[int], ...]:
    """Return, for each of the four bytes of a CRC32C, what appending zeros makes of each value."""
    power = _power_of_x(8 * nbytes)
    return tuple([_times(power, byte << shift) for byte in range(256)] for shift in (0, 8, 16, 24))


def _times(a: int, b: int) -> int:
    """Return the product of two polynomials over GF(2) modulo CRC32C's, with reflected bits."""
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
