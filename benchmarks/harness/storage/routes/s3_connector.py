"""s3torchconnector's writer for DCP."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from s3torchconnector import S3ClientConfig
from s3torchconnector._s3client import S3Client
from s3torchconnector.dcp import S3StorageWriter
from s3torchconnector.dcp.s3_file_system import S3FileSystem

from benchmarks.harness.storage.routes.dcp_writers import saves
from benchmarks.harness.storage.servers import REGION
from benchmarks.harness.storage.source import OBJECTS, PART_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.distributed.checkpoint.storage import StorageWriter

    from benchmarks.harness.storage.source import Segment
    from benchmarks.harness.storage.targets import Target


@contextmanager
def upload(target: Target, segments: Sequence[Segment]) -> Iterator[Callable[[], None]]:
    os.environ.update(AWS_ACCESS_KEY_ID=target.access_key, AWS_SECRET_ACCESS_KEY=target.secret_key)
    config = S3ClientConfig(force_path_style=True, part_size=PART_BYTES, unsigned=not target.signed)
    client = S3Client(REGION, endpoint=target.endpoint, s3client_config=config)

    def writer() -> StorageWriter:
        made: StorageWriter = S3StorageWriter(
            REGION, target.url, s3client_config=config, thread_count=OBJECTS
        )
        # The writer takes no endpoint; the client that it would make does.
        made.fs = S3FileSystem(REGION, s3_client=client)  # type: ignore[attr-defined]
        return made

    yield saves(segments, writer)
