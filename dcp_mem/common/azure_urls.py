"""URLs of Azure's blobs as portals, Spark and Azure ML write them, as the abfs URLs of fsspec."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import cache
from typing import Any
from urllib.parse import quote, urlsplit

from dcp_mem.errors import ConfigError

_WASB = ("wasb", "wasbs")
_KINDS = ("blob", "dfs")
_DATASTORE = (
    r"(?i)azureml://(?:subscriptions/(?P<subscription>[^/]+)/resourcegroups/(?P<group>[^/]+)/"
    r"(?:.+/)?workspaces/(?P<workspace>[^/]+)/)?"
    r"datastores/(?P<name>[^/]+)(?:/paths(?P<path>/.*)?)?$"
)
# Parts of a URL that may be left out in a job of Azure ML, which has them in these variables.
_WORKSPACE = {
    "subscription": "AZUREML_ARM_SUBSCRIPTION",
    "group": "AZUREML_ARM_RESOURCEGROUP",
    "workspace": "AZUREML_ARM_WORKSPACE_NAME",
}
_MANAGER, _API_VERSION = "https://management.azure.com", "2024-10-01"
_PUBLIC_CLOUD = "core.windows.net"
_ADVICE = (
    "give abfs://container/path, with storage_options={'account_name': …}, or the path at which "
    "the job has it mounted"
)


def abfs_url(url: str) -> str:
    """Return the abfs URL for another kind of URL of a path in an Azure container."""
    scheme, host = url.partition("://")[0], urlsplit(url).hostname or ""
    if scheme == "azureml":
        return _in_datastore(url)
    account, _, domain = host.partition(".")
    if domain not in {f"{kind}.{_PUBLIC_CLOUD}" for kind in _KINDS}:
        if scheme in _WASB:
            raise ConfigError(f"path={url!r} names no account and container of Azure's: {_ADVICE}")
        return url
    if scheme in _WASB:
        return _abfs(url, account, urlsplit(url).username or "", urlsplit(url).path)
    if scheme in ("http", "https"):
        container, _, path = urlsplit(url).path.lstrip("/").partition("/")
        return _abfs(url, account, container, path)
    return url


def _in_datastore(url: str) -> str:
    """Return the abfs URL of a path in a datastore, whose container its workspace is asked for."""
    found = re.match(_DATASTORE, url)
    if found is None:
        raise ConfigError(f"path={url!r} names no datastore, and so no container: {_ADVICE}")
    workspace = [found[part] or os.environ.get(name, "") for part, name in _WORKSPACE.items()]
    path = (found["path"] or "").strip("/")
    try:
        if not all(workspace):
            raise LookupError(
                f"it names no workspace, and {', '.join(_WORKSPACE.values())} aren't set"
            )
        account, container = _container_of(*workspace, found["name"])
    except (ImportError, LookupError) as error:
        of = f" -g {workspace[1]} -w {workspace[2]}" if workspace[2] else ""
        raise ConfigError(
            f"path={url!r}: which container this means can't be found out: {error}. "
            f"`az ml datastore show --name {found['name']}{of}` shows it as account_name and "
            "container_name (or filesystem), and "
            f"'abfs://CONTAINER@ACCOUNT.dfs.{_PUBLIC_CLOUD}/{path}' means the same as this: "
            f"{_ADVICE}"
        ) from None
    return _abfs(url, account, container, path)


@cache
def _container_of(subscription: str, group: str, workspace: str, name: str) -> tuple[str, str]:
    """Return a datastore's account and container.

    Raises ImportError without adlfs, and LookupError.
    """
    try:
        from azure.core.exceptions import AzureError
    except ImportError:
        raise ImportError("pip install 'dcp_mem[azure]' lets dcp_mem ask its workspace") from None
    subscription, group, workspace, name = map(quote, (subscription, group, workspace, name))
    try:
        said = _asked(
            f"subscriptions/{subscription}/resourceGroups/{group}/providers/"
            f"Microsoft.MachineLearningServices/workspaces/{workspace}/datastores/{name}"
        )
    except AzureError as error:
        said_why = str(error).partition("\n")[0].rstrip(".")
        raise LookupError(f"its workspace says: {said_why}") from None
    account = said.get("accountName")
    container = said.get("containerName") or said.get("filesystem")
    if not account or not container:
        raise LookupError(f"it is of the kind {said.get('datastoreType')}, which has no blobs")
    if (said.get("endpoint") or _PUBLIC_CLOUD) != _PUBLIC_CLOUD:
        raise LookupError(
            f"the account {account} is at {said['endpoint']}, another cloud: give account_host"
        )
    return account, container


def _asked(resource: str) -> Mapping[str, Any]:
    """Return the properties of a resource, as Azure's Resource Manager tells them."""
    from azure.core import PipelineClient
    from azure.core.pipeline.policies import BearerTokenCredentialPolicy, RetryPolicy
    from azure.core.rest import HttpRequest
    from azure.identity import DefaultAzureCredential

    manager = os.environ.get("DCP_MEM_AZURE_RESOURCE_MANAGER", _MANAGER).rstrip("/")
    with DefaultAzureCredential() as credential:
        policies = [
            RetryPolicy(retry_total=5),
            BearerTokenCredentialPolicy(credential, f"{manager}/.default"),
        ]
        with PipelineClient[Any, Any](
            manager, policies=policies, connection_timeout=10, read_timeout=60
        ) as client:
            answer = client.send_request(
                HttpRequest("GET", f"{manager}/{resource}?api-version={_API_VERSION}")
            )
            answer.raise_for_status()
            properties: Mapping[str, Any] = answer.json()["properties"]
            return properties


def _abfs(url: str, account: str, container: str, path: str) -> str:
    if not container or urlsplit(url).query or urlsplit(url).fragment:
        raise ConfigError(f"path={url!r}: {_ADVICE}")
    return f"abfs://{container}@{account}.dfs.core.windows.net/{path.strip('/')}".rstrip("/")
