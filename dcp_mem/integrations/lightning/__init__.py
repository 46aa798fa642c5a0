"""Lightning 2.x: a plugin saves into node memory, and strategies let all ranks save their parts.

trainer = Trainer(plugins=[MemoryCheckpointIO(root)],
callbacks=[MemoryCheckpoint(every_n_train_steps=100)]) trainer.fit(model, ckpt_path="last")
"""

from dcp_mem.common.releases import warn_if_untested

warn_if_untested("lightning")

from dcp_mem.integrations.lightning.callback import MemoryCheckpoint
from dcp_mem.integrations.lightning.checkpoint_io import MemoryCheckpointIO
from dcp_mem.integrations.lightning.paths import NEWEST
from dcp_mem.integrations.lightning.strategies import (
    MemoryDDPStrategy,
    MemoryFSDPStrategy,
    MemoryModelParallelStrategy,
)
from dcp_mem.integrations.lightning.wrapped import end_with_wrapper

__all__ = [
    "NEWEST",
    "MemoryCheckpoint",
    "MemoryCheckpointIO",
    "MemoryDDPStrategy",
    "MemoryFSDPStrategy",
    "MemoryModelParallelStrategy",
]

end_with_wrapper()
