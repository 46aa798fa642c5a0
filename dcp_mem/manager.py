"""`CheckpointManager`: what a training loop has in hand to save, restore, list and delete its checkpoints."""

from __future__ import annotations

import operator
import os
import re
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from types import TracebackType
from typing import Any, Literal

import torch.distributed as dist

from dcp_mem import api
from dcp_mem.config import checked_metrics, checked_step
from dcp_mem.dcp_call import direct_call
from dcp_mem.errors import (
    CheckpointNotFound,
    ConfigError,
    DcpMemError,
    FlushFailed,
    NoRecoverableCheckpoint,
    RankFailed,
)
from dcp_mem.events import log
from dcp_mem.operating import housekeeping
from dcp_mem.operating.inventory import Checkpoint, inventory, job_memory
from dcp_mem.policy.frequency import Advice, Auto, advice, parse_seconds, steps_between
from dcp_mem.policy.persistence import Persist
from dcp_mem.policy.retention import Retention
from dcp_mem.preemption import Preemption
from dcp_mem.reader import MemoryStorageReader, RecoveryReport
from dcp_mem.session import open_session
from dcp_mem.trackers import Tracker
from dcp_mem.trackers.feed import Feed
from dcp_mem.values import About, CheckpointStatus, State
from dcp_mem.watch import status_of
from dcp_mem.writer import MemoryStorageWriter

_NAME = re.compile(r"step-(\d+)")
_LAST_NUMBER = re.compile(r"(\d+)\D*$")
_MEASURED = 9
_BUSY_SECONDS = 60.0
_PAUSE = 0.05


@dataclass(frozen=True, slots=True)
class Saved:
    """What became of one call of `save`; true where it made a checkpoint.

    outcome: "complete" (in memory), "not due" (interval), "skipped" (memory was full), or "failed". seconds: that training was
    kept. persist: it is meant for storage. error: why it failed. troubles: what went wrong behind training since the call before:
    flushes and copies, on this node.
    """

    step: int
    name: str
    outcome: Literal["complete", "not due", "skipped", "failed"]
    seconds: float = 0.0
    nbytes: int = 0
    persist: bool = False
    error: str = ""
    troubles: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.outcome == "complete"


