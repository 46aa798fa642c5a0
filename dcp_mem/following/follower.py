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
from dcp_mem.comm.agreement import is_shared, known_to_all, leaving_on_error
from dcp_mem.comm.bridge.calls import DcpCall
from dcp_mem.common.arguments import takes
from dcp_mem.common.gc_pause import collector_paused
from dcp_mem.common.log import log
from dcp_mem.config import checked_state
from dcp_mem.errors import ConfigError, NoRecoverableCheckpoint, RankFailed, StorageUnavailable
from dcp_mem.following.checkpoint import FollowedCheckpoint
from dcp_mem.following.hold import HoldingReader
from dcp_mem.following.look import Lookout
from dcp_mem.loading.find import elect_together, open_next
from dcp_mem.loading.load_attempt import LoadAttempt
from dcp_mem.options import DEFAULTS, FollowOptions
from dcp_mem.planning.tensor_choice import TensorChoice, repeatable, tensor_rule
from dcp_mem.policy.election import ElectedCheckpoint
from dcp_mem.policy.following import Identity, identity, unseen
from dcp_mem.policy.order import Place
from dcp_mem.reader import RecoveryReport

_LONGEST_NAP = 0.1


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
    lookout = Lookout(reader, only_durable=only_durable, until_ended=until_ended, timeout=timeout)
    load = None if state_dict is None else partial(reader.load_held, state_dict, weights_only, skip)
    return Follower(reader, lookout, load, poll_seconds)


class Follower:
    """Iterates over the checkpoints of a training run as they come; `follow` makes it.

    Iterating again goes on where the last iteration has ended.
    """

    def __init__(
        self,
        reader: HoldingReader,
        lookout: Lookout,
        load: Callable[[], RecoveryReport] | None,
        poll_seconds: float,
    ) -> None:
        """`load`: loads what the reader holds; None hands checkpoints out as they lie."""
        self._reader, self._lookout, self._load_held = reader, lookout, load
        self._poll_seconds = poll_seconds
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
                seen = self._lookout.look_together(
                    call.ranks, begun=begun, last=self._last, is_stopped=self._is_stopped
                )
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
        return unseen(choices, self._last, self._damaged, only_durable=self._lookout.only_durable)

    def _same_save(
        self, choice: ElectedCheckpoint, choices: Sequence[ElectedCheckpoint]
    ) -> Sequence[ElectedCheckpoint]:
        same = [one for one in choices if (one.name, one.save_id) == (choice.name, choice.save_id)]
        return unseen(same, None, only_durable=self._lookout.only_durable)

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
            self._lookout.say_once(f"{reason}; waiting for the next checkpoint")


def _is_passing(ranks: Ranks, error: Exception) -> bool:
    """Tell whether an error of all ranks comes of a storage that doesn't answer just now."""
    try:
        return ranks.all_reduce(isinstance(error, StorageUnavailable), operator.or_)
    except RankFailed:
        return False
