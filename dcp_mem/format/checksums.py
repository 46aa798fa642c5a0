"""CRC32C of items, computed while a segment's bytes pass by in pieces."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

Crcs = npt.NDArray[np.uint32]


class ItemChecksums:
    """CRC32C of each item of a segment, fed with the segment's bytes in order.

    offsets, lengths: the items' extents in bytes, ascending and without overlap.
    """

    def __init__(self, offsets: list[int], lengths: list[int]) -> None:
        self._offsets, self._lengths = offsets, lengths
        self._crcs = [0] * len(offsets)
        self._item = 0
        self._position = 0

    def update(self, piece: memoryview) -> None:
        """Take the next bytes of the segment."""
        start, stop = self._position, self._position + len(piece)
        self._position = stop
        while self._item < len(self._offsets) and self._offsets[self._item] < stop:
            index = self._item
            item_start, item_stop = self._offsets[index], self._offsets[index] + self._lengths[index]
            low, high = max(item_start, start), min(item_stop, stop)
            if low < high:
                self._crcs[index] = crc32c(piece[low - start : high - start], self._crcs[index])
            if item_stop > stop:
                return
            self._item += 1

    def result(self) -> Crcs:
        return np.array(self._crcs, dtype="<u4")


def checksum(data: bytes | memoryview) -> int:
    """CRC32C of data held whole."""
    return int(crc32c(data))
