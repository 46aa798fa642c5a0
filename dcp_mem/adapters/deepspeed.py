"""DeepSpeed's checkpoints in node memory: a checkpoint engine for `save_checkpoint` and `load_checkpoint`.

engine, *_ = deepspeed.initialize(...)
use_memory(engine, "abfs://ckpts/run-42", load_dir=save_dir)
engine.load_checkpoint(save_dir)

DeepSpeed up to 0.19.6 has an engine of its own for Nebula's API, which needs no line of code: docs/deepspeed.md.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine

from dcp_mem import nebula
from dcp_mem.errors import ConfigError, DcpMemError
from dcp_mem.nebula.completing import ON_COMMIT

_LATEST = "latest"
_PLACEHOLDER = (
    "This file's content lies in node memory, or on storage, under {tag}: load it by dcp_mem.adapters.deepspeed.\n"
)


def use_memory(
    engine: Any, path: str | os.PathLike[str], *, load_dir: str | os.PathLike[str] | None = None, **options: Any
) -> MemoryCheckpointEngine:
    """Have a DeepSpeed engine's checkpoints go to node memory, and from there to storage. Call it on all ranks.

    path: the job's root on storage, an fsspec URL or a plain path. load_dir: the directory that `load_checkpoint` will get, where
    DeepSpeed looks for names of files; what it finds there is made to fit the newest checkpoint that is whole. options: as
    in `dcp_mem.nebula.init`; storage gets every checkpoint unless persistent_time_interval says otherwise.
    Raises ConfigError.
    """
    made = MemoryCheckpointEngine(path, **options)
    engine.checkpoint_engine = made
    if load_dir is not None:
        made.show_newest_in(load_dir)
    return made


class MemoryCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """What DeepSpeed saves and loads goes through dcp_mem; in its own directories lie placeholders, by whose names it loads."""

    def __init__(self, path: str | os.PathLike[str], **options: Any) -> None:
        super().__init__()
        self.name = type(self).__name__
        nebula.init(path, **{"persistent_time_interval": 0, **options})
        self._checkpoint: nebula.Checkpoint | None = None
        self._loaded: nebula.Checkpoint | None = None

    def tag_of(self, save_dir: str, tag: str) -> str:
        """What a checkpoint is called that DeepSpeed has in this directory ("" where it doesn't say) under this tag."""
        return tag

    def create(self, info: Any) -> None:
        save_dir, tag = ("", info) if isinstance(info, str) else (info.save_dir, str(info.tag))  # before DeepSpeed 0.17
        self._checkpoint = nebula.Checkpoint(self.tag_of(save_dir, tag), ON_COMMIT)

    def save(self, state_dict: Any, path: str) -> None:
        if self._checkpoint is None:
            raise ConfigError(f"DeepSpeed saves {path} outside of a checkpoint: call save_checkpoint")
        self._checkpoint.save(os.path.basename(path), state_dict)
        _place(Path(path))

    def commit(self, info: Any) -> bool:
        """Complete the checkpoint on all ranks; False, with the reason in the log, where one of them failed."""
        checkpoint, self._checkpoint, self._loaded = self._checkpoint, None, None
        return checkpoint is not None and checkpoint.commit()

    def load(self, path: str, map_location: Any = None) -> Any:
        """A file of the checkpoint that the path's directory is named after, or of the newest one, where that isn't there."""
        save_dir, tag = os.path.split(os.path.dirname(path))
        tag = self.tag_of(save_dir, tag)
        if self._loaded is None or self._loaded.tag != tag:
            found = nebula.get_checkpoint(tag)
            self._loaded = found if found.tag else nebula.get_latest_checkpoint()
        if not self._loaded.tag:
            raise DcpMemError(f"neither {tag} nor any other checkpoint is whole, in this node's memory or on storage")
        return self._loaded.load(os.path.basename(path), map_location)

    def show_newest_in(self, load_dir: str | os.PathLike[str]) -> str:
        """Put placeholders for the newest whole checkpoint's files into a directory, and its tag into `latest`.

        Returns the tag; "" where there is no checkpoint, and nothing is done. Call it on all ranks.
        """
        tag, files = nebula.newest_files()
        if tag and int(os.environ.get("LOCAL_RANK") or 0) == 0:
            for name in files:
                _place(Path(load_dir) / tag / name)
            (Path(load_dir) / _LATEST).write_text(tag)
        if dist.is_available() and dist.is_initialized():
            dist.barrier()
        return tag


def _place(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_PLACEHOLDER.format(tag=path.parent.name))
