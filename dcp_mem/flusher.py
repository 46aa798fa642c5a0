"""Which checkpoint is flushed next, and what is written down of how it went.

One flusher serves all jobs of a memory root. It runs in the agent, or in a thread of the trainer (`agent="thread"`).
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from dcp_mem import faults
from dcp_mem.errors import DcpMemError, StorageUnavailable
from dcp_mem.events import log
from dcp_mem.flush import Evicted, FlushJob, flush
from dcp_mem.format.manifest import FlushRecord
from dcp_mem.memory.job import Held, JobMemory
from dcp_mem.memory.locks import job_is_live
from dcp_mem.storage.routes import open_storage

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
    "NO_PROXY",
)
_LONGEST_PAUSE = 60.0
_ORPHAN_PATIENCE = 3600.0  # how long an unreachable storage is tried for a job whose trainers are gone
_ORPHAN_REFUSALS = 3


@dataclass(frozen=True, slots=True)
class Registration:
    """A job that wants its checkpoints flushed. Options and environment may hold secrets: they stay in memory and out of repr."""

    job: str
    url: str
    overwrite: bool
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)


def credential_environment() -> dict[str, str]:
    """The variables of this process by which storage SDKs find their credentials."""
    return {name: value for name, value in os.environ.items() if name.upper().startswith(_CREDENTIAL_PREFIXES)}


@dataclass(slots=True)
class _Trouble:
    """Failures of one checkpoint's flush so far."""

    attempts: int = 0
    refusals: int = 0
    first: float = 0.0
    again: float = 0.0


class Flusher:
    """Flushes the pending checkpoints of registered jobs, the newest first."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._jobs: dict[str, Registration] = {}
        self._trouble: dict[str, _Trouble] = {}

    def register(self, registration: Registration) -> None:
        """Take a job on, or its renewed credentials."""
        self._jobs[registration.job] = registration

    def flush_next(self) -> bool:
        """Flush one checkpoint; False where there is none whose turn it is."""
        for registration in list(self._jobs.values()):
            memory = self._memory(registration.job)
            held = None if memory is None else self._next(memory)
            if memory is not None and held is not None:
                self._flush(registration, memory, held)
                return True
        return False

    def seconds_until_next(self) -> float | None:
        """How long until a failed flush is due again; None where nothing is pending."""
        due = [self._due(held) for job in list(self._jobs) for held in self._pending(job)]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def is_needed(self) -> bool:
        """Whether a trainer of a registered job lives, or something is left to flush that is still worth trying."""
        return any(self._is_live(job) or any(map(self._hopeful, self._pending(job))) for job in list(self._jobs))

    def _is_live(self, job: str) -> bool:
        return job_is_live(os.path.join(self._root, job))

    def _memory(self, job: str) -> JobMemory | None:
        return JobMemory(self._root, job) if os.path.isdir(os.path.join(self._root, job)) else None

    def _pending(self, job: str) -> list[Held]:
        memory = self._memory(job)
        return [] if memory is None else [held for held in memory.held() if held.pending]

    def _next(self, memory: JobMemory) -> Held | None:
        now = time.monotonic()
        return next((held for held in memory.held() if held.pending and self._due(held) <= now), None)

    def _due(self, held: Held) -> float:
        trouble = self._trouble.get(held.manifest.save_id)
        return trouble.again if trouble is not None else 0.0

    def _hopeful(self, held: Held) -> bool:
        trouble = self._trouble.get(held.manifest.save_id)
        if trouble is None:
            return True
        return trouble.refusals < _ORPHAN_REFUSALS and time.monotonic() - trouble.first < _ORPHAN_PATIENCE

    def _flush(self, registration: Registration, memory: JobMemory, held: Held) -> None:
        started = time.monotonic()
        record = replace(held.flush, attempts=held.flush.attempts + 1)
        try:
            with _environment(registration.environment):
                storage = open_storage(registration.url, registration.storage_options)
                flush(FlushJob(held, memory.node, storage, registration.overwrite))
        except Evicted:
            log.info("%s left memory before it was flushed", held.name)
            return
        except Exception as error:  # whatever it was, training and the other checkpoints must go on
            self._failed(memory, held, record, error)
            return
        seconds = time.monotonic() - started
        memory.record_flush(held, replace(record, outcome="durable", error="", durable=time.time(), seconds=seconds))
        faults.point("flush.recorded")
        self._trouble.pop(held.manifest.save_id, None)
        log.info("%s is durable in %s (%.1f s)", held.name, registration.url, seconds)

    def _failed(self, memory: JobMemory, held: Held, record: FlushRecord, error: Exception) -> None:
        text = str(error) if isinstance(error, DcpMemError) else f"{type(error).__name__}: {error}"
        passing = isinstance(error, StorageUnavailable) or not isinstance(error, DcpMemError)
        memory.record_flush(held, replace(record, outcome="failed" if passing else "refused", error=text))
        now = time.monotonic()
        trouble = self._trouble.setdefault(held.manifest.save_id, _Trouble(first=now))
        trouble.attempts += 1
        trouble.refusals += not passing
        pause = min(_LONGEST_PAUSE, 0.5 * 2 ** min(trouble.attempts, 10)) * random.uniform(0.7, 1.3)
        trouble.again = now + pause
        log.warning("flush of %s failed, next try in %.1f s: %s", held.name, pause, text)


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Run with the job's credential variables: one agent serves jobs that were started with different ones."""
    before = credential_environment()
    if before == dict(variables):
        yield
        return
    for name in before.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in credential_environment().keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
