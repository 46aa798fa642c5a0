"""`CheckpointManager`: what a training loop holds to save, restore and delete its checkpoints."""

from __future__ import annotations

import concurrent.futures
import operator
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim import Optimizer

from dcp_mem import functional
from dcp_mem.comm import Ranks
from dcp_mem.comm.agreement import attempt, described, from_all_ranks, leaving_on_error
from dcp_mem.comm.bridge.calls import direct_call
from dcp_mem.comm.bridge.errors import cause_of
from dcp_mem.common.log import log
from dcp_mem.common.values import CheckpointStatus, Outcome, SaveInfo, State
from dcp_mem.config import Purpose, checked_metrics, checked_state, checked_step
from dcp_mem.errors import (
    CheckpointNotFound,
    ConfigError,
    DcpMemError,
    FlushFailed,
    NoRecoverableCheckpoint,
    RankFailed,
    WaitTimeout,
)
from dcp_mem.format.manifest import Manifest
from dcp_mem.functional.stateful import Refusing
from dcp_mem.manager.crash_loop import TIMES, CrashLoop
from dcp_mem.manager.feed import Feed, rank_in
from dcp_mem.manager.preemption import Preemption
from dcp_mem.manager.replica_check import ReplicaCheck
from dcp_mem.manager.saved import Saved
from dcp_mem.manager.tracker import Tracker
from dcp_mem.memory.job import JobMemory
from dcp_mem.memory.locks import saving_run
from dcp_mem.operations import housekeeping, rejecting
from dcp_mem.operations.inventory import job_memory, list_checkpoints
from dcp_mem.planning.tensor_choice import TensorChoice
from dcp_mem.policy.frequency import Advice, Auto, advice, parse_seconds, steps_between
from dcp_mem.policy.persistence import Persist
from dcp_mem.policy.retention import Retention
from dcp_mem.reader import MemoryStorageReader, RecoveryReport
from dcp_mem.runtime.session import open_session
from dcp_mem.runtime.states import status_of
from dcp_mem.saving.overlap import Overlap, overlap_of
from dcp_mem.saving.returned_metadata import ReturnedMetadata
from dcp_mem.writer import MemoryStorageWriter

_NAME = re.compile(r"step-(\d+)")
_LAST_NUMBER = re.compile(r"(\d+)\D*$")
_MEASURED = 9
_BUSY_SECONDS = 60.0
_PAUSE = 0.05


