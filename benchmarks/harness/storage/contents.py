"""What lies on a target: counted after a route was measured, and deleted."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from azure.storage.blob import ContainerClient

from benchmarks.harness.storage.clients import s3_client
from benchmarks.harness.storage.targets import AZURE

if TYPE_CHECKING:
    from benchmarks.harness.storage.targets import Target


def large_bytes(target: Target, least: int) -> int:
    """Return the bytes in objects that are larger than `least`."""
    return sum(size for size in _sizes(target).values() if size > least)


def remove(target: Target) -> None:
    """Delete all objects: real servers keep them in this machine's memory."""
    names = list(_sizes(target))
    if target.kind == AZURE:
        with _container(target) as container:
            for name in names:
                container.delete_blob(name)
        return
    with closing(s3_client(target)) as client:
        for name in names:
            client.delete_object(Bucket=target.bucket, Key=name)


def _sizes(target: Target) -> dict[str, int]:
    if target.kind == AZURE:
        with _container(target) as container:
            return {
                blob.name: blob.size
                for blob in container.list_blobs(name_starts_with=target.prefix)
            }
    with closing(s3_client(target)) as client:
        listed = client.list_objects_v2(Bucket=target.bucket, Prefix=target.prefix)
    return {found["Key"]: found["Size"] for found in listed.get("Contents", ())}


def _container(target: Target) -> ContainerClient:
    return ContainerClient.from_connection_string(target.connection_string, target.bucket)
