"""Loading all of a checkpoint into plain tensors, without a state dict to load into: its metadata says what there is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from dcp_mem.format.catalog import Catalog, Extent
from dcp_mem.planning.load import LocalLoadPlanner
from dcp_mem.planning.reads import Reads


def blank_tensors(metadata: Metadata) -> dict[str, torch.Tensor]:
    """A tensor without values for each one of a checkpoint, whole and on the CPU, by flattened name."""
    return {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def paths_of(metadata: Metadata) -> dict[str, tuple[str | int, ...]]:
    """Where each flattened name was in the state dict."""
    paths = metadata.planner_data or {}
    return {name: paths.get(name, (name,)) for name in metadata.state_dict_metadata}


def nested(metadata: Metadata, values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by flattened name, nested as they were in the state dict that was saved."""
    return unflatten_state_dict(dict(values), paths_of(metadata))


class WholePlanner(LocalLoadPlanner):
    """Fills an empty state dict with all that the checkpoint has: each rank gets whole tensors, however they were sharded."""

    def plan(
        self, state: dict[str, Any], catalog: Catalog, save_id: str, tails: Mapping[int, Sequence[Extent]]
    ) -> Reads | None:
        return None  # `set_up_planner` gets the metadata, which an empty state dict needs

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        assert metadata is not None
        values = dict[str, Any].fromkeys(metadata.state_dict_metadata) | blank_tensors(metadata)
        state_dict.clear()
        state_dict.update(nested(metadata, values))
        super().set_up_planner(state_dict, metadata, is_coordinator)
