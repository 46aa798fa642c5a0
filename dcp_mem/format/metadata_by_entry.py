"""What DCP's `Metadata` says of a catalog's rows, made at once or entry by entry.

A job of 16,384 ranks saves 16 million parts; as many Python objects take gigabytes on each rank.
Of so many, what says where the parts of an entry lie is made when somebody looks at this entry, and
isn't kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Any, overload

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from dcp_mem.format.catalog import Catalog, Ints, Tails
from dcp_mem.format.locations import LayoutItems, distinct_shapes
from dcp_mem.format.metadata import StorageInfo
from dcp_mem.format.names import segment_file

_CHUNKS_AT_ONCE = 64
"""Chunks that become lists of integers at once; many more would wake the garbage collector."""


class CatalogRows:
    """DCP's objects of a catalog's rows, of all or of one entry's."""

    def __init__(self, catalog: Catalog, save_id: str, tails: Tails) -> None:
        self.catalog, self._tails, self._items = catalog, tails, LayoutItems(catalog)
        self.has_offset = catalog.has_offset().tolist()
        self.names = list(map(catalog.names.__getitem__, catalog.name.tolist()))
        self._dimensions = catalog.dimensions.tolist()
        self._files = [segment_file(rank, save_id) for rank in catalog.ranks.tolist()]
        # Whoever looks up one chunk of an entry soon looks up another.
        self._last: tuple[int, tuple[Ints, Ints]] | None = None

    def count(self, entry: int) -> int:
        """Return how many rows an entry has."""
        return int(self.catalog.first[entry + 1] - self.catalog.first[entry])

    def boxes(self, entry: int) -> tuple[Ints, Ints]:
        """Return offsets and extents of an entry's rows: int64[rows, dimensions] each."""
        last = self._last  # another thread may look at another entry
        if last is None or last[0] != entry:
            within = slice(self._dimensions[entry])
            offsets, extents = self.catalog.boxes_of(entry)
            self._last = last = entry, (offsets[:, within], extents[:, within])
        return last[1]

    def everything(
        self,
    ) -> tuple[list[list[ChunkStorageMetadata]], dict[MetadataIndex, StorageInfo]]:
        """Return the chunks of each entry, and where each written row lies."""
        catalog, shapes = self.catalog, distinct_shapes(self.catalog)
        distinct = list(map(torch.Size, shapes.values))
        offsets, extents = (
            list(map(distinct.__getitem__, column.tolist()))
            for column in (shapes.offset, shapes.extent)
        )
        chunks = list(map(ChunkStorageMetadata, offsets, extents))
        borders = pairwise(catalog.first.tolist())
        places = self.places(catalog.entry_of_row(), catalog.writer, catalog.number, offsets)
        return [chunks[start:stop] for start, stop in borders], places

    def places(
        self, entry: Ints, writer: Ints, number: Ints, offsets: Sequence[torch.Size]
    ) -> dict[MetadataIndex, StorageInfo]:
        """Return where those of some rows lie that have been written."""
        row = np.flatnonzero(writer >= 0)
        writer, number = writer[row], number[row]
        extents = self._items.extents(writer, number, self._tails)
        # As in `.metadata`: of items with the same index, the last one counts.
        order = np.argsort(self._items.beyond(writer, number) >= 0, kind="stable")
        columns = (column[order].tolist() for column in (row, entry[row], writer, *extents))
        names, has_offset, files = self.names, self.has_offset, self._files
        return {
            MetadataIndex(names[of_entry], offsets[at] if has_offset[of_entry] else None): (
                StorageInfo(files[file], offset, length)
            )
            for at, of_entry, file, offset, length in zip(*columns, strict=True)
        }


class EntryChunks(Sequence[ChunkStorageMetadata]):
    """The chunks of one tensor, made each time somebody reads them."""

    def __init__(self, rows: CatalogRows, entry: int) -> None:
        self._rows, self._entry = rows, entry

    def __len__(self) -> int:
        return self._rows.count(self._entry)

    @overload
    def __getitem__(self, index: int) -> ChunkStorageMetadata: ...
    @overload
    def __getitem__(self, index: slice) -> list[ChunkStorageMetadata]: ...
    def __getitem__(self, index: int | slice) -> ChunkStorageMetadata | list[ChunkStorageMetadata]:
        if isinstance(index, slice):
            return list(self)[index]
        offsets, extents = self._rows.boxes(self._entry)
        return _chunk(offsets[index].tolist(), extents[index].tolist())

    def __iter__(self) -> Iterator[ChunkStorageMetadata]:
        offsets, extents = self._rows.boxes(self._entry)
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
        _, extents = self._rows.boxes(self._entry)
        return int(extents.prod(axis=1).sum())


def _chunk(offset: Sequence[int], extent: Sequence[int]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offset), torch.Size(extent))


def numel_of(chunks: Sequence[ChunkStorageMetadata]) -> int:
    """Return how many elements the chunks of a tensor have."""
    if isinstance(chunks, EntryChunks):
        return chunks.numel()
    return sum(prod(chunk.sizes) for chunk in chunks)


class EntryStorageData(Mapping[MetadataIndex, StorageInfo]):
    """A mapping from each item to its place; a place is made when it is looked up."""

    def __init__(self, rows: CatalogRows) -> None:
        self._rows = rows
        self._named: dict[str, list[int]] = {}
        for entry, name in enumerate(rows.names):
            self._named.setdefault(name, []).append(entry)
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
        offsets, _ = self._rows.boxes(entry)
        if not self._rows.has_offset[entry]:
            return np.arange(len(offsets) if offset is None else 0)
        if offset is None or len(offset) != offsets.shape[1]:
            return np.arange(0)
        rows: Ints = np.flatnonzero((offsets == np.array(offset, np.int64)).all(axis=1))
        return rows

    def _of_rows(self, entry: int, row: Ints) -> dict[MetadataIndex, StorageInfo]:
        """Return where the written ones of some rows of an entry lie."""
        catalog, one = self._rows.catalog, np.full(len(row), entry)
        offsets = list(map(torch.Size, self._rows.boxes(entry)[0][row].tolist()))
        writer, number = catalog.writers_at(one, row), catalog.numbers_at(one, row)
        return self._rows.places(one, writer, number, offsets)

    def __iter__(self) -> Iterator[MetadataIndex]:
        for entry in range(len(self._rows.names)):
            self._last = items = self._of_rows(entry, np.arange(self._rows.count(entry)))
            yield from items

    def __len__(self) -> int:
        places, runs = self._rows.catalog.places, self._rows.catalog.writer_runs
        counted = zip(*np.unique(runs, return_counts=True), strict=True)
        return sum(int((places.run(int(run)) >= 0).sum() * count) for run, count in counted)

    def __repr__(self) -> str:
        return repr(dict(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)
