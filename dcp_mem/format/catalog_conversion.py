"""Conversion between a catalog and DCP's `Metadata`, both ways."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_mem.common.gc_pause import collector_paused
from dcp_mem.common.sendable import sendable_as
from dcp_mem.common.value_class import value_class
from dcp_mem.format.catalog import (
    BYTES,
    LOOSE_BYTES,
    LOOSE_CHUNKS,
    MEMORY_FORMATS,
    Catalog,
    Properties,
    Rows,
    Tails,
    catalog_of_rows,
)
from dcp_mem.format.column_file import padded
from dcp_mem.format.layout import Layout
from dcp_mem.format.locations import refuse_missing_tails
from dcp_mem.format.metadata import StorageInfo, read_part, with_storage
from dcp_mem.format.metadata_by_entry import (
    CatalogRows,
    EntryChunks,
    EntryStorageData,
)
from dcp_mem.format.torch_names import dtype_named, layout_named, memory_format_named, properties

_Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a chunk."""
_Place = tuple[int, int]
"""Index of the writer, and of the item in its segment."""
_Places = dict[tuple[str, tuple[int, ...] | None], _Place]
"""By name and offset: where an item is written."""
_Entry = tuple[str, int, tuple[int, ...], list[tuple[_Box, _Place]]]
"""Name, `Catalog.properties`, size, and rows."""
_NOWHERE = (-1, -1)
_MANY_ROWS, _FEW_ROWS_OF_ENTRY = 1 << 17, 16
"""Of more rows than either, in all and an entry, none become objects before somebody asks for them.

The first takes 100 MB as Python objects; of the second, what it costs to look at an entry is more.
"""


class MetadataNotDescribable(ValueError):
    """DCP's metadata holds something that a catalog can't express."""


@value_class(eq=False)
class RankItems:
    """The items of one rank's segment."""

    rank: int
    indexes: Sequence[MetadataIndex]  # DCP's index of each item, in the order of the segment
    layout: Layout  # where the first of them lie; the others lie in the tail


def _columns(items: RankItems) -> tuple[Any, ...]:
    """Return what is sent to other ranks; twenty thousand indexes are sent as columns."""
    offsets = [one.offset for one in items.indexes]
    return (
        items.rank,
        [one.fqn for one in items.indexes],
        [offset is not None for offset in offsets],
        [tuple(offset or ()) for offset in offsets],
        [one.index for one in items.indexes],
        items.layout,
    )


def _from_columns(
    rank: int,
    names: Sequence[str],
    has_offset: Sequence[bool],
    offsets: Sequence[tuple[int, ...]],
    numbers: Sequence[int | None],
    layout: Layout,
) -> RankItems:
    columns = zip(names, has_offset, offsets, numbers, strict=True)
    indexes = [MetadataIndex(name, box if has else None, at) for name, has, box, at in columns]
    return RankItems(rank, indexes, layout)


sendable_as(RankItems, _columns, _from_columns)


# -- from a catalog to DCP's metadata -------------------------------------------------------------


def metadata_of(
    catalog: Catalog,
    save_id: str,
    tails: Tails,
    checkpoint_id: str | None = None,
) -> Metadata:
    """Return DCP's metadata of one save.

    Of very many rows, chunks and storage data are made when somebody looks at them. Else equal
    shapes are one object.

    Raises ManifestInvalid, UntrustedMetadata.
    """
    refuse_missing_tails(catalog, tails)
    rows = CatalogRows(catalog, save_id, tails)
    chunks: Sequence[Sequence[ChunkStorageMetadata]]
    storage_data: Mapping[MetadataIndex, StorageInfo]
    with collector_paused():
        if catalog.first[-1] > max(_MANY_ROWS, _FEW_ROWS_OF_ENTRY * len(catalog.name)):
            chunks = [EntryChunks(rows, number) for number in range(len(catalog.name))]
            storage_data = EntryStorageData(rows)
        else:
            chunks, storage_data = rows.everything()
        metadata = Metadata(_known(catalog, chunks), planner_data=_planner_data(catalog))
    return with_storage(metadata, storage_data, save_id, checkpoint_id)


def _known(catalog: Catalog, chunks: Sequence[Sequence[ChunkStorageMetadata]]) -> dict[str, Any]:
    """Return the entries of DCP's metadata; chunks are those of each entry."""
    table = [_properties(one) for one in catalog.table]
    columns = (catalog.name, catalog.properties, catalog.dimensions, catalog.size)
    entries = zip(*(column.tolist() for column in columns), chunks, strict=True)
    known: dict[str, Any] = {}
    for name, kind, dimensions, size, of_entry in entries:
        if kind >= 0:
            whole, held = torch.Size(size[:dimensions]), cast(list[ChunkStorageMetadata], of_entry)
            known[catalog.names[name]] = TensorStorageMetadata(table[kind], whole, held)
        elif kind == BYTES:
            known[catalog.names[name]] = BytesStorageMetadata()
    return known


def _planner_data(catalog: Catalog) -> Any:
    if catalog.planner_pickle:
        return read_part(catalog.planner_pickle)
    if catalog.paths is None:
        return None
    return {
        name: path
        for name, path in zip(catalog.names, catalog.paths, strict=True)
        if path is not None
    }


def _properties(one: Properties) -> TensorProperties:
    return TensorProperties(
        dtype=dtype_named(one.dtype),
        layout=layout_named(one.layout),
        requires_grad=one.requires_grad,
        memory_format=memory_format_named(one.memory_format),
        pin_memory=one.pin_memory,
    )


