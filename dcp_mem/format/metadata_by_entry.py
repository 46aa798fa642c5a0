"""DCP's `Metadata` of a checkpoint of very many parts, made entry by entry.

A job of 16,384 ranks saves 16 million parts; as many Python objects take gigabytes on each rank.
Here, what says where the parts of an entry lie is made when somebody looks at this entry, and
isn't kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, overload

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from dcp_mem.format.catalog import Catalog, Extent, Ints
from dcp_mem.format.locations import LayoutItems
from dcp_mem.format.metadata import StorageInfo
from dcp_mem.format.names import segment_file

_CHUNKS_AT_ONCE = 64
"""Chunks that become lists of integers at once; many more would wake the garbage collector."""


class CatalogEntries:
    """The boxes of a catalog's rows, entry by entry."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self._dimensions = catalog.dimensions.tolist()
        # Whoever looks up one chunk of an entry soon looks up another.
        self._last: tuple[int, tuple[Ints, Ints]] | None = None

    def __len__(self) -> int:
        return len(self._dimensions)

    def boxes(self, entry: int) -> tuple[Ints, Ints]:
        """Return offsets and extents of an entry's rows: int64[rows, dimensions] each."""
        last = self._last  # another thread may look at another entry
        if last is None or last[0] != entry:
            dimensions = self._dimensions[entry]
            offsets, extents = self.catalog.boxes_of(entry)
            self._last = last = entry, (offsets[:, :dimensions], extents[:, :dimensions])
        return last[1]


class EntryChunks(Sequence[ChunkStorageMetadata]):
    """The chunks of one tensor, made each time somebody reads them."""

    def __init__(self, entries: CatalogEntries, entry: int) -> None:
        self._entries, self._entry = entries, entry

    def __len__(self) -> int:
        first = self._entries.catalog.first
        return int(first[self._entry + 1] - first[self._entry])

    @overload
    def __getitem__(self, index: int) -> ChunkStorageMetadata: ...
    @overload
    def __getitem__(self, index: slice) -> list[ChunkStorageMetadata]: ...
    def __getitem__(self, index: int | slice) -> ChunkStorageMetadata | list[ChunkStorageMetadata]:
        if isinstance(index, slice):
            return list(self)[index]
        offsets, extents = self._entries.boxes(self._entry)
        return _chunk(offsets[index].tolist(), extents[index].tolist())

    def __iter__(self) -> Iterator[ChunkStorageMetadata]:
        offsets, extents = self._entries.boxes(self._entry)
        for start in range(0, len(offsets), _CHUNKS_AT_ONCE):
            part = slice(start, start + _CHUNKS_AT_ONCE)
            yield from map(_chunk, offsets[part].tolist(), extents[part].tolist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, list | EntryChunks) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)

    def numel(self) -> int:
        """Return how many elements all chunks have."""
        _, extents = self._entries.boxes(self._entry)
        return int(extents.prod(axis=1).sum())


def _chunk(offset: Sequence[int], extent: Sequence[int]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offset), torch.Size(extent))


def numel_of(chunks: Sequence[ChunkStorageMetadata]) -> int:
    """Return how many elements the chunks of a tensor have."""
    if isinstance(chunks, EntryChunks):
        return chunks.numel()
    return sum(prod(chunk.sizes) for chunk in chunks)


class EntryStorageData(Mapping[MetadataIndex, StorageInfo]):
    """A mapping from each item to its place; a place is made when it is looked up.

    `tails`: by rank, offset and length of each item of its tail.
    """

    def __init__(
        self, entries: CatalogEntries, save_id: str, tails: Mapping[int, Sequence[Extent]]
    ) -> None:
        self._entries, self._save_id, self._tails = entries, save_id, tails
        catalog = entries.catalog
        self._items = LayoutItems(catalog)
        self._entry_names = [catalog.names[name] for name in catalog.name.tolist()]
        self._named: dict[str, list[int]] = {}
        for entry, name in enumerate(self._entry_names):
            self._named.setdefault(name, []).append(entry)
        self._has_offset = catalog.has_offset().tolist()
        # Of the entry that was gone through last: dict() looks up each index that it is given.
        self._last: Mapping[MetadataIndex, StorageInfo] = {}

    def __getitem__(self, index: MetadataIndex) -> StorageInfo:
        last = self._last  # another thread may go through another entry
        if index in last:
            return last[index]
        if isinstance(index, MetadataIndex):
            for entry in reversed(self._named.get(index.fqn, ())):
                found = self._of_rows(entry, self._rows_at(entry, index.offset))
                if index in found:
                    return found[index]
        raise KeyError(index)

    def _rows_at(self, entry: int, offset: Sequence[int] | None) -> Ints:
        """Return which rows of an entry have this offset."""
        offsets, _ = self._entries.boxes(entry)
        if not self._has_offset[entry]:
            return np.arange(len(offsets) if offset is None else 0)
        if offset is None or len(offset) != offsets.shape[1]:
            return np.arange(0)
        rows: Ints = np.flatnonzero((offsets == np.array(offset, np.int64)).all(axis=1))
        return rows

    def _of_rows(self, entry: int, row: Ints) -> dict[MetadataIndex, StorageInfo]:
        """Return where the written ones of some rows of an entry lie."""
        catalog, one = self._entries.catalog, np.full(len(row), entry)
        writer = catalog.places.at(catalog.writer_runs[one], row)
        is_written = writer >= 0
        row, writer, one = row[is_written], writer[is_written], one[is_written]
        number = catalog.numbers_at(one, row)
        found = self._items.find(writer, number)
        places, lengths = self._items.columns[:2, found]
        found_places = zip(
            self._indexes(entry, row),
            catalog.ranks[writer].tolist(),
            found.tolist(),
            places.tolist(),
            lengths.tolist(),
            self._items.beyond(writer, number).tolist(),
            strict=True,
        )
        infos: dict[MetadataIndex, StorageInfo] = {}
        for index, rank, item, offset, length, in_tail in found_places:
            extent = self._tails[rank][in_tail] if item < 0 else (offset, length)
            infos[index] = StorageInfo(segment_file(rank, self._save_id), *extent)
        return infos

    def _indexes(self, entry: int, row: Ints) -> list[MetadataIndex]:
        name = self._entry_names[entry]
        if not self._has_offset[entry]:
            return [MetadataIndex(name)] * len(row)
        offsets = self._entries.boxes(entry)[0][row].tolist()
        return [MetadataIndex(name, torch.Size(offset)) for offset in offsets]

    def _items_of(self, entry: int) -> Mapping[MetadataIndex, StorageInfo]:
        first = self._entries.catalog.first
        items = self._of_rows(entry, np.arange(int(first[entry + 1] - first[entry])))
        self._last = items
        return items

    def __iter__(self) -> Iterator[MetadataIndex]:
        for entry in range(len(self._entries)):
            yield from self._items_of(entry)

    def __len__(self) -> int:
        places, runs = self._entries.catalog.places, self._entries.catalog.writer_runs
        counted = zip(*np.unique(runs, return_counts=True), strict=True)
        return sum(int((places.run(int(run)) >= 0).sum() * count) for run, count in counted)

    def __repr__(self) -> str:
        return repr(dict(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)
