"""A job that is to be flushed: where to, with which credentials and limits."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from dcp_mem.common.files import umask
from dcp_mem.config import ExportOrder, Settings
from dcp_mem.policy.retention import Retention

_CREDENTIAL_PREFIXES = (
    "AWS_",
    "AZURE_",
    "DCP_MEM_AZURE_",
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
"""Of variables by which storage SDKs find credentials, proxies, and whom to trust; and of our own
for one kind of storage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """A job whose checkpoints are to be flushed.

    Options and environment may hold secrets: they stay in memory and out of `repr`.

    Attributes:
        job: Name of the job's directory under the memory root.
        url: Root URL on storage.
        overwrite: Whether a checkpoint may replace another one of its name.
        storage_options: For the storage SDKs.
        environment: The trainer's variables for storage SDKs; None where the scheduler runs in the
            trainer itself.
        now: Whether a caller waits: failed flushes are tried again at once.
        upload_limit: Bytes per second of this node; None: no limit.
        nodes: Those on which the job's ranks run; all others are lost. None: unknown.
        keep_storage: Which checkpoints stay on storage; None: all.
        persists_all: Whether none is left out because a newer one is durable.
        on_nonfinite: As in `Settings`.
        reuse_stored: As in `Settings`.
        run: Token of the run that registers; "": the registration holds for all runs' checkpoints.
        export: As in `Settings`. A registration without a run leaves it as it was.
        shows_history: As in `Settings`.
        umask: For files and directories on storage.
    """

    job: str
    url: str
    overwrite: bool
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    environment: Mapping[str, str] | None = field(default=None, repr=False)
    now: bool = False
    upload_limit: int | None = None
    nodes: frozenset[str] | None = None
    keep_storage: Retention | None = None
    persists_all: bool = False
    on_nonfinite: str = "ignore"
    reuse_stored: bool = True
    run: str = ""
    export: ExportOrder | None = None
    shows_history: bool = False
    umask: int = 0o077

    def reached_by(self, other: Registration) -> Registration:
        """Return this registration with another one's way to storage: its URL and credentials.

        Args:
            other: Of the same job, by somebody who saves nothing, such as `dcp-mem flush`.
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
        """Return whether both reach the same storage in the same way.

        Args:
            other: Of the same job.
        """
        return self._destination() == other._destination()

    def _destination(self) -> Registration:
        return replace(
            self,
            now=False,
            overwrite=False,
            upload_limit=None,
            nodes=None,
            keep_storage=None,
            persists_all=False,
            on_nonfinite="ignore",
            reuse_stored=True,
            run="",
            export=None,
            shows_history=False,
            umask=0,
        )


def registration_of(
    settings: Settings,
    *,
    now: bool = False,
    nodes: frozenset[str] | None = None,
    run: str = "",
) -> Registration:
    """Return what the agent must know of this job.

    Args:
        settings: The job's, with a URL.
        now: Whether a caller waits for the flush.
        nodes: Ids of the nodes on which the job's ranks run, if that is known.
        run: Token of the run that registers; "" for one that saves nothing itself.
    """
    assert settings.url is not None
    return Registration(
        job=settings.job,
        url=settings.url,
        overwrite=settings.overwrite,
        storage_options=settings.storage_options,
        environment=credential_environment(),
        now=now,
        upload_limit=settings.upload_limit,
        nodes=nodes,
        keep_storage=settings.keep_storage,
        persists_all=settings.persists_all,
        on_nonfinite=settings.on_nonfinite,
        reuse_stored=settings.reuse_stored,
        run=run,
        export=settings.export,
        shows_history=settings.shows_history,
        umask=umask() if settings.storage_mode is None else _umask_for(settings.storage_mode),
    )


def _umask_for(mode: int) -> int:
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
    """Run with the job's credential variables and its umask.

    One agent serves jobs that were started with different ones. Memory's files have modes that are
    stricter than any umask.

    Args:
        registration: Brings them; those of this process where it has no variables.
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
