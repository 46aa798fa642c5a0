"""Nebula's strategy for Lightning with DeepSpeed, for `dcp_mem.integrations.nebula`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from dcp_mem.errors import ConfigError
from dcp_mem.integrations.deepspeed import MemoryCheckpointEngine
from dcp_mem.integrations.nebula.lightning import class_of_each

_SECTION = "nebula"
_OPTIONS = (
    "persistent_storage_path",
    "persistent_time_interval",
    "num_of_version_in_retention",
)
# Unlike callbacks and plugins, a strategy has parts of its trainer's package.
_Base: Any = class_of_each("pytorch.strategies", "DeepSpeedStrategy")[0]


class NebulaDeepspeedStrategy(_Base):  # type: ignore[misc]
    """DeepSpeedStrategy whose checkpoints go to node memory, and from there to storage.

    It is for the trainer of the package that the script has imported, `lightning` or
    `pytorch_lightning`.
    """

    config: dict[str, Any]

    def __init__(
        self,
        *args: Any,
        persistent_storage_path: str | os.PathLike[str] | None = None,
        persistent_time_interval: float | None = None,
        num_of_version_in_retention: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Make the strategy; the section "nebula" of `config` gives what arguments leave out."""
        super().__init__(*args, **kwargs)
        given = (persistent_storage_path, persistent_time_interval, num_of_version_in_retention)
        section = _section_of(self.config)
        # With it, DeepSpeed would make an engine of its own.
        self.config = {key: value for key, value in self.config.items() if key != _SECTION}
        self._uses_memory = bool(section.get("enabled", True) or persistent_storage_path)
        self._nebula: dict[str, Any] = {
            name: section.get(name) if value is None else value
            for name, value in zip(_OPTIONS, given, strict=True)
        }

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Save through DeepSpeed, with the files in memory."""
        if self._uses_memory:
            self._use_memory().saves_in = os.fspath(filepath)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load through DeepSpeed, from memory where the checkpoint is there."""
        if self._uses_memory:
            self._use_memory()
        loaded: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        return loaded

    def _use_memory(self) -> _NamedByDirectory:
        engine = self.deepspeed_engine
        if not isinstance(engine.checkpoint_engine, _NamedByDirectory):
            options = dict(self._nebula)
            path = options.pop("persistent_storage_path") or os.environ.get(
                "NEBULA_PERSISTENT_STORAGE_PATH"
            )
            if not path:
                raise ConfigError(
                    "give persistent_storage_path=, in the section nebula of DeepSpeed's config "
                    "or to the strategy, or set NEBULA_PERSISTENT_STORAGE_PATH in the environment"
                )
            _NamedByDirectory(path, **options).serve(engine)
        checkpoint_engine: _NamedByDirectory = engine.checkpoint_engine
        return checkpoint_engine


def _section_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    section = config.get(_SECTION) or {}
    if not isinstance(section, Mapping):
        raise ConfigError(
            f"the section nebula of DeepSpeed's config is {section!r}: give an object"
        )
    return section


class _NamedByDirectory(MemoryCheckpointEngine):
    """Names a checkpoint by its directory, as Lightning calls each of them "checkpoint"."""

    saves_in = ""

    def tag_of(self, save_dir: str, tag: str) -> str:
        return os.path.basename(os.path.normpath(save_dir or self.saves_in))
