"""Torch's `ShardedTensor`, which has no public name; where a torch has none, nothing is one."""

from __future__ import annotations

__all__ = ["Shard", "ShardedTensor"]

try:
    from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
except ImportError:  # No torch yet.

    class Shard:  # type: ignore[no-redef]
        """Nothing is one."""

    class ShardedTensor:  # type: ignore[no-redef]
        """Nothing is one."""
