"""The API of Azure ML's Nebula package, on dcp_mem: scripts written for it run as they are.

    import dcp_mem.integrations.nebula

    dcp_mem.integrations.nebula.install()

From there on `import nebulaml` and `import torch_nebula` import this package. Read its modules in
this order:

    run          what `init` has set
    checkpoint   checkpoints, and the functions of the API
    completion   when a checkpoint is complete, alone and with several ranks
    peers        reading from other nodes' memory
    local_files  files of checkpoints, for whoever opens them by path
    lightning, deepspeed   Nebula's classes for Lightning
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from dcp_mem.errors import ConfigError
from dcp_mem.integrations.nebula.checkpoint import (
    Checkpoint,
    flush_persistence,
    get_checkpoint,
    get_latest_checkpoint,
    get_latest_checkpoint_path,
    list_checkpoints,
    newest_files,
)
from dcp_mem.integrations.nebula.local_files import release_all
from dcp_mem.integrations.nebula.run import init, join, shut_down

if TYPE_CHECKING:
    from dcp_mem.integrations.nebula.deepspeed import (
        NebulaDeepspeedStrategy as NebulaDeepspeedStrategy,
    )
    from dcp_mem.integrations.nebula.lightning import NebulaCallback as NebulaCallback
    from dcp_mem.integrations.nebula.lightning import NebulaCheckpointIO as NebulaCheckpointIO

_ADAPTERS = {  # imported when used: they need Lightning, and the last one needs DeepSpeed
    "NebulaCallback": "dcp_mem.integrations.nebula.lightning",
    "NebulaCheckpointIO": "dcp_mem.integrations.nebula.lightning",
    "NebulaDeepspeedStrategy": "dcp_mem.integrations.nebula.deepspeed",
}
_NAMES = ("nebulaml", "torch_nebula")

__all__ = [
    "Checkpoint",
    "flush_persistence",
    "get_checkpoint",
    "get_latest_checkpoint",
    "get_latest_checkpoint_path",
    "init",
    "install",
    "join",
    "list_checkpoints",
    "newest_files",
]


def install() -> None:
    """Make `import nebulaml` and `import torch_nebula` import this package, in this process.

    Call it before anything imports them; DeepSpeed does so in `deepspeed.initialize`.

    Raises:
        ConfigError: One of them has been imported already, and is another package.
    """
    for name in _NAMES:
        if sys.modules.setdefault(name, sys.modules[__name__]) is not sys.modules[__name__]:
            raise ConfigError(
                f"{name} has been imported already, from elsewhere: "
                "call dcp_mem.integrations.nebula.install() before that"
            )


def _shutdown() -> None:
    """End the run, as `torch_nebula._shutdown` does: flush, stop, and remove temporary files."""
    try:
        shut_down()
    finally:
        release_all()


def __dir__() -> list[str]:
    return [*__all__, *_ADAPTERS]


if not TYPE_CHECKING:  # Type checkers would take any name for one that it returns.

    def __getattr__(name: str) -> Any:
        if name in _ADAPTERS:
            return getattr(importlib.import_module(_ADAPTERS[name]), name)
        raise AttributeError(f"module 'dcp_mem.integrations.nebula' has no attribute {name!r}")
