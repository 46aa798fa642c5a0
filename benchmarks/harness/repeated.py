"""dcp_mem's saves and loads, repeated as a trainer does, with the methods timed."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch.distributed.checkpoint as dcp

from benchmarks.harness.clock import READER_METHODS, WRITER_METHODS, Clock, Phases
from benchmarks.harness.states import change
from dcp_mem import MemoryStorageReader, MemoryStorageWriter

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch.distributed.checkpoint.metadata import Metadata

    from benchmarks.harness.states import State

JOB = "bench"


class Saves:
    """One state, saved again and again through one writer, by `dcp.save` or `dcp_mem.save`.

    Where DCP calls the writer's methods, they are timed; of `dcp_mem.save` only the whole is.
    """

    def __init__(
        self,
        state: State,
        *,
        memory: Path,
        path: Path | None = None,
        keep: int = 2,
        save: Callable[..., Metadata] = dcp.save,
        changes: bool = False,
        **options: Any,
    ) -> None:
        """Open the writer.

        Args:
            memory: Directory for the memory root.
            path: Directory to flush to; None: no flush.
            keep: Checkpoints that stay in memory.
            save: `dcp.save` or `dcp_mem.save`.
            changes: Make all values other ones before each save, off the clock: copies of what
                hasn't changed aren't sent.
            options: More arguments of the writer.
        """
        self.state = state
        self._save, self._changes = save, changes
        url = None if path is None else str(path)
        self.writer = MemoryStorageWriter(
            url, memory_root=str(memory), job=JOB, keep_memory=keep, **options
        )
        self.history: list[Phases] = []
        self._clock = Clock(self.writer, WRITER_METHODS, "write_data")

    @property
    def newest(self) -> str:
        """The id of the last checkpoint."""
        return f"step-{len(self.history)}"

    def save(self) -> float:
        """Save under the next checkpoint id, and return the seconds that blocked."""
        checkpoint_id = f"step-{len(self.history) + 1}"
        if self._changes:
            change(self.state)
        start = time.perf_counter()
        self._save(self.state.tree, checkpoint_id=checkpoint_id, storage_writer=self.writer)
        self.history.append(self._clock.phases(time.perf_counter() - start))
        return self.history[-1].whole

    def close(self) -> None:
        self.writer.close(flush=True)


class Loads:
    """The newest checkpoint, loaded again and again by `dcp.load` or `dcp_mem.load`.

    Where DCP calls the reader's methods, they are timed; of `dcp_mem.load` only the whole is.
    """

    def __init__(self, state: State, memory: Path, load: Callable[..., None] = dcp.load) -> None:
        self._state = state
        self._memory = memory
        self._load = load
        self.history: list[Phases] = []

    def load(self) -> float:
        """Load with a new reader, as a restarted trainer does; return the seconds that blocked."""
        start = time.perf_counter()
        with MemoryStorageReader(None, memory_root=str(self._memory), job=JOB) as reader:
            clock = Clock(reader, READER_METHODS, "read_data")
            self._load(self._state.tree, storage_reader=reader)
            whole = time.perf_counter() - start
        self.history.append(clock.phases(whole))
        return whole
