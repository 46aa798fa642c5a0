"""Retention on storage: after a commit, what the job's policy doesn't keep is taken away."""

from __future__ import annotations

from dataclasses import dataclass

from dcp_mem.errors import CheckpointExists, StorageKeyMissing
from dcp_mem.events import log
from dcp_mem.flushing.leftovers import delete_attempt
from dcp_mem.format import names
from dcp_mem.format.manifest import Manifest
from dcp_mem.policy.retention import Candidate, Retention, leaving
from dcp_mem.storage import Storage
from dcp_mem.storage.leases import is_being_read
from dcp_mem.storage.listing import checkpoint_names, committed_under, in_parallel

_MOST_AT_ONCE = 16
"""Checkpoints that go after one commit: the next flush waits for that."""


@dataclass(frozen=True, slots=True)
class _Stored:
    save_id: str
    candidate: Candidate


class Retainer:
    """Knows what a job has on storage, from one commit to the next."""

    def __init__(self) -> None:
        self._known: dict[str, _Stored] = {}

    def apply(self, storage: Storage, policy: Retention, committed: Manifest) -> list[str]:
        """Delete what the policy doesn't keep; returns names. Raises StorageUnavailable, StorageRefused.

        Only whole checkpoints of dcp_mem's are looked at. The newest stays, and whatever somebody reads.
        """
        self._look(storage, committed)
        gone = []
        candidates = [stored.candidate for stored in self._known.values()]
        for one in leaving(policy, candidates, {committed.name})[:_MOST_AT_ONCE]:
            if _delete(storage, one.key, self._known[one.key]):
                gone.append(one.key)
            self._known.pop(one.key)  # looked at anew next time, if it is still there
        return gone

    def _look(self, storage: Storage, committed: Manifest) -> None:
        """Bring what is known up to date: names that are new, and those that are gone."""
        there = set(checkpoint_names(storage))
        for name in self._known.keys() - there:
            del self._known[name]
        if committed.scope == names.COLLECTIVE:
            self._known[committed.name] = _stored(committed)
        new = sorted(there - self._known.keys())
        for name, stored in zip(new, in_parallel(lambda name: _look_at(storage, name), new), strict=True):
            if stored is not None:
                self._known[name] = stored


def _delete(storage: Storage, name: str, stored: _Stored) -> bool:
    """Delete a checkpoint that nobody reads, if it is still the one that was looked at.

    Readers say that they read before they look whether it is committed; here it is the other way round, so one of both notices.
    """
    if _look_at(storage, name) != stored or is_being_read(storage, name):
        return False
    key = f"{name}/{names.metadata_file(names.COLLECTIVE)}"
    try:
        metadata = storage.get(key)
    except StorageKeyMissing:
        return False
    if stored.save_id.encode() not in metadata:
        return False
    storage.delete(key)
    if is_being_read(storage, name):
        try:
            storage.put(key, metadata, create=True)
        except CheckpointExists:
            log.info("%s in %s has been saved anew meanwhile", name, storage.url)
        return False
    delete_attempt(storage, name, stored.save_id)
    return True


def _look_at(storage: Storage, name: str) -> _Stored | None:
    """The checkpoint of dcp_mem's that is committed under a name; None where that is somebody else's, damaged or none."""
    try:
        found = committed_under(storage, name)
    except StorageKeyMissing:  # it has gone meanwhile
        return None
    ours = [one.manifest for one in found if one.scope == names.COLLECTIVE and not one.problem]
    return _stored(ours[0]) if ours and ours[0] is not None else None


def _stored(manifest: Manifest) -> _Stored:
    candidate = Candidate(manifest.name, manifest.created, manifest.step, manifest.metrics)
    return _Stored(manifest.save_id, candidate)
