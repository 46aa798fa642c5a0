"""Every byte of a checkpoint held against its checksums, in this node's memory and on storage. No process group is needed."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import numpy as np

from dcp_mem.config import Settings
from dcp_mem.errors import DcpMemError, ManifestInvalid, SegmentCorrupt, StorageRefused, StorageUnavailable
from dcp_mem.format import names
from dcp_mem.format.catalog import Catalog
from dcp_mem.format.checksums import BlockChecksums, blocks_of
from dcp_mem.format.manifest import ItemTable
from dcp_mem.format.shapes import entry_of_rows
from dcp_mem.memory.job import checksums_of
from dcp_mem.memory.root import node_id
from dcp_mem.operating.contents import held_of
from dcp_mem.operating.inventory import MEMORY, STORAGE, Checkpoint
from dcp_mem.sources.base import Description, Source
from dcp_mem.sources.memory import MemorySource
from dcp_mem.sources.stored import StorageSource
from dcp_mem.storage import Storage
from dcp_mem.values import Segment

_AT_ONCE = 8
_WINDOW = 16 << 20


@dataclass(frozen=True, slots=True)
class Damage:
    """Something that isn't as it was saved.

    file: "" for what describes the checkpoint as a whole. start, stop: bytes of the file (0, 0: all of it). item: the tensor or
    byte item that they are of, and block: which MiB of it, counted from 0 (-1: no single one).
    """

    place: str
    rank: int
    file: str
    what: str
    start: int = 0
    stop: int = 0
    item: str = ""
    block: int = -1


@dataclass(frozen=True, slots=True)
class Verified:
    """What came of one checkpoint in one place.

    checked_nbytes: read, and held against checksums. unchecked_nbytes: there, but nobody knows checksums of it, and why.
    """

    name: str
    save_id: str
    place: str
    checked_nbytes: int = 0
    unchecked_nbytes: int = 0
    why_unchecked: str = ""
    damages: tuple[Damage, ...] = ()


class Observer(Protocol):
    """Is told how far it is."""

    def expect(self, what: str, nbytes: int) -> None:
        """So many bytes of this come now."""

    def add(self, nbytes: int) -> None:
        """So many more have been read. Called from several threads."""


def verify(settings: Settings, storage: Storage | None, checkpoint: Checkpoint, observer: Observer) -> list[Verified]:
    """Read a checkpoint wherever it lies, and tell what is damaged there; storage first, whose checksums serve memory too.

    Memory has checksums of its own only of what was copied between nodes; before its flush, nobody knows those of the rest.
    Raises StorageUnavailable, StorageRefused.
    """
    found: list[Verified] = []
    tables: Mapping[str, ItemTable] = {}
    if STORAGE in checkpoint.places and storage is not None:
        result, tables = _on_storage(storage, checkpoint, observer)
        found.append(result)
    if MEMORY in checkpoint.places:
        found.append(_in_memory(settings, checkpoint, tables, observer))
    return found


# -- storage ---------------------------------------------------------------------------------------------------------------


def _on_storage(
    storage: Storage, checkpoint: Checkpoint, observer: Observer
) -> tuple[Verified, Mapping[str, ItemTable]]:
    result = Verified(checkpoint.name, checkpoint.save_id, STORAGE)
    source = StorageSource(storage, checkpoint.name, checkpoint.save_id, checkpoint.scope)
    try:
        description = source.describe()
        if description.catalog is None:
            return _foreign(storage, checkpoint, description, result), {}
        manifest = description.manifest
        assert manifest is not None
        segments = list(manifest.segments)
    except DcpMemError as error:
        return replace(result, damages=(_of_all(STORAGE, error),)), {}
    sizes = {entry.name: entry.nbytes for entry in storage.ls(checkpoint.name)}
    tables, damages = _tables(source, segments)
    works = []
    for segment in segments:
        there = sizes.get(segment.file)
        if there != segment.nbytes:
            what = "it is missing" if there is None else f"it has {there} of {segment.nbytes} bytes"
            damages.append(Damage(STORAGE, segment.rank, segment.file, what))
        elif segment.file in tables:
            works.append(_Work(segment, tables[segment.file], source))
    result = replace(result, checked_nbytes=sum(work.segment.nbytes for work in works))
    damages += _read_all(STORAGE, works, description.catalog, observer, checkpoint.name)
    return replace(result, damages=tuple(damages)), tables


def _tables(source: StorageSource, segments: Sequence[Segment]) -> tuple[dict[str, ItemTable], list[Damage]]:
    """The checksums of each segment; where a node's are damaged, what that is for its segments."""
    tables: dict[str, ItemTable] = {}
    damages = []
    for node in dict.fromkeys(segment.node for segment in segments):
        of_node = [segment for segment in segments if segment.node == node]
        try:
            found = source.tables([segment.file for segment in of_node])
        except DcpMemError as error:
            damages += [_of_all(STORAGE, error, segment) for segment in of_node]
            continue
        tables.update((file, table) for file, table in found.items() if table is not None)
    return tables, damages


def _foreign(storage: Storage, checkpoint: Checkpoint, description: Description, result: Verified) -> Verified:
    """Torch keeps no checksums: there is only to see whether its files are as long as its metadata has them."""
    sizes = {entry.name: entry.nbytes for entry in storage.ls(checkpoint.name)}
    needed: dict[str, int] = {}
    for info in (description.metadata.storage_data or {}).values():
        needed[info.relative_path] = max(needed.get(info.relative_path, 0), info.offset + info.length)
    damages = [
        Damage(
            STORAGE,
            names.rank_of(file),
            file,
            "it is missing" if file not in sizes else f"it ends at {sizes[file]} of {nbytes}",
        )
        for file, nbytes in sorted(needed.items())
        if sizes.get(file, -1) < nbytes
    ]
    there = sum(sizes.get(file, 0) for file in needed)
    why = "torch wrote no checksums; only the lengths of its files were checked"
    return replace(result, unchecked_nbytes=there, why_unchecked=why, damages=tuple(damages))


