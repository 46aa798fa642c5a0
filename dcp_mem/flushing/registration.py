"""A job that is to be flushed: where to, with which credentials and limits."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field, fields, replace
from typing import Any

from dcp_mem.common.files import umask
from dcp_mem.common.value_class import value_class
from dcp_mem.config import ExportOrder, Settings
from dcp_mem.policy.retention import Retention

_CREDENTIAL_PREFIXES = (
    "AWS_",
    "AZURE_",
    "GOOGLE_",
    "GCS_",
    "FSSPEC_",
    "IDENTITY_",
    "MSI_",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "ALL_PROXY",
    "NO_PROXY",
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
    "SSL_CERT_",
)
"""Of variables by which storage SDKs find credentials, proxies, and whom to trust."""


@value_class(kw_only=True)
class Registration:
    """A job whose checkpoints are to be flushed; what `Settings` has as well means the same.
    Options and environment may hold secrets: they stay in memory and out of `repr`.
    """

    job: str  # name of the job's directory under the memory root
    url: str
    overwrite: bool  # whether a checkpoint may replace another one of its name
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    # the trainer's variables for storage SDKs; None where the loop runs in the trainer itself
    environment: Mapping[str, str] | None = field(default=None, repr=False)
    now: bool = False  # whether a caller waits: failed flushes are tried again at once
    upload_limit: int | None = None  # bytes per second of this node; None: no limit
    # Those on which the job's ranks run; all others are lost. None: unknown.
    nodes: frozenset[str] | None = None
    keep_storage: Retention | None = None  # which checkpoints stay on storage; None: all
    persists_all: bool = False  # whether none is left out because a newer one is durable
    on_nonfinite: str = "ignore"
    reuse_stored: bool = True
    # token of the run that registers; "": the registration holds for all runs' checkpoints
    run: str = ""
    # As in `Settings`. A registration without a run leaves it as it was.
    export: ExportOrder | None = None
    shows_history: bool = False
    # of the trainer's job in Azure ML, whose pages show what lies in it; "" elsewhere
    outputs: str = ""
    umask: int = 0o077

    def reached_by(self, other: Registration) -> Registration:
        """Return this registration with the URL and credentials of somebody who saves nothing, such
        as `dcp-mem flush`.
        """
        return replace(
            self,
            url=other.url,
            storage_options=other.storage_options,
            environment=other.environment,
            now=other.now,
            nodes=other.nodes,
        )

    def has_same_destination(self, other: Registration) -> bool:
        """Return whether both reach the same storage in the same way, and as fast."""
        names = ("job", "url", "storage_options", "environment", "upload_limit", "reuse_stored")
        return all(getattr(self, name) == getattr(other, name) for name in names)


def registration_of(
    settings: Settings,
    *,
    now: bool = False,
    nodes: frozenset[str] | None = None,
    run: str = "",
) -> Registration:
    """Return what the agent must know of this job, and of the nodes on which its ranks run. `now`:
    a caller waits for the flush. `run`: token of the run that registers; "" for one that saves
    nothing itself.
    """
    assert settings.url is not None
    of_settings = {
        one.name: getattr(settings, one.name)
        for one in fields(Registration)
        if hasattr(settings, one.name)
    }
    in_azure_ml = os.environ.get("AZUREML_CR_EXECUTION_WORKING_DIR_PATH", "")
    return Registration(
        **of_settings,
        outputs=os.path.join(in_azure_ml, "outputs") if in_azure_ml else "",
        environment=credential_environment(),
        now=now,
        nodes=nodes,
        run=run,
        umask=umask() if settings.storage_mode is None else umask_for(settings.storage_mode),
    )


def umask_for(mode: int) -> int:
    """Return the umask that gives files this mode, and directories x where these have r."""
    return 0o777 & ~(mode | (mode & 0o444) >> 2)


def credential_environment() -> dict[str, str]:
    """Return the variables of this process by which storage SDKs find their credentials."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.upper().startswith(_CREDENTIAL_PREFIXES)
    }


@contextmanager
def environment_of(registration: Registration) -> Iterator[None]:
    """Run with the job's credential variables and its umask, unless it is this process's own. One
    agent serves jobs that were started with different ones. Memory's files have modes that are
    stricter than any umask.
    """
    before, variables = credential_environment(), registration.environment
    if variables is None:  # the trainer's own process
        yield
        return
    for name in before.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)
    mask = os.umask(registration.umask)
    try:
        yield
    finally:
        os.umask(mask)
        for name in credential_environment().keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
