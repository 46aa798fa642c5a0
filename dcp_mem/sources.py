"""Where an opened checkpoint's bytes come from: this node's memory, other nodes', or storage. All answer in the same terms."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from torch.distributed.checkpoint.metadata import Metadata

from dcp_mem.errors import ManifestInvalid, SegmentCorrupt, StorageKeyMissing, UntrustedMetadata
from dcp_mem.events import log
from dcp_mem.files import read_bytes
from dcp_mem.format import names
from dcp_mem.format.catalog import Catalog, Extent, catalog_key, catalog_named
from dcp_mem.format.checksums import BlockChecksums, Blocks, Crcs, Extents, blocks_of, checksum
from dcp_mem.format.described import metadata_of
from dcp_mem.format.manifest import ItemTable, Manifest, NodeManifest, items_of
from dcp_mem.format.metadata import read_metadata
from dcp_mem.format.places import places_of
from dcp_mem.memory.catalogs import read_catalog
from dcp_mem.memory.copying import Move, read, read_many, work_off
from dcp_mem.memory.job import Held, checksums_of
from dcp_mem.memory.locks import end_lease, open_leased
from dcp_mem.memory.views import lent, view_of
from dcp_mem.planning.reads import Straight
from dcp_mem.policy.pieces import cut, merged
from dcp_mem.storage import Storage
from dcp_mem.values import Segment

T = TypeVar("T")

_END_OF_METADATA = 4096
_MANIFESTS_AT_ONCE = 8
_BLOCKS = 64
_LARGE = 1 << 20
"""Bytes of a payload from which on it is worth a call of its own."""


class Description:
    """What a checkpoint consists of. catalog: None where only DCP's metadata says it, because others have written it."""

    def __init__(self, catalog: Catalog | None, manifest: Manifest | None, metadata: Metadata | None = None) -> None:
        """Raises ManifestInvalid where catalog and manifest don't belong together, UntrustedMetadata for odd planner data."""
        self.catalog = catalog
        self._manifest = manifest
        self._metadata = metadata
        if catalog is not None:
            places_of(catalog).tail.extents(self.tails)
            if catalog.planner_pickle:
                _ = self.metadata

    @property
    def save_id(self) -> str:
        return "" if self._manifest is None else self._manifest.save_id

    @property
    def tails(self) -> Mapping[int, Sequence[Extent]]:
        """By rank, where the items behind the layout of its segment lie."""
        return {} if self._manifest is None else self._manifest.tails

    @property
    def metadata(self) -> Metadata:
        """The checkpoint's DCP metadata, made when it is first asked for."""
        if self._metadata is None:
            assert self.catalog is not None
            assert self._manifest is not None
            self._metadata = metadata_of(self.catalog, self._manifest.save_id, self.tails)
        return self._metadata


