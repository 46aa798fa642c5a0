"""Storage for the tests: real servers on free loopback ports, and roots on them."""

import contextlib
import functools
import http.client
import os
import secrets
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeVar

import botocore.session
import fsspec
import pytest
from azure.storage.blob import BlobServiceClient
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from dcp_mem.storage.retry import RetryingStorage, RetryPolicy
from dcp_mem.storage.routes import open_storage
from tests.support import REPOSITORY
from tests.support.checkpoints.jobs import Job
from tests.support.processes.launch import TETHER
from tests.support.processes.stops import stop
from tests.support.storage import ceph, shared_models  # noqa: F401 (importing it is what it is for)
from tests.support.storage.certificates import Certificates

S = TypeVar("S")

_GOOGLE_TOKEN = "a-token-of-this-server"

_HOST = "127.0.0.1"
_START_SECONDS = 60.0
_START_ATTEMPTS = 3
_LOG_BYTES = 4096
_MOTO_BUFFER = 5 << 20

LEAST_S3_PART = 64 << 10
"""Least bytes of a part, but for the last. S3's limit of 5 MiB would cost tests their time."""

# The account that every Azure emulator comes with; not a secret.
_AZURE_ACCOUNT = "devstoreaccount1"
_AZURE_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)


class ServerUnavailable(RuntimeError):
    """A server's program is missing, or did not answer in time."""


@contextlib.contextmanager
def started(running: Callable[[], AbstractContextManager[S]]) -> Iterator[S]:
    """The server that runs in this context.

    Where it can't be had, tests are skipped on a desk and fail in CI.
    """
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(running())
        except ServerUnavailable as error:
            if os.environ.get("CI"):
                raise
            pytest.skip(str(error))
        yield server


@dataclass(frozen=True, slots=True)
class StorageRoot:
    """A private, empty place on some storage: what a job is given as its root."""

    url: str
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def job(self, memory: Path) -> Job:
        """A job that has its storage below the root, and its memory there."""
        return Job(f"{self.url}/run", str(memory), self.storage_options)

    def storage(self) -> RetryingStorage:
        """What lies below the root, through the route that a flush takes."""
        retries = RetryPolicy(tries=3, first_pause_seconds=0.1, longest_pause_seconds=0.1)
        return open_storage(self.url, self.storage_options, retries)

    def filesystem(self) -> tuple[Any, str]:
        """An fsspec file system that caches nothing, and the root's path in it."""
        uncached = {"skip_instance_cache": True, "use_listings_cache": False}
        fs, path = fsspec.url_to_fs(self.url, **uncached, **self.storage_options)
        return fs, path

    def names(self) -> list[str]:
        """All files below the root, sorted, as paths relative to it."""
        fs, path = self.filesystem()
        if not fs.exists(path):
            return []
        return sorted(os.path.relpath(name, path) for name in fs.find(path))

    def read(self, name: str) -> bytes:
        fs, path = self.filesystem()
        return bytes(fs.cat_file(f"{path}/{name}"))

    def write(self, name: str, data: bytes) -> None:
        fs, path = self.filesystem()
        fs.makedirs(f"{path}/{name}".rpartition("/")[0], exist_ok=True)
        fs.pipe_file(f"{path}/{name}", data)


