"""What many ranks would plan and write: a transformer sharded by FSDP, for dcp_mem and torch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from dcp_mem.common.values import Segment
from dcp_mem.format.frames import lay_out
from dcp_mem.format.names import segment_file
from dcp_mem.format.torch_names import properties
from dcp_mem.planning.plan_catalog import WrittenItems
from dcp_mem.planning.plan_columns import ItemGroup, ItemKind, local_plan, objects_group

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dcp_mem.format.catalog import Ints
    from dcp_mem.format.layout import Layout
    from dcp_mem.planning.plan_columns import LocalPlan

HIDDEN, INNER = 16384, 49152
"""Multiples of 16,384, so that all shards are equally large."""
SHARDED: Mapping[str, tuple[int, ...]] = {
    "self_attn.q_proj.weight": (HIDDEN, HIDDEN),
    "self_attn.k_proj.weight": (HIDDEN, HIDDEN),
    "self_attn.v_proj.weight": (HIDDEN, HIDDEN),
    "self_attn.o_proj.weight": (HIDDEN, HIDDEN),
    "mlp.gate_proj.weight": (INNER, HIDDEN),
    "mlp.up_proj.weight": (INNER, HIDDEN),
    "mlp.down_proj.weight": (HIDDEN, INNER),
    "input_layernorm.weight": (HIDDEN,),
    "post_attention_layernorm.weight": (HIDDEN,),
}
REPLICATED: Mapping[str, tuple[int, ...]] = {"self_attn.rotary_emb.inv_freq": (64,)}
REPLICATED_TENSORS = 10
DTYPE = torch.float32
BYTES_OF_OBJECT = 1024
SAVE_ID = "0" * 8


class Model:
    """A state dict {"model": {…}, "step": …} of `items` leaves, on `ranks` ranks.

    All tensors are sharded by their first dimension over all ranks, except for ten buffers that
    every rank has. There is one byte item.
    """

    def __init__(self, ranks: int, items: int) -> None:
        self._ranks = ranks
        tensors = [
            *_tensors(SHARDED, items - REPLICATED_TENSORS - 1),
            *_tensors(REPLICATED, REPLICATED_TENSORS),
        ]
        self._paths: list[tuple[str | int, ...]] = [
            *(("model", name) for name, _ in tensors),
            ("step",),
        ]
        self._names = [".".join(map(str, path)) for path in self._paths]
        self._shapes = [shape for _, shape in tensors]
        self._is_sharded = [index < items - REPLICATED_TENSORS - 1 for index in range(len(tensors))]
        self._first = local_plan(
            self._names, self._paths, *self._groups(), objects_group([len(tensors)])
        )
        self._stride = np.zeros_like(self._first.offset)
        self._stride[:, 0] = np.where(
            self._first.kind == ItemKind.SHARD, self._first.extent[:, 0], 0
        )

    def local_plan(self, rank: int) -> LocalPlan:
        """Return a rank's plan for dcp_mem; all ranks' plans share what doesn't differ."""
        return replace(self._first, offset=rank * self._stride)

    def save_plan(self, rank: int) -> SavePlan:
        """Return a rank's plan by torch's default planner."""
        tensors = [self._write_item(index, rank) for index in range(len(self._shapes))]
        items = [
            *tensors,
            WriteItem(index=MetadataIndex(self._names[-1]), type=WriteItemType.BYTE_IO),
        ]
        return SavePlan(items, planner_data=dict(zip(self._names, self._paths, strict=True)))

    def written(self, masks: Sequence[bytes]) -> list[WrittenItems]:
        """Return what every rank writes into its segment; byte items lie behind the layout.

        Args:
            masks: Of each rank: which rows of its plan it writes, as bits.
        """
        layouts: dict[bytes, Layout] = {}
        rows = {mask: _rows_of(mask, len(self._first)) for mask in masks}
        alike = {mask: self._written(0, rows[mask], layouts) for mask in rows}
        return [replace(alike[mask], rank=rank) for rank, mask in enumerate(masks)]

    def segments(self, parts: Sequence[WrittenItems], nodes: Sequence[str]) -> list[Segment]:
        """Return the segments of what the ranks have written."""
        return [
            Segment(
                rank=part.rank,
                node=node,
                file=segment_file(part.rank, SAVE_ID),
                nbytes=part.layout.nbytes + BYTES_OF_OBJECT * (len(part.rows) - len(part.layout)),
                layout=part.layout.key,
                tail=tuple(
                    (part.layout.nbytes + BYTES_OF_OBJECT * number, BYTES_OF_OBJECT)
                    for number in range(len(part.rows) - len(part.layout))
                ),
            )
            for part, node in zip(parts, nodes, strict=True)
        ]

    def _written(self, rank: int, rows: Ints, layouts: dict[bytes, Layout]) -> WrittenItems:
        plan = self._first
        is_object = plan.kind[rows] == ItemKind.OBJECT
        tensors = rows[~is_object]
        if tensors.tobytes() not in layouts:
            shapes = zip(
                plan.extent[tensors].tolist(), plan.dimensions[tensors].tolist(), strict=True
            )
            layouts[tensors.tobytes()] = lay_out(
                [(DTYPE, torch.Size(extent[:count])) for extent, count in shapes]
            )
        return WrittenItems(
            rank, np.concatenate([tensors, rows[is_object]]), layouts[tensors.tobytes()]
        )

    def _groups(self) -> Iterator[ItemGroup]:
        kind_of_all = properties(DTYPE, torch.strided, requires_grad=False, pin_memory=False)
        for is_sharded in (True, False):
            numbers = [n for n, one in enumerate(self._is_sharded) if one is is_sharded]
            shapes = [self._shapes[number] for number in numbers]
            yield ItemGroup(
                name=numbers,
                kind=ItemKind.SHARD if is_sharded else ItemKind.TENSOR,
                look=range(len(numbers)),
                looks=[
                    (kind_of_all, shape, (0,) * len(shape), self._extent(number))
                    for number, shape in zip(numbers, shapes, strict=True)
                ],
            )

    def _extent(self, index: int) -> tuple[int, ...]:
        rows, *others = self._shapes[index]
        return (rows // self._ranks if self._is_sharded[index] else rows, *others)

    def _write_item(self, index: int, rank: int) -> WriteItem:
        is_sharded, size, extent = self._is_sharded[index], self._shapes[index], self._extent(index)
        offset = torch.Size([rank * extent[0] * is_sharded, *(0 for _ in extent[1:])])
        return WriteItem(
            index=MetadataIndex(self._names[index], offset),
            type=WriteItemType.SHARD if is_sharded else WriteItemType.TENSOR,
            tensor_data=TensorWriteData(
                chunk=ChunkStorageMetadata(offsets=offset, sizes=torch.Size(extent)),
                properties=TensorProperties(DTYPE),
                size=torch.Size(size),
            ),
        )


def _rows_of(mask: bytes, count: int) -> Ints:
    return np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), count=count))


def _tensors(parts: Mapping[str, tuple[int, ...]], count: int) -> list[tuple[str, tuple[int, ...]]]:
    """Return names and shapes of tensors of a model whose layers have these parts."""
    of_layer = list(parts.items())
    numbers = (divmod(index, len(of_layer)) for index in range(count))
    return [
        (f"model.layers.{layer}.{of_layer[part][0]}", of_layer[part][1]) for layer, part in numbers
    ]
