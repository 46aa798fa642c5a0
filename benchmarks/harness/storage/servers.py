"""Real storage servers on free loopback ports, each with an empty bucket; killed at the end."""

from __future__ import annotations

import http.client
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import botocore.session
from azure.storage.blob import BlobServiceClient

from benchmarks.harness.runs import BENCHMARKS
from benchmarks.harness.scratch import Skipped
from benchmarks.harness.storage.ceph import Ceph
from benchmarks.harness.storage.dialects import AZURE_ACCOUNT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

HOST = "127.0.0.1"
REGION = "us-east-1"
BUCKET = "bench"
START_SECONDS = 60.0
# The key that every Azure emulator comes with; not a secret.
AZURE_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
_DIES_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL", "--")


def azure_options(endpoint: str) -> dict[str, Any]:
    """Return what adlfs needs to reach an emulator."""
    connection = {
        "DefaultEndpointsProtocol": "http",
        "AccountName": AZURE_ACCOUNT,
        "AccountKey": AZURE_KEY,
        "BlobEndpoint": f"{endpoint}/{AZURE_ACCOUNT}",
    }
    return {"connection_string": ";".join(f"{name}={value}" for name, value in connection.items())}


def s3_options(endpoint: str, key: str = "test", secret: str = "test") -> dict[str, Any]:
    """Return what s3fs needs to reach a server."""
    return {
        "key": key,
        "secret": secret,
        "endpoint_url": endpoint,
        "client_kwargs": {"region_name": REGION},
    }


@contextmanager
def azurite() -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Run Azurite, in memory; its endpoint and storage options.

    Raises:
        Skipped: Node.js or Azurite is missing.
    """
    node = shutil.which("node") or shutil.which("node", path=f"{sys.prefix}/bin")
    home = Path(os.environ.get("DCP_MEM_AZURITE") or BENCHMARKS.parent / ".venv" / "azurite")
    program = home / "node_modules" / ".bin" / "azurite-blob"
    if node is None or not program.exists():
        raise Skipped("Node.js or Azurite missing; DCP_MEM_AZURITE names a directory that has it")

    def command(port: int) -> list[str]:
        options = ("--silent", "--inMemoryPersistence", "--disableTelemetry")
        where = ("--skipApiVersionCheck", "--blobHost", HOST, "--blobPort", str(port))
        return [node, str(program), *options, *where]

    with _running(command) as endpoint:
        options = azure_options(endpoint)
        with BlobServiceClient.from_connection_string(options["connection_string"]) as client:
            client.create_container(BUCKET)
        yield endpoint, options


@contextmanager
def moto() -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Run moto's S3, in memory; its endpoint and storage options."""

    def command(port: int) -> list[str]:
        buffer = f"MOTO_S3_DEFAULT_KEY_BUFFER_SIZE={5 << 20}"
        return ["env", buffer, sys.executable, "-m", "moto.server", "-H", HOST, "-p", str(port)]

    with _running(command) as endpoint:
        options = s3_options(endpoint)
        _make_bucket(options)
        yield endpoint, options


@contextmanager
def radosgw() -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Run Ceph with radosgw, in memory; its endpoint and storage options.

    Raises:
        Skipped: A program of Ceph is missing.
    """
    with ExitStack() as stack:
        ceph = Ceph.prepared(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        log = stack.enter_context(tempfile.TemporaryFile())
        for command in ceph.make_monitor():
            _finish(command, log)
        stack.enter_context(_process(ceph.monitor(), log))
        _finish([*ceph.osd(), "--mkfs"], log)
        stack.enter_context(_process(ceph.osd(), log))
        endpoint = stack.enter_context(_running(ceph.gateway))
        options = s3_options(endpoint, secret=secrets.token_hex(16))
        _finish(ceph.make_user(options["key"], options["secret"]), log)
        _make_bucket(options)
        yield endpoint, options


def _make_bucket(options: Mapping[str, Any]) -> None:
    client = botocore.session.Session().create_client(
        "s3",
        endpoint_url=options["endpoint_url"],
        region_name=REGION,
        aws_access_key_id=options["key"],
        aws_secret_access_key=options["secret"],
    )
    with closing(client):
        client.create_bucket(Bucket=BUCKET)


@contextmanager
def _running(command: Callable[[int], Sequence[str]]) -> Iterator[str]:
    """Run a server on a free port, from when it answers; its endpoint."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
    with tempfile.TemporaryFile() as log, _process(command(port), log) as process:
        deadline = time.monotonic() + START_SECONDS
        while not _answers(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise Skipped(f"{command(port)[0]} does not start: {_last_line(log)}")
            time.sleep(0.05)
        yield f"http://{HOST}:{port}"


@contextmanager
def _process(command: Sequence[str], log: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [*_DIES_WITH_PARENT, *command],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _finish(command: Sequence[str], log: IO[bytes]) -> None:
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        timeout=START_SECONDS,
        check=False,
    )
    if done.returncode:
        raise Skipped(f"{command[0]} failed: {_last_line(log)}")


def _answers(port: int) -> bool:
    connection = http.client.HTTPConnection(HOST, port, timeout=5)
    with closing(connection), suppress(OSError, http.client.HTTPException):
        connection.request("GET", "/")
        connection.getresponse().read()
        return True
    return False


def _last_line(log: IO[bytes]) -> str:
    log.seek(0)
    return log.read().decode(errors="replace").strip().rpartition("\n")[2]
