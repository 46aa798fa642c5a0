"""The catalog: everything that DCP's `Metadata` says of a checkpoint, as columns.

One catalog describes all saves of one plan. It is written once, under a name made from its content,
and linked beside every checkpoint. What differs from save to save (the save id, and where the items
in the tails lie) stands in the manifest.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from mmap import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

from dcp_mem.common.sendable import sendable
from dcp_mem.errors import ManifestInvalid
from dcp_mem.format.catalog_checks import BYTES as BYTES
from dcp_mem.format.catalog_checks import LOOSE_BYTES as LOOSE_BYTES
from dcp_mem.format.catalog_checks import LOOSE_CHUNKS as LOOSE_CHUNKS
from dcp_mem.format.catalog_checks import (
    MOST,
    MOST_DIMENSIONS,
    contradictions_of_entries,
    contradictions_of_rows,
    within,
)
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
_ROWS_AT_ONCE = 1 << 20
"""Rows that are looked at at once while a catalog of runs is checked."""


@sendable
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
    """

    names: Sequence[str]
    # The path of each name, as in DCP's planner data, None where a name has none. None as a whole
    # where there is no planner data, or none of this form (see `planner_pickle`).
    paths: Sequence[Path | None] | None
    table: Sequence[Properties]
    name: Ints  # of each entry, in the order of DCP's metadata: index in `names`
    properties: Ints  # of each entry: index in `table`, or BYTES, LOOSE_CHUNKS or LOOSE_BYTES
    dimensions: Ints
    size: Ints  # of each entry: int64[entries, width], padded with 1
    first: Ints  # int64[entries + 1]; the rows of entry i are first[i] to first[i + 1]
    offset: Ints  # of each row: int64[rows, width], padded with 0
    extent: Ints  # of each row: int64[rows, width], padded with 1
    writer: Ints  # of each row: index in `ranks` of the rank that wrote it; -1 where none has
    # of each row: which item of the writer's segment it is, counted in the order of the layout, and
    # then on through the tail
    number: Ints
    ranks: Ints
    layout_of: Ints  # of each writer: index in `layouts` of its segment's layout
    layouts: Sequence[Layout]
    # planner data of a custom planner, pickled with protocol 3 or later; b"" where `paths` holds
    # all of it, or there is none
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

        Raises ManifestInvalid.
        """
        _refuse_contradictions(self)
        columns = {name: getattr(self, name) for name in _COLUMNS}
        return _packed(self, columns, {"planner_pickle": self.planner_pickle}, VERSION)

    def layout(self, rank: int) -> Layout:
        """Return the layout of a rank's segment; an empty one where the catalog has none."""
        writer = np.flatnonzero(self.ranks == rank)
        return (
            self.layouts[self.layout_of[writer[0]]]
            if len(writer)
            else layout_of(np.zeros((4, 0), np.int64))
        )

    @staticmethod
    def from_bytes(data: bytes | memoryview | mmap) -> Catalog:
        """Read what `to_bytes` wrote; nothing of `data` is kept.

        Returns a catalog without contradictions: no index in it is out of range. Raises
        ManifestInvalid.
        """
        packed = unpack(data, (VERSION, SHARED_VERSION))
        try:
            catalog = _unpacked(packed, len(memoryview(data)))
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise ManifestInvalid(
                f"a catalog can't be read: {type(error).__name__}: {error}"
            ) from None
        _refuse_contradictions(catalog)
        return catalog


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RunCatalog(Catalog):
    """A catalog that was written down as runs, and whose rows are made only when they are needed.

    The columns of its rows are made as a whole when they are first asked for. They may be a
    thousand times as large as all the rest, so loads ask for single rows (`with_rows`).

    Attributes:
        boxes: The runs of offsets and extents.
        places: The runs of writers and numbers.
        offset_runs: As of a `SharedCatalog`.
        extent_runs: Likewise.
        writer_runs: Likewise.
        number_runs: Likewise.

    All others are those of a `Catalog`.
    """

    offset: Ints = field(init=False)
    extent: Ints = field(init=False)
    writer: Ints = field(init=False)
    number: Ints = field(init=False)
    boxes: Runs
    places: Runs
    offset_runs: Ints
    extent_runs: Ints
    writer_runs: Ints
    number_runs: Ints

    def __getattr__(self, name: str) -> Ints:
        """Make a column of rows, which isn't there yet."""
        if name == "offset":
            made = self._side_by_side(self.offset_runs)
        elif name == "extent":
            made = self._side_by_side(self.extent_runs)
        elif name in ("writer", "number"):
            made = self.places.joined(self.writer_runs if name == "writer" else self.number_runs)
        else:
            raise AttributeError(name)
        object.__setattr__(self, name, made)
        return made

    def _side_by_side(self, numbers: Ints) -> Ints:
        result = np.empty((int(self.first[-1]), numbers.shape[1]), np.int64)
        for dimension, column in enumerate(numbers.T):
            result[:, dimension] = self.boxes.joined(column)
        return result

    def with_rows(self, entry: Ints, row: Ints) -> Catalog:
        """Return the catalog without its other rows.

        `entry`: of each row that stays: its entry; ascending. `row`: of each: which of its entry's
        rows it is; ascending within each entry.
        """
        return Catalog(
            names=self.names,
            paths=self.paths,
            table=self.table,
            name=self.name,
            properties=self.properties,
            dimensions=self.dimensions,
            size=self.size,
            first=np.searchsorted(entry, np.arange(len(self.name) + 1)),
            offset=self._boxes_at(self.offset_runs[entry], row),
            extent=self._boxes_at(self.extent_runs[entry], row),
            writer=self.places.at(self.writer_runs[entry], row),
            number=self.places.at(self.number_runs[entry], row),
            ranks=self.ranks,
            layout_of=self.layout_of,
            layouts=self.layouts,
            planner_pickle=self.planner_pickle,
        )

    def boxes_of(self, entry: int) -> tuple[Ints, Ints]:
        """Return offsets and extents of an entry's rows: int64[rows, width] each."""
        row = np.arange(int(self.first[entry + 1] - self.first[entry]))
        one = np.full(len(row), entry)
        return self._boxes_at(self.offset_runs[one], row), self._boxes_at(
            self.extent_runs[one], row
        )

    def _boxes_at(self, runs: Ints, row: Ints) -> Ints:
        """Return int64[rows, width] of these runs of dimensions, int64[rows, width], at `row`."""
        result = np.empty(runs.shape, np.int64)
        for dimension, column in enumerate(runs.T):
            result[:, dimension] = self.boxes.at(column, row)
        return result

    def alike(self, *further: Ints) -> tuple[Ints, Ints]:
        """Tell which entries have the same boxes in the same order.

        `further`: columns of entries, in which they are to be the same too. Returns of each kind of
        entries, the first one; of each entry, the number of its kind.
        """
        counts = np.diff(self.first)
        keys = np.column_stack([counts, self.offset_runs, self.extent_runs, *further])
        _, specimen, kind = np.unique(keys, axis=0, return_index=True, return_inverse=True)
        return specimen, kind.reshape(-1)

    def specimens(self) -> Iterator[Catalog]:
        """Yield the rows of this catalog, those apart of which others differ in numbers alone.

        What holds for these rows, numbers apart, holds for all. Few of them are made at once.
        """
        least, _ = self.places.bounds(self.number_runs)
        entries, _ = self.alike(self.writer_runs, np.where(least < 0, self.number_runs, -1))
        entries.sort()
        counts = np.diff(self.first)[entries]
        portion = np.cumsum(counts) // _ROWS_AT_ONCE
        for number in dict.fromkeys(portion.tolist()):
            of_portion = portion == number
            entry = np.repeat(entries[of_portion], counts[of_portion])
            yield self.with_rows(entry, _counted(counts[of_portion]))

    def most_numbers(self) -> Ints:
        """Return the largest number of each writer's rows; -1 for a writer without any."""
        most = np.full(len(self.ranks), -1)
        order = np.argsort(self.writer_runs, kind="stable")
        writers = self.writer_runs[order]
        for of_writers in np.split(order, np.flatnonzero(np.diff(writers)) + 1):
            if not len(of_writers):
                continue
            (run,) = self.writer_runs[of_writers[:1]]
            writer = self.places.run(int(run))
            highest = np.full(len(writer), -1)
            for number in dict.fromkeys(self.number_runs[of_writers].tolist()):
                np.maximum(highest, self.places.run(number), out=highest)
            np.maximum.at(most, writer[writer >= 0], highest[writer >= 0])
        return most


