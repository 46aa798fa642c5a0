"""Compare every byte of a checkpoint with its checksums, in this node's memory and on storage.

No process group is needed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import numpy as np

from dcp_mem.common.parallel import in_parallel
from dcp_mem.common.value_class import value_class
from dcp_mem.common.values import MEMORY, STORAGE, CheckpointStatus, Segment
from dcp_mem.config import Settings
from dcp_mem.errors import (
    DcpMemError,
    ManifestInvalid,
    SegmentCorrupt,
    StorageRefused,
    StorageUnavailable,
)
from dcp_mem.format import names
from dcp_mem.format.catalog import Catalog
from dcp_mem.format.checksums import BlockChecksums, blocks_of
from dcp_mem.format.manifest import ItemTable
from dcp_mem.format.names import home_rank
from dcp_mem.loading.sources.base import Description, Source
from dcp_mem.loading.sources.memory import MemorySource
from dcp_mem.loading.sources.stored import StorageSource
from dcp_mem.memory.checkpoint import checksums_of
from dcp_mem.memory.root import node_id
from dcp_mem.operations.contents import local_checkpoint_of
from dcp_mem.storage import Storage

_AT_ONCE = 8
_WINDOW = 16 << 20


@value_class(kw_only=True)
class Damage:
    place: str
    rank: int
    file: str  # the segment; "" for what describes the checkpoint as a whole
    what: str
    start: int = 0
    stop: int = 0  # byte behind the last; 0 with start 0 for the whole file
    item: str = ""  # the tensor or byte item that these bytes are of
    block: int = -1  # which MiB of the item, from 0; -1 where it is no single one


@value_class(kw_only=True)
class Verified:
    name: str
    save_id: str
    place: str
    why_unchecked: str = ""
    damages: tuple[Damage, ...] = ()
    checked_nbytes: int = 0
    unchecked_nbytes: int = 0  # bytes that are there and have no checksums yet


class Observer(Protocol):
    def expect(self, what: str, nbytes: int) -> None:
        """Take note that so many bytes come now."""

    def add(self, nbytes: int) -> None:
        """Take note that so many more bytes are done. Called from several threads."""


def verify(
    settings: Settings, storage: Storage | None, checkpoint: CheckpointStatus, observer: Observer
) -> list[Verified]:
    """Read a checkpoint wherever it lies, and return what each place has shown. Storage comes
    first, because its checksums serve memory too: until they have been made there, memory has none
    of its own but of what was copied between nodes.
    """
    found: list[Verified] = []
    tables: Mapping[str, ItemTable] = {}
    if STORAGE in checkpoint.places and storage is not None:
        result, tables = _on_storage(storage, checkpoint, observer)
        found.append(result)
    if MEMORY in checkpoint.places:
        found.append(_in_memory(settings, checkpoint, tables, observer))
    return found


# -- storage ---------------------------------------------------------------------------------------


def _on_storage(
    storage: Storage, checkpoint: CheckpointStatus, observer: Observer
) -> tuple[Verified, Mapping[str, ItemTable]]:
    result = Verified(name=checkpoint.name, save_id=checkpoint.save_id, place=STORAGE)
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
    checks = []
    for segment in segments:
        size = sizes.get(segment.file)
        if size != segment.nbytes:
            what = "it is missing" if size is None else f"it has {size} of {segment.nbytes} bytes"
            damages.append(
                Damage(place=STORAGE, rank=home_rank(segment.rank), file=segment.file, what=what)
            )
        elif segment.file in tables:
            checks.append(_SegmentCheck(segment=segment, table=tables[segment.file], source=source))
    return _read_all(result, damages, checks, description.catalog, observer), tables


def _tables(
    source: StorageSource, segments: Sequence[Segment]
) -> tuple[dict[str, ItemTable], list[Damage]]:
    """Return each segment's checksums, and a damage where they can't be read."""
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


def _foreign(
    storage: Storage, checkpoint: CheckpointStatus, description: Description, result: Verified
) -> Verified:
    """Compare the lengths of the files that torch wrote: it keeps no checksums."""
    sizes = {entry.name: entry.nbytes for entry in storage.ls(checkpoint.name)}
    needed: dict[str, int] = {}
    for info in (description.metadata.storage_data or {}).values():
        needed[info.relative_path] = max(
            needed.get(info.relative_path, 0), info.offset + info.length
        )
    damages = [
        Damage(
            place=STORAGE,
            rank=home_rank(names.rank_of(file)),
            file=file,
            what="it is missing" if file not in sizes else f"it ends at {sizes[file]} of {nbytes}",
        )
        for file, nbytes in sorted(needed.items())
        if sizes.get(file, -1) < nbytes
    ]
    nbytes_found = sum(sizes.get(file, 0) for file in needed)
    why = "torch wrote no checksums; only the lengths of its files were checked"
    return replace(result, unchecked_nbytes=nbytes_found, why_unchecked=why, damages=tuple(damages))


# -- memory ----------------------------------------------------------------------------------------


def _in_memory(
    settings: Settings,
    checkpoint: CheckpointStatus,
    tables: Mapping[str, ItemTable],
    observer: Observer,
) -> Verified:
    result = Verified(name=checkpoint.name, save_id=checkpoint.save_id, place=MEMORY)
    local = local_checkpoint_of(settings, checkpoint)
    if local is None:
        return replace(result, why_unchecked="it has just left memory")
    with ExitStack() as resources:
        try:
            source = MemorySource(local, node_id(settings.memory_root))
            resources.callback(source.close)
            catalog = source.describe().catalog
        except DcpMemError as error:
            return replace(result, damages=(_of_all(MEMORY, error),))
        segments = {segment.rank: segment for segment in local.manifest.segments}
        damages = [
            Damage(
                place=MEMORY,
                rank=home_rank(rank),
                file=segments[rank].file,
                what=why.partition(": ")[2] or why,
            )
            for rank, why in sorted(source.lacking.items())
        ]
        checks, unchecked = [], 0
        for rank in sorted(source.present):
            segment = segments[rank]
            table = tables.get(segment.file)
            try:
                table = checksums_of(local, segment.file)
            except FileNotFoundError:
                pass  # they haven't been made yet
            except ManifestInvalid as error:
                damages.append(_of_all(MEMORY, error, segment))
                continue
            if table is None:
                unchecked += segment.nbytes
            else:
                checks.append(_SegmentCheck(segment=segment, table=table, source=source))
        assert catalog is not None
        why = "its checksums haven't been made yet: that follows a save at once"
        result = replace(result, unchecked_nbytes=unchecked, why_unchecked=why if unchecked else "")
        return _read_all(result, damages, checks, catalog, observer)


# -- reading and comparing -------------------------------------------------------------------------


@dataclass(slots=True, eq=False, kw_only=True)
class _SegmentCheck:
    segment: Segment
    table: ItemTable
    source: Source
    trouble: str = ""  # why it can't be read; "" if it can
    checksums: BlockChecksums = field(init=False)

    def __post_init__(self) -> None:
        self.checksums = BlockChecksums(blocks_of(self.table.offsets, self.table.lengths))

    def windows(self) -> Iterator[tuple[int, int]]:
        for start in range(0, self.segment.nbytes, _WINDOW):
            yield start, min(start + _WINDOW, self.segment.nbytes)


def _read_all(
    result: Verified,
    damages: Sequence[Damage],
    checks: Sequence[_SegmentCheck],
    catalog: Catalog,
    observer: Observer,
) -> Verified:
    """Read the segments; return the result with what they show, behind the damages known so far."""
    place, nbytes = result.place, sum(check.segment.nbytes for check in checks)
    observer.expect(f"{result.name} {'in' if place == MEMORY else 'on'} {place}", nbytes)
    buffers = threading.local()

    def read(window: tuple[_SegmentCheck, int, int]) -> None:
        check, start, stop = window
        if check.trouble:
            return
        if not hasattr(buffers, "one"):
            buffers.one = memoryview(bytearray(_WINDOW))
        buffer = buffers.one[: stop - start]
        try:
            check.source.read_into(check.segment.file, start, [buffer])
        except SegmentCorrupt as error:
            check.trouble = error.detail
            return
        check.checksums.add(start, buffer)
        observer.add(stop - start)

    windows = ((check, *window) for check in checks for window in check.windows())
    for _ in in_parallel(read, windows, at_once=_AT_ONCE, name="dcp_mem-verify"):
        pass
    found = [damage for check in checks for damage in _compared(place, check, catalog)]
    return replace(result, checked_nbytes=nbytes, damages=(*damages, *found))


def _compared(place: str, check: _SegmentCheck, catalog: Catalog) -> list[Damage]:
    segment, table = check.segment, check.table
    damage = partial(Damage, place=place, rank=home_rank(segment.rank), file=segment.file)
    if check.trouble:
        return [damage(what=check.trouble)]
    blocks, found = blocks_of(table.offsets, table.lengths), check.checksums.result()
    if len(found) != len(table.crc32c):
        return [damage(what=f"there are {len(table.crc32c)} checksums of its {len(found)} blocks")]
    damages = []
    for number in np.flatnonzero(found != table.crc32c).tolist():
        item = int(np.searchsorted(blocks.first, number, "right")) - 1
        start = int(blocks.offsets[number])
        damages.append(
            damage(
                what=f"CRC32C {int(found[number]):08x} where "
                f"{int(table.crc32c[number]):08x} was saved",
                start=start,
                stop=start + int(blocks.lengths[number]),
                item=_item_named(catalog, segment.rank, item),
                block=number - int(blocks.first[item]),
            )
        )
    return damages


def _item_named(catalog: Catalog, rank: int, number: int) -> str:
    """Return the name of the item with that number in a rank's segment."""
    writer = np.flatnonzero(catalog.ranks == rank)
    rows = (
        np.flatnonzero((catalog.writer == writer[0]) & (catalog.number == number))
        if len(writer)
        else writer
    )
    return catalog.names[catalog.name[catalog.entry_of_row()[rows[0]]]] if len(rows) else ""


def _of_all(place: str, error: DcpMemError, segment: Segment | None = None) -> Damage:
    if isinstance(error, (StorageUnavailable, StorageRefused)):
        raise error
    text = error.detail if isinstance(error, SegmentCorrupt) else str(error)
    return Damage(
        place=place,
        rank=0 if segment is None else home_rank(segment.rank),
        file="" if segment is None else segment.file,
        what=text,
    )
