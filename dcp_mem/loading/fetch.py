"""Pieces of segments: fetched from a source by several threads, checked, then given to items."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate

import numpy as np

from dcp_mem.common.log import log
from dcp_mem.common.parallel import in_parallel
from dcp_mem.errors import SegmentCorrupt
from dcp_mem.format import names
from dcp_mem.format.checksums import checksum
from dcp_mem.loading.pending import PendingItem, PendingItems, TableIndex, table_index
from dcp_mem.loading.sources.base import Source
from dcp_mem.policy.pieces import Extent, cut, merged


class Fetcher:
    """Gets bytes of one checkpoint's segments from one source.

    `names_of`: returns the names of the items that take some of the bytes [start, stop) of a file,
    for errors.
    """

    def __init__(
        self, source: Source, checkpoint: str, files: Collection[str], *, verify: bool
    ) -> None:
        """Ask the source for the tables of these segments.

        `source`: where bytes come from. `files`: segments that will be fetched from, as far as that
        is known.
        """
        self._source, self._checkpoint, self._verify = source, checkpoint, verify
        self.names_of: Callable[[str, int, int], str] = lambda file, start, stop: ""
        self._tables = {file: table_index(table) for file, table in source.tables(files).items()}
        self._edges: dict[str, list[int]] = {}

    def table(self, file: str) -> TableIndex | None:
        """Return a segment's table; None for one that torch's own writer made.

        Raises SegmentCorrupt.
        """
        if file not in self._tables:
            self._tables[file] = table_index(self._source.tables([file])[file])
        return self._tables[file]

    def fetch(self, file: str, start: int, buffers: Sequence[memoryview]) -> None:
        """Fill buffers, one after the other, with a segment's bytes; read damaged ones once more.

        Raises SegmentCorrupt.
        """
        self._source.read_into(file, start, buffers)
        try:
            self.check(file, start, buffers)
        except SegmentCorrupt as error:
            log.warning("%s; reading it once more, for it may have changed on its way", error)
            self._source.read_into(file, start, buffers)
            self.check(file, start, buffers)

    def checks(self, file: str) -> bool:
        """Return whether bytes of a segment are checked; then they are read by whole blocks."""
        table = self.table(file)
        return self._verify and table is not None and bool(table.crcs)

    def edges(self, file: str) -> list[int] | None:
        """Return where a segment may be cut into pieces that can be checked; None for anywhere."""
        table = self.table(file)
        if table is None or not self.checks(file):
            return None
        if file not in self._edges:
            self._edges[file] = table.blocks.offsets.tolist()
        return self._edges[file]

    def check(self, file: str, start: int, buffers: Sequence[memoryview]) -> None:
        """Hold whole blocks of bytes that were fetched against the segment's checksums.

        `buffers`: the bytes, one buffer after the other. Raises SegmentCorrupt.
        """
        table = self.table(file)
        if table is None or not self.checks(file):
            return
        blocks, offsets = table.blocks, list(accumulate(map(len, buffers), initial=start))
        first, last = np.searchsorted(blocks.offsets, [start, offsets[-1]]).tolist()
        lows, lengths = blocks.offsets[first:last].tolist(), blocks.lengths[first:last].tolist()
        for low, nbytes, saved in zip(lows, lengths, table.crcs[first:last], strict=True):
            high = low + nbytes
            found = _crc(buffers, offsets, low, high)
            if found != saved:
                sums = f"CRC32C {found:08x} where {saved:08x} was saved"
                raise self._corrupt(file, low, high, sums)

    def _corrupt(self, file: str, low: int, high: int, sums: str) -> SegmentCorrupt:
        items = self.names_of(file, low, high) or "bytes that nobody here awaits"
        detail = f"{items}: {sums}, in bytes {low} to {high} of {file}"
        return SegmentCorrupt(self._checkpoint, names.rank_of(file), self._source.label, detail)


def fetch_all(
    fetcher: Fetcher, pending: PendingItems, extents: Mapping[str, Sequence[Extent]]
) -> None:
    """Fetch these bytes, give them to the items that need them, and deliver complete items.

    `extents`: by file, bytes [start, stop) each; they may overlap. Raises SegmentCorrupt.
    """
    pieces = []
    for file, of_file in extents.items():
        wanted = merged(of_file, 1)
        cuts = [piece for extent in merged(wanted) for piece in cut(extent, fetcher.edges(file))]
        pieces += [(file, piece, _inside(wanted, piece)) for piece in cuts]
    for complete in in_parallel(lambda piece: fetch_piece(fetcher, pending, *piece), pieces):
        for item in complete:
            item.deliver()


def _inside(extents: Sequence[Extent], piece: Extent) -> list[Extent]:
    """Return what a piece has of these ranges. Bytes between them are read along, and dropped."""
    start, stop = piece
    first = bisect_right(extents, start, key=lambda extent: extent[1])
    last = bisect_left(extents, stop, key=lambda extent: extent[0])
    return [(max(low, start), min(high, stop)) for low, high in extents[first:last]]


def fetch_piece(
    fetcher: Fetcher,
    pending: PendingItems,
    file: str,
    piece: Extent,
    wanted: Sequence[Extent],
    pass_on: Callable[[int, memoryview], None] = lambda start, data: None,
) -> list[PendingItem]:
    """Fetch a piece, copy what is wanted of it to its items, and return the complete items.

    A piece that one item alone takes goes straight into its tensor.

    `pass_on`: called with the piece's bytes, part by part, before items are given to the planner.
    """
    start, stop = piece
    place = pending.only_place(file, start, stop) if list(wanted) == [piece] else None
    if place is not None:
        buffers = place.buffers(start, stop)
        fetcher.fetch(file, start, buffers)
        for data in buffers:
            pass_on(start, data)
            start += len(data)
        return pending.received(file, *piece)
    buffer = np.empty(stop - start, np.uint8)
    fetcher.fetch(file, start, [buffer.data])
    pass_on(start, buffer.data)
    return pending.take(file, start, stop, buffer, wanted)


def _crc(buffers: Sequence[memoryview], offsets: Sequence[int], low: int, high: int) -> int:
    """Return the CRC32C of bytes [low, high); `offsets`: each buffer's start, and the last end."""
    crc, number = 0, bisect_right(offsets, low) - 1
    while low < high:
        stop = min(high, offsets[number + 1])
        crc = checksum(buffers[number][low - offsets[number] : stop - offsets[number]], crc)
        low, number = stop, number + 1
    return crc
