"""The reads of one rank, found by joining its plan's columns with a catalog's.

What a plan wants are boxes of elements, and so is what a catalog has; a byte item is a box without
dimensions. The rows of a catalog's entry lie in the order of their offsets, so they are sorted by
the first dimension in which any two of them differ. In that dimension, bisection finds the range of
rows that may share an element with a wanted box; only these are compared in all dimensions.
Everything is done for all boxes at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from itertools import compress
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from dcp_mem.common.value_class import value_class
from dcp_mem.format.catalog import Catalog, Ints, Tails, counted, portions
from dcp_mem.format.column_file import distinct_rows
from dcp_mem.format.locations import LayoutItems
from dcp_mem.format.names import segment_file
from dcp_mem.format.torch_names import dtype_named
from dcp_mem.planning.entries import Casts, are_unlike, numbers_of
from dcp_mem.planning.plain_tensors import HOST, Sources, sources_of
from dcp_mem.planning.plan_columns import ItemKind, LocalPlan, widened
from dcp_mem.planning.reads import DirectRead, ItemRead, Reads

Bools = npt.NDArray[np.bool_]
Names = npt.NDArray[np.str_]
_NOT_PLAIN = -1
_NOWHERE = torch.Size((0,))
_ROWS_AT_ONCE = 1 << 17
"""Saved chunks that are looked up at once."""
_PAIRS_AT_ONCE = 1 << 20
"""Wanted and saved chunks that are compared at once."""


def find_reads(
    plan: LocalPlan,
    values: Sequence[Any],
    catalog: Catalog,
    save_id: str,
    tails: Tails,
    *,
    into_devices: bool = False,
) -> Reads | None:
    """Return what to read for a plan; None for what torch has to plan.

    Torch plans missing keys, entries of other kinds or sizes, items that were never written, and
    tensors on the meta device. Entries that the plan lacks aren't loaded.

    `values`: the value of each item of the plan: tensors to read into. `into_devices`: whether
    direct reads may go into the memory of CUDA devices.
    """
    entry = _entries(plan, catalog)
    places = None if entry is None else _places(plan, values, into_devices=into_devices)
    if entry is None or places is None:
        return None
    width = max(plan.size.shape[1], catalog.size.shape[1])
    wanted = _Boxes(entry, widened(plan.offset, width, 0), widened(plan.extent, width, 1))
    overlaps = _overlaps(wanted, catalog)
    found, needed = overlaps.extent.prod(axis=1).sum(), wanted.extent.prod(axis=1).sum()
    if (overlaps.writer < 0).any() or found < needed:
        return None
    addresses, devices = places
    return _Found(
        plan=plan,
        catalog=catalog,
        save_id=save_id,
        tails=tails,
        wanted=wanted,
        overlaps=overlaps,
        addresses=addresses,
        devices=devices,
    ).reads()


def _entries(plan: LocalPlan, catalog: Catalog) -> Ints | None:
    """Return each plan row's entry in the catalog; None if names, kinds or sizes differ."""
    found = numbers_of(plan.names, catalog)
    if (found < 0).any():
        return None
    entry = found[plan.name]
    return None if are_unlike(plan, np.arange(len(plan)), catalog, entry).any() else entry


def _places(
    plan: LocalPlan, values: Sequence[Any], *, into_devices: bool
) -> tuple[Ints, Ints] | None:
    """Return where each item's data lies: the address, and the number of its device.

    The address is `_NOT_PLAIN` for those that bytes can't be read into. None where one is on the
    meta device.
    """

    def places(found: Sources | None) -> tuple[Sequence[int], Sequence[int]] | None:
        if found is None or (found.devices is not None and not into_devices):
            return None
        return found.addresses, found.devices or [HOST] * len(found.addresses)

    addresses, devices = np.full(len(plan), _NOT_PLAIN), np.full(len(plan), HOST)
    is_tensor = plan.kind != ItemKind.OBJECT
    tensors = list(compress(values, is_tensor.tolist()))
    may_be_conj = any(dtype_named(one.dtype).is_complex for one in plan.table)
    found = places(sources_of(tensors, may_be_conj=may_be_conj))
    if found is None:
        each = [places(sources_of((one,))) or ([_NOT_PLAIN], [HOST]) for one in tensors]
        found = [address for (address,), _ in each], [device for _, (device,) in each]
    addresses[is_tensor], devices[is_tensor] = found
    if any(one.is_meta for one in compress(tensors, (addresses[is_tensor] == _NOT_PLAIN).tolist())):
        return None
    return addresses, devices