@dataclass(frozen=True, slots=True)
class Server:
    """A running storage server, and the means to make it misbehave."""

    endpoint: str
    process: "subprocess.Popen[bytes]" = field(repr=False)

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def pause(self) -> None:
        """Accept connections and answer none, until `resume`."""
        stop(self.process.pid)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Refuse every connection from now on. What was stored is lost."""
        self.process.kill()
        self.process.wait()


@dataclass(frozen=True, slots=True)
class BlobServer(Server):
    """Azurite's blob service, in memory.

    Attributes:
        authority: Path of the certificate to trust where it speaks TLS; None trusts the usual ones.
    """

    authority: str | None = None

    @property
    def storage_options(self) -> dict[str, Any]:
        """What adlfs needs to reach it."""
        return self.options_at(self.endpoint)

    def options_at(self, endpoint: str) -> dict[str, Any]:
        """What adlfs needs to reach it by way of another endpoint, a proxy's."""
        connection = {
            "DefaultEndpointsProtocol": endpoint.partition("://")[0],
            "AccountName": _AZURE_ACCOUNT,
            "AccountKey": _AZURE_KEY,
            "BlobEndpoint": f"{endpoint}/{_AZURE_ACCOUNT}",
        }
        return {"connection_string": ";".join(f"{k}={v}" for k, v in connection.items())}

    @contextlib.contextmanager
    def fresh_root(self) -> Iterator[StorageRoot]:
        """A container of its own, deleted at the end."""
        connection = self.storage_options["connection_string"]
        trust: dict[str, Any] = (
            {} if self.authority is None else {"connection_verify": self.authority}
        )
        with BlobServiceClient.from_connection_string(connection, **trust) as client:
            container = client.create_container(_fresh_name())
            yield StorageRoot(f"abfs://{container.container_name}", self.storage_options)
            if self.running:
                container.delete_container()


@dataclass(frozen=True, slots=True)
class S3Server(Server):
    """moto's S3 or radosgw, in memory.

    Attributes:
        authority: As `BlobServer`'s.
    """

    key: str = "test"
    secret: str = field(default="test", repr=False)
    authority: str | None = None

    @property
    def storage_options(self) -> dict[str, Any]:
        """What s3fs needs to reach it."""
        return self.options_at(self.endpoint)

    def options_at(self, endpoint: str) -> dict[str, Any]:
        """What s3fs needs to reach it by way of another endpoint, a proxy's."""
        return {
            "key": self.key,
            "secret": self.secret,
            "endpoint_url": endpoint,
            "client_kwargs": {"region_name": "us-east-1"},
        }

    @contextlib.contextmanager
    def fresh_root(self) -> Iterator[StorageRoot]:
        """A bucket of its own, emptied at the end."""
        client = botocore.session.Session().create_client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id=self.key,
            aws_secret_access_key=self.secret,
            verify=self.authority,
        )
        with contextlib.closing(client):
            bucket = _fresh_name()
            client.create_bucket(Bucket=bucket)
            yield StorageRoot(f"s3://{bucket}", self.storage_options)
            if self.running:
                _empty_bucket(client, bucket)


@dataclass(frozen=True, slots=True)
class GoogleServer(Server):
    """Google's dialect in front of moto, in memory."""

    @property
    def storage_options(self) -> dict[str, Any]:
        """What gcsfs needs to reach it."""
        return self.options_at(self.endpoint)

    def options_at(self, endpoint: str) -> dict[str, Any]:
        """What gcsfs needs to reach it by way of another endpoint, a proxy's."""
        account = {
            "type": "service_account",
            "client_email": "trainer@test.iam.gserviceaccount.com",
            "private_key": _google_key(),
            "token_uri": f"{self.endpoint}/token",
        }
        return {"token": account, "project": "test", "endpoint_url": endpoint}

    @contextlib.contextmanager
    def fresh_root(self) -> Iterator[StorageRoot]:
        """A bucket of its own, emptied at the end."""
        url = f"gs://{_fresh_name()}"
        headers = {"Authorization": f"Bearer {_GOOGLE_TOKEN}"}
        bucket = f"{self.endpoint}/{url.removeprefix('gs://')}"
        request = urllib.request.Request(bucket, method="PUT", headers=headers)
        urllib.request.urlopen(request).close()
        yield StorageRoot(url, self.storage_options)
        if self.running:
            storage = open_storage(url, self.storage_options)
            for one in storage.unfinished(""):
                storage.drop_unfinished(one.key)
            for directory, entry in storage.tree(10_000) or ():
                storage.delete("/".join(filter(None, (directory, entry.name))))


