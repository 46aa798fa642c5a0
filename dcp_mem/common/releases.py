"""The releases that dcp_mem has been run with, and a warning about any other."""

from __future__ import annotations

import logging
import re
import sys

from dcp_mem.common.log import log_once

_LIGHTNING = ("2.4", "2.7")
TESTED = {
    "accelerate": ("1.8", "1.16"),
    "adlfs": ("2024.12", "2027"),
    "botocore": ("1.36", "2"),
    "deepspeed": ("0.14", "0.20"),
    "gcsfs": ("2024.12", "2027"),
    "lightning": _LIGHTNING,
    "megatron-core": ("0.16", "0.20"),
    "mlflow-skinny": ("3.0", "4"),
    "nixl": ("1.5", "1.6"),
    "opentelemetry-api": ("1.30", "2"),
    "prometheus-client": ("0.20", "1"),
    "pytorch-lightning": _LIGHTNING,
    "s3fs": ("2024.12", "2027"),
    "tensorboard": ("2.17", "3"),
    "torch": ("2.6", "2.16"),
    "torch_checkpointing": ("0.1.1", "0.2"),
    "torchft": ("0.2", "0.3"),
    "torchtitan": ("0.3", "0.4"),
    "transformers": ("4.52", "5.25"),
    "wandb": ("0.20", "1"),
}
"""The first release that is tested, and the first after the newest: pyproject.toml's ranges."""
_MODULES = {
    "megatron-core": "megatron.core",
    "mlflow-skinny": "mlflow",
    "opentelemetry-api": "opentelemetry.version",
}


def warn_if_untested(package: str) -> None:
    """Log a warning, once in this process, if a package's release is outside the tested range.

    It goes to the log. Python's warnings would end a job that makes errors of them, though the
    untested release may well work.
    """
    if warning := untested(package):
        log_once(warning, logging.WARNING)


def untested(package: str) -> str:
    """Return what to say of a release outside the tested range; "" for others, and for none."""
    first, end = TESTED[package]
    found = installed(package)
    if found is None or _release(first) <= _release(found) < _release(end):
        return ""
    return (
        f"dcp_mem hasn't been tested with {package} {found}: the tested releases are "
        f">={first},<{end}. It may work; before you rely on it, save and restore once and compare, "
        f'or install one of those: pip install "{package}>={first},<{end}"'
    )


def installed(package: str) -> str | None:
    """Return the version that runs, if it has been imported, else the one that is installed."""
    module = sys.modules.get(_MODULES.get(package, package.replace("-", "_")))
    running = getattr(module, "__version__", None)
    if isinstance(running, str):
        return running
    from importlib.metadata import PackageNotFoundError, version  # 20 ms: the agent needs none

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _release(text: str) -> tuple[int, ...]:
    """The numbers before any suffix, so that 2.16.0a0 counts as 2.16; none, if none begin it."""
    numbers = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, numbers[0].split("."))) if numbers else ()
