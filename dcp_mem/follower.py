"""`follow`: take a training run's checkpoints from a process that is no part of the run."""

from __future__ import annotations

import operator
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from types import TracebackType
from typing import Any

import torch.distributed as dist

from dcp_mem.comm import Ranks
from dcp_mem.comm.agreement import from_all_ranks, is_shared, known_to_all, leaving_on_error
from dcp_mem.comm.dcp_call import DcpCall, direct_call
from dcp_mem.common.gc_pause import collector_paused
from dcp_mem.common.log import log
from dcp_mem.errors import (
    ConfigError,
    DcpMemError,
    MemoryRootRefused,
    MemoryUnavailable,
    NoRecoverableCheckpoint,
    RankFailed,
    StorageRefused,
    StorageUnavailable,
    WaitTimeout,
)
from dcp_mem.functional import load_or_raise_cause
from dcp_mem.loading.candidates import open_next
from dcp_mem.loading.elect import elect_together
from dcp_mem.loading.load_attempt import LoadAttempt
from dcp_mem.loading.open import OpenCheckpoint
from dcp_mem.loading.request import Eligible, Places
from dcp_mem.loading.sources.memory import MemorySource
from dcp_mem.loading.watch import StorageWatch
from dcp_mem.memory.job import JobMemory, jobs_in
from dcp_mem.memory.links import LinkedCheckpoint
from dcp_mem.memory.locks import job_is_live, run_in
from dcp_mem.planning.tensor_choice import TensorChoice
from dcp_mem.policy.election import ElectedCheckpoint
from dcp_mem.policy.following import Identity, identity, unseen
from dcp_mem.policy.order import Place
from dcp_mem.reader import MemoryStorageReader, RecoveryReport
from dcp_mem.storage import Storage
from dcp_mem.storage.leases import read_lease
from dcp_mem.storage.routes import open_storage

_LOOK_AGAIN_SECONDS = 10.0
"""Pause after which checkpoints are surveyed though nothing seems to have changed."""
_COMPLAIN_SECONDS = 10.0
"""Time after which it is said that there is nothing to follow so far."""
_LONGEST_NAP = 0.1


def follow(
    root: str | os.PathLike[str] | None,
    state_dict: dict[str, Any] | None = None,
    *,
    only_durable: bool = False,
    until_ended: bool = False,
    timeout: float | None = None,
    poll_seconds: float = 1.0,
    weights_only: bool = True,
    skip: TensorChoice | None = None,
    process_group: dist.ProcessGroup | None = None,
    **options: Any,
) -> Follower:
    """Follow a training run: iterate over its checkpoints as they come, the newest first.

    For evaluators, inference servers and rollout workers, which are no part of the run. The first
    checkpoint is the newest that there is; whoever is slower than the run skips to the newest each
    time. A checkpoint comes as soon as the memory of this process's nodes has it whole, or storage.
    What was rejected doesn't come. The run may be restarted meanwhile.

        for checkpoint in dcp_mem.follow("abfs://ckpts/run-42", {"model": model.state_dict()}):
            report(checkpoint.step, evaluate(model))

    With `state_dict`, each checkpoint is loaded into it, in place and resharded, before it is
    handed out. One that turns out to be damaged is passed over, with a warning; a storage that
    doesn't answer is asked again. Without it, the loop body calls `checkpoint.load` or
    `checkpoint.files`. Until it is loaded, or the next one is
    asked for, a lease keeps the checkpoint in memory and on storage.

    On several ranks, call it on all of them, and iterate alike: all get the same checkpoints, in a
    process group of their own. Ranks wait for each other at each checkpoint, for $DCP_MEM_TIMEOUT
    (10 min) at most.

    Args:
        root: The run's root on storage, as its writer gets it; None for a job in memory alone,
            with `job=`. It may not exist yet.
        state_dict: As for `dcp_mem.load`: the part of the checkpoint that is wanted.
        only_durable: Take only checkpoints that storage has; their bytes still come from memory
            where that is nearer.
        until_ended: End when the run has been closed on this node, and its last checkpoint was
            taken. A killed run may be restarted, and hasn't ended; nor is known of a run whose
            nodes have no process of the follower's.
        timeout: Seconds to wait for the next checkpoint; then the iteration ends. None waits for
            ever.
        poll_seconds: Pause between two looks at memory and storage.
        weights_only: As in `dcp_mem.load`.
        skip: As in `dcp_mem.load`.
        process_group: The ranks that follow together; default all of this process's.
        **options: Further arguments of `MemoryStorageReader`: memory_root, job, storage_options,
            verify, broadcast, transport.

    Returns:
        What to iterate over; `stop` ends it.

    Raises:
        ConfigError: An argument can't work, or the job in memory has another root.
        MemoryRootRefused: The memory root is another user's, or isn't safe.
        StorageRefused: Storage can't be read.
        WaitTimeout: `timeout` is over, and there was no checkpoint at all.
        RankFailed: Another rank has failed, or has left the iteration.
    """
    return Follower(
        root,
        state_dict,
        only_durable=only_durable,
        until_ended=until_ended,
        timeout=timeout,
        poll_seconds=poll_seconds,
        weights_only=weights_only,
        skip=skip,
        process_group=process_group,
        options=options,
    )


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """The files of a checkpoint, for a program that takes a path.

    Attributes:
        path: A directory of links in tmpfs, which the program may delete and must not write to;
            or the checkpoint's directory or URL on storage, which it must leave alone.
        pass_fds: For `subprocess`: a program that inherits these keeps the links for as long as it
            runs, even if this process is killed.
    """

    path: str
    pass_fds: tuple[int, ...] = ()


