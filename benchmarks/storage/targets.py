"""Where bytes are moved to: the sink, and real servers where they are installed."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from benchmarks.scratch import Skipped
from benchmarks.storage.dialects import AZURE_ACCOUNT
from tests import servers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

S3, AZURE = "s3", "azure"
REGION = "us-east-1"
REAL: Mapping[str, tuple[str, Callable[[], Any]]] = {
    "Azurite": (AZURE, servers.running_azurite),
    "moto": (S3, servers.running_moto),
    "radosgw": (S3, servers.running_radosgw),
}
"""Kind and fixture of each real server."""


@dataclass(frozen=True, slots=True)
class Target:
    """A place for objects. kind: S3 or AZURE. url, storage_options: as for fsspec."""

    kind: str
    endpoint: str
    url: str
    storage_options: Mapping[str, Any] = field(repr=False)

    @property
    def bucket(self) -> str:
        return urlsplit(self.url).netloc

    @property
    def prefix(self) -> str:
        """Of keys within the bucket: empty, or it ends with a slash."""
        path = urlsplit(self.url).path.strip("/")
        return f"{path}/" if path else ""

    def below(self, name: str) -> Target:
        """A root of its own on the same server."""
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
        """Whether requests are signed; over plain http the signature covers a SHA-256 of every part, over https it doesn't."""
        return not self.storage_options.get("anon")

    @property
    def access_key(self) -> str:
        return str(self.storage_options["key"])

    @property
    def secret_key(self) -> str:
        return str(self.storage_options["secret"])


@dataclass(frozen=True, slots=True)
class Sink:
    """A running sink: the same one speaks both dialects."""

    port: int

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def target(self, kind: str) -> Target:
        """A root on it; on S3 without signatures, so that a client costs what it costs over https, TLS apart."""
        process: Any = None  # the fixtures' classes know the options; who keeps the process alive is told here
        if kind == AZURE:
            options = servers.BlobServer(self.endpoint, process).storage_options
            return Target(AZURE, self.endpoint, "abfs://bench/run", options)
        options = {**servers.S3Server(self.endpoint, process).storage_options, "anon": True}
        return Target(S3, self.endpoint, "s3://bench/run", options)


@contextmanager
def running_sink(nice: int = 0) -> Iterator[Sink]:
    """A sink, in a process of its own, that ends with this block."""
    command = [sys.executable, "-m", "benchmarks.storage.sink", str(nice)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield Sink(int(process.stdout.readline()))
        finally:
            process.kill()


@contextmanager
def running_server(name: str) -> Iterator[Target]:
    """An empty bucket on a real server. Raises Skipped where that is not installed."""
    kind, running = REAL[name]
    try:
        with running() as server, server.fresh_root() as root:
            yield Target(kind, server.endpoint, f"{root.url}/run", root.storage_options)
    except servers.ServerUnavailable as reason:
        raise Skipped(str(reason).splitlines()[0]) from None
