"""DCP's `Metadata` of a global plan: what torch's own planner would have made of the same state dicts."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_mem.planning.columns import Kind, Properties
from dcp_mem.planning.merge import GlobalPlan


def describe(plan: GlobalPlan) -> tuple[Metadata, list[MetadataIndex]]:
    """The metadata, without storage data, and the index of each of the plan's items."""
    known: dict[str, Any] = {}
    indexes = []
    table = [_properties(one) for one in plan.table]
    columns = (plan.name, plan.kind, plan.properties, plan.dimensions, plan.size, plan.offset, plan.extent)
    for name, kind, properties, dimensions, size, offset, extent in zip(
        *(column.tolist() for column in columns), strict=True
    ):
        fqn = plan.names[name]
        if kind == Kind.OBJECT:
            known[fqn] = BytesStorageMetadata()
            indexes.append(MetadataIndex(fqn))
            continue
        entry = known.get(fqn)
        if entry is None:
            entry = known[fqn] = TensorStorageMetadata(table[properties], torch.Size(size[:dimensions]), [])
        place = torch.Size(offset[:dimensions])
        indexes.append(MetadataIndex(fqn, place, len(entry.chunks)))
        entry.chunks.append(ChunkStorageMetadata(offsets=place, sizes=torch.Size(extent[:dimensions])))
    paths = dict(zip(plan.names, plan.paths, strict=True))
    return Metadata(state_dict_metadata=known, planner_data=paths), indexes


def _properties(one: Properties) -> TensorProperties:
    return TensorProperties(
        dtype=one.dtype,
        layout=one.layout,
        requires_grad=one.requires_grad,
        memory_format=torch.contiguous_format,
        pin_memory=one.pin_memory,
    )
