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
from dcp_mem.config import Settings
from dcp_mem.errors import DcpMemError, StorageUnavailable
from dcp_mem.events import log
from dcp_mem.flushing.flush import Evicted, NotYet, Superseded, flush
from dcp_mem.flushing.metering import Throttle
from dcp_mem.flushing.parts import FlushJob, drop_part
from dcp_mem.flushing.retaining import Retainer
from dcp_mem.flushing.telling import Attempt, add_to_stored_history
from dcp_mem.format.histories import line_of
from dcp_mem.format.manifest import FlushRecord
from dcp_mem.memory.job import Held, JobMemory
from dcp_mem.memory.locks import job_is_live
from dcp_mem.policy.retention import Retention
from dcp_mem.storage.patient import Patience, PatientStorage
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
_PATIENCE = Patience(tries=4, first_pause=0.2, longest_pause=3.0)
"""Within a flush; one that fails is tried again for as long as it takes, and goes on where it stopped."""
_LONGEST_PAUSE = 60.0
_ORPHAN_PATIENCE = 3600.0  # how long an unreachable storage is tried for a job whose trainers are gone
_ORPHAN_REFUSALS = 3
_LONGEST_LOOK = 2.0
_PEER_PATIENCE = 600.0  # how long a missing part of another node is nothing to speak of
_PEER_LAG = 30.0
_OWNER_PATIENCE = 30.0
"""How long, beside twice the time of its own part, a node waits for another's before it does that itself, if no trainer lives."""