class CheckpointManager:
    """Saves a training loop's state step by step, keeps what it is told to keep, and restores the newest that is whole.

    path, persist, replicas and further options: as in `MemoryStorageWriter`. Checkpoints are called "step-<number>".
    interval: steps from one save to the next, so that `save` may be called at every step; `auto(mtbf="12h")` finds the number by
    itself, from what steps and saves take. keep_memory, keep_storage: retention, as in the writer's keep and keep_storage.
    on_error: "warn" logs what fails, in saves and behind training, and training goes on; "raise" raises it from the next `save`,
    on all ranks alike. Wrong arguments always raise. preemption: signals, as names ("SIGTERM", "SIGUSR1"), at which the newest
    checkpoint goes to storage, for up to `deadline` seconds, before what would have happened without; see `Preemption`.
    trackers: told on rank 0 what becomes of checkpoints, behind training; see `dcp_mem.trackers`.

    Make it, and call its methods, on all ranks (of process_group). Raises ConfigError.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        persist: bool | Persist = True,
        interval: int | Auto = 1,
        keep_memory: int | Retention = 2,
        keep_storage: int | Retention | None = None,
        replicas: int | None = None,
        on_error: str = "warn",
        preemption: str | Sequence[str] = (),
        deadline: float = 25.0,
        trackers: Sequence[Tracker] = (),
        process_group: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        if on_error not in ("warn", "raise"):
            raise ConfigError(f"on_error={on_error!r}: choose 'warn' or 'raise'")
        if not isinstance(interval, Auto) and (type(interval) is not int or interval < 1):
            raise ConfigError(f"interval={interval!r}: give a number of steps, at least 1, or auto(mtbf=…)")
        self._writer = MemoryStorageWriter(
            path,
            persist=persist,
            keep=keep_memory,
            keep_storage=keep_storage,
            replicas=replicas,
            process_group=process_group,
            **options,
        )
        self._process_group = process_group
        self._raises = on_error == "raise"
        self._interval = interval
        self._pace = _Pace(1 if isinstance(interval, Auto) else interval)
        self._said: set[tuple[str, str]] = set()
        self._report: RecoveryReport | None = None
        self._feed = Feed(trackers, self._writer.settings, process_group)
        self._preemption = Preemption(self._writer, preemption, deadline)
        self._preemption.install()

    # -- saving and restoring ------------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        metrics: Mapping[str, Any] | None = None,
        force_persist: bool = False,
    ) -> Saved:
        """Save if a save is due; returns when the checkpoint is complete in memory, and says what became of it.

        state: as for `dcp_mem.save`; `TrainState` makes one of all that a loop has. metrics: figures of this step, for
        `keep_best` and listings; rank 0's count. force_persist: save now, and have storage get it. Raises ConfigError, and with
        on_error="raise" whatever failed; what failed behind training once this step is saved.
        """
        number, figures = _number(step), checked_metrics(metrics)
        name = f"step-{number}"
        if not (force_persist or self._pace.is_due(number)):
            return Saved(number, name, "not due")
        troubles = self._troubles()
        started = time.monotonic()
        try:
            self._writer.announce(About(number, figures, force_persist, self._steps_until_next(number)))
            api.save(dict(state), checkpoint_id=name, storage_writer=self._writer, process_group=self._process_group)
        except ConfigError:
            raise
        except Exception as error:
            text, seconds = f"{type(error).__name__}: {error}", time.monotonic() - started
            self._feed.saved(name, number, "failed", seconds, error=text)
            if self._raises:
                raise
            log.warning("%s is not saved: %s", name, error, exc_info=not isinstance(error, DcpMemError))
            self._pace.passed(number)
            return Saved(number, name, "failed", seconds, error=text, troubles=troubles)
        saved = self._saved(number, name, time.monotonic() - started, troubles)
        self._feed.saved(name, number, saved.outcome, saved.seconds, saved.nbytes)
        self._raise_on_all_ranks(troubles)
        return saved

    def _saved(self, number: int, name: str, seconds: float, troubles: tuple[str, ...]) -> Saved:
        made = self._writer.last_save
        if made is None:
            self._pace.passed(number)
            return Saved(number, name, "skipped", seconds, troubles=troubles)
        manifest, about = made
        self._pace.saved(number, seconds, about.pause)
        return Saved(number, name, "complete", seconds, manifest.nbytes, manifest.persist, troubles=troubles)

    def restore(self, state: dict[str, Any], step: int | None = None, *, weights_only: bool = True) -> int | None:
        """Load the newest checkpoint that is whole, or that of a step, into the state; returns its step.

        None, and nothing is changed, where there is no checkpoint at all. Where there are some, and none can be loaded, it raises
        NoRecoverableCheckpoint, lest training begin anew over them; CheckpointNotFound where a step was asked for.
        weights_only: as in `dcp_mem.load`.
        """
        name = None if step is None else f"step-{_number(step)}"
        with self._reader() as reader:
            try:
                api.load(
                    state,
                    checkpoint_id=name,
                    storage_reader=reader,
                    process_group=self._process_group,
                    weights_only=weights_only,
                )
            except NoRecoverableCheckpoint as error:
                if isinstance(error, CheckpointNotFound) or error.reasons:
                    raise
                return None
            self._report = reader.report()
        self._feed.restored(self._report)
        found = _step_of(self._report)
        self._pace.passed(found)
        return found

    def report(self) -> RecoveryReport:
        """What the last restore took, from where, and what it passed over. Raises ConfigError before one."""
        if self._report is None:
            raise ConfigError("nothing has been restored yet")
        return self._report

    # -- what there is -------------------------------------------------------------------------------------------------

    def latest(self) -> int | None:
        """The step that `restore` would take, as all ranks find it together; None where there is none of a manager's."""
        with self._reader() as reader:
            steps = [int(match[1]) for name in reader.recoverable() if (match := _NAME.fullmatch(name))]
        return steps[0] if steps else None

    def list(self) -> list[Checkpoint]:
        """Every checkpoint in this node's memory and on storage, newest first: where it lies, its state, size, step, metrics."""
        return inventory(self._writer.settings)

    def status(self) -> Sequence[CheckpointStatus]:
        """What became of each checkpoint of this node, newest first, those that have left memory among them."""
        return self._writer.status()

    def wait(
        self,
        step: int | None = None,
        state: str = "durable",
        timeout: float | None = None,
        *,
        progress: bool = True,
    ) -> None:
        """Wait until a step's checkpoint (None: the newest one meant for it) is "complete", "replicated" or "durable".

        progress: show how far it is, on stderr if that is a terminal. Raises as `MemoryStorageWriter.wait` does.
        """
        name = None if step is None else f"step-{_number(step)}"
        self._writer.wait(name, state, timeout, progress=progress)

    def delete(self, step: int) -> None:
        """Delete a step's checkpoint from the nodes' memory and from storage. Call it on all ranks.

        Raises CheckpointNotFound where nobody has it, RankFailed where somebody goes on reading it; on all ranks alike.
        """
        name, ranks = f"step-{_number(step)}", direct_call(self._process_group, False, self._purpose).ranks
        found, error = False, ""
        try:
            found = self._evict(name)
        except Exception as failure:  # the other ranks wait for this one
            error = f"{type(failure).__name__}: {failure}"
        found, errors = ranks.all_reduce((found, {ranks.rank: error} if error else {}), _both)
        if not errors and ranks.rank == 0:
            try:
                found = self._delete_from_storage(name) or found
            except Exception as failure:
                errors = {0: f"{type(failure).__name__}: {failure}"}
        found, errors = ranks.broadcast((found, errors))
        if errors:
            raise RankFailed(f"deleting {name}", sorted(errors.items()))
        if not found:
            raise CheckpointNotFound(name, f"job {self._writer.settings.job}", [one.name for one in self.list()], [])

    def _evict(self, name: str) -> bool:
        memory, deadline = job_memory(self._writer.settings), time.monotonic() + _BUSY_SECONDS
        if memory is None or not memory.find(name):
            return False
        while True:
            _, why_not = housekeeping.evict(self._writer.settings, name)
            if not why_not:
                return True
            if time.monotonic() > deadline:
                raise DcpMemError(f"{name}: {why_not}")
            time.sleep(_PAUSE)

    def _delete_from_storage(self, name: str) -> bool:
        chosen = self._writer.settings
        if chosen.url is None:
            return False
        try:
            housekeeping.delete(chosen.url, name, storage_options=chosen.storage_options)
        except CheckpointNotFound:
            return False
        return True

    # -- how often to save ---------------------------------------------------------------------------------------------

    def advice(self, mtbf: float | str, *, recovery_seconds: float = 0.0) -> Advice:
        """How often to save, going by what saves and flushes have taken here. Its text says it in a sentence.

        mtbf: mean time between failures of the whole job, in seconds or as "12h". Raises ConfigError before the first save.
        """
        if not self._pace.blocking:
            raise ConfigError("advice() goes by what saves take: save at least once before")
        flushes = [one.flush_seconds for one in self.status() if one.state is State.DURABLE]
        return advice(
            median(self._pace.blocking),
            parse_seconds(mtbf, "mtbf"),
            flush_seconds=median(flushes) if flushes else 0.0,
            recovery_seconds=recovery_seconds,
        )

    def _steps_until_next(self, step: int) -> int:
        """What this rank would have pass until the next save; the coordinator's word counts."""
        if not isinstance(self._interval, Auto):
            return self._interval
        seconds = self._pace.step_seconds(step)
        if not (self._pace.blocking and seconds):
            return self._interval.at_least_steps
        return steps_between(self._interval, median(self._pace.blocking), seconds)

    # -- the end -------------------------------------------------------------------------------------------------------

    def close(self, flush: bool = True, *, progress: bool = True) -> None:
        """Wait until storage has what it should have (flush=True), and give back memory but for what is kept for a restart.

        With on_error="warn", what storage refuses is logged; it stays in memory. Closing twice is fine.
        """
        self._preemption.uninstall()
        try:
            self._writer.close(flush, progress=progress)
        except FlushFailed as error:
            if self._raises:
                raise
            log.warning("%s", error)
        finally:
            self._feed.close()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(flush=kind is None)

    def _reader(self) -> MemoryStorageReader:
        chosen = self._writer.settings
        return MemoryStorageReader(
            chosen.url,
            memory=chosen.memory_root,
            job=chosen.job,
            storage_options=chosen.storage_options,
            process_group=self._process_group,
        )

    @property
    def _purpose(self) -> str:
        """The ranks' connections are those of the writer's saves: none of the manager's calls runs beside one."""
        return f"save {self._writer.settings.job}"

    def _troubles(self) -> tuple[str, ...]:
        """What has failed behind training since this was last asked, on this node; one rank of it logs that.

        Copies that were never begun, or are fewer than wanted because there are fewer nodes, have not failed.
        """
        found = []
        session = open_session(self._writer.settings)
        for held in session.memory.held() if session is not None else ():
            one, copies = status_of(held), held.replication
            error = one.error if one.state is State.FAILED else copies.error if copies.outcome == "failed" else ""
            if error and (one.save_id, error) not in self._said:
                self._said.add((one.save_id, error))
                found.append(f"{one.name}: {error}")
        if os.environ.get("LOCAL_RANK", "0") == "0":
            for text in found:
                log.warning("%s", text)
        return tuple(found)

    def _raise_on_all_ranks(self, troubles: Sequence[str]) -> None:
        """With on_error="raise", raise FlushFailed where a node has had trouble."""
        if not self._raises:
            return
        ranks = direct_call(self._process_group, False, self._purpose).ranks
        all_troubles = ranks.all_reduce({ranks.rank: troubles[0]} if troubles else {}, operator.or_)
        if all_troubles:
            rank = min(all_troubles)
            name, _, text = all_troubles[rank].partition(": ")
            raise FlushFailed(name, f"{text} (rank {rank})")


