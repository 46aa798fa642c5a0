"""URLs of Azure ML's datastores, as a node of Azure ML reads them.

azure-identity asks a managed identity's endpoint, as it is there, and dcp_mem the Resource Manager:
a server with TLS plays both.
"""

import json
import ssl
import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from dcp_mem import ConfigError, MemoryStorageWriter, State
from tests.support.checkpoints.jobs import Job, load_anew, save
from tests.support.storage import certificates
from tests.support.storage.servers import BlobServer

pytestmark = pytest.mark.timeout(120)

_PROVIDER = "providers/Microsoft.MachineLearningServices"


@dataclass
class _Azure:
    """A workspace's datastores, and what was asked of it."""

    subscription: str
    datastores: dict[str, dict[str, str]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    busy: int = 0  # so many requests are told to come again
    port: int = 0

    @property
    def workspace(self) -> str:
        return f"azureml://subscriptions/{self.subscription}/resourcegroups/g/workspaces/w"

    def answer(self, handler: BaseHTTPRequestHandler) -> tuple[int, dict[str, Any]]:
        url = urlsplit(handler.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        if url.path == "/msi":
            is_known = handler.headers["secret"] == "s3cret"
            assert query["resource"] == f"https://127.0.0.1:{self.port}"
            token = {"access_token": "t0ken", "expires_on": "4102444800", "token_type": "Bearer"}
            return (200, token) if is_known else (403, {})
        self.asked.append(unquote(url.path))
        if handler.headers["Authorization"] != "Bearer t0ken":
            return 401, {}
        if self.busy:
            self.busy -= 1
            return 429, {}
        where = f"/subscriptions/{self.subscription}/resourceGroups/g/{_PROVIDER}/workspaces/w"
        name = unquote(url.path).removeprefix(f"{where}/datastores/")
        found = self.datastores.get(name)
        return (200, {"properties": found}) if found and query["api-version"] else (404, {})


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> certificates.Certificates:
    return certificates.made_in(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def azure(tls: certificates.Certificates, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Azure]:
    pytest.importorskip("adlfs")
    azure = _Azure(uuid.uuid4().hex)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = azure.answer(self)
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.send_header("Retry-After", "0")
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tls.server, tls.key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    azure.port = server.server_port
    for name in ("AZURE_CLIENT_ID", "AZURE_TENANT_ID", "AZURE_CLIENT_SECRET", "IDENTITY_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", tls.authority)
    monkeypatch.setenv("MSI_ENDPOINT", f"https://127.0.0.1:{azure.port}/msi")
    monkeypatch.setenv("MSI_SECRET", "s3cret")
    monkeypatch.setenv("DCP_MEM_AZURE_RESOURCE_MANAGER", f"https://127.0.0.1:{azure.port}/")
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield azure
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _in_a_job(azure: _Azure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZUREML_ARM_SUBSCRIPTION", azure.subscription)
    monkeypatch.setenv("AZUREML_ARM_RESOURCEGROUP", "g")
    monkeypatch.setenv("AZUREML_ARM_WORKSPACE_NAME", "w")


@pytest.mark.servers
def test_what_is_saved_at_a_datastores_url_lies_in_its_container_and_comes_back(
    azure: _Azure,
    azurite: BlobServer,
    memory_root: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _in_a_job(azure, monkeypatch)
    azure.busy = 2
    with azurite.fresh_root() as root:
        container = root.url.removeprefix("abfs://")
        azure.datastores["mine"] = {
            "datastoreType": "AzureBlob",
            "accountName": "devstoreaccount1",
            "containerName": container,
            "endpoint": "core.windows.net",
        }
        short = "azureml://datastores/mine/paths/runs/42"
        with Job(short, str(memory_root), root.storage_options).writer() as writer:
            save(writer, 1)
            writer.wait(timeout=60)
            assert [one.state for one in writer.status()] == [State.DURABLE]
        assert any(name.startswith("runs/42/") for name in root.names())
        url = f"{azure.workspace}/datastores/mine/paths/runs/42/"
        other = Job(url, f"{memory_root}/other", root.storage_options)
        assert load_anew(other).number == 1
    assert len(azure.asked) == 3  # twice it was busy; the answer holds for the process


def test_a_data_lake_is_its_file_system(azure: _Azure, memory_root: Path) -> None:
    azure.datastores["lake"] = {
        "datastoreType": "AzureDataLakeGen2",
        "accountName": "mine",
        "filesystem": "ckpts",
    }
    url = f"{azure.workspace}/datastores/lake/paths/"
    with MemoryStorageWriter(url, memory_root=str(memory_root), persist=False) as writer:
        assert " abfs://ckpts@mine.dfs.core.windows.net, job" in repr(writer)


@pytest.mark.parametrize(
    ("datastore", "reason"),
    [
        (None, "its workspace says: Operation returned an invalid status 'Not Found'"),
        ({"datastoreType": "AzureFile", "accountName": "a", "fileShareName": "f"}, "AzureFile"),
        (
            {
                "datastoreType": "AzureBlob",
                "accountName": "a",
                "containerName": "c",
                "endpoint": "core.chinacloudapi.cn",
            },
            "a is at core.chinacloudapi.cn, another cloud: give account_host",
        ),
    ],
)
def test_what_is_no_container_is_refused_with_how_to_find_it(
    azure: _Azure, datastore: dict[str, str] | None, reason: str
) -> None:
    if datastore is not None:
        azure.datastores["mine"] = datastore
    with pytest.raises(ConfigError, match="show --name mine -g g -w w`") as caught:
        MemoryStorageWriter(f"{azure.workspace}/datastores/mine/paths/runs/42")
    assert reason in str(caught.value)
    assert "'abfs://CONTAINER@ACCOUNT.dfs.core.windows.net/runs/42' means" in str(caught.value)


def test_without_an_identity_it_is_refused_with_how_to_find_it(
    azure: _Azure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MSI_SECRET", "another")
    with pytest.raises(ConfigError, match="show --name mine -g g -w w`") as caught:
        MemoryStorageWriter(f"{azure.workspace}/datastores/mine/paths/runs/42")
    assert "from the included credentials. `az ml" in str(caught.value)
    assert "s3cret" not in str(caught.value)
    assert not azure.asked
