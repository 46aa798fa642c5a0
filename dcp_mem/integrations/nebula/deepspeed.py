"""Nebula's strategy for Lightning with DeepSpeed, for `dcp_mem.integrations.nebula`."""

from __future__ import annotations

import os
from typing import Any

from lightning.pytorch.strategies import DeepSpeedStrategy

from dcp_mem.errors import ConfigError
from dcp_mem.integrations.deepspeed import MemoryCheckpointEngine


class NebulaDeepspeedStrategy(DeepSpeedStrategy):
    """DeepSpeedStrategy whose checkpoints go to node memory, and from there to storage."""

    def __init__(
        self,
        *args: Any,
        persistent_storage_path: str | os.PathLike[str] | None = None,
        persistent_time_interval: float | None = None,
        num_of_version_in_retention: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Make the strategy.

        Args:
            *args: As in DeepSpeedStrategy.
            persistent_storage_path: As in `init`.
            persistent_time_interval: As in `init`.
            num_of_version_in_retention: As in `init`.
            **kwargs: As in DeepSpeedStrategy.
        """
        super().__init__(*args, **kwargs)
        self._nebula = {
            "persistent_time_interval": persistent_time_interval,
            "num_of_version_in_retention": num_of_version_in_retention,
        }
        self._nebula_path = persistent_storage_path

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Save through DeepSpeed, with the files in memory.

        Args:
            checkpoint: What Lightning keeps beside DeepSpeed's state.
            filepath: The directory that DeepSpeed would write.
            storage_options: Handed on to Lightning.
        """
        self._use_memory().saves_in = os.fspath(filepath)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load through DeepSpeed, from memory where the checkpoint is there.

        Args:
            checkpoint_path: The directory that DeepSpeed would read.
            *args: Handed on to Lightning.
            **kwargs: Handed on to Lightning.
        """
        self._use_memory()
        loaded: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        return loaded

    def _use_memory(self) -> _NamedByDirectory:
        engine = self.deepspeed_engine
        if not isinstance(engine.checkpoint_engine, _NamedByDirectory):
            path = self._nebula_path or os.environ.get("NEBULA_PERSISTENT_STORAGE_PATH")
            if not path:
                raise ConfigError(
                    "give persistent_storage_path=, or set NEBULA_PERSISTENT_STORAGE_PATH "
                    "in the environment"
                )
            engine.checkpoint_engine = _NamedByDirectory(path, **self._nebula)
        checkpoint_engine: _NamedByDirectory = engine.checkpoint_engine
        return checkpoint_engine


class _NamedByDirectory(MemoryCheckpointEngine):
    """Names a checkpoint by its directory.

    Lightning calls each of its checkpoints "checkpoint", in a directory that has the real name.
    """

    saves_in = ""

    def tag_of(self, save_dir: str, tag: str) -> str:
        return os.path.basename(os.path.normpath(save_dir or self.saves_in))
