"""The calls that save a state, ours and others', behind one interface.

A call returns when training may go on. Where it leaves work behind, the save is complete later, and
the optimizer's next step may have to wait. So there are three figures of each save (`Held`).
"""

from __future__ import annotations

import inspect
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata

import dcp_mem
from benchmarks.harness import torch_peers
from dcp_mem import MemoryStorageReader, MemoryStorageWriter

if TYPE_CHECKING:
    from pathlib import Path

    from torch.distributed.checkpoint.staging import DefaultStager

    from benchmarks.harness.processes import Rank

Tree: TypeAlias = "dict[str, Any]"

DCP_SAVE, OWN_SAVE = "dcp.save", "dcp_mem.save"
DCP_ASYNC, OWN_ASYNC, OVERLAPPED = "dcp.async_save", "dcp_mem.async_save", "overlapped"
TORCH_SAVE = "dcp.save, FileSystemWriter"
TORCH_ASYNC = "dcp.async_save, torch's stager"
TORCH_KEPT = "dcp.async_save, torch's stager kept"
META = "torch_checkpointing"
META_VERSION = "0.1.1"
META_START_SECONDS = 300
JOB = "bench"
OURS = (DCP_SAVE, OWN_SAVE, DCP_ASYNC, OWN_ASYNC, OVERLAPPED)
PEERS = (TORCH_SAVE, TORCH_ASYNC, TORCH_KEPT, META)
REMARKS = (
    f"{', '.join(OURS)}: with dcp_mem's writer",
    f"{OVERLAPPED}: dcp_mem.async_save with overlap=, the optimizer",
    f"{TORCH_SAVE}, and torch's stagers: torch's own writer on the same tmpfs",
    f"{META} {META_VERSION}: files on the same tmpfs, from a process of its own, without direct IO",
    f"{META}: pinned memory and non-blocking copies are off where there is no CUDA device",
    f"{META}: the optimizer steps under its lock",
    f"{META}: torch shares memory by file names, as descriptors run out at 20,000 tensors",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Seconds of one save.

    Attributes:
        call: Until the call returned.
        step: For how long an optimizer's step had to wait that came right after the call.
        complete: From the beginning of the call until the checkpoint was complete.
    """

    call: float
    step: float
    complete: float


class Call(Protocol):
    """A call that saves a state again and again, and what belongs to it."""

    def begin(self, number: int, tree: Tree) -> Future[Any] | None:
        """Save; return what tells when the checkpoint is complete, None where it is already."""
        ...

    def stepping(self) -> AbstractContextManager[Any]:
        """Return what an optimizer's step has to be inside of."""
        ...

    def load(self, number: int, into: Tree) -> None:
        """Load what was saved under this number."""
        ...

    def forget(self, number: int, rank: Rank) -> None:
        """Remove what was saved under this number, unless that happens by itself."""
        ...

    def close(self) -> None: ...


def left_out(name: str) -> str:
    """Return why a call can't be measured here; empty where it can."""
    if name in (OWN_ASYNC, OVERLAPPED) and not hasattr(dcp_mem, "async_save"):
        return "left out: dcp_mem has no async_save"
    if name == OVERLAPPED and "overlap" not in inspect.signature(_own_async()).parameters:
        return "left out: dcp_mem.async_save has no overlap="
    if name == META:
        try:
            found = version(META)
        except PackageNotFoundError:
            found = ""
        if found != META_VERSION:
            has = f"{found} is installed" if found else "not installed"
            return f"left out: {has}; pip install --no-deps {META}=={META_VERSION}"
    return ""


def make(name: str, directory: Path, optimizer: torch.optim.Optimizer) -> Call:
    """Return the call of this name, which works in `directory` on the tmpfs.

    Args:
        name: One of `OURS` or `PEERS`, not left out.
        optimizer: Its step is what an overlapped save has to be copied before.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if name == DCP_SAVE:
        return _InMemory(directory, dcp.save)
    if name == OWN_SAVE:
        return _InMemory(directory, dcp_mem.save)
    if name == DCP_ASYNC:
        return _InMemory(directory, dcp.async_save)
    if name == OWN_ASYNC:
        return _InMemory(directory, _own_async())
    if name == OVERLAPPED:
        return _InMemory(directory, partial(_own_async(), overlap=optimizer))
    if name == TORCH_SAVE:
        return _TorchSave(directory)
    if name == META:
        return _Meta(directory)
    return _TorchAsync(directory, torch_peers.kept_stager() if name == TORCH_KEPT else None)


def held(call: Call, number: int, tree: Tree, step: Callable[[], float]) -> Held:
    """Save, step at once, and wait until the checkpoint is complete.

    Args:
        step: An optimizer's step; returns when it began, after its hooks, by `time.perf_counter`.
    """
    start = time.perf_counter()
    pending = call.begin(number, tree)
    called = complete = time.perf_counter()
    with call.stepping():
        began = step()
    if pending is not None:
        pending.result()
        complete = time.perf_counter()
    return Held(call=called - start, step=began - called, complete=complete - start)


def _own_async() -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(dcp_mem, "async_save")  # noqa: B009 - may not exist
    return found


def _pending(answer: Any) -> Future[Any] | None:
    """Return the future of a DCP call's answer: metadata, a future, or an AsyncSaveResponse."""
    if isinstance(answer, Metadata):
        return None
    found: Future[Any] = answer if isinstance(answer, Future) else answer.upload_completion
    return found


class _InMemory:
    """A call of DCP's or of dcp_mem's, with a MemoryStorageWriter of its own."""

    def __init__(self, directory: Path, save: Callable[..., Any]) -> None:
        self._root = str(directory)
        self._save = save
        self._writer = MemoryStorageWriter(None, memory_root=self._root, job=JOB, keep_memory=1)

    def begin(self, number: int, tree: Tree) -> Future[Any] | None:
        return _pending(
            self._save(tree, checkpoint_id=f"step-{number}", storage_writer=self._writer)
        )

    def stepping(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def load(self, number: int, into: Tree) -> None:
        with MemoryStorageReader(None, memory_root=self._root, job=JOB) as reader:
            dcp_mem.load(into, checkpoint_id=f"step-{number}", storage_reader=reader)

    def forget(self, number: int, rank: Rank) -> None:
        return

    def close(self) -> None:
        self._writer.close(flush=True)


class _Files:
    """Checkpoints that are directories of files, one for each number."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def stepping(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def forget(self, number: int, rank: Rank) -> None:
        rank.barrier()
        if rank.rank == 0:
            shutil.rmtree(self._path(number), ignore_errors=True)

    def close(self) -> None:
        return

    def _path(self, number: int) -> Path:
        return self._directory / f"step-{number}"


class _TorchSave(_Files):
    """torch's `dcp.save` with its FileSystemWriter."""

    def begin(self, number: int, tree: Tree) -> Future[Any] | None:
        return _pending(dcp.save(tree, storage_writer=FileSystemWriter(self._path(number))))

    def load(self, number: int, into: Tree) -> None:
        dcp.load(into, storage_reader=FileSystemReader(self._path(number)))


class _TorchAsync(_TorchSave):
    """torch's `dcp.async_save` with its FileSystemWriter and its own stager."""

    def __init__(self, directory: Path, stager: DefaultStager | None) -> None:
        super().__init__(directory)
        self._stager = stager

    def begin(self, number: int, tree: Tree) -> Future[Any] | None:
        # No writer is passed, as users don't: torch makes a FileSystemWriter.
        return _pending(
            dcp.async_save(tree, checkpoint_id=self._path(number), async_stager=self._stager)
        )

    def close(self) -> None:
        if self._stager is not None:
            self._stager.close()


class _Meta(_Files):
    """Meta's torch_checkpointing: copies behind training, files from a process of its own."""

    def __init__(self, directory: Path) -> None:
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.checkpoint_process import CheckpointProcessConfig
        from torch_checkpointing.config import AsyncCheckpointSaverConfig
        from torch_checkpointing.staging import CheckpointStagerConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        super().__init__(directory)
        # By default each shared tensor keeps a descriptor open, and 20,000 exceed the limit.
        torch.multiprocessing.set_sharing_strategy("file_system")
        pins = torch.cuda.is_available()
        staging = CheckpointStagerConfig(use_pinned_memory=pins, use_non_blocking_copy=pins)
        self._manager = CheckpointManager(
            CheckpointManager.Config(
                save=AsyncCheckpointSaverConfig(
                    staging_config=staging,
                    process_config=CheckpointProcessConfig(
                        subprocess_init_timeout_secs=META_START_SECONDS
                    ),
                ),
                storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
            )
        )

    def begin(self, number: int, tree: Tree) -> Future[Any] | None:
        pending: Future[Any] = self._manager.save(str(self._path(number)), tree)
        return pending

    def stepping(self) -> AbstractContextManager[Any]:
        lock: AbstractContextManager[Any] = self._manager.lock()
        return lock

    def load(self, number: int, into: Tree) -> None:
        self._manager.load(str(self._path(number)), into=into, strict=True)

    def close(self) -> None:
        self._manager.close()
