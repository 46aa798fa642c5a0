"""What fsspec itself offers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import fsspec

from benchmarks.harness.storage.routes.threads import for_each
from benchmarks.harness.storage.source import CONNECTIONS, ranges
from benchmarks.harness.storage.targets import S3

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from benchmarks.harness.storage.source import Segment
    from benchmarks.harness.storage.targets import Target

WRITE_BYTES = 4 << 20
MOST_BY_ONE_PUT = 100 << 20
"""s3fs cuts larger objects into parts, which it can cut out of a mapping."""


@contextmanager
def pipe_file(target: Target, segments: Sequence[Segment]) -> Iterator[Callable[[], None]]:
    """Put each object by one call.

    A mapping is passed where it can be: s3fs takes no memoryview, and bytes would be a copy.
    """
    fs, root = _opened(target)

    def put(segment: Segment) -> None:
        segment.map.seek(0)  # adlfs reads it as a file, and leaves it at its end
        one_put = target.kind == S3 and segment.nbytes <= MOST_BY_ONE_PUT
        fs.pipe_file(f"{root}/{segment.name}", bytes(segment.view) if one_put else segment.map)

    with ThreadPoolExecutor(len(segments)) as pool:
        yield lambda: for_each(pool, put, segments)


@contextmanager
def open_write(target: Target, segments: Sequence[Segment]) -> Iterator[Callable[[], None]]:
    fs, root = _opened(target)

    def put(segment: Segment) -> None:
        with fs.open(f"{root}/{segment.name}", "wb") as stream:
            for one in ranges([segment], WRITE_BYTES):
                stream.write(one.view)

    with ThreadPoolExecutor(len(segments)) as pool:
        yield lambda: for_each(pool, put, segments)


@contextmanager
def cat_ranges(target: Target, segments: Sequence[Segment]) -> Iterator[Callable[[], None]]:
    """Get all ranges in one call, and copy them to where they belong."""
    fs, root = _opened(target)
    wanted = ranges(segments)
    paths = [f"{root}/{one.name}" for one in wanted]
    starts, stops = [one.start for one in wanted], [one.stop for one in wanted]

    def get() -> None:
        found = fs.cat_ranges(paths, starts, stops, batch_size=CONNECTIONS, on_error="raise")
        for one, data in zip(wanted, found, strict=True):
            one.view[:] = data

    yield get


def _opened(target: Target) -> tuple[Any, str]:
    options = {"skip_instance_cache": True, "use_listings_cache": False, **target.storage_options}
    fs, root = fsspec.url_to_fs(target.url, **options)
    return fs, root
