"""Checkpoints of large training jobs, in node memory first: a storage layer for `torch.distributed.checkpoint`.

dcp.save(state, checkpoint_id="step-100", storage_writer=MemoryStorageWriter("abfs://ckpts/run-42"))
dcp.load(state, storage_reader=MemoryStorageReader("abfs://ckpts/run-42"))
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dcp_mem.config import Parity, parity
from dcp_mem.errors import (
    CheckpointExists,
    CheckpointInUse,
    CheckpointNotFound,
    ConfigError,
    CredentialsExpired,
    DcpMemError,
    FlushFailed,
    JobInUse,
    ManifestInvalid,
    MemoryBudgetExceeded,
    MemoryRootRefused,
    MemoryUnavailable,
    NoRecoverableCheckpoint,
    RankFailed,
    ReplicationFailed,
    SegmentCorrupt,
    StorageKeyMissing,
    StorageRefused,
    StorageUnavailable,
    UntrustedMetadata,
    UntrustedObject,
    WaitTimeout,
)
from dcp_mem.policy.frequency import Advice, Auto, advice, auto
from dcp_mem.policy.persistence import Persist, every, interval
from dcp_mem.policy.retention import Retention, any_of, keep_best, keep_every, keep_last
from dcp_mem.values import CheckpointStatus, State, Transfer

if TYPE_CHECKING:
    from dcp_mem.api import load, save
    from dcp_mem.app import TrainState
    from dcp_mem.flushing.leftovers import Leftover
    from dcp_mem.manager import CheckpointManager, Saved
    from dcp_mem.operating.housekeeping import Reclaimed, collect_leftovers, delete, reclaim
    from dcp_mem.reader import MemoryStorageReader
    from dcp_mem.writer import MemoryStorageWriter

__version__ = "0.1.0"

# The agent imports this package too, and has no use for torch: what needs it is imported on first use.
_LAZY = {
    "CheckpointManager": "dcp_mem.manager",
    "Saved": "dcp_mem.manager",
    "Leftover": "dcp_mem.flushing.leftovers",
    "MemoryStorageReader": "dcp_mem.reader",
    "MemoryStorageWriter": "dcp_mem.writer",
    "Reclaimed": "dcp_mem.operating.housekeeping",
    "TrainState": "dcp_mem.app",
    "collect_leftovers": "dcp_mem.operating.housekeeping",
    "delete": "dcp_mem.operating.housekeeping",
    "load": "dcp_mem.api",
    "reclaim": "dcp_mem.operating.housekeeping",
    "save": "dcp_mem.api",
}

__all__ = [
    "Advice",
    "Auto",
    "CheckpointExists",
    "CheckpointInUse",
    "CheckpointManager",
    "CheckpointNotFound",
    "CheckpointStatus",
    "ConfigError",
    "CredentialsExpired",
    "DcpMemError",
    "FlushFailed",
    "JobInUse",
    "Leftover",
    "ManifestInvalid",
    "MemoryBudgetExceeded",
    "MemoryRootRefused",
    "MemoryStorageReader",
    "MemoryStorageWriter",
    "MemoryUnavailable",
    "NoRecoverableCheckpoint",
    "Parity",
    "Persist",
    "RankFailed",
    "Reclaimed",
    "ReplicationFailed",
    "Retention",
    "Saved",
    "SegmentCorrupt",
    "State",
    "StorageKeyMissing",
    "StorageRefused",
    "StorageUnavailable",
    "TrainState",
    "Transfer",
    "UntrustedMetadata",
    "UntrustedObject",
    "WaitTimeout",
    "advice",
    "any_of",
    "auto",
    "collect_leftovers",
    "delete",
    "every",
    "interval",
    "keep_best",
    "keep_every",
    "keep_last",
    "load",
    "parity",
    "reclaim",
    "save",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'dcp_mem' has no attribute {name!r}")
