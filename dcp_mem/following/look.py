"""What a follower's ranks see of a run, and what they do next."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from dcp_mem.comm import Ranks
from dcp_mem.comm.agreement import from_all_ranks, known_to_all, on_rank_0
from dcp_mem.common.log import log
from dcp_mem.common.sendable import sendable
from dcp_mem.errors import (
    ConfigError,
    DcpMemError,
    MemoryRootRefused,
    MemoryUnavailable,
    StorageRefused,
    StorageUnavailable,
    WaitTimeout,
)
from dcp_mem.following.hold import HoldingReader
from dcp_mem.memory.job import jobs_in
from dcp_mem.memory.locks import job_is_live, run_in
from dcp_mem.policy.order import Place

_LOOK_AGAIN_SECONDS = 10.0
"""Pause after which checkpoints are surveyed though nothing seems to have changed."""
_COMPLAIN_SECONDS = 10.0
"""Time after which it is said that there is nothing to follow so far."""


@sendable
class Verdict(Enum):
    """What the ranks do after a look."""

    WAIT = "wait"
    TAKE = "take"  # there may be something new
    END = "end"


@sendable
@dataclass(frozen=True, slots=True)
class _Look:
    """What one rank has seen."""

    # whether its node's memory has something else than at the last survey, or that was long ago
    is_survey_due: bool
    is_stopped: bool
    # token of the run that saves, or has saved, on its node; None where there is none
    run: str | None = None
    has_ended: bool = False


class Complaints:
    """Warnings of a follower, each logged once."""

    def __init__(self) -> None:
        """Begin with none."""
        self._made: set[str] = set()

    def make(self, text: str, about: str = "") -> None:
        """Log a warning, unless one about the same has been logged before.

        `about`: what it is about; "" for a warning that differs from others by its text.
        """
        if (about or text) not in self._made:
            self._made.add(about or text)
            log.warning("%s", text)


class Lookout:
    """Looks at memory on every rank and at storage on rank 0, and decides for all ranks."""

    def __init__(
        self,
        reader: HoldingReader,
        complaints: Complaints,
        *,
        only_durable: bool,
        until_ended: bool,
        timeout: float | None,
    ) -> None:
        """Take the follower's arguments; nothing is looked at yet."""
        self._reader, self._complaints = reader, complaints
        self._only_durable, self._until_ended, self._timeout = only_durable, until_ended, timeout
        self._memory_seen: object = None
        self._surveyed_at = 0.0
        self._ended_since: float | None = None
        self._is_at_end = False

    def look_together(
        self, ranks: Ranks, *, begun: float, last: Place | None, is_stopped: bool
    ) -> Verdict:
        """Look, and return what all ranks do next; one gather, one broadcast.

        `last`: place of the checkpoint that was taken last; None for none so far. Raises
        ConfigError, MemoryRootRefused, StorageRefused, WaitTimeout, RankFailed.
        """
        verdict = from_all_ranks(
            ranks,
            self._purpose(),
            lambda: self._look(is_stopped),
            lambda looks: self._decide(looks, begun, last),
        )
        return _raised_on_all(verdict)

    def settle_together(self, ranks: Ranks, *, begun: float, last: Place | None) -> Verdict:
        """Return whether all ranks wait or end after a take in vain; one broadcast.

        What was there at the last look has been surveyed since then.

        Raises WaitTimeout, RankFailed.
        """
        verdict = on_rank_0(ranks, self._purpose(), lambda: self._wait_or_end(begun, last))
        return _raised_on_all(verdict)

    def _purpose(self) -> str:
        return f"following {self._reader.settings.job}"

    # -- on every rank -----------------------------------------------------------------------------

    def _look(self, is_stopped: bool) -> _Look:
        """Look at this node's memory. Nothing is leased: saves must not mistake this for a load."""
        memory = self._reader.memory()
        if memory is None:
            return _Look(self._is_survey_due(frozenset()), is_stopped)
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
            is_stopped=is_stopped,
            run=run.token,
            has_ended=run.has_ended and not is_live and not is_pending,
        )

    def _is_survey_due(self, seen: object) -> bool:
        is_long_ago = time.monotonic() - self._surveyed_at > _LOOK_AGAIN_SECONDS
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

    # -- on rank 0 ---------------------------------------------------------------------------------

    def _decide(
        self, looks: Sequence[_Look], begun: float, last: Place | None
    ) -> Verdict | DcpMemError:
        """Look at storage, and decide for all ranks."""
        watch = self._reader.watch
        is_survey_due = watch.look() or any(look.is_survey_due for look in looks)
        if any(look.is_stopped for look in looks):
            return Verdict.END
        is_hopeless = isinstance(watch.error, StorageRefused) and not watch.seen_at
        if is_hopeless and all(look.run is None for look in looks):
            assert isinstance(watch.error, StorageRefused)
            return watch.error
        if watch.error is not None:
            self._complaints.make(
                f"{watch.error}; following what memory has until storage answers again",
                about=type(watch.error).__name__,
            )
        self._is_at_end = self._until_ended and self._has_ended(looks, last)
        return Verdict.TAKE if is_survey_due else self._wait_or_end(begun, last)

    def _wait_or_end(self, begun: float, last: Place | None) -> Verdict | WaitTimeout:
        """Decide for all ranks, on rank 0, where there is nothing to take."""
        if self._is_at_end:
            return Verdict.END
        waited = time.monotonic() - begun
        if self._timeout is not None and waited >= self._timeout:
            if last is None:
                return WaitTimeout(f"after {self._timeout:g} s there is {self._nothing()}")
            log.info("no newer checkpoint within %g s", self._timeout)
            return Verdict.END
        if last is None and waited >= _COMPLAIN_SECONDS:
            self._complaints.make(f"there is {self._nothing()}; waiting for it")
        return Verdict.WAIT

    def _has_ended(self, looks: Sequence[_Look], last: Place | None) -> bool:
        """Tell whether the run has ended, and everything of it was there to be seen."""
        known = [look for look in looks if look.run is not None]
        # An earlier run may have left memory on this node, and this one runs elsewhere.
        last_run = "" if last is None else last.run
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


def _raised_on_all(verdict: Verdict | DcpMemError) -> Verdict:
    if isinstance(verdict, DcpMemError):
        raise known_to_all(verdict)
    return verdict


def _is_same_place(one: str, other: str) -> bool:
    if one.startswith("/") and other.startswith("/"):
        return os.path.realpath(one) == os.path.realpath(other)
    return one == other
