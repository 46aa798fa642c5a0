"""Ways to storage on which faults wait, and checkpoints in memory that are still to go there.

put_into(memory_root, saved)                        # a copy of a node's memory, as its trainer left
it way.proxy.fail(way.steps["commit"], LoseAnswer()) with
way.job(memory_root).writer(agent="thread") as writer:
    writer.wait(NAME)
assert_whole(way, memory_root, 1)
"""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed.checkpoint as dcp

import dcp_mem.flushing.agent
import dcp_mem.flushing.flusher
import dcp_mem.reader
import dcp_mem.runtime.session
import dcp_mem.storage
from dcp_mem import (
    CheckpointStatus,
    FlushFailed,
    MemoryStorageReader,
    MemoryStorageWriter,
    NoRecoverableCheckpoint,
)
from dcp_mem.common import faults
from dcp_mem.flushing.registration import Registration
from dcp_mem.memory.job import JobMemory
from dcp_mem.storage.retry import RETRIES_OF_A_FLUSH, RetryingStorage, RetryPolicy
from dcp_mem.storage.routes import open_storage
from tests.support.checkpoints.jobs import Job, make_state, save
from tests.support.checkpoints.roundtrip import State, assert_same, blank_of
from tests.support.processes.forks import forked, raised_by
from tests.support.storage.http_wire import Head, Request
from tests.support.storage.proxy import (
    Exchange,
    Proxy,
    Refuse,
    azure_error,
    running_proxy,
    s3_error,
)
from tests.support.storage.servers import (
    LEAST_S3_PART,
    BlobServer,
    GoogleServer,
    S3Server,
    StorageRoot,
)

Match = Callable[[Request], bool]

NAME = "step-1"
PART = max(1 << 20, LEAST_S3_PART)
"""What parts are made to have: they are of whole MiB."""
LARGE = 2 * PART + 1000
"""Bytes of a state whose segment has three parts."""
PATIENT = RETRIES_OF_A_FLUSH
"""How often, and how long, a flush repeats requests for users."""
QUICK = RetryPolicy(
    tries=4, first_pause_seconds=0.01, longest_pause_seconds=0.05, longest_asked_seconds=0.2
)
_SEGMENT = ".distcp"


@dataclass(frozen=True, slots=True)
class Way:
    """The way to a fresh root, through a proxy.

    root: as it is reached that way; impatient: by clients that wait for an answer no longer than a
    second; direct: past the proxy. steps: what asks for what, of the requests of a flush and a
    load. error: the storage's own answer with a status and a code.
    """

    proxy: Proxy
    root: StorageRoot
    impatient: StorageRoot
    direct: StorageRoot
    steps: Mapping[str, Match] = field(repr=False)
    error: Callable[..., Refuse] = field(repr=False)

    @property
    def is_s3(self) -> bool:
        """Whether it has S3's requests and errors, as Google's XML API has."""
        return self.root.url.startswith(("gs", "s3"))

    def job(self, memory: Path, root: StorageRoot | None = None) -> Job:
        """The job that goes this way, or to another of the roots, with its memory there."""
        return (root or self.root).job(memory)

    def asked(self, step: str) -> list[Exchange]:
        """The requests of one step so far."""
        return [one for one in self.proxy.requests if self.steps[step](as_request(one))]

    def stored_parts(self) -> set[str]:
        """Parts that storage has taken, by what was asked for."""
        return {one.target for one in self.asked("part") if one.status in (200, 201)}

    def storage(self) -> RetryingStorage:
        """The job's root, past the proxy."""
        return open_storage(f"{self.direct.url}/run", self.direct.storage_options)


def as_request(exchange: Exchange) -> Request:
    """What came in, as rules of the proxy see it, without its headers."""
    return Request.of(Head(b"", (exchange.method, exchange.target, "HTTP/1.1"), {}))


@contextlib.contextmanager
def s3_way(server: S3Server) -> Iterator[Way]:
    """A way to a bucket of its own."""
    with server.fresh_root() as direct, running_proxy(server.endpoint) as proxy:
        root = replace(direct, storage_options=server.options_at(proxy.endpoint))
        timeouts = {"config_kwargs": {"read_timeout": 1, "connect_timeout": 1}}
        yield Way(proxy, root, _with_options(root, timeouts), direct, S3_STEPS, s3_error)


