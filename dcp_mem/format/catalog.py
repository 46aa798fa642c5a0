"""The catalog: everything that DCP's `Metadata` says of a checkpoint, as columns.

One catalog describes all saves of one plan. It is written once, under a name made from its content,
and linked beside every checkpoint. What differs from save to save (the save id, and where the items
in the tails lie) stands in the manifest.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from mmap import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

from dcp_mem.errors import ManifestInvalid
from dcp_mem.format.column_file import Ints as Ints
from dcp_mem.format.column_file import Packed, pack, unpack
from dcp_mem.format.layout import Layout, layout_of
from dcp_mem.format.name_columns import Path as Path
from dcp_mem.format.name_columns import pack_texts, unpack_texts
from dcp_mem.format.shared_runs import RunPool, Runs

VERSION = 1
SHARED_VERSION = 2
"""The version of catalogs whose rows are stored as runs (`SharedCatalog`)."""
Extent = tuple[int, int]
"""(offset, length) of an item in its segment."""
BYTES = -1
"""In `Catalog.properties`, in place of a number: the entry is a byte item."""
LOOSE_CHUNKS, LOOSE_BYTES = -2, -3
"""In place of a number: an entry that isn't in DCP's metadata, though its items were written.

Its items are chunks, or a byte item. Only custom planners make such entries. The entry's
`dimensions` counts; its size and its rows' extents mean nothing.
"""
_COLUMNS = (
    "name",
    "properties",
    "dimensions",
    "size",
    "first",
    "offset",
    "extent",
    "writer",
    "number",
    "ranks",
    "layout_of",
)
_OF_ENTRIES = ("name", "properties", "dimensions", "size")
_OF_SEGMENTS = ("ranks", "layout_of")
_RUNS = ("offset_runs", "extent_runs", "writer_runs", "number_runs")
_BOXES, _PLACES = "boxes", "places"
_ROWS_PER_BYTE = 256
"""The most rows for each byte of a catalog's file; zeros make it long enough."""
_LAYOUT_ROWS = ("offsets", "lengths", "payload_offsets", "payload_nbytes")
_MOST_DIMENSIONS = 64
_MOST = (1 << 62) - 1
"""The largest size or offset: the sum of two of them doesn't overflow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Properties:
    """DCP's properties of a tensor besides its shape; torch's values as text ("torch.float32").

    So the agent reads catalogs without torch, and an older torch can read those of a newer one.
    """

    dtype: str
    layout: str
    requires_grad: bool
    pin_memory: bool
    memory_format: str = "torch.contiguous_format"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Catalog:
    """The contents of a checkpoint, as columns of entries and rows.

    An entry is a name of DCP's metadata; each of its rows is one item. The rows of an entry are
    adjacent, in the lexicographic order of their offsets. `width` is the largest number of
    dimensions.

    Attributes:
        names: All flattened names.
        paths: The path of each name, as in DCP's planner data, None where a name has none. None as
            a whole where there is no planner data, or none of this form (see `planner_pickle`).
        table: The distinct properties of tensors.
        name: Of each entry, in the order of DCP's metadata: index in `names`.
        properties: Of each entry: index in `table`, or BYTES, LOOSE_CHUNKS or LOOSE_BYTES.
        dimensions: Of each entry: the number of dimensions.
        size: Of each entry: int64[entries, width], padded with 1.
        first: int64[entries + 1]; the rows of entry i are first[i] to first[i + 1].
        offset: Of each row: int64[rows, width], padded with 0.
        extent: Of each row: int64[rows, width], padded with 1.
        writer: Of each row: index in `ranks` of the rank that wrote it; -1 where none has.
        number: Of each row: which item of the writer's segment it is, counted in the order of the
            layout, and then on through the tail.
        ranks: Of each writer: its rank.
        layout_of: Of each writer: index in `layouts` of its segment's layout.
        layouts: The distinct layouts of segments.
        planner_pickle: Planner data of a custom planner, pickled with protocol 3 or later; b""
            where `paths` holds all of it, or there is none.
    """

    names: Sequence[str]
    paths: Sequence[Path | None] | None
    table: Sequence[Properties]
    name: Ints
    properties: Ints
    dimensions: Ints
    size: Ints
    first: Ints
    offset: Ints
    extent: Ints
    writer: Ints
    number: Ints
    ranks: Ints
    layout_of: Ints
    layouts: Sequence[Layout]
    planner_pickle: bytes = b""

    def entry_names(self) -> list[str]:
        """Return the names that DCP's metadata has an entry for."""
        return list(map(self.names.__getitem__, self.name[self.properties >= BYTES].tolist()))

    def entry_of_row(self) -> Ints:
        """Return, for each row, the number of its entry."""
        return np.repeat(np.arange(len(self.name)), np.diff(self.first))

    def has_offset(self) -> npt.NDArray[np.bool_]:
        """Return, for each row, whether its index in DCP has an offset; byte items' don't."""
        has_chunks: npt.NDArray[np.bool_] = (self.properties >= 0) | (
            self.properties == LOOSE_CHUNKS
        )
        return has_chunks[self.entry_of_row()]

    def to_bytes(self) -> bytes:
        """Return the catalog as a file, the same for the same content.

        Raises:
            ManifestInvalid: The catalog contradicts itself.
        """
        _refuse_contradictions(self)
        columns = {name: getattr(self, name) for name in _COLUMNS}
        return _packed(self, columns, {"planner_pickle": self.planner_pickle}, VERSION)

    def layout(self, rank: int) -> Layout:
        """Return the layout of a rank's segment; an empty one where the catalog has none.

        Args:
            rank: Of the world that saved.
        """
        writer = np.flatnonzero(self.ranks == rank)
        return (
            self.layouts[self.layout_of[writer[0]]]
            if len(writer)
            else layout_of(np.zeros((4, 0), np.int64))
        )

    @staticmethod
    def from_bytes(data: bytes | memoryview | mmap) -> Catalog:
        """Read what `to_bytes` wrote; nothing of `data` is kept.

        Args:
            data: The content of a catalog's file.

        Returns:
            A catalog without contradictions: no index in it is out of range.

        Raises:
            ManifestInvalid: The data isn't a catalog, or it is damaged.
        """
        packed = unpack(data, (VERSION, SHARED_VERSION))
        try:
            names, paths = unpack_texts(packed)
            catalog = Catalog(
                names=names,
                paths=paths,
                table=tuple(_read(one) for one in packed.facts["table"]),
                layouts=_layouts(packed.columns),
                planner_pickle=packed.blobs["planner_pickle"],
                **_columns(packed, len(memoryview(data))),
            )
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise ManifestInvalid(
                f"a catalog can't be read: {type(error).__name__}: {error}"
            ) from None
        _refuse_contradictions(catalog)
        return catalog


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SharedCatalog:
    """A catalog to be written down whose rows are runs, which entries share.

    It is for jobs of many ranks: their rows would take a thousand times as much. What
    `Catalog.from_bytes` makes of it has the rows.

    Attributes:
        boxes: The runs of offsets and extents.
        places: The runs of writers and numbers.
        offset_runs: Of each entry: the runs of its rows' offsets, int64[entries, width].
        extent_runs: Of each entry: the runs of its rows' extents, int64[entries, width].
        writer_runs: Of each entry: the run of its rows' writers.
        number_runs: Of each entry: the run of its rows' numbers.

    All others are those of a `Catalog`.
    """

    names: Sequence[str]
    paths: Sequence[Path | None] | None
    table: Sequence[Properties]
    name: Ints
    properties: Ints
    dimensions: Ints
    size: Ints
    boxes: RunPool
    places: RunPool
    offset_runs: Ints
    extent_runs: Ints
    writer_runs: Ints
    number_runs: Ints
    ranks: Ints
    layout_of: Ints
    layouts: Sequence[Layout]

    def to_bytes(self) -> bytes:
        """Return the catalog as a file, the same for the same content."""
        named = (*_OF_ENTRIES, *_RUNS, *_OF_SEGMENTS)
        columns = {name: getattr(self, name) for name in named}
        runs = self.boxes.columns(_BOXES) | self.places.columns(_PLACES)
        rows = int(runs[f"{_PLACES}_length"][self.writer_runs].sum())
        room = {"room": bytes(rows // _ROWS_PER_BYTE)}
        return _packed(self, columns | runs, {"planner_pickle": b"", **room}, SHARED_VERSION)


def catalog_key(data: bytes | memoryview | mmap) -> str:
    """Return the name of a catalog, made from its content: 16 hex digits.

    Args:
        data: What `Catalog.to_bytes` returned.
    """
    return hashlib.sha256(data).hexdigest()[:16]


def catalog_named(key: str, data: bytes | mmap) -> Catalog:
    """Return the catalog with this key.

    Args:
        key: As `catalog_key` returned it.
        data: The catalog's file.

    Raises:
        ManifestInvalid: The bytes aren't those of this catalog.
    """
    if catalog_key(data) != key:
        raise ManifestInvalid(f"catalog {key} is damaged")
    return Catalog.from_bytes(data)


# -- as columns -----------------------------------------------------------------------------------


def _packed(
    catalog: Catalog | SharedCatalog,
    columns: Mapping[str, Ints],
    blobs: Mapping[str, bytes],
    version: int,
) -> bytes:
    """Return the file of a catalog with these columns and blobs."""
    texts = pack_texts(catalog.names, catalog.paths)
    layouts = {
        row: _joined([getattr(layout, row) for layout in catalog.layouts]) for row in _LAYOUT_ROWS
    }
    lengths = np.fromiter(map(len, catalog.layouts), np.int64, len(catalog.layouts))
    facts = {"table": [_written(one) for one in catalog.table]}
    columns = {**columns, **layouts, "layouts": lengths, **texts.columns}
    return pack(Packed(facts, columns, {**texts.blobs, **blobs}), version)


def _columns(packed: Packed, nbytes: int) -> dict[str, Ints]:
    """Return the columns of a catalog, of whose file so many bytes are there."""
    if _RUNS[0] not in packed.columns:
        return {name: packed.columns[name] for name in _COLUMNS}
    boxes, places = Runs(packed.columns, _BOXES), Runs(packed.columns, _PLACES)
    offsets, extents, writers, numbers = (packed.columns[name] for name in _RUNS)
    if offsets.ndim != 2 or offsets.shape != extents.shape or offsets.shape[1] > _MOST_DIMENSIONS:
        raise ValueError("runs of other dimensions")
    if not offsets.shape[:1] == writers.shape == numbers.shape == packed.columns["name"].shape:
        raise ValueError("runs of other entries")
    if not all(_within(one, 0, len(boxes.lengths) - 1) for one in (offsets, extents)) or not all(
        _within(one, 0, len(places.lengths) - 1) for one in (writers, numbers)
    ):
        raise ValueError("runs that aren't there")
    lengths = places.lengths[writers]
    # Before memory is taken for them; as floats, whose sum doesn't overflow.
    if float(lengths.sum(dtype=np.float64)) > _ROWS_PER_BYTE * nbytes:
        raise ValueError("more rows than a catalog of this size has")
    others = (places.lengths[numbers][:, None], boxes.lengths[offsets], boxes.lengths[extents])
    if not all((one == lengths[:, None]).all() for one in others):
        raise ValueError("runs of other lengths")
    rows = int(lengths.sum())
    return {
        **{name: packed.columns[name] for name in (*_OF_ENTRIES, *_OF_SEGMENTS)},
        "first": np.append(0, np.cumsum(lengths)),
        "offset": _side_by_side(boxes, offsets, rows),
        "extent": _side_by_side(boxes, extents, rows),
        "writer": places.joined(writers),
        "number": places.joined(numbers),
    }


def _side_by_side(runs: Runs, numbers: Ints, rows: int) -> Ints:
    """Return int64[rows, width] of the runs of each entry's dimensions."""
    result = np.empty((rows, numbers.shape[1]), np.int64)
    for dimension, column in enumerate(numbers.T):
        result[:, dimension] = runs.joined(column)
    return result


# -- properties and layouts as JSON and columns ---------------------------------------------------


MEMORY_FORMATS = {
    "torch.contiguous_format": 0,
    "torch.channels_last": 1,
    "torch.preserve_format": 2,
}
"""Values of DCP's `_MEM_FORMAT_ENCODING`; it has no others."""
_NAME = re.compile(r"torch\.[A-Za-z0-9_]+")


def _written(one: Properties) -> list[Any]:
    return [one.dtype, one.layout, one.requires_grad, one.pin_memory, one.memory_format]


def _read(written: Sequence[Any]) -> Properties:
    dtype, layout, requires_grad, pin_memory, memory_format = written
    if memory_format not in MEMORY_FORMATS:
        raise ValueError(f"a memory format {memory_format!r}")
    for name in (dtype, layout):
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name of torch's")
    return Properties(
        dtype=dtype,
        layout=layout,
        requires_grad=bool(requires_grad),
        pin_memory=bool(pin_memory),
        memory_format=memory_format,
    )


def _joined(columns: Sequence[Ints]) -> Ints:
    return np.concatenate(columns) if columns else np.zeros(0, np.int64)


def _layouts(columns: Mapping[str, Ints]) -> list[Layout]:
    rows = np.stack([columns[row] for row in _LAYOUT_ROWS])
    offsets, lengths, payload_offsets, payload_nbytes = rows
    counts = columns["layouts"]
    if (
        rows.ndim != 2
        or counts.ndim != 1
        or not _within(counts, 0, rows.shape[1])
        or counts.sum() != rows.shape[1]
    ):
        raise ValueError("layouts of other lengths")
    if not _within(rows, -1, _MOST) or not _within(np.delete(rows, 2, axis=0), 0, _MOST):
        raise ValueError("layouts reach out of their segments")
    ends = payload_offsets + payload_nbytes
    inside = (payload_offsets >= offsets) & (ends <= offsets + lengths)
    if not (inside | (payload_offsets < 0)).all():
        raise ValueError("payloads reach out of their items")
    stops = np.cumsum(counts).tolist()
    return [layout_of(rows[:, start:stop].copy()) for start, stop in pairwise([0, *stops])]


# -- what is refused ------------------------------------------------------------------------------


def _refuse_contradictions(catalog: Catalog) -> None:
    problem = next(_contradictions(catalog), None)
    if problem is not None:
        raise ManifestInvalid(f"a catalog contradicts itself: {problem}")


def _contradictions(catalog: Catalog) -> Iterator[str]:
    """Yield what doesn't fit together; later checks assume that earlier ones found nothing."""
    if not _have_shapes(catalog):
        yield "its columns don't fit together"
    if catalog.paths is not None and (
        len(catalog.paths) != len(catalog.names) or catalog.planner_pickle
    ):
        yield "its planner data don't fit"
    if not _within(catalog.name, 0, len(catalog.names) - 1) or len(set(catalog.names)) != len(
        catalog.names
    ):
        yield "names"
    if not _within(catalog.properties, LOOSE_BYTES, len(catalog.table) - 1):
        yield "properties"
    if not _within(catalog.dimensions, 0, catalog.size.shape[1]):
        yield "dimensions"
    if not _are_distinct(catalog.name[catalog.properties >= BYTES]):
        yield "an entry occurs twice"
    if (catalog.first[0], catalog.first[-1]) != (0, len(catalog.writer)):
        yield "rows outside of its entries"
    counts = np.diff(catalog.first)
    is_bytes = (catalog.properties == BYTES) | (catalog.properties == LOOSE_BYTES)
    if (counts < 0).any() or (counts[is_bytes] > 1).any() or catalog.dimensions[is_bytes].any():
        yield "rows of its entries"
    if not all(
        _within(column, 0, _MOST) for column in (catalog.size, catalog.offset, catalog.extent)
    ):
        yield "sizes"
    if not _are_in_order(catalog):
        yield "order of its rows"
    if not _within(catalog.writer, -1, len(catalog.ranks) - 1) or not _within(
        catalog.number, -1, _MOST
    ):
        yield "writers"
    if ((catalog.number < 0) & (catalog.writer >= 0)).any():
        yield "items without a number"
    if not _within(catalog.ranks, 0, _MOST) or not _are_distinct(catalog.ranks):
        yield "ranks"
    if not _within(catalog.layout_of, 0, len(catalog.layouts) - 1):
        yield "layouts"


def _are_in_order(catalog: Catalog) -> bool:
    """Return whether the rows of each entry ascend by offset; several may have the same."""
    before, after = catalog.offset[:-1], catalog.offset[1:]
    if not after.size:
        return True
    decisive = (after != before).argmax(axis=1)[:, None]
    falls = np.take_along_axis(after < before, decisive, axis=1)[:, 0]
    begins = catalog.first[(catalog.first > 0) & (catalog.first < len(catalog.offset))]
    falls[begins - 1] = False
    return not falls.any()


def _have_shapes(catalog: Catalog) -> bool:
    entries, rows, writers = (
        catalog.name.shape[:1],
        catalog.writer.shape[:1],
        catalog.ranks.shape[:1],
    )
    if catalog.size.ndim != 2 or catalog.first.ndim != 1 or not (entries and rows and writers):
        return False
    width = catalog.size.shape[1:]
    if width > (_MOST_DIMENSIONS,):
        return False
    return (
        {catalog.name.shape, catalog.properties.shape, catalog.dimensions.shape} == {entries}
        and catalog.size.shape == (*entries, *width)
        and catalog.first.shape == (entries[0] + 1,)
        and {catalog.offset.shape, catalog.extent.shape} == {(*rows, *width)}
        and {catalog.writer.shape, catalog.number.shape} == {rows}
        and {catalog.ranks.shape, catalog.layout_of.shape} == {writers}
    )


def _are_distinct(column: Ints) -> bool:
    # Not np.unique: it imports 10 ms of NumPy when it is first called.
    return not (np.diff(np.sort(column)) == 0).any()


def _within(column: Ints, least: int, most: int) -> bool:
    return bool(((least <= column) & (column <= most)).all())
