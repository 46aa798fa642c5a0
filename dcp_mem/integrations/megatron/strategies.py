"""Strategies for Megatron's `dist_checkpointing`: its planners, our writer and reader."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
    _replace_sharded_keys_with_state_dict_keys,
    _replace_state_dict_keys_with_sharded_keys,
    _restore_dict_types,
    _unwrap_pyt_sharded_tensor,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)

from dcp_mem.comm.bridge.errors import cause_of, is_mistake_of_all
from dcp_mem.common.arguments import one_of
from dcp_mem.common.log import log
from dcp_mem.errors import CheckpointNotFound, DcpMemError
from dcp_mem.integrations.megatron import releases
from dcp_mem.integrations.megatron.common import (
    BACKEND,
    COMMON,
    UNKNOWN_OBJECTS,
    VERSION,
    common_object,
    put_common_file,
)
from dcp_mem.manager.options import OnError
from dcp_mem.reader import MemoryStorageReader
from dcp_mem.writer import MemoryStorageWriter

Directory = str | os.PathLike[str]

_ITERATION = re.compile(r"iter_(\d+)")


class MegatronCheckpointNotFound(CheckpointNotFound, CheckpointingException):  # type: ignore[misc]
    """There is no such checkpoint; Megatron's CheckpointingException, as its callers expect it."""


def not_found(error: CheckpointNotFound, checkpoint_dir: Directory) -> MegatronCheckpointNotFound:
    """Return the error as Megatron's, with what Megatron says of such a directory as a reason."""
    directory, reasons = os.fspath(checkpoint_dir), list(error.reasons)
    if "://" not in directory:
        if not os.path.isdir(directory):
            reasons.append(f"Checkpoint directory {directory} does not exist")
        elif not os.path.exists(os.path.join(directory, CONFIG_FNAME)):
            reasons.append(f"{directory} is not a distributed checkpoint")
    return MegatronCheckpointNotFound(error.checkpoint, error.where, error.available, reasons)


@contextmanager
def not_found_as_megatrons(checkpoint_dir: Directory) -> Iterator[None]:
    """Raise a CheckpointNotFound of the block as one that is a CheckpointingException, too."""
    try:
        yield
    except MegatronCheckpointNotFound:
        raise
    except (CheckpointNotFound, CheckpointException) as error:
        cause = cause_of(error, None)
        if not isinstance(cause, CheckpointNotFound):
            raise
        raise not_found(cause, checkpoint_dir) from None


class MemorySaveStrategy(TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """A sharded_strategy with which `dist_checkpointing.save` saves into node memory.

    The save returns when the checkpoint is complete in memory. The checkpoint is called as the last
    part of checkpoint_dir, "iter_0000010", and lies under the writer's path. If that path is
    checkpoint_dir's parent, Megatron's own loader finds on storage what it expects. What Megatron
    has put into `common.pt` there goes along. Several strategies may share a writer.

    An async save is no different: all is done when it returns, and its request only has to be
    finalized.

    Args:
        writer: The writer of the checkpoint's root.
        metrics: As in `MemoryStorageWriter.annotate_next_save`, for each save.
        persist: As in `MemoryStorageWriter.annotate_next_save`, for each save.
        on_error: As in `MemoryCheckpointing`. "raise" is the default here: Megatron's own `save`
            would name a checkpoint in its files that isn't there.
    """

    def __init__(
        self,
        writer: MemoryStorageWriter,
        *,
        metrics: Mapping[str, Any] | None = None,
        persist: bool = False,
        on_error: OnError = "raise",
    ) -> None:
        releases.check_release()
        one_of("on_error", on_error, OnError)
        super().__init__(BACKEND, VERSION)
        self.writer = writer
        self.metrics = metrics
        self.persist = persist
        self.on_error = on_error

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Directory) -> None:
        """Save; return when the checkpoint is complete in memory. Call it on all ranks."""
        name = name_of(checkpoint_dir)
        sharded, _, _ = _replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, self.keep_only_main_replica
        )
        if releases.MEGATRONS_COMMON in sharded:  # on rank 0
            put_common_file(sharded[releases.MEGATRONS_COMMON][0].data, checkpoint_dir)
        elif dist.get_rank() == 0 and (common := common_object(checkpoint_dir)) is not None:
            sharded[COMMON] = [common]
        self.writer.annotate_next_save(
            step=iteration_of(name), metrics=self.metrics, persist=self.persist
        )
        state = mcore_to_pyt_state_dict(sharded, False)
        planner = MCoreSavePlanner(
            dedup_replicated_tensors=not self.keep_only_main_replica,
            flatten_state_dict=False,
            can_run_decentralized_global_plan=False,
        )
        try:
            dcp.save(state, checkpoint_id=name, storage_writer=self.writer, planner=planner)
        except (Exception, CheckpointException) as error:
            # All ranks raise here together, so none is alone in what Megatron does next.
            cause = error.__cause__ if isinstance(error, CheckpointException) else error
            cause = cause or cause_of(error, None)
            if self.on_error == "raise" or is_mistake_of_all(cause, None):
                raise
            is_unexpected = not isinstance(cause, DcpMemError)
            log.warning(
                "%s is not saved: %s", name, cause, exc_info=cause if is_unexpected else None
            )

    def async_save(
        self,
        sharded_state_dict: dict[str, Any],
        checkpoint_dir: Directory,
        async_strategy: str = "mcore",
    ) -> AsyncRequest:
        """Save, and return a request that is done already.

        `async_strategy`: whose queue it is for: "dcp_mem", "mcore" or "nvrx".
        """
        request = releases.done_request(async_strategy)
        self.save(sharded_state_dict, checkpoint_dir)
        return request


