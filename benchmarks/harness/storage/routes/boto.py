"""boto3's managed transfers, of files and into memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import boto3
from boto3.s3.transfer import TransferConfig
from botocore import UNSIGNED
from botocore.config import Config

from benchmarks.harness.storage.routes.sdk import Into
from benchmarks.harness.storage.routes.threads import for_each
from benchmarks.harness.storage.servers import REGION
from benchmarks.harness.storage.source import CONNECTIONS, OBJECTS, PART_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from benchmarks.harness.storage.source import Segment
    from benchmarks.harness.storage.targets import Target

TRANSFER = TransferConfig(
    multipart_threshold=PART_BYTES,
    multipart_chunksize=PART_BYTES,
    max_concurrency=CONNECTIONS // OBJECTS,
)


@contextmanager
def upload_fileobj(target: Target, segments: Sequence[Segment]) -> Iterator[Callable[[], None]]:
    client = _client(target)

    def put(segment: Segment) -> None:
        with segment.path.open("rb") as file:
            client.upload_fileobj(
                file, target.bucket, target.prefix + segment.name, Config=TRANSFER
            )

    with ThreadPoolExecutor(len(segments)) as pool:
        yield lambda: for_each(pool, put, segments)


@contextmanager
def download_fileobj(target: Target, segments: Sequence[Segment]) -> Iterator[Callable[[], None]]:
    client = _client(target)

    def get(segment: Segment) -> None:
        client.download_fileobj(
            target.bucket, target.prefix + segment.name, Into(segment.view), Config=TRANSFER
        )

    with ThreadPoolExecutor(len(segments)) as pool:
        yield lambda: for_each(pool, get, segments)


def _client(target: Target) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=target.endpoint,
        region_name=REGION,
        aws_access_key_id=target.access_key,
        aws_secret_access_key=target.secret_key,
        config=Config(
            max_pool_connections=2 * CONNECTIONS,
            signature_version="s3v4" if target.signed else UNSIGNED,
            s3={"addressing_style": "path"},
        ),
    )