class FollowedCheckpoint:
    """A checkpoint that a follower hands out.

    Attributes:
        name: The checkpoint id.
        save_id: Of the save; "" for a checkpoint that torch's own writer made.
        step: The training step; None where the writer wasn't told.
        metrics: The figures given with the save.
        is_durable: Whether storage has it.
        report: What was loaded, and from where; None as long as nothing is.
    """

    def __init__(
        self,
        follower: Follower,
        choice: ElectedCheckpoint,
        step: int | None,
        metrics: Mapping[str, float],
        report: RecoveryReport | None = None,
    ) -> None:
        """Describe a checkpoint.

        Args:
            follower: Holds it.
            choice: What was elected.
            step: The training step.
            metrics: The figures given with the save.
            report: What was loaded already.
        """
        self.name, self.save_id = choice.name, choice.save_id
        self.step, self.metrics, self.report = step, metrics, report
        self.is_durable = choice.storage
        self._follower = follower

    def load(
        self,
        state_dict: dict[str, Any],
        *,
        weights_only: bool = True,
        skip: TensorChoice | None = None,
    ) -> RecoveryReport:
        """Load into a state dict, in place, and end the lease. Call it on all ranks, and once.

        Args:
            state_dict: As for `dcp_mem.load`: the part of the checkpoint that is wanted.
            weights_only: As in `dcp_mem.load`.
            skip: As in `dcp_mem.load`.

        Returns:
            What was loaded, and from where.

        Raises:
            ConfigError: It isn't held any more.
            SegmentCorrupt: It is damaged, and no source has these bytes whole. Take the next one.
            RankFailed: It is damaged on another rank, or that has failed otherwise.
        """
        self._follower._held(self)
        self.report = self._follower._read(state_dict, weights_only, skip)
        return self.report

    @contextmanager
    def files(self) -> Iterator[CheckpointFiles]:
        """Yield where a program finds the checkpoint, until the end of the block.

        Where all of it lies in this node's memory, that is a directory of links there; else where
        it lies on storage. torch's readers load both.

        Raises:
            ConfigError: It isn't held any more, or neither this node's memory nor storage has all
                of it.
            DcpMemError: Its files can't be linked.
        """
        with self._follower._files(self) as files:
            yield files

    def release(self) -> None:
        """End the lease, so that memory may recycle the checkpoint. Releasing twice is fine."""
        if self._follower._handed_out is self:
            self._follower._release()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"