@functools.cache
def _google_key() -> str:
    """A key that a service account might have."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    ).decode()


@contextlib.contextmanager
def running_azurite(tls: Certificates | None = None) -> Iterator[BlobServer]:
    """A new Azurite, answering by the time this is entered; by TLS where it gets certificates.

    Raises ServerUnavailable where Node or Azurite is missing, or does not start.
    """
    node, program = _node(), str(_azurite())
    secured = ("--cert", tls.server, "--key", tls.key) if tls else ()

    def command(port: int) -> list[str]:
        return [
            *(node, program, "--silent", "--inMemoryPersistence", "--disableTelemetry"),
            *("--skipApiVersionCheck", "--blobHost", _HOST, "--blobPort", str(port), *secured),
        ]

    with _running(command, tls) as (endpoint, process):
        yield BlobServer(endpoint, process, tls.authority if tls else None)


@contextlib.contextmanager
def running_moto(tls: Certificates | None = None) -> Iterator[S3Server]:
    """A new moto server, answering by the time this is entered; by TLS where it gets certificates.

    Raises ServerUnavailable where it does not start.
    """

    def command(port: int) -> list[str]:
        settings = (
            f"S3_UPLOAD_PART_MIN_SIZE={LEAST_S3_PART}",
            f"MOTO_S3_DEFAULT_KEY_BUFFER_SIZE={_MOTO_BUFFER}",
        )
        program = [sys.executable, "-m", "moto.server", "-H", _HOST, "-p", str(port)]
        return ["env", *settings, *program, *secured]

    secured = ("--ssl-cert", tls.server, "--ssl-key", tls.key) if tls else ()
    with _running(command, tls) as (endpoint, process):
        yield S3Server(endpoint, process, authority=tls.authority if tls else None)


@contextlib.contextmanager
def running_google() -> Iterator[GoogleServer]:
    """A new server in Google's dialect, answering by the time this is entered."""

    def command(port: int) -> list[str]:
        settings = (
            f"S3_UPLOAD_PART_MIN_SIZE={LEAST_S3_PART}",
            f"MOTO_S3_DEFAULT_KEY_BUFFER_SIZE={_MOTO_BUFFER}",
        )
        program = [sys.executable, str(Path(__file__).with_name("google.py"))]
        return ["env", *settings, *program, str(port), _GOOGLE_TOKEN]

    with _running(command) as (endpoint, process):
        yield GoogleServer(endpoint, process)


@contextlib.contextmanager
def running_radosgw() -> Iterator[S3Server]:
    """Start a new Ceph with radosgw, its S3 server, and wait for answers. `kill` ends radosgw.

    Raises ServerUnavailable where a program of it is missing, or does not start.
    """
    if missing := [program for program in ceph.PROGRAMS if shutil.which(program) is None]:
        raise ServerUnavailable(
            f"{', '.join(missing)} of Ceph missing: `bash .ci/test` installs Debian's packages"
        )
    with (
        tempfile.TemporaryDirectory() as home,
        tempfile.TemporaryFile() as log,
        contextlib.ExitStack() as started,
    ):
        cluster = ceph.prepared(Path(home), LEAST_S3_PART)
        _finish(cluster.make_monmap(), log)
        _finish(cluster.make_monitor(), log)
        started.enter_context(_process(cluster.monitor(), log))
        _finish(cluster.make_osd(), log)
        started.enter_context(_process(cluster.osd(), log))
        try:
            endpoint, process = started.enter_context(_running(cluster.gateway))
        except ServerUnavailable as error:
            raise ServerUnavailable(f"{error}\n--- monitor and OSD\n{_tail(log)}") from None
        user = S3Server(endpoint, process, key="test", secret=secrets.token_hex(16))
        _finish(cluster.make_user(user.key, user.secret), log)
        yield user


