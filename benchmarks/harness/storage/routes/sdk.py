"""The SDKs that s3fs and adlfs bring: synchronous, in threads, straight from and into memory."""

from __future__ import annotations

import base64
import io
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from azure.storage.blob import BlobBlock, BlobServiceClient

from benchmarks.harness.storage.clients import Body, blob_url, container_sas, s3_client
from benchmarks.harness.storage.routes.threads import for_each
from benchmarks.harness.storage.source import CONNECTIONS, ranges
from benchmarks.harness.storage.targets import AZURE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from benchmarks.harness.storage.source import Range, Segment
    from benchmarks.harness.storage.targets import Target


READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Presigned:
    """A URL under which anybody may put a part."""

    url: str
    range: Range


class Into(io.RawIOBase):
    """A view as the file that azure-storage-blob wants to write to."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._position = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._view[self._position : self._position + len(data)] = data
        self._position += len(data)
        return len(data)


def block_id(number: int) -> str:
    return f"{number:08}"


@contextmanager
def presigned_puts(target: Target, parts: Sequence[Range]) -> Iterator[list[Presigned]]:
    """Make URLs for parts of uploads, which are aborted at the end."""
    if target.kind == AZURE:
        sas = container_sas(target)
        yield [
            Presigned(f"{blob_url(target, one.name)}?comp=block&blockid={_encoded(one)}&{sas}", one)
            for one in parts
        ]
        return
    with closing(s3_client(target)) as client, _uploads(client, target, parts) as uploads:
        yield [
            Presigned(
                client.generate_presigned_url("upload_part", Params=_part(uploads[one.name], one)),
                one,
            )
            for one in parts
        ]


def presigned_gets(target: Target, wanted: Sequence[Range]) -> list[tuple[str, Range]]:
    if target.kind == AZURE:
        sas = container_sas(target)
        return [(f"{blob_url(target, one.name)}?{sas}", one) for one in wanted]
    with closing(s3_client(target)) as client:
        return [
            (client.generate_presigned_url("get_object", Params=_key(target, one.name)), one)
            for one in wanted
        ]


@contextmanager
def upload(target: Target, segments: Sequence[Segment]) -> Iterator[Callable[[], None]]:
    parts = ranges(segments)
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        if target.kind == AZURE:
            with BlobServiceClient.from_connection_string(target.connection_string) as service:
                yield lambda: _upload_blocks(service, target, parts, pool)
        else:
            with closing(s3_client(target)) as client:
                yield lambda: _upload_parts(client, target, parts, pool)


@contextmanager
def read(target: Target, segments: Sequence[Segment]) -> Iterator[Callable[[], None]]:
    wanted = ranges(segments)
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        if target.kind == AZURE:
            most = max(len(one.view) for one in wanted)
            options: dict[str, Any] = {
                "max_single_get_size": most,
                "connection_data_block_size": READ_BYTES,
            }
            with BlobServiceClient.from_connection_string(
                target.connection_string, **options
            ) as service:
                yield lambda: for_each(pool, lambda one: _download(service, target, one), wanted)
        else:
            with closing(s3_client(target)) as client:
                yield lambda: for_each(pool, lambda one: _get(client, target, one), wanted)


def _upload_blocks(
    service: BlobServiceClient, target: Target, parts: Sequence[Range], pool: ThreadPoolExecutor
) -> None:
    def stage(one: Range) -> None:
        blob = service.get_blob_client(target.bucket, target.prefix + one.name)
        data: Any = one.view  # sent as it is; the annotations are narrower
        blob.stage_block(block_id(one.number), data, length=len(one.view))

    for_each(pool, stage, parts)
    for name, numbers in _numbers(parts).items():
        blob = service.get_blob_client(target.bucket, target.prefix + name)
        blob.commit_block_list([BlobBlock(block_id(number)) for number in numbers])


def _upload_parts(
    client: Any, target: Target, parts: Sequence[Range], pool: ThreadPoolExecutor
) -> None:
    uploads = {name: _create(client, target, name) for name in _numbers(parts)}

    def put(one: Range) -> str:
        return str(client.upload_part(**_part(uploads[one.name], one), Body=Body(one.view))["ETag"])

    tags = dict(zip(((one.name, one.number) for one in parts), pool.map(put, parts), strict=True))
    for name, numbers in _numbers(parts).items():
        done = [{"PartNumber": number + 1, "ETag": tags[name, number]} for number in numbers]
        client.complete_multipart_upload(**uploads[name], MultipartUpload={"Parts": done})


def _get(client: Any, target: Target, one: Range) -> None:
    answer = client.get_object(**_key(target, one.name), Range=f"bytes={one.start}-{one.stop - 1}")
    with closing(answer["Body"]) as body:
        done = 0
        while done < len(one.view):
            got = body.readinto(
                one.view[done : done + READ_BYTES]
            )  # it makes a copy of that size on the way
            if not got:
                raise ConnectionResetError("the body ended early")
            done += got


def _download(service: BlobServiceClient, target: Target, one: Range) -> None:
    blob = service.get_blob_client(target.bucket, target.prefix + one.name)
    into: Any = Into(one.view)
    blob.download_blob(offset=one.start, length=len(one.view)).readinto(into)


@contextmanager
def _uploads(
    client: Any, target: Target, parts: Sequence[Range]
) -> Iterator[dict[str, dict[str, str]]]:
    uploads = {name: _create(client, target, name) for name in _numbers(parts)}
    try:
        yield uploads
    finally:
        for upload in uploads.values():
            client.abort_multipart_upload(**upload)


def _create(client: Any, target: Target, name: str) -> dict[str, str]:
    key = _key(target, name)
    return {**key, "UploadId": client.create_multipart_upload(**key)["UploadId"]}


def _key(target: Target, name: str) -> dict[str, str]:
    return {"Bucket": target.bucket, "Key": target.prefix + name}


def _part(upload: dict[str, str], one: Range) -> dict[str, Any]:
    return {**upload, "PartNumber": one.number + 1}


def _encoded(one: Range) -> str:
    # Digits encode to base64 without + and /; only the padding is to be quoted.
    return base64.b64encode(block_id(one.number).encode()).decode().replace("=", "%3D")


def _numbers(parts: Sequence[Range]) -> dict[str, list[int]]:
    """Return part numbers by object."""
    numbers: dict[str, list[int]] = {}
    for one in parts:
        numbers.setdefault(one.name, []).append(one.number)
    return numbers
