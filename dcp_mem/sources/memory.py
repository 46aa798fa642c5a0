"""What this node's memory has of a checkpoint."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from dcp_mem.errors import ManifestInvalid, SegmentCorrupt
from dcp_mem.files import read_bytes
from dcp_mem.format import names
from dcp_mem.format.catalog import Catalog, Extent
from dcp_mem.format.checksums import BlockChecksums, Blocks, Crcs, Extents, blocks_of, checksum
from dcp_mem.format.manifest import ItemTable, Manifest
from dcp_mem.memory.catalogs import read_catalog
from dcp_mem.memory.copying import Move, read, read_many, work_off
from dcp_mem.memory.job import Held, checksums_of
from dcp_mem.memory.locks import end_lease, open_leased
from dcp_mem.memory.views import lent, view_of
from dcp_mem.planning.reads import Straight
from dcp_mem.policy.pieces import cut, merged
from dcp_mem.sources.base import (
    Description,
    StoredDescription,
    checked_catalog,
    described_table,
)
from dcp_mem.values import Segment

_BLOCKS = 64
_LARGE = 1 << 20
"""Bytes of a payload from which on it is worth a call of its own."""


class MemorySource:
    """What this node's memory has of a complete checkpoint, protected by leases from being recycled until it is closed.

    present: ranks whose segments lie here whole. lacking: why those that should lie here don't, by rank.
    Raises SegmentCorrupt where the checkpoint itself isn't here any more.
    """

    label = "memory"

    def __init__(self, held: Held, node: str, damaged: Collection[int] = ()) -> None:
        """damaged: ranks whose segments here have turned out to be of no use."""
        self._held = held
        self._resources = ExitStack()
        self._descriptors: dict[str, int] = {}
        self._catalog: Catalog | None = None
        self._ranks = {segment.file: segment.rank for segment in held.manifest.segments}
        self._checksums: dict[str, tuple[Blocks, Crcs] | None] = {}
        self.lacking: dict[int, str] = {}
        try:
            self._open_all(node, damaged)
        except BaseException:
            self.close()
            raise
        self.present = frozenset(self._ranks[file] for file in self._descriptors)

    def _open_all(self, node: str, damaged: Collection[int]) -> None:
        held = self._held
        self._open(held.manifest_path, 0)
        if Manifest.from_json(self._read_file(held.manifest_path)).save_id != held.manifest.save_id:
            raise self._corrupt(0, "it was replaced by a newer save")
        listed = set(os.listdir(held.directory))
        for segment in held.manifest.segments:
            if segment.rank in damaged:
                self.lacking[segment.rank] = f"segment of rank {segment.rank}: it is damaged"
            elif segment.file in listed:
                self._open_segment(segment)
            elif segment.node == node:
                self.lacking[segment.rank] = (
                    f"segment of rank {segment.rank}: {segment.file}: {os.strerror(errno.ENOENT)}"
                )

    def _open_segment(self, segment: Segment) -> None:
        try:
            descriptor = self._open(self._held.segment_path(segment.file), segment.rank)
        except SegmentCorrupt as error:  # it has just been recycled
            self.lacking[segment.rank] = str(error)
            return
        there = os.fstat(descriptor).st_size
        if there < segment.nbytes:
            self.lacking[segment.rank] = f"segment of rank {segment.rank}: {there} of {segment.nbytes} bytes"
            return
        self._descriptors[segment.file] = descriptor

    def has(self, file: str) -> bool:
        """Whether the segment lies here."""
        return file in self._descriptors

    def verify(self, file: str, extents: Iterable[Extent]) -> None:
        """Hold these bytes of a segment against the checksums that lie beside it, if it was copied to or from here."""
        if self._checksums_of(file) is not None:
            pieces = [piece for extent in merged(extents) for piece in cut(extent, None)]
            work_off(pieces, lambda piece: self.checked(file, *piece))

    def checked(self, file: str, start: int, stop: int) -> tuple[memoryview, int]:
        """Bytes [start, stop) of a segment, mapped, to be sent, and their CRC32C.

        They, and what belongs to the same blocks, are held against the checksums as well.
        """
        known, data = self._checksums_of(file), self._view(file, start, stop)
        if known is None:
            return data, checksum(data)
        blocks = known[0]
        checksums = BlockChecksums(blocks)
        crc = checksums.add(start, data)
        ends = blocks.offsets + blocks.lengths
        first, last = np.searchsorted(ends, start, "right"), np.searchsorted(blocks.offsets, stop, "left")
        for low, high in self._beyond(blocks, int(first), int(last), start, stop):
            checksums.add(low, self._view(file, low, high))
        self._compare(file, slice(first, last), checksums.result()[first:last])
        return data, crc

    def _view(self, file: str, start: int, stop: int) -> memoryview:
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        return lent(self._descriptors[file], first, stop - first)[start - first :]

    def _compare(self, file: str, numbers: slice | Extents, found: Crcs) -> None:
        """Raise SegmentCorrupt unless these blocks of a segment have the checksums that lie beside it."""
        known = self._checksums_of(file)
        assert known is not None
        blocks, crcs = known[0], known[1][numbers]
        for number in np.flatnonzero(found != crcs).tolist():
            low = int(blocks.offsets[numbers][number])
            high = low + int(blocks.lengths[numbers][number])
            sums = f"CRC32C {int(found[number]):08x} where {int(crcs[number]):08x} was copied"
            raise self._corrupt(self._ranks[file], f"{sums}, in bytes {low} to {high} of {file}")

    def _beyond(self, blocks: Blocks, first: int, last: int, start: int, stop: int) -> list[tuple[int, int]]:
        """What blocks [first, last) have before `start`, and behind `stop`."""
        if first >= last:
            return []
        low, high = int(blocks.offsets[first]), int(blocks.offsets[last - 1] + blocks.lengths[last - 1])
        return [one for one in ((low, start), (stop, high)) if one[0] < one[1]]

    def _checksums_of(self, file: str) -> tuple[Blocks, Crcs] | None:
        if file not in self._checksums:
            self._checksums[file] = self._read_checksums(file)
        return self._checksums[file]

    def _read_checksums(self, file: str) -> tuple[Blocks, Crcs] | None:
        try:
            table = checksums_of(self._held, file)
            return blocks_of(table.offsets, table.lengths), table.crc32c
        except FileNotFoundError:
            return None
        except ManifestInvalid as error:
            raise self._corrupt(self._ranks[file], f"its checksums: {error}") from None

    def describe(self) -> Description:
        try:
            return Description(self._read_catalog(), self._held.manifest)
        except ManifestInvalid as error:
            raise self._corrupt(0, str(error)) from None

    def tell(self) -> StoredDescription:
        """The files that describe it, for ranks of other nodes. Raises SegmentCorrupt."""
        key = self._held.manifest.catalog
        path = os.path.join(self._held.directory, names.catalog_file(key))
        try:
            return StoredDescription(self._held.manifest.to_json(), checked_catalog(key, self._read_file(path)))
        except ManifestInvalid as error:
            raise self._corrupt(0, str(error)) from None

    def tables(self, files: Collection[str]) -> dict[str, ItemTable | None]:
        return {file: self._table(file) for file in files}

    def _table(self, file: str) -> ItemTable | None:
        return described_table(self._read_catalog(), file) if file in self._ranks else None

    def read(self, file: str, moves: Sequence[Move]) -> None:
        """Read ranges of a segment (address, offset, bytes) straight into memory."""
        self._read(file, lambda descriptor: read(descriptor, moves))

    def read_into(self, file: str, offset: int, buffers: Sequence[memoryview]) -> None:
        moves = []
        for buffer in filter(None, buffers):
            moves.append((np.frombuffer(buffer, np.uint8).ctypes.data, offset, len(buffer)))
            offset += len(buffer)
        self.read(file, moves)

    def read_many(self, file: str, payloads: Straight, *, verify: bool) -> None:
        """Read payloads, given by ascending offsets, straight into memory.

        verify: hold them against the segment's checksums, as `verify` does; where they are whole blocks, as they have been
        read, which spares a second way through it.
        """
        known = self._checksums_of(file) if verify else None
        covered = None if known is None else _covered(known[0], payloads)
        if known is not None and covered is None:
            self.verify(file, zip(payloads.offset.tolist(), (payloads.offset + payloads.nbytes).tolist(), strict=True))
        self._read_many(file, payloads)
        if covered is not None:
            self._compare(file, covered.numbers, covered.checksums())

    def _read_many(self, file: str, payloads: Straight) -> None:
        address, offset, nbytes = payloads.address, payloads.offset, payloads.nbytes
        if nbytes.sum() > _LARGE * len(nbytes):
            self.read(file, list(zip(address.tolist(), offset.tolist(), nbytes.tolist(), strict=True)))
            return
        self._read(file, lambda descriptor: read_many(descriptor, address, offset, nbytes))

    def _read(self, file: str, act: Callable[[int], None]) -> None:
        if file not in self._descriptors:
            raise self._corrupt(0, f"{file} is not part of it")
        try:
            act(self._descriptors[file])
        except (OSError, EOFError) as error:
            raise self._corrupt(self._ranks[file], str(error)) from None

    def close(self) -> None:
        self._resources.close()

    def _open(self, path: str, rank: int) -> int:
        try:
            descriptor = open_leased(path)
        except OSError as error:
            raise self._corrupt(rank, f"{os.path.basename(path)}: {os.strerror(error.errno or 0)}") from None
        self._resources.callback(os.close, descriptor)
        self._resources.callback(end_lease, descriptor)
        return descriptor

    def _read_catalog(self) -> Catalog:
        if self._catalog is None:
            key = self._held.manifest.catalog
            try:
                self._catalog = read_catalog(self._held.directory, key)
            except OSError as error:
                raise self._corrupt(0, f"{names.catalog_file(key)}: {os.strerror(error.errno or 0)}") from None
            except ManifestInvalid as error:
                raise self._corrupt(0, str(error)) from None
        return self._catalog

    def _read_file(self, path: str) -> bytes:
        try:
            return read_bytes(path)
        except OSError as error:
            raise self._corrupt(0, f"{os.path.basename(path)}: {os.strerror(error.errno or 0)}") from None

    def _corrupt(self, rank: int, detail: str) -> SegmentCorrupt:
        return SegmentCorrupt(self._held.name, rank, self.label, detail)


@dataclass(frozen=True, slots=True, eq=False)
class _Covered:
    """Blocks of a segment that have been read whole. addresses: where to, of each."""

    numbers: Extents
    addresses: Extents
    lengths: Extents

    def checksums(self) -> Crcs:
        found = np.zeros(len(self.numbers), "<u4")
        rows = list(zip(range(len(found)), self.addresses.tolist(), self.lengths.tolist(), strict=True))

        def check(start: int) -> None:
            for number, address, nbytes in rows[start : start + _BLOCKS]:
                found[number] = checksum(view_of(address, nbytes))

        work_off(range(0, len(rows), _BLOCKS), check)
        return found


def _covered(blocks: Blocks, payloads: Straight) -> _Covered | None:
    """The blocks that payloads consist of; None where one of them has part of a block only."""
    is_any = payloads.nbytes > 0
    starts, stops = payloads.offset[is_any], (payloads.offset + payloads.nbytes)[is_any]
    ends = blocks.offsets + blocks.lengths
    first, last = np.searchsorted(blocks.offsets, starts, "left"), np.searchsorted(ends, stops, "right")
    counts = last - first
    if (counts <= 0).any() or (blocks.offsets[first] != starts).any() or (ends[last - 1] != stops).any():
        return None
    numbers = np.arange(counts.sum()) + np.repeat(last - np.cumsum(counts), counts)
    addresses = blocks.offsets[numbers] + np.repeat((payloads.address - payloads.offset)[is_any], counts)
    return _Covered(numbers, addresses, blocks.lengths[numbers])
