"""`follow`: take a training run's checkpoints from a process that is no part of the run."""

from __future__ import annotations

import operator
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any

import torch.distributed as dist

from dcp_mem.comm import Ranks
from dcp_mem.comm.agreement import is_shared, leaving_on_error
from dcp_mem.comm.bridge.calls import DcpCall, direct_call
from dcp_mem.common.gc_pause import collector_paused
from dcp_mem.common.log import log
from dcp_mem.errors import ConfigError, NoRecoverableCheckpoint, RankFailed, StorageUnavailable
from dcp_mem.following.checkpoint import FollowedCheckpoint
from dcp_mem.following.hold import HoldingReader
from dcp_mem.following.look import Complaints, Lookout, Verdict
from dcp_mem.loading.candidates import open_next
from dcp_mem.loading.elect import elect_together
from dcp_mem.loading.load_attempt import LoadAttempt
from dcp_mem.planning.tensor_choice import TensorChoice
from dcp_mem.policy.election import ElectedCheckpoint
from dcp_mem.policy.following import Identity, identity, unseen
from dcp_mem.policy.order import Place
from dcp_mem.reader import RecoveryReport

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
        self._reader = HoldingReader(root, process_group, options)
        self._complaints = Complaints()
        self._lookout = Lookout(
            self._reader,
            self._complaints,
            only_durable=only_durable,
            until_ended=until_ended,
            timeout=timeout,
        )
        self._state_dict, self._weights_only, self._skip = state_dict, weights_only, skip
        self._only_durable, self._poll_seconds = only_durable, poll_seconds
        self._process_group = process_group
        self._is_stopped = False
        self._last: Place | None = None
        self._damaged: set[Identity] = set()

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _next(self) -> FollowedCheckpoint | None:
        """Return the next checkpoint; None where the iteration ends.

        1. Look at memory on every rank, at storage on rank 0; one gather, one broadcast.
        2. Wait, and look again, for as long as nothing is new.
        3. Elect and open the newest that is newer than the last one.
        4. Load it, if a state dict is given.
        5. Where nothing could be taken: end, if the run or the time is over, or go on waiting.
        """
        call = direct_call(self._process_group, False, self._reader.settings.purpose("follow"))
        begun = time.monotonic()
        while True:
            with leaving_on_error(call.ranks):
                verdict = self._lookout.look_together(
                    call.ranks, begun=begun, last=self._last, is_stopped=self._is_stopped
                )
                self.close()  # Not before: the last checkpoint was held for all ranks.
                if verdict is Verdict.END:
                    return None
                load = self._open_newest(call) if verdict is Verdict.TAKE else None
            taken = None if load is None else self._taken(load)
            if taken is not None:
                return taken
            with leaving_on_error(call.ranks):
                if verdict is Verdict.TAKE:
                    verdict = self._lookout.settle_together(
                        call.ranks, begun=begun, last=self._last
                    )
                    if verdict is Verdict.END:
                        return None
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
        """Load what is open, if a state dict is given; an older new one where it is damaged.

        Returns None where all that is new is damaged, or storage has failed meanwhile.
        """
        if self._state_dict is None:
            # What the loop body loads is this checkpoint, from any copy of it, or nothing.
            choice = load.tried[-1]
            eligible = partial(self._same_save, choice)
            load.request = replace(load.request, wanted=choice.name, eligible=eligible)
            return self._described(load)
        known = len(load.reasons)
        try:
            report = self._reader.load_held(self._state_dict, self._weights_only, self._skip)
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
        if report is not None:
            return FollowedCheckpoint(
                self._reader, load, step=report.step, metrics=report.metrics, report=report
            )
        assert self._reader.held is not None
        found = self._reader.held.opened.description
        return FollowedCheckpoint(self._reader, load, step=found.step, metrics=found.metrics)

    def _say_passed_over(self, reasons: Sequence[str]) -> None:
        for reason in reasons:
            self._complaints.make(f"{reason}; waiting for the next checkpoint")


def _is_passing(ranks: Ranks, error: Exception) -> bool:
    """Tell whether an error that all ranks raise comes of a storage that doesn't answer just now.

    Such a rank has its own error; the others know only that it has failed.
    """
    try:
        return ranks.all_reduce(isinstance(error, StorageUnavailable), operator.or_)
    except RankFailed:
        return False
