"""`follow`: take a training run's checkpoints from a process that is no part of the run."""

from __future__ import annotations

import operator
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist
from typing_extensions import Unpack

from dcp_mem.comm import Ranks
from dcp_mem.comm.agreement import from_all_ranks, is_shared, known_to_all, leaving_on_error
from dcp_mem.comm.bridge.calls import DcpCall
from dcp_mem.common.arguments import takes
from dcp_mem.common.gc_pause import collector_paused
from dcp_mem.common.log import log
from dcp_mem.common.sendable import sendable
from dcp_mem.common.value_class import value_class
from dcp_mem.config import checked_state
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
from dcp_mem.following.checkpoint import FollowedCheckpoint, HoldingReader
from dcp_mem.loading.find import elect_together, open_next
from dcp_mem.loading.load_attempt import LoadAttempt
from dcp_mem.memory.job import jobs_in
from dcp_mem.memory.locks import job_is_live, run_in
from dcp_mem.options import DEFAULTS, FollowOptions
from dcp_mem.planning.tensor_choice import TensorChoice, repeatable, tensor_rule
from dcp_mem.policy.election import ElectedCheckpoint
from dcp_mem.policy.following import Identity, identity, unseen
from dcp_mem.policy.order import Place
from dcp_mem.reader import RecoveryReport

_LONGEST_NAP = 0.1
_MOST_PATIENCE, _PATIENCE_POLLS = 10.0, 10
"""Seconds, and looks, after which checkpoints are surveyed though nothing seems to have changed, or
it is said that there is nothing to follow so far."""


