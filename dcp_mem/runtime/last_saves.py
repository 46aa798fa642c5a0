"""The last saves, as one process knows them: the next one compares with them, and follows them.

`LastSaves` has what a save like the one before needn't say again, `RunNumbers` the numbers of saves
(ADR 23), and which of them storage gets.
"""

from __future__ import annotations

import hashlib
import threading
import time
import uuid
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from dcp_mem.comm.job_ranks import run_token
from dcp_mem.common.log import log
from dcp_mem.common.value_class import value_class
from dcp_mem.config import Settings
from dcp_mem.format.manifest import Manifest
from dcp_mem.format.segments import Segments
from dcp_mem.memory.job import JobMemory
from dcp_mem.policy.order import UNNUMBERED, SaveNumber, next_number
from dcp_mem.policy.persistence import CountedSave, count_from

_TRIM_EVERY = 16
"""Saves of one size between two looks for free slots that are too many."""

GroupKey = tuple[str, str]
"""Tells ranks that save together from others: scope, and key of the set of ranks."""

PlanKey = tuple[str, str, str]
"""Saves with the same key follow each other with the same plan, as a rule: group and plan id."""


_RUN_DIGITS = 8
_MOST_LOADED = 64


@value_class
class SavedPlan:
    """The last complete save of a plan; its catalog is kept while the plan's saves stay alike."""

    catalog: str
    items: int  # fingerprint of this rank's items, by name and offset
    segments: Segments
    save_id: str = ""


class LastSaves:
    """One process's records of its last saves of a job.

    Written within a save's turn only. Other threads may look up what is there under a key; none of
    the values changes.

    `plans`: by plan, what its last complete save was made of. `expected_copies`: by group of ranks,
    bytes of each slot that the last save's copies took on this rank. `is_clean`: whether all saves
    since the last sweep are complete.
    """

    def __init__(self) -> None:
        self.plans: dict[PlanKey, SavedPlan] = {}
        self.expected_copies: dict[GroupKey, tuple[int, ...]] = {}
        self.is_clean = False
        self._warned: set[str] = set()
        self._trimmed_to = -1
        self._saves_since_trim = 0

    def is_first_warning(self, text: str) -> bool:
        """Return whether this warning is new: one that holds for every save is logged once."""
        is_first = text not in self._warned
        self._warned.add(text)
        return is_first

    def warn_once(self, text: str) -> None:
        """Log a warning that holds for every save, the first time."""
        if self.is_first_warning(text):
            log.warning("%s", text)

    def is_trim_due(self, most_nbytes: int) -> bool:
        """Return whether to look for superfluous free slots; a look costs as much as a save."""
        self._saves_since_trim += 1
        is_due = most_nbytes != self._trimmed_to or self._saves_since_trim >= _TRIM_EVERY
        if is_due:
            self._trimmed_to, self._saves_since_trim = most_nbytes, 0
        return is_due


# -- numbers and counts ---------------------------------------------------------------------------


class Loaded(NamedTuple):
    """The saves of a job that loads of this process have found; its own saves count from these."""

    newest: SaveNumber = UNNUMBERED  # the greatest number in memory or on storage
    saves: tuple[tuple[str, CountedSave], ...] = ()  # what was loaded, in order, by scope


_loaded: dict[tuple[str, str], Loaded] = {}
"""By memory root and job. Loads note it in any thread, and need no session."""
_guard = threading.Lock()


def loaded(settings: Settings) -> Loaded:
    return _loaded.get((settings.memory_root, settings.job), Loaded())


def note_loaded(settings: Settings, found: Loaded) -> None:
    """Remember what a process has loaded, this one or the one that it saves for."""
    with _guard:
        known = loaded(settings)
        saves = tuple(dict.fromkeys((*known.saves, *found.saves)))[-_MOST_LOADED:]
        newest = max(known.newest, found.newest)
        _loaded[settings.memory_root, settings.job] = Loaded(newest, saves)


def counted(manifest: Manifest) -> CountedSave:
    return CountedSave(
        name=manifest.name,
        step=manifest.step,
        persisted=manifest.persisted,
        at=time.monotonic(),
    )


