"""Bytes of Azure blobs: one request each, from the socket into the caller's memory.

The SDK's public download copies what it reads, twice; the operation beneath it hands over the open
answer. Where a later SDK lacks that operation, the public download is used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

from azure.storage.blob import BlobClient

from dcp_mem.storage import scatter
from dcp_mem.storage.streams import fill

_SERVED = re.compile(r"bytes (\d+)-(\d+)/")


def read_all(blob: BlobClient) -> bytes:
    """Return all bytes of the blob."""
    operation = _operation(blob)
    if operation is None:
        return bytes(blob.download_blob().readall())
    with _answer(operation) as answer:
        return bytes(answer.raw.read())


def read_into(blob: BlobClient, offset: int, buffers: Sequence[memoryview]) -> int:
    """Fill the buffers with the bytes from `offset` on; return how many there were."""
    wanted = sum(map(len, buffers))
    operation = _operation(blob)
    if operation is None:
        return _read_publicly(blob, offset, wanted, buffers)
    with _answer(operation, range=f"bytes={offset}-{offset + wanted - 1}") as answer:
        served = _SERVED.match(answer.headers.get("Content-Range", ""))
        if served is None or int(served[1]) != offset:
            got = answer.headers.get("Content-Range", "all")
            raise OSError(f"asked for bytes from {offset} on, got {got}")
        nbytes = min(wanted, int(served[2]) + 1 - offset)
        count = fill(answer.raw, buffers, nbytes)
        if count < nbytes:
            raise OSError(f"the answer ended after {count} of {nbytes} bytes")
        return count


def _operation(blob: BlobClient) -> Any:
    return getattr(getattr(getattr(blob, "_client", None), "blob", None), "download", None)


@contextmanager
def _answer(operation: Any, **options: Any) -> Iterator[Any]:
    """Open the answer of `requests`; its connection is used again if it is read to its end."""
    answer = operation(cls=lambda response, *_: response, **options).http_response.internal_response
    with closing(answer):
        yield answer


def _read_publicly(
    blob: BlobClient, offset: int, wanted: int, buffers: Sequence[memoryview]
) -> int:
    done = 0
    for piece in blob.download_blob(offset, wanted).chunks():
        scatter(piece, done, buffers)
        done += len(piece)
    return done
