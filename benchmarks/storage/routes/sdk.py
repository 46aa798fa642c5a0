"""The SDKs that s3fs and adlfs bring, synchronous, in threads, straight from and into memory; and what they sign for others."""

from __future__ import annotations

import base64
import datetime as dt
import io
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import botocore.session
from azure.storage.blob import BlobBlock, BlobServiceClient, ContainerSasPermissions, generate_container_sas
from botocore import UNSIGNED
from botocore.config import Config

from benchmarks.storage.dialects import AZURE_ACCOUNT
from benchmarks.storage.routes.threads import for_each
from benchmarks.storage.source import CONNECTIONS, ranges
from benchmarks.storage.targets import AZURE, REGION

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from benchmarks.storage.source import Range, Segment
    from benchmarks.storage.targets import Target


@dataclass(frozen=True, slots=True)
class Presigned:
    """Where a part may be put by whoever knows this."""

    url: str
    range: Range


class Body(io.RawIOBase):
    """A view as the file that botocore wants for a body."""

    def __init__(self, view: memoryview) -> None:
        self.view = view
        self._position = 0

    def __len__(self) -> int:
        return len(self.view)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = (0, self._position, len(self.view))[whence] + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        piece = self.view[self._position : self._position + len(buffer)]
        buffer[: len(piece)] = piece
        self._position += len(piece)
        return len(piece)


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


def s3_client(target: Target) -> Any:
    """A client that does no more than it has to: no checksums, and bodies are sent from where they lie."""
    client = botocore.session.Session().create_client(
        "s3",
        endpoint_url=target.endpoint,
        region_name=REGION,
        aws_access_key_id=target.access_key,
        aws_secret_access_key=target.secret_key,
        config=Config(
            max_pool_connections=2 * CONNECTIONS,
            signature_version="s3v4" if target.signed else UNSIGNED,
            s3={"addressing_style": "path"},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        ),
    )
    client.meta.events.register("before-send.s3.UploadPart", _send_view)
    return client


def _send_view(request: Any, **_: Any) -> None:
    """Let http.client send a body by one call, where it would read a file in small pieces."""
    if isinstance(request.body, Body):
        request.body = request.body.view


def container_sas(target: Target) -> str:
    expiry = dt.datetime.now(dt.timezone.utc) + dt.timedelta(hours=2)
    permission = ContainerSasPermissions(read=True, write=True, create=True, list=True)
    return generate_container_sas(
        AZURE_ACCOUNT, target.bucket, account_key=target.account_key, permission=permission, expiry=expiry
    )


def blob_url(target: Target, name: str) -> str:
    return f"{target.account_url}/{target.bucket}/{target.prefix}{name}"


def block_id(number: int) -> str:
    return f"{number:08}"


@contextmanager
def presigned_puts(target: Target, parts: Sequence[Range]) -> Iterator[list[Presigned]]:
    """URLs for parts of uploads, which are given up at the end."""
    if target.kind == AZURE:
        sas = container_sas(target)
        yield [
            Presigned(f"{blob_url(target, one.name)}?comp=block&blockid={_encoded(one)}&{sas}", one) for one in parts
        ]
        return
    with closing(s3_client(target)) as client, _uploads(client, target, parts) as uploads:
        yield [
            Presigned(client.generate_presigned_url("upload_part", Params=_part(uploads[one.name], one)), one)
            for one in parts
        ]


def presigned_gets(target: Target, wanted: Sequence[Range]) -> list[tuple[str, Range]]:
    if target.kind == AZURE:
        sas = container_sas(target)
        return [(f"{blob_url(target, one.name)}?{sas}", one) for one in wanted]
    with closing(s3_client(target)) as client:
        return [(client.generate_presigned_url("get_object", Params=_key(target, one.name)), one) for one in wanted]


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
            text = target.connection_string
            with BlobServiceClient.from_connection_string(text, max_single_get_size=most) as service:
                yield lambda: for_each(pool, lambda one: _download(service, target, one), wanted)
        else:
            with closing(s3_client(target)) as client:
                yield lambda: for_each(pool, lambda one: _get(client, target, one), wanted)


def _upload_blocks(
    service: BlobServiceClient, target: Target, parts: Sequence[Range], pool: ThreadPoolExecutor
) -> None:
    def stage(one: Range) -> None:
        blob = service.get_blob_client(target.bucket, target.prefix + one.name)
        data: Any = one.view  # sent as it is, whatever the annotations say
        blob.stage_block(block_id(one.number), data, length=len(one.view))

    for_each(pool, stage, parts)
    for name, numbers in _numbers(parts).items():
        blob = service.get_blob_client(target.bucket, target.prefix + name)
        blob.commit_block_list([BlobBlock(block_id(number)) for number in numbers])


def _upload_parts(client: Any, target: Target, parts: Sequence[Range], pool: ThreadPoolExecutor) -> None:
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
            got = body.readinto(one.view[done:])
            if not got:
                raise ConnectionResetError("the body ended early")
            done += got


def _download(service: BlobServiceClient, target: Target, one: Range) -> None:
    blob = service.get_blob_client(target.bucket, target.prefix + one.name)
    into: Any = Into(one.view)
    blob.download_blob(offset=one.start, length=len(one.view)).readinto(into)


@contextmanager
def _uploads(client: Any, target: Target, parts: Sequence[Range]) -> Iterator[dict[str, dict[str, str]]]:
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
    """Part numbers by object."""
    numbers: dict[str, list[int]] = {}
    for one in parts:
        numbers.setdefault(one.name, []).append(one.number)
    return numbers
