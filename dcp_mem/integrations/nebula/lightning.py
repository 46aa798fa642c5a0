"""Nebula's classes for Lightning: a checkpoint plugin and a callback.

Scripts import them from `dcp_mem.integrations.nebula`. New scripts are better served by
`dcp_mem.integrations.lightning`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from dcp_mem.errors import CheckpointNotFound, ConfigError
from dcp_mem.integrations import nebula
from dcp_mem.integrations.nebula.checkpoint import delete_checkpoint, save_alone

_FILE = "checkpoint"
_OPTIONS = frozenset({"is_best", "persist_path"})


class NebulaCheckpointIO(CheckpointIO):
    """Saves Lightning's checkpoints, each as one file, which the saving rank completes alone.

    A checkpoint's tag is the last part of its path. Of the storage options, {"is_best": True} has
    the checkpoint flushed at once, and {"persist_path": …} saves it to another root than `init`'s.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Save a whole checkpoint from this rank alone, under the path's last part.

        Args:
            checkpoint: Lightning's checkpoint of the whole model.
            path: Its last part is the checkpoint's tag.
            storage_options: May have `is_best` and `persist_path`.
        """
        options = _checked(storage_options)
        is_best = bool(options.get("is_best", False))
        save_alone(
            os.path.basename(str(path)), _FILE, checkpoint, is_best, options.get("persist_path")
        )

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint.

        Args:
            path: One that was saved to, or that `get_latest_checkpoint_path` has returned.
            map_location: As in torch.load.
            weights_only: As in torch.load.

        Raises:
            CheckpointNotFound: There is none of that name.
        """
        directory, name = os.path.split(str(path))
        found = nebula.get_checkpoint(name)
        file = _FILE
        if not found.tag:
            found, file = nebula.get_checkpoint(os.path.basename(directory)), name
        if not found.tag:
            tags = [listed["tag"] for listed in nebula.list_checkpoints()]
            raise CheckpointNotFound(str(path), "Nebula's memory and storage", tags, [])
        loaded: dict[str, Any] = found.load(file, map_location, weights_only=bool(weights_only))
        return loaded

    def remove_checkpoint(self, path: Any) -> None:
        """Delete the checkpoint from this node's memory and from storage.

        Args:
            path: Its last part is the checkpoint's tag.
        """
        delete_checkpoint(os.path.basename(str(path)))


class NebulaCallback(ModelCheckpoint):
    """ModelCheckpoint that flushes the newest checkpoint to storage when training ends."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take part from here on in completing other ranks' checkpoints."""
        super().setup(trainer, pl_module, stage)
        nebula.join()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wait until storage has what it should have."""
        super().on_fit_end(trainer, pl_module)
        nebula.flush_persistence()


def _checked(options: Any) -> Mapping[str, Any]:
    if options is None:
        return {}
    if not isinstance(options, Mapping) or not _OPTIONS.issuperset(options):
        raise ConfigError(f"storage_options={options!r}: Nebula knows 'is_best' and 'persist_path'")
    return options