@takes(FollowOptions, DEFAULTS)
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
    **options: Unpack[FollowOptions],
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
        **options: Further options, as in `MemoryStorageReader`.

    Returns:
        What to iterate over; `stop` ends it.

    Raises:
        ConfigError: An argument can't work, or the job in memory has another root.
        MemoryRootRefused: The memory root is another user's, or isn't safe.
        StorageRefused: Storage can't be read.
        WaitTimeout: `timeout` is over, and there was no checkpoint at all.
        RankFailed: Another rank has failed, or has left the iteration.
    """
    if timeout is not None and not timeout >= 0:
        raise ConfigError(f"timeout={timeout!r}: give seconds, or None to wait for ever")
    if not poll_seconds > 0:
        raise ConfigError(f"poll_seconds={poll_seconds!r}: give seconds above 0")
    if only_durable and root is None:
        raise ConfigError("only_durable=True: without a root nothing becomes durable")
    if state_dict is not None:
        checked_state(state_dict)
    skip = repeatable(skip)
    tensor_rule("skip", skip)
    reader = HoldingReader(root, process_group, options)
    load = None if state_dict is None else partial(reader.load_held, state_dict, weights_only, skip)
    return Follower(
        reader,
        load,
        only_durable=only_durable,
        until_ended=until_ended,
        timeout=timeout,
        poll_seconds=poll_seconds,
    )


class Follower:
    """Iterates over the checkpoints of a training run as they come; `follow` makes it.

    Iterating again goes on where the last iteration has ended.
    """

    def __init__(
        self,
        reader: HoldingReader,
        load: Callable[[], RecoveryReport] | None,
        *,
        only_durable: bool,
        until_ended: bool,
        timeout: float | None,
        poll_seconds: float,
    ) -> None:
        """`load`: loads what the reader holds; None hands checkpoints out as they lie."""
        self._reader, self._load_held = reader, load
        self._only_durable, self._until_ended, self._timeout = only_durable, until_ended, timeout
        self._poll_seconds = poll_seconds
        self._patience = min(_MOST_PATIENCE, _PATIENCE_POLLS * poll_seconds)
        self._is_stopped = False
        self._last: Place | None = None
        self._damaged: set[Identity] = set()
        self._memory_seen: object = None
        self._surveyed_at = 0.0
        self._ended_since: float | None = None
        self._said: set[str] = set()

    def __iter__(self) -> Iterator[FollowedCheckpoint]:
        """Yield checkpoints as they come, each under a lease until the next one is asked for."""
        try:
            while (checkpoint := self._next()) is not None:
                yield checkpoint
                del checkpoint
        finally:
            self.close()

    def stop(self) -> None:
        """End the iteration before the next checkpoint, on all ranks; for signal handlers.

        A loop body that is running goes on to its end.
        """
        self._is_stopped = True

    def close(self) -> None:
        """End the lease on the checkpoint that was handed out last."""
        self._reader.close()

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        chosen = self._reader.settings
        return f"<{type(self).__name__} of {chosen.url or 'memory only'}, job {chosen.job}>"

    def _next(self) -> FollowedCheckpoint | None:
        """Return the next checkpoint; None where the iteration ends.

        1. Look at memory on every rank, at storage on rank 0; one gather, one broadcast.
        2. Where there may be something new: elect and open the newest that is newer than the last
           one, and load it, if a state dict is given.
        3. Where nothing could be taken: end, if the run or the time is over, or look again.
        """
        call = self._reader.call()
        begun = time.monotonic()
        while True:
            with leaving_on_error(call.ranks):
                seen = self._look_together(call.ranks, begun)
                self.close()  # Not before: the last checkpoint was held for all ranks.
                load = self._open_newest(call) if seen.may_be_new else None
            taken = None if load is None else self._taken(load)
            if taken is not None or seen.is_stopped:
                return taken
            if seen.is_over and seen.error is not None:
                raise known_to_all(seen.error)
            if seen.is_over:
                return None
            with leaving_on_error(call.ranks):
                self._nap()

    def _nap(self) -> None:
        until = time.monotonic() + self._poll_seconds
        while not self._is_stopped and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, _LONGEST_NAP))

    def _open_newest(self, call: DcpCall) -> LoadAttempt | None:
        """Elect and open the newest checkpoint that is new; None where there is none after all."""
        with collector_paused():
            load = self._reader.attempt(call, self._eligible)
            plan = elect_together(load, load.search)
            load.adopt(plan)
            known = len(load.reasons)
            try:
                opened = open_next(load)
            except NoRecoverableCheckpoint:
                self._say_passed_over(load.reasons[known:])
                return None
        self._reader.hold(load, opened)
        return load

    def _eligible(self, choices: Sequence[ElectedCheckpoint]) -> Sequence[ElectedCheckpoint]:
        return unseen(choices, self._last, self._damaged, only_durable=self._only_durable)

    def _same_save(
        self, choice: ElectedCheckpoint, choices: Sequence[ElectedCheckpoint]
    ) -> Sequence[ElectedCheckpoint]:
        same = [one for one in choices if (one.name, one.save_id) == (choice.name, choice.save_id)]
        return unseen(same, None, only_durable=self._only_durable)

    def _taken(self, load: LoadAttempt) -> FollowedCheckpoint | None:
        """Load what is open, or an older new one where it is damaged; None if none is left."""
        if self._load_held is None:
            # What the loop body loads is this checkpoint, from any copy of it, or nothing.
            choice = load.tried[-1]
            eligible = partial(self._same_save, choice)
            load.request = replace(load.request, wanted=choice.name, eligible=eligible)
            return self._described(load)
        known = len(load.reasons)
        try:
            report = self._load_held()
        except NoRecoverableCheckpoint:
            self._damaged.update(map(identity, load.damaged))
            self._say_passed_over(load.reasons[known:])
            return None
        except Exception as error:
            if not is_shared(error) or not _is_passing(load.ranks, error):
                raise
            log.warning("%s is not loaded: %s; trying again", load.tried[-1].name, error)
            return None
        # What couldn't be opened, or read just now, may be sound.
        self._damaged.update(map(identity, load.damaged))
        return self._described(load, report)

    def _described(
        self, load: LoadAttempt, report: RecoveryReport | None = None
    ) -> FollowedCheckpoint:
        self._last = load.tried[-1].place
        return FollowedCheckpoint(self._reader, load, report)

    def _say_passed_over(self, reasons: Sequence[str]) -> None:
        for reason in reasons:
            self._say_once(f"{reason}; waiting for the next checkpoint")

    # -- what the ranks see, and do next -----------------------------------------------------------

    def _look_together(self, ranks: Ranks, begun: float) -> _Seen:
        """Look, and return what all ranks do next; one gather, one broadcast."""
        seen = from_all_ranks(
            ranks,
            f"following {self._reader.settings.job}",
            self._look,
            partial(self._decide, begun),
        )
        if seen.error is not None and not seen.is_over:
            raise known_to_all(seen.error)
        return seen

    def _say_once(self, text: str, about: str = "") -> None:
        """Log a warning, unless one about the same, or with this text, has been logged before."""
        if (about or text) not in self._said:
            self._said.add(about or text)
            log.warning("%s", text)

    def _look(self) -> _Look:
        """Look at this node's memory. Nothing is leased: saves must not mistake this for a load."""
        memory = self._reader.memory()
        if memory is None:
            return _Look(self._is_survey_due(frozenset()), self._is_stopped)
        run = run_in(memory.directory)
        self._refuse_another_root(run.url)
        is_live = job_is_live(memory.directory)
        found = memory.checkpoints()
        is_pending = any(one.pending for one in found)
        seen = frozenset(
            (one.name, one.manifest.save_id, one.rejected, one.replication.outcome, one.pending)
            for one in found
        )
        return _Look(
            is_survey_due=self._is_survey_due(seen),
            is_stopped=self._is_stopped,
            run=run.token,
            has_ended=run.has_ended and not is_live and not is_pending,
        )

    def _is_survey_due(self, seen: object) -> bool:
        is_long_ago = time.monotonic() - self._surveyed_at > self._patience
        if seen == self._memory_seen and not is_long_ago:
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

    def _decide(self, begun: float, looks: Sequence[_Look]) -> _Seen:
        """Look at storage, and decide for all ranks."""
        watch = self._reader.watch
        may_be_new = watch.look() or any(look.is_survey_due for look in looks)
        if any(look.is_stopped for look in looks):
            return _Seen(is_stopped=True)
        is_unknown = not watch.seen_at and all(look.run is None for look in looks)
        if isinstance(watch.error, StorageRefused) and is_unknown:
            return _Seen(error=watch.error)
        if watch.error is not None:
            self._say_once(
                f"{watch.error}; following what memory has until storage answers again",
                about=type(watch.error).__name__,
            )
        if self._until_ended and self._has_ended(looks):
            return _Seen(may_be_new, is_over=True)
        waited = time.monotonic() - begun
        if self._timeout is not None and waited >= self._timeout:
            if self._last is None:
                error = WaitTimeout(f"after {self._timeout:g} s there is {self._nothing()}")
                return _Seen(may_be_new, is_over=True, error=error)
            return _Seen(may_be_new, is_over=True)
        if self._last is None and waited >= self._patience and not may_be_new:
            self._say_once(f"there is {self._nothing()}; waiting for it")
        return _Seen(may_be_new)

    def _has_ended(self, looks: Sequence[_Look]) -> bool:
        """Tell whether the run has ended, and everything of it was there to be seen."""
        known = [look for look in looks if look.run is not None]
        # An earlier run may have left memory on this node, and this one runs elsewhere.
        last_run = "" if self._last is None else self._last.run
        is_of_run = not last_run or any(look.run == last_run for look in known)
        if not known or not all(look.has_ended for look in known) or not is_of_run:
            self._ended_since = None
            return False
        if self._ended_since is None:
            self._ended_since = time.monotonic()
        watch = self._reader.watch
        if self._reader.settings.url is None or watch.seen_at > self._ended_since:
            return True
        # Memory had its last checkpoint. One that storage alone will do for is waited for, unless
        # storage can't be read at all.
        may_answer = isinstance(watch.error, StorageUnavailable)
        return watch.error is not None and not (self._only_durable and may_answer)

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


@sendable
@value_class
class _Seen:
    """What the ranks do after a look: take what is new, if there is; end where that is in vain."""

    may_be_new: bool = False
    is_over: bool = False
    is_stopped: bool = False
    error: DcpMemError | None = None  # to be raised where nothing can be taken


@sendable
@value_class
class _Look:
    """What one rank has seen."""

    # whether its node's memory has something else than at the last survey, or that was long ago
    is_survey_due: bool
    is_stopped: bool
    # token of the run that saves, or has saved, on its node; None where there is none
    run: str | None = None
    has_ended: bool = False


def _is_passing(ranks: Ranks, error: Exception) -> bool:
    """Tell whether an error of all ranks comes of a storage that doesn't answer just now."""
    try:
        return ranks.all_reduce(isinstance(error, StorageUnavailable), operator.or_)
    except RankFailed:
        return False


def _is_same_place(one: str, other: str) -> bool:
    if one.startswith("/") and other.startswith("/"):
        return os.path.realpath(one) == os.path.realpath(other)
    return one == other
