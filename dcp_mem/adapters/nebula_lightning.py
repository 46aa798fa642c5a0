"""Nebula's classes for Lightning: a checkpoint plugin and a callback.

Scripts find them in `dcp_mem.nebula`. New ones are better served by `dcp_mem.adapters.lightning`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from dcp_mem import nebula
from dcp_mem.errors import CheckpointNotFound, ConfigError
from dcp_mem.nebula.checkpoint import delete_checkpoint, save_alone

_FILE = "checkpoint"
_OPTIONS = frozenset({"is_best", "persist_path"})


class NebulaCheckpointIO(CheckpointIO):
    """Saves what Lightning gives it as a checkpoint of one file, which the saving rank completes alone.

    The checkpoint's tag is the last part of the path. storage_options: {"is_best": True} has storage get it at once,
    {"persist_path": …} takes it to another path than `init` has been given.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        options = _checked(storage_options)
        is_best = bool(options.get("is_best", False))
        save_alone(os.path.basename(str(path)), _FILE, checkpoint, is_best, options.get("persist_path"))

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a path that was saved to, or one of `get_latest_checkpoint_path`. Raises CheckpointNotFound."""
        directory, name = os.path.split(str(path))
        found = nebula.get_checkpoint(name)
        file = _FILE
        if not found.tag:
            found, file = nebula.get_checkpoint(os.path.basename(directory)), name
        if not found.tag:
            tags = [one["tag"] for one in nebula.list_checkpoints()]
            raise CheckpointNotFound(str(path), "Nebula's memory and storage", tags, [])
        loaded: dict[str, Any] = found.load(file, map_location, weights_only=bool(weights_only))
        return loaded

    def remove_checkpoint(self, path: Any) -> None:
        delete_checkpoint(os.path.basename(str(path)))


class NebulaCallback(ModelCheckpoint):
    """ModelCheckpoint, with its arguments; when training ends storage gets the newest checkpoint."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        nebula.join()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_fit_end(trainer, pl_module)
        nebula.flush_persistence()


def _checked(options: Any) -> Mapping[str, Any]:
    if options is None:
        return {}
    if not isinstance(options, Mapping) or not _OPTIONS.issuperset(options):
        raise ConfigError(f"storage_options={options!r}: Nebula knows 'is_best' and 'persist_path'")
    return options
