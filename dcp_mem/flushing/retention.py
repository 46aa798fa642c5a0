"""Retention on storage: after a commit, checkpoints that the policy doesn't keep are deleted."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace

from dcp_mem.common.log import log
from dcp_mem.common.parallel import in_daemons
from dcp_mem.common.value_class import value_class
from dcp_mem.errors import CheckpointExists, StorageKeyMissing
from dcp_mem.flushing.orphans import delete_attempt
from dcp_mem.flushing.ownership import Ownership
from dcp_mem.format import names
from dcp_mem.format.manifest import Manifest
from dcp_mem.policy.facts import CheckpointFacts
from dcp_mem.policy.retention import Retention, leaving
from dcp_mem.storage import OfOneFile, Storage
from dcp_mem.storage.leases import is_being_read
from dcp_mem.storage.listing import checkpoint_names, committed_under, rejected_saves

_MOST_AT_ONCE = 16
"""Checkpoints that are deleted after one commit: the next flush waits for that."""


@value_class
class _Known:
    """A committed checkpoint, as the last look at storage found it."""

    save_id: str
    run: str
    candidate: CheckpointFacts


class Retainer:
    """Retention of one job: remembers, from one commit to the next, what storage has."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}

    def apply(
        self,
        storage: Storage,
        policy: Retention,
        committed: Manifest,
        ownership: Ownership | None = None,
    ) -> list[str]:
        """Delete what the policy doesn't keep, of whole checkpoints of dcp_mem's; return their
        names. The newest stays, and whatever is read.

        1. Look at names that are new on storage.
        2. Let the policy choose, and look again: at what stays, since what was rejected meanwhile
           doesn't count, and at what goes, since another process may have saved it anew.
        3. Delete each that nobody reads, a limited number at once.
        """
        self._look(storage, committed)
        going = {one.key for one in self._leaving(policy, committed)}
        rejected = [name for name, known in self._known.items() if known.candidate.rejected]
        self._look_for_rejections(storage, self._known.keys() - going if going else rejected)
        seen: set[str] = set()
        while unseen := set(self._going(policy, committed)) - seen:
            self._look_at(storage, unseen)
            seen |= unseen
        deleted = []
        for name in self._going(policy, committed):
            known = self._known[name]
            if ownership is not None:
                ownership.check()
                if not ownership.may_delete(known.run):
                    continue
            if _delete(storage, name, known):
                deleted.append(name)
            self._known.pop(name)  # if it is still there, it is looked at again next time
        return deleted

    def _going(self, policy: Retention, committed: Manifest) -> list[str]:
        return [one.key for one in self._leaving(policy, committed)[:_MOST_AT_ONCE]]

    def _leaving(self, policy: Retention, committed: Manifest) -> list[CheckpointFacts]:
        candidates = [known.candidate for known in self._known.values()]
        return leaving(policy, candidates, {committed.name})

    def _look_for_rejections(self, storage: Storage, of: Collection[str]) -> None:
        """See which checkpoints have been rejected meanwhile, or aren't any more."""
        ordered = sorted(of)

        def rejected_in(name: str) -> frozenset[str] | None:
            with suppress(OfOneFile):
                return rejected_saves(storage, name)
            return None

        for name, rejected in zip(ordered, in_daemons(rejected_in, ordered), strict=True):
            known = self._known.pop(name)
            if rejected is None:  # it can't be read, and is looked at again next time
                continue
            candidate = replace(known.candidate, rejected=known.save_id in rejected)
            self._known[name] = replace(known, candidate=candidate)

    def _look(self, storage: Storage, committed: Manifest) -> None:
        """Look at names that are new on storage, and forget those that are gone."""
        listed = set(checkpoint_names(storage))
        for name in self._known.keys() - listed:
            del self._known[name]
        if committed.scope == names.COLLECTIVE:
            self._known[committed.name] = _known(committed)
        self._look_at(storage, listed - self._known.keys())

    def _look_at(self, storage: Storage, of: Collection[str]) -> None:
        """Look at these names, and forget those that no whole checkpoint of dcp_mem's has."""
        ordered = sorted(of)
        found = in_daemons(lambda name: _look_at(storage, name), ordered)
        for name, known in zip(ordered, found, strict=True):
            self._known.pop(name, None)
            if known is not None:
                self._known[name] = known


def _delete(storage: Storage, name: str, known: _Known) -> bool:
    """Delete a checkpoint that nobody reads, if it is still that which was looked at. Readers take
    a lease first, and then look whether the checkpoint is committed. Here it is the other way
    round: `.metadata` goes first, and then leases are looked at. So one of both notices.
    """
    if is_being_read(storage, name):
        return False
    key = f"{name}/{names.metadata_file(names.COLLECTIVE)}"
    try:
        metadata = storage.get(key)
    except (StorageKeyMissing, OfOneFile):
        return False
    if known.save_id.encode() not in metadata:
        return False
    if not storage.remove(key, metadata) and _exists(storage, key):
        return False
    if is_being_read(storage, name):
        try:
            storage.put(key, metadata, create=True)
        except CheckpointExists:
            log.info("%s in %s has been saved anew meanwhile", name, storage.url)
        return False
    delete_attempt(storage, name, known.save_id)
    return True


def _exists(storage: Storage, key: str) -> bool:
    """Return whether an object is still there: the answer to its removal may have been lost."""
    try:
        storage.get(key)
    except StorageKeyMissing:
        return False
    return True


def _look_at(storage: Storage, name: str) -> _Known | None:
    """Return dcp_mem's checkpoint that is committed under a name; None where none is whole."""
    try:
        found = committed_under(storage, name)
    except (StorageKeyMissing, OfOneFile):  # it has gone meanwhile, or can't be read
        return None
    own = [one for one in found if one.scope == names.COLLECTIVE and not one.problem]
    if not own or own[0].manifest is None or own[0].is_renamed:  # somebody keeps it
        return None
    return _known(own[0].manifest, is_rejected=bool(own[0].rejected))


def _known(manifest: Manifest, *, is_rejected: bool = False) -> _Known:
    candidate = CheckpointFacts(
        key=manifest.name,
        created=manifest.created,
        number=manifest.number,
        step=manifest.step,
        metrics=manifest.metrics,
        writer=manifest.committer,
        rejected=is_rejected,
    )
    return _Known(manifest.save_id, manifest.run, candidate)
