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
from dcp_mem.policy.persistence import Persist, every, interval
from dcp_mem.values import CheckpointStatus, State, Transfer

if TYPE_CHECKING:
    from dcp_mem.api import load, save
    from dcp_mem.flushing.leftovers import Leftover
    from dcp_mem.housekeeping import Reclaimed, collect_leftovers, delete, reclaim
    from dcp_mem.reader import MemoryStorageReader
    from dcp_mem.writer import MemoryStorageWriter

__version__ = "0.1.0"

# The agent imports this package too, and has no use for torch: what needs it is imported on first use.
_LAZY = {
    "Leftover": "dcp_mem.flushing.leftovers",
    "MemoryStorageReader": "dcp_mem.reader",
    "MemoryStorageWriter": "dcp_mem.writer",
    "Reclaimed": "dcp_mem.housekeeping",
    "collect_leftovers": "dcp_mem.housekeeping",
    "delete": "dcp_mem.housekeeping",
    "load": "dcp_mem.api",
    "reclaim": "dcp_mem.housekeeping",
    "save": "dcp_mem.api",
}

__all__ = [
    "CheckpointExists",
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
    "SegmentCorrupt",
    "State",
    "StorageKeyMissing",
    "StorageRefused",
    "StorageUnavailable",
    "Transfer",
    "UntrustedMetadata",
    "UntrustedObject",
    "WaitTimeout",
    "collect_leftovers",
    "delete",
    "every",
    "interval",
    "load",
    "parity",
    "reclaim",
    "save",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'dcp_mem' has no attribute {name!r}")