def _node() -> str:
    node = shutil.which("node") or shutil.which("node", path=f"{sys.prefix}/bin")
    if node is None:
        raise ServerUnavailable("Node.js is missing, Azurite runs on it: `bash .ci/test` brings it")
    return node


def _azurite() -> Path:
    """The program of the blob service, in $DCP_MEM_AZURITE or where .ci/test puts it."""
    home = Path(os.environ.get("DCP_MEM_AZURITE") or REPOSITORY / ".venv" / "azurite")
    program = home / "node_modules" / ".bin" / "azurite-blob"
    if not program.exists():
        raise ServerUnavailable(
            f"Azurite is missing in {home}: `bash .ci/test` brings it; or run `npm install azurite`"
            " in a directory of your choice and set DCP_MEM_AZURITE to that"
        )
    return program


@contextlib.contextmanager
def _running(
    command: Callable[[int], Sequence[str]], tls: Certificates | None = None
) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """The endpoint and process of a server that answers; killed at the end."""
    with tempfile.TemporaryFile() as log, contextlib.ExitStack() as started:
        for attempt in range(1, _START_ATTEMPTS + 1):
            port = free_port()
            process = started.enter_context(_process(command(port), log))
            if _answers(process, port, tls):
                break
            # Another process may have taken the port since; a dead server is tried again.
            if process.poll() is None or attempt == _START_ATTEMPTS:
                raise ServerUnavailable(
                    f"no answer within {_START_SECONDS:.0f} s (exit code {process.poll()}) from "
                    f"{' '.join(command(port))}\n{_tail(log)}"
                )
        yield f"{'https' if tls else 'http'}://{_HOST}:{port}", process


def _finish(command: Sequence[str], log: IO[bytes]) -> None:
    """Run it to its end. Raises ServerUnavailable where that isn't a good one."""
    with _process(command, log) as process:
        try:
            ended_well = process.wait(_START_SECONDS) == 0
        except subprocess.TimeoutExpired:
            ended_well = False
    if not ended_well:
        raise ServerUnavailable(
            f"failed (exit code {process.poll()}): {' '.join(command)}\n{_tail(log)}"
        )


@contextlib.contextmanager
def _process(command: Sequence[str], log: IO[bytes]) -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen(
        [*TETHER, *command],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,  # Ctrl-C in pytest must not end it before the tests are torn down.
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _answers(
    process: "subprocess.Popen[bytes]", port: int, tls: Certificates | None = None
) -> bool:
    """Whether the process speaks HTTP on the port before it ends or the time is over."""
    deadline = time.monotonic() + _START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        connection = (
            http.client.HTTPSConnection(
                _HOST, port, timeout=5, context=ssl.create_default_context(cafile=tls.authority)
            )
            if tls
            else http.client.HTTPConnection(_HOST, port, timeout=5)
        )
        with (
            contextlib.closing(connection),
            contextlib.suppress(OSError, http.client.HTTPException),
        ):
            connection.request("GET", "/")
            connection.getresponse().read()
            return True
        time.sleep(0.05)
    return False


def free_port() -> int:
    """A port that nobody listens on, below those that the kernel gives to connections."""
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = first_given - 1 - secrets.randbelow(10_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((_HOST, port))
            return port


def _tail(log: IO[bytes]) -> str:
    size = log.seek(0, os.SEEK_END)
    log.seek(max(0, size - _LOG_BYTES))
    return log.read().decode(errors="replace")


def _fresh_name() -> str:
    return f"test-{secrets.token_hex(8)}"


def _empty_bucket(client: Any, bucket: str) -> None:
    """Free the server's memory; the bucket's name is never used again."""
    for upload in client.list_multipart_uploads(Bucket=bucket).get("Uploads", ()):
        client.abort_multipart_upload(Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket):
        keys = [{"Key": item["Key"]} for item in page.get("Contents", ())]
        if keys:
            client.delete_objects(Bucket=bucket, Delete={"Objects": keys})
