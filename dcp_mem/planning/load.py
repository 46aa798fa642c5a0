"""Planning a load: each rank finds by itself what it needs, and nothing has to be exchanged for that.

Where a catalog describes the checkpoint, the rank's columns are joined with the catalog's. Whatever is unusual goes through
torch's `DefaultLoadPlanner` and DCP's metadata, so that results and errors are torch's.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.tensor import DTensor

from dcp_mem.errors import UntrustedObject
from dcp_mem.format.catalog import BYTES, Catalog, Extent, Ints
from dcp_mem.format.names import segment_file
from dcp_mem.format.torch_names import dtype_named
from dcp_mem.planning.columns import Kind, LocalPlan, NotDescribable
from dcp_mem.planning.local import Structure
from dcp_mem.planning.overlap import Boxes, ChunkIndex, Overlaps
from dcp_mem.planning.plain import are_plain, is_plain
from dcp_mem.planning.reads import Reads, Straight, Wanted


class LocalLoadPlanner(DefaultLoadPlanner):
    """Torch's default planner, which can plan by a catalog as well, and is careful with byte items.

    weights_only: unpickle byte items as `torch.load(weights_only=True)` does; otherwise freely, as torch's planner does.
    """

    def __init__(self, *, weights_only: bool, allow_partial_load: bool = False) -> None:
        super().__init__(allow_partial_load=allow_partial_load)
        self._weights_only = weights_only
        self._is_by_catalog = False

    def plan(
        self, state: dict[str, Any], catalog: Catalog, save_id: str, tails: Mapping[int, Sequence[Extent]]
    ) -> Reads | None:
        """What to read for this state dict; None for whatever torch has to plan."""
        self._is_by_catalog = False
        structure = _described(state)
        if structure is None:
            return None
        entries = _entries(structure.plan, catalog)
        if entries is None:
            return None
        leaves = structure.leaves_of(state)
        found = _find(_Join(structure.plan, leaves, entries, catalog, save_id, tails))
        if found is None:
            return None
        self._is_by_catalog = True
        self.original_state_dict = state
        self.mappings = dict(zip(structure.plan.names, structure.plan.paths, strict=True))
        self.state_dict = dict(zip(structure.plan.names, leaves, strict=True))
        return found

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        if self._is_by_catalog:
            local: torch.Tensor = _local(self.state_dict[read_item.dest_index.fqn])
            if local.shape == read_item.lengths:
                return local
        return super().resolve_tensor(read_item)  # type: ignore[no-any-return]

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        fqn = read_item.dest_index.fqn
        try:
            loaded = torch.load(value, weights_only=self._weights_only)
        except Exception as error:
            if not self._weights_only:
                raise
            raise UntrustedObject(fqn, str(error).split("\n")[0]) from None
        set_element(self.original_state_dict, self.mappings[fqn], loaded)


def _described(state: dict[str, Any]) -> Structure | None:
    """The structure of a state dict that holds nothing unusual."""
    try:
        structure = Structure(state)
    except (NotDescribable, ValueError):
        return None
    leaves = structure.leaves_of(state)
    if ShardedTensor in set(map(type, leaves)):
        return None
    return None if any(leaf.is_meta for leaf in leaves if isinstance(leaf, torch.Tensor)) else structure


def _entries(plan: LocalPlan, catalog: Catalog) -> Ints | None:
    """Of each row of the plan, its entry in the catalog; None where names, kinds or sizes differ.

    Missing keys, partial loads and checkpoints of old versions are torch's.
    """
    numbers = np.flatnonzero(catalog.properties >= BYTES)
    known = dict(zip(map(catalog.names.__getitem__, catalog.name[numbers].tolist()), numbers.tolist(), strict=True))
    of_names = list(map(known.get, plan.names))
    if None in of_names or len(known) != len(of_names):
        return None
    entry = np.array(of_names, np.int64)[plan.name]
    is_object = plan.kind == Kind.OBJECT
    width = max(plan.size.shape[1], catalog.size.shape[1])
    is_other = (catalog.properties[entry] == BYTES) != is_object
    is_other |= catalog.dimensions[entry] != plan.dimensions
    is_other |= (widened(catalog.size, width, 1)[entry] != widened(plan.size, width, 1)).any(axis=1)
    return None if is_other.any() else entry


def widened(columns: Ints, width: int, value: int) -> Ints:
    """Columns of boxes with more dimensions, which are padded with `value`."""
    missing = width - columns.shape[1]
    return columns if not missing else np.pad(columns, ((0, 0), (0, missing)), constant_values=value)


@dataclass(frozen=True, eq=False)
class _Join:
    """What is wanted beside what was saved. entry: of each row of the plan."""

    plan: LocalPlan
    leaves: Sequence[Any]
    entry: Ints
    catalog: Catalog
    save_id: str
    tails: Mapping[int, Sequence[Extent]]

    @cached_property
    def files(self) -> list[str]:
        """Segments, by writer."""
        return [segment_file(rank, self.save_id) for rank in self.catalog.ranks.tolist()]

    @cached_property
    def layouts(self) -> tuple[Ints, Ints]:
        """Of each layout, where its items begin in the columns of all of them; and these columns, one below the other."""
        counts = np.fromiter(map(len, self.catalog.layouts), np.int64, len(self.catalog.layouts))
        columns = [
            np.stack([one.offsets, one.lengths, one.payload_offsets, one.payload_nbytes])
            for one in self.catalog.layouts
        ]
        return np.append(0, np.cumsum(counts)), np.concatenate([*columns, np.zeros((4, 0), np.int64)], axis=1)

    def items(self, rows: Ints) -> Ints:
        """Of each of these rows of the catalog, its item in `layouts`; -1 where it lies in a tail."""
        starts, _ = self.layouts
        layout, number = self.catalog.layout_of[self.catalog.writer[rows]], self.catalog.number[rows]
        return np.where(number < starts[layout + 1] - starts[layout], starts[layout] + number, -1)

    def extents(self, rows: Ints) -> list[Extent]:
        """Where the streams of these rows of the catalog lie in their segments."""
        starts, columns = self.layouts
        writer = self.catalog.writer[rows]
        behind = self.catalog.number[rows] - np.diff(starts)[self.catalog.layout_of[writer]]
        return [
            (int(columns[0, item]), int(columns[1, item])) if item >= 0 else self.tails[rank][number]
            for item, rank, number in zip(
                self.items(rows).tolist(), self.catalog.ranks[writer].tolist(), behind.tolist(), strict=True
            )
        ]


def _find(join: _Join) -> Reads | None:
    """Every row of the plan with the rows of the catalog that it needs; None where one of those was never written."""
    plan, catalog = join.plan, join.catalog
    width = max(plan.size.shape[1], catalog.size.shape[1])
    boxes = np.flatnonzero(plan.kind != Kind.OBJECT)
    objects = np.flatnonzero(plan.kind == Kind.OBJECT)
    rows_of_objects = catalog.first[join.entry[objects]]
    if (catalog.first[join.entry[objects] + 1] == rows_of_objects).any():
        return None
    wanted = Boxes(join.entry[boxes], widened(plan.offset[boxes], width, 0), widened(plan.extent[boxes], width, 1))
    index = ChunkIndex(widened(catalog.offset, width, 0), widened(catalog.extent, width, 1), catalog.first)
    overlaps = index.find(wanted)
    if (catalog.writer[overlaps.row] < 0).any() or (catalog.writer[rows_of_objects] < 0).any():
        return None
    is_straight = _go_straight(join, boxes, wanted, index, overlaps)

    def tensors(which: npt.NDArray[np.bool_]) -> list[Wanted]:
        return _wanted_tensors(join, boxes, wanted, index, overlaps, np.flatnonzero(which))

    def rest() -> list[Wanted]:
        return [*tensors(~is_straight), *_wanted_objects(join, objects, rows_of_objects)]

    def everything() -> list[Wanted]:
        return [*tensors(is_straight), *rest()]

    return Reads(join.files, _straight(join, boxes, overlaps, np.flatnonzero(is_straight)), rest, everything)


def _go_straight(
    join: _Join, boxes: Ints, wanted: Boxes, index: ChunkIndex, overlaps: Overlaps
) -> npt.NDArray[np.bool_]:
    """Of each overlap, whether a chunk is wanted just as it was saved, in memory that its bytes can be read into."""
    catalog, plan = join.catalog, join.plan
    item = join.items(overlaps.row)
    _, _, payload_offsets, payload_nbytes = join.layouts[1]
    saved_as, wanted_as = (
        [dtype_named(one.dtype) for one in catalog.table],
        [dtype_named(one.dtype) for one in plan.table],
    )
    numbers = {dtype: number for number, dtype in enumerate([*saved_as, *wanted_as])}
    itemsize = np.array([dtype.itemsize for dtype in saved_as], np.int64)
    row_of_plan = boxes[overlaps.wanted]
    kind = catalog.properties[join.entry[row_of_plan]]
    is_same: npt.NDArray[np.bool_] = (
        (overlaps.extent == wanted.extent[overlaps.wanted]) & (overlaps.extent == index.extent[overlaps.row])
    ).all(axis=1)
    is_same &= (item >= 0) & (
        _numbered(saved_as, numbers)[kind] == _numbered(wanted_as, numbers)[plan.properties[row_of_plan]]
    )
    nbytes = overlaps.extent.prod(axis=1) * itemsize[kind]
    is_same[is_same] &= (payload_offsets[item] >= 0)[is_same] & (payload_nbytes[item] == nbytes)[is_same]
    tensors = [_local(join.leaves[leaf]) for leaf in plan.name[boxes].tolist()]
    if not are_plain(tensors):
        is_same &= np.fromiter(map(is_plain, tensors), np.bool_, len(tensors))[overlaps.wanted]
    return is_same


def _numbered(dtypes: Sequence[torch.dtype], numbers: Mapping[torch.dtype, int]) -> Ints:
    return np.array([numbers[dtype] for dtype in dtypes], np.int64)


def _straight(join: _Join, boxes: Ints, overlaps: Overlaps, which: Ints) -> Straight:
    _, _, payload_offsets, payload_nbytes = join.layouts[1]
    row = overlaps.row[which]
    item = join.items(row)
    leaves = join.plan.name[boxes[overlaps.wanted[which]]].tolist()
    addresses = map(torch.Tensor.data_ptr, (_local(join.leaves[leaf]) for leaf in leaves))
    return Straight(
        join.catalog.writer[row],
        np.fromiter(addresses, np.int64, len(leaves)),
        payload_offsets[item],
        payload_nbytes[item],
    )


def _wanted_tensors(
    join: _Join, boxes: Ints, wanted: Boxes, index: ChunkIndex, overlaps: Overlaps, which: Ints
) -> list[Wanted]:
    box, row = overlaps.wanted[which], overlaps.row[which]
    plan_row = boxes[box]
    dtypes = [dtype_named(one.dtype) for one in join.catalog.table]
    columns = (
        join.plan.name[plan_row],
        join.plan.dimensions[plan_row],
        wanted.offset[box],
        index.offset[row],
        index.extent[row],
        overlaps.offset[which],
        overlaps.extent[which],
        join.catalog.properties[join.entry[plan_row]],
        join.catalog.writer[row],
    )
    result = []
    for extent_in_file, (name, dimensions, target, saved, saved_extent, start, extent, kind, writer) in zip(
        join.extents(row), zip(*(column.tolist() for column in columns), strict=True), strict=True
    ):
        fqn, within = join.plan.names[name], slice(dimensions)
        request = ReadItem(
            type=LoadItemType.TENSOR,
            dest_index=MetadataIndex(fqn, torch.Size(target[within]), 0),
            dest_offsets=_difference(start[within], target[within]),
            storage_index=MetadataIndex(fqn, torch.Size(saved[within])),
            storage_offsets=_difference(start[within], saved[within]),
            lengths=torch.Size(extent[within]),
        )
        saved_as = dtypes[kind], torch.Size(saved_extent[within])
        result.append(Wanted(request, join.files[writer], *extent_in_file, saved_as))
    return result


def _difference(start: Sequence[int], origin: Sequence[int]) -> torch.Size:
    return torch.Size([one - other for one, other in zip(start, origin, strict=True)])


def _wanted_objects(join: _Join, objects: Ints, rows: Ints) -> list[Wanted]:
    result = []
    nowhere = torch.Size((0,))
    writers = join.catalog.writer[rows].tolist()
    for name, writer, extent in zip(join.plan.name[objects].tolist(), writers, join.extents(rows), strict=True):
        index = MetadataIndex(join.plan.names[name])
        request = ReadItem(LoadItemType.BYTE_IO, index, nowhere, index, nowhere, nowhere)
        result.append(Wanted(request, join.files[writer], *extent))
    return result


def _local(leaf: Any) -> Any:
    return leaf._local_tensor if type(leaf) is DTensor else leaf
