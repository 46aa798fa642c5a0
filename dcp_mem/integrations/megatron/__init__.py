"""Megatron's `dist_checkpointing` through node memory, and the strategies that it is made of."""

from dcp_mem.common.releases import warn_if_untested

warn_if_untested("megatron-core")

from dcp_mem.integrations.megatron.releases import name_our_strategy, telling_the_release

with telling_the_release():
    from dcp_mem.integrations.megatron.checkpointing import MemoryCheckpointing
    from dcp_mem.integrations.megatron.strategies import (
        MegatronCheckpointNotFound,
        MemoryLoadStrategy,
        MemorySaveStrategy,
    )

name_our_strategy()
warn_if_untested("megatron-core")  # A checkout's version is known once it is imported.

__all__ = [
    "MegatronCheckpointNotFound",
    "MemoryCheckpointing",
    "MemoryLoadStrategy",
    "MemorySaveStrategy",
]