class RunNumbers:
    """The numbers that this process has given to saves of a job, and knows of.

    Saves change it in their turn; any thread may ask for `newest`.
    """

    def __init__(self, memory: JobMemory) -> None:
        self._memory = memory
        self._key = memory.root, memory.job
        self._generation = 0
        self._newest = UNNUMBERED
        self._last: dict[str, CountedSave] = {}  # by scope, the last complete save
        self.token = ""  # of the run; "" as long as it has saved nothing

    def newest(self) -> SaveNumber:
        """Return the greatest number of this process's saves and loads."""
        own = SaveNumber(self._generation_now(), self._newest.count)
        return max(own, _loaded.get(self._key, Loaded()).newest)

    def run(self, manifests: Sequence[Manifest]) -> tuple[int, str]:
        """Return the generation that the run goes on with, and the run's token.

        The generation is 0 if the run hasn't begun one. It may have been raised since the last
        save, by the flusher of this node, which has found newer ones on storage.
        """
        self.token = self.token or run_token()[:_RUN_DIGITS] or uuid.uuid4().hex[:_RUN_DIGITS]
        # Ranks that save without each other are one run: they go on with one generation.
        others = max([one.generation for one in manifests if one.run == self.token], default=0)
        return max(self._generation_now(), others), self.token

    def _generation_now(self) -> int:
        """Return the run's generation, raised to the one that it has got on storage; 0 for none."""
        if not self._generation:
            return 0
        return max(self._generation, self._memory.generations.known().get(self.token, 0))

    def keep_newest(self, manifest: Manifest) -> None:
        """Make sure that a checkpoint is newer in this memory than what was saved before it.

        Since its number was agreed on, the flusher may have got a newer generation for an earlier
        run: then the generation of this run is raised as well. What a later run has saved
        meanwhile stays newer: this process was stopped, and its job has gone on without it.
        """
        newest = self._memory.newest_number(without_run=manifest.run)
        if self._memory.generations.raised(manifest).number > newest:
            return
        # By the numbers that their saves agreed on: the raised ones are what this is about.
        found = self._memory.manifests(as_agreed=True)
        others = (one for one in found if one.run != manifest.run)
        agreed = max((one.number for one in others), default=UNNUMBERED)
        if manifest.number > agreed:
            self._memory.generations.note({manifest.run: newest.generation + 1})

    def begin(self, newest: SaveNumber, generation: int, run: str) -> tuple[SaveNumber, str]:
        """Return the number of the save that the ranks agree on now, and the token of its run."""
        number = next_number(newest, generation)
        if generation and number.generation > generation:
            # What it has saved before stays older than what other runs have saved since.
            run = _successor(run, number.generation)
        self._generation, self.token, self._newest = number.generation, run, number
        return number, run

    def count(self, manifest: Manifest) -> None:
        """Count a complete save for `persist=`: what was loaded before it counts no more."""
        self._last[manifest.scope] = counted(manifest)
        with _guard:
            known = _loaded.get(self._key)
            if known is not None and known.saves:
                left = tuple(one for one in known.saves if one[0] != manifest.scope)
                _loaded[self._key] = known._replace(saves=left)

    def counted_before(
        self, scope: str, step: int | None, in_memory: Iterable[Manifest]
    ) -> CountedSave | None:
        """Return the save that one of this step continues; None where the job counts anew.

        `in_memory`: what earlier runs have left on this node, newest first. A process that has
        neither saved nor loaded continues the newest.
        """
        own, saves = self._last.get(scope), _loaded.get(self._key, Loaded()).saves
        later = [one for of, one in saves if of == scope and (own is None or one.at > own.at)]
        if own is None and not later:
            later = [counted(one) for one in in_memory if one.scope == scope][:1]
        return count_from(own, later, step)


def _successor(run: str, generation: int) -> str:
    """Return the token under which a run goes on in another generation, alike on all ranks."""
    return hashlib.sha256(f"{run} {generation}".encode()).hexdigest()[:_RUN_DIGITS]
