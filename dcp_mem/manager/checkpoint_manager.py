"""`CheckpointManager`: what a training loop holds to save, restore and delete its checkpoints."""

from __future__ import annotations

import concurrent.futures
import operator
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from typing_extensions import Unpack

from dcp_mem import functional
from dcp_mem.comm import Ranks, rank_in
from dcp_mem.comm.agreement import attempt, described, leaving_on_error
from dcp_mem.comm.bridge.calls import direct_call
from dcp_mem.comm.bridge.errors import cause_of, is_mistake_of_all
from dcp_mem.common.arguments import takes
from dcp_mem.common.log import log
from dcp_mem.common.values import CheckpointStatus, SaveInfo, State, StateText
from dcp_mem.config import Purpose, checked_metrics, checked_state, checked_step
from dcp_mem.errors import (
    CheckpointNotFound,
    ConfigError,
    DcpMemError,
    FlushFailed,
    NoRecoverableCheckpoint,
    WaitTimeout,
)
from dcp_mem.format.manifest import Manifest
from dcp_mem.functional.stateful import Refusing
from dcp_mem.manager import removal
from dcp_mem.manager.behind import Behind
from dcp_mem.manager.crash_loop import TIMES, CrashLoop
from dcp_mem.manager.feed import Feed
from dcp_mem.manager.options import DEFAULTS, ManagerOptions
from dcp_mem.manager.pace import Pace
from dcp_mem.manager.preemption import Preemption
from dcp_mem.manager.replica_check import ReplicaCheck
from dcp_mem.manager.saved import Saved, name_of, step_of
from dcp_mem.operations.inventory import list_checkpoints
from dcp_mem.options import WriterOptions, of_kind
from dcp_mem.planning.tensor_choice import TensorChoice
from dcp_mem.policy.frequency import Advice
from dcp_mem.reader import MemoryStorageReader, RecoveryReport, reader_of
from dcp_mem.runtime.session import open_session
from dcp_mem.runtime.states import job_memory
from dcp_mem.saving.dcp_takeover import ReturnedMetadata
from dcp_mem.saving.overlap import overlap_of
from dcp_mem.writer import MemoryStorageWriter

_LAST_NUMBER = r"(\d+)\D*$"


