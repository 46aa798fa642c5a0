"""The catalog: everything that DCP's `Metadata` says of a checkpoint, as columns.

One catalog describes all saves of one plan. It is written once, under a name made from its content,
and linked beside every checkpoint. What differs from save to save (the save id, and where the items
in the tails lie) stands in the manifest.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, pairwise
from mmap import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

from dcp_mem.common.sendable import sendable
from dcp_mem.common.value_class import value_class
from dcp_mem.errors import ManifestInvalid
from dcp_mem.format.column_file import Ints as Ints
from dcp_mem.format.column_file import Packed, distinct_rows, matrix, pack, unpack
from dcp_mem.format.layout import NO_LAYOUT, Layout, layout_of, refuse_outside
from dcp_mem.format.shared_runs import RunPool, Runs, read_runs

VERSION = 4
Path = tuple[str | int, ...]
Extent = tuple[int, int]
"""(offset, length) of an item in its segment."""
Tails = Mapping[int, Sequence[Extent]]
"""By rank, the extents of the items that lie behind the layout of its segment."""
BYTES = -1
"""In `Catalog.properties`, in place of a number: the entry is a byte item."""
LOOSE_CHUNKS, LOOSE_BYTES = -2, -3
"""In place of a number: an entry that isn't in DCP's metadata, though its items were written.

Its items are chunks, or a byte item. Only custom planners make such entries. The entry's
`dimensions` counts; its size and its rows' extents mean nothing.
"""
_MOST_DIMENSIONS = 64
_MOST = (1 << 62) - 1
"""The largest size or offset: the sum of two of them doesn't overflow."""
_ENTRIES = ("name", "properties", "dimensions", "writer_runs", "number_runs", "first_number")
_SIDES = ("size", "offset_runs", "extent_runs")
_SEGMENTS = ("ranks", "layout_of")
_BOXES, _PLACES = "boxes", "places"
_FROM_RIGHT = 1 << 16
_ROWS_PER_BYTE = 256
"""The most rows for each byte of a catalog's file; zeros make it long enough."""
_ROWS_AT_ONCE = 1 << 20
"""Rows that are looked at at once while a catalog is checked."""


@sendable
@value_class(kw_only=True)
class Properties:
    """DCP's properties of a tensor besides its shape; torch's values as text ("torch.float32").

    So the agent reads catalogs without torch, and an older torch can read those of a newer one.
    """

    dtype: str
    layout: str
    requires_grad: bool
    pin_memory: bool
    memory_format: str = "torch.contiguous_format"


@value_class(eq=False, kw_only=True)
class Rows:
    """Rows of a catalog as columns, entry after entry."""

    first: Ints  # int64[entries + 1]; the rows of entry i are first[i] to first[i + 1]
    offset: Ints  # of each row: int64[rows, width], padded with 0
    extent: Ints  # of each row: int64[rows, width], padded with 1
    writer: Ints  # of each row: index in `ranks` of the rank that wrote it; -1 where none has
    # of each row: which item of the writer's segment it is, counted in the order of the layout, and
    # then on through the tail
    number: Ints


