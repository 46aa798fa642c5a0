"""azstoragetorch's file for checkpoints."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

from azstoragetorch.io import BlobIO

from benchmarks.harness.storage.clients import blob_url, container_sas
from benchmarks.harness.storage.routes.threads import for_each
from benchmarks.harness.storage.source import ranges

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from benchmarks.harness.storage.source import Segment
    from benchmarks.harness.storage.targets import Target

WRITE_BYTES = 4 << 20


@contextmanager
def upload(target: Target, segments: Sequence[Segment]) -> Iterator[Callable[[], None]]:
    sas = container_sas(target)

    def put(segment: Segment) -> None:
        with BlobIO(f"{blob_url(target, segment.name)}?{sas}", "wb") as stream:
            for one in ranges([segment], WRITE_BYTES):
                stream.write(one.view)

    with ThreadPoolExecutor(len(segments)) as pool:
        yield lambda: for_each(pool, put, segments)
