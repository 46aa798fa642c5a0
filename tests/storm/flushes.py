"""Flushes through a proxy that lets requests meet faults, on S3 (moto) and Azure (Azurite).

One to three checkpoints are flushed in a round, while chosen requests, or all of them from one on,
are refused, reset, delayed, lost or cut short; sometimes the flusher is killed at a fault point.
Asserted: each flush ends durable, overtaken by a newer one, or failed with a reason; no torn
checkpoint is ever committed. Once the faults are over, the next start flushes the rest.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
import torch.distributed.checkpoint as dcp

from dcp_mem import FlushFailed, MemoryStorageWriter, State
from dcp_mem.common import faults
from tests.storm import servers
from tests.storm.storm import Play, Storm, Tally
from tests.support.checkpoints.jobs import Job
from tests.support.private import private_directory
from tests.support.processes.forks import RankDeath, forked, forking, raised_by
from tests.support.storage import ways
from tests.support.storage.proxy import (
    Delay,
    Fault,
    Hang,
    LoseAnswer,
    Reset,
    ResetInBody,
    Truncate,
)
from tests.support.storage.servers import S3Server
from tests.support.storage.soundness import (
    FLUSHER_POINTS,
    assert_kept,
    claims_of,
    committed,
    note,
    noted,
)
from tests.support.storage.ways import Way

_ALWAYS = 1_000_000
_ENDED_SECONDS = 90.0
_SETTLED_SECONDS = 30.0
_PAUSE = 0.02


@dataclass(frozen=True)
class Save:
    """One checkpoint: name and number of its state, and bytes besides."""

    name: str
    number: int
    nbytes: int


@dataclass(frozen=True)
class Flush:
    """What one process saves and flushes."""

    job: Job
    saves: tuple[Save, ...]
    overwrite: bool
    keep: int | None
    armed: str
    notes: Path
    progress: Path

    def saved(self) -> tuple[Save, ...]:
        """Those that were complete in memory before the process ended."""
        count = int(self.progress.read_text()) if self.progress.exists() else 0
        return self.saves[:count]

    def writer(self) -> MemoryStorageWriter:
        return self.job.writer(
            agent="thread",
            overwrite=self.overwrite,
            keep_storage=self.keep,
            keep_memory=3,
            on_slow_storage="all",
        )


def _flush(flush: Flush) -> list[tuple[str, str, str]]:
    """Save, and flush until each checkpoint has ended in some way; return the ways."""
    with pytest.MonkeyPatch.context() as patch:
        ways.flush_quickly(patch)
        faults.arm(flush.armed)
        writer = flush.writer()
        for one in flush.saves:
            state = ways.state_of(one.number, one.nbytes)
            dcp.save(state, checkpoint_id=one.name, storage_writer=writer)
            flush.progress.write_text(str(one.number))
            ways.start(writer)
        deadline = time.monotonic() + _SETTLED_SECONDS
        while not all(map(_has_ended, writer.status())) and time.monotonic() < deadline:
            time.sleep(_PAUSE)
        note(claims_of(writer), flush.notes)
        ends = [(one.name, str(one.state.value), one.error) for one in writer.status()]
        writer.close(flush=False)
        return ends


def _has_ended(one: object) -> bool:
    state, error = one.state, one.error  # type: ignore[attr-defined]
    return state in (State.DURABLE, State.SKIPPED, State.EVICTED, State.DELETED) or bool(error)


def _flush_rest(flush: Flush) -> str:
    """Be the next start, which saves nothing; return why the newest isn't durable, or ""."""
    with pytest.MonkeyPatch.context() as patch:
        ways.flush_quickly(patch)
        writer = flush.writer()
        try:
            writer.wait(flush.saved()[-1].name, timeout=_ENDED_SECONDS)
        except FlushFailed as error:
            return str(error)
        finally:
            note(claims_of(writer), flush.notes)
            writer.close(flush=False)
        return ""


def _load(job: Job, flush: Flush) -> int:
    """Load what storage has of each name, and compare every bit; return how many there were."""
    stored = committed(str(job.url), job.storage_options)
    for name in stored:
        # A kill may have come before the later save of a name.
        errors = [_load_one(job, one) for one in flush.saves if one.name == name]
        assert None in errors, errors
    return len(stored)


def _load_one(job: Job, one: Save) -> Exception | None:
    with ways.without_memory(job) as reader:
        return raised_by(lambda: ways.load_state(reader, one.number, one.nbytes, one.name))


