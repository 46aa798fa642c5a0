"""DeepSpeed's checkpoints in node memory: an engine for `save_checkpoint` and `load_checkpoint`.

engine, *_ = deepspeed.initialize(...)
use_memory(engine, "abfs://ckpts/run-42", load_dir=save_dir)
engine.load_checkpoint(save_dir)

DeepSpeed up to 0.19.6 has its own engine for Nebula's API, which needs no line of code:
docs/deepspeed.md.

Read its modules in this order:

    engine     the checkpoint engine
    universal  the files of a directory: placeholders, and loads on another number of ranks
"""

from __future__ import annotations

from dcp_mem.common.releases import warn_if_untested

warn_if_untested("deepspeed")

from dcp_mem.integrations.deepspeed.engine import MemoryCheckpointEngine, use_memory

__all__ = ["MemoryCheckpointEngine", "use_memory"]
