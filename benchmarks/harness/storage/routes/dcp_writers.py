"""Whole `dcp.save` calls of tensors that are the segments, through writers for object stores."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

from benchmarks.harness.storage.source import OBJECTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.distributed.checkpoint.storage import StorageWriter

    from benchmarks.harness.storage.source import Segment
    from benchmarks.harness.storage.targets import Target

TENSORS_PER_SEGMENT = 16


@contextmanager
def torch_fsspec(target: Target, segments: Sequence[Segment]) -> Iterator[Callable[[], None]]:
    def writer() -> StorageWriter:
        options: dict[str, Any] = dict(target.storage_options)
        return FsspecWriter(target.url, thread_count=OBJECTS, sync_files=False, **options)

    yield saves(segments, writer)


def saves(segments: Sequence[Segment], writer: Callable[[], StorageWriter]) -> Callable[[], None]:
    """Return a save, each time through a new writer, of tensors that are the segments' bytes."""
    state: dict[str, Any] = {
        f"{segment.name}.{number}": tensor
        for segment in segments
        for number, tensor in enumerate(
            torch.frombuffer(segment.map, dtype=torch.uint8).chunk(TENSORS_PER_SEGMENT)
        )
    }

    def save() -> None:
        dcp.save(state, storage_writer=writer())

    return save