def _counted(counts: Ints) -> Ints:
    """Return 0, 1, ... for each of these counts, one after the other."""
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SharedCatalog:
    """A catalog to be written down whose rows are runs, which entries share.

    It is for jobs of many ranks: their rows would take a thousand times as much.
    `Catalog.from_bytes` makes a `RunCatalog` of it.

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
    """Return the name of a catalog, made from its content: 16 hex digits."""
    return hashlib.sha256(data).hexdigest()[:16]


def catalog_named(key: str, data: bytes | mmap) -> Catalog:
    """Return the catalog with this key.

    Raises ManifestInvalid.
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


def _unpacked(packed: Packed, nbytes: int) -> Catalog:
    """Return the catalog that a file of so many bytes has."""
    names, paths = unpack_texts(packed)
    parts: dict[str, Any] = {
        "names": names,
        "paths": paths,
        "table": tuple(_read(one) for one in packed.facts["table"]),
        "layouts": _layouts(packed.columns),
        "planner_pickle": packed.blobs["planner_pickle"],
    }
    if _RUNS[0] not in packed.columns:
        parts |= {name: packed.columns[name] for name in _COLUMNS}
        return Catalog(**parts)
    parts |= {name: packed.columns[name] for name in (*_OF_ENTRIES, *_RUNS, *_OF_SEGMENTS)}
    lengths, boxes, places = _lengths_of_runs(packed.columns, nbytes)
    first = np.append(0, np.cumsum(lengths))
    return RunCatalog(**parts, first=first, boxes=boxes, places=places)