# -- what wanted and saved chunks have in common ---------------------------------------------------


@value_class(eq=False)
class _Boxes:
    """Boxes of elements of tensors, one row each."""

    entry: Ints  # of each: the tensor's entry of the catalog
    offset: Ints  # of each: int64[boxes, width], padded with 0
    extent: Ints  # of each: int64[boxes, width], padded with 1


@value_class(eq=False, kw_only=True)
class _Overlaps:
    """What wanted chunks and saved ones have in common, one row each, by wanted chunk."""

    wanted: Ints
    offset: Ints
    extent: Ints
    saved_offset: Ints
    saved_extent: Ints
    writer: Ints
    number: Ints


def _overlaps(wanted: _Boxes, catalog: Catalog) -> _Overlaps:
    """Return what a catalog's rows have in common with what is wanted.

    Entries with the same boxes are looked up together, so few rows are made at once, although the
    catalog may have millions.
    """
    counts, width = np.diff(catalog.first), wanted.offset.shape[1]
    boxes = np.column_stack([counts, catalog.offset_runs, catalog.extent_runs])
    entries = np.flatnonzero(np.bincount(wanted.entry, minlength=len(counts)))
    specimens, kind_of_entry = distinct_rows(boxes[entries])
    specimens, kinds = entries[specimens], np.empty(len(counts), np.int64)
    kinds[entries] = kind_of_entry
    kind = kinds[wanted.entry]
    found = []
    for part in portions(counts[specimens], _ROWS_AT_ONCE):
        of_part = np.flatnonzero((kind >= part.start) & (kind < part.stop))
        some = specimens[part]
        first = np.append(0, np.cumsum(counts[some]))
        number, row = np.repeat(some, counts[some]), counted(counts[some])
        saved = _Boxes(
            first,
            widened(catalog.boxes.at(catalog.offset_runs[number], row[:, None]), width, 0),
            widened(catalog.boxes.at(catalog.extent_runs[number], row[:, None]), width, 1),
        )
        box, at, *common = _in_common(
            _Boxes(kind[of_part] - part.start, wanted.offset[of_part], wanted.extent[of_part]),
            saved,
        )
        found.append((of_part[box], row[at], *common, saved.offset[at], saved.extent[at]))
    columns: tuple[Ints, ...] = found[0]
    if len(found) > 1:
        columns = tuple(np.concatenate(column) for column in zip(*found, strict=True))
        by_wanted = np.argsort(columns[0], kind="stable")
        columns = tuple(column[by_wanted] for column in columns)
    which, row, offset, extent, saved_offset, saved_extent = columns
    entry = wanted.entry[which]
    return _Overlaps(
        wanted=which,
        offset=offset,
        extent=extent,
        saved_offset=saved_offset,
        saved_extent=saved_extent,
        writer=catalog.writers_at(entry, row),
        number=catalog.numbers_at(entry, row),
    )