class _Pace:
    """When a save is due, and what steps and saves have taken."""

    def __init__(self, pause: int) -> None:
        self._pause = pause
        self._last: int | None = None
        self._ended = 0.0
        self._is_warm = False
        self.blocking: deque[float] = deque(maxlen=_MEASURED)

    def is_due(self, step: int) -> bool:
        """Steps that went back, after a restore by hand, count from there."""
        return self._last is None or not 0 <= step - self._last < self._pause

    def step_seconds(self, step: int) -> float:
        """What a step has taken since the last save; 0.0 where that isn't known."""
        if self._last is None or step <= self._last or not self._ended:
            return 0.0
        return (time.monotonic() - self._ended) / (step - self._last)

    def passed(self, step: int) -> None:
        """A step that was restored, or couldn't be saved: the next save is due so many steps after it."""
        self._last, self._ended = step, time.monotonic()

    def saved(self, step: int, seconds: float, pause: int) -> None:
        if self._is_warm:  # the first one makes slots and plans, which later ones find
            self.blocking.append(seconds)
        self._is_warm, self._pause = True, pause
        self.passed(step)


def _number(step: object) -> int:
    number = checked_step(step)
    if number is None:
        raise ConfigError("step=None: give the number of the training step")
    return number


def _step_of(report: RecoveryReport) -> int:
    match = _LAST_NUMBER.search(report.checkpoint_id)
    if report.step is not None:
        return report.step
    if match is None:
        raise ConfigError(
            f"{report.checkpoint_id} is loaded, but nobody said which step it is of: a manager saved no such checkpoint"
        )
    return int(match[1])


def _both(one: tuple[bool, dict[int, str]], other: tuple[bool, dict[int, str]]) -> tuple[bool, dict[int, str]]:
    return one[0] or other[0], one[1] | other[1]