@value_class(kw_only=True, eq=False, frozen=True, slots=False)
class Catalog:
    """The contents of a checkpoint, as columns of entries and rows.

    An entry is a name of DCP's metadata; each of its rows is one item. The rows of an entry are
    adjacent, in the lexicographic order of their offsets. `width` is the largest number of
    dimensions. Rows are kept as runs, which entries share; there may be a thousand times as many
    rows as runs, so loads ask for single ones (`writers_at`), and columns of all rows are made when
    they are first asked for.
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
    boxes: Runs  # offsets and extents
    places: Runs  # writers and numbers
    offset_runs: Ints  # of each entry: the runs of its rows' offsets, int64[entries, width]
    extent_runs: Ints  # of each entry: the runs of its rows' extents, int64[entries, width]
    writer_runs: Ints  # of each entry: the run of its rows' writers
    number_runs: Ints  # of each entry: the run of its rows' numbers, counted from the first one
    first_number: Ints  # of each entry: the number of its first row
    ranks: Ints
    layout_of: Ints  # of each writer: index in `layouts` of its segment's layout
    layouts: Sequence[Layout]
    # planner data of a custom planner, pickled with protocol 3, the last without frames: one such
    # pickle can be part of another; b"" where `paths` holds all of it, or there is none
    planner_pickle: bytes = b""

    def entry_names(self) -> list[str]:
        """Return the names that DCP's metadata has an entry for."""
        return list(map(self.names.__getitem__, self.name[self.properties >= BYTES].tolist()))

    def entry_of_row(self) -> Ints:
        """Return, for each row, the number of its entry."""
        return np.repeat(np.arange(len(self.name)), np.diff(self.first))

    def has_offset(self) -> npt.NDArray[np.bool_]:
        """Return, for each entry, whether the indexes of its rows in DCP have an offset."""
        found: npt.NDArray[np.bool_] = (self.properties >= 0) | (self.properties == LOOSE_CHUNKS)
        return found

    def to_bytes(self) -> bytes:
        """Return the catalog as a file, the same for the same content."""
        facts = {
            "table": [_written(one) for one in self.table],
            "names": list(self.names),
            "paths": None
            if self.paths is None
            else [_cut(*one) for one in zip(self.names, self.paths, strict=True)],
        }
        columns = {
            "entries": np.stack([getattr(self, name) for name in _ENTRIES]),
            "sides": np.stack([getattr(self, name) for name in _SIDES]),
            "segments": np.stack([getattr(self, name) for name in _SEGMENTS]),
            "items": np.concatenate([one.columns for one in (NO_LAYOUT, *self.layouts)], axis=1),
            "layouts": np.fromiter(map(len, self.layouts), np.int64, len(self.layouts)),
            **self.boxes.columns(_BOXES),
            **self.places.columns(_PLACES),
        }
        room = bytes(int(self.first[-1]) // _ROWS_PER_BYTE)
        return pack(
            Packed(facts, columns, {"planner_pickle": self.planner_pickle, "room": room}), VERSION
        )

    def layout(self, rank: int) -> Layout:
        """Return the layout of a rank's segment; an empty one where the catalog has none."""
        writer = np.flatnonzero(self.ranks == rank)
        return self.layouts[self.layout_of[writer[0]]] if len(writer) else NO_LAYOUT

    @staticmethod
    def from_bytes(data: bytes | memoryview | mmap) -> Catalog:
        """Read what `to_bytes` wrote; nothing of `data` is kept.

        Returns a catalog without contradictions: no index in it is out of range. Raises
        ManifestInvalid.
        """
        packed = unpack(data, VERSION)
        try:
            catalog = _unpacked(packed)
            _refuse_other_runs(catalog, len(memoryview(data)))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ManifestInvalid(
                f"a catalog can't be read: {type(error).__name__}: {error}"
            ) from None
        _refuse_contradictions(catalog)
        return catalog

    # -- rows ---------------------------------------------------------------------------------

    @cached_property
    def first(self) -> Ints:
        """Of each entry, where its rows begin; and where the last one's end."""
        return np.append(0, np.cumsum(self.places.lengths[self.writer_runs]))

    @cached_property
    def offset(self) -> Ints:
        entry, row = self._places_of_rows
        return self.boxes.at(self.offset_runs[entry], row[:, None])

    @cached_property
    def extent(self) -> Ints:
        entry, row = self._places_of_rows
        return self.boxes.at(self.extent_runs[entry], row[:, None])

    @cached_property
    def writer(self) -> Ints:
        return self.writers_at(*self._places_of_rows)

    @cached_property
    def number(self) -> Ints:
        return self.numbers_at(*self._places_of_rows)

    @cached_property
    def _places_of_rows(self) -> tuple[Ints, Ints]:
        """Of each row, its entry, and which of that entry's rows it is."""
        return self.entry_of_row(), counted(np.diff(self.first))

    def boxes_of(self, entry: int) -> tuple[Ints, Ints]:
        """Return offsets and extents of an entry's rows: int64[rows, width] each."""
        row = np.arange(int(self.first[entry + 1] - self.first[entry]))[:, None]
        offset_runs, extent_runs = self.offset_runs[entry], self.extent_runs[entry]
        return self.boxes.at(offset_runs[None], row), self.boxes.at(extent_runs[None], row)

    def writers_at(self, entry: Ints, row: Ints) -> Ints:
        """Return the writers of some rows: of each, its entry, and which of that's rows it is."""
        return self.places.at(self.writer_runs[entry], row)

    def numbers_at(self, entry: Ints, row: Ints) -> Ints:
        """Return the numbers of some rows; the arguments are those of `writers_at`."""
        return self.first_number[entry] + self.places.at(self.number_runs[entry], row)

    def most_numbers(self) -> Ints:
        """Return the largest number of each writer's rows; -1 for a writer without any."""
        most = np.full(len(self.ranks), -1)
        order = np.lexsort((self.first_number, self.number_runs, self.writer_runs))
        runs = np.stack([self.writer_runs, self.number_runs])[:, order]
        is_last = np.append((np.diff(runs) != 0).any(axis=0), True)[: len(order)]
        for entry in order[is_last].tolist():
            writer = self.places.run(int(self.writer_runs[entry]))
            number = self.places.run(int(self.number_runs[entry])) + self.first_number[entry]
            np.maximum.at(most, writer[writer >= 0], number[writer >= 0])
        return most


def catalog_of_rows(rows: Rows, **others: Any) -> Catalog:
    """Return the catalog with these rows; `others` are its other fields, runs apart.

    Raises ManifestInvalid where these contradict each other.
    """
    boxes, places = RunPool(), RunPool()
    offsets, extents = (
        [boxes.add_rows(column, rows.first) for column in columns.T]
        for columns in (rows.offset, rows.extent)
    )
    shape = rows.offset.shape[1], len(rows.first) - 1
    first_number, number_runs = places.add_counted(rows.number, rows.first)
    catalog = Catalog(
        offset_runs=np.array(offsets, np.int64).reshape(shape).T,
        extent_runs=np.array(extents, np.int64).reshape(shape).T,
        writer_runs=places.add_rows(rows.writer, rows.first),
        number_runs=number_runs,
        first_number=first_number,
        boxes=boxes.runs(),
        places=places.runs(),
        **others,
    )
    _refuse_contradictions(catalog)
    return catalog


def counted(counts: Ints) -> Ints:
    """Return 0, 1, ... for each of these counts, one after the other."""
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)