class _HoldingReader(MemoryStorageReader):
    """A reader that loads what a follower has opened, and keeps its view of memory and storage."""

    def __init__(
        self,
        root: str | os.PathLike[str] | None,
        process_group: dist.ProcessGroup | None,
        options: Mapping[str, Any],
    ) -> None:
        super().__init__(root, process_group=process_group, record=False, **options)
        self._memory: JobMemory | None = None
        self._storage: Storage | None = None
        if self.settings.url is not None:
            self._storage = open_storage(self.settings.url, self.settings.storage_options)
        self.watch = StorageWatch(self._storage)
        self.linked: LinkedCheckpoint | None = None

    def memory(self) -> JobMemory | None:
        """Return the job's memory on this node; None where it has none, and none is made."""
        chosen = self.settings
        slots = os.path.join(chosen.memory_root, chosen.job, ".slots")
        if not os.path.isdir(slots):
            self._memory = None
        elif self._memory is None:
            self._memory = JobMemory(chosen.memory_root, chosen.job)
        return self._memory

    def _places(self) -> Places:
        return Places(self.memory(), self._storage, self.settings.job)

    def attempt(self, call: DcpCall, eligible: Eligible) -> LoadAttempt:
        """Return a load that is about to begin.

        Args:
            call: The ranks that load.
            eligible: Returns the candidates that will do.
        """
        self._is_coordinator = call.rank == 0
        request = replace(self._request(call, time.monotonic(), True), eligible=eligible)
        return LoadAttempt(request, self.watch)

    def hold(self, load: LoadAttempt, opened: OpenCheckpoint) -> None:
        """Keep an open checkpoint, for the next load or until `close`.

        Its files in this node's memory are linked, so that no save has to wait for this process.

        Args:
            load: Has opened it.
            opened: What it has opened.
        """
        self.close()
        self._load, self._opened = load, opened
        source = next((one for one in opened.sources if isinstance(one, MemorySource)), None)
        if source is None or load.memory is None:
            return
        try:
            self.linked = load.memory.link(source.checkpoint, source.files)
            damaged = load.damaged_ranks(source.checkpoint)
            linked = MemorySource(self.linked.local, load.memory.node, damaged)
        except (OSError, DcpMemError) as error:
            log.info("%s stays leased: its files can't be linked: %s", opened.choice.name, error)
            self._end_links()
            return
        sources = tuple(linked if one is source else one for one in opened.sources)
        self._opened = replace(opened, sources=sources)
        source.close()

    def close(self) -> None:
        """Let go of the open checkpoint. Closing twice is fine."""
        super().close()
        self._end_links()

    def _end_links(self) -> None:
        linked, self.linked = self.linked, None
        if linked is not None:
            linked.close()

    @property
    def held(self) -> tuple[LoadAttempt, OpenCheckpoint] | None:
        """The open checkpoint, and what has opened it; None where there is none."""
        load, opened = self._load, self._opened
        return None if load is None or opened is None else (load, opened)

    def _open(self, *_: object, weights_only: bool) -> tuple[LoadAttempt, OpenCheckpoint]:
        assert self.held is not None
        load, opened = self.held  # closed by what follows, however that ends
        load.request = replace(load.request, started=time.monotonic(), weights_only=weights_only)
        return load, opened


class _Verdict(Enum):
    """What the ranks do after a look."""

    WAIT = "wait"
    TAKE = "take"  # there may be something new
    END = "end"


@dataclass(frozen=True, slots=True)
class _Look:
    """What one rank has seen.

    Attributes:
        is_news: Whether its node's memory has something else than at the last survey.
        is_stopped: Whether it was told to stop.
        run: Token of the run that saves, or has saved, on its node; None where there is none.
        has_ended: Whether that run has ended.
    """

    is_news: bool
    is_stopped: bool
    run: str | None = None
    has_ended: bool = False


