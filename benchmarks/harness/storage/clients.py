"""Clients of the bare SDKs, and signatures for clients that can't sign."""

from __future__ import annotations

import datetime as dt
import io
from typing import TYPE_CHECKING, Any

import botocore.session
from azure.storage.blob import ContainerSasPermissions, generate_container_sas
from botocore import UNSIGNED
from botocore.config import Config

from benchmarks.harness.storage.dialects import AZURE_ACCOUNT
from benchmarks.harness.storage.servers import REGION
from benchmarks.harness.storage.source import CONNECTIONS

if TYPE_CHECKING:
    from benchmarks.harness.storage.targets import Target


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


def s3_client(target: Target) -> Any:
    """Return a client without checksums that sends bodies from where they lie."""
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
        AZURE_ACCOUNT,
        target.bucket,
        account_key=target.account_key,
        permission=permission,
        expiry=expiry,
    )


def blob_url(target: Target, name: str) -> str:
    return f"{target.account_url}/{target.bucket}/{target.prefix}{name}"
