"""Checkpoints in node memory first: a storage layer for `torch.distributed.checkpoint`.

dcp.save(state, checkpoint_id="step-100", storage_writer=MemoryStorageWriter("abfs://ckpts/run-42"))
dcp.load(state, storage_reader=MemoryStorageReader("abfs://ckpts/run-42"))
"""

from __future__ import annotations

import importlib
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from dcp_mem.common.releases import warn_if_untested
from dcp_mem.common.values import CheckpointStatus, ExportState, State, Transfer
from dcp_mem.config import Parity, parity
from dcp_mem.errors import (
    CheckpointExists,
    CheckpointInUse,
    CheckpointNotFound,
    ConfigError,
    CredentialsExpired,
    DcpMemError,
    EntriesMissing,
    FlushFailed,
    JobInUse,
    ManifestInvalid,
    MemoryBudgetExceeded,
    MemoryRootRefused,
    MemoryUnavailable,
    NoRecoverableCheckpoint,
    NotOfOneSave,
    RankFailed,
    ReplicationFailed,
    SegmentCorrupt,
    SizeRefused,
    StorageKeyMissing,
    StorageRefused,
    StorageTaken,
    StorageUnavailable,
    UntrustedMetadata,
    UntrustedObject,
    WaitTimeout,
)
from dcp_mem.policy.frequency import Advice, Auto, advice, auto
from dcp_mem.policy.persistence import Persist, every_n_saves, every_n_steps, every_seconds
from dcp_mem.policy.retention import Retention, any_of, keep_best, keep_every, keep_for, keep_last

if TYPE_CHECKING:
    from dcp_mem.export import HuggingFaceExport
    from dcp_mem.flushing.orphans import Orphan
    from dcp_mem.following.checkpoint import CheckpointFiles, FollowedCheckpoint
    from dcp_mem.following.follower import Follower, follow
    from dcp_mem.functional.loads import load
    from dcp_mem.functional.saves import async_save, save
    from dcp_mem.manager.checkpoint_manager import CheckpointManager
    from dcp_mem.manager.options import ManagerOptions
    from dcp_mem.manager.saved import Saved
    from dcp_mem.operations.housekeeping import Reclaimed, collect_orphans, delete, reclaim
    from dcp_mem.options import ReaderOptions, WriterOptions
    from dcp_mem.reader import MemoryStorageReader
    from dcp_mem.saving.overlap import Overlap
    from dcp_mem.serving import Served, serve
    from dcp_mem.train_state.state import TrainState
    from dcp_mem.writer import MemoryStorageWriter

__version__ = "0.1.0"

# What needs torch is imported on first use: the agent imports this package, and needs no torch.
_LAZY = {
    "CheckpointFiles": "dcp_mem.following.checkpoint",
    "FollowedCheckpoint": "dcp_mem.following.checkpoint",
    "Follower": "dcp_mem.following.follower",
    "follow": "dcp_mem.following.follower",
    "CheckpointManager": "dcp_mem.manager.checkpoint_manager",
    "HuggingFaceExport": "dcp_mem.export",
    "ManagerOptions": "dcp_mem.manager.options",
    "ReaderOptions": "dcp_mem.options",
    "WriterOptions": "dcp_mem.options",
    "Saved": "dcp_mem.manager.saved",
    "Orphan": "dcp_mem.flushing.orphans",
    "MemoryStorageReader": "dcp_mem.reader",
    "MemoryStorageWriter": "dcp_mem.writer",
    "Overlap": "dcp_mem.saving.overlap",
    "Reclaimed": "dcp_mem.operations.housekeeping",
    "Served": "dcp_mem.serving",
    "TrainState": "dcp_mem.train_state.state",
    "async_save": "dcp_mem.functional.saves",
    "collect_orphans": "dcp_mem.operations.housekeeping",
    "delete": "dcp_mem.operations.housekeeping",
    "load": "dcp_mem.functional.loads",
    "reclaim": "dcp_mem.operations.housekeeping",
    "save": "dcp_mem.functional.saves",
    "serve": "dcp_mem.serving",
}

__all__ = [
    "Advice",
    "Auto",
    "CheckpointExists",
    "CheckpointFiles",
    "CheckpointInUse",
    "CheckpointManager",
    "CheckpointNotFound",
    "CheckpointStatus",
    "ConfigError",
    "CredentialsExpired",
    "DcpMemError",
    "EntriesMissing",
    "ExportState",
    "FlushFailed",
    "FollowedCheckpoint",
    "Follower",
    "HuggingFaceExport",
    "JobInUse",
    "ManagerOptions",
    "ManifestInvalid",
    "MemoryBudgetExceeded",
    "MemoryRootRefused",
    "MemoryStorageReader",
    "MemoryStorageWriter",
    "MemoryUnavailable",
    "NoRecoverableCheckpoint",
    "NotOfOneSave",
    "Orphan",
    "Overlap",
    "Parity",
    "Persist",
    "RankFailed",
    "ReaderOptions",
    "Reclaimed",
    "ReplicationFailed",
    "Retention",
    "Saved",
    "SegmentCorrupt",
    "Served",
    "SizeRefused",
    "State",
    "StorageKeyMissing",
    "StorageRefused",
    "StorageTaken",
    "StorageUnavailable",
    "TrainState",
    "Transfer",
    "UntrustedMetadata",
    "UntrustedObject",
    "WaitTimeout",
    "WriterOptions",
    "advice",
    "any_of",
    "async_save",
    "auto",
    "collect_orphans",
    "delete",
    "every_n_saves",
    "every_n_steps",
    "every_seconds",
    "follow",
    "keep_best",
    "keep_every",
    "keep_for",
    "keep_last",
    "load",
    "parity",
    "reclaim",
    "save",
    "serve",
]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


if not TYPE_CHECKING:  # Type checkers would take any name for one that it returns.

    def __getattr__(name: str) -> Any:
        if name in _LAZY:
            warn_if_untested("torch")
            return getattr(importlib.import_module(_LAZY[name]), name)
        nearest = get_close_matches(name, __all__, 1)
        meant = f": did you mean {nearest[0]}?" if nearest and not name.startswith("_") else ""
        raise AttributeError(f"module 'dcp_mem' has no attribute {name!r}{meant}")