def portions(counts: Ints, most: int) -> list[slice]:
    """Cut these counts into slices of about `most` together; all could be too many for memory."""
    portion = (np.cumsum(counts) - counts) // most
    cuts = (np.flatnonzero(np.diff(portion)) + 1).tolist()
    return [slice(start, stop) for start, stop in pairwise([0, *cuts, len(counts)])]


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


# -- as a file ------------------------------------------------------------------------------------


def _unpacked(packed: Packed) -> Catalog:
    """Return the catalog that a file has.

    Raises KeyError, TypeError, ValueError.
    """
    columns, names = packed.columns, packed.facts["names"]
    if not {str}.issuperset(map(type, names)):
        raise ValueError("names that are no text")
    entries, sides = matrix(columns, "entries", len(_ENTRIES)), columns["sides"]
    if sides.shape[:2] != (len(_SIDES), entries.shape[1]) or sides.ndim != len(_SIDES):
        raise ValueError("sides of other entries")
    return Catalog(
        names=names,
        paths=_paths(names, packed.facts["paths"]),
        table=tuple(map(_read, packed.facts["table"])),
        layouts=_layouts(matrix(columns, "items", 4), columns["layouts"]),
        planner_pickle=packed.blobs["planner_pickle"],
        boxes=read_runs(columns, _BOXES),
        places=read_runs(columns, _PLACES),
        **dict(zip(_ENTRIES, entries, strict=True)),
        **dict(zip(_SIDES, sides, strict=True)),
        **dict(zip(_SEGMENTS, matrix(columns, "segments", len(_SEGMENTS)), strict=True)),
    )