class CheckpointManager:
    """Save a training loop's state step by step, keep what retention chooses, restore the newest.

    Make it, and call its methods, on all ranks (of process_group). Checkpoints are called
    `step-<number>`.

    Args:
        path: The job's root on storage: an fsspec URL or a plain path. None keeps checkpoints in
            memory only.
        persist: Which saves go to storage, as in `MemoryStorageWriter`.
        save_interval_steps: Training steps from one save to the next, so that `save` may be called
            at every step; `auto(mtbf="12h")` finds the number from what steps and saves take.
        keep_memory: Which checkpoints stay in memory, as in `MemoryStorageWriter`.
        keep_storage: Which checkpoints stay on storage, as in `MemoryStorageWriter`.
        replicas: Copies of each segment in other nodes' memory, as in `MemoryStorageWriter`.
        async_save: Return from `save` as soon as the state has been copied, and complete the
            checkpoint behind training. The next save waits for it, and so do `wait`, `restore`,
            `delete` and `close`.
        overlap: Optimizers (or an `Overlap`) whose next steps wait for the copies of parameters and
            optimizer state, so that `save` doesn't, as in `dcp_mem.async_save`; implies
            async_save.
        on_error: "warn" logs what fails, in saves and behind training, and training goes on;
            "raise" raises it from the next `save`, on all ranks alike. Arguments that are wrong on
            all ranks always raise, and so does a state that is no dict.
        preemption: Names of signals ("SIGTERM", "SIGUSR1") at which the newest checkpoint is
            flushed before the signal takes its usual effect; see `Preemption`.
        preemption_deadline: Seconds that this flush may take at most.
        on_crash_loop: What `restore` does where the job has resumed from the newest checkpoint
            three times in a row, and died each time within crash_loop_steps: "fall_back" rejects
            that checkpoint and takes the one before, "warn" says so, "ignore" keeps no count.
        crash_loop_steps: A job that comes so many steps beyond its checkpoint (`save` is called at
            each step, due or not) has resumed successfully; so has one that is closed.
        compare_replicas: At every so many saves, compare what several ranks hold (all of DDP's
            state, HSDP's replicas) by checksum, an eighth of it each time. Tensors that differ are
            logged and in the next save's `troubles`, with their ranks. Each rank copies that
            eighth into its private memory meanwhile; None compares nothing.
        trackers: Are told on rank 0 what becomes of checkpoints, behind training; see
            `dcp_mem.integrations.trackers`.
        process_group: The ranks that save together; by default all ranks.
        **options: Further arguments of `MemoryStorageWriter`.

    Raises:
        ConfigError: An argument can't work.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        persist: bool | Persist = True,
        save_interval_steps: int | Auto = 1,
        keep_memory: int | Retention = 2,
        keep_storage: int | Retention | None = None,
        replicas: int | None = None,
        async_save: bool = False,
        overlap: Overlap | Optimizer | Sequence[Optimizer] | None = None,
        on_error: str = "warn",
        preemption: str | Sequence[str] = (),
        preemption_deadline: float = 25.0,
        on_crash_loop: str = "ignore",
        crash_loop_steps: int = 100,
        compare_replicas: int | None = None,
        trackers: Sequence[Tracker] = (),
        process_group: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        if on_error not in ("warn", "raise"):
            raise ConfigError(f"on_error={on_error!r}: choose 'warn' or 'raise'")
        if not isinstance(save_interval_steps, Auto) and (
            type(save_interval_steps) is not int or save_interval_steps < 1
        ):
            raise ConfigError(
                f"save_interval_steps={save_interval_steps!r}: give a number of steps, at least 1, "
                f"or auto(mtbf=…)"
            )
        self._writer = MemoryStorageWriter(
            path,
            persist=persist,
            keep_memory=keep_memory,
            keep_storage=keep_storage,
            replicas=replicas,
            process_group=process_group,
            **options,
        )
        self._process_group = process_group
        self._raises = on_error == "raise"
        self._interval = save_interval_steps
        self._pace = _Pace(1 if isinstance(save_interval_steps, Auto) else save_interval_steps)
        self._overlap = None if overlap is None else overlap_of(overlap)
        self._is_async = async_save or overlap is not None
        self._begun: tuple[Saved, Future[Any]] | None = None
        earlier = _failures(job_memory(self._writer.settings))
        self._said = {(one.save_id, one.error) for one in earlier}
        self._report: RecoveryReport | None = None
        self._feed = Feed(trackers, self._writer.settings, process_group)
        self._replicas = ReplicaCheck(compare_replicas)
        self._crash_loop = CrashLoop(self._writer.settings, on_crash_loop, crash_loop_steps)
        self._preemption = Preemption(self._writer, preemption, preemption_deadline)
        self._preemption.install()

    # -- saving and restoring ----------------------------------------------------------------------

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        metrics: Mapping[str, Any] | None = None,
        force_persist: bool = False,
    ) -> Saved:
        """Save if a save is due; return when the checkpoint is complete in memory.

        With async_save it returns when the state has been copied, and the outcome is "begun".

        Args:
            step: The training step.
            state: As for `dcp_mem.save`; `TrainState` makes one entry of all that a loop has.
            metrics: Figures of this step, for `keep_best` and listings; rank 0's count.
            force_persist: Save now, whatever the interval says, and have storage get it.

        Returns:
            What became of it; true if a checkpoint was made, or begun.

        Raises:
            ConfigError: An argument can't work.
            DcpMemError: With on_error="raise": the save has failed, or, once this step is saved, a
                flush or copy behind training has (FlushFailed). With async_save: the save before
                has failed.
        """
        number = _number(step)
        self._crash_loop.passed(number)
        saved = Saved(step=number, name=f"step-{number}", outcome="not due")
        wrong = attempt(lambda: checked_state(state))
        if not (force_persist or self._pace.is_due(number)):
            _ = wrong.value
            return saved
        self._preemption.wait()
        started, until_next = time.monotonic(), self._steps_until_next(number)
        failed = self._finish_begun()
        found = attempt(
            lambda: (checked_metrics(metrics), dict(wrong.value), *self._found_behind())
        )
        # The other ranks wait for this one: it takes part, with its error.
        figures, items, troubles, rejections = (
            found.value if found.error is None else ({}, {"": Refusing(found.error)}, (), ())
        )
        troubles = (*failed, *troubles)
        saved = replace(saved, troubles=(*troubles, *rejections))
        save = self._begin if self._is_async else self._save
        try:
            saved = self._compare_replicas(saved)
            if self._replicas.is_due():
                items = self._begin_comparison(saved.name, items)
            self._writer._saver.annotate(SaveInfo(number, figures, force_persist, until_next))
            saved = save(saved, items, started)
        except Exception as error:
            # What one rank alone got wrong is no reason to end training, but that it gave no state.
            is_of_call = isinstance(error, ConfigError) and not self._is_of_few(error)
            if is_of_call or wrong.error is not None:
                raise
            return self._failed(replace(saved, seconds=time.monotonic() - started), error)
        self._raise_on_all_ranks(troubles)
        return saved

    def _is_of_few(self, error: ConfigError) -> bool:
        """Tell whether some ranks alone have got something wrong, and others haven't."""
        cause, size = error.__cause__, 1
        if dist.is_available() and dist.is_initialized():
            size = dist.get_world_size(self._process_group)
        return isinstance(cause, RankFailed) and len(cause.failures) < size

    def _begin_comparison(self, name: str, state: dict[str, Any]) -> dict[str, Any]:
        """Have replicas compared; return the state dict, without stateful objects if possible."""
        try:
            plain = functional.without_stateful(state)
        except Exception:  # the save asks again, and raises it on all ranks
            self._replicas.begin(name, {})
            return state
        self._replicas.begin(name, plain)
        return plain

    def _compare_replicas(self, saved: Saved) -> Saved:
        """Tell what has differed between ranks at an earlier save."""
        differing: Sequence[str] = ()
        if self._replicas.is_begun:
            with self._ranks_in_turn("save()") as ranks:
                differing = self._replicas.finish(ranks)
        if os.environ.get("LOCAL_RANK", "0") == "0":
            for text in differing:
                log.warning("%s", text)
        return replace(saved, troubles=(*saved.troubles, *differing))

    def _save(self, saved: Saved, state: dict[str, Any], started: float) -> Saved:
        functional.save_or_raise_cause(
            state,
            checkpoint_id=saved.name,
            storage_writer=self._writer,
            process_group=self._process_group,
        )
        saved = replace(saved, seconds=time.monotonic() - started)
        return self._ended(saved, self._writer._saver.last_save)

    def _begin(self, saved: Saved, state: dict[str, Any], started: float) -> Saved:
        begun = functional.async_save(
            state,
            checkpoint_id=saved.name,
            storage_writer=self._writer,
            process_group=self._process_group,
            overlap=self._overlap,
        )
        saved = replace(saved, outcome="begun", seconds=time.monotonic() - started)
        self._begun = saved, getattr(begun, "upload_completion", begun)
        self._pace.passed(saved.step)
        return saved

    def _finish_begun(self, timeout: float | None = None) -> Sequence[str]:
        """Wait for the save that goes on behind training, if there is one, and tell its outcome.

        It raises on all ranks alike, since the save fails on all ranks alike.

        `timeout`: seconds; None waits until the save is over. Returns what has gone wrong; none or
        one. Raises WaitTimeout.
        """
        if self._begun is None:
            return ()
        saved, future = self._begun
        if not concurrent.futures.wait([future], timeout).done:
            raise WaitTimeout(f"{saved.name} is not complete after {timeout:g} s")
        self._begun = None
        try:
            metadata = future.result()
        except (Exception, CheckpointException) as error:
            failed = self._failed(saved, cause_of(error, self._process_group))
            return (f"{failed.name}: {failed.error}",)
        made = metadata.made if isinstance(metadata, ReturnedMetadata) else None
        if made is None and metadata.state_dict_metadata:
            made = self._made_by_torch(saved.name)
        self._ended(saved, made)
        return ()

    def _made_by_torch(self, name: str) -> tuple[Manifest, SaveInfo] | None:
        """Return what a save made that torch has planned, as far as memory tells."""
        memory = job_memory(self._writer.settings)
        found = memory.find(name) if memory is not None else ()
        return next(((one.manifest, SaveInfo()) for one in found), None)

    def _failed(self, saved: Saved, error: BaseException) -> Saved:
        """Tell of a save that has failed, and go on, or raise."""
        saved = replace(saved, outcome="failed", error=described(error))
        self._feed.saved(saved)
        if self._raises:
            raise error
        is_unexpected = not isinstance(error, DcpMemError)
        log.warning(
            "%s is not saved: %s", saved.name, error, exc_info=error if is_unexpected else None
        )
        self._pace.passed(saved.step)
        return saved

    def _ended(self, saved: Saved, made: tuple[Manifest, SaveInfo] | None) -> Saved:
        """Tell what the writer has made of a save, and when the next one is due."""
        if made is None:
            saved = replace(saved, outcome="skipped")
            self._pace.passed(saved.step)
        else:
            manifest, info = made
            saved = replace(
                saved, outcome="complete", nbytes=manifest.nbytes, persist=manifest.persist
            )
            self._pace.saved(saved.step, saved.seconds, info.pause or self._pace.pause)
        self._feed.saved(saved)
        return saved

    def _begin_anew(self) -> None:
        """Count steps anew: the next save is due, whichever step it is of."""
        self._pace.forget()

    def restore(
        self,
        state: dict[str, Any],
        step: int | None = None,
        *,
        weights_only: bool = True,
        skip: TensorChoice | None = None,
    ) -> int | None:
        """Load the newest whole checkpoint, or that of a step, into the state.

        Args:
            state: As for `dcp_mem.load`; it is loaded into, in place.
            step: The step to load; None for the newest.
            weights_only: As in `dcp_mem.load`.
            skip: As in `dcp_mem.load`.

        Returns:
            The step that was loaded; None, with nothing changed, if there is no checkpoint at all.

        Raises:
            NoRecoverableCheckpoint: There are checkpoints, and none can be loaded. (It raises, so
                that training doesn't start from nothing over them.)
            CheckpointNotFound: The step that was asked for isn't there.
        """
        name = None if step is None else f"step-{_number(step)}"
        self._finish_begun()
        # A step that is asked for is loaded, however often the job has died from it.
        is_resume = name is None and self._crash_loop.is_watched
        if is_resume and self._crash_loop.before is None:
            self._leave_crash_loop()
        with self._reader() as reader:
            try:
                functional.load_or_raise_cause(
                    state,
                    checkpoint_id=name,
                    storage_reader=reader,
                    process_group=self._process_group,
                    weights_only=weights_only,
                    skip=skip,
                )
            except NoRecoverableCheckpoint as error:
                if isinstance(error, CheckpointNotFound) or error.reasons:
                    raise
                return None
            self._report = reader.report()
        self._feed.restored(self._report)
        found = _step_of(self._report)
        self._pace.passed(found)
        if is_resume:
            self._crash_loop.resumed(self._report, found, rank_in(self._process_group))
        return found

    def _leave_crash_loop(self) -> None:
        """Reject the checkpoint that the job dies from again and again, if another one is left."""
        with self._ranks_in_turn("restore()") as ranks, leaving_on_error(ranks):
            known = ranks.exchange(self._crash_loop.known(ranks.rank))
        resumes = max(known, key=lambda one: one.count)
        self._crash_loop.before = resumes
        if resumes.count < TIMES:
            return
        with self._reader() as reader:
            newest, *left = [*reader.recoverable(), ""]
        if newest != resumes.name:  # another one is resumed from now
            return
        why = f"the job has resumed from it {resumes.count} times in a row, and soon died"
        if left[0] and self._crash_loop.falls_back:
            log.warning("%s: %s; falling back to %s", resumes.name, why, left[0])
            self._reject(resumes.name, why)
        else:
            also = "" if left[0] else ", and there is no other"
            log.warning("%s: %s%s", resumes.name, why, also)

    def report(self) -> RecoveryReport:
        """Return what the last restore took, from where, and what it passed over.

        Raises:
            ConfigError: Nothing has been restored yet.
        """
        if self._report is None:
            raise ConfigError("nothing has been restored yet")
        return self._report

    # -- what there is -----------------------------------------------------------------------------

    def latest(self) -> int | None:
        """Return the step that `restore` would load, alike on all ranks; None for none."""
        with self._reader() as reader:
            steps = [
                int(match[1]) for name in reader.recoverable() if (match := _NAME.fullmatch(name))
            ]
        return steps[0] if steps else None

    def list(self) -> list[CheckpointStatus]:
        """Return every checkpoint in this node's memory and on storage, newest first."""
        return list_checkpoints(self._writer.settings)

    def status(self) -> Sequence[CheckpointStatus]:
        """Return what became of each checkpoint of this node, newest first.

        Those that have left memory are among them.
        """
        return self._writer.status()

    def wait(
        self,
        step: int | None = None,
        state: State | str = State.DURABLE,
        timeout: float | None = None,
        *,
        progress: bool = True,
    ) -> None:
        """Block until a step's checkpoint has reached a state.

        Args:
            step: The training step; None for the newest checkpoint that is meant to reach the
                state.
            state: `State.COMPLETE`, `State.REPLICATED` or `State.DURABLE`, or its text.
            timeout: Seconds; None waits for as long as there is hope.
            progress: Show progress on standard error if that is a terminal.

        Raises:
            WaitTimeout: The time ran out.
            FlushFailed: Storage refused the checkpoint, or it left memory before it was durable.
            ReplicationFailed: The checkpoint gets no copies.
            CheckpointNotFound: There is no such checkpoint.
        """
        name = None if step is None else f"step-{_number(step)}"
        started = time.monotonic()
        self._finish_begun(timeout)
        left = None if timeout is None else max(0.0, timeout - (time.monotonic() - started))
        self._writer.wait(name, state, left, progress=progress)

    def reject(self, step: int, why: str) -> None:
        """Mark a step's checkpoint as not to be resumed from. Call it on all ranks.

        `restore` and `latest` pass over it from now on, in memory and on storage, and the
        recovery's report says why; `restore(step=…)` still loads it. Retention doesn't count it:
        the checkpoint before stays. It leaves memory with the next save, and isn't flushed any
        more; what storage has of it stays there until it is deleted.

        Args:
            step: The training step that the checkpoint was saved at.
            why: The reason, for people, such as "the loss is NaN".

        Raises:
            CheckpointNotFound: There is no such checkpoint; on all ranks alike.
            RankFailed: It can't be marked; on all ranks alike.
        """
        self._finish_begun()
        self._reject(f"step-{_number(step)}", str(why))

    def _reject(self, name: str, why: str) -> None:
        chosen, what = self._writer.settings, f"rejecting {name}"

        def reject_on_storage(rejected: Sequence[bool]) -> bool:
            return rejecting.reject_on_storage(chosen, name, why) or any(rejected)

        reject_in_memory = partial(rejecting.reject_in_memory, chosen, name, why)
        if not self._from_all_ranks(what, reject_in_memory, reject_on_storage):
            available = [one.name for one in self.list()]
            raise CheckpointNotFound(name, f"job {chosen.job}", available, [])

    def _from_all_ranks(
        self,
        what: str,
        act: Callable[[], bool],
        decide: Callable[[Sequence[bool]], bool],
    ) -> bool:
        """Act on every rank, decide on rank 0; raise RankFailed on all ranks where one fails."""
        with self._ranks_in_turn("reject()" if what.startswith("rej") else "delete()") as ranks:
            try:
                with leaving_on_error(ranks):
                    return from_all_ranks(ranks, what, act, decide)
            except RankFailed:
                raise
            except Exception as error:
                raise RankFailed(what, [(ranks.rank, described(error))]) from error

    @contextmanager
    def _ranks_in_turn(self, method: str) -> Iterator[Ranks]:
        """Talk to the other ranks in a method, while no save in the background does."""
        session = open_session(self._writer.settings)
        with nullcontext() if session is None or self._is_async else session.turns.take():
            yield direct_call(self._process_group, False, self._purpose, method).ranks

    def delete(self, step: int) -> None:
        """Delete a step's checkpoint from the nodes' memory and from storage. Call it on all ranks.

        Args:
            step: The training step that the checkpoint was saved at.

        Raises:
            CheckpointNotFound: There is no such checkpoint; on all ranks alike.
            RankFailed: It can't be deleted, as while somebody reads it; on all ranks alike. (A rank
                that failed names itself alone.)
        """
        name = f"step-{_number(step)}"
        self._finish_begun()

        def delete_from_storage(evicted: Sequence[bool]) -> bool:
            return self._delete_from_storage(name) or any(evicted)

        evict, what = partial(self._evict, name), f"deleting {name}"
        if not self._from_all_ranks(what, evict, delete_from_storage):
            available = [one.name for one in self.list()]
            raise CheckpointNotFound(name, f"job {self._writer.settings.job}", available, [])

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

    # -- how often to save -------------------------------------------------------------------------

    def advice(self, mtbf: float | str, *, recovery_seconds: float = 0.0) -> Advice:
        """Return how often to save, by what saves and flushes have taken here.

        Args:
            mtbf: Mean time between failures of the whole job: seconds, or a text such as "12h".
            recovery_seconds: From a failure until training goes on.

        Raises:
            ConfigError: Nothing has been saved yet, or mtbf is no duration.
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
        """Return the steps this rank would leave until the next save; the coordinator's count."""
        if not isinstance(self._interval, Auto):
            return self._interval
        seconds = self._pace.step_seconds(step)
        if not (self._pace.blocking and seconds):
            return self._interval.at_least_steps
        return steps_between(self._interval, median(self._pace.blocking), seconds)

    # -- the end -----------------------------------------------------------------------------------

    def close(
        self,
        flush: bool = True,
        *,
        progress: bool = True,
        persist_newest: bool = True,
        keep_slots: bool = False,
    ) -> None:
        """Wait until storage has what it should have, then give back memory.

        The newest checkpoint goes to storage as well, whichever saves `persist=` has chosen; only
        persist=False keeps it in memory. What `keep_memory` keeps stays in memory, for a restart.
        Closing twice is fine.

        Args:
            flush: False doesn't wait for storage; the agent goes on flushing. What this process has
                under way is waited for: a save, copies to other nodes, checksums for 10 s at most.
            progress: Show progress on standard error if that is a terminal.
            persist_newest: False leaves the newest checkpoint to `persist=`, like any other.
            keep_slots: For a restart within the process, as for `MemoryStorageWriter.close`; an
                exception that leaves the `with` block does that.

        Raises:
            FlushFailed: Storage refuses a checkpoint, which stays in memory (logged with
                on_error="warn").
        """
        try:
            try:
                if flush:
                    self._crash_loop.end()
                self._crash_loop.before = None
                self._finish_begun()
            finally:
                self._writer.close(
                    flush,
                    progress=progress,
                    persist_newest=persist_newest,
                    keep_slots=keep_slots,
                )
        except FlushFailed as error:
            if self._raises:
                raise
            log.warning("%s", error)
        finally:
            self._preemption.uninstall()
            self._feed.close()

    def __enter__(self) -> CheckpointManager:
        self._preemption.install()  # a manager may be entered again once it was closed
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(flush=kind is None, keep_slots=kind is not None)

    def _reader(self) -> MemoryStorageReader:
        chosen = self._writer.settings
        return MemoryStorageReader(
            chosen.url,
            memory_root=chosen.memory_root,
            job=chosen.job,
            storage_options=chosen.storage_options,
            transport=chosen.transport,
            process_group=self._process_group,
        )

    @property
    def _purpose(self) -> Purpose:
        """Purpose of the ranks' connections: the writer's, unless calls here run beside saves."""
        return self._writer.settings.purpose("manage" if self._is_async else "save")

    def _found_behind(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return what has failed, and what was rejected, behind training since the last call."""
        return self._troubles(), self._rejections()

    def _troubles(self) -> tuple[str, ...]:
        """Find what has failed behind training on this node since the last call, and log it.

        Failures of checkpoints that an earlier run has left are logged only: its agent may still
        try them, after its trainers have died and so without a right to the storage.
        """
        session = open_session(self._writer.settings)
        found = _failures(None if session is None else session.memory)
        new = [one for one in found if (one.save_id, one.error) not in self._said]
        self._said |= {(one.save_id, one.error) for one in found}
        if os.environ.get("LOCAL_RANK", "0") == "0":
            for one in new:
                log.warning("%s", one)
        own = "" if session is None else saving_run(session.memory.directory)
        return tuple(str(one) for one in new if one.run == own)

    def _rejections(self) -> tuple[str, ...]:
        """Find what has been rejected behind training on this node since the last call."""
        session = open_session(self._writer.settings)
        held = [] if session is None else session.memory.checkpoints()
        new = [one for one in held if one.rejected and (one.name, one.rejected) not in self._said]
        self._said |= {(one.name, one.rejected) for one in new}
        return tuple(f"{one.name}: rejected: {one.rejected}" for one in new)

    def _raise_on_all_ranks(self, troubles: Sequence[str]) -> None:
        """Raise FlushFailed, with on_error="raise", on all ranks if a node has had trouble."""
        if not self._raises:
            return
        with self._ranks_in_turn("save()") as ranks, leaving_on_error(ranks):
            own = {ranks.rank: troubles[0]} if troubles else {}
            all_troubles = ranks.all_reduce(own, operator.or_)
        if all_troubles:
            rank = min(all_troubles)
            name, _, text = all_troubles[rank].partition(": ")
            raise FlushFailed(name, f"{text} (rank {rank})")


@dataclass(frozen=True, slots=True)
class _Failure:
    """A flush or a copy that has failed behind training; as text for people."""

    name: str
    save_id: str
    run: str
    error: str

    def __str__(self) -> str:
        return f"{self.name}: {self.error}"


def _failures(memory: JobMemory | None) -> list[_Failure]:
    """Return what has failed behind training on this node.

    Copies that were never begun, or are fewer because there are fewer nodes, have not failed.
    """
    found = []
    for held in memory.checkpoints() if memory is not None else ():
        one, copies = status_of(held), held.replication
        error = (
            one.error
            if one.state is State.FAILED
            else copies.error
            if copies.outcome == Outcome.FAILED
            else ""
        )
        if error:
            found.append(_Failure(one.name, one.save_id, held.manifest.run, error))
    return found


class _Pace:
    """The interval of saves, and the seconds that steps and saves take."""

    def __init__(self, pause: int) -> None:
        self.pause = pause
        self._last: int | None = None
        self._ended = 0.0
        self._is_warm = False
        self.blocking: deque[float] = deque(maxlen=_MEASURED)

    def is_due(self, step: int) -> bool:
        """Tell whether a save is due.

        Steps that went back, after a restore by hand, count from there.
        """
        return self._last is None or not 0 <= step - self._last < self.pause

    def step_seconds(self, step: int) -> float:
        """Return the seconds that a step has taken since the last save; 0.0 if unknown."""
        if self._last is None or step <= self._last or not self._ended:
            return 0.0
        return (time.monotonic() - self._ended) / (step - self._last)

    def passed(self, step: int) -> None:
        """Count from a step that was restored, or couldn't be saved: the next save is due later."""
        self._last, self._ended = step, time.monotonic()

    def forget(self) -> None:
        """Count from no step: the next save is due."""
        self._last = None

    def saved(self, step: int, seconds: float, pause: int) -> None:
        if self._is_warm:  # The first save makes slots and plans, which later ones find.
            self.blocking.append(seconds)
        self._is_warm, self.pause = True, pause
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
            f"{report.checkpoint_id} is loaded, but nobody said which step it is of: "
            f"a manager saved no such checkpoint"
        )
    return int(match[1])
