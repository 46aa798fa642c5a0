"""Nebula's strategy for Lightning with DeepSpeed, which scripts find in `dcp_mem.nebula`."""

from __future__ import annotations

import os
from typing import Any

from lightning.pytorch.strategies import DeepSpeedStrategy

from dcp_mem.adapters.deepspeed import MemoryCheckpointEngine
from dcp_mem.errors import ConfigError


class NebulaDeepspeedStrategy(DeepSpeedStrategy):
    """DeepSpeedStrategy whose checkpoints go to node memory, and from there to storage.

    persistent_storage_path, persistent_time_interval, num_of_version_in_retention: as in `init`. Other arguments are those of
    DeepSpeedStrategy.
    """

    def __init__(
        self,
        *args: Any,
        persistent_storage_path: str | os.PathLike[str] | None = None,
        persistent_time_interval: float | None = None,
        num_of_version_in_retention: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._nebula = {
            "persistent_time_interval": persistent_time_interval,
            "num_of_version_in_retention": num_of_version_in_retention,
        }
        self._nebula_path = persistent_storage_path

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        self._use_memory().saves_in = os.fspath(filepath)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self._use_memory()
        loaded: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        return loaded

    def _use_memory(self) -> _NamedByDirectory:
        engine = self.deepspeed_engine
        if not isinstance(engine.checkpoint_engine, _NamedByDirectory):
            path = self._nebula_path or os.environ.get("NEBULA_PERSISTENT_STORAGE_PATH")
            if not path:
                raise ConfigError(
                    "give persistent_storage_path=, or set NEBULA_PERSISTENT_STORAGE_PATH in the environment"
                )
            engine.checkpoint_engine = _NamedByDirectory(path, **self._nebula)
        made: _NamedByDirectory = engine.checkpoint_engine
        return made


class _NamedByDirectory(MemoryCheckpointEngine):
    """Lightning calls each of its checkpoints "checkpoint", in a directory of its own: that has the name."""

    saves_in = ""

    def tag_of(self, save_dir: str, tag: str) -> str:
        return os.path.basename(os.path.normpath(save_dir or self.saves_in))
