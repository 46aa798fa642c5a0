"""The packages that Lightning comes in, `lightning` and `pytorch_lightning`.

Each has classes of its own, and takes none of the other's.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

from dcp_mem.common.releases import warn_if_untested

_MODULES = {
    "lightning": {"pytorch": "lightning.pytorch", "fabric": "lightning.fabric"},
    "pytorch_lightning": {"pytorch": "pytorch_lightning", "fabric": "lightning_fabric"},
}
# What the script has imported comes first; dcp_mem imports the others.
_PACKAGES = sorted(
    (name for name in _MODULES if importlib.util.find_spec(name) is not None),
    key=lambda name: name not in sys.modules,
)


def class_of_each(module: str, name: str) -> list[Any]:
    """Return the class of each package that is installed, the script's own first.

    Raises ImportError.
    """
    if not _PACKAGES:
        raise ImportError("Lightning is missing: pip install lightning")
    for package in _PACKAGES:
        warn_if_untested(package.replace("_", "-"))
    part, _, rest = module.partition(".")
    return [
        getattr(importlib.import_module(f"{_MODULES[package][part]}.{rest}"), name)
        for package in _PACKAGES
    ]
