"""A rank's columns joined with a catalog's: which bytes, of which segments, go where."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from dcp_mem.format.catalog import BYTES, Catalog, Extent, Ints
from dcp_mem.format.names import segment_file
from dcp_mem.format.places import LayoutItems
from dcp_mem.format.torch_names import dtype_named
from dcp_mem.planning.columns import Kind, LocalPlan, widened
from dcp_mem.planning.overlap import Boxes, ChunkIndex, Overlaps
from dcp_mem.planning.plain import addresses_of, is_plain
from dcp_mem.planning.reads import Reads, Straight, Wanted

Bools = npt.NDArray[np.bool_]
_NOT_PLAIN = -1


def join(
    plan: LocalPlan,
    parts: Sequence[Any],
    catalog: Catalog,
    save_id: str,
    tails: Mapping[int, Sequence[Extent]],
    *,
    optional: Callable[[str], bool] | None = None,
) -> Reads | None:
    """What to read for a plan whose items stand for these parts; None for whatever torch has to plan.

    That is: missing keys and partial loads, things of other kinds or sizes, items that were never written, tensors on the
    meta device. tails: by rank, where the items behind the layout of its segment lie. optional: what needn't be asked for,
    such as what belongs to other ranks; a load that lacks only that isn't partial.
    """
    entry = _entries(plan, catalog, optional)
    if entry is None:
        return None
    places = _Places(catalog, save_id, tails)
    tensors, objects = _Tensors.of(plan, parts, entry, places), _Objects.of(plan, entry, places)
    if tensors is None or objects is None:
        return None
    is_straight = tensors.go_straight()
    straight = np.flatnonzero(is_straight)

    def rest() -> list[Wanted]:
        return [*tensors.wanted_items(np.flatnonzero(~is_straight)), *objects.wanted_items()]

    def everything() -> list[Wanted]:
        return [*tensors.wanted_items(straight), *rest()]

    return Reads(places.files, tensors.straight(straight), rest, everything)


def _entries(plan: LocalPlan, catalog: Catalog, optional: Callable[[str], bool] | None) -> Ints | None:
    """Of each row of the plan, its entry in the catalog; None where names, kinds or sizes differ."""
    numbers = np.flatnonzero(catalog.properties >= BYTES)
    known = dict(zip(catalog.entry_names(), numbers.tolist(), strict=True))
    found = list(map(known.get, plan.names))
    if None in found:
        return None
    if len(known) != len(found) and not (optional and all(map(optional, known.keys() - set(plan.names)))):
        return None
    entry = np.array(found, np.int64)[plan.name]
    width = max(plan.size.shape[1], catalog.size.shape[1])
    is_other = (catalog.properties[entry] == BYTES) != (plan.kind == Kind.OBJECT)
    is_other |= catalog.dimensions[entry] != plan.dimensions
    is_other |= (widened(catalog.size, width, 1)[entry] != widened(plan.size, width, 1)).any(axis=1)
    return None if is_other.any() else entry


@dataclass(frozen=True, eq=False)
class _Places:
    """Where the items of a catalog's rows lie."""

    catalog: Catalog
    save_id: str
    tails: Mapping[int, Sequence[Extent]]

    @cached_property
    def files(self) -> list[str]:
        """Segments, by writer."""
        return [segment_file(rank, self.save_id) for rank in self.catalog.ranks.tolist()]

    @cached_property
    def items(self) -> LayoutItems:
        return LayoutItems(self.catalog)

    def extents(self, rows: Ints) -> list[Extent]:
        """Where the streams of these rows lie in their segments."""
        ranks = self.catalog.ranks[self.catalog.writer[rows]].tolist()
        in_layouts = self.items.columns[:2, self.items.of(rows)].T.tolist()
        return [
            (offset, length) if behind < 0 else self.tails[rank][behind]
            for (offset, length), rank, behind in zip(in_layouts, ranks, self.items.behind(rows).tolist(), strict=True)
        ]


