"""The configuration of torch_checkpointing's manager: where checkpoints go, how they complete."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch.distributed as dist
from torch_checkpointing.checkpoint_writer import DEFAULT_TEMP_DIR_PREFIX, CallbackArgs
from torch_checkpointing.storage.base_storage import StorageConfig
from typing_extensions import Unpack

from dcp_mem.comm import refuse_missing_group, world_size
from dcp_mem.common.arguments import takes
from dcp_mem.config import Settings
from dcp_mem.errors import ConfigError, FlushFailed
from dcp_mem.integrations.torch_checkpointing.storage import MemoryStorage
from dcp_mem.operations.flush import flush_now
from dcp_mem.options import DEFAULTS, WriterOptions, settings
from dcp_mem.writer import MemoryStorageWriter

_count = itertools.count()
_PLACES = ("memory_root", "job", "storage_options")


@dataclass
class MemoryStorageConfig(StorageConfig):  # type: ignore[misc]
    """The configuration of a `MemoryStorage`, in the trainer and in the process that writes.

    Attributes:
        path: The job's root on storage; None for memory alone.
        options: Further arguments of `MemoryStorageWriter`; not in repr, because they may hold
            secrets.
        ranks: How many ranks save together.
        temp_dir_prefix: As in CheckpointWriterConfig.
    """

    path: str | None = None
    options: dict[str, Any] = field(default_factory=dict, repr=False)
    ranks: int = 1
    temp_dir_prefix: str = DEFAULT_TEMP_DIR_PREFIX

    def create_storage(self) -> MemoryStorage:
        """Make a storage; a writing one takes hold of the job's memory with its first file."""
        return MemoryStorage(self)

    def settings(self) -> Settings:
        """Return the job's settings, as far as readers need them."""
        places = {name: self.options[name] for name in _PLACES if name in self.options}
        return settings(self.path, **places)

    def flush(self, timeout: float | None = None) -> None:
        """Wait until all complete checkpoints of this node's memory are on storage.

        Args:
            timeout: Seconds; None waits for as long as it takes.

        Raises:
            WaitTimeout: The time ran out.
            FlushFailed: Storage refuses one.
            ConfigError: There is no storage.
        """
        failed = [one for one in flush_now(self.settings(), timeout=timeout) if one.error]
        if failed:
            raise FlushFailed(failed[0].name, failed[0].error)


def complete(arguments: CallbackArgs) -> None:
    """Make a checkpoint of the files that all ranks have written; a `finalize_callback`.

    When it returns, the checkpoint is complete in memory. Storage gets it behind training.

    Args:
        arguments: From torch_checkpointing.

    Raises:
        CheckpointExists: There is a checkpoint of that name; `overwrite=True` replaces it.
        RankFailed: Another rank has failed.
    """
    storage = arguments.storage
    if not isinstance(storage, MemoryStorage):
        raise ConfigError(
            f"{type(storage).__name__} is no MemoryStorage: pass all that in_memory() returns"
        )
    storage.complete(arguments.path)


@takes(WriterOptions, DEFAULTS)
def in_memory(
    path: str | os.PathLike[str] | None = None,
    *,
    then: Callable[[CallbackArgs], None] | None = None,
    **options: Unpack[WriterOptions],
) -> dict[str, Any]:
    """Return arguments for torch_checkpointing's `CheckpointManager.Config`.

    Call it on all ranks, once for each manager, and after init_process_group.

    Args:
        path: The job's root on storage: a directory or an fsspec URL. None for memory alone.
        then: Called, as `finalize_callback`, when a checkpoint is complete in memory.
        **options: Further arguments of `MemoryStorageWriter`. Here `overwrite` is False by default,
            as torch_checkpointing asks of a storage, and `on_slow_storage` is "all": each
            checkpoint gets to storage.

    Returns:
        Storage, callback, and what connects the processes that write checkpoints.

    Raises:
        ConfigError: The options can't work, or the ranks' store can't be reached by others.
    """
    config = MemoryStorageConfig(
        None if path is None else os.fspath(path),
        {"overwrite": False, "on_slow_storage": "all", **options},
        ranks=world_size(),
    )
    MemoryStorageWriter(config.path, **config.options)  # Bad options raise now.
    return {
        "storage_config": config,
        "finalize_callback": complete if then is None else partial(_complete_then, then),
        **_connected(),
    }


def _complete_then(then: Callable[[CallbackArgs], None], arguments: CallbackArgs) -> None:
    complete(arguments)
    then(arguments)


def _connected() -> dict[str, Any]:
    """Return what lets the ranks' writing processes form a group of their own."""
    if world_size() == 1:
        refuse_missing_group()
        return {}
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not address or not port.isdecimal():
        raise ConfigError(
            "the processes that write checkpoints meet in the store at MASTER_ADDR and "
            "MASTER_PORT: set both, as torchrun does"
        )
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    prefix = f"dcp_mem/torch_checkpointing/{restart}.{next(_count)}"
    place = (address, int(port), prefix, dist.get_rank(), dist.get_world_size())
    return {"subprocess_init_fn": _join, "subprocess_init_args": place}


def _join(address: str, port: int, prefix: str, rank: int, world_size: int) -> None:
    """Form the group of the processes that write checkpoints, in one of them."""
    store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False)
    dist.init_process_group(
        "gloo", store=dist.PrefixStore(prefix, store), rank=rank, world_size=world_size
    )
