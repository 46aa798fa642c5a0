"""The reads of one rank, found by joining its plan's columns with a catalog's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from dcp_mem.format.catalog import BYTES, Catalog, Extent, Ints, Rows
from dcp_mem.format.locations import LayoutItems
from dcp_mem.format.names import segment_file
from dcp_mem.format.torch_names import dtype_named
from dcp_mem.planning.chunk_index import Boxes, ChunkIndex, Overlaps
from dcp_mem.planning.entries import Casts
from dcp_mem.planning.plain_tensors import HOST, sources_of
from dcp_mem.planning.plan_columns import ItemKind, LocalPlan, widened
from dcp_mem.planning.reads import DirectRead, ItemRead, Reads

Bools = npt.NDArray[np.bool_]
_NOT_PLAIN = -1


def find_reads(
    plan: LocalPlan,
    values: Sequence[Any],
    catalog: Catalog,
    save_id: str,
    tails: Mapping[int, Sequence[Extent]],
    *,
    into_devices: bool = False,
) -> Reads | None:
    """Return what to read for a plan; None for what torch has to plan.

    Torch plans missing keys, entries of other kinds or sizes, items that were never written, and
    tensors on the meta device. Entries that the plan lacks aren't loaded.

    `values`: the value of each item of the plan: tensors to read into. `tails`: by rank, offset and
    length of each item of its tail. `into_devices`: whether direct reads may go into the memory of
    CUDA devices.
    """
    entry = _entries(plan, catalog)
    if entry is None:
        return None
    rows = _needed_rows(plan, entry, catalog) if catalog.has_many_rows else catalog.rows()
    locations = _Locations(catalog, rows, save_id, tails)
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
    numbers = np.flatnonzero(catalog.properties >= BYTES)
    known = dict(zip(catalog.entry_names(), numbers.tolist(), strict=True))
    found = list(map(known.get, plan.names))
    if None in found:
        return None
    entry = np.array(found, np.int64)[plan.name]
    width = max(plan.size.shape[1], catalog.size.shape[1])
    is_other = (catalog.properties[entry] == BYTES) != (plan.kind == ItemKind.OBJECT)
    is_other |= catalog.dimensions[entry] != plan.dimensions
    is_other |= (widened(catalog.size, width, 1)[entry] != widened(plan.size, width, 1)).any(axis=1)
    return None if is_other.any() else entry


def _needed_rows(plan: LocalPlan, entry: Ints, catalog: Catalog) -> Rows:
    """Return those rows of the catalog that share elements with what the plan needs.

    Entries with the same boxes are looked up in one index, so no more rows are made at once than
    one entry has, and those that are needed.

    `entry`: of each row of the plan: its entry in the catalog.
    """
    specimen, kind = catalog.alike()
    width = max(plan.size.shape[1], catalog.size.shape[1])
    is_object = plan.kind == ItemKind.OBJECT
    objects = np.unique(entry[is_object])
    objects = objects[np.diff(catalog.first)[objects] > 0]
    entries, rows = [objects], [np.zeros(len(objects), np.int64)]
    tensors = np.flatnonzero(~is_object)
    order = tensors[np.argsort(kind[entry[tensors]], kind="stable")]
    for alike in np.split(order, np.flatnonzero(np.diff(kind[entry[order]])) + 1):
        if not len(alike):
            continue
        offset, extent = catalog.boxes_of(int(specimen[kind[entry[alike[0]]]]))
        index = ChunkIndex(
            widened(offset, width, 0), widened(extent, width, 1), np.array([0, len(offset)])
        )
        wanted = Boxes(
            np.zeros(len(alike), np.int64),
            widened(plan.offset[alike], width, 0),
            widened(plan.extent[alike], width, 1),
        )
        overlaps = index.find(wanted)
        entries.append(entry[alike[overlaps.wanted]])
        rows.append(overlaps.row)
    most = int(np.diff(catalog.first).max(initial=0)) + 1
    found = np.unique(np.concatenate(entries) * most + np.concatenate(rows))
    return catalog.rows_at(found // most, found % most)


@dataclass(frozen=True, eq=False)
class _Locations:
    """The locations of a catalog's items in the segments of one save."""

    catalog: Catalog
    rows: Rows
    save_id: str
    tails: Mapping[int, Sequence[Extent]]

    @cached_property
    def files(self) -> list[str]:
        """Names of the segments, by writer."""
        return [segment_file(rank, self.save_id) for rank in self.catalog.ranks.tolist()]

    @cached_property
    def items(self) -> LayoutItems:
        return LayoutItems(self.catalog)

    def extents(self, rows: Ints) -> list[Extent]:
        """Return offset and length of these rows' items in their segments."""
        writer, number = self.rows.writer[rows], self.rows.number[rows]
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
    entry: Ints
    # of each: where its tensor's data lies; `_NOT_PLAIN` if bytes can't be read there
    addresses: Ints
    devices: Ints  # of each: the number of the CUDA device that it lies on, or `HOST`
    wanted: Boxes
    index: ChunkIndex
    overlaps: Overlaps

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
        saved = locations.rows
        width = max(plan.size.shape[1], saved.offset.shape[1])
        wanted = Boxes(
            entry[rows], widened(plan.offset[rows], width, 0), widened(plan.extent[rows], width, 1)
        )
        index = ChunkIndex(
            widened(saved.offset, width, 0), widened(saved.extent, width, 1), saved.first
        )
        overlaps = index.find(wanted)
        found, needed = overlaps.extent.prod(axis=1).sum(), wanted.extent.prod(axis=1).sum()
        if (saved.writer[overlaps.row] < 0).any() or found < needed:
            return None
        return _Tensors(
            plan=plan,
            locations=locations,
            rows=rows,
            entry=entry[rows],
            addresses=addresses,
            devices=devices,
            wanted=wanted,
            index=index,
            overlaps=overlaps,
        )

    @cached_property
    def _kinds(self) -> Ints:
        """Of each overlap, the index of its tensor's properties in the catalog."""
        return self.locations.catalog.properties[self.entry[self.overlaps.wanted]]

    @cached_property
    def _is_cast(self) -> Bools:
        """Of each overlap, whether it is loaded in another dtype than it was saved in."""
        saved, wanted = self.locations.catalog.table, self.plan.table
        numbers = {
            name: number
            for number, name in enumerate(dict.fromkeys(one.dtype for one in (*saved, *wanted)))
        }
        dtype_saved, dtype_wanted = (
            np.array([numbers[one.dtype] for one in table], np.int64) for table in (saved, wanted)
        )
        wanted_as = self.plan.properties[self.rows[self.overlaps.wanted]]
        is_cast: Bools = dtype_saved[self._kinds] != dtype_wanted[wanted_as]
        return is_cast

    def casts(self) -> Casts:
        """Return the tensors that are loaded in another dtype than they were saved in."""
        cast = np.flatnonzero(self._is_cast)
        rows = self.rows[self.overlaps.wanted[cast]]
        saved, wanted = self.locations.catalog.table, self.plan.table
        return {
            self.plan.names[name]: (
                str(dtype_named(saved[kind].dtype)),
                str(dtype_named(wanted[wanted_as].dtype)),
            )
            for name, kind, wanted_as in zip(
                self.plan.name[rows].tolist(),
                self._kinds[cast].tolist(),
                self.plan.properties[rows].tolist(),
                strict=True,
            )
        }

    def _payloads(self, rows: Ints) -> Ints:
        """Return offset and bytes of these rows' payloads; the offset is -1 where there is none."""
        found = self.locations.rows
        items = self.locations.items
        return items.columns[2:, items.find(found.writer[rows], found.number[rows])]

    def are_direct(self) -> Bools:
        """Return, for each overlap, whether it can be a direct read.

        It can if a chunk is wanted just as it was saved, in memory that its bytes can be read into.
        """
        overlaps, saved = self.overlaps, self.locations.catalog.table
        itemsize = np.array([dtype_named(one.dtype).itemsize for one in saved], np.int64)
        payload_offset, payload_nbytes = self._payloads(overlaps.row)
        is_whole: Bools = (overlaps.extent == self.wanted.extent[overlaps.wanted]).all(axis=1)
        is_whole &= (overlaps.extent == self.index.extent[overlaps.row]).all(axis=1)
        is_whole &= (payload_offset >= 0) & (
            payload_nbytes == overlaps.extent.prod(axis=1) * itemsize[self._kinds]
        )
        is_whole &= ~self._is_cast
        is_whole &= self.addresses[overlaps.wanted] != _NOT_PLAIN
        return is_whole

    def direct_reads(self, which: Ints) -> DirectRead:
        """Return the payloads of these overlaps."""
        rows = self.overlaps.row[which]
        payload_offset, payload_nbytes = self._payloads(rows)
        writer = self.locations.rows.writer[rows]
        wanted = self.overlaps.wanted[which]
        return DirectRead(
            file=writer,
            address=self.addresses[wanted],
            offset=payload_offset,
            nbytes=payload_nbytes,
            device=self.devices[wanted],
        )

    def items(self, which: Ints) -> list[ItemRead]:
        """Return these overlaps as items, as DCP would plan them."""
        row, box = self.overlaps.row[which], self.overlaps.wanted[which]
        dtypes = [dtype_named(one.dtype) for one in self.locations.catalog.table]
        columns = (
            self.plan.name[self.rows[box]],
            self.plan.dimensions[self.rows[box]],
            self.wanted.offset[box],
            self.index.offset[row],
            self.index.extent[row],
            self.overlaps.offset[which],
            self.overlaps.extent[which],
            self._kinds[which],
            self.locations.rows.writer[row],
        )
        result = []
        for (name, dimensions, target, saved, saved_extent, start, extent, kind, writer), (
            offset,
            length,
        ) in zip(
            zip(*map(np.ndarray.tolist, columns), strict=True),
            self.locations.extents(row),
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


@dataclass(frozen=True, eq=False)
class _Objects:
    """The byte items to load: indexes of their names, and rows of the catalog."""

    plan: LocalPlan
    locations: _Locations
    names: Ints
    rows: Ints

    @staticmethod
    def of(plan: LocalPlan, entry: Ints, locations: _Locations) -> _Objects | None:
        wanted = np.flatnonzero(plan.kind == ItemKind.OBJECT)
        first = locations.rows.first
        rows = first[entry[wanted]]
        if (first[entry[wanted] + 1] == rows).any() or (locations.rows.writer[rows] < 0).any():
            return None
        return _Objects(plan, locations, plan.name[wanted], rows)

    def items(self) -> list[ItemRead]:
        """Return these items, as DCP would plan them."""
        nowhere = torch.Size((0,))
        writers, result = self.locations.rows.writer[self.rows].tolist(), []
        for name, writer, (offset, length) in zip(
            self.names.tolist(), writers, self.locations.extents(self.rows), strict=True
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
    count = len(tensors)
    on_host = np.full(count, HOST)
    if {one.layout for one in plan.table} <= {str(torch.strided)}:
        may_be_conj = any(dtype_named(one.dtype).is_complex for one in plan.table)
        found = sources_of(tensors, may_be_conj=may_be_conj)
        if found is not None and (found.devices is None or into_devices):
            devices = on_host if found.devices is None else np.array(found.devices, np.int64)
            return np.array(found.addresses, np.int64), devices
    one_by_one = [_place(tensor, into_devices=into_devices) for tensor in tensors]
    addresses, devices = np.array(one_by_one, np.int64).reshape(-1, 2).T
    return addresses, devices


def _place(tensor: torch.Tensor, *, into_devices: bool) -> tuple[int, int]:
    """Return what `_places` does, of one tensor."""
    found = sources_of((tensor,))
    if found is None or (found.devices is not None and not into_devices):
        return _NOT_PLAIN, HOST
    return found.addresses[0], HOST if found.devices is None else found.devices[0]


def _difference(start: Sequence[int], origin: Sequence[int]) -> torch.Size:
    return torch.Size([one - other for one, other in zip(start, origin, strict=True)])
