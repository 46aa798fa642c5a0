"""Strategies for Megatron's `dist_checkpointing`: its own translation into DCP's terms, and dcp_mem's writer and reader below."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import megatron.core
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    MCoreSavePlanner,
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
    _replace_sharded_keys_with_state_dict_keys,
    _replace_state_dict_keys_with_sharded_keys,
    _restore_dict_types,
    _unwrap_pyt_sharded_tensor,
    mcore_to_pyt_state_dict,
)
from packaging.version import Version
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata

from dcp_mem.adapters.megatron.common import BACKEND, COMMON, VERSION, common_object
from dcp_mem.errors import ConfigError
from dcp_mem.reader import MemoryStorageReader
from dcp_mem.writer import MemoryStorageWriter

Directory = str | os.PathLike[str]

_ITERATION = re.compile(r"iter_(\d+)")


class MemorySaveStrategy(TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """Has `dist_checkpointing.save` return when the checkpoint is complete in memory; give it as sharded_strategy.

    The checkpoint is called as the last part of checkpoint_dir, "iter_0000010", and lies under the writer's path; with a path
    that is checkpoint_dir's parent, Megatron's own loader finds on storage what it expects. What Megatron has put into
    `common.pt` there goes along. Several strategies may share a writer.

    An async save is no different: all is done when it returns, and the request has nothing left to do but to be finalized.

    metrics, persist: as in `MemoryStorageWriter.tell`, for each save.
    """

    def __init__(
        self, writer: MemoryStorageWriter, *, metrics: Mapping[str, Any] | None = None, persist: bool = False
    ) -> None:
        _check_version()
        super().__init__(BACKEND, VERSION)
        self.writer = writer
        self.metrics = metrics
        self.persist = persist

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Directory) -> None:
        """Save; call it on all ranks. Raises what dcp.save raises."""
        name = name_of(checkpoint_dir)
        sharded, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        if dist.get_rank() == 0 and (common := common_object(checkpoint_dir)) is not None:
            sharded[COMMON] = [common]
        self.writer.tell(step=iteration_of(name), metrics=self.metrics, persist=self.persist)
        dcp.save(
            mcore_to_pyt_state_dict(sharded, False),
            checkpoint_id=name,
            storage_writer=self.writer,
            planner=MCoreSavePlanner(
                dedup_replicated_tensors=not self.keep_only_main_replica,
                flatten_state_dict=False,
                can_run_decentralized_global_plan=False,
            ),
        )

    def async_save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Directory) -> AsyncRequest:
        """Save, and return a request that is done already."""
        self.save(sharded_state_dict, checkpoint_dir)
        return AsyncRequest(None, (), [])


class MemoryLoadStrategy(TorchDistLoadShardedStrategy):  # type: ignore[misc]
    """Has `dist_checkpointing.load` take a checkpoint from memory, else from storage; give it as sharded_strategy.

    The checkpoint is that of the reader's path which is called as the last part of checkpoint_dir. It may have been saved with
    other TP, PP and DP sizes. `dist_checkpointing.load` also wants checkpoint_dir to be there, with `common.pt` and
    `metadata.json`; `MemoryCheckpointing.load` doesn't.
    """

    def __init__(self, reader: MemoryStorageReader) -> None:
        _check_version()
        super().__init__()
        self.reader = reader

    def load(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Directory) -> dict[str, Any]:
        """Load into the tensors, and return them; call it on all ranks. Raises what dcp.load raises."""
        tensors = [value for value in nested_values(sharded_state_dict) if isinstance(value, ShardedTensor)]
        sharded, paths, keys = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict)
        state = mcore_to_pyt_state_dict(sharded, True)
        dcp.load(
            state,
            checkpoint_id=name_of(checkpoint_dir),
            storage_reader=self.reader,
            planner=MCoreLoadPlanner(
                shapes_validation_sharded_tensors=[one for one in tensors if not one.allow_shape_mismatch],
                allow_shape_mismatch_sharded_tensors={one.key: one for one in tensors if one.allow_shape_mismatch},
            ),
        )
        unwrapped = {key: _unwrap_pyt_sharded_tensor(value) for key, value in state.items()}
        loaded: dict[str, Any] = _replace_sharded_keys_with_state_dict_keys(unwrapped, paths, keys)
        _restore_dict_types(loaded, sharded_state_dict)
        return loaded

    def load_tensors_metadata(self, checkpoint_dir: Directory, metadata: Metadata | None = None) -> dict[str, Any]:
        """Every tensor of the checkpoint by its key, whole and without data. Call it on all ranks."""
        metadata = metadata or self.metadata(checkpoint_dir)
        for entry in metadata.state_dict_metadata.values():
            if isinstance(entry, TensorStorageMetadata):
                # Megatron 0.16 hands all that is noted of a tensor to torch.empty, which takes none of torch 2.15's strides.
                entry.properties.__dict__.pop("strides", None)
        found: dict[str, Any] = super().load_tensors_metadata(checkpoint_dir, metadata)
        return found

    def load_sharded_metadata(self, checkpoint_dir: Directory) -> dict[str, Any]:
        """The same, and every object. Call it on all ranks."""
        metadata = self.metadata(checkpoint_dir)
        objects = [
            ShardedObject.empty_from_unique_key(key)
            for key, value in metadata.state_dict_metadata.items()
            if isinstance(value, BytesStorageMetadata) and key != COMMON
        ]
        return {one.unique_key: one for one in objects} | self.load_tensors_metadata(checkpoint_dir, metadata)

    def metadata(self, checkpoint_dir: Directory) -> Metadata:
        """DCP's metadata of the checkpoint. Raises CheckpointNotFound."""
        self.reader.reset(name_of(checkpoint_dir))
        with self.reader:
            return self.reader.read_metadata()


def _check_version() -> None:
    # Earlier ones cut tensors of the optimizer into flat pieces, which loads in other shapes have to know of.
    if Version(megatron.core.__version__) < Version("0.16"):
        raise ConfigError(f"megatron-core {megatron.core.__version__} is too old: install 0.16 or newer")


def name_of(checkpoint_dir: Directory) -> str:
    """What a checkpoint is called under its root: the last part of Megatron's directory."""
    return os.path.basename(os.fspath(checkpoint_dir).rstrip("/"))


def iteration_of(name: str) -> int | None:
    """Which iteration a checkpoint is of, by its name; None where that doesn't say."""
    match = _ITERATION.fullmatch(name)
    return int(match[1]) if match else None
