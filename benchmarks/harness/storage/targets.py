"""Where bytes are moved to: the sink, and real servers where they are installed."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from benchmarks.harness.storage import servers
from benchmarks.harness.storage.dialects import AZURE_ACCOUNT
from benchmarks.harness.storage.servers import BUCKET

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

S3, AZURE, GOOGLE = "s3", "azure", "gs"
_SCHEMES = {S3: "s3", AZURE: "abfs", GOOGLE: "gs"}
REAL: Mapping[str, tuple[str, Callable[[], Any]]] = {
    "Azurite": (AZURE, servers.azurite),
    "moto": (S3, servers.moto),
    "radosgw": (S3, servers.radosgw),
}
"""Kind of each real server, and what runs it."""


@dataclass(frozen=True, slots=True)
class Target:
    """A place for objects.

    Attributes:
        kind: `S3`, `AZURE` or `GOOGLE`.
        url: As for fsspec.
        storage_options: As for fsspec.
    """

    kind: str
    endpoint: str
    url: str
    storage_options: Mapping[str, Any] = field(repr=False)

    @property
    def bucket(self) -> str:
        return urlsplit(self.url).netloc

    @property
    def prefix(self) -> str:
        """Prefix of keys within the bucket: empty, or it ends with a slash."""
        path = urlsplit(self.url).path.strip("/")
        return f"{path}/" if path else ""

    def below(self, name: str) -> Target:
        """Return a root of its own on the same server."""
        return replace(self, url=f"{self.url}/{name}")

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.endpoint)
        assert parts.hostname is not None
        assert parts.port is not None
        return parts.hostname, parts.port

    @property
    def connection_string(self) -> str:
        return str(self.storage_options["connection_string"])

    @property
    def account_key(self) -> str:
        fields = dict(one.partition("=")[::2] for one in self.connection_string.split(";"))
        return fields["AccountKey"]

    @property
    def account_url(self) -> str:
        return f"{self.endpoint}/{AZURE_ACCOUNT}"

    @property
    def signed(self) -> bool:
        """Whether requests are signed.

        Over plain http the signature covers a SHA-256 of every part, over https it doesn't.
        """
        return not self.storage_options.get("anon")

    @property
    def access_key(self) -> str:
        return str(self.storage_options.get("key", "test"))

    @property
    def secret_key(self) -> str:
        return str(self.storage_options.get("secret", "test"))


@dataclass(frozen=True, slots=True)
class Sink:
    """A running sink, which speaks all three dialects."""

    port: int

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def target(self, kind: str) -> Target:
        """Return a root on the sink.

        S3 comes without signatures, so that a client costs what it costs over https without TLS.
        """
        if kind == AZURE:
            options = servers.azure_options(self.endpoint)
            return Target(AZURE, self.endpoint, _url(AZURE), options)
        if kind == GOOGLE:
            options = {"token": "anon", "endpoint_url": self.endpoint, "project": BUCKET}
            return Target(GOOGLE, self.endpoint, _url(GOOGLE), options)
        options = {**servers.s3_options(self.endpoint), "anon": True}
        return Target(S3, self.endpoint, _url(S3), options)


@contextmanager
def running_sink(nice: int = 0) -> Iterator[Sink]:
    """Run a sink in a process of its own, which ends with this block."""
    command = [sys.executable, "-m", "benchmarks.harness.storage.sink", str(nice)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield Sink(int(process.stdout.readline()))
        finally:
            process.kill()


@contextmanager
def running_server(name: str) -> Iterator[Target]:
    """Run a real server, with an empty bucket.

    Raises:
        Skipped: The server is not installed.
    """
    kind, running = REAL[name]
    with running() as (endpoint, options):
        yield Target(kind, endpoint, _url(kind), options)


def _url(kind: str) -> str:
    return f"{_SCHEMES[kind]}://{BUCKET}/run"
