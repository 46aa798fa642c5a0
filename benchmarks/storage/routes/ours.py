"""dcp_mem's own route. What the benchmarks know of it is in two functions: when the route changes, so do these."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from benchmarks.storage.routes.threads import for_each
from benchmarks.storage.source import CONNECTIONS, ranges
from dcp_mem.storage.routes import open_storage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from benchmarks.storage.source import Segment
    from benchmarks.storage.targets import Target

PIECE_BYTES = 4 << 20
"""As a flush reads them."""


@contextmanager
def upload(target: Target, segments: Sequence[Segment]) -> Iterator[Callable[[], None]]:
    with ours_upload(target.url, target.storage_options, segments) as move:
        yield move


@contextmanager
def read(target: Target, segments: Sequence[Segment]) -> Iterator[Callable[[], None]]:
    with ours_read(target.url, target.storage_options, segments) as move:
        yield move


# ---- TO BE REPLACED when the route for storage at full speed is merged ------------------------------------------------


@contextmanager
def ours_upload(url: str, options: Mapping[str, Any], segments: Sequence[Segment]) -> Iterator[Callable[[], None]]:
    """Upload each segment under its name below `url`, as the agent does."""
    storage = open_storage(url, options)

    def put(segment: Segment) -> None:
        pieces = (one.view for one in ranges([segment], PIECE_BYTES))
        storage.put_stream(segment.name, pieces, segment.nbytes)

    with ThreadPoolExecutor(len(segments)) as pool:
        yield lambda: for_each(pool, put, segments)


@contextmanager
def ours_read(url: str, options: Mapping[str, Any], segments: Sequence[Segment]) -> Iterator[Callable[[], None]]:
    """Read the objects below `url` over the segments, as a restore does."""
    storage = open_storage(url, options)
    wanted = ranges(segments)

    def read_one(index: int) -> None:
        one = wanted[index]
        if storage.read_into(one.name, one.start, one.view) != len(one.view):
            raise AssertionError(f"{one.name} is too short")

    with ThreadPoolExecutor(CONNECTIONS) as pool:
        yield lambda: for_each(pool, read_one, range(len(wanted)))


# ---- until here -------------------------------------------------------------------------------------------------------
