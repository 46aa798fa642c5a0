"""The plugin inside another of Lightning's: `AsyncCheckpointIO` ends its thread, but not us."""

from __future__ import annotations

import functools
from collections.abc import Callable

from lightning.pytorch.plugins.io import AsyncCheckpointIO

from dcp_mem.integrations.lightning.checkpoint_io import MemoryCheckpointIO


def end_with_wrapper() -> None:
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
