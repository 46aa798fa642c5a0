"""The numbers of saves, as one process knows them: the next one follows (ADR 23)."""

from __future__ import annotations

import hashlib
import threading
import uuid
from collections.abc import Sequence

from dcp_mem.comm.job_ranks import run_token
from dcp_mem.config import Settings
from dcp_mem.format.manifest import Manifest
from dcp_mem.memory.job import JobMemory
from dcp_mem.policy.order import UNNUMBERED, SaveNumber, next_number

_RUN_DIGITS = 8

_seen: dict[tuple[str, str], SaveNumber] = {}
"""By memory root and job, the greatest number that loads of this process have found."""
_guard = threading.Lock()


def note_seen(settings: Settings, number: SaveNumber) -> None:
    """Remember a number that a load has found, in memory or on storage: later saves are newer."""
    with _guard:
        key = (settings.memory_root, settings.job)
        _seen[key] = max(_seen.get(key, UNNUMBERED), number)


def seen(settings: Settings) -> SaveNumber:
    """Return the greatest number that loads of this process have found."""
    return _seen.get((settings.memory_root, settings.job), UNNUMBERED)


class RunNumbers:
    """The numbers that this process has given to saves of a job, and knows of.

    Saves change it in their turn; any thread may ask for `newest`.
    """

    def __init__(self, memory: JobMemory) -> None:
        self._memory = memory
        self._generation = 0
        self._run = ""
        self._newest = UNNUMBERED

    @property
    def token(self) -> str:
        """Token of the run; "" as long as it has saved nothing."""
        return self._run

    def newest(self) -> SaveNumber:
        """Return the greatest number of this process's saves and loads."""
        own = SaveNumber(self._generation_now(), self._newest.count)
        return max(own, _seen.get((self._memory.root, self._memory.job), UNNUMBERED))

    def run(self, manifests: Sequence[Manifest]) -> tuple[int, str]:
        """Return the generation that the run goes on with, and the run's token.

        The generation is 0 if the run hasn't begun one. It may have been raised since the last
        save, by the flusher of this node, which has found newer ones on storage.
        """
        self._run = self._run or run_token()[:_RUN_DIGITS] or uuid.uuid4().hex[:_RUN_DIGITS]
        # Ranks that save without each other are one run: they go on with one generation.
        others = max([one.generation for one in manifests if one.run == self._run], default=0)
        return max(self._generation_now(), others), self._run

    def _generation_now(self) -> int:
        """Return the run's generation, raised to the one that it has got on storage; 0 for none."""
        if not self._generation:
            return 0
        return max(self._generation, self._memory.generations.known().get(self._run, 0))

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
        self._generation, self._run, self._newest = number.generation, run, number
        return number, run


def _successor(run: str, generation: int) -> str:
    """Return the token under which a run goes on in another generation, alike on all ranks."""
    return hashlib.sha256(f"{run} {generation}".encode()).hexdigest()[:_RUN_DIGITS]
