"""Lightning 2.x: a plugin saves into node memory, and strategies let all ranks save their parts.

trainer = Trainer(plugins=[MemoryCheckpointIO(root)],
callbacks=[MemoryCheckpoint(every_n_train_steps=100)]) trainer.fit(model, ckpt_path="last")
"""

from __future__ import annotations

from dcp_mem.common.releases import warn_if_untested

warn_if_untested("lightning")

import functools
from collections.abc import Callable

from lightning.pytorch.plugins.io import AsyncCheckpointIO

from dcp_mem.integrations.lightning.callback import MemoryCheckpoint
from dcp_mem.integrations.lightning.checkpoint_io import MemoryCheckpointIO
from dcp_mem.integrations.lightning.paths import NEWEST
from dcp_mem.integrations.lightning.strategies import (
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


def _end_with_wrapper() -> None:
    """Have `AsyncCheckpointIO` end the MemoryCheckpointIO that it wraps, once its saves are done.

    Lightning 2.6 ends the outermost plugin only, and the wrapper doesn't pass that on.
    """
    stock: Callable[[AsyncCheckpointIO], None] = AsyncCheckpointIO.teardown

    @functools.wraps(stock)
    def teardown(self: AsyncCheckpointIO) -> None:
        try:
            stock(self)
        finally:
            if isinstance(self.checkpoint_io, MemoryCheckpointIO):
                self.checkpoint_io.teardown()

    AsyncCheckpointIO.teardown = teardown  # type: ignore[method-assign]


_end_with_wrapper()
