"""obstore: Rust's object_store."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import obstore
from obstore.store import AzureStore, S3Store

from benchmarks.harness.storage.dialects import AZURE_ACCOUNT
from benchmarks.harness.storage.routes.threads import for_each
from benchmarks.harness.storage.servers import REGION
from benchmarks.harness.storage.source import CONNECTIONS, OBJECTS, PART_BYTES, ranges
from benchmarks.harness.storage.targets import AZURE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from benchmarks.harness.storage.source import Segment
    from benchmarks.harness.storage.targets import Target


@contextmanager
def put(target: Target, segments: Sequence[Segment]) -> Iterator[Callable[[], None]]:
    store = _store(target)

    def put_one(segment: Segment) -> None:
        obstore.put(
            store,
            target.prefix + segment.name,
            segment.view,
            chunk_size=PART_BYTES,
            max_concurrency=CONNECTIONS // OBJECTS,
        )

    with ThreadPoolExecutor(len(segments)) as pool:
        yield lambda: for_each(pool, put_one, segments)


@contextmanager
def get_ranges(target: Target, segments: Sequence[Segment]) -> Iterator[Callable[[], None]]:
    """Get all ranges of an object in one call, and copy them to where they belong."""
    store = _store(target)

    def get(segment: Segment) -> None:
        wanted = ranges([segment])
        starts, ends = [one.start for one in wanted], [one.stop for one in wanted]
        found = obstore.get_ranges(
            store, target.prefix + segment.name, starts=starts, ends=ends, coalesce=0
        )
        for one, data in zip(wanted, found, strict=True):
            one.view[:] = memoryview(data)

    with ThreadPoolExecutor(len(segments)) as pool:
        yield lambda: for_each(pool, get, segments)


def _store(target: Target) -> Any:
    if target.kind == AZURE:
        return AzureStore(
            container_name=target.bucket,
            account_name=AZURE_ACCOUNT,
            account_key=target.account_key,
            endpoint=target.account_url,
            client_options={"allow_http": True},
        )
    return S3Store(
        target.bucket,
        endpoint=target.endpoint,
        access_key_id=target.access_key,
        secret_access_key=target.secret_key,
        region=REGION,
        skip_signature=not target.signed,
        virtual_hosted_style_request=False,
        client_options={"allow_http": True},
    )
