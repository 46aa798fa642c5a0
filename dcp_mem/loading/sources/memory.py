"""This node's memory as a source of a checkpoint's bytes."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np

from dcp_mem.common.files import read_bytes
from dcp_mem.errors import ManifestInvalid, SegmentCorrupt
from dcp_mem.format import names
from dcp_mem.format.catalog import Catalog, Extent
from dcp_mem.format.checksums import BlockChecksums, Blocks, Crcs, blocks_of, checksum
from dcp_mem.format.manifest import ItemTable, Manifest
from dcp_mem.loading.sources.base import (
    Description,
    DescriptionFiles,
    checked_catalog,
    described_table,
)
from dcp_mem.memory.catalogs import read_catalog
from dcp_mem.memory.checked_reads import CheckedReader
from dcp_mem.memory.checkpoint import LocalCheckpoint, checksums_of
from dcp_mem.memory.copying import moves_of, read, read_many
from dcp_mem.memory.locks import end_lease, open_leased
from dcp_mem.memory.views import fill, lent, view_of
from dcp_mem.planning.reads import DirectRead
from dcp_mem.policy.pieces import cut, merged

_LARGE = 1 << 20
"""Payloads of so many bytes on average are read with a call each."""


class MemorySource:
    """The segments of a complete checkpoint that lie in this node's memory, as a source.

    Leases keep them from being recycled until the source is closed.

    `present`: ranks whose segments lie here whole. `lacking`: by rank, why segments that should lie
    here don't.
    """

    label = "memory"

    def __init__(
        self, checkpoint: LocalCheckpoint, node: str, damaged: Collection[int] = ()
    ) -> None:
        """Open the manifest and all segments that lie here.

        Raises SegmentCorrupt.
        """
        self.checkpoint = checkpoint
        self._resources = ExitStack()
        # A load that DCP gives up before it reads closes nothing.
        weakref.finalize(self, self._resources.close).atexit = False
        self._descriptors: dict[str, int] = {}
        self._catalog: Catalog | None = None
        self._ranks = {segment.file: segment.rank for segment in checkpoint.manifest.segments}
        self._checksums: dict[str, tuple[Blocks, Crcs] | None] = {}
        self._readers: dict[str, CheckedReader] = {}
        self.lacking: dict[int, str] = {}
        try:
            self._open_all(node, damaged)
        except BaseException:
            self.close()
            raise
        self.present = frozenset(self._ranks[file] for file in self._descriptors)

    def _open_all(self, node: str, damaged: Collection[int]) -> None:
        path, manifest = self.checkpoint.manifest_path, self.checkpoint.manifest
        self._open(path, 0)
        if Manifest.from_json(self._read_file(path)).save_id != manifest.save_id:
            raise self._corrupt(0, "it was replaced by a newer save")
        here, self.lacking = self.checkpoint.segments_here(node, damaged)
        for segment in here:
            path = self.checkpoint.segment_path(segment.file)
            try:
                self._descriptors[segment.file] = self._open(path, segment.rank)
            except SegmentCorrupt as error:  # it has just been recycled, or is locked for good
                self.lacking[segment.rank] = str(error)

    @property
    def files(self) -> Collection[str]:
        """The segments that lie here whole, under leases."""
        return self._descriptors.keys()

    def has(self, file: str) -> bool:
        """Return whether the segment lies here whole."""
        return file in self._descriptors

    def checked(self, file: str, start: int, stop: int) -> tuple[memoryview, int]:
        """Return bytes [start, stop) of a segment, mapped, and their CRC32C.

        The whole blocks that they lie in are held against the checksums beside the segment.

        Raises SegmentCorrupt.
        """
        known = self._checksums_of(file)
        if known is None:
            data = self._view(file, start, stop)
            return data, checksum(data)
        blocks, saved = known
        ends = blocks.offsets + blocks.lengths
        first = int(np.searchsorted(ends, start, "right"))
        last = int(np.searchsorted(blocks.offsets, stop, "left"))
        low, high = start, stop
        if first < last:
            low, high = min(start, int(blocks.offsets[first])), max(stop, int(ends[last - 1]))
        view, checksums = self._view(file, low, high), BlockChecksums(blocks)
        data = view[start - low : stop - low]
        checksums.add(low, view[: start - low])
        crc = checksums.add(start, data)
        checksums.add(stop, view[stop - low :])
        found = checksums.result()[first:last]
        for number in np.flatnonzero(found != saved[first:last]).tolist():
            raise self._damaged_block(file, first + number, int(found[number]))
        return data, crc

    def _view(self, file: str, start: int, stop: int) -> memoryview:
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        return lent(self._descriptor_of(file), first, stop - first)[start - first :]

    def _damaged_block(self, file: str, number: int, found: int) -> SegmentCorrupt:
        known = self._checksums_of(file)
        assert known is not None
        low = int(known[0].offsets[number])
        high = low + int(known[0].lengths[number])
        sums = f"CRC32C {found:08x} where {int(known[1][number]):08x} was saved"
        return self._corrupt(self._ranks[file], f"{sums}, in bytes {low} to {high} of {file}")

    def _checksums_of(self, file: str) -> tuple[Blocks, Crcs] | None:
        if file not in self._checksums:
            self._checksums[file] = self._read_checksums(file)
        return self._checksums[file]

    def _read_checksums(self, file: str) -> tuple[Blocks, Crcs] | None:
        try:
            table = checksums_of(self.checkpoint, file)
            return blocks_of(table.offsets, table.lengths), table.crc32c
        except FileNotFoundError:
            return None
        except ManifestInvalid as error:
            raise self._corrupt(self._ranks[file], f"its checksums: {error}") from None

    def describe(self) -> Description:
        try:
            return Description(self._read_catalog(), self.checkpoint.manifest)
        except ManifestInvalid as error:
            raise self._corrupt(0, str(error)) from None

    def description_files(self) -> DescriptionFiles:
        """Return the files that describe the checkpoint, for other nodes. Raises SegmentCorrupt."""
        manifest = self.checkpoint.manifest
        path = os.path.join(self.checkpoint.directory, names.catalog_file(manifest.catalog))
        try:
            catalog = checked_catalog(manifest.catalog, self._read_file(path))
            return DescriptionFiles(manifest.to_json(), catalog)
        except ManifestInvalid as error:
            raise self._corrupt(0, str(error)) from None

    def tables(self, files: Collection[str]) -> dict[str, ItemTable | None]:
        catalog = self._read_catalog()
        known = self._ranks.keys()
        return {file: described_table(catalog, file) if file in known else None for file in files}

    def read_into(self, file: str, offset: int, buffers: Sequence[memoryview]) -> None:
        # In this thread: several pieces are read at once.
        with self._reading(file) as descriptor:
            fill(descriptor, buffers, offset)

    def read_many(self, file: str, payloads: DirectRead, *, verify: bool) -> None:
        """Read payloads straight into memory.

        `verify`: hold them against the checksums beside the segment, if they have been made. Raises
        SegmentCorrupt.
        """
        reader = self._reader_of(file) if verify else None
        columns, damaged = (payloads.address, payloads.offset, payloads.nbytes), None
        with self._reading(file) as descriptor:
            if reader is not None:
                damaged = reader.read(*columns)
            elif payloads.nbytes.sum() > _LARGE * len(payloads.nbytes):
                read(descriptor, moves_of(*columns))
            else:
                read_many(descriptor, *columns)
        if damaged is not None:
            raise self._damaged_block(file, *damaged)

    def units_of(
        self, file: str, payloads: DirectRead, nbytes: int, *, verify: bool
    ) -> list[Extent]:
        """Return the bytes of a segment that have to be read for payloads, in units, in order.

        A unit is a block, where they are held against checksums.

        `payloads`: by ascending offsets; none is empty. `nbytes`: of a unit, at most; blocks may be
        larger. Raises SegmentCorrupt.
        """
        reader = self._reader_of(file) if verify else None
        if reader is not None:
            with self._reading(file):
                return reader.blocks_of(payloads.offset, payloads.nbytes)
        ends = payloads.offset + payloads.nbytes
        wanted = merged(zip(payloads.offset.tolist(), ends.tolist(), strict=True), 1)
        return [piece for extent in wanted for piece in cut(extent, None, nbytes)]

    def read_units(self, file: str, units: Sequence[Extent], address: int, *, verify: bool) -> None:
        """Read neighbouring units, and what lies between them, in this thread.

        `verify`: hold them against the checksums beside the segment, if they have been made. Raises
        SegmentCorrupt.
        """
        reader, damaged = self._reader_of(file) if verify else None, None
        low, high = units[0][0], units[-1][1]
        with self._reading(file) as descriptor:
            if reader is not None:
                damaged = reader.read_blocks(units, address)
            else:
                fill(descriptor, [view_of(address, high - low)], low)
        if damaged is not None:
            raise self._damaged_block(file, *damaged)

    def _reader_of(self, file: str) -> CheckedReader | None:
        """Return what checks a segment's units; None where it has no checksums yet."""
        known = self._checksums_of(file)
        if known is not None and file not in self._readers:
            self._readers[file] = CheckedReader(self._descriptor_of(file), *known)
        return self._readers.get(file)

    def _descriptor_of(self, file: str) -> int:
        if file not in self._descriptors:
            rank = self._ranks.get(file, 0)
            raise self._corrupt(rank, self.lacking.get(rank, f"{file} is not part of it"))
        return self._descriptors[file]

    @contextmanager
    def _reading(self, file: str) -> Iterator[int]:
        """Yield a segment's descriptor; what can't be read with it is raised as SegmentCorrupt."""
        descriptor = self._descriptor_of(file)
        try:
            yield descriptor
        except (OSError, EOFError) as error:
            raise self._corrupt(self._ranks[file], str(error)) from None

    def close(self) -> None:
        self._resources.close()

    def _open(self, path: str, rank: int) -> int:
        try:
            descriptor = open_leased(path)
        except OSError as error:
            raise self._corrupt(rank, _why(path, error)) from None
        self._resources.callback(os.close, descriptor)
        self._resources.callback(end_lease, descriptor)
        return descriptor

    def _read_catalog(self) -> Catalog:
        if self._catalog is None:
            key = self.checkpoint.manifest.catalog
            try:
                self._catalog = read_catalog(self.checkpoint.directory, key)
            except OSError as error:
                raise self._corrupt(0, _why(names.catalog_file(key), error)) from None
            except ManifestInvalid as error:
                raise self._corrupt(0, str(error)) from None
        return self._catalog

    def _read_file(self, path: str) -> bytes:
        try:
            return read_bytes(path)
        except OSError as error:
            raise self._corrupt(0, _why(path, error)) from None

    def _corrupt(self, rank: int, detail: str) -> SegmentCorrupt:
        return SegmentCorrupt(self.checkpoint.name, rank, self.label, detail)


def _why(path: str, error: OSError) -> str:
    return f"{os.path.basename(path)}: {os.strerror(error.errno or 0)}"
