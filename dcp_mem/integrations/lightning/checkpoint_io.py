"""`MemoryCheckpointIO`: the plugin through which Lightning saves, loads and removes checkpoints."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies.strategy import Strategy
from lightning.pytorch.utilities import rank_zero_info
from torch.distributed.checkpoint.metadata import Metadata
from typing_extensions import Unpack

from dcp_mem import functional
from dcp_mem.comm import rank_in
from dcp_mem.common.arguments import takes
from dcp_mem.common.log import log
from dcp_mem.common.values import State
from dcp_mem.config import Settings, checked_metrics
from dcp_mem.errors import (
    CheckpointNotFound,
    ConfigError,
    DcpMemError,
    NoRecoverableCheckpoint,
)
from dcp_mem.integrations.lightning.flatten import OPTIMIZERS, REST, join, split
from dcp_mem.integrations.lightning.paths import (
    NEWEST,
    is_file,
    is_link,
    is_local,
    name_of,
    target_of,
)
from dcp_mem.integrations.removals import Ending, Removals
from dcp_mem.options import DEFAULTS, WriterOptions
from dcp_mem.planning.whole_checkpoint import WholePlanner
from dcp_mem.reader import MemoryStorageReader, RecoveryReport, reader_of
from dcp_mem.runtime.states import job_memory, status, status_of
from dcp_mem.storage.listing import checkpoint_names
from dcp_mem.storage.retry import RetryPolicy
from dcp_mem.storage.routes import storage_of
from dcp_mem.writer import MemoryStorageWriter

_PAUSE = 0.02
_WAKE_EVERY = 2.0
_VERSION = "pytorch-lightning_version"
_RETRIES = RetryPolicy(tries=3, deadline_seconds=10.0)


class Nothing(dict[str, Any]):
    """The checkpoint of a job that has none yet: it is false, so Lightning restores nothing."""

    def __init__(self) -> None:
        super().__init__({_VERSION: lightning.__version__})

    def __bool__(self) -> bool:
        return False


@takes(WriterOptions, DEFAULTS)
class MemoryCheckpointIO(CheckpointIO):
    """Save Lightning's checkpoints into node memory, and have them flushed behind training.

    A checkpoint has its name from the path that Lightning gives: below the job's root as it is
    there, otherwise with a checksum of the directory. Paths whose last part begins with a dot are
    temporary files of Lightning's, and stay files.

    Args:
        path: The job's root on storage: an fsspec URL or a directory. None keeps checkpoints in
            memory only, with job="…".
        weights_only: Refuse what could run code when unpickled (UntrustedObject), as `dcp_mem.load`
            does. False is for hyperparameters or callbacks that hold objects of other kinds.
            `trainer.fit(weights_only=…)` takes precedence.
        **options: Further arguments of `MemoryStorageWriter`.

    Raises:
        ConfigError: An argument can't work.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        weights_only: bool = True,
        **options: Unpack[WriterOptions],
    ) -> None:
        self.writer = MemoryStorageWriter(path, **options)
        self._weights_only = weights_only
        self._removals = Removals(self.settings)
        self._taken = _TakenNames(self.settings)
        self._ending = Ending()
        self._was_skipped = False
        self._held_back: dict[str, tuple[str | Path, bool]] = {}  # removals, until a save succeeds
        self._metrics: Mapping[str, Any] = {}
        self._report: RecoveryReport | None = None
        self._files = TorchCheckpointIO()

    @property
    def settings(self) -> Settings:
        """The writer's settings."""
        return self.writer.settings

    # -- Lightning's contract ----------------------------------------------------------------------

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        """Save a whole checkpoint from this rank alone; return when it is complete in memory."""
        if _is_temporary(path):
            self._files.save_checkpoint(checkpoint, path, storage_options)
            return
        refuse_options(storage_options)
        self.save(split(checkpoint), path, checkpoint.get("global_step"), no_dist=True)

    def load_checkpoint(
        self, path: str | Path, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a whole checkpoint from the nearest place that has it. Call it on all ranks.

        Its tensors are on the CPU, unless `map_location` names a device. A file that Lightning
        itself wrote is loaded by `torch.load`.

        Raises CheckpointNotFound, NoRecoverableCheckpoint, UntrustedObject, ConfigError.
        """
        if _is_temporary(path):
            return self._files.load_checkpoint(path, map_location)
        if map_location is not None and not isinstance(map_location, (str, torch.device)):
            raise ConfigError(
                f"map_location={map_location!r}: give a device, or leave it out and move what "
                f"is loaded"
            )
        state = dict[str, Any]()
        try:
            if not self.load(lambda metadata: state, path, weights_only):
                return Nothing()
        except CheckpointNotFound:
            if not is_file(path):
                raise
            is_restricted = self._weights_only if weights_only is None else weights_only
            checkpoint: dict[str, Any] = torch.load(
                path, map_location or "cpu", weights_only=is_restricted
            )
            return checkpoint
        if REST not in state:
            raise ConfigError(
                f"{path} is no checkpoint of Lightning's: load it with dcp_mem.load and a state "
                f"dict"
            )
        checkpoint = join(state)
        checkpoint.update(
            (key, value)
            for key, value in state.items()
            if key not in (REST, OPTIMIZERS, *checkpoint)
        )
        return (
            checkpoint if map_location is None else _moved(checkpoint, torch.device(map_location))
        )

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a checkpoint from this node's memory and from storage, behind training."""
        if _is_temporary(path):
            self._files.remove_checkpoint(path)
            return
        self.remove(path, from_storage=True)

    def teardown(self) -> None:
        """Wait until storage has what it should have; after an exception, leave that to the agent.

        Raises FlushFailed.
        """
        is_broken_off, is_flushed = self._ending.is_broken_off(), False
        try:
            self.writer.close(flush=not is_broken_off)
            is_flushed = not is_broken_off
        finally:
            self._removals.close(keep_newest=not is_flushed)

    # -- what strategies and the callback use ------------------------------------------------------

    def save(
        self, state: dict[str, Any], path: str | Path, step: int | None, *, no_dist: bool
    ) -> None:
        """Save a state dict for DCP as the checkpoint of a path.

        After a save that is skipped, what Lightning removes stays until a save succeeds: Lightning
        takes it for replaced.
        """
        self._ending.begin()
        name = name_of(path, self.settings.url)
        self._removals.wait_for(name)
        self._held_back.pop(name, None)
        self._wait_for_flushes(name)
        self.writer.annotate_next_save(step=step, metrics=self._metrics)
        self._metrics = {}
        functional.raising_cause(
            functional.save, state, checkpoint_id=name, storage_writer=self.writer, no_dist=no_dist
        )
        self._was_skipped = self.writer._saver.last_save is None
        if self._was_skipped:
            log.warning("%s isn't saved: what Lightning removes stays until a save succeeds", name)
            return
        self._taken.add(name)
        if is_local(path) and rank_in() == 0:
            # `ModelCheckpoint` looks for the directory to find out that there is such a checkpoint.
            # A file that Lightning itself wrote there will do as well.
            if is_link(path):
                os.unlink(path)
            if not is_file(path):
                os.makedirs(path, exist_ok=True)
            os.utime(path)
        held_back, self._held_back = self._held_back, {}
        for removed, from_storage in held_back.values():
            self.remove(removed, from_storage=from_storage)

    def load(
        self,
        state_for: Callable[[Metadata], dict[str, Any]],
        path: str | Path,
        weights_only: bool | None = None,
    ) -> bool:
        """Load a checkpoint into a state dict. Call it on all ranks.

        `state_for`: returns the state dict for a checkpoint with this metadata; an empty one is
        filled with all that the checkpoint has. Returns whether there was a checkpoint; only NEWEST
        may find none.
        """
        self._ending.begin()
        restricted = self._weights_only if weights_only is None else weights_only
        with reader_of(self.settings, None) as reader:
            name, is_newest = name_of(target_of(path), self.settings.url), False
            if os.fspath(path) == NEWEST:
                name, is_newest = _newest(reader)
            if not name:
                rank_zero_info(
                    f"Job {self.settings.job} has no checkpoint yet: there is nothing to restore"
                )
                return False
            state = state_for(_metadata(reader, name))
            planner = None if state else WholePlanner(weights_only=restricted)
            # Without a name, an older checkpoint is loaded if this one turns out to be damaged.
            wanted = None if is_newest else name
            functional.raising_cause(
                functional.load,
                state,
                checkpoint_id=wanted,
                storage_reader=reader,
                planner=planner,
                weights_only=restricted,
            )
            self._report = reader.report()
        return True

    def remove(self, path: str | Path, *, from_storage: bool) -> None:
        """Remove a checkpoint from this node's memory, behind training."""
        if is_link(path):  # `save_last="link"`: what it points to has a name of its own
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            return
        name = name_of(path, self.settings.url)
        self._taken.free(name)
        if self._was_skipped:
            self._held_back[name] = path, from_storage
            return
        if is_local(path):
            # Storage may have put files there, which are about to be removed as well.
            with contextlib.suppress(OSError):
                os.rmdir(path)
        self._removals.begin(name, from_storage=from_storage)

    def would_replace(self, path: str | Path) -> bool:
        """Tell whether a save would replace a checkpoint here or on storage, or Lightning's file.

        What Lightning has removed is no longer in the way, even if it is still there.
        """
        if is_file(path):
            return True
        try:
            return name_of(path, self.settings.url) in self._taken
        except (DcpMemError, OSError) as error:  # other ranks wait for the answer
            log.warning("whether a save would replace %s can't be told: %s", path, error)
            return False

    def annotate_next_save(self, metrics: Mapping[str, Any]) -> None:
        """Keep those metrics that are numbers with the next checkpoint."""
        self._metrics = {}
        for name, value in metrics.items():
            with contextlib.suppress(ConfigError):
                self._metrics |= checked_metrics({name: value})

    def report(self) -> RecoveryReport:
        """Return what the last load took, from where, and what it passed over.

        Raises ConfigError.
        """
        if self._report is None:
            raise ConfigError("nothing has been loaded yet")
        return self._report

    def _wait_for_flushes(self, name: str) -> None:
        """Wait while memory is full of checkpoints that storage hasn't got yet.

        A further save would supersede the oldest of them, and Lightning counts on each one that it
        has saved. If flushes fail, training goes on without the oldest.
        """
        memory, is_logged, woken = job_memory(self.settings), False, time.monotonic()
        while memory is not None:
            pending = [one for one in memory.checkpoints() if one.pending and one.name != name]
            if len(pending) < self.settings.keep:
                return
            failed = [one.name for one in pending if status_of(one).error]
            if failed:
                log.warning(
                    "%s is not waited for: its flush fails (the history says why)", failed[0]
                )
                return
            if not is_logged:
                log.info("saves come faster than flushes: %s waits for %s", name, pending[-1].name)
            is_logged = True
            if time.monotonic() - woken > _WAKE_EVERY:  # should the agent have died
                self.writer._saver.wake_agent()
                woken = time.monotonic()
            time.sleep(_PAUSE)


class _TakenNames:
    """The names of this node's checkpoints and of those on storage, as Lightning knows them.

    A name is free once Lightning has removed its checkpoint, even if the removal is still under
    way. What was there before is looked up once; what is saved or removed later is known here.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._is_taken: dict[str, bool] = {}  # what this process has saved, or removed
        self._before: set[str] | None = None

    def add(self, name: str) -> None:
        """Note that a checkpoint of this name has been saved."""
        self._is_taken[name] = True

    def free(self, name: str) -> None:
        """Note that the checkpoint of this name is removed."""
        self._is_taken[name] = False

    def __contains__(self, name: str) -> bool:
        if name in self._is_taken:
            return self._is_taken[name]
        if self._before is None:
            self._before = self._looked_up()
        return name in self._before

    def _looked_up(self) -> set[str]:
        """List storage; if it doesn't answer, say so, and go by memory and its history."""
        known = status(self._settings)
        try:
            storage = storage_of(self._settings, _RETRIES)
            stored = set(checkpoint_names(storage) if storage is not None else ())
        except (DcpMemError, OSError) as error:
            log.warning(
                "%s can't be listed, so a checkpoint there that this node has never saved is "
                "replaced by a new one of its name: %s",
                self._settings.url,
                error,
            )
            stored = {one.name for one in known if one.state is State.DURABLE}
        return stored | {one.name for one in known if one.in_memory}


def _newest(reader: MemoryStorageReader) -> tuple[str, bool]:
    """Find the newest checkpoint to resume from, and whether it is the newest of all.

    That is one with optimizers; if none has any, the newest. The name is "" if there is no
    checkpoint.

    Raises NoRecoverableCheckpoint.
    """
    found = reader.recoverable()
    for name in found:
        if OPTIMIZERS in _metadata(reader, name).state_dict_metadata:
            return name, name == found[0]
        log.info("%s is passed over: it was saved with weights only", name)
    if found:
        return found[0], True
    try:
        reader.read_metadata()
    except NoRecoverableCheckpoint as error:
        if error.reasons:
            raise
    return "", False


def _metadata(reader: MemoryStorageReader, name: str) -> Metadata:
    reader.reset(name)
    metadata = reader.read_metadata()
    reader.close()
    return metadata


def _is_temporary(path: str | Path) -> bool:
    return os.path.basename(os.fspath(path)).startswith(".")


def refuse_options(storage_options: Any | None) -> None:
    """Raise ConfigError for options of one save."""
    if storage_options is not None:
        raise ConfigError(
            "storage_options of one save: give them to MemoryCheckpointIO, for all of them"
        )


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        for key in value:
            value[key] = _moved(value[key], device)
    elif isinstance(value, list):
        value[:] = [_moved(one, device) for one in value]
    return value


def plugin_of(strategy: Strategy, user: object) -> MemoryCheckpointIO:
    """Return the trainer's plugin. Raises ConfigError where it is another one."""
    io = strategy.checkpoint_io
    if not isinstance(io, MemoryCheckpointIO):
        raise ConfigError(
            f"{type(user).__name__} saves through MemoryCheckpointIO: "
            f"give Trainer(plugins=[MemoryCheckpointIO(root)]), with no other plugin around it"
        )
    return io
