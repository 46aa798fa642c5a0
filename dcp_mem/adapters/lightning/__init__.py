"""Lightning 2.x: checkpoints go to node memory first, with a plugin and, for what it takes all ranks, a strategy.

trainer = Trainer(plugins=[MemoryCheckpointIO(root)], callbacks=[MemoryCheckpoint(every_n_train_steps=100)])
trainer.fit(model, ckpt_path="last")
"""

from dcp_mem.adapters.lightning.callback import MemoryCheckpoint
from dcp_mem.adapters.lightning.checkpoint_io import MemoryCheckpointIO
from dcp_mem.adapters.lightning.places import NEWEST
from dcp_mem.adapters.lightning.strategies import (
    MemoryDDPStrategy,
    MemoryFSDPStrategy,
    MemoryModelParallelStrategy,
)

__all__ = [
    "NEWEST",
    "MemoryCheckpoint",
    "MemoryCheckpointIO",
    "MemoryDDPStrategy",
    "MemoryFSDPStrategy",
    "MemoryModelParallelStrategy",
]