class Follower:
    """Iterates over the checkpoints of a training run as they come; `follow` makes it.

    Iterating again goes on where the last iteration has ended.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | None,
        state_dict: dict[str, Any] | None,
        *,
        only_durable: bool,
        until_ended: bool,
        timeout: float | None,
        poll_seconds: float,
        weights_only: bool,
        skip: TensorChoice | None,
        process_group: dist.ProcessGroup | None,
        options: Mapping[str, Any],
    ) -> None:
        """Check the arguments; nothing is looked at yet.

        Args:
            root: As for `follow`.
            state_dict: As for `follow`.
            only_durable: As for `follow`.
            until_ended: As for `follow`.
            timeout: As for `follow`.
            poll_seconds: As for `follow`.
            weights_only: As for `follow`.
            skip: As for `follow`.
            process_group: As for `follow`.
            options: Further arguments of the reader.
        """
        if timeout is not None and not timeout >= 0:
            raise ConfigError(f"timeout={timeout!r}: give seconds, or None to wait for ever")
        if not poll_seconds > 0:
            raise ConfigError(f"poll_seconds={poll_seconds!r}: give seconds above 0")
        if only_durable and root is None:
            raise ConfigError("only_durable=True: without a root nothing becomes durable")
        self._reader = _HoldingReader(root, process_group, options)
        self._state_dict, self._weights_only, self._skip = state_dict, weights_only, skip
        self._only_durable, self._until_ended = only_durable, until_ended
        self._timeout, self._poll_seconds = timeout, poll_seconds
        self._process_group = process_group
        self._is_stopped = False
        self._memory_seen: object = None
        self._surveyed_at = 0.0
        self._ended_since: float | None = None
        self._last: Place | None = None
        self._damaged: set[Identity] = set()
        self._handed_out: FollowedCheckpoint | None = None
        self._complaints: set[str] = set()

    # -- iterating ---------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[FollowedCheckpoint]:
        """Yield checkpoints as they come, each under a lease until the next one is asked for."""
        try:
            while (checkpoint := self._next()) is not None:
                yield checkpoint
                del checkpoint
        finally:
            self._release()

    def stop(self) -> None:
        """End the iteration before the next checkpoint, on all ranks; for signal handlers.

        A loop body that is running goes on to its end.
        """
        self._is_stopped = True

    def close(self) -> None:
        """End the lease on the checkpoint that was handed out last."""
        self._release()

    def __enter__(self) -> Follower:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._release()

    def _next(self) -> FollowedCheckpoint | None:
        """Return the next checkpoint; None where the iteration ends.

        1. Look at memory on every rank, at storage on rank 0; one gather, one broadcast.
        2. Wait, and look again, for as long as nothing is new.
        3. Elect and open the newest that is newer than the last one.
        4. Load it, if a state dict is given. Where that fails for damage, go on waiting.
        """
        call = direct_call(self._process_group, False, f"follow {self._reader.settings.job}")
        begun = time.monotonic()
        while True:
            with leaving_on_error(call.ranks):
                verdict = self._look_together(call.ranks, begun)
                self._release()  # Not before: the last checkpoint was held for all ranks.
                if verdict is _Verdict.END:
                    return None
                load = self._open_newest(call) if verdict is _Verdict.TAKE else None
            taken = None if load is None else self._taken(load)
            if taken is not None:
                self._handed_out = taken
                return taken
            with leaving_on_error(call.ranks):
                self._nap()

    def _nap(self) -> None:
        until = time.monotonic() + self._poll_seconds
        while not self._is_stopped and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, _LONGEST_NAP))

    # -- looking -----------------------------------------------------------------------------------

    def _look_together(self, ranks: Ranks, begun: float) -> _Verdict:
        what = f"following {self._reader.settings.job}"
        verdict = from_all_ranks(ranks, what, self._look, lambda looks: self._decide(looks, begun))
        if isinstance(verdict, DcpMemError):
            raise known_to_all(verdict)
        return verdict

    def _look(self) -> _Look:
        """Look at this node's memory. Nothing is leased: saves must not mistake this for a load."""
        memory = self._reader.memory()
        if memory is None:
            is_news = self._has_changed(frozenset())
            return _Look(is_news, self._is_stopped)
        run = run_in(memory.directory)
        self._refuse_another_root(run.url)
        is_live = job_is_live(memory.directory)
        try:
            found = memory.checkpoints()
        except FileNotFoundError:  # the job's memory has just been reclaimed
            found = []
        is_pending = any(one.pending for one in found)
        seen = frozenset(
            (one.name, one.manifest.save_id, one.rejected, one.replication.outcome, one.pending)
            for one in found
        )
        return _Look(
            is_news=self._has_changed(seen),
            is_stopped=self._is_stopped,
            run=run.token,
            has_ended=run.has_ended and not is_live and not is_pending,
        )

    def _has_changed(self, seen: object) -> bool:
        is_due = time.monotonic() - self._surveyed_at > _LOOK_AGAIN_SECONDS
        if seen == self._memory_seen and not is_due:
            return False
        self._memory_seen, self._surveyed_at = seen, time.monotonic()
        return True

    def _refuse_another_root(self, url: str) -> None:
        chosen = self._reader.settings
        if chosen.url is None or not url or _is_same_place(url, chosen.url):
            return
        raise ConfigError(
            f"job {chosen.job!r} in {chosen.memory_root} is that of {url}, not of {chosen.url}: "
            "give the job= or the root of the run that you mean, or another memory_root="
        )

    def _decide(self, looks: Sequence[_Look], begun: float) -> _Verdict | DcpMemError:
        """Look at storage, and decide for all ranks; on rank 0."""
        watch = self._reader.watch
        is_news = watch.look() or any(look.is_news for look in looks)
        if any(look.is_stopped for look in looks):
            return _Verdict.END
        is_hopeless = isinstance(watch.error, StorageRefused) and not watch.seen_at
        if is_hopeless and all(look.run is None for look in looks):
            assert isinstance(watch.error, StorageRefused)
            return watch.error
        if watch.error is not None:
            self._complain(
                f"{watch.error}; following what memory has until storage answers again",
                about=type(watch.error).__name__,
            )
        has_ended = self._until_ended and self._has_ended(looks)
        if is_news:
            return _Verdict.TAKE
        if has_ended:
            return _Verdict.END
        waited = time.monotonic() - begun
        if self._timeout is not None and waited >= self._timeout:
            if self._last is None:
                return WaitTimeout(f"after {self._timeout:g} s there is {self._nothing()}")
            log.info("no newer checkpoint within %g s", self._timeout)
            return _Verdict.END
        if self._last is None and waited >= _COMPLAIN_SECONDS:
            self._complain(f"there is {self._nothing()}; waiting for it")
        return _Verdict.WAIT

    def _has_ended(self, looks: Sequence[_Look]) -> bool:
        """Tell whether the run has ended, and everything of it was there to be seen."""
        known = [look for look in looks if look.run is not None]
        # An earlier run may have left memory on this node, and this one runs elsewhere.
        last = "" if self._last is None else self._last.run
        is_of_run = not last or any(look.run == last for look in known)
        if not known or not all(look.has_ended for look in known) or not is_of_run:
            self._ended_since = None
            return False
        if self._ended_since is None:
            self._ended_since = time.monotonic()
        watch = self._reader.watch
        return self._reader.settings.url is None or (
            watch.error is not None or watch.seen_at > self._ended_since
        )

    def _nothing(self) -> str:
        """Return what to say as long as there is nothing to follow."""
        chosen = self._reader.settings
        try:
            others = jobs_in(chosen.memory_root)
        except (MemoryRootRefused, MemoryUnavailable):
            others = []
        there = f" (jobs there: {', '.join(others[:8])})" if others else ""
        where = f"{chosen.memory_root} for job {chosen.job}{there}"
        storage = f", nor in {chosen.url}" if chosen.url is not None else ""
        kind = "durable checkpoint" if self._only_durable else "checkpoint"
        return (
            f"no {kind} that can be taken in {where}{storage}. Path, job= and memory_root= must be "
            "those that the run's writer was given"
        )

    def _complain(self, text: str, about: str = "") -> None:
        """Log a warning, unless one about the same has been logged before."""
        if (about or text) not in self._complaints:
            self._complaints.add(about or text)
            log.warning("%s", text)

    # -- taking ------------------------------------------------------------------------------------

    def _open_newest(self, call: DcpCall) -> LoadAttempt | None:
        """Elect and open the newest checkpoint that is new; None where there is none after all."""
        with collector_paused():
            load = self._reader.attempt(call, self._eligible)
            plan = elect_together(load, load.search)
            load.adopt(plan)
            try:
                opened = open_next(load)
            except NoRecoverableCheckpoint:
                self._say_passed_over(load.reasons[len(plan.reasons) :])
                return None
        self._reader.hold(load, opened)
        return load

    def _eligible(self, choices: Sequence[ElectedCheckpoint]) -> Sequence[ElectedCheckpoint]:
        return unseen(choices, self._last, self._damaged, only_durable=self._only_durable)

    def _taken(self, load: LoadAttempt) -> FollowedCheckpoint | None:
        """Load what is open, if a state dict is given; an older new one where it is damaged.

        Returns:
            None where all that is new is damaged, or storage has failed meanwhile.
        """
        if self._state_dict is None:
            # What the loop body loads is this checkpoint, or nothing.
            load.request = replace(load.request, wanted=load.tried[-1].name)
            return self._described(load)
        known = len(load.reasons)
        try:
            report = self._read(self._state_dict, self._weights_only, self._skip)
        except NoRecoverableCheckpoint:
            self._damaged.update(map(identity, load.tried))
            self._say_passed_over(load.reasons[known:])
            return None
        except Exception as error:
            if not is_shared(error) or not _is_passing(load.ranks, error):
                raise
            log.warning("%s is not loaded: %s; trying again", load.tried[-1].name, error)
            return None
        self._damaged.update(map(identity, load.tried[:-1]))
        return self._described(load, report)

    def _described(
        self, load: LoadAttempt, report: RecoveryReport | None = None
    ) -> FollowedCheckpoint:
        choice = load.tried[-1]
        self._last = choice.place
        if report is not None:
            return FollowedCheckpoint(self, choice, report.step, report.metrics, report)
        assert self._reader.held is not None
        description = self._reader.held[1].description
        return FollowedCheckpoint(self, choice, description.step, description.metrics)

    def _say_passed_over(self, reasons: Sequence[str]) -> None:
        for reason in reasons:
            self._complain(f"{reason}; waiting for the next checkpoint")

    # -- what was handed out -----------------------------------------------------------------------

    def _read(
        self, state_dict: dict[str, Any], weights_only: bool, skip: TensorChoice | None
    ) -> RecoveryReport:
        try:
            load_or_raise_cause(
                state_dict,
                storage_reader=self._reader,
                process_group=self._process_group,
                weights_only=weights_only,
                skip=skip,
            )
        finally:
            self._reader.close()
        return self._reader.report()

    def _release(self) -> None:
        self._handed_out = None
        self._reader.close()

    def _held(self, checkpoint: FollowedCheckpoint) -> tuple[LoadAttempt, OpenCheckpoint]:
        held = self._reader.held
        if held is None or self._handed_out is not checkpoint:
            raise ConfigError(
                f"{checkpoint.name} is held no more: it has been loaded or released, or the next "
                "checkpoint has been asked for"
            )
        return held

    @contextmanager
    def _files(self, checkpoint: FollowedCheckpoint) -> Iterator[CheckpointFiles]:
        load, _ = self._held(checkpoint)
        linked = self._reader.linked
        if linked is not None and load.memory is not None and linked.is_whole:
            segments = [one.file for one in linked.local.manifest.segments]
            # The program may do away with these.
            with load.memory.link(linked.local, segments) as links:
                links.add_stock_metadata()
                yield CheckpointFiles(links.local.directory, (links.descriptor,))
            return
        if not checkpoint.is_durable or load.storage is None:
            raise ConfigError(
                f"this node's memory hasn't all of {checkpoint.name}, nor has storage so far: "
                "only_durable=True waits for storage"
            )
        # Other ranks may let go of the checkpoint earlier than this one.
        lease = read_lease(load.storage, checkpoint.name)
        try:
            yield CheckpointFiles(f"{load.storage.url}/{checkpoint.name}")
        finally:
            if lease is not None:
                lease.close()


def _is_passing(ranks: Ranks, error: Exception) -> bool:
    """Tell whether an error that all ranks raise comes of a storage that doesn't answer just now.

    Such a rank has its own error; the others know only that it has failed.
    """
    try:
        return ranks.all_reduce(isinstance(error, StorageUnavailable), operator.or_)
    except RankFailed:
        return False


def _is_same_place(one: str, other: str) -> bool:
    if one.startswith("/") and other.startswith("/"):
        return os.path.realpath(one) == os.path.realpath(other)
    return one == other
