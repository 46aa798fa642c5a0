"""The reads of one rank, found by joining its plan's columns with a catalog's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from dcp_mem.common.value_class import value_class
from dcp_mem.format.catalog import Catalog, Extent, Ints, Tails, counted, portions
from dcp_mem.format.column_file import distinct_rows
from dcp_mem.format.locations import LayoutItems
from dcp_mem.format.names import segment_file
from dcp_mem.format.torch_names import dtype_named
from dcp_mem.planning.chunk_index import Boxes, ChunkIndex
from dcp_mem.planning.entries import Casts, are_unlike, numbers_by_name
from dcp_mem.planning.plain_tensors import HOST, Sources, sources_of
from dcp_mem.planning.plan_columns import ItemKind, LocalPlan, widened
from dcp_mem.planning.reads import DirectRead, ItemRead, Reads

Bools = npt.NDArray[np.bool_]
Names = npt.NDArray[np.str_]
_NOT_PLAIN = -1
_ROWS_AT_ONCE = 1 << 17
"""Saved chunks that are indexed at once."""


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
    if entry is None:
        return None
    locations = _Locations(catalog, save_id, tails)
    tensors = _Tensors.of(plan, values, entry, locations, into_devices=into_devices)
    objects = _Objects.of(plan, entry, locations)
    if tensors is None or objects is None:
        return None
    is_direct = tensors.are_direct()
    direct = np.flatnonzero(is_direct)

    payloads = tensors.direct_reads(direct)

    def items(beside: Bools) -> list[ItemRead]:
        return [*tensors.items(np.flatnonzero(~beside)), *objects.items()]

    is_on_host = is_direct.copy()
    is_on_host[direct] = payloads.device == HOST
    return Reads(
        files=locations.files,
        payloads=payloads,
        rest=partial(items, is_direct),
        items_beside_host=partial(items, is_on_host),
        everything=partial(items, np.zeros_like(is_direct)),
        casts=tensors.casts(),
    )


def _entries(plan: LocalPlan, catalog: Catalog) -> Ints | None:
    """Return each plan row's entry in the catalog; None if names, kinds or sizes differ."""
    found = list(map(numbers_by_name(catalog).get, plan.names))
    if None in found:
        return None
    entry = np.array(found, np.int64)[plan.name]
    return None if are_unlike(plan, np.arange(len(plan)), catalog, entry).any() else entry


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


def _overlaps(wanted: Boxes, catalog: Catalog) -> _Overlaps:
    """Return what a catalog's rows have in common with what is wanted.

    Entries with the same boxes are looked up in one index, so few rows are made at once, although
    the catalog may have millions.
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
        index = ChunkIndex(
            widened(catalog.boxes.at(catalog.offset_runs[number], row[:, None]), width, 0),
            widened(catalog.boxes.at(catalog.extent_runs[number], row[:, None]), width, 1),
            first,
        )
        one = index.find(
            Boxes(kind[of_part] - part.start, wanted.offset[of_part], wanted.extent[of_part])
        )
        saved = index.offset[one.row], index.extent[one.row]
        found.append((of_part[one.wanted], row[one.row], one.offset, one.extent, *saved))
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


@dataclass(frozen=True, eq=False)
class _Locations:
    """The locations of a catalog's items in the segments of one save."""

    catalog: Catalog
    save_id: str
    tails: Tails

    @cached_property
    def files(self) -> list[str]:
        """Names of the segments, by writer."""
        return [segment_file(rank, self.save_id) for rank in self.catalog.ranks.tolist()]

    @cached_property
    def items(self) -> LayoutItems:
        return LayoutItems(self.catalog)

    def extents(self, writer: Ints, number: Ints) -> list[Extent]:
        """Return offset and length of these items in their writers' segments."""
        in_layouts = self.items.columns[:2, self.items.find(writer, number)].T.tolist()
        return [
            (offset, length) if in_tail < 0 else self.tails[rank][in_tail]
            for (offset, length), rank, in_tail in zip(
                in_layouts,
                self.catalog.ranks[writer].tolist(),
                self.items.beyond(writer, number).tolist(),
                strict=True,
            )
        ]


