"""torch's own writers and readers, on the same tmpfs."""

from __future__ import annotations

import shutil
import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions

from benchmarks.harness.clock import READER_METHODS, WRITER_METHODS, Clock, Phases, seconds
from benchmarks.harness.samples import Sample

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.harness.processes import Rank
    from benchmarks.harness.states import State


@dataclass(frozen=True, slots=True)
class AsyncSave:
    """An asynchronous save under way, and how long the call blocked."""

    blocked: float
    upload: Future[Any]


def save(state: State, directory: Path) -> Phases:
    """Save with torch's FileSystemWriter."""
    writer = FileSystemWriter(directory)
    clock = Clock(writer, WRITER_METHODS, "write_data")
    return clock.phases(seconds(lambda: dcp.save(state.tree, storage_writer=writer)))


def load(state: State, directory: Path) -> Phases:
    """Load with torch's FileSystemReader."""
    reader = FileSystemReader(directory)
    clock = Clock(reader, READER_METHODS, "read_data")
    return clock.phases(seconds(lambda: dcp.load(state.tree, storage_reader=reader)))


def async_save(state: State, directory: Path, stager: AsyncStager | None = None) -> AsyncSave:
    """Save in the background, on torch's thread executor.

    torch writes with its FileSystemWriter. No writer is passed, because a writer would stage: the
    default stager is what is measured, made by torch unless the caller keeps one.
    """
    start = time.perf_counter()
    answer = dcp.async_save(state.tree, checkpoint_id=directory, async_stager=stager)
    blocked = time.perf_counter() - start
    return AsyncSave(blocked, answer if isinstance(answer, Future) else answer.upload_completion)


def kept_stager() -> DefaultStager:
    """Return the stager that torch makes by default, for a caller that keeps its buffers."""
    return DefaultStager(StagingOptions(False, False, False, False))


def saves(rank: Rank, state: State, directory: Path, repeats: int) -> list[Phases]:
    """Return how long torch's `dcp.save` blocks, each time into a new directory."""
    phases = []
    for _ in range(repeats):
        rank.barrier()
        phases.append(save(state, directory))
        remove(rank, directory)
    return phases


def async_save_seconds(
    rank: Rank, state: State, directory: Path, repeats: int, stager: AsyncStager | None = None
) -> Sample:
    """Return how long `dcp.async_save` blocks, each time after the save before has ended."""
    values = []
    for _ in range(repeats):
        rank.barrier()
        running = async_save(state, directory, stager)
        running.upload.result()
        values.append(running.blocked)
        remove(rank, directory)
    return Sample(tuple(values))


def remove(rank: Rank, directory: Path) -> None:
    """Remove what all ranks have written."""
    rank.barrier()
    if rank.rank == 0:
        shutil.rmtree(directory)
    rank.barrier()
