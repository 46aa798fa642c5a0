"""Who owns a job's storage: the run with the newest generation there (ADR 23).

A run takes a generation with the first checkpoint that it commits, by a put that fails where the
generation is taken: `.dcp_mem/generation-<number>.json`. From then on the agents of older runs
neither commit nor delete. A run's memory may change hands (a restart on the same nodes), so an
agent acts for all runs that have checkpoints in its memory, and for those that it has claimed for.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Callable

from dcp_mem.common import faults
from dcp_mem.common.log import log
from dcp_mem.errors import CheckpointExists, StorageKeyMissing, StorageTaken, StorageUnavailable
from dcp_mem.memory.job import JobMemory
from dcp_mem.storage import Storage

DIRECTORY = ".dcp_mem"
_CLAIM = re.compile(r"generation-(\d+)\.json")
_TRIES = 20
_KEPT_CLAIMS = 64
_NOBODY = "another run"


class Ownership:
    """One node's part in the ownership of its job's storage."""

    def __init__(
        self, memory: JobMemory, storage: Storage, is_live: Callable[[], bool] = lambda: True
    ) -> None:
        self._memory, self._storage, self._is_live = memory, storage, is_live
        self._claims: dict[int, tuple[str, str]] = {}  # run, and who that is, by generation

    def claim(self) -> None:
        """Take generations for the runs in this memory that have none yet; oldest run first."""
        for _ in range(_TRIES):
            newest = self._newest_claim()
            runs = self._runs()
            if newest and not self._is_ours(newest):
                self._refuse_if_late(runs, newest)
            missing = self._without_claim(runs)
            if not missing:
                self._note(runs)
                return
            run, wanted = missing[0]
            if self._take(max(newest + 1, wanted), run):
                faults.point("claim.taken")
        raise StorageUnavailable(self._storage.url, "other runs take one generation after another")

    def check(self) -> None:
        """Raise StorageTaken where a newer run has taken the storage."""
        newest = self._newest_claim()
        if newest and not self._is_ours(newest):
            raise self._taken(newest)

    def is_own(self, run: str) -> bool:
        return run in self._lineage()

    def may_delete(self, run: str) -> bool:
        """Return whether a run's files may be deleted: all, where the storage has conditions.
        Without, nobody can be kept from committing what is deleted at the same moment.
        """
        return self._storage.has_conditions() or (run != "" and self.is_own(run))

    # -- runs in memory ----------------------------------------------------------------------------

    def _runs(self) -> dict[str, int]:
        """Return the runs with checkpoints in memory, oldest first, and their generations."""
        found: dict[str, int] = {}
        for checkpoint in reversed(self._memory.checkpoints()):
            manifest = checkpoint.manifest
            if manifest.run:
                found.pop(manifest.run, None)
                found[manifest.run] = manifest.generation
        return found

    def _lineage(self) -> set[str]:
        return {*self._runs(), *self._memory.generations.known()}

    def _without_claim(self, runs: dict[str, int]) -> list[tuple[str, int]]:
        """Return the newest runs whose claim is missing, or too low, oldest first. A run that is
        older than one with a claim can't get a generation any more; its saves keep their numbers.
        """
        claimed, missing = self._claimed(), list[tuple[str, int]]()
        for run, generation in runs.items():
            if claimed.get(run, 0) >= generation:
                missing.clear()
            else:
                missing.append((run, generation))
        return missing

    def _claimed(self) -> dict[str, int]:
        return {run: generation for generation, (run, _) in sorted(self._claims.items())}

    def _note(self, runs: dict[str, int]) -> None:
        """Write down in memory what its runs have got."""
        claimed = {run: got for run, got in self._claimed().items() if run in runs}
        known = self._memory.generations.known()
        if any(known.get(run) != got for run, got in claimed.items()):
            self._memory.generations.note(claimed)

    def _refuse_if_late(self, runs: dict[str, int], newest: int) -> None:
        """Raise StorageTaken unless this memory's newest run is a new one, which takes over."""
        current = next(reversed(runs), "")
        had_it = any(run == current for run, _ in self._claims.values())
        if not current or had_it or not self._is_live():
            raise self._taken(newest)

    # -- claims on storage -------------------------------------------------------------------------

    def _newest_claim(self) -> int:
        """Look at the claims on storage; return the newest generation, 0 for none."""
        found = [_CLAIM.fullmatch(entry.name) for entry in self._storage.ls(DIRECTORY)]
        listed = {int(match[1]) for match in found if match is not None}
        for generation in listed - self._claims.keys():
            claim = self._read(generation)
            if claim is not None:
                self._claims[generation] = claim
        for generation in self._claims.keys() - listed:
            del self._claims[generation]
        return max(self._claims, default=0)

    def _read(self, generation: int) -> tuple[str, str] | None:
        """Return a claim's run, and who that is; None where it is gone."""
        try:
            facts = json.loads(self._storage.get(_key(generation)))
            since = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(float(facts["time"])))
            who = f"process {facts['pid']} on {facts['host']}, since {since} UTC by its clock"
            return str(facts["run"]), who
        except StorageKeyMissing:
            return None
        except (ValueError, KeyError, TypeError, OverflowError):
            return "", _NOBODY  # damaged: whoever it was, it isn't this run

    def _is_ours(self, generation: int) -> bool:
        return self._claims[generation][0] in self._lineage()

    def _take(self, generation: int, run: str) -> bool:
        """Claim a generation; False where another run has been quicker."""
        facts = {"run": run, "pid": os.getpid(), "host": socket.gethostname(), "time": time.time()}
        try:
            self._storage.put(_key(generation), json.dumps(facts).encode(), create=True)
        except CheckpointExists:
            claim = self._read(generation)
            # Another node's agent of this run; or an answer of ours that was lost.
            if claim is None or claim[0] != run:
                return False
        if self._newest_claim() != generation:
            return False
        log.info(
            "%s belongs to run %s from now on (generation %d)", self._storage.url, run, generation
        )
        if not self._storage.has_conditions():
            log.warning(
                "%s has no conditional writes: one run at a time may use it. Nothing of other runs "
                "is deleted there",
                self._storage.url,
            )
        for old in sorted(self._claims)[:-_KEPT_CLAIMS]:
            self._storage.delete(_key(old))
        return True

    def _taken(self, generation: int) -> StorageTaken:
        return StorageTaken(self._storage.url, generation, self._claims[generation][1])


def _key(generation: int) -> str:
    return f"{DIRECTORY}/generation-{generation:010d}.json"