class MemoryLoadStrategy(TorchDistLoadShardedStrategy):  # type: ignore[misc]
    """A sharded_strategy with which `dist_checkpointing.load` loads from memory, else from storage.

    The checkpoint is the one under the reader's path that is called as the last part of
    checkpoint_dir. It may have been saved with other TP, PP and DP sizes. `dist_checkpointing.load`
    also needs checkpoint_dir itself, with `common.pt` and `metadata.json`;
    `MemoryCheckpointing.load` doesn't.

    Args:
        reader: The reader of the checkpoint's root.
    """

    def __init__(self, reader: MemoryStorageReader) -> None:
        releases.check_release()
        super().__init__()
        self.reader = reader

    def load(
        self,
        sharded_state_dict: dict[str, Any],
        checkpoint_dir: Directory,
        async_strategy: str = "mcore",
    ) -> dict[str, Any]:
        """Load into the tensors, and return them. Call it on all ranks.

        Raises MegatronCheckpointNotFound.
        """
        tensors = [
            value for value in nested_values(sharded_state_dict) if isinstance(value, ShardedTensor)
        ]
        sharded, paths, keys = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict)
        state = mcore_to_pyt_state_dict(sharded, True)
        planner = releases.load_planner(
            self,
            shapes_validation_sharded_tensors=[
                one for one in tensors if not one.allow_shape_mismatch
            ],
            allow_shape_mismatch_sharded_tensors={
                one.key: one for one in tensors if one.allow_shape_mismatch
            },
        )
        with not_found_as_megatrons(checkpoint_dir):
            dcp.load(
                state,
                checkpoint_id=name_of(checkpoint_dir),
                storage_reader=self.reader,
                planner=planner,
                process_group=self.reader._process_group,
            )
        # Megatron-LM hands it to its save strategy.
        self.cached_global_metadata = planner.metadata
        unwrapped = {key: _unwrap_pyt_sharded_tensor(value) for key, value in state.items()}
        loaded: dict[str, Any] = _replace_sharded_keys_with_state_dict_keys(unwrapped, paths, keys)
        _restore_dict_types(loaded, sharded_state_dict)
        return loaded

    def load_tensors_metadata(
        self, checkpoint_dir: Directory, metadata: Metadata | None = None
    ) -> dict[str, Any]:
        """Return every tensor of the checkpoint by its key, whole and without data.

        Call it on all ranks.
        """
        metadata = metadata or self.metadata(checkpoint_dir)
        for entry in metadata.state_dict_metadata.values():
            if isinstance(entry, TensorStorageMetadata):
                # Megatron 0.16 passes all properties to torch.empty, which doesn't take the
                # strides that torch 2.15 notes.
                entry.properties.__dict__.pop("strides", None)
        found: dict[str, Any] = super().load_tensors_metadata(checkpoint_dir, metadata)
        return found

    def load_sharded_metadata(self, checkpoint_dir: Directory) -> dict[str, Any]:
        """Return every tensor and object of the checkpoint by its key. Call it on all ranks."""
        metadata = self.metadata(checkpoint_dir)
        objects = [
            ShardedObject.empty_from_unique_key(key)
            for key, value in metadata.state_dict_metadata.items()
            if isinstance(value, BytesStorageMetadata) and key not in UNKNOWN_OBJECTS
        ]
        return {one.unique_key: one for one in objects} | self.load_tensors_metadata(
            checkpoint_dir, metadata
        )

    def metadata(self, checkpoint_dir: Directory) -> Metadata:
        """Return DCP's metadata of the checkpoint. Raises MegatronCheckpointNotFound."""
        self.reader.reset(name_of(checkpoint_dir))
        with self.reader, not_found_as_megatrons(checkpoint_dir):
            return self.reader.read_metadata()


def name_of(checkpoint_dir: Directory) -> str:
    """Return a checkpoint's name under its root: the last part of Megatron's directory."""
    return os.path.basename(os.fspath(checkpoint_dir).rstrip("/"))


def iteration_of(name: str) -> int | None:
    """Return the iteration in a checkpoint's name; None if there is none."""
    match = _ITERATION.fullmatch(name)
    return int(match[1]) if match else None
