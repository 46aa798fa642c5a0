"""DCP's `Metadata` of a checkpoint of very many parts, made entry by entry.

A job of 16,384 ranks saves 16 million parts; as many Python objects take gigabytes on each rank.
Here, what says where the parts of an entry lie is made when somebody looks at this entry, and
isn't kept.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping, Sequence, ValuesView
from functools import lru_cache
from math import prod
from typing import Any, overload

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from dcp_mem.format.catalog import LOOSE_CHUNKS, Catalog, Extent, Ints, RunCatalog
from dcp_mem.format.locations import locations_of
from dcp_mem.format.metadata import StorageInfo
from dcp_mem.format.names import segment_file

_ENTRIES_KEPT = 8
"""Entries whose boxes or items are kept for the next look-up."""
_CHUNKS_AT_ONCE = 64
"""Chunks that become lists of integers at once; many more would wake the garbage collector."""


class CatalogEntries:
    """The rows of a catalog, entry by entry.

    Args:
        catalog: What the checkpoint consists of.
    """

    def __init__(self, catalog: RunCatalog) -> None:
        self.catalog = catalog
        self._dimensions = catalog.dimensions.tolist()
        self.boxes = lru_cache(_ENTRIES_KEPT)(self._boxes)

    def __len__(self) -> int:
        return len(self._dimensions)

    def _boxes(self, entry: int) -> tuple[Ints, Ints]:
        dimensions = self._dimensions[entry]
        offsets, extents = self.catalog.boxes_of(entry)
        return offsets[:, :dimensions], extents[:, :dimensions]

    def rows(self, entry: int, row: Ints) -> Catalog:
        """Return a catalog of some rows of one entry.

        Args:
            entry: The entry's number.
            row: Which of its rows, ascending.
        """
        return self.catalog.with_rows(np.full(len(row), entry), row)


class EntryChunks(Sequence[ChunkStorageMetadata]):
    """The chunks of one tensor, made each time somebody reads them.

    Args:
        entries: The catalog's rows.
        entry: The tensor's number.
    """

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
        return isinstance(other, Sequence) and list(self) == list(other)

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
    """Return how many elements the chunks of a tensor have.

    Args:
        chunks: As in DCP's metadata.
    """
    if isinstance(chunks, EntryChunks):
        return chunks.numel()
    return sum(prod(chunk.sizes) for chunk in chunks)


class EntryStorageData(Mapping[MetadataIndex, StorageInfo]):
    """Where each item lies, made for each look-up.

    Args:
        entries: The catalog's rows.
        save_id: The save attempt; it is part of the segments' names.
        tails: By rank, offset and length of each item of its tail.
    """

    def __init__(
        self, entries: CatalogEntries, save_id: str, tails: Mapping[int, Sequence[Extent]]
    ) -> None:
        self._entries, self._save_id, self._tails = entries, save_id, tails
        catalog = entries.catalog
        self._named: dict[str, list[int]] = {}
        for entry, name in enumerate(catalog.name.tolist()):
            self._named.setdefault(catalog.names[name], []).append(entry)
        kinds = catalog.properties
        self._has_offset = ((kinds >= 0) | (kinds == LOOSE_CHUNKS)).tolist()
        # Of the entry that was gone through last: dict() looks up each index that it is given.
        self._last: Mapping[MetadataIndex, StorageInfo] = {}

    def __getitem__(self, index: MetadataIndex) -> StorageInfo:
        last = self._last  # another thread may go through another entry
        if index in last:
            return last[index]
        for entry in reversed(self._named.get(index.fqn, ())):
            if (found := self._found(entry, index)) is not None:
                return found
        raise KeyError(index)

    def _found(self, entry: int, index: MetadataIndex) -> StorageInfo | None:
        offsets, _ = self._entries.boxes(entry)
        if not self._has_offset[entry]:
            row = np.arange(len(offsets) if index.offset is None else 0)
        elif index.offset is None or len(index.offset) != offsets.shape[1]:
            return None
        else:
            row = np.flatnonzero((offsets == np.array(index.offset, np.int64)).all(axis=1))
        return self._of_rows(entry, row).get(index)

    def _of_rows(self, entry: int, row: Ints) -> dict[MetadataIndex, StorageInfo]:
        catalog = self._entries.rows(entry, row)
        dimensions = int(catalog.dimensions[entry])
        offsets = list(map(torch.Size, catalog.offset[:, :dimensions].tolist()))
        return storage_data_of(catalog, offsets, self._save_id, self._tails)

    def _items_of(self, entry: int) -> Mapping[MetadataIndex, StorageInfo]:
        first = self._entries.catalog.first
        items = self._of_rows(entry, np.arange(int(first[entry + 1] - first[entry])))
        self._last = items
        return items

    def pairs(self) -> Iterator[tuple[MetadataIndex, StorageInfo]]:
        """Yield each item's index, and where it lies."""
        for entry in range(len(self._entries)):
            yield from self._items_of(entry).items()

    def __iter__(self) -> Iterator[MetadataIndex]:
        return (index for index, _ in self.pairs())

    def __len__(self) -> int:
        return sum(1 for _ in self.pairs())

    def __bool__(self) -> bool:
        return next(self.pairs(), None) is not None

    def items(self) -> ItemsView[MetadataIndex, StorageInfo]:
        return _Items(self)

    def values(self) -> ValuesView[StorageInfo]:
        return _Values(self)

    def __repr__(self) -> str:
        return repr(dict(self.pairs()))

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self.pairs()),)


class _Items(ItemsView[MetadataIndex, StorageInfo]):
    _mapping: EntryStorageData

    def __iter__(self) -> Iterator[tuple[MetadataIndex, StorageInfo]]:
        return self._mapping.pairs()


class _Values(ValuesView[StorageInfo]):
    _mapping: EntryStorageData

    def __iter__(self) -> Iterator[StorageInfo]:
        return (info for _, info in self._mapping.pairs())


def storage_data_of(
    catalog: Catalog,
    offsets: Sequence[torch.Size],
    save_id: str,
    tails: Mapping[int, Sequence[Extent]],
) -> dict[MetadataIndex, StorageInfo]:
    """Return where each written row of a catalog lies.

    Args:
        catalog: What a checkpoint, or a part of it, consists of.
        offsets: Of each row.
        save_id: The save attempt; it is part of the segments' names.
        tails: By rank, offset and length of each item of its tail.

    Raises:
        ManifestInvalid: The tails don't belong to the catalog.
    """
    places = locations_of(catalog)
    rows = np.concatenate([places.rows, places.tail.rows])
    extents = np.concatenate(
        [np.stack([places.offsets, places.lengths], axis=1), places.tail.extents(tails)]
    )
    names = catalog.name[catalog.entry_of_row()[rows]]
    columns = (rows, names, catalog.has_offset()[rows], catalog.writer[rows], *extents.T)
    writers = np.unique(catalog.writer[rows])
    ranks = zip(writers.tolist(), catalog.ranks[writers].tolist(), strict=True)
    files = {writer: segment_file(rank, save_id) for writer, rank in ranks}
    return {
        MetadataIndex(catalog.names[name], offsets[row] if has_offset else None): StorageInfo(
            files[writer], offset, length
        )
        for row, name, has_offset, writer, offset, length in zip(
            *(column.tolist() for column in columns), strict=True
        )
    }