@dataclass(frozen=True, eq=False, kw_only=True)
class _Tensors:
    """The tensors to load, and how they overlap with the saved chunks."""

    plan: LocalPlan
    locations: _Locations
    rows: Ints
    # of each: where its tensor's data lies; `_NOT_PLAIN` if bytes can't be read there
    addresses: Ints
    devices: Ints  # of each: the number of the CUDA device that it lies on, or `HOST`
    wanted: Boxes
    overlaps: _Overlaps

    @staticmethod
    def of(
        plan: LocalPlan,
        values: Sequence[Any],
        entry: Ints,
        locations: _Locations,
        *,
        into_devices: bool,
    ) -> _Tensors | None:
        rows = np.flatnonzero(plan.kind != ItemKind.OBJECT)
        tensors = list(map(values.__getitem__, rows.tolist()))
        addresses, devices = _places(plan, tensors, into_devices=into_devices)
        if (addresses == _NOT_PLAIN).any() and any(tensor.is_meta for tensor in tensors):
            return None
        width = max(plan.size.shape[1], locations.catalog.size.shape[1])
        wanted = Boxes(
            entry[rows], widened(plan.offset[rows], width, 0), widened(plan.extent[rows], width, 1)
        )
        overlaps = _overlaps(wanted, locations.catalog)
        found, needed = overlaps.extent.prod(axis=1).sum(), wanted.extent.prod(axis=1).sum()
        if (overlaps.writer < 0).any() or found < needed:
            return None
        return _Tensors(
            plan=plan,
            locations=locations,
            rows=rows,
            addresses=addresses,
            devices=devices,
            wanted=wanted,
            overlaps=overlaps,
        )

    @cached_property
    def _kinds(self) -> Ints:
        """Of each overlap, the index of its tensor's properties in the catalog."""
        return self.locations.catalog.properties[self.wanted.entry[self.overlaps.wanted]]

    @cached_property
    def _dtypes(self) -> tuple[Names, Names]:
        """Of each overlap, the dtypes in which it was saved, and is loaded."""
        saved, wanted = (
            np.array([one.dtype for one in table], np.str_)  # there may be none
            for table in (self.locations.catalog.table, self.plan.table)
        )
        return saved[self._kinds], wanted[self.plan.properties[self.rows[self.overlaps.wanted]]]

    def casts(self) -> Casts:
        """Return the tensors that are loaded in another dtype than they were saved in."""
        saved, wanted = self._dtypes
        cast = np.flatnonzero(saved != wanted)
        names = self.plan.name[self.rows[self.overlaps.wanted[cast]]].tolist()
        dtypes = zip(saved[cast].tolist(), wanted[cast].tolist(), strict=True)
        return dict(zip(map(self.plan.names.__getitem__, names), dtypes, strict=True))

    @cached_property
    def _payloads(self) -> Ints:
        """Of each overlap, offset and bytes of the saved payload; an offset of -1 for none."""
        items = self.locations.items
        return items.columns[2:, items.find(self.overlaps.writer, self.overlaps.number)]

    def are_direct(self) -> Bools:
        """Return, for each overlap, whether it can be a direct read.

        It can if a chunk is wanted just as it was saved, in memory that its bytes can be read into.
        """
        overlaps, saved = self.overlaps, self.locations.catalog.table
        itemsize = np.array([dtype_named(one.dtype).itemsize for one in saved], np.int64)
        payload_offset, payload_nbytes = self._payloads
        is_whole: Bools = (overlaps.extent == self.wanted.extent[overlaps.wanted]).all(axis=1)
        is_whole &= (overlaps.extent == overlaps.saved_extent).all(axis=1)
        is_whole &= (payload_offset >= 0) & (
            payload_nbytes == overlaps.extent.prod(axis=1) * itemsize[self._kinds]
        )
        is_whole &= np.equal(*self._dtypes)
        is_whole &= self.addresses[overlaps.wanted] != _NOT_PLAIN
        return is_whole

    def direct_reads(self, which: Ints) -> DirectRead:
        """Return the payloads of these overlaps."""
        payload_offset, payload_nbytes = self._payloads[:, which]
        wanted = self.overlaps.wanted[which]
        return DirectRead(
            file=self.overlaps.writer[which],
            address=self.addresses[wanted],
            offset=payload_offset,
            nbytes=payload_nbytes,
            device=self.devices[wanted],
        )

    def items(self, which: Ints) -> list[ItemRead]:
        """Return these overlaps as items, as DCP would plan them."""
        overlaps, box = self.overlaps, self.overlaps.wanted[which]
        writers = overlaps.writer[which]
        dtypes = [dtype_named(one.dtype) for one in self.locations.catalog.table]
        columns = (
            self.plan.name[self.rows[box]],
            self.plan.dimensions[self.rows[box]],
            self.wanted.offset[box],
            overlaps.saved_offset[which],
            overlaps.saved_extent[which],
            overlaps.offset[which],
            overlaps.extent[which],
            self._kinds[which],
            writers,
        )
        result = []
        for (name, dimensions, target, saved, saved_extent, start, extent, kind, writer), (
            offset,
            length,
        ) in zip(
            zip(*map(np.ndarray.tolist, columns), strict=True),
            self.locations.extents(writers, overlaps.number[which]),
            strict=True,
        ):
            fqn, within = self.plan.names[name], slice(dimensions)
            request = ReadItem(
                type=LoadItemType.TENSOR,
                dest_index=MetadataIndex(fqn, torch.Size(target[within]), 0),
                dest_offsets=_difference(start[within], target[within]),
                storage_index=MetadataIndex(fqn, torch.Size(saved[within])),
                storage_offsets=_difference(start[within], saved[within]),
                lengths=torch.Size(extent[within]),
            )
            saved_as = dtypes[kind], torch.Size(saved_extent[within])
            result.append(
                ItemRead(
                    request=request,
                    file=self.locations.files[writer],
                    offset=offset,
                    length=length,
                    saved=saved_as,
                )
            )
        return result