# -- memory ----------------------------------------------------------------------------------------------------------------


def _in_memory(
    settings: Settings, checkpoint: Checkpoint, tables: Mapping[str, ItemTable], observer: Observer
) -> Verified:
    result = Verified(checkpoint.name, checkpoint.save_id, MEMORY)
    held = held_of(settings, checkpoint)
    if held is None:
        return replace(result, why_unchecked="it has just left memory")
    with ExitStack() as resources:
        try:
            source = MemorySource(held, node_id(settings.memory_root))
            resources.callback(source.close)
            catalog = source.describe().catalog
        except DcpMemError as error:
            return replace(result, damages=(_of_all(MEMORY, error),))
        segments = {segment.rank: segment for segment in held.manifest.segments}
        damages = [
            Damage(MEMORY, rank, segments[rank].file, why.partition(": ")[2] or why)
            for rank, why in sorted(source.lacking.items())
        ]
        works, unchecked = [], 0
        for rank in sorted(source.present):
            segment = segments[rank]
            table = tables.get(segment.file)
            try:
                table = checksums_of(held, segment.file)
            except FileNotFoundError:  # it was never copied, and has no others than those on storage
                pass
            except ManifestInvalid as error:
                damages.append(_of_all(MEMORY, error, segment))
                continue
            if table is None:
                unchecked += segment.nbytes
            else:
                works.append(_Work(segment, table, source))
        assert catalog is not None
        damages += _read_all(MEMORY, works, catalog, observer, checkpoint.name)
    why = "it isn't flushed yet, and the flush computes the checksums" if unchecked else ""
    nbytes = sum(work.segment.nbytes for work in works)
    return replace(result, checked_nbytes=nbytes, unchecked_nbytes=unchecked, why_unchecked=why, damages=tuple(damages))


# -- reading and comparing ---------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Work:
    """A segment to be read. trouble: why it can't be."""

    segment: Segment
    table: ItemTable
    source: Source
    trouble: str = ""
    checksums: BlockChecksums = field(init=False)

    def __post_init__(self) -> None:
        self.checksums = BlockChecksums(blocks_of(self.table.offsets, self.table.lengths))

    def windows(self) -> Iterator[tuple[int, int]]:
        for start in range(0, self.segment.nbytes, _WINDOW):
            yield start, min(start + _WINDOW, self.segment.nbytes)


def _read_all(place: str, works: Sequence[_Work], catalog: Catalog, observer: Observer, name: str) -> list[Damage]:
    observer.expect(
        f"{name} in {place}" if place == MEMORY else f"{name} on {place}", sum(work.segment.nbytes for work in works)
    )
    buffers = threading.local()

    def read(work: _Work, start: int, stop: int) -> None:
        if work.trouble:
            return
        if not hasattr(buffers, "one"):
            buffers.one = memoryview(bytearray(_WINDOW))
        buffer = buffers.one[: stop - start]
        try:
            work.source.read_into(work.segment.file, start, [buffer])
        except SegmentCorrupt as error:
            work.trouble = error.detail
            return
        work.checksums.add(start, buffer)
        observer.add(stop - start)

    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="dcp_mem-verify") as pool:
        reading = [pool.submit(read, work, *window) for work in works for window in work.windows()]
        try:
            for one in reading:
                one.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return [damage for work in works for damage in _compared(place, work, catalog)]


def _compared(place: str, work: _Work, catalog: Catalog) -> list[Damage]:
    segment, table = work.segment, work.table
    damage = partial(Damage, place, segment.rank, segment.file)
    if work.trouble:
        return [damage(work.trouble)]
    blocks, found = blocks_of(table.offsets, table.lengths), work.checksums.result()
    if len(found) != len(table.crc32c):
        return [damage(f"there are {len(table.crc32c)} checksums of its {len(found)} blocks")]
    damages = []
    for number in np.flatnonzero(found != table.crc32c).tolist():
        item = int(np.searchsorted(blocks.first, number, "right")) - 1
        start = int(blocks.offsets[number])
        damages.append(
            damage(
                f"CRC32C {int(found[number]):08x} where {int(table.crc32c[number]):08x} was saved",
                start,
                start + int(blocks.lengths[number]),
                _item_named(catalog, segment.rank, item),
                number - int(blocks.first[item]),
            )
        )
    return damages


def _item_named(catalog: Catalog, rank: int, number: int) -> str:
    """The name of what is the so-manieth item of a rank's segment."""
    writer = np.flatnonzero(catalog.ranks == rank)
    rows = np.flatnonzero((catalog.writer == writer[0]) & (catalog.number == number)) if len(writer) else writer
    return catalog.names[catalog.name[entry_of_rows(catalog)[rows[0]]]] if len(rows) else ""


def _of_all(place: str, error: DcpMemError, segment: Segment | None = None) -> Damage:
    if isinstance(error, (StorageUnavailable, StorageRefused)):
        raise error
    text = error.detail if isinstance(error, SegmentCorrupt) else str(error)
    return Damage(place, 0 if segment is None else segment.rank, "" if segment is None else segment.file, text)