def _refuse_other_runs(catalog: Catalog, nbytes: int) -> None:
    """Raise ValueError where the runs of a file of so many bytes don't fit together."""
    boxes, places = catalog.boxes.lengths, catalog.places.lengths
    offsets, extents = catalog.offset_runs, catalog.extent_runs
    writers, numbers = catalog.writer_runs, catalog.number_runs
    of_boxes, of_places = len(boxes) - 1, len(places) - 1
    if not (_within(offsets, 0, of_boxes) and _within(extents, 0, of_boxes)) or not (
        _within(writers, 0, of_places) and _within(numbers, 0, of_places)
    ):
        raise ValueError("runs that aren't there")
    lengths = places[writers]
    # Before memory is taken for them; as floats, whose sum doesn't overflow.
    if float(lengths.sum(dtype=np.float64)) > _ROWS_PER_BYTE * nbytes:
        raise ValueError("more rows than a catalog of this size has")
    others = np.stack([places[numbers], *boxes[offsets].T, *boxes[extents].T])
    if (others != lengths).any():
        raise ValueError("runs of other lengths")


class _Paths(Sequence[Path | None]):
    """The paths of names, made when one is first needed: few loads look at them."""

    def __init__(self, names: Sequence[str], written: Sequence[Any]) -> None:
        self._names, self._written = names, written

    @cached_property
    def _made(self) -> list[Path | None]:
        cuts = zip(self._names, self._written, strict=True)
        return [
            _split(name, cut) if type(cut) is int else None if cut is None else tuple(cut)
            for name, cut in cuts
        ]

    def __len__(self) -> int:
        return len(self._written)

    def __iter__(self) -> Iterator[Path | None]:
        return iter(self._made)

    def __getitem__(self, index: Any) -> Any:
        return self._made[index]


def _cut(name: str, path: Path | None) -> Any:
    """Return a path as a file has it: a number that `_split` takes, where one makes the path."""
    if not path:
        return path
    at = next((n for n, part in enumerate(path) if "." in str(part)), len(path) - 1)
    cut = at + _FROM_RIGHT * (len(path) - 1 - at)
    return cut if path == _split(name, cut) else path


