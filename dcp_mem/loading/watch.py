"""Storage, looked at again and again: what a follower has for a survey."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping

from dcp_mem.comm.agreement import described
from dcp_mem.common.parallel import daemon, in_daemons
from dcp_mem.errors import DcpMemError, StorageKeyMissing
from dcp_mem.format import names
from dcp_mem.loading.survey import Search, StorageSurvey, stored_findings
from dcp_mem.policy.election import FoundCheckpoint
from dcp_mem.storage import Storage
from dcp_mem.storage.listing import checkpoint_names

_ANSWER_TIMEOUT = 5.0
"""Seconds that a look waits for storage; a slower answer is the next look's."""
_AGAIN_SECONDS, _AGAIN_PER_NAME = 60.0, 2.0
"""Pause after which names are looked at again whose checkpoint is known and sound, as another one
of the same name may have replaced it. It grows with the number of names: each costs requests."""


class StorageWatch(StorageSurvey):
    """What storage had when it was last looked at; a look costs a listing where nothing is new.

    `storage`: the job's; None for a job without. `error`: what went wrong with the last look that
    has ended; None where nothing did. `seen_at`: when the last look began that has ended well, by
    `time.monotonic`; 0.0 for none.
    """

    def __init__(self, storage: Storage | None) -> None:
        super().__init__(storage)
        self.error: Exception | None = None
        self.seen_at = 0.0
        self._watched = storage
        self._looking: threading.Thread | None = None
        self._known: Mapping[str, tuple[FoundCheckpoint, ...]] = {}
        self._told: Mapping[str, tuple[FoundCheckpoint, ...]] = {}
        self._last_full_look = 0.0

    def look(self) -> bool:
        """Look at storage; return whether it has something else than at the last survey.

        Where storage doesn't answer for some seconds, that goes on in the background.
        """
        if self._watched is None:
            return False
        if self._looking is None or not self._looking.is_alive():
            storage = self._watched
            self._looking = daemon(lambda: self._look(storage), "dcp_mem-watch")
        self._looking.join(_ANSWER_TIMEOUT)
        return self._known != self._told

    def findings(
        self, search: Search, *, is_needed: bool, directories: Collection[str] = ()
    ) -> list[FoundCheckpoint]:
        """Return what storage had at the last look.

        `directories`: ignored: a checkpoint in memory is followed for as long as it lies there.
        """
        self._told = self._known
        return [one for found in self._told.values() for one in found]

    def _look(self, storage: Storage) -> None:
        begun = time.monotonic()
        try:
            listed = checkpoint_names(storage)
            pause = _AGAIN_SECONDS + _AGAIN_PER_NAME * len(listed)
            is_full = begun - self._last_full_look > pause
            known = {} if is_full else self._known
            asked = [name for name in listed if not _is_sound(known.get(name, ()))]
            answers = in_daemons(lambda name: _found(storage, name), asked)
            found = dict(zip(asked, answers, strict=True))
            self._known = {name: found[name] if name in found else known[name] for name in listed}
            if is_full:
                self._last_full_look = time.monotonic()
            self.error, self.seen_at = None, begun
        except Exception as error:  # memory may do without storage, and the next look follows
            self.error = error if isinstance(error, DcpMemError) else DcpMemError(described(error))


def _is_sound(found: tuple[FoundCheckpoint, ...]) -> bool:
    return bool(found) and not any(one.problem for one in found)


def _found(storage: Storage, name: str) -> tuple[FoundCheckpoint, ...]:
    try:
        return tuple(stored_findings(storage, name, names.COLLECTIVE))
    except StorageKeyMissing:  # it has just been deleted
        return ()
