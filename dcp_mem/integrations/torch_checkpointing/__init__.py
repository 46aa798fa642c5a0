"""torch_checkpointing: its checkpoints in node memory first, and on storage behind training.

manager = CheckpointManager(CheckpointManager.Config(items=..., **in_memory("abfs://ckpts/run-42")))
manager.save("step-100", {"model": model.state_dict()})
"""

from dcp_mem.common.releases import warn_if_untested

warn_if_untested("torch_checkpointing")

from dcp_mem.integrations.torch_checkpointing.configuration import (
    MemoryStorageConfig,
    complete,
    in_memory,
)
from dcp_mem.integrations.torch_checkpointing.storage import MemoryStorage

__all__ = ["MemoryStorage", "MemoryStorageConfig", "complete", "in_memory"]
