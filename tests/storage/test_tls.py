"""Storage whose certificate a private authority has signed, from the trainer and from the agent."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dcp_mem import FlushFailed, NoRecoverableCheckpoint, State, StorageRefused
from tests.support.checkpoints.jobs import agents, load_anew, save
from tests.support.processes.forks import raised_by
from tests.support.storage import certificates
from tests.support.storage.servers import (
    BlobServer,
    S3Server,
    StorageRoot,
    running_azurite,
    running_moto,
    started,
)

pytestmark = [pytest.mark.timeout(120), pytest.mark.servers]

_VARIABLES = (
    "AWS_CA_BUNDLE",
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
    "SSL_CERT_FILE",
)


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> certificates.Certificates:
    return certificates.made_in(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module", params=["s3", "azure"])
def server(
    request: pytest.FixtureRequest, tls: certificates.Certificates
) -> Iterator[S3Server | BlobServer]:
    running: Any = running_moto if request.param == "s3" else running_azurite
    with started(lambda: running(tls)) as it:
        yield it


@pytest.fixture
def root(server: S3Server | BlobServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[StorageRoot]:
    for variable in _VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    with server.fresh_root() as it:
        yield it


def _trusting(root: StorageRoot, authority: str) -> dict[str, Any]:
    options = dict(root.storage_options)
    if root.url.startswith("s3://"):
        return {**options, "client_kwargs": {**options["client_kwargs"], "verify": authority}}
    return {**options, "connection_verify": authority}


def test_authority_in_storage_options_is_trusted_by_agent_and_trainer(
    root: StorageRoot, memory_root: Path, tls: certificates.Certificates
) -> None:
    job = replace(root.job(memory_root), storage_options=_trusting(root, tls.authority))
    with job.writer() as writer:
        save(writer, 1)
        writer.wait(timeout=60)
        assert writer.status()[0].state is State.DURABLE
    assert load_anew(replace(job, memory=f"{memory_root}/other")).number == 1


@pytest.mark.parametrize("variable", _VARIABLES)
def test_authority_in_the_environment_is_trusted(
    root: StorageRoot,
    tls: certificates.Certificates,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
) -> None:
    if variable == "AWS_CA_BUNDLE" and not root.url.startswith("s3://"):
        pytest.skip("a variable of AWS's")
    monkeypatch.setenv(variable, tls.authority)
    storage = root.storage()
    storage.put("file", b"data")
    assert storage.get("file") == b"data"


def test_agent_that_runs_takes_the_authority_that_a_trainer_has_come_to_trust(
    root: StorageRoot,
    memory_root: Path,
    tls: certificates.Certificates,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = root.job(memory_root)
    with contextlib.closing(job.writer()) as writer:
        save(writer, 1)
        with pytest.raises(FlushFailed, match=r"certificate isn't trusted here.*SSL_CERT_FILE"):
            writer.wait(timeout=60)
        (agent,) = agents(memory_root)
        monkeypatch.setenv("SSL_CERT_FILE", tls.authority)
        writer.wait(timeout=60)
        assert agents(memory_root) == [agent]
    assert load_anew(replace(job, memory=f"{memory_root}/other")).number == 1


def test_unknown_authority_is_refused_by_the_trainer_with_what_to_do(
    root: StorageRoot, memory_root: Path
) -> None:
    refused = raised_by(lambda: load_anew(root.job(memory_root)))
    assert isinstance(refused, NoRecoverableCheckpoint)
    assert "refused: " in str(refused)
    assert "The server's certificate isn't trusted here" in str(refused)


def test_missing_file_of_an_authority_is_named(root: StorageRoot, tmp_path: Path) -> None:
    options = _trusting(root, str(tmp_path / "missing.pem"))
    with pytest.raises(StorageRefused, match=r"trusted certificates, .*missing\.pem, is missing"):
        replace(root, storage_options=options).storage().ls("")
