"""What a follower's ranks see of a run, and what they do next."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from dcp_mem.comm import Ranks
from dcp_mem.comm.agreement import from_all_ranks, known_to_all
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
@dataclass(frozen=True, slots=True)
class Seen:
    """What the ranks do after a look: take what is new, if there is; end where that is in vain."""

    may_be_new: bool = False
    is_over: bool = False
    is_stopped: bool = False
    error: DcpMemError | None = None  # to be raised where nothing can be taken


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


class Lookout:
    """Looks at memory on every rank and at storage on rank 0, and decides for all ranks."""

    def __init__(
        self,
        reader: HoldingReader,
        *,
        only_durable: bool,
        until_ended: bool,
        timeout: float | None,
    ) -> None:
        self._reader = reader
        self.only_durable, self._until_ended, self._timeout = only_durable, until_ended, timeout
        self._memory_seen: object = None
        self._surveyed_at = 0.0
        self._ended_since: float | None = None
        self._said: set[str] = set()

    def look_together(
        self, ranks: Ranks, *, begun: float, last: Place | None, is_stopped: bool
    ) -> Seen:
        """Look, and return what all ranks do next; one gather, one broadcast.

        `last`: place of the checkpoint that was taken last; None for none so far. Raises
        ConfigError, MemoryRootRefused, StorageRefused, RankFailed.
        """
        seen = from_all_ranks(
            ranks,
            f"following {self._reader.settings.job}",
            lambda: self._look(is_stopped),
            lambda looks: self._decide(looks, begun, last),
        )
        if seen.error is not None and not seen.is_over:
            raise known_to_all(seen.error)
        return seen

    def say_once(self, text: str, about: str = "") -> None:
        """Log a warning, unless one about the same, or with this text, has been logged before."""
        if (about or text) not in self._said:
            self._said.add(about or text)
            log.warning("%s", text)

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

    def _decide(self, looks: Sequence[_Look], begun: float, last: Place | None) -> Seen:
        """Look at storage, and decide for all ranks."""
        watch = self._reader.watch
        may_be_new = watch.look() or any(look.is_survey_due for look in looks)
        if any(look.is_stopped for look in looks):
            return Seen(is_stopped=True)
        is_unknown = not watch.seen_at and all(look.run is None for look in looks)
        if isinstance(watch.error, StorageRefused) and is_unknown:
            return Seen(error=watch.error)
        if watch.error is not None:
            self.say_once(
                f"{watch.error}; following what memory has until storage answers again",
                about=type(watch.error).__name__,
            )
        if self._until_ended and self._has_ended(looks, last):
            return Seen(may_be_new, is_over=True)
        waited = time.monotonic() - begun
        if self._timeout is not None and waited >= self._timeout:
            if last is None:
                error = WaitTimeout(f"after {self._timeout:g} s there is {self._nothing()}")
                return Seen(may_be_new, is_over=True, error=error)
            return Seen(may_be_new, is_over=True)
        if last is None and waited >= _COMPLAIN_SECONDS and not may_be_new:
            self.say_once(f"there is {self._nothing()}; waiting for it")
        return Seen(may_be_new)

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
        return watch.error is not None and not (self.only_durable and may_answer)

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
        kind = "durable checkpoint" if self.only_durable else "checkpoint"
        return (
            f"no {kind} that can be taken in {where}{storage}. Path, job= and memory_root= must be "
            "those that the run's writer was given"
        )


def _is_same_place(one: str, other: str) -> bool:
    if one.startswith("/") and other.startswith("/"):
        return os.path.realpath(one) == os.path.realpath(other)
    return one == other