class Source(Protocol):
    """One place that has the whole checkpoint. Every method raises SegmentCorrupt where bytes are missing or wrong."""

    label: str

    def describe(self) -> Description:
        """What the checkpoint consists of. Raises UntrustedMetadata as well."""

    def tables(self, files: Collection[str]) -> dict[str, ItemTable | None]:
        """Extents, payloads and checksums of these segments' items; None where nothing of ours describes one."""

    def read_into(self, file: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers, one after the other, with a segment's bytes from `offset` on."""

    def close(self) -> None:
        """End leases and give back descriptors."""


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
            return StoredDescription(self._held.manifest.to_json(), _checked_catalog(key, self._read_file(path)))
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


PEERS = "peers"
"""Label of other nodes' memory."""


class ElsewhereSource:
    """What other nodes' memory has, and storage what they lack, as a rank sees it: by the description that it was given.

    stored: None where storage doesn't have the checkpoint. held: files that lie in some node's memory.
    """

    def __init__(self, description: Description, stored: Source | None, is_held: Callable[[str], bool]) -> None:
        self.label = stored.label if stored is not None else PEERS
        self._description, self._stored, self._is_held = description, stored, is_held

    def describe(self) -> Description:
        return self._description

    def tables(self, files: Collection[str]) -> dict[str, ItemTable | None]:
        catalog = self._description.catalog
        assert catalog is not None
        others = [file for file in files if not self._is_held(file)]
        known = self._stored.tables(others) if self._stored is not None and others else {}
        return {file: known[file] if file in known else described_table(catalog, file) for file in files}

    def read_into(self, file: str, offset: int, buffers: Sequence[memoryview]) -> None:
        if self._stored is None or self._is_held(file):  # those come from other ranks, who send them
            raise SegmentCorrupt("", names.rank_of(file), self.label, f"{file} lies in no memory that can be reached")
        self._stored.read_into(file, offset, buffers)

    def close(self) -> None:
        return


def described_table(catalog: Catalog, file: str) -> ItemTable:
    """The items that a catalog has of a segment, without checksums."""
    return items_of(catalog.layout(names.rank_of(file)), ())


@dataclass(frozen=True, slots=True)
class StoredDescription:
    """Files that describe a checkpoint, for ranks that don't see them. metadata: DCP's, where nothing of ours does."""

    manifest: bytes = b""
    catalog: bytes = b""
    metadata: bytes = b""


def description_of(told: StoredDescription) -> Description:
    """What another rank has told. Raises ManifestInvalid."""
    manifest = Manifest.from_json(told.manifest)
    return Description(catalog_named(manifest.catalog, told.catalog), manifest)


class StorageSource:
    """A committed checkpoint on storage."""

    def __init__(self, storage: Storage, name: str, save_id: str, scope: str) -> None:
        self.label = storage.url
        self._storage, self._name, self._save_id, self._scope = storage, name, save_id, scope
        self._manifest: Manifest | None = None

    def describe(self) -> Description:
        return self.adopt(self.fetch_description())

    def fetch_description(self) -> StoredDescription:
        """What storage says of the checkpoint; one rank may ask, and tell the others. Raises SegmentCorrupt."""
        if not self._save_id:
            return StoredDescription(metadata=self._get(names.metadata_file(self._scope), bytes))
        if not self._is_committed():
            raise self._corrupt(0, f"what is committed there isn't save {self._save_id}")
        manifest, key = self._get(
            names.stored_manifest(self._save_id), lambda data: (data, Manifest.from_json(data).catalog)
        )
        return StoredDescription(manifest, self._get(names.catalog_file(key), lambda data: _checked_catalog(key, data)))

    def adopt(self, stored: StoredDescription) -> Description:
        """Go by what storage said to this rank or another. Raises SegmentCorrupt, UntrustedMetadata."""
        if not self._save_id:
            return Description(None, None, self._foreign(read_metadata(stored.metadata)))
        try:
            self._manifest = Manifest.from_json(stored.manifest)
            return Description(catalog_named(self._manifest.catalog, stored.catalog), self._manifest)
        except ManifestInvalid as error:
            raise self._corrupt(0, str(error)) from None

    def _is_committed(self) -> bool:
        """Whether `.metadata` is that of this save: its id stands at the end, and often enough before that."""
        file = names.metadata_file(self._scope)
        nbytes = next((entry.nbytes for entry in self._storage.ls(self._name) if entry.name == file), 0)
        end = bytearray(min(nbytes, _END_OF_METADATA))
        try:
            self._storage.read_into(f"{self._name}/{file}", nbytes - len(end), [memoryview(end)])
        except StorageKeyMissing as error:
            raise self._corrupt(0, str(error)) from None
        return self._save_id.encode() in end or self._save_id.encode() in self._get(file, bytes)

    def _foreign(self, metadata: Metadata) -> Metadata:
        """What torch wrote has no manifest; a checkpoint of ours without one has lost its checksums."""
        files = {getattr(info, "relative_path", "") for info in (metadata.storage_data or {}).values()}
        if any(names.SEGMENT.fullmatch(file) for file in files):
            raise self._corrupt(0, "its manifest is missing, and the checksums with it (torch's own readers need none)")
        return metadata

    def tables(self, files: Collection[str]) -> dict[str, ItemTable | None]:
        if not self._save_id:
            return dict.fromkeys(files)
        if self._manifest is None:  # another source has described the checkpoint
            self._manifest = self._get(names.stored_manifest(self._save_id), Manifest.from_json)
        of_rank = dict(zip(self._manifest.segments.rank, self._manifest.segments.node, strict=True))
        nodes = sorted({of_rank[names.rank_of(file)] for file in files if names.rank_of(file) in of_rank})
        known: dict[str, ItemTable | None] = {}
        with ThreadPoolExecutor(_MANIFESTS_AT_ONCE, thread_name_prefix="dcp_mem-manifests") as pool:
            for tables in pool.map(self._tables_of_node, nodes):
                known.update(tables)
        for file in files:
            if file not in known:
                raise self._corrupt(names.rank_of(file), f"no manifest of its has the checksums of {file}")
        return {file: known[file] for file in files}

    def _tables_of_node(self, node: str) -> Mapping[str, ItemTable]:
        return self._get(names.stored_node_manifest(self._save_id, node), NodeManifest.from_json).tables

    def read_into(self, file: str, offset: int, buffers: Sequence[memoryview]) -> None:
        nbytes = sum(map(len, buffers))
        try:
            count = self._storage.read_into(f"{self._name}/{file}", offset, buffers)
        except StorageKeyMissing as error:
            raise self._corrupt(names.rank_of(file), str(error)) from None
        if count < nbytes:
            raise self._corrupt(names.rank_of(file), f"{file} ends at {offset + count}, {nbytes - count} bytes short")

    def close(self) -> None:
        return

    def _get(self, file: str, parse: Callable[[bytes], T]) -> T:
        try:
            return get_parsed(self._storage, f"{self._name}/{file}", parse)
        except (StorageKeyMissing, ManifestInvalid) as error:
            raise self._corrupt(0, str(error)) from None

    def _corrupt(self, rank: int, detail: str) -> SegmentCorrupt:
        return SegmentCorrupt(self._name, rank, self.label, detail)


def get_parsed(storage: Storage, key: str, parse: Callable[[bytes], T]) -> T:
    """What `parse` makes of the bytes under a key. Raises ManifestInvalid where they are damaged twice; StorageKeyMissing."""
    try:
        return parse(storage.get(key))
    except ManifestInvalid as error:
        log.warning("%s in %s: %s; reading it once more, for it may have changed on its way", key, storage.url, error)
        return parse(storage.get(key))


def _checked_catalog(key: str, data: bytes) -> bytes:
    """The catalog's bytes. Raises ManifestInvalid where they aren't those of that key."""
    if catalog_key(data) != key:
        raise ManifestInvalid(f"catalog {key} is damaged")
    return data


Failures = (SegmentCorrupt, UntrustedMetadata, ManifestInvalid)
"""What makes a source unusable without saying anything about the others."""
