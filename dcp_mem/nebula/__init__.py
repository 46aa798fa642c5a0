"""The API of Azure ML's Nebula package, on dcp_mem: scripts that were written for it run as they are.

import dcp_mem.nebula; dcp_mem.nebula.install()  # from here on `import nebulaml` and `import torch_nebula` mean this package
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from dcp_mem.errors import ConfigError
from dcp_mem.nebula.checkpoint import (
    Checkpoint,
    flush_persistence,
    get_checkpoint,
    get_latest_checkpoint,
    get_latest_checkpoint_path,
    list_checkpoints,
    newest_files,
)
from dcp_mem.nebula.run import init, join

_ADAPTERS = {  # they need Lightning, and the last one DeepSpeed, which others can do without
    "NebulaCallback": "dcp_mem.adapters.nebula_lightning",
    "NebulaCheckpointIO": "dcp_mem.adapters.nebula_lightning",
    "NebulaDeepspeedStrategy": "dcp_mem.adapters.nebula_deepspeed",
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
    """Have `import nebulaml` and `import torch_nebula` give this package, in this process.

    Call it before anything imports them: DeepSpeed does so in `deepspeed.initialize`. Raises ConfigError where one of them has
    been imported already, and is another package.
    """
    for name in _NAMES:
        if sys.modules.setdefault(name, sys.modules[__name__]) is not sys.modules[__name__]:
            raise ConfigError(
                f"{name} has been imported already, from elsewhere: call dcp_mem.nebula.install() before that"
            )


def __getattr__(name: str) -> Any:
    if name in _ADAPTERS:
        return getattr(importlib.import_module(_ADAPTERS[name]), name)
    raise AttributeError(f"module 'dcp_mem.nebula' has no attribute {name!r}")