@dataclass(frozen=True, eq=False)
class _Tensors:
    """Tensors that are wanted, beside the chunks that were saved.

    rows: of the plan. entry, addresses: of each of these, its entry in the catalog, and where what it stands for lies, where
    that is plain.
    """

    plan: LocalPlan
    places: _Places
    rows: Ints
    entry: Ints
    addresses: Ints
    wanted: Boxes
    index: ChunkIndex
    overlaps: Overlaps

    @staticmethod
    def of(plan: LocalPlan, parts: Sequence[Any], entry: Ints, places: _Places) -> _Tensors | None:
        rows = np.flatnonzero(plan.kind != Kind.OBJECT)
        tensors = list(map(parts.__getitem__, rows.tolist()))
        addresses = _addresses(plan, tensors)
        if (addresses == _NOT_PLAIN).any() and any(tensor.is_meta for tensor in tensors):
            return None
        catalog = places.catalog
        width = max(plan.size.shape[1], catalog.size.shape[1])
        wanted = Boxes(entry[rows], widened(plan.offset[rows], width, 0), widened(plan.extent[rows], width, 1))
        index = ChunkIndex(widened(catalog.offset, width, 0), widened(catalog.extent, width, 1), catalog.first)
        overlaps = index.find(wanted)
        if (catalog.writer[overlaps.row] < 0).any():
            return None
        return _Tensors(plan, places, rows, entry[rows], addresses, wanted, index, overlaps)

    @cached_property
    def _kinds(self) -> Ints:
        """Of each overlap, which of the catalog's properties its tensor has."""
        return self.places.catalog.properties[self.entry[self.overlaps.wanted]]

    def _payloads(self, rows: Ints) -> Ints:
        """Offset and bytes of the payloads of these rows of the catalog; -1 where there is none."""
        return self.places.items.columns[2:, self.places.items.of(rows)]

    def go_straight(self) -> Bools:
        """Of each overlap, whether a chunk is wanted just as it was saved, in memory that its bytes can be read into."""
        overlaps, saved, wanted = self.overlaps, self.places.catalog.table, self.plan.table
        numbers = {name: number for number, name in enumerate(dict.fromkeys(one.dtype for one in (*saved, *wanted)))}
        dtype_saved, dtype_wanted = (
            np.array([numbers[one.dtype] for one in table], np.int64) for table in (saved, wanted)
        )
        itemsize = np.array([dtype_named(one.dtype).itemsize for one in saved], np.int64)
        payload_offset, payload_nbytes = self._payloads(overlaps.row)
        is_whole: Bools = (overlaps.extent == self.wanted.extent[overlaps.wanted]).all(axis=1)
        is_whole &= (overlaps.extent == self.index.extent[overlaps.row]).all(axis=1)
        is_whole &= (payload_offset >= 0) & (payload_nbytes == overlaps.extent.prod(axis=1) * itemsize[self._kinds])
        is_whole &= dtype_saved[self._kinds] == dtype_wanted[self.plan.properties[self.rows[overlaps.wanted]]]
        is_whole &= self.addresses[overlaps.wanted] != _NOT_PLAIN
        return is_whole

    def straight(self, which: Ints) -> Straight:
        """The payloads of these overlaps."""
        rows = self.overlaps.row[which]
        payload_offset, payload_nbytes = self._payloads(rows)
        writer = self.places.catalog.writer[rows]
        return Straight(writer, self.addresses[self.overlaps.wanted[which]], payload_offset, payload_nbytes)

    def wanted_items(self, which: Ints) -> list[Wanted]:
        """These overlaps as DCP would have them."""
        row, box = self.overlaps.row[which], self.overlaps.wanted[which]
        catalog = self.places.catalog
        dtypes = [dtype_named(one.dtype) for one in catalog.table]
        columns = (
            self.plan.name[self.rows[box]],
            self.plan.dimensions[self.rows[box]],
            self.wanted.offset[box],
            self.index.offset[row],
            self.index.extent[row],
            self.overlaps.offset[which],
            self.overlaps.extent[which],
            self._kinds[which],
            catalog.writer[row],
        )
        result = []
        for (name, dimensions, target, saved, saved_extent, start, extent, kind, writer), (offset, length) in zip(
            zip(*(column.tolist() for column in columns), strict=True), self.places.extents(row), strict=True
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
            result.append(Wanted(request, self.places.files[writer], offset, length, saved_as))
        return result


@dataclass(frozen=True, eq=False)
class _Objects:
    """Byte items that are wanted. names: numbers of theirs. rows: of the catalog."""

    plan: LocalPlan
    places: _Places
    names: Ints
    rows: Ints

    @staticmethod
    def of(plan: LocalPlan, entry: Ints, places: _Places) -> _Objects | None:
        wanted = np.flatnonzero(plan.kind == Kind.OBJECT)
        first = places.catalog.first
        rows = first[entry[wanted]]
        if (first[entry[wanted] + 1] == rows).any() or (places.catalog.writer[rows] < 0).any():
            return None
        return _Objects(plan, places, plan.name[wanted], rows)

    def wanted_items(self) -> list[Wanted]:
        """These items as DCP would have them."""
        nowhere = torch.Size((0,))
        writers, result = self.places.catalog.writer[self.rows].tolist(), []
        for name, writer, (offset, length) in zip(
            self.names.tolist(), writers, self.places.extents(self.rows), strict=True
        ):
            index = MetadataIndex(self.plan.names[name])
            request = ReadItem(LoadItemType.BYTE_IO, index, nowhere, index, nowhere, nowhere)
            result.append(Wanted(request, self.places.files[writer], offset, length))
        return result


def _addresses(plan: LocalPlan, tensors: Sequence[torch.Tensor]) -> Ints:
    """Where each tensor's data lies; _NOT_PLAIN for those whose address doesn't say all."""
    if {one.layout for one in plan.table} <= {str(torch.strided)}:
        may_be_conj = any(dtype_named(one.dtype).is_complex for one in plan.table)
        found = addresses_of(tensors, may_be_conj)
        if found is not None:
            return np.array(found, np.int64)
    one_by_one = (tensor.data_ptr() if is_plain(tensor) else _NOT_PLAIN for tensor in tensors)
    return np.fromiter(one_by_one, np.int64, len(tensors))


def _difference(start: Sequence[int], origin: Sequence[int]) -> torch.Size:
    return torch.Size([one - other for one, other in zip(start, origin, strict=True)])