@takes(ManagerOptions, DEFAULTS)
class CheckpointManager:
    """Save a training loop's state step by step, keep what retention chooses, restore the newest.

    Make it, and call its methods, on all ranks (of process_group). Checkpoints are called
    `step-<number>`.

    Args:
        path: The job's root on storage: an fsspec URL or a plain path. None keeps checkpoints in
            memory only.
        **options: As in `ManagerOptions`.

    Raises:
        ConfigError: An argument can't work.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        **options: Unpack[ManagerOptions],
    ) -> None:
        own: ManagerOptions = {**DEFAULTS, **options}
        self._pace = Pace(own["save_interval_steps"])
        self._writer = MemoryStorageWriter(path, **of_kind(WriterOptions, options))
        chosen, group = self._writer.settings, options.get("process_group")
        self._process_group = group
        self._raises = own["on_error"] == "raise"
        overlap = options.get("overlap")
        self._overlap = None if overlap is None else overlap_of(overlap)
        self._is_async = own["async_save"] or overlap is not None
        self._begun: tuple[Saved, Future[Metadata]] | None = None
        self._behind = Behind(chosen)
        self._report: RecoveryReport | None = None
        self._feed = Feed(own["trackers"], chosen, group)
        self._replicas = ReplicaCheck(own["compare_replicas"])
        self._crash_loop = CrashLoop(chosen, own["on_crash_loop"], own["crash_loop_steps"])
        self._preemption = Preemption(self._writer, own["preemption"], own["preemption_deadline"])
        self._preemption.install()
        self._is_closed = False

    # -- saving and restoring ----------------------------------------------------------------------

    @takes()
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
        self._refuse_closed("save()")
        number = _number(step)
        self._crash_loop.passed(number)
        saved = Saved(step=number, name=name_of(number), outcome="not due")
        wrong = attempt(lambda: checked_state(state))
        if not (force_persist or self._pace.is_due(number)):
            _ = wrong.value
            return saved
        self._preemption.wait()
        started, until_next = time.monotonic(), self._pace.steps_until_next(number)
        failed = self._finish_begun()
        found = attempt(lambda: (checked_metrics(metrics), dict(wrong.value), *self._behind.look()))
        # The other ranks wait for this one: it takes part, with its error.
        figures, items, troubles, rejections = (
            found.value if found.error is None else ({}, {"": Refusing(found.error)}, (), ())
        )
        troubles = (*failed, *troubles)
        saved = replace(saved, troubles=(*troubles, *rejections))
        save = self._begin if self._is_async else self._save
        try:
            if self._replicas.is_begun:
                with self._ranks_in_turn("save()") as ranks:
                    saved = replace(
                        saved, troubles=(*saved.troubles, *self._replicas.finish(ranks))
                    )
            if self._replicas.is_due():
                items = self._replicas.begin(saved.name, items)
            self._writer._saver.annotate(SaveInfo(number, figures, bool(force_persist), until_next))
            saved = save(saved, items, started)
        except Exception as error:
            # What one rank alone got wrong is no reason to end training, but that it gave no state.
            if wrong.error is not None or is_mistake_of_all(error, self._process_group):
                raise
            return self._failed(replace(saved, seconds=time.monotonic() - started), error)
        self._raise_on_all_ranks(troubles)
        return saved

    def _save(self, saved: Saved, state: dict[str, Any], started: float) -> Saved:
        functional.raising_cause(
            functional.save,
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

    @takes()
    def restore(
        self,
        state: dict[str, Any],
        step: int | None = None,
        *,
        weights_only: bool = True,
        skip: TensorChoice | None = None,
        strict: bool = True,
    ) -> int | None:
        """Load the newest whole checkpoint, or that of a step, into the state.

        Args:
            state: As for `dcp_mem.load`; it is loaded into, in place.
            step: The step to load; None for the newest.
            weights_only: As in `dcp_mem.load`.
            skip: As in `dcp_mem.load`.
            strict: False loads what there is, and leaves as it is what the checkpoint lacks, such
                as optimizers that it was saved without. `report()` has the names: `missing`, and
                `left_out` of what the state lacks.

        Returns:
            The step that was loaded; None, with nothing changed, if there is no checkpoint at all.

        Raises:
            NoRecoverableCheckpoint: There are checkpoints, and none can be loaded. (It raises, so
                that training doesn't start from nothing over them.)
            CheckpointNotFound: The step that was asked for isn't there.
            EntriesMissing: The checkpoint lacks what this rank's state asks for. Other ranks raise
                a RankFailed.
        """
        self._refuse_closed("restore()")
        name = None if step is None else name_of(_number(step))
        self._finish_begun()
        session = open_session(self._writer.settings)
        if session is not None:
            with session.turns.take():  # Another manager of this process may have begun a save.
                pass
        # A step that is asked for is loaded, however often the job has died from it.
        is_resume = name is None and self._crash_loop.is_watched
        if is_resume and self._crash_loop.before is None:
            self._leave_crash_loop()
        with self._reader() as reader:
            try:
                functional.raising_cause(
                    functional.load,
                    state,
                    checkpoint_id=name,
                    storage_reader=reader,
                    process_group=self._process_group,
                    weights_only=weights_only,
                    skip=skip,
                    strict=strict,
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
            with self._ranks_in_turn("reject()") as ranks:
                removal.reject(self._writer.settings, ranks, resumes.name, why)
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
            steps = map(step_of, reader.recoverable())
        return next((step for step in steps if step is not None), None)

    def list(self) -> list[CheckpointStatus]:
        """Return every checkpoint in this node's memory and on storage, newest first."""
        return list_checkpoints(self._writer.settings)

    def status(self) -> Sequence[CheckpointStatus]:
        """Return what became of each checkpoint of this node, newest first.

        Those that have left memory are among them.
        """
        return self._writer.status()

    @takes()
    def wait(
        self,
        step: int | None = None,
        state: State | StateText = State.DURABLE,
        timeout: float | None = None,
        *,
        progress: bool = True,
    ) -> None:
        """Block until a step's checkpoint has reached a state, as `MemoryStorageWriter.wait` does.

        Args:
            step: The training step; None for the newest checkpoint that is meant to reach the
                state.
            state: `State.COMPLETE`, `State.REPLICATED` or `State.DURABLE`, or its text.
            timeout: Seconds; None waits for as long as there is hope.
            progress: Show progress on standard error if that is a terminal.

        Raises:
            DcpMemError: As from `MemoryStorageWriter.wait`.
        """
        name = None if step is None else name_of(_number(step))
        started = time.monotonic()
        self._finish_begun(timeout)
        left = None if timeout is None else max(0.0, timeout - (time.monotonic() - started))
        self._writer.wait(name, state, left, progress=progress)

    @takes()
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
        self._refuse_closed("reject()")
        name = name_of(_number(step))
        self._finish_begun()
        with self._ranks_in_turn("reject()") as ranks:
            removal.reject(self._writer.settings, ranks, name, str(why))

    @contextmanager
    def _ranks_in_turn(self, method: str) -> Iterator[Ranks]:
        """Talk to the other ranks in a method, while no save in the background does."""
        session = open_session(self._writer.settings)
        with nullcontext() if session is None or self._is_async else session.turns.take():
            yield direct_call(self._process_group, False, self._purpose, method).ranks

    @takes()
    def delete(self, step: int) -> None:
        """Delete a step's checkpoint from the nodes' memory and from storage. Call it on all ranks.

        Args:
            step: The training step that the checkpoint was saved at.

        Raises:
            CheckpointNotFound: There is no such checkpoint; on all ranks alike.
            RankFailed: It can't be deleted, as while somebody reads it; on all ranks alike. (A rank
                that failed names itself alone.)
        """
        self._refuse_closed("delete()")
        name = name_of(_number(step))
        self._finish_begun()
        with self._ranks_in_turn("delete()") as ranks:
            removal.delete(self._writer.settings, ranks, name)

    # -- how often to save -------------------------------------------------------------------------

    @takes()
    def advice(self, mtbf: float | str, *, recovery_seconds: float = 0.0) -> Advice:
        """Return how often to save, by what saves and flushes have taken here.

        Args:
            mtbf: Mean time between failures of the whole job: seconds, or a text such as "12h".
            recovery_seconds: From a failure until training goes on.

        Raises:
            ConfigError: Nothing has been saved yet, or mtbf is no duration.
        """
        return self._pace.advice(self.status(), mtbf, recovery_seconds)

    # -- the end -----------------------------------------------------------------------------------

    @takes()
    def close(
        self,
        flush: bool = True,
        *,
        progress: bool = True,
        persist_newest: bool = True,
        keep_slots: bool = False,
    ) -> None:
        """Wait until storage has what it should have, then give back memory.

        It does what `MemoryStorageWriter.close` does, with its arguments, and ends all that the
        manager has under way. After that, `save`, `restore`, `reject` and `delete` are refused,
        until the manager is entered again. Closing twice is fine.

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
            self._is_closed = True

    def __enter__(self) -> CheckpointManager:
        self._preemption.install()  # a manager may be entered again once it was closed
        self._is_closed = self._writer._saver.is_closed = False
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(flush=kind is None, keep_slots=kind is not None)

    def __repr__(self) -> str:
        closed = ", closed" if self._is_closed else ""
        return f"<{type(self).__name__} of {self._writer!r}{closed}>"

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a CheckpointManager can't be pickled: make one in each process")

    def _refuse_closed(self, method: str) -> None:
        if self._is_closed:
            raise ConfigError(
                f"{method} after close(): make the manager again, or enter it again by `with`; "
                "list(), latest(), status() and wait() still answer"
            )

    def _reader(self) -> MemoryStorageReader:
        return reader_of(self._writer.settings, self._process_group)

    @property
    def _purpose(self) -> Purpose:
        """Purpose of the ranks' connections: the writer's, unless calls here run beside saves."""
        return self._writer.settings.purpose("manage" if self._is_async else "save")

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


def _number(step: object) -> int:
    number = checked_step(step)
    if number is None:
        raise ConfigError("step=None: give the number of the training step")
    return number


def _step_of(report: RecoveryReport) -> int:
    match = re.search(_LAST_NUMBER, report.checkpoint_id)
    if report.step is not None:
        return report.step
    if match is None:
        raise ConfigError(
            f"{report.checkpoint_id} is loaded, but nobody said which step it is of: "
            f"a manager saved no such checkpoint"
        )
    return int(match[1])