@dataclass(frozen=True, slots=True)
class Registration:
    """A job that wants its checkpoints flushed. Options and environment may hold secrets: they stay in memory and out of repr.

    environment: the trainer's variables for storage SDKs; None where the flusher runs in the trainer itself.
    now: somebody waits for it: failed flushes are tried again at once. upload_limit: bytes per second of this node.
    nodes: those on which the job's ranks run; None where whoever registers it doesn't know. Others are lost. keep_storage: which
    checkpoints stay on storage; None: all.
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

    def goes_to_the_same_place(self, other: Registration) -> bool:
        """Whether the other one differs in nothing that reaches storage."""
        return self._place() == other._place()

    def _place(self) -> Registration:
        return replace(self, now=False, overwrite=False, upload_limit=None, nodes=None, keep_storage=None)


def credential_environment() -> dict[str, str]:
    """The variables of this process by which storage SDKs find their credentials."""
    return {name: value for name, value in os.environ.items() if name.upper().startswith(_CREDENTIAL_PREFIXES)}


def registration_of(settings: Settings, *, now: bool = False, nodes: frozenset[str] | None = None) -> Registration:
    """What the agent must know of this job. now: that somebody waits for it. nodes: where its ranks run, if that is known."""
    assert settings.url is not None
    return Registration(
        settings.job,
        settings.url,
        settings.overwrite,
        settings.storage_options,
        credential_environment(),
        now,
        settings.upload_limit,
        nodes,
        settings.keep_storage,
    )


@dataclass(slots=True)
class _Trouble:
    """Failures of one checkpoint's flush so far. waits: how often other nodes' parts were missing, since `waiting`.

    part: seconds that this node's own part took. looked: when other nodes' parts were last looked for (0.0: they aren't).
    alone: since when no trainer of the job has lived here, with this node's part done (0.0: one does). lost: nodes that aren't
    waited for any more. damaged: as in FlushJob.
    """

    job: str
    attempts: int = 0
    refusals: int = 0
    first: float = 0.0
    again: float = 0.0
    waits: int = 0
    waiting: float = 0.0
    part: float = 0.0
    looked: float = 0.0
    alone: float = 0.0
    lost: frozenset[str] = frozenset()
    damaged: set[str] = field(default_factory=set)


class Flusher:
    """Flushes the pending checkpoints of registered jobs, the newest first."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._jobs: dict[str, Registration] = {}
        self._trouble: dict[str, _Trouble] = {}
        self._storages: dict[str, tuple[Registration, PatientStorage]] = {}
        self._throttles: dict[str, tuple[int | None, Throttle]] = {}
        self._unwritten: dict[str, tuple[JobMemory, Held, FlushRecord]] = {}
        self._served: dict[str, float] = {}
        self._retainers: dict[str, Retainer] = {}

    def register(self, registration: Registration) -> None:
        """Take a job on, or its renewed credentials or new nodes, which may be what failed flushes waited for."""
        known = self._jobs.get(registration.job)
        if known is not None and registration.nodes is None:
            registration = replace(registration, nodes=known.nodes)
        self._jobs[registration.job] = registration
        is_same = known is not None and registration.goes_to_the_same_place(known) and registration.nodes == known.nodes
        if registration.now or not is_same:
            for trouble in list(self._trouble.values()):
                if trouble.job == registration.job:
                    trouble.again = 0.0

    def flush_next(self) -> bool:
        """Flush one checkpoint, of the job that has waited longest; False where there is none whose turn it is."""
        for unwritten in list(self._unwritten.values()):
            self._record(*unwritten)
        now = time.monotonic()
        for registration in sorted(self._jobs.values(), key=lambda one: self._served.get(one.job, 0.0)):
            held = next((held for held in self._pending(registration.job) if self._due(held) <= now), None)
            if held is not None:
                self._served[registration.job] = now
                try:
                    self._flush(registration, JobMemory(self._root, registration.job), held)
                except Exception:  # a defect, or memory that vanished: no reason to let the other jobs down
                    log.exception("%s can't be flushed", held.name)
                    trouble = self._trouble.setdefault(held.manifest.save_id, _Trouble(registration.job))
                    trouble.again = now + _LONGEST_PAUSE
                return True
        return False

    def retry(self) -> None:
        """Make everything due that failed before."""
        for trouble in list(self._trouble.values()):
            trouble.again = 0.0

    def seconds_until_next(self) -> float | None:
        """How long until a failed flush is due again; None where nothing is pending."""
        due = [self._due(held) for job in list(self._jobs) for held in self._pending(job)]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def is_busy(self) -> bool:
        """Whether anything is pending but failures, which are tried again later."""
        now = time.monotonic()
        pending = [self._trouble.get(held.manifest.save_id) for job in list(self._jobs) for held in self._pending(job)]
        return any(trouble is None or trouble.again <= now or not trouble.attempts for trouble in pending)

    def is_needed(self) -> bool:
        """Whether a trainer of a registered job lives, or something is left to flush that is still worth trying."""
        return any(self._is_live(job) or any(map(self._hopeful, self._pending(job))) for job in list(self._jobs))

    def _is_live(self, job: str) -> bool:
        return job_is_live(os.path.join(self._root, job))

    def _pending(self, job: str) -> list[Held]:
        """What awaits its flush, newest first; nothing where the job's memory is gone."""
        if not os.path.isdir(os.path.join(self._root, job)):
            return []
        try:
            found = JobMemory(self._root, job).held()
        except FileNotFoundError:
            return []
        except (DcpMemError, OSError) as error:
            log.warning("the memory of job %s can't be read: %s", job, error)
            return []
        told = {save_id: record.outcome for save_id, (_, _, record) in self._unwritten.items()}
        return [
            held for held in found if held.pending and told.get(held.manifest.save_id) not in ("durable", "skipped")
        ]

    def _due(self, held: Held) -> float:
        trouble = self._trouble.get(held.manifest.save_id)
        return trouble.again if trouble is not None else 0.0

    def _hopeful(self, held: Held) -> bool:
        trouble = self._trouble.get(held.manifest.save_id)
        if trouble is None:
            return True
        since = min(filter(None, (trouble.first, trouble.waiting)), default=time.monotonic())
        return trouble.refusals < _ORPHAN_REFUSALS and time.monotonic() - since < _ORPHAN_PATIENCE

    def _flush(self, registration: Registration, memory: JobMemory, held: Held) -> None:
        trouble = self._trouble.get(held.manifest.save_id)
        waited = time.monotonic() - trouble.looked if trouble is not None and trouble.looked else 0.0
        attempt = Attempt(memory, held, waited)
        try:
            with _environment(registration.environment):
                record, is_ours_to_tell = self._flushed(registration, memory, held, attempt)
        except Evicted:
            log.info("%s left memory before it was flushed", held.name)
            self._drop(registration, memory, held)
            return
        except NotYet as reason:
            self._waits(memory, held, attempt, str(reason))
            return
        except Superseded as reason:
            self._skip(memory, held, attempt, str(reason))
            return
        except Exception as error:  # whatever it was, training and the other checkpoints must go on
            self._storages.pop(registration.job, None)
            self._failed(memory, held, attempt.record(), error)
            return
        self._record(memory, held, record)
        faults.point("flush.recorded")
        self._trouble.pop(held.manifest.save_id, None)
        log.info("%s is durable in %s (%.1f s)", held.name, registration.url, attempt.seconds)
        if is_ours_to_tell:
            self._retain(registration, memory, held)

    def _drop(self, registration: Registration, memory: JobMemory, held: Held) -> None:
        """Free what was put of a checkpoint that can't be finished any more."""
        try:
            with _environment(registration.environment):
                drop_part(FlushJob(held, memory.node, self._storage(registration), registration.overwrite))
        except Exception as error:
            log.warning("what was put of %s can't be taken away (collect_leftovers does): %s", held.name, error)

    def _retain(self, registration: Registration, memory: JobMemory, held: Held) -> None:
        """Take from storage what the job doesn't keep, now that this checkpoint is there."""
        if registration.keep_storage is None:
            return
        retainer = self._retainers.setdefault(registration.job, Retainer())
        try:
            with _environment(registration.environment):
                gone = retainer.apply(self._storage(registration), registration.keep_storage, held.manifest)
            memory.note_deleted(gone)
        except Exception as error:  # the next commit brings another chance
            self._retainers.pop(registration.job)
            log.warning("what %s doesn't keep in %s stays for now: %s", registration.job, registration.url, error)
            return
        if gone:
            log.info("retention has deleted %s from %s", ", ".join(gone), registration.url)

    def _flushed(
        self, registration: Registration, memory: JobMemory, held: Held, attempt: Attempt
    ) -> tuple[FlushRecord, bool]:
        """Flush it; what is to be written down of that, and whether this node has committed it.

        The committing node tells it to the history on storage, too.
        """
        storage, throttle = self._storage(registration), self._throttle(registration)
        lost, damaged = self._lost(registration, memory, held)
        meter = attempt.meter(storage)
        trouble = self._trouble.get(held.manifest.save_id)
        was_put = trouble is not None and trouble.waits > 0 and _is_superseded(memory, held)
        job = FlushJob(held, memory.node, storage, registration.overwrite, meter, throttle, lost, damaged, was_put)
        is_ours_to_tell = flush(job)
        ended = attempt.record()
        record = replace(ended, outcome="durable", error="", durable=time.time(), attempts=ended.attempts + 1)
        if is_ours_to_tell:
            add_to_stored_history(storage, line_of(held.manifest, record), memory.history())
        return record, is_ours_to_tell

    def _lost(self, registration: Registration, memory: JobMemory, held: Held) -> tuple[frozenset[str], set[str]]:
        """The checkpoint's nodes that won't do their part any more, and copies here of theirs that are known as damaged.

        Those are lost that the job has gone on without. Where no trainer is left here to tell, all those are taken for lost
        that have stayed away for long.
        """
        others = frozenset(held.manifest.nodes) - {memory.node}
        lost = others - registration.nodes if registration.nodes is not None else frozenset[str]()
        trouble = self._trouble_of(memory, held) if lost else self._trouble.get(held.manifest.save_id)
        if trouble is None:
            return lost, set()
        now = time.monotonic()
        trouble.alone = 0.0 if self._is_live(memory.job) or not trouble.waits else trouble.alone or now
        if trouble.alone and now - trouble.alone > _OWNER_PATIENCE + 2 * trouble.part:
            lost = others
        if lost != trouble.lost:
            trouble.lost, trouble.waiting = lost, 0.0  # whoever stands in for them has his time as well
            log.info("%s doesn't count on these nodes any more: %s", held.name, ", ".join(sorted(lost)) or "none")
        return lost, trouble.damaged

    def _throttle(self, registration: Registration) -> Throttle:
        """The job's throttle, kept: what one flush sent counts for the next."""
        known = self._throttles.get(registration.job)
        if known is None or known[0] != registration.upload_limit:
            known = registration.upload_limit, Throttle(registration.upload_limit)
            self._throttles[registration.job] = known
        return known[1]

    def _storage(self, registration: Registration) -> PatientStorage:
        """The job's storage: kept, since file systems cost connections and some are never freed; opened anew after a failure."""
        known = self._storages.get(registration.job)
        if known is None or not known[0].goes_to_the_same_place(registration):
            known = (registration, open_storage(registration.url, registration.storage_options, _PATIENCE))
            self._storages[registration.job] = known
        return known[1]

    def _waits(self, memory: JobMemory, held: Held, attempt: Attempt, reason: str) -> None:
        """This node's part is up and another's is missing. One that stays away has dropped the checkpoint, or died.

        Where a newer one is durable there is little to lose: then it gets some times the time that the part took here.
        """
        now = time.monotonic()
        trouble = self._trouble_of(memory, held)
        trouble.part = max(trouble.part, attempt.seconds)
        trouble.waiting = trouble.waiting or now
        trouble.looked = now
        trouble.waits += 1
        trouble.again = now + min(_LONGEST_LOOK, 0.05 * 1.5 ** min(trouble.waits, 20))
        waited = now - trouble.waiting
        if _is_superseded(memory, held) and waited > _PEER_LAG + 10 * trouble.part:
            self._skip(memory, held, attempt, f"{reason}; a newer one is durable")
        elif waited > _PEER_PATIENCE:
            self._failed(memory, held, attempt.record(), StorageUnavailable(self._jobs[memory.job].url, reason))
        else:
            attempt.note_waiting()

    def _skip(self, memory: JobMemory, held: Held, attempt: Attempt, why: str) -> None:
        ended = attempt.record()
        self._record(memory, held, replace(ended, outcome="skipped", error=why, attempts=ended.attempts + 1))
        log.warning("%s is skipped: %s", held.name, why)

    def _failed(self, memory: JobMemory, held: Held, record: FlushRecord, error: Exception) -> None:
        text = str(error) if isinstance(error, DcpMemError) else f"{type(error).__name__}: {error}"
        passing = isinstance(error, StorageUnavailable) or not isinstance(error, DcpMemError)
        trouble = self._trouble_of(memory, held)
        pause = min(_LONGEST_PAUSE, 0.5 * 2 ** min(trouble.attempts + 1, 10)) * random.uniform(0.7, 1.3)
        outcome, attempts, again = "failed" if passing else "refused", record.attempts + 1, time.time() + pause
        self._record(memory, held, replace(record, outcome=outcome, error=text, attempts=attempts, again=again))
        now = time.monotonic()
        trouble.first = trouble.first or now
        trouble.attempts += 1
        trouble.refusals += not passing
        trouble.looked = 0.0
        trouble.again = now + pause
        log.warning("flush of %s failed, next try in %.1f s: %s", held.name, pause, text)

    def _record(self, memory: JobMemory, held: Held, record: FlushRecord) -> None:
        """Write down how a flush went; remembered here for as long as memory has no room even for that."""
        try:
            memory.record_flush(held, record)
            memory.add_to_history(line_of(held.manifest, record))
            self._unwritten.pop(record.save_id, None)
        except (DcpMemError, OSError) as error:
            self._unwritten[record.save_id] = (memory, held, record)
            log.warning("can't write down that %s is %s: %s", held.name, record.outcome, error)

    def _trouble_of(self, memory: JobMemory, held: Held) -> _Trouble:
        return self._trouble.setdefault(held.manifest.save_id, _Trouble(memory.job))


def _is_superseded(memory: JobMemory, held: Held) -> bool:
    """Whether a newer one is durable."""
    return any(other.flush.outcome == "durable" and _is_newer(other, held) for other in memory.held())


def _is_newer(one: Held, other: Held) -> bool:
    return one.manifest.scope == other.manifest.scope and one.manifest.created > other.manifest.created


@contextmanager
def _environment(variables: Mapping[str, str] | None) -> Iterator[None]:
    """Run with the job's credential variables: one agent serves jobs that were started with different ones."""
    before = credential_environment()
    if variables is None or before == dict(variables):
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
