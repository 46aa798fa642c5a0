"""A writer's calls: what each thread is in the middle of, and how a save begins on all ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from dcp_mem.comm import Ranks
from dcp_mem.comm.agreement import (
    Attempted,
    described,
    known_to_all,
    on_all_ranks,
)
from dcp_mem.comm.bridge.calls import DcpCall
from dcp_mem.common.values import SaveInfo
from dcp_mem.config import Settings, exchange_timeout
from dcp_mem.errors import ConfigError, RankFailed
from dcp_mem.format.manifest import Manifest
from dcp_mem.runtime.session import Session
from dcp_mem.runtime.turns import Turn
from dcp_mem.saving.dcp_takeover import DcpTakeover
from dcp_mem.saving.overlap import Overlap
from dcp_mem.saving.values import SaveContext

_Texts = tuple[str, ...]
_AGREED = "settings agreed"


@dataclass(slots=True)
class DcpSave:
    """The save that DCP is in the middle of."""

    context: SaveContext
    takeover: DcpTakeover | None = None  # where dcp_mem may plan it; None where DCP's planner does
    manifest: Manifest | None = None  # of what DCP's planner has planned, once that is complete
    finishes: bool = True  # whether DCP calls `finish` on this rank: it does on the coordinator

    @property
    def own(self) -> DcpTakeover | None:
        """The takeover, if dcp_mem has planned the save."""
        is_planned = self.takeover is not None and self.takeover.is_planned
        return self.takeover if is_planned else None


class ThreadCalls(threading.local):
    """A thread's calls of one writer. DCP drives each save in one thread, from `reset` to `finish`.

    `name`: of the checkpoint to save. `refused`: why it can't have that name. `why_not`: why
    dcp_mem can't plan the next save; "" where that isn't known. `takeover`: of the save whose
    planning begins. `turn`: of the save that DCP drives. `is_unseen`: whether no frame tells when
    that save ends. `save`: that DCP is in the middle of. `last`: the last complete checkpoint, and
    what its coordinator said of it. `overlap`: which copies of the next `stage` needn't be made at
    once.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.refused: ConfigError | None = None
        self.why_not = ""
        self.takeover: DcpTakeover | None = None
        self.turn: Turn | None = None
        self.is_unseen = False
        self.save: DcpSave | None = None
        self.last: tuple[Manifest, SaveInfo] | None = None
        self.overlap: Overlap | None = None

    def reset(self) -> None:
        """Forget the save before, but for what it has made."""
        self.name, self.refused, self.takeover, self.save = None, None, None, None

    @contextmanager
    def step(self, *, is_last: bool) -> Iterator[None]:
        """Make a step of a save; end its turn with the last one, or one that fails.

        Only where no frame tells the end of the call, which comes later. Between two steps the turn
        waits for DCP, as long as ranks wait for each other; a step may take any time.
        """
        if self.is_unseen and self.turn is not None:
            self.turn.follow(None)
        try:
            yield
        except BaseException:
            is_last = True
            raise
        finally:
            if self.is_unseen and self.turn is not None:
                if is_last:
                    self.turn.end()
                self.turn.follow(partial(_is_late, time.monotonic() + exchange_timeout()))

    def begun(self) -> DcpSave:
        """Return the save that DCP is in the middle of. Raises ConfigError where there is none."""
        if self.save is None:
            raise ConfigError(
                "DCP calls set_up_storage_writer before this: drive the writer through dcp.save"
            )
        return self.save

    def checked_name(self) -> str:
        """Return what to save under. Raises ConfigError where that is missing, or no name."""
        if self.refused is not None:
            raise self.refused
        if self.name is None:
            raise ConfigError(
                "pass checkpoint_id= to dcp.save or dcp_mem.save: "
                "path= of the writer is the root of all checkpoints of a job"
            )
        return self.name


def _is_late(until: float) -> bool:
    return time.monotonic() > until


def called(opened: Attempted[Session], call: Callable[[], DcpCall]) -> DcpCall:
    """Return the ranks of a call. A rank that has an error of its own raises that.

    Raises Exception, RankFailed.
    """
    try:
        return call()
    except RankFailed:
        if opened.error is not None:
            raise opened.error from None
        raise


def opened_together(ranks: Ranks, opened: Attempted[Session], settings: Settings) -> Session:
    """Return this rank's session once all ranks have one.

    Later errors travel with the exchanges of the save.

    Raises Exception, RankFailed, ConfigError.
    """
    if not ranks.is_connected:
        on_all_ranks(ranks, "opening the job's memory", lambda: opened.value)
    elif opened.error is not None:
        ranks.leave(described(opened.error))
    session = opened.value
    if ranks.size > 1 and _AGREED not in ranks.cache:  # loads, say, connect the ranks without
        _refuse_other_settings(ranks, settings)
        ranks.cache[_AGREED] = True
    return session


def _refuse_other_settings(ranks: Ranks, settings: Settings) -> None:
    own = {settings.in_common: ranks.rank}
    found = ranks.all_reduce(own, lambda one, other: {**other, **one, **_lower(one, other)})
    if len(found) > 1:
        (first, rank), (other, another), *_ = sorted(found.items(), key=lambda one: one[1])
        mine, theirs = (
            ", ".join(text for text, beside in zip(one, another_one, strict=True) if text != beside)
            for one, another_one in ((first, other), (other, first))
        )
        raise known_to_all(
            ConfigError(
                f"the ranks save with different settings: rank {rank} has {mine}, "
                f"rank {another} has {theirs}; give all ranks the same"
            )
        )


def _lower(one: dict[_Texts, int], other: dict[_Texts, int]) -> dict[_Texts, int]:
    return {texts: min(one[texts], other[texts]) for texts in one.keys() & other.keys()}
