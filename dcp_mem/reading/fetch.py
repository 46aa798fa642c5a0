"""Pieces of segments, fetched from a source by several threads and checked before anybody gets them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from typing import TypeVar

import numpy as np

from dcp_mem.errors import SegmentCorrupt
from dcp_mem.events import log
from dcp_mem.format import names
from dcp_mem.format.checksums import checksum
from dcp_mem.format.manifest import ItemTable
from dcp_mem.memory.copying import copy_here
from dcp_mem.policy.pieces import Extent, cut, merged
from dcp_mem.reading.arrivals import Arrival, Arrivals
from dcp_mem.reading.payloads import TableIndex
from dcp_mem.sources.base import Source

T = TypeVar("T")
R = TypeVar("R")
_AT_ONCE = 8


class Fetcher:
    """Gets bytes of one checkpoint's segments, from one source. files: that will be asked for, as far as that is known.

    verify: check them, where checksums are known.

    whose: names, for errors, the items that take some of these bytes of a segment.
    """

    def __init__(self, source: Source, checkpoint: str, files: Collection[str], *, verify: bool) -> None:
        self._source, self._checkpoint, self._verify = source, checkpoint, verify
        self.whose: Callable[[str, int, int], str] = lambda file, low, high: ""
        self._tables = {file: _index(table) for file, table in source.tables(files).items()}
        self._edges: dict[str, list[int]] = {}

    def table(self, file: str) -> TableIndex | None:
        """What is known of a segment's items; None where nothing of ours describes it. Raises SegmentCorrupt."""
        if file not in self._tables:
            self._tables[file] = _index(self._source.tables([file])[file])
        return self._tables[file]

    def fetch(self, file: str, start: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers, one behind the other, with a segment's bytes from `start` on.

        Raises SegmentCorrupt where they are damaged twice.
        """
        self._source.read_into(file, start, buffers)
        try:
            self.check(file, start, buffers)
        except SegmentCorrupt as error:
            log.warning("%s; reading it once more, for it may have changed on its way", error)
            self._source.read_into(file, start, buffers)
            self.check(file, start, buffers)

    def checks(self, file: str) -> bool:
        """Whether what is read of a segment is checked: then it has to be read by whole blocks."""
        table = self.table(file)
        return self._verify and table is not None and bool(table.crcs)

    def edges(self, file: str) -> list[int] | None:
        """Where a segment may be cut into pieces that can be checked; None: anywhere."""
        table = self.table(file)
        if table is None or not self.checks(file):
            return None
        if file not in self._edges:
            self._edges[file] = table.blocks.offsets.tolist()
        return self._edges[file]

    def check(self, file: str, start: int, buffers: Sequence[memoryview]) -> None:
        """Raise SegmentCorrupt where these aren't the bytes that were saved; whole blocks are looked at."""
        table = self.table(file)
        if table is None or not self.checks(file):
            return
        blocks, places = table.blocks, list(accumulate(map(len, buffers), initial=start))
        first, last = np.searchsorted(blocks.offsets, [start, places[-1]]).tolist()
        for number in range(first, last):
            low, high = int(blocks.offsets[number]), int(blocks.offsets[number] + blocks.lengths[number])
            found, saved = _crc(buffers, places, low, high), table.crcs[number]
            if found != saved:
                whose = self.whose(file, low, high) or "bytes that nobody here awaits"
                detail = f"{whose}: CRC32C {found:08x} where {saved:08x} was saved, in bytes {low} to {high} of {file}"
                raise SegmentCorrupt(self._checkpoint, names.rank_of(file), self._source.label, detail)


def _index(table: ItemTable | None) -> TableIndex | None:
    return None if table is None else TableIndex(table)


def fetch_all(fetcher: Fetcher, arrivals: Arrivals, extents: Mapping[str, Sequence[Extent]]) -> None:
    """Fetch these bytes for whoever awaits some of them, and hand on what is complete by that."""
    pieces = []
    for file, of_file in extents.items():
        wanted = merged(of_file, 1)
        cuts = [piece for extent in merged(wanted) for piece in cut(extent, fetcher.edges(file))]
        pieces += [(file, piece, _inside(wanted, piece)) for piece in cuts]
    for complete in in_parallel(lambda piece: _fetch_piece(fetcher, arrivals, *piece), pieces):
        for arrival in complete:
            arrival.hand_on()


def _inside(extents: Sequence[Extent], piece: Extent) -> list[Extent]:
    """What a piece has of these ranges; what lies between them is read along, and belongs to others."""
    start, stop = piece
    first = bisect_right(extents, start, key=lambda extent: extent[1])
    last = bisect_left(extents, stop, key=lambda extent: extent[0])
    return [(max(low, start), min(high, stop)) for low, high in extents[first:last]]


def _fetch_piece(
    fetcher: Fetcher, arrivals: Arrivals, file: str, piece: Extent, wanted: Sequence[Extent]
) -> list[Arrival]:
    start, stop = piece
    here = arrivals.within(file, start, stop)
    if len(here) == 1 and here[0].is_straight and list(wanted) == [piece]:
        fetcher.fetch(file, start, here[0].around(start, stop))
    else:
        buffer = np.empty(stop - start, np.uint8)
        fetcher.fetch(file, start, [buffer.data])
        address = buffer.ctypes.data - start
        copy_here([move for low, high in wanted for one in here for move in one.moves(low, high, address + low)])
    return [one for one in here if any(one.note(low, high) for low, high in wanted)]


def in_parallel(act: Callable[[T], R], work: Iterable[T]) -> Iterator[R]:
    """What `act` returns of each, in order, a few ahead of whoever asks. When this ends nothing is under way any more."""
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="dcp_mem-fetch") as pool:
        under_way: deque[Future[R]] = deque()
        try:
            for one in work:
                under_way.append(pool.submit(act, one))
                if len(under_way) >= 2 * _AT_ONCE:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        finally:
            for future in under_way:
                future.cancel()


def _crc(buffers: Sequence[memoryview], places: Sequence[int], low: int, high: int) -> int:
    """CRC32C of bytes [low, high) of what lies in the buffers. places: where each begins, and the last one ends."""
    crc, number = 0, bisect_right(places, low) - 1
    while low < high:
        stop = min(high, places[number + 1])
        crc = checksum(buffers[number][low - places[number] : stop - places[number]], crc)
        low, number = stop, number + 1
    return crc