def _lengths_of_runs(columns: Mapping[str, Ints], nbytes: int) -> tuple[Ints, Runs, Runs]:
    """Return the number of rows of each entry, and the runs of boxes and places."""
    boxes, places = Runs(columns, _BOXES), Runs(columns, _PLACES)
    offsets, extents, writers, numbers = (columns[name] for name in _RUNS)
    if offsets.ndim != 2 or offsets.shape != extents.shape or offsets.shape[1] > MOST_DIMENSIONS:
        raise ValueError("runs of other dimensions")
    if offsets.shape != columns["size"].shape:
        raise ValueError("runs of other dimensions")
    if not offsets.shape[:1] == writers.shape == numbers.shape == columns["name"].shape:
        raise ValueError("runs of other entries")
    if not all(within(one, 0, len(boxes.lengths) - 1) for one in (offsets, extents)) or not all(
        within(one, 0, len(places.lengths) - 1) for one in (writers, numbers)
    ):
        raise ValueError("runs that aren't there")
    lengths = places.lengths[writers]
    # Before memory is taken for them; as floats, whose sum doesn't overflow.
    if float(lengths.sum(dtype=np.float64)) > _ROWS_PER_BYTE * nbytes:
        raise ValueError("more rows than a catalog of this size has")
    others = (places.lengths[numbers][:, None], boxes.lengths[offsets], boxes.lengths[extents])
    if not all((one == lengths[:, None]).all() for one in others):
        raise ValueError("runs of other lengths")
    return lengths, boxes, places


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
        or not within(counts, 0, rows.shape[1])
        or counts.sum() != rows.shape[1]
    ):
        raise ValueError("layouts of other lengths")
    if not within(rows, -1, MOST) or not within(np.delete(rows, 2, axis=0), 0, MOST):
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
    yield from contradictions_of_entries(catalog)
    if not isinstance(catalog, RunCatalog):
        yield from contradictions_of_rows(catalog)
        return
    if not within(catalog.places.bounds(catalog.number_runs), -1, MOST):
        yield "writers"
    for part in catalog.specimens():
        yield from contradictions_of_rows(part)