# -- from DCP's metadata to a catalog -------------------------------------------------------------


def catalog_of(metadata: Metadata, items: Sequence[RankItems]) -> Catalog:
    """Return the catalog of a plan that torch made.

    An item that several ranks write is taken from the last of them. Chunks that no rank writes have
    no writer. What is written but isn't in the metadata becomes loose entries.

    Raises MetadataNotDescribable.
    """
    places: _Places = {}
    for writer, of_rank in enumerate(items):
        for number, index in enumerate(of_rank.indexes):
            places[index.fqn, index.offset] = (writer, number)
    planner_data = metadata.planner_data
    has_paths = _are_paths(planner_data)
    table: dict[Properties, int] = {}
    entries = [*_entries(metadata, table, places), *_loose_entries(places)]
    names = list(
        dict.fromkeys([*(planner_data if has_paths else ()), *(one[0] for one in entries)])
    )
    odd = [name for name in names if type(name) is not str]
    if odd:
        raise MetadataNotDescribable(f"an entry under {odd[0]!r}, which is no text")
    number_of = {name: number for number, name in enumerate(names)}
    rows = [row for *_, of_entry in entries for row in of_entry]
    width = max((len(size) for _, _, size, _ in entries), default=0)
    layouts = {of_rank.layout.key: of_rank.layout for of_rank in items}
    numbers = {key: number for number, key in enumerate(layouts)}
    return catalog_of_rows(
        Rows(
            first=np.cumsum([0, *(len(of_entry) for *_, of_entry in entries)]),
            offset=padded([offset for (offset, _), _ in rows], width, 0),
            extent=padded([extent for (_, extent), _ in rows], width, 1),
            writer=np.array([writer for _, (writer, _) in rows], np.int64),
            number=np.array([number for _, (_, number) in rows], np.int64),
        ),
        name=np.array([number_of[name] for name, *_ in entries], np.int64),
        properties=np.array([kind for _, kind, *_ in entries], np.int64),
        dimensions=np.array([len(size) for _, _, size, _ in entries], np.int64),
        size=padded([size for _, _, size, _ in entries], width, 1),
        names=tuple(names),
        paths=[planner_data.get(name) for name in names] if has_paths else None,
        table=tuple(table),
        ranks=np.array([of_rank.rank for of_rank in items], np.int64),
        layout_of=np.array([numbers[of_rank.layout.key] for of_rank in items], np.int64),
        layouts=tuple(layouts.values()),
        # Protocol 3 is the last without frames, which can't be part of another pickle.
        planner_pickle=b""
        if has_paths or planner_data is None
        else pickle.dumps(planner_data, protocol=3),
    )


def _entries(metadata: Metadata, table: dict[Properties, int], places: _Places) -> Iterator[_Entry]:
    """Yield what the metadata has; remove from `places` what is written of it."""
    for name, found in metadata.state_dict_metadata.items():
        if isinstance(found, BytesStorageMetadata):
            yield name, BYTES, (), [(((), ()), places.pop((name, None), _NOWHERE))]
        elif isinstance(found, TensorStorageMetadata):
            kind = table.setdefault(_described(name, found.properties), len(table))
            yield name, kind, tuple(found.size), _rows(name, found, places)
        else:
            raise MetadataNotDescribable(f"{name} is a {type(found).__name__}")


def _rows(name: str, found: TensorStorageMetadata, places: _Places) -> list[tuple[_Box, _Place]]:
    """Return a tensor's chunks in order, each once; remove those from `places` that are written."""
    boxes = {(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in found.chunks}
    dimensions = len(found.size)
    if any(len(offsets) != dimensions or len(sizes) != dimensions for offsets, sizes in boxes):
        raise MetadataNotDescribable(f"{name} has chunks of other dimensions than its own")
    return [
        ((offsets, sizes), places.pop((name, offsets), _NOWHERE))
        for offsets, sizes in sorted(boxes)
    ]


def _loose_entries(places: _Places) -> Iterator[_Entry]:
    """Yield entries for what is written but isn't in the metadata.

    Of each name, all items with the same number of dimensions become one entry.
    """
    loose: dict[tuple[str, int], list[tuple[_Box, _Place]]] = {}
    for (name, offsets), place in places.items():
        dimensions = -1 if offsets is None else len(offsets)
        box = tuple(offsets or ())
        loose.setdefault((name, dimensions), []).append(((box, (1,) * len(box)), place))
    for (name, dimensions), rows in loose.items():
        kind = LOOSE_BYTES if dimensions < 0 else LOOSE_CHUNKS
        yield name, kind, (1,) * max(dimensions, 0), sorted(rows)


def _are_paths(planner_data: Any) -> bool:
    """Return whether planner data is what torch's planners make: a path for each name."""
    return (
        type(planner_data) is dict
        and {str}.issuperset(map(type, planner_data))
        and {tuple}.issuperset(map(type, planner_data.values()))
        and all({str, int}.issuperset(map(type, path)) for path in planner_data.values())
    )


def _described(name: str, found: TensorProperties) -> Properties:
    values = (found.dtype, found.layout, found.requires_grad, found.pin_memory, found.memory_format)
    kinds = (torch.dtype, torch.layout, bool, bool, torch.memory_format)
    if not all(map(isinstance, values, kinds)) or str(found.memory_format) not in MEMORY_FORMATS:
        raise MetadataNotDescribable(f"{name} has properties that DCP doesn't write down: {found}")
    return properties(*values)
