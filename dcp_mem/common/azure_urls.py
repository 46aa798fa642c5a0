"""URLs of Azure's blobs as portals, Spark and Azure ML write them, as the abfs URLs of fsspec."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from dcp_mem.errors import ConfigError

_WASB = ("wasb", "wasbs")
_KINDS = ("blob", "dfs")
_DATASTORE = re.compile(
    r"(?:/resourcegroups/(?P<group>[^/]+)/.*workspaces/(?P<workspace>[^/]+)/|://)"
    r"datastores/(?P<name>[^/]+)(?:/paths(?P<path>/.*)?)?$",
    re.IGNORECASE,
)
_ADVICE = (
    "give abfs://container/path, with storage_options={'account_name': …}, or the path at which "
    "the job has it mounted"
)


def abfs_url(url: str) -> str:
    """Return the abfs URL for another kind of URL of a path in an Azure container."""
    scheme, host = url.partition("://")[0], urlsplit(url).hostname or ""
    if scheme == "azureml":
        raise ConfigError(f"path={url!r}: {_datastore_advice(url)}: {_ADVICE}")
    account, _, domain = host.partition(".")
    if domain not in {f"{kind}.core.windows.net" for kind in _KINDS}:
        if scheme in _WASB:
            raise ConfigError(f"path={url!r} names no account and container of Azure's: {_ADVICE}")
        return url
    if scheme in _WASB:
        return _abfs(url, account, urlsplit(url).username or "", urlsplit(url).path)
    if scheme in ("http", "https"):
        container, _, path = urlsplit(url).path.lstrip("/").partition("/")
        return _abfs(url, account, container, path)
    return url


def _datastore_advice(url: str) -> str:
    """Say where a datastore's account and container are found, and what URL they make."""
    found = _DATASTORE.search(url)
    if found is None:
        return "this names no datastore, and so no account and container"
    name, path = found["name"], (found["path"] or "").strip("/")
    workspace = f" -g {found['group']} -w {found['workspace']}" if found["group"] else ""
    return (
        "which account and container a datastore stands for is known to its workspace alone; "
        f"`az ml datastore show --name {name}{workspace}` shows them as account_name and "
        "container_name (or filesystem), and "
        f"'abfs://CONTAINER@ACCOUNT.dfs.core.windows.net/{path}' means the same as this"
    )


def _abfs(url: str, account: str, container: str, path: str) -> str:
    if not container or urlsplit(url).query or urlsplit(url).fragment:
        raise ConfigError(f"path={url!r}: {_ADVICE}")
    return f"abfs://{container}@{account}.dfs.core.windows.net/{path.strip('/')}".rstrip("/")
