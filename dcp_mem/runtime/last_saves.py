"""The records of the last saves; the next saves compare with them.

A save like the one before says little more than "as before".
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from dcp_mem.format.segments import Segments
from dcp_mem.policy.persistence import Since

_TRIM_EVERY = 16
"""Saves of one size between two looks for free slots that are too many."""

GroupKey = tuple[str, str]
"""Tells ranks that save together from others: scope, and key of the set of ranks."""

PlanKey = tuple[str, str, str]
"""Saves with the same key follow each other with the same plan, as a rule: group and plan id."""


@dataclass(frozen=True, slots=True)
class SavedPlan:
    """The last complete save of a plan; its catalog is kept while the plan's saves stay alike."""

    catalog: str
    items: int  # fingerprint of this rank's items, by name and offset
    segments: Segments
    save_id: str = ""


@dataclass(slots=True)
class PersistCounter:
    """The last save that went to storage, and the number of saves since."""

    _saves: int | None = None
    _at: float = 0.0
    _step: int | None = None

    def note(self, persisted: bool, step: int | None) -> None:
        """Count a complete save."""
        if persisted:
            self._saves, self._at, self._step = 1, time.monotonic(), step
        elif self._saves is not None:
            self._saves += 1

    def since(self, step: int | None) -> Since | None:
        """Return how long ago that was, seen from a save of this step; None: it never was."""
        if self._saves is None:
            return None
        steps = None if step is None or self._step is None else step - self._step
        return Since(self._saves, time.monotonic() - self._at, steps)


class LastSaves:
    """One process's records of its last saves of a job.

    Written within a save's turn only. Other threads may look up what is there under a key; none of
    the values changes.

    `plans`: by plan, what its last complete save was made of. `persisted`: when a save last went to
    storage. `expected_copies`: by group of ranks, bytes of each slot that the last save's copies
    took on this rank. `is_swept`: whether nothing of a failed save is left in memory.
    """

    def __init__(self) -> None:
        self.plans: dict[PlanKey, SavedPlan] = {}
        self.persisted = PersistCounter()
        self.expected_copies: dict[GroupKey, tuple[int, ...]] = {}
        self.is_swept = False
        self._warned: set[str] = set()
        self._trimmed_to = -1
        self._saves_since_trim = 0

    def is_first_warning(self, text: str) -> bool:
        """Return whether this warning is new: one that holds for every save is logged once."""
        is_first = text not in self._warned
        self._warned.add(text)
        return is_first

    def is_trim_due(self, most_nbytes: int) -> bool:
        """Return whether to look for superfluous free slots; a look costs as much as a save."""
        self._saves_since_trim += 1
        is_due = most_nbytes != self._trimmed_to or self._saves_since_trim >= _TRIM_EVERY
        if is_due:
            self._trimmed_to, self._saves_since_trim = most_nbytes, 0
        return is_due
