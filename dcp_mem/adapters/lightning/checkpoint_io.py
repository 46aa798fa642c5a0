"""`MemoryCheckpointIO`: the plugin through which Lightning saves into node memory, loads, and removes."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.utilities import rank_zero_info
from torch.distributed.checkpoint.metadata import Metadata

from dcp_mem import api
from dcp_mem.adapters.lightning.apart import OPTIMIZERS, REST, put_together, taken_apart
from dcp_mem.adapters.lightning.places import NEWEST, is_local, name_of
from dcp_mem.adapters.lightning.removals import Removals
from dcp_mem.config import Settings, checked_metrics
from dcp_mem.errors import ConfigError, NoRecoverableCheckpoint
from dcp_mem.events import log
from dcp_mem.operating.inventory import job_memory
from dcp_mem.planning.whole import WholePlanner
from dcp_mem.reader import MemoryStorageReader, RecoveryReport
from dcp_mem.watch import status_of
from dcp_mem.writer import MemoryStorageWriter

_PAUSE = 0.02
_VERSION = "pytorch-lightning_version"


class Nothing(dict[str, Any]):
    """The checkpoint of a job that has none yet: it is false, and Lightning restores nothing from what is false."""

    def __init__(self) -> None:
        super().__init__({_VERSION: lightning.__version__})

    def __bool__(self) -> bool:
        return False


class MemoryCheckpointIO(CheckpointIO):
    """Saves Lightning's checkpoints into node memory, and has them flushed to storage behind training.

    path: the job's root on storage, an fsspec URL or a directory; None: memory only, with job="…". options: those of
    `MemoryStorageWriter`: persist, keep, keep_storage, replicas, memory_limit, storage_options and so on. weights_only: refuse
    what could run code when unpickled (UntrustedObject), as `dcp_mem.load` does; False where hyperparameters or callbacks hold
    objects of other kinds. `trainer.fit(weights_only=…)` goes before it.

    A checkpoint has its name from the path that Lightning gives: below the job's root as it is there, and with a checksum of the
    directory otherwise. Paths whose last part begins with a dot are temporary files of Lightning's, and stay files.

    Raises ConfigError for arguments that can't work.
    """

    def __init__(self, path: str | Path | None = None, *, weights_only: bool = True, **options: Any) -> None:
        self.writer = MemoryStorageWriter(path, **options)
        self._weights_only = weights_only
        self._removals = Removals(self.settings)
        self._metrics: Mapping[str, Any] = {}
        self._report: RecoveryReport | None = None
        self._files = TorchCheckpointIO()

    @property
    def settings(self) -> Settings:
        return self.writer.settings

    # -- Lightning's contract --------------------------------------------------------------------------------------------

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Save a whole checkpoint from this rank alone; returns when it is complete in this node's memory."""
        if _is_temporary(path):
            self._files.save_checkpoint(checkpoint, path, storage_options)
            return
        _refuse(storage_options)
        self.save(taken_apart(checkpoint), path, checkpoint.get("global_step"), no_dist=True)

    def load_checkpoint(
        self, path: str | Path, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a whole checkpoint, from the nearest place that has it; where there is a process group, call it on all ranks.

        path: as it was saved to, or NEWEST. map_location: a device for the tensors; by default they are on the CPU. Raises
        CheckpointNotFound, UntrustedObject, NoRecoverableCheckpoint where there are some and none is whole.
        """
        if _is_temporary(path):
            return self._files.load_checkpoint(path, map_location)
        if map_location is not None and not isinstance(map_location, (str, torch.device)):
            raise ConfigError(f"map_location={map_location!r}: give a device, or leave it out and move what is loaded")
        state = dict[str, Any]()
        if not self.load(lambda metadata: state, path, weights_only):
            return Nothing()
        if REST not in state:
            raise ConfigError(f"{path} is no checkpoint of Lightning's: load it with dcp_mem.load and a state dict")
        checkpoint = put_together(state)
        checkpoint.update((key, value) for key, value in state.items() if key not in (REST, OPTIMIZERS, *checkpoint))
        return checkpoint if map_location is None else _moved(checkpoint, torch.device(map_location))

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a checkpoint from this node's memory and from storage, behind training."""
        if _is_temporary(path):
            self._files.remove_checkpoint(path)
            return
        self.remove(path, from_storage=True)

    def teardown(self) -> None:
        """Wait until storage has what it should have; where an exception ends training, the agent does that by itself.

        Raises FlushFailed where storage refuses; the checkpoints then stay in memory.
        """
        try:
            self.writer.close(flush=sys.exc_info()[0] is None)
        finally:
            self._removals.close()

    # -- what strategies and the callback use ------------------------------------------------------------------------------

    def save(self, state: dict[str, Any], path: str | Path, step: int | None, *, no_dist: bool) -> None:
        """Save a state dict for DCP as the checkpoint of this path. no_dist: this rank alone has all of it."""
        name = name_of(path, self.settings.url)
        self._removals.wait_for(name)
        self._wait_for_flushes(name)
        self.writer.tell(step=step, metrics=self._metrics)
        self._metrics = {}
        api.save(state, checkpoint_id=name, storage_writer=self.writer, no_dist=no_dist)
        if is_local(path) and self._is_first():
            os.makedirs(path, exist_ok=True)  # by which `ModelCheckpoint` finds out that there is such a checkpoint
            os.utime(path)

    def load(
        self,
        state_for: Callable[[Metadata], dict[str, Any]],
        path: str | Path,
        weights_only: bool | None = None,
    ) -> bool:
        """Load a checkpoint into a state dict; whether there was one. Call it on all ranks.

        state_for: gives the state dict for a checkpoint with this metadata; an empty one is filled with all that there is. Only
        NEWEST may find none.
        """
        restricted = self._weights_only if weights_only is None else weights_only
        with MemoryStorageReader(
            self.settings.url,
            memory=self.settings.memory_root,
            job=self.settings.job,
            storage_options=self.settings.storage_options,
        ) as reader:
            name, is_newest = name_of(path, self.settings.url), False
            if os.fspath(path) == NEWEST:
                name, is_newest = _newest(reader)
            if not name:
                rank_zero_info(f"Job {self.settings.job} has no checkpoint yet: there is nothing to restore")
                return False
            state = state_for(_metadata(reader, name))
            planner = None if state else WholePlanner(weights_only=restricted)
            # Without a name, an older one is loaded where this one turns out to be damaged.
            wanted = None if is_newest else name
            api.load(state, checkpoint_id=wanted, storage_reader=reader, planner=planner, weights_only=restricted)
            self._report = reader.report()
        return True

    def remove(self, path: str | Path, *, from_storage: bool) -> None:
        """Remove a checkpoint from this node's memory, and from storage if this rank is the one to do that."""
        if is_local(path):
            with contextlib.suppress(
                OSError
            ):  # storage may have put something there, which is about to be removed as well
                os.rmdir(path)
        self._removals.begin(name_of(path, self.settings.url), from_storage=from_storage)

    def tell(self, metrics: Mapping[str, Any]) -> None:
        """Say of the next checkpoint how good it is; for `keep_best`, and listings. What is no number is left out."""
        self._metrics = {}
        for name, value in metrics.items():
            with contextlib.suppress(ConfigError):
                self._metrics |= checked_metrics({name: value})

    def report(self) -> RecoveryReport:
        """What the last load took, from where, and what it passed over. Raises ConfigError before one."""
        if self._report is None:
            raise ConfigError("nothing has been loaded yet")
        return self._report

    def _wait_for_flushes(self, name: str) -> None:
        """Wait while memory is full of checkpoints that storage hasn't got: a further one would supersede the oldest of them.

        Lightning counts on each one that it has saved. Where flushes fail, training goes on without the oldest.
        """
        memory, told = job_memory(self.settings), False
        while memory is not None:
            pending = [held for held in memory.held() if held.pending and held.name != name]
            if len(pending) < self.settings.keep:
                return
            failed = [held.name for held in pending if status_of(held).error]
            if failed:
                log.warning("%s is not waited for: its flush fails (the history says why)", failed[0])
                return
            if not told:
                log.info("saves come faster than flushes: %s waits for %s", name, pending[-1].name)
            told = True
            time.sleep(_PAUSE)

    def _is_first(self) -> bool:
        return not dist.is_initialized() or dist.get_rank() == 0


def _newest(reader: MemoryStorageReader) -> tuple[str, bool]:
    """The newest checkpoint that training can go on from ("" where there is none), and whether it is the newest of all.

    Where none has optimizers, it is the newest. Raises NoRecoverableCheckpoint where there are some and none is whole, lest
    training begin anew over them.
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


def _refuse(storage_options: Any | None) -> None:
    if storage_options is not None:
        raise ConfigError("storage_options of one save: give them to MemoryCheckpointIO, for all of them")


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        for key in value:
            value[key] = _moved(value[key], device)
    elif isinstance(value, list):
        value[:] = [_moved(one, device) for one in value]
    return value
