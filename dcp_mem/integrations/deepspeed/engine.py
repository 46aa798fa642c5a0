"""The checkpoint engine: what `save_checkpoint` and `load_checkpoint` save and load through."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine import checkpoint_engine
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from typing_extensions import Unpack

from dcp_mem.comm import has_groups, is_first_of_node
from dcp_mem.common.arguments import takes
from dcp_mem.common.log import log
from dcp_mem.config import is_checkpoint_name
from dcp_mem.errors import ConfigError, DcpMemError
from dcp_mem.integrations import nebula
from dcp_mem.integrations.deepspeed.universal import UniversalLoads, has_content, place
from dcp_mem.integrations.nebula.completion import ON_COMMIT
from dcp_mem.integrations.nebula.run import InitOptions, current, has_run
from dcp_mem.options import DEFAULTS

_LATEST = "latest"
_TELLS_DIRECTORY = hasattr(checkpoint_engine, "CheckpointCommitInfo")
"""Whether DeepSpeed tells its checkpoint engine the directory that it saves to: from 0.17 on."""
_BEHIND_DIRECTORY = "~"
"""Between the directory's name and DeepSpeed's tag, in a tag that has both."""
_in_use: MemoryCheckpointEngine | None = None
"""The checkpoint engine that `use_memory` made last; None before it was called."""


class EngineOptions(InitOptions, total=False):
    """Options of `use_memory`, beside its own.

    Attributes:
        persistent_time_interval: As in `dcp_mem.integrations.nebula.init`; default 0, so that
            storage gets every checkpoint.
        num_of_version_in_retention: Checkpoints that stay in memory; default 2.
    """

    persistent_time_interval: float | str | None
    num_of_version_in_retention: int | str | None


@takes(EngineOptions, DEFAULTS)
def use_memory(
    engine: Any,
    path: str | os.PathLike[str],
    *,
    load_dir: str | os.PathLike[str] | None = None,
    shared_dir: str | os.PathLike[str] | None = None,
    **options: Unpack[EngineOptions],
) -> MemoryCheckpointEngine:
    """Send a DeepSpeed engine's checkpoints to node memory, and from there to storage.

    Call it on all ranks. From here on `engine.load_checkpoint` also loads what ZeRO saved with
    another number of data-parallel ranks. `engine.save_16bit_model` still writes a file.
    A process can have one such engine at a time.

    Args:
        engine: What `deepspeed.initialize` returned.
        path: The job's root on storage: an fsspec URL or a plain path.
        load_dir: The directory that `load_checkpoint` will get. DeepSpeed looks there for names of
            files, so placeholders for the newest whole checkpoint are put there.
        shared_dir: A directory that all nodes see. A checkpoint of another number of ranks is
            converted there, by rank 0; by default each node converts it in its directory for
            temporary files ($TMPDIR). That takes three times the checkpoint's size.
        **options: As in `dcp_mem.integrations.nebula.init`; storage gets every checkpoint unless
            persistent_time_interval says otherwise.

    Raises:
        ConfigError: An argument can't work, or another engine of this process saves so.
    """
    global _in_use
    _refuse_second(engine)
    made = _in_use = MemoryCheckpointEngine(path, **options)
    made.serve(engine, shared_dir)
    if load_dir is not None:
        made.show_newest_in(load_dir)
    return made


@takes(EngineOptions, DEFAULTS)
class MemoryCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """A checkpoint engine that saves and loads through dcp_mem.

    DeepSpeed's own directories get placeholders, by whose names it loads.

    Args:
        path: The job's root on storage.
        **options: As in `dcp_mem.integrations.nebula.init`.
    """

    def __init__(self, path: str | os.PathLike[str], **options: Unpack[EngineOptions]) -> None:
        super().__init__()
        self.name = type(self).__name__
        chosen: EngineOptions = {"persistent_time_interval": 0, **options}
        nebula.init(path, **chosen)
        self._run = current()
        self._checkpoint: nebula.Checkpoint | None = None
        self._loaded: nebula.Checkpoint | None = None

    def serve(self, engine: Any, shared_dir: str | os.PathLike[str] | None = None) -> None:
        """Take the place of an engine's checkpoint engine, and of its `load_checkpoint`."""
        engine.checkpoint_engine = self
        engine.load_checkpoint = UniversalLoads(engine, self.tag_of, shared_dir).load_checkpoint
        engine.save_16bit_model = _saving_a_file(engine)

    def tag_of(self, save_dir: str, tag: str) -> str:
        """Return the tag under which dcp_mem keeps what DeepSpeed saves in a directory under a tag.

        A tag without a number, such as Accelerate's "pytorch_model", is the same for each
        checkpoint: the last part of the directory is put in front of it.
        """
        if not _TELLS_DIRECTORY or _BEHIND_DIRECTORY in tag or any(map(str.isdigit, tag)):
            return tag
        directory = os.path.basename(os.path.abspath(save_dir))
        if directory.endswith(_BEHIND_DIRECTORY + tag):  # it is named as the checkpoint is
            return directory
        full = directory + _BEHIND_DIRECTORY + tag
        return full if is_checkpoint_name(full) else tag

    def create(self, info: Any) -> None:
        """Begin the checkpoint of the tag that DeepSpeed is about to save."""
        # Before DeepSpeed 0.17 the tag alone is given.
        save_dir, tag = ("", info) if isinstance(info, str) else (info.save_dir, str(info.tag))
        self._checkpoint = nebula.Checkpoint(self.tag_of(save_dir, tag), ON_COMMIT)

    def save(self, state_dict: Any, path: str) -> None:
        """Add a file to the checkpoint in memory, and put a placeholder at its path."""
        if self._checkpoint is None:
            raise ConfigError(
                f"DeepSpeed saves {path} outside of a checkpoint: call save_checkpoint"
            )
        self._checkpoint.save(os.path.basename(path), state_dict)
        place(Path(path))

    def commit(self, info: Any) -> bool:
        """Complete the checkpoint on all ranks; return False, and log why, if a rank failed."""
        checkpoint, self._checkpoint, self._loaded = self._checkpoint, None, None
        return checkpoint is not None and checkpoint.commit()

    def load(self, path: str, map_location: Any = None) -> Any:
        """Load a file of the checkpoint that its directory names; else of the newest checkpoint.

        A file that DeepSpeed has saved there itself is loaded as it is. Raises DcpMemError.
        """
        if has_content(Path(path)):
            return torch.load(path, map_location=map_location, weights_only=False)
        save_dir, tag = os.path.split(os.path.dirname(path))
        tag = self.tag_of(save_dir, tag)
        if self._loaded is None or self._loaded.tag != tag:
            found = nebula.get_checkpoint(tag)
            self._loaded = found if found.tag else nebula.get_latest_checkpoint()
            if self._loaded.tag and not found.tag:
                log.warning(
                    "%s is not whole, in memory or on storage: %s is loaded in its place",
                    tag,
                    self._loaded.tag,
                )
        if not self._loaded.tag:
            raise DcpMemError(
                f"neither {tag} nor any other checkpoint is whole, in this node's memory "
                f"or on storage"
            )
        return self._loaded.load(os.path.basename(path), map_location)

    def show_newest_in(self, load_dir: str | os.PathLike[str]) -> str:
        """Put placeholders for the newest whole checkpoint's files into a directory.

        Call it on all ranks. DeepSpeed's tag of the checkpoint goes into its file `latest`.

        Args:
            load_dir: The directory that DeepSpeed is to load from.

        Returns:
            The tag; "" if there is no checkpoint, and nothing is done.
        """
        tag, files = nebula.newest_files()
        if tag and is_first_of_node():
            short = tag.rpartition(_BEHIND_DIRECTORY)[2]
            shown = short if self.tag_of(os.fspath(load_dir), short) == tag else tag
            for name in files:
                place(Path(load_dir) / shown / name)
            (Path(load_dir) / _LATEST).write_text(shown)
        if has_groups():
            dist.barrier()
        return tag


def _refuse_second(engine: Any) -> None:
    """Raise ConfigError if another engine saves through the run, which a second one would end."""
    if (
        _in_use is not None
        and engine.checkpoint_engine is not _in_use
        and has_run()
        and current() is _in_use._run
    ):
        raise ConfigError(
            f"another DeepSpeed engine of this process saves to {_in_use._run.settings.url}, and "
            f"dcp_mem can serve one: leave this engine to DeepSpeed's own files. If the other one "
            f"saves no more, call dcp_mem.integrations.nebula._shutdown() on all ranks first"
        )


def _saving_a_file(engine: Any) -> Callable[..., Any]:
    """Return the engine's `save_16bit_model`, with DeepSpeed's own checkpoint engine.

    It saves under the tag of the step, whose checkpoint it would replace in memory.
    """
    # Not the instance's, which may be ours already.
    save = type(engine).save_16bit_model.__get__(engine)

    @wraps(save)
    def save_16bit_model(*args: Any, **kwargs: Any) -> Any:
        ours, engine.checkpoint_engine = engine.checkpoint_engine, TorchCheckpointEngine()
        try:
            return save(*args, **kwargs)
        finally:
            engine.checkpoint_engine = ours

    return save_16bit_model