class Flushes(Storm):
    """Series are of one server, one bucket and one proxy; each round has a root of its own."""

    rounds_in_series = 25

    def __init__(self, tally: Tally, kept: Path | None = None) -> None:
        super().__init__(tally, kept)
        self.wanted: Mapping[str, servers.Running] = {
            name: servers.ALL[name] for name in ("moto", "azurite")
        }
        """The servers to start; those that can't be had are done without."""
        self._servers: dict[str, servers.AnyServer] = {}
        self._rounds = 0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """The servers for all rounds."""
        with servers.started(self.wanted) as self._servers:
            yield

    @contextlib.contextmanager
    def series(self, chance: Random) -> Iterator[Play]:
        """A way to one of the servers."""
        name = chance.choice(list(self._servers))
        server = self._servers[name]
        opened = ways.s3_way(server) if isinstance(server, S3Server) else ways.azure_way(server)
        with opened as way:
            yield lambda chance: self._play(name, way, chance)

    def _play(self, name: str, way: Way, chance: Random) -> str:
        self._rounds += 1
        with private_directory("storm") as memory, self.keeping(memory):
            flush, direct, about = self._chosen(way, memory, chance)
            try:
                self._flush_through_faults(flush, direct)
            finally:
                faulty = [one for one in way.proxy.requests if one.fault is not None]
                print(f"requests: {len(way.proxy.requests)}, with faults: {faulty}")
                way.proxy.reset()
            self.tally["requests that met faults"] += len(faulty)
            self._finish(flush, direct)
        self.tally[f"rounds on {name}"] += 1
        return f"{name}: {about}"

    def _chosen(self, way: Way, memory: Path, chance: Random) -> tuple[Flush, Job, str]:
        root = f"round{self._rounds}"
        chosen = [_chosen_fault(way, chance) for _ in range(chance.randrange(1, 6))]
        stays = chance.random() < 0.15
        for number, (fault, after) in enumerate(chosen):
            times = _ALWAYS if stays and number == 0 else chance.choice([1, 1, 2, 5])
            way.proxy.fail(lambda request: True, fault, times, after)
        is_slow = any(isinstance(fault, Hang) for fault, _ in chosen)
        through = way.impatient if is_slow else way.root
        overwrite = chance.random() < 0.8
        names = [1, 2, 3][: chance.randrange(1, 4)]
        if overwrite and chance.random() < 0.3:
            names = [1, 2, 1]  # one is replaced
        saves = tuple(
            Save(f"step-{name}", number, chance.choice([0, 0, 0, ways.LARGE]))
            for number, name in enumerate(names, 1)
        )
        point = f"{chance.choice(FLUSHER_POINTS)}:kill:{chance.randrange(1, 4)}"
        flush = Flush(
            Job(f"{through.url}/{root}", str(memory), through.storage_options),
            saves,
            overwrite,
            chance.choice([None, None, 1, 2]),
            point if chance.random() < 0.25 else "",
            memory / "notes",
            memory / "progress",
        )
        direct = Job(f"{way.direct.url}/{root}", str(memory), way.direct.storage_options)
        kinds = ", ".join(type(fault).__name__ for fault, _ in chosen)
        about = f"{kinds}{' for good' * stays}{f', {flush.armed}' * bool(flush.armed)}"
        print(f"{flush}\n{about}")
        return flush, direct, about

    def _flush_through_faults(self, flush: Flush, direct: Job) -> None:
        with forking(_flush, None, flush) as life:
            (end,) = life.ended(_ENDED_SECONDS)
        if isinstance(end, RankDeath):
            assert flush.armed, end
            assert end.signal is not None, end
            self.tally["flushers killed"] += 1
            end = []
        for name, state, error in end:
            self.tally[f"flushes {state} in the end, with faults"] += 1
            assert state != "failed" or error, f"{name} has failed, and nothing says why"
            assert state in ("durable", "failed", "skipped", "evicted", "deleted"), (name, state)
        stored = committed(str(direct.url), direct.storage_options)
        assert_kept(stored, noted(flush.notes), has_retention=flush.keep is not None)
        self.tally["saves"] += len(flush.saved())

    def _finish(self, flush: Flush, direct: Job) -> None:
        """The faults are over: all is flushed, and whole."""
        if not flush.saved():
            return
        failed = forked(_flush_rest, flush, timeout=_ENDED_SECONDS)
        assert not failed, failed
        self.tally["loads"] += forked(_load, direct, flush)
        stored = committed(str(direct.url), direct.storage_options)
        newest = flush.saved()[-1].name
        assert newest in stored, (newest, list(stored))
        assert_kept(stored, noted(flush.notes), has_retention=flush.keep is not None)


def _chosen_fault(way: Way, chance: Random) -> tuple[Fault, int]:
    """A fault, and how many requests come before it."""
    made: list[Fault] = [
        way.error(500, "InternalError"),
        way.error(503, "SlowDown" if way.is_s3 else "ServerBusy"),
        way.error(429, "TooManyRequests", retry_after="1"),
        way.error(403, "AccessDenied" if way.is_s3 else "AuthorizationFailure"),
        Reset(),
        Reset(),
        ResetInBody(chance.choice([0, 1, 100, 10_000])),
        Delay(chance.uniform(0.0, 0.3)),
        LoseAnswer(),
        LoseAnswer(),
        LoseAnswer(),
        Truncate(chance.choice([0, 1, 50])),
    ]
    if chance.random() < 0.05:
        return Hang(), chance.randrange(40)
    return chance.choice(made), chance.randrange(40)