@contextlib.contextmanager
def google_way(server: GoogleServer) -> Iterator[Way]:
    """A way to a bucket of its own, in Google's dialect."""
    with server.fresh_root() as direct, running_proxy(server.endpoint) as proxy:
        root = replace(direct, storage_options=server.options_at(proxy.endpoint))
        timeouts = {"requests_timeout": 1}
        yield Way(proxy, root, _with_options(root, timeouts), direct, S3_STEPS, s3_error)


@contextlib.contextmanager
def azure_way(server: BlobServer) -> Iterator[Way]:
    """A way to a container of its own."""
    with server.fresh_root() as direct, running_proxy(server.endpoint) as proxy:
        root = replace(direct, storage_options=server.options_at(proxy.endpoint))
        timeouts = {"read_timeout": 1, "connection_timeout": 1}
        yield Way(proxy, root, _with_options(root, timeouts), direct, AZURE_STEPS, azure_error)


def _with_options(root: StorageRoot, options: Mapping[str, Any]) -> StorageRoot:
    return replace(root, storage_options={**root.storage_options, **options})


def _put(part: str) -> Match:
    """A put of one request: parts and blocks have a query."""
    return lambda request: request.method == "PUT" and part in request.path


def _get(part: str) -> Match:
    return lambda request: (
        request.method == "GET" and part in request.path and "comp" not in request.query
    )


_BOTH = {
    "node manifest": _put("/.dcp_mem/node-"),
    "catalog": _put("/.dcp_mem/catalog-"),
    "manifest": _put("/.dcp_mem/manifest-"),
    "commit": _put("/.metadata"),
    "look": _get("/.metadata"),
    "read range": _get(_SEGMENT),
    "read node manifest": _get("/.dcp_mem/node-"),
    "read catalog": _get("/.dcp_mem/catalog-"),
    "read manifest": _get("/.dcp_mem/manifest-"),
}
S3_STEPS: Mapping[str, Match] = {
    **_BOTH,
    "begin": lambda request: request.method == "POST" and "uploads" in request.query,
    "part": lambda request: request.method == "PUT" and "partNumber" in request.query,
    "completion": lambda request: request.method == "POST" and "uploadId" in request.query,
    "segment": lambda request: (
        request.method == "PUT" and request.path.endswith(_SEGMENT) and not request.query
    ),
    "listing": lambda request: request.method == "GET" and "list-type" in request.query,
}
AZURE_STEPS: Mapping[str, Match] = {
    **_BOTH,
    "begin": lambda request: request.method == "GET" and request.query.get("comp") == "blocklist",
    "part": lambda request: request.query.get("comp") == "block",
    "completion": lambda request: (
        request.method == "PUT" and request.query.get("comp") == "blocklist"
    ),
    "segment": lambda request: request.query.get("comp") == "block",
    "listing": lambda request: request.method == "GET" and request.query.get("comp") == "list",
}


# -- what is in memory -----------------------------------------------------------------------------


