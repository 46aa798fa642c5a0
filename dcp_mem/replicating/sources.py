"""What a rank sends: files in its node's memory, and their checksums."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import numpy as np

from dcp_mem.errors import DcpMemError
from dcp_mem.format.checksums import BlockChecksums, Crcs, blocks_of, checksum
from dcp_mem.format.manifest import ItemTable
from dcp_mem.memory.locks import end_lease, open_leased
from dcp_mem.memory.slots import Slot
from dcp_mem.memory.views import lent
from dcp_mem.policy.pieces import Extent
from dcp_mem.replicating.exchange import Outgoing

Read = Callable[[int, int], memoryview]


class Source:
    """A file that is sent, in whole or in part. Its checksums are computed once, however many it is sent to.

    table: its items; None for what is no segment, or isn't sent as a whole.
    """

    def __init__(self, nbytes: int, read: Read, table: ItemTable | None = None) -> None:
        self.nbytes, self.read, self._table = nbytes, read, table
        self._checksums = None if table is None else BlockChecksums(blocks_of(table.offsets, table.lengths))
        self._claimed: set[Extent] = set()
        self._rest: list[Extent] = []  # claimed at once, as nobody had taken it yet
        self._left = nbytes
        self._all_summed = threading.Condition()

    def pieces(self, start: int, stop: int, nbytes: int) -> Iterator[Outgoing]:
        """Bytes [start, stop) in pieces of `nbytes` each."""
        for low in range(start, stop, nbytes):
            data = self.read(low, min(low + nbytes, stop))
            yield Outgoing(data, partial(self._sum_up, low, data))

    def _sum_up(self, start: int, data: memoryview) -> int:
        """CRC32C of a piece; those of the items in it are taken unless another thread has done so, or is doing it."""
        stop = start + len(data)
        with self._all_summed:
            claimed = (start, stop) in self._claimed or any(low <= start and stop <= high for low, high in self._rest)
            self._claimed.add((start, stop))
        if claimed or self._checksums is None:
            return checksum(data)
        return self._take(start, data)

    def _take(self, start: int, data: memoryview) -> int:
        assert self._checksums is not None
        crc = self._checksums.add(start, data)
        with self._all_summed:
            self._left -= len(data)
            self._all_summed.notify_all()
        return crc

    @property
    def is_summed(self) -> bool:
        """Whether the checksums of all items have been taken."""
        return self._checksums is not None and not self._left

    def table(self) -> ItemTable:
        """The segment's items with their checksums; takes those that nobody has taken yet."""
        assert self._table is not None
        assert self._checksums is not None
        with self._all_summed:
            gaps = _gaps([*self._claimed, *self._rest], self.nbytes)
            self._rest += gaps
        for start, stop in gaps:
            self._take(start, self.read(start, stop))
        with self._all_summed:
            self._all_summed.wait_for(lambda: not self._left)
            return replace(self._table, crc32c=self._checksums.result())

    def hold_against(self, known: Crcs) -> None:
        """Raise DcpMemError unless the segment has these checksums."""
        wrong = int(np.count_nonzero(self.table().crc32c != known))
        if wrong:
            raise DcpMemError(f"{wrong} of {len(known)} blocks of the copy here are damaged")


def _gaps(claimed: list[Extent], nbytes: int) -> list[Extent]:
    """What of a file no claim covers."""
    gaps, reached = [], 0
    for start, stop in sorted(claimed):
        if start > reached:
            gaps.append((reached, start))
        reached = max(reached, stop)
    return [*gaps, (reached, nbytes)] if reached < nbytes else gaps


def of_slot(slot: Slot, nbytes: int, table: ItemTable) -> Source:
    """A segment in the slot that it was staged into. Only byte items that have grown since lie behind the slot's mapping."""
    assert slot.mapping is not None
    mapped, mapped_nbytes = memoryview(slot.mapping.buffer).cast("B"), slot.mapping.nbytes
    descriptor = slot.descriptor

    def read(start: int, stop: int) -> memoryview:
        if stop <= mapped_nbytes:
            return mapped[start:stop]
        rest = bytearray(stop - start)
        os.preadv(descriptor, [rest], start)
        return memoryview(rest)

    return Source(nbytes, read, table)


def of_file(path: str, nbytes: int, table: ItemTable | None, resources: ExitStack) -> Source:
    """A file of a checkpoint that lies here, held until the resources are given back. Raises OSError."""
    descriptor = open_leased(path)
    resources.callback(os.close, descriptor)
    resources.callback(end_lease, descriptor)
    mapped = lent(descriptor, 0, nbytes) if nbytes else memoryview(b"")
    return Source(nbytes, lambda start, stop: mapped[start:stop], table)
