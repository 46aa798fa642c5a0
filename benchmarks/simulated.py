"""What many ranks would plan and write, rank by rank: a transformer sharded by FSDP, described by us and by torch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from dcp_mem.format.frames import lay_out
from dcp_mem.format.names import segment_file
from dcp_mem.format.torch_names import properties
from dcp_mem.planning.columns import Kind, Row, local_plan
from dcp_mem.planning.describe import Written
from dcp_mem.values import Segment

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dcp_mem.format.catalog import Ints
    from dcp_mem.format.layout import Layout
    from dcp_mem.planning.columns import LocalPlan
    from dcp_mem.planning.merge import GlobalPlan

HIDDEN, INNER = 8192, 28672
"""Multiples of 4,096: every rank's shard is equally large."""
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

    All tensors are sharded by their first dimension over all ranks, but for ten buffers that every rank has; and there is
    a byte item.
    """

    def __init__(self, ranks: int, items: int) -> None:
        self._ranks = ranks
        tensors = [*_tensors(SHARDED, items - REPLICATED_TENSORS - 1), *_tensors(REPLICATED, REPLICATED_TENSORS)]
        self._paths: list[tuple[str | int, ...]] = [*(("model", name) for name, _ in tensors), ("step",)]
        self._names = [".".join(map(str, path)) for path in self._paths]
        self._shapes = [shape for _, shape in tensors]
        self._is_sharded = [index < items - REPLICATED_TENSORS - 1 for index in range(len(tensors))]
        self._first = local_plan(self._names, self._paths, [*self._rows(), Row(len(tensors), Kind.OBJECT)])
        self._stride = np.zeros_like(self._first.offset)
        self._stride[:, 0] = np.where(self._first.kind == Kind.SHARD, self._first.extent[:, 0], 0)

    def local_plan(self, rank: int) -> LocalPlan:
        """What a rank sends with us; all ranks' plans share what doesn't differ."""
        return replace(self._first, offset=rank * self._stride)

    def save_plan(self, rank: int) -> SavePlan:
        """What a rank sends with torch's default planner."""
        tensors = [self._write_item(index, rank) for index in range(len(self._shapes))]
        items = [*tensors, WriteItem(index=MetadataIndex(self._names[-1]), type=WriteItemType.BYTE_IO)]
        return SavePlan(items, planner_data=dict(zip(self._names, self._paths, strict=True)))

    def written(self, whole: GlobalPlan) -> list[Written]:
        """What every rank has put into its segment by this plan; byte items come behind the layout."""
        layouts: dict[bytes, Layout] = {}
        return [self._written(rank, whole.rows_of(rank), layouts) for rank in range(self._ranks)]

    def segments(self, parts: Sequence[Written], nodes: Sequence[str]) -> list[Segment]:
        """The segments that go with that."""
        return [
            Segment(
                part.rank,
                node,
                segment_file(part.rank, SAVE_ID),
                part.layout.nbytes + BYTES_OF_OBJECT * (len(part.rows) - len(part.layout)),
                part.layout.key,
                tuple(
                    (part.layout.nbytes + BYTES_OF_OBJECT * number, BYTES_OF_OBJECT)
                    for number in range(len(part.rows) - len(part.layout))
                ),
            )
            for part, node in zip(parts, nodes, strict=True)
        ]

    def _written(self, rank: int, rows: Ints, layouts: dict[bytes, Layout]) -> Written:
        plan = self._first
        is_object = plan.kind[rows] == Kind.OBJECT
        tensors = rows[~is_object]
        if tensors.tobytes() not in layouts:
            shapes = zip(plan.extent[tensors].tolist(), plan.dimensions[tensors].tolist(), strict=True)
            layouts[tensors.tobytes()] = lay_out([(DTYPE, torch.Size(extent[:count])) for extent, count in shapes])
        return Written(rank, np.concatenate([tensors, rows[is_object]]), layouts[tensors.tobytes()])

    def _rows(self) -> Iterator[Row]:
        kind_of_all = properties(DTYPE, torch.strided, requires_grad=False, pin_memory=False)
        for index, shape in enumerate(self._shapes):
            kind = Kind.SHARD if self._is_sharded[index] else Kind.TENSOR
            yield Row(index, kind, kind_of_all, (shape, (0,) * len(shape), self._extent(index)))

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


def _tensors(parts: Mapping[str, tuple[int, ...]], count: int) -> list[tuple[str, tuple[int, ...]]]:
    """So many tensors of a model whose layers have these parts."""
    of_layer = list(parts.items())
    numbers = (divmod(index, len(of_layer)) for index in range(count))
    return [(f"model.layers.{layer}.{of_layer[part][0]}", of_layer[part][1]) for layer, part in numbers]
