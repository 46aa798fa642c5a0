"""dcp_mem's routes: what the agent does to upload segments, and what a restore does to read."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.harness.storage.source import ranges
from dcp_mem.common.parallel import in_parallel
from dcp_mem.common.values import Segment as Staged
from dcp_mem.flushing.metering import Meter, Throttle
from dcp_mem.flushing.upload import SegmentUpload, upload_all
from dcp_mem.format.checksums import BLOCK, checksum
from dcp_mem.format.manifest import ItemTable
from dcp_mem.storage.routes import open_storage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from benchmarks.harness.storage.source import Range, Segment
    from benchmarks.harness.storage.targets import Target

ITEM_BYTES = 64 << 20


@contextmanager
def upload(target: Target, segments: Sequence[Segment]) -> Iterator[Callable[[], None]]:
    """Do the part of a flush that moves bytes: map, hash, send."""
    storage = open_storage(target.url, target.storage_options)
    outgoing = [
        SegmentUpload(
            segment=Staged(rank=rank, node="", file=one.path.name, nbytes=one.nbytes),
            table=_table(one.nbytes),
            key=one.name,
            is_stored=False,
            is_hashed=True,
        )
        for rank, one in enumerate(segments)
    ]
    directory = str(segments[0].path.parent)

    def upload_them() -> None:
        upload_all(directory, outgoing, storage, Meter(), Throttle(None))

    yield upload_them


@contextmanager
def read(target: Target, segments: Sequence[Segment]) -> Iterator[Callable[[], None]]:
    """Do the part of a restore that moves bytes: read ranges into place, hash them."""
    storage = open_storage(target.url, target.storage_options)

    def read_one(one: Range) -> None:
        if storage.read_into(one.name, one.start, [one.view]) != len(one.view):
            raise AssertionError(f"{one.name} is too short")
        for start in range(0, len(one.view), BLOCK):
            checksum(one.view[start : start + BLOCK])

    def read_all() -> None:
        for _ in in_parallel(read_one, ranges(segments)):
            pass

    yield read_all


def _table(nbytes: int) -> ItemTable:
    offsets = np.arange(0, nbytes, ITEM_BYTES)
    lengths = np.minimum(ITEM_BYTES, nbytes - offsets)
    return ItemTable(np.stack([offsets, lengths, offsets, lengths]), np.zeros(0, "<u4"))