def _in_common(wanted: _Boxes, saved: _Boxes) -> tuple[Ints, ...]:
    """Return wanted box, saved box, offset and extent of every overlap, by wanted box.

    `saved`: by entry, and then by offset. Its `entry` says where each entry's boxes begin, and
    where the last one's end.
    """
    first = saved.entry
    along = _first_difference(saved.offset, first)
    entry = np.repeat(np.arange(len(along)), np.diff(first))
    rows = np.arange(len(entry)), along[entry]
    starts = saved.offset[rows]
    reach = _running_max(starts + saved.extent[rows], entry)
    number = np.arange(len(wanted.entry))
    start = wanted.offset[number, along[wanted.entry]]
    stop = start + wanted.extent[number, along[wanted.entry]]
    low, end = first[wanted.entry], first[wanted.entry + 1]
    low = _bisect(reach, low, end, start + 1)
    counts = np.maximum(_bisect(starts, low, end, stop) - low, 0)
    parts = []
    for part in portions(counts, _PAIRS_AT_ONCE):
        box = np.repeat(number[part], counts[part])
        row = counted(counts[part]) + np.repeat(low[part], counts[part])
        offset = np.maximum(wanted.offset[box], saved.offset[row])
        ends = [boxes.offset[at] + boxes.extent[at] for boxes, at in ((wanted, box), (saved, row))]
        extent = np.minimum(*ends) - offset
        keep = (extent > 0).all(axis=1)
        parts.append((box[keep], row[keep], offset[keep], extent[keep]))
    return tuple(np.concatenate(column) for column in zip(*parts, strict=True))


def _first_difference(offset: Ints, first: Ints) -> Ints:
    """Return the first dimension in which offsets of each entry's rows differ; 0 if none do."""
    if not len(offset) or not len(first) - 1:
        return np.zeros(len(first) - 1, np.int64)
    has_rows = np.flatnonzero(np.diff(first))
    starts = first[has_rows]
    differs = np.maximum.reduceat(offset, starts) != np.minimum.reduceat(offset, starts)
    along = np.zeros(len(first) - 1, np.int64)
    along[has_rows] = differs.argmax(axis=1)
    return along


def _running_max(values: Ints, entry: Ints) -> Ints:
    """Return the largest value so far, within each entry."""
    order = np.argsort(values, kind="stable")
    rank = np.empty(len(values), np.int64)
    rank[order] = np.arange(len(values))
    # Of ranks and not of values: values could overflow.
    start = entry * len(values)
    highest = np.maximum.accumulate(rank + start) - start
    result: Ints = values[order[highest]]
    return result


def _bisect(values: Ints, low: Ints, high: Ints, target: Ints) -> Ints:
    """Return the first index in [low, high) whose value is at least the target; high if none is."""
    low, high = low.copy(), high.copy()
    while (open_ := np.flatnonzero(low < high)).size:
        middle = (low[open_] + high[open_]) // 2
        below = values[middle] < target[open_]
        low[open_[below]] = middle[below] + 1
        high[open_[~below]] = middle[~below]
    return low


# -- the reads ------------------------------------------------------------------------------------