@dataclass(frozen=True, eq=False, kw_only=True)
class _Objects:
    """The byte items to load: indexes of their names, and who wrote which of their items."""

    plan: LocalPlan
    locations: _Locations
    names: Ints
    writer: Ints
    number: Ints

    @staticmethod
    def of(plan: LocalPlan, entry: Ints, locations: _Locations) -> _Objects | None:
        wanted = np.flatnonzero(plan.kind == ItemKind.OBJECT)
        entry, catalog = entry[wanted], locations.catalog
        if (np.diff(catalog.first)[entry] == 0).any():
            return None
        row = np.zeros(len(entry), np.int64)
        writer, number = catalog.writers_at(entry, row), catalog.numbers_at(entry, row)
        if (writer < 0).any():
            return None
        return _Objects(
            plan=plan, locations=locations, names=plan.name[wanted], writer=writer, number=number
        )

    def items(self) -> list[ItemRead]:
        """Return these items, as DCP would plan them."""
        nowhere, result = torch.Size((0,)), []
        for name, writer, (offset, length) in zip(
            self.names.tolist(),
            self.writer.tolist(),
            self.locations.extents(self.writer, self.number),
            strict=True,
        ):
            index = MetadataIndex(self.plan.names[name])
            request = ReadItem(LoadItemType.BYTE_IO, index, nowhere, index, nowhere, nowhere)
            result.append(
                ItemRead(
                    request=request, file=self.locations.files[writer], offset=offset, length=length
                )
            )
        return result


def _places(
    plan: LocalPlan, tensors: Sequence[torch.Tensor], *, into_devices: bool
) -> tuple[Ints, Ints]:
    """Return where each tensor's data lies: the address, and the number of its device.

    The address is `_NOT_PLAIN` for those that bytes can't be read into.
    """

    def places(found: Sources | None) -> tuple[Ints, Ints] | None:
        if found is None or (found.devices is not None and not into_devices):
            return None
        addresses = np.array(found.addresses, np.int64)
        is_on_host = found.devices is None
        return addresses, np.full_like(addresses, HOST if is_on_host else found.devices)

    may_be_conj = any(dtype_named(one.dtype).is_complex for one in plan.table)
    found = places(sources_of(tensors, may_be_conj=may_be_conj))
    if found is not None:
        return found
    nowhere = np.array([_NOT_PLAIN]), np.array([HOST])
    each = [places(sources_of((one,))) or nowhere for one in tensors]
    addresses, devices = map(np.concatenate, zip(*each, strict=True))
    return addresses, devices


def _difference(start: Sequence[int], origin: Sequence[int]) -> torch.Size:
    return torch.Size([one - other for one, other in zip(start, origin, strict=True)])
