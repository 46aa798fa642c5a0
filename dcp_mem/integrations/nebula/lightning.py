"""Nebula's classes for Lightning: a checkpoint plugin and a callback.

Scripts import them from `dcp_mem.integrations.nebula`. They are for the trainers of `lightning` and
of `pytorch_lightning`: each package has classes of its own, and takes none of the other's. New
scripts are better served by `dcp_mem.integrations.lightning`.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from dcp_mem.common.releases import warn_if_untested
from dcp_mem.config import checkpoint_name
from dcp_mem.errors import CheckpointNotFound, ConfigError
from dcp_mem.integrations import nebula
from dcp_mem.integrations.nebula.checkpoint import write_pickled
from dcp_mem.integrations.nebula.completion import EACH_FILE
from dcp_mem.integrations.nebula.local_files import is_local_file
from dcp_mem.integrations.nebula.run import current, has_run, run_elsewhere
from dcp_mem.integrations.removals import Ending

_FILE = "checkpoint"
_OPTIONS = frozenset({"is_best", "persist_path"})
_saved: dict[str, str | None] = {}
"""The root of each checkpoint that this process has saved, by tag."""
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
    """Return the class of each package that is installed, the script's own first."""
    if not _PACKAGES:
        raise ImportError("Lightning is missing: pip install lightning")
    for package in _PACKAGES:
        warn_if_untested(package.replace("_", "-"))
    part, _, rest = module.partition(".")
    return [
        getattr(importlib.import_module(f"{_MODULES[package][part]}.{rest}"), name)
        for package in _PACKAGES
    ]


class NebulaCheckpointIO(*class_of_each("fabric.plugins", "CheckpointIO")):  # type: ignore[misc]
    """Saves Lightning's checkpoints, each as one file, which the saving rank completes alone.

    A checkpoint's tag is the last part of its path. Of the storage options, {"is_best": True} has
    the checkpoint flushed at once, and {"persist_path": …} saves it to another root than `init`'s.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ending = Ending()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Save a whole checkpoint from this rank alone, under the path's last part."""
        self._ending.begin()
        options = _checked(storage_options)
        run, tag = run_elsewhere(options.get("persist_path")), os.path.basename(str(path))
        _saved[tag] = run.settings.url
        name = checkpoint_name(run.settings.url, tag)
        run.removals.wait_for(name)
        if options.get("is_best", False):
            run.writer.annotate_next_save(persist=True, metrics={"is_best": 1.0})
        try:
            run.alone.save(name, _FILE, partial(write_pickled, checkpoint), EACH_FILE)
        except BaseException:
            run.writer.annotate_next_save()  # what was said is of this save
            raise

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint.

        `path`: one that was saved to, under the root of `init` or another; or that
        `get_latest_checkpoint_path` has returned; or of a file that Lightning itself wrote. Raises
        CheckpointNotFound.
        """
        self._ending.begin()
        text, is_restricted = str(path), bool(weights_only)
        found, file = (None, _FILE) if is_local_file(text) else _find(text)
        loaded: dict[str, Any]
        if found is not None:
            loaded = found.load(file, map_location, weights_only=is_restricted)
        elif os.path.isfile(text):
            loaded = torch.load(text, map_location, weights_only=is_restricted)
        else:
            tags = [listed["tag"] for listed in nebula.list_checkpoints()]
            raise CheckpointNotFound(text, "Nebula's memory and storage", tags, [])
        return loaded

    def remove_checkpoint(self, path: Any) -> None:
        """Remove the checkpoint from this node's memory and from storage, behind training.

        The newest checkpoint on storage stays there until storage has a newer one.
        """
        tag = os.path.basename(str(path))
        run = run_elsewhere(_saved.get(tag))
        run.removals.begin(checkpoint_name(run.settings.url, tag), from_storage=True)

    def teardown(self) -> None:
        """Wait until storage has the newest checkpoint; after an exception, leave that be."""
        is_broken_off = self._ending.is_broken_off()
        if has_run():
            is_flushed = not is_broken_off and nebula.flush_persistence()
            current().end_removals(keep_newest=not is_flushed)


class NebulaCallback(*class_of_each("pytorch.callbacks", "ModelCheckpoint")):  # type: ignore[misc]
    """ModelCheckpoint that flushes the newest checkpoint to storage when training ends.

    `config_params`: the arguments of `init`, by name, which is called with them; None where the
    script calls it. Raises ConfigError.
    """

    def __init__(
        self, *args: Any, config_params: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._config = config_params
        if config_params is not None:
            nebula.init(**config_params)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Take part from here on in completing other ranks' checkpoints."""
        super().setup(trainer, pl_module, stage)
        if self._config is not None and not has_run():  # in a process that was started since
            nebula.init(**self._config)
        nebula.join()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Wait until storage has what it should have."""
        super().on_fit_end(trainer, pl_module)
        nebula.flush_persistence()


def _find(path: str) -> tuple[nebula.Checkpoint | None, str]:
    """Return the checkpoint that a path means, if there is one, and its file's name."""
    directory, name = os.path.split(path)
    root, tag = os.path.split(directory)
    places = [
        (name, _saved.get(name), _FILE),  # saved by this process, wherever to
        (name, None, _FILE),
        (name, directory, _FILE),  # <root>/<tag>
        (tag, None, name),
        (tag, root, name),  # <root>/<tag>/<file>
    ]
    for place, persist_path, file in dict.fromkeys(places):
        with suppress(ConfigError):  # a part of the path that can be no name, or no root
            found = nebula.get_checkpoint(place, persist_path) if place else None
            if found is not None and found.tag:
                return found, file
    return None, ""


def _checked(options: Any) -> Mapping[str, Any]:
    if options is None:
        return {}
    if not isinstance(options, Mapping) or not _OPTIONS.issuperset(options):
        raise ConfigError(f"storage_options={options!r}: Nebula knows 'is_best' and 'persist_path'")
    return options
