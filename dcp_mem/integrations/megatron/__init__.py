"""Megatron's `dist_checkpointing` through node memory, and the strategies that it is made of."""

from dcp_mem.integrations.megatron.releases import telling_the_release

with telling_the_release():
    from dcp_mem.integrations.megatron.checkpointing import MemoryCheckpointing
    from dcp_mem.integrations.megatron.strategies import (
        MegatronCheckpointNotFound,
        MemoryLoadStrategy,
        MemorySaveStrategy,
    )

__all__ = [
    "MegatronCheckpointNotFound",
    "MemoryCheckpointing",
    "MemoryLoadStrategy",
    "MemorySaveStrategy",
]