def _split(name: str, cut: int) -> Path:
    """Return a name cut at its first dots and its last ones: how many of each, in one number."""
    *first, rest = name.split(".", cut % _FROM_RIGHT)
    return (*first, *rest.rsplit(".", cut // _FROM_RIGHT))


def _paths(names: Sequence[str], written: Any) -> _Paths | None:
    if written is None:
        return None
    cuts = [one for one in written if type(one) is int]
    others = [one for one in written if type(one) is list]
    if len(cuts) + len(others) + written.count(None) != len(written):
        raise ValueError("paths of another form")
    if not 0 <= min(cuts, default=0) <= max(cuts, default=0) < _FROM_RIGHT**2:
        raise ValueError("paths of too many parts")
    if not {str, int}.issuperset(map(type, chain.from_iterable(others))):
        raise ValueError("a path of something else than text and numbers")
    return _Paths(names, written)


MEMORY_FORMATS = {
    "torch.contiguous_format": 0,
    "torch.channels_last": 1,
    "torch.preserve_format": 2,
}
"""Values of DCP's `_MEM_FORMAT_ENCODING`; it has no others."""
_NAME = r"torch\.[A-Za-z0-9_]+"


def _written(one: Properties) -> list[Any]:
    return [one.dtype, one.layout, one.requires_grad, one.pin_memory, one.memory_format]


def _read(written: Sequence[Any]) -> Properties:
    dtype, layout, requires_grad, pin_memory, memory_format = written
    if memory_format not in MEMORY_FORMATS:
        raise ValueError(f"a memory format {memory_format!r}")
    for name in (dtype, layout):
        if not re.fullmatch(_NAME, name):
            raise ValueError(f"{name!r} is no name of torch's")
    return Properties(
        dtype=dtype,
        layout=layout,
        requires_grad=bool(requires_grad),
        pin_memory=bool(pin_memory),
        memory_format=memory_format,
    )


def _layouts(items: Ints, counts: Ints) -> list[Layout]:
    stops = np.cumsum(counts)
    if not _within(counts, 0, items.shape[1]) or stops[-1:].sum() != items.shape[1]:
        raise ValueError("layouts of other lengths")
    refuse_outside(items)
    return [layout_of(items[:, start:stop]) for start, stop in pairwise([0, *stops.tolist()])]


# -- what is refused ------------------------------------------------------------------------------


def _refuse_contradictions(catalog: Catalog) -> None:
    """Raise ManifestInvalid where an index would be out of range, or something occurs twice."""
    problem = next(_contradictions(catalog), None)
    if problem is not None:
        raise ManifestInvalid(f"a catalog contradicts itself: {problem}")


def _contradictions(catalog: Catalog) -> Iterator[str]:
    """Yield what doesn't fit together; later checks assume that earlier ones found nothing."""
    names, paths, ranks, kinds = catalog.names, catalog.paths, catalog.ranks, catalog.properties
    if paths is not None and (len(paths) != len(names) or catalog.planner_pickle):
        yield "its planner data don't fit"
    if not _within(catalog.name, 0, len(names) - 1) or len(set(names)) != len(names):
        yield "names"
    if not _within(kinds, LOOSE_BYTES, len(catalog.table) - 1):
        yield "properties"
    if not _within(catalog.dimensions, 0, min(catalog.size.shape[1], _MOST_DIMENSIONS)):
        yield "dimensions"
    if not _are_distinct(catalog.name[kinds >= BYTES]):
        yield "an entry occurs twice"
    is_bytes = (kinds == BYTES) | (kinds == LOOSE_BYTES)
    if (np.diff(catalog.first)[is_bytes] > 1).any() or catalog.dimensions[is_bytes].any():
        yield "rows of its entries"
    if not _within(catalog.size, 0, _MOST) or not _within(catalog.boxes.bounds, 0, _MOST):
        yield "sizes"
    if not _within(ranks, 0, _MOST) or not _are_distinct(ranks):
        yield "ranks"
    if not _within(catalog.layout_of, 0, len(catalog.layouts) - 1):
        yield "layouts"
    bounds, first = catalog.places.bounds, catalog.first_number
    if not _within(bounds[:, catalog.writer_runs], -1, len(ranks) - 1):
        yield "writers"
    if not _within(first, -1, _MOST) or not _within(
        bounds[:, catalog.number_runs] + first, -1, _MOST
    ):
        yield "numbers"
    counts = np.diff(catalog.first)
    for entry, row in _rows_of_some(counts, counts > 1, catalog.offset_runs):
        offset = catalog.boxes.at(catalog.offset_runs[entry], row[:, None])
        if not _are_in_order(offset, row):
            yield "order of its rows"
    lacks = first + bounds[0, catalog.number_runs] < 0
    for entry, row in _rows_of_some(counts, lacks, catalog.writer_runs, catalog.number_runs, first):
        if (catalog.numbers_at(entry, row)[catalog.writers_at(entry, row) >= 0] < 0).any():
            yield "items without a number"


def _rows_of_some(
    counts: Ints, is_wanted: npt.NDArray[np.bool_], *facts: Ints
) -> Iterator[tuple[Ints, Ints]]:
    """Yield entry and row of the rows of wanted entries, one of those with equal facts each.

    Few rows are made at once.
    """
    entries = np.flatnonzero(is_wanted)
    kinds = np.column_stack([counts, *facts])[entries]
    entries = np.sort(entries[distinct_rows(kinds)[0]])
    counts = counts[entries]
    for part in portions(counts, _ROWS_AT_ONCE):
        yield np.repeat(entries[part], counts[part]), counted(counts[part])


def _are_in_order(offset: Ints, row: Ints) -> bool:
    """Return whether rows ascend by offset, anew from each row 0; several may have the same."""
    before, after = offset[:-1], offset[1:]
    if not after.size:
        return True
    decisive = (after != before).argmax(axis=1)[:, None]
    falls = np.take_along_axis(after < before, decisive, axis=1)[:, 0]
    return not falls[row[1:] > 0].any()


def _are_distinct(column: Ints) -> bool:
    # Not np.unique: it imports 10 ms of NumPy when it is first called.
    return not (np.diff(np.sort(column)) == 0).any()


def _within(column: Ints, least: int, most: int) -> bool:
    """Return whether all integers of a column are in a range, both ends included."""
    return bool(column.min(initial=least) >= least and column.max(initial=most) <= most)