@value_class(kw_only=True, eq=False, frozen=True, slots=False)
class _Found:
    """A plan's items, each with its place in memory and its chunks in one save's segments."""

    plan: LocalPlan
    catalog: Catalog
    save_id: str
    tails: Tails
    wanted: _Boxes
    overlaps: _Overlaps
    # of each row of the plan: where its data lies, and the number of its CUDA device, or `HOST`
    addresses: Ints
    devices: Ints

    def reads(self) -> Reads:
        is_direct = self._are_direct()
        direct = np.flatnonzero(is_direct)
        payload_offset, payload_nbytes = self._payloads[:, direct]
        wanted = self.overlaps.wanted[direct]
        payloads = DirectRead(
            file=self.overlaps.writer[direct],
            address=self.addresses[wanted],
            offset=payload_offset,
            nbytes=payload_nbytes,
            device=self.devices[wanted],
        )
        is_on_host = is_direct & (self.devices[self.overlaps.wanted] == HOST)
        return Reads(
            files=self._files,
            payloads=payloads,
            rest=partial(self._items, is_direct),
            items_beside_host=partial(self._items, is_on_host),
            everything=partial(self._items, np.zeros_like(is_direct)),
            casts=self._casts(),
        )

    @cached_property
    def _files(self) -> list[str]:
        """Names of the segments, by writer."""
        return [segment_file(rank, self.save_id) for rank in self.catalog.ranks.tolist()]

    @cached_property
    def _places(self) -> LayoutItems:
        return LayoutItems(self.catalog)

    @cached_property
    def _kinds(self) -> Ints:
        """Of each overlap, the index of its tensor's properties in the catalog; negative: none."""
        return self.catalog.properties[self.wanted.entry[self.overlaps.wanted]]

    @cached_property
    def _dtypes(self) -> tuple[Names, Names]:
        """Of each overlap, the dtypes in which it was saved, and is loaded; "" for none."""
        saved, wanted = (
            np.array([*(one.dtype for one in table), ""])
            for table in (self.catalog.table, self.plan.table)
        )
        return saved[self._kinds], wanted[self.plan.properties[self.overlaps.wanted]]

    def _casts(self) -> Casts:
        """Return the tensors that are loaded in another dtype than they were saved in."""
        saved, wanted = self._dtypes
        cast = np.flatnonzero(saved != wanted)
        names = self.plan.name[self.overlaps.wanted[cast]].tolist()
        dtypes = zip(saved[cast].tolist(), wanted[cast].tolist(), strict=True)
        return dict(zip(map(self.plan.names.__getitem__, names), dtypes, strict=True))

    @cached_property
    def _payloads(self) -> Ints:
        """Of each overlap, offset and bytes of the saved payload; an offset of -1 for none."""
        found = self._places.find(self.overlaps.writer, self.overlaps.number)
        return self._places.columns[2:, found]

    def _are_direct(self) -> Bools:
        """Return, for each overlap, whether it can be a direct read.

        It can if a chunk is wanted just as it was saved, in memory that its bytes can be read into.
        """
        overlaps, saved = self.overlaps, self.catalog.table
        itemsize = np.array([*(dtype_named(one.dtype).itemsize for one in saved), 0], np.int64)
        payload_offset, payload_nbytes = self._payloads
        is_whole: Bools = (overlaps.extent == self.wanted.extent[overlaps.wanted]).all(axis=1)
        is_whole &= (overlaps.extent == overlaps.saved_extent).all(axis=1)
        is_whole &= (payload_offset >= 0) & (
            payload_nbytes == overlaps.extent.prod(axis=1) * itemsize[self._kinds]
        )
        is_whole &= np.equal(*self._dtypes)
        is_whole &= self.addresses[overlaps.wanted] != _NOT_PLAIN
        return is_whole

    def _items(self, is_left_out: Bools) -> list[ItemRead]:
        """Return the other overlaps as items, as DCP would plan them."""
        which = np.flatnonzero(~is_left_out)
        overlaps, row = self.overlaps, self.overlaps.wanted[which]
        writers = overlaps.writer[which]
        dtypes = [dtype_named(one.dtype) for one in self.catalog.table]
        columns = (
            self.plan.name[row],
            self.plan.dimensions[row],
            self.wanted.offset[row],
            overlaps.saved_offset[which],
            overlaps.saved_extent[which],
            overlaps.offset[which],
            overlaps.extent[which],
            self._kinds[which],
            writers,
            *self._places.extents(writers, overlaps.number[which], self.tails),
        )
        result = []
        for name, dimensions, target, saved, saved_extent, start, extent, kind, writer, *at in zip(
            *map(np.ndarray.tolist, columns), strict=True
        ):
            fqn, within = self.plan.names[name], slice(dimensions)
            if kind < 0:
                index = MetadataIndex(fqn)
                request = ReadItem(LoadItemType.BYTE_IO, index, _NOWHERE, index, _NOWHERE, _NOWHERE)
            else:
                request = ReadItem(
                    type=LoadItemType.TENSOR,
                    dest_index=MetadataIndex(fqn, torch.Size(target[within]), 0),
                    dest_offsets=_difference(start[within], target[within]),
                    storage_index=MetadataIndex(fqn, torch.Size(saved[within])),
                    storage_offsets=_difference(start[within], saved[within]),
                    lengths=torch.Size(extent[within]),
                )
            result.append(
                ItemRead(
                    request=request,
                    file=self._files[writer],
                    offset=at[0],
                    length=at[1],
                    saved=None if kind < 0 else (dtypes[kind], torch.Size(saved_extent[within])),
                )
            )
        return result


def _difference(start: Sequence[int], origin: Sequence[int]) -> torch.Size:
    return torch.Size([one - other for one, other in zip(start, origin, strict=True)])