def state_of(number: int, nbytes: int = 0) -> State:
    """The state of that number, with so many bytes in one tensor besides."""
    return {**make_state(number), "large": torch.arange(nbytes // 8) * 31 + number}


def save_unflushed(memory: str, number: int, nbytes: int, name: str = NAME) -> None:
    """Save a state that is meant for storage, and end before anything of it goes there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dcp_mem.runtime.session.Session, "wake_agent", lambda *_, **__: None)
        writer = Job("/nowhere", memory).writer()
        dcp.save(state_of(number, nbytes), checkpoint_id=name, storage_writer=writer)
        writer.close(flush=False)


def save_two_unflushed(memory: str) -> None:
    """Save step-1 and step-2, and end before anything of them goes to storage."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dcp_mem.runtime.session.Session, "wake_agent", lambda *_, **__: None)
        writer = Job("/nowhere", memory).writer(keep_memory=2)
        for number in (1, 2):
            save(writer, number)
        writer.close(flush=False)


def saved_in(directory: Path, number: int, nbytes: int = 0) -> Path:
    """Make the directory a node's memory that has the state of that number."""
    directory.chmod(0o700)
    forked(save_unflushed, str(directory), number, nbytes)
    return directory


def flush_quickly(
    patch: pytest.MonkeyPatch, longest_pause: float = 0.05, retries: RetryPolicy = QUICK
) -> None:
    """Have faults get over soon: short pauses, short parts."""
    patch.setattr(dcp_mem.flushing.flusher, "RETRIES_OF_A_FLUSH", retries)
    patch.setattr(dcp_mem.flushing.flusher, "_LONGEST_PAUSE", longest_pause)
    patch.setattr(dcp_mem.storage, "LEAST_PART", PART)


def put_into(memory_root: Path, saved: Path) -> None:
    """Make a memory root what another one is."""
    shutil.copytree(saved, memory_root, dirs_exist_ok=True)


@contextlib.contextmanager
def writing(
    job: Job, *, overwrite: bool = True, agent: Literal["process", "thread"] = "thread"
) -> Iterator[MemoryStorageWriter]:
    """A writer that mostly flushes in a thread of this process, and isn't waited for at the end."""
    writer = job.writer(agent=agent, overwrite=overwrite)
    try:
        yield writer
    finally:
        writer.close(flush=False)


def serve(job: Job, armed: str = "", overwrite: bool = True) -> str:
    """Be the job's agent until nothing is left to do; return what became of the checkpoint."""
    with pytest.MonkeyPatch.context() as patch:
        flush_quickly(patch)
        patch.setattr(dcp_mem.flushing.agent, "_LINGER", 0.1)
        patch.setattr(dcp_mem.flushing.agent, "_LOOK", 0.1)
        os.makedirs(f"{job.memory}/.agent", mode=0o700, exist_ok=True)
        faults.arm(armed)
        dcp_mem.flushing.agent.run(
            job.memory,
            Registration(
                job=job.name or "",
                url=job.url or "",
                overwrite=overwrite,
                storage_options=job.storage_options,
            ),
        )
    (held,) = JobMemory(job.memory, job.name or "").checkpoints()
    return f"{held.flush.outcome} {held.flush.error}".strip()


def start(writer: MemoryStorageWriter) -> None:
    """Have it flush, and go on."""
    with contextlib.suppress(TimeoutError, FlushFailed):
        writer.wait(timeout=0)


def status_of(writer: MemoryStorageWriter) -> CheckpointStatus:
    """What has become of its only checkpoint so far."""
    (status,) = writer.status()
    return status


# -- what came of it -------------------------------------------------------------------------------


def load_state(
    reader: dcp.StorageReader, number: int, nbytes: int = 0, name: str | None = NAME
) -> None:
    """Load, and compare every bit with the state of that number."""
    expected = state_of(number, nbytes)
    found = blank_of(expected)
    dcp.load(found, checkpoint_id=name, storage_reader=reader)
    assert_same(expected, found)


def without_memory(job: Job) -> MemoryStorageReader:
    """A reader of the job on a node that has nothing of it."""
    return replace(job, memory=f"{job.memory}/none").reader()


def assert_absent(way: Way, memory_root: Path) -> None:
    """No reader finds anything."""
    reader = without_memory(way.job(memory_root, way.direct))
    assert isinstance(
        raised_by(lambda: dcp.load(state_of(0), storage_reader=reader)), NoRecoverableCheckpoint
    )


def assert_whole(way: Way, memory_root: Path, number: int, nbytes: int = 0) -> None:
    """Assert that storage has this number's state, the files of one attempt, and no more."""
    load_state(without_memory(way.job(memory_root, way.direct)), number, nbytes)
    storage = way.storage()
    files = [entry.name for prefix in (NAME, f"{NAME}/.dcp_mem") for entry in storage.ls(prefix)]
    kinds = sorted(name.partition("-")[0] for name in files)
    expected = [".dcp_mem", ".metadata", "__0_0", "catalog", "manifest", "node", "ticket"]
    assert kinds == expected, files
    assert storage.unfinished("") == []
