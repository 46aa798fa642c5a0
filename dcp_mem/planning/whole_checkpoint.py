"""Loading all of a checkpoint into plain tensors, without a state dict to load into."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from dcp_mem.errors import SizeRefused
from dcp_mem.format.catalog import Catalog, Tails
from dcp_mem.planning.load_planner import LocalLoadPlanner
from dcp_mem.planning.reads import Reads


def blank_tensors(metadata: Metadata) -> dict[str, torch.Tensor]:
    """Return an uninitialised CPU tensor for each of a checkpoint's tensors, by flattened name."""
    return {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def paths_of(metadata: Metadata) -> dict[str, tuple[str | int, ...]]:
    """Return the path of each flattened name in the state dict that was saved.

    `metadata`: DCP's metadata of the checkpoint; without planner data a path is the name alone.
    """
    paths = metadata.planner_data or {}
    return {name: paths.get(name, (name,)) for name in metadata.state_dict_metadata}


def nested(metadata: Metadata, values: Mapping[str, Any]) -> dict[str, Any]:
    """Nest values as they were nested in the state dict that was saved."""
    return unflatten_state_dict(dict(values), paths_of(metadata))


class WholePlanner(LocalLoadPlanner):
    """Fills an empty state dict with all of a checkpoint.

    Each rank gets whole tensors, however they were sharded.
    """

    def plan(
        self,
        state: dict[str, Any],
        catalog: Catalog,
        save_id: str,
        tails: Tails,
        *,
        into_devices: bool = False,
    ) -> Reads | None:
        """Return None: an empty state dict is filled by `set_up_planner`, from DCP's metadata."""
        return None

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Fill the state dict with what the metadata lists, then plan as usual.

        `state_dict`: what it held is dropped. `metadata`: DCP's metadata of the checkpoint; never
        None here. Raises SizeRefused.
        """
        assert metadata is not None
        _refuse_more_than_this_machine_has(metadata)
        values = dict[str, Any].fromkeys(metadata.state_dict_metadata) | blank_tensors(metadata)
        state_dict.clear()
        state_dict.update(nested(metadata, values))
        super().set_up_planner(state_dict, metadata, is_coordinator)


def _refuse_more_than_this_machine_has(metadata: Metadata) -> None:
    claimed = sum(
        entry.size.numel() * entry.properties.dtype.itemsize
        for entry in metadata.state_dict_metadata.values()
        if isinstance(entry, TensorStorageMetadata)
    )
    held = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if claimed > held:
        raise SizeRefused("the checkpoint's tensors, in this machine's memory", claimed, held)
