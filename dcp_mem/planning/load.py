"""Planning a load: each rank finds by itself what it needs, and nothing has to be exchanged for that.

Chunks that were saved as they are needed are found at once; where a state dict is sharded otherwise, torch's own algorithm
cuts the reads. Whatever is unusual goes through `DefaultLoadPlanner`, so that results and errors are torch's.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import _create_read_items, create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor

from dcp_mem.errors import UntrustedObject
from dcp_mem.planning.columns import NotDescribable
from dcp_mem.planning.local import Structure


class LocalLoadPlanner(DefaultLoadPlanner):
    """Torch's default planner, quicker, and careful with byte items.

    weights_only: unpickle byte items as `torch.load(weights_only=True)` does; otherwise freely, as torch's planner does.
    """

    def __init__(self, *, weights_only: bool, allow_partial_load: bool = False) -> None:
        super().__init__(allow_partial_load=allow_partial_load)
        self._weights_only = weights_only
        self._structure: Structure | None = None

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self._structure = _described(state_dict)
        if self._structure is None:
            super().set_up_planner(state_dict, metadata, is_coordinator)
            return
        plan = self._structure.plan
        self.original_state_dict = state_dict
        self.mappings = dict(zip(plan.names, plan.paths, strict=True))
        self.state_dict = dict(zip(plan.names, self._structure.leaves_of(state_dict), strict=True))
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        if self._structure is None or self.metadata.state_dict_metadata.keys() != self.state_dict.keys():
            self._structure = None  # missing keys, partial loads and checkpoints of old versions are torch's
            return super().create_local_plan()
        return LoadPlan(list(self._read_items(self._structure, self.metadata.state_dict_metadata)))

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        found = self.state_dict[read_item.dest_index.fqn]
        local = found._local_tensor if type(found) is DTensor else found
        if self._structure is not None and local.shape == read_item.lengths:
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

    def _read_items(self, structure: Structure, known: dict[str, Any]) -> Iterator[ReadItem]:
        plan = structure.plan
        columns = (plan.name, plan.dimensions, plan.size, plan.offset, plan.extent)
        guess = 0  # ranks have the same place in most tensors
        for name, dimensions, size, offset, extent in zip(*(column.tolist() for column in columns), strict=True):
            fqn = plan.names[name]
            entry = known[fqn]
            if not isinstance(entry, TensorStorageMetadata) or not isinstance(self.state_dict[fqn], torch.Tensor):
                yield from _create_read_items(fqn, entry, self.state_dict[fqn])
                continue
            if list(entry.size) != size[:dimensions]:
                raise ValueError(
                    f"Size mismatch between saved {entry.size} and current: {torch.Size(size[:dimensions])} for {fqn}"
                )
            chunk = ChunkStorageMetadata(offsets=torch.Size(offset[:dimensions]), sizes=torch.Size(extent[:dimensions]))
            guess = guess if guess < len(entry.chunks) and entry.chunks[guess] == chunk else _find(entry, chunk)
            if guess < 0 or 0 in chunk.sizes:
                yield from create_read_items_for_chunk_list(fqn, entry, [chunk])
                guess = 0
                continue
            nowhere = torch.Size([0] * dimensions)
            yield ReadItem(
                type=LoadItemType.TENSOR,
                dest_index=MetadataIndex(fqn, chunk.offsets, 0),
                dest_offsets=nowhere,
                storage_index=MetadataIndex(fqn, chunk.offsets, guess),
                storage_offsets=nowhere,
                lengths=chunk.sizes,
            )


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


def _find(entry: TensorStorageMetadata, chunk: ChunkStorageMetadata) -> int:
    return next((index for index, saved in enumerate(entry.chunks) if saved == chunk), -1)
