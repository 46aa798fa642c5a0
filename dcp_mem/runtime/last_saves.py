"""The records of the last saves; the next saves compare with them.

A save like the one before says little more than "as before".
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence

from dcp_mem.common.log import log
from dcp_mem.common.value_class import value_class
from dcp_mem.config import Settings
from dcp_mem.format.manifest import Manifest
from dcp_mem.format.segments import Segments
from dcp_mem.policy.persistence import CountedSave, count_from

_TRIM_EVERY = 16
"""Saves of one size between two looks for free slots that are too many."""

GroupKey = tuple[str, str]
"""Tells ranks that save together from others: scope, and key of the set of ranks."""

PlanKey = tuple[str, str, str]
"""Saves with the same key follow each other with the same plan, as a rule: group and plan id."""


@value_class
class SavedPlan:
    """The last complete save of a plan; its catalog is kept while the plan's saves stay alike."""

    catalog: str
    items: int  # fingerprint of this rank's items, by name and offset
    segments: Segments
    save_id: str = ""


Resumed = tuple[tuple[str, CountedSave], ...]
"""What a process has loaded of a job, in order, each with the scope of the ranks that saved it."""

_resumed: dict[tuple[str, str], Resumed] = {}
"""By memory root and job. Loads note it in any thread, and need no session."""
_guard = threading.Lock()
_MOST_RESUMED = 64


def note_resumed(settings: Settings, manifest: Manifest) -> None:
    """Remember what this process has loaded: its next save may go on counting from that."""
    add_resumed(settings, ((manifest.scope, _counted(manifest)),))


def add_resumed(settings: Settings, more: Resumed) -> None:
    """Remember what a process has loaded, this one or the one that it saves for."""
    with _guard:
        key = (settings.memory_root, settings.job)
        _resumed[key] = tuple(dict.fromkeys((*_resumed.get(key, ()), *more)))[-_MOST_RESUMED:]


def resumed(settings: Settings) -> Resumed:
    """Return what this process has loaded of a job."""
    return _resumed.get((settings.memory_root, settings.job), ())


def _counted(manifest: Manifest) -> CountedSave:
    return CountedSave(
        name=manifest.name,
        step=manifest.step,
        persisted=manifest.persisted,
        at=time.monotonic(),
    )


class PersistCounts:
    """The last save of this process, for each scope: the next one goes on counting from it."""

    def __init__(self) -> None:
        self._own: dict[str, CountedSave] = {}

    def note(self, settings: Settings, manifest: Manifest) -> None:
        """Count a complete save: what was loaded before it counts no more."""
        self._own[manifest.scope] = _counted(manifest)
        with _guard:
            loaded = resumed(settings)
            left = tuple(one for one in loaded if one[0] != manifest.scope)
            _resumed[settings.memory_root, settings.job] = left

    def before(
        self, settings: Settings, scope: str, step: int | None, in_memory: Iterable[Manifest]
    ) -> CountedSave | None:
        """Return the save that one of this step continues; None where the job counts anew.

        `in_memory`: what earlier runs have left on this node, newest first. A process that has
        neither saved nor loaded continues the newest.
        """
        own = self._own.get(scope)
        loaded: Sequence[CountedSave] = [
            one for of, one in resumed(settings) if of == scope and (own is None or one.at > own.at)
        ]
        if own is None and not loaded:
            found = (_counted(one) for one in in_memory if one.scope == scope)
            loaded = [one for one in [next(found, None)] if one is not None]
        return count_from(own, loaded, step)


class LastSaves:
    """One process's records of its last saves of a job.

    Written within a save's turn only. Other threads may look up what is there under a key; none of
    the values changes.

    `plans`: by plan, what its last complete save was made of. `persisted`: what `persist=` counts.
    `expected_copies`: by group of ranks, bytes of each slot that the last save's copies
    took on this rank. `is_clean`: whether all saves since the last sweep are complete.
    """

    def __init__(self) -> None:
        self.plans: dict[PlanKey, SavedPlan] = {}
        self.persisted = PersistCounts()
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
