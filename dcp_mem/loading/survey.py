"""First stage of a load: what this node's memory has, and what storage has."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from dcp_mem.comm.agreement import described
from dcp_mem.common.parallel import daemon, in_daemons
from dcp_mem.common.value_class import value_class
from dcp_mem.common.values import Outcome
from dcp_mem.errors import DcpMemError, StorageKeyMissing
from dcp_mem.format import names
from dcp_mem.memory.checkpoint import LocalCheckpoint
from dcp_mem.memory.job import JobMemory
from dcp_mem.policy.election import FoundCheckpoint
from dcp_mem.policy.order import UNNUMBERED, Place
from dcp_mem.policy.redundancy import Redundancy
from dcp_mem.storage import Storage
from dcp_mem.storage.listing import checkpoint_names, stored_under

_FIRST_ANSWER_TIMEOUT = 10.0
"""Seconds that a load waits for storage to answer at all when memory has a checkpoint as well."""
_LISTING_TIMEOUT = 60.0
"""Seconds that it waits for the rest of the listing, once storage has answered."""


@value_class
class Search:
    """The search criteria of a survey."""

    wanted: str | None  # name of the checkpoint; None for all checkpoints
    scope: str  # `names.COLLECTIVE`, or the scope of one rank that saved alone


# -- memory ----------------------------------------------------------------------------------------


def survey_memory(
    memory: JobMemory | None,
    search: Search,
    damaged_ranks: Callable[[LocalCheckpoint], Collection[int]],
) -> tuple[list[FoundCheckpoint], list[LocalCheckpoint]]:
    """Return what this node's memory has: for the election, and to be opened.

    Nothing is opened or leased here: what is elected is, once (ADR 66).

    `memory`: None where it has nothing of the job. `damaged_ranks`: ranks whose segments of a
    checkpoint turned out to be damaged here.
    """
    if memory is None:
        return [], []
    found = memory.checkpoints() if search.wanted is None else memory.find(search.wanted)
    local, problems = list[LocalCheckpoint](), dict[str, str]()
    for name, why in memory.damaged_manifests(search.scope).items():
        if search.wanted in (None, name):
            problems[name] = why
    for one in [one for one in found if one.manifest.scope == search.scope]:
        if os.path.basename(one.directory) == one.name:
            local.append(one)
        else:
            problems[one.name] = f"it lies in {one.directory}, which has another name"
    return [
        *(
            FoundCheckpoint(name=name, save_id="", place=Place(number=UNNUMBERED), problem=why)
            for name, why in problems.items()
        ),
        *[_finding(memory, one, damaged_ranks(one)) for one in local],
    ], local


def _finding(
    memory: JobMemory, checkpoint: LocalCheckpoint, damaged_ranks: Collection[int]
) -> FoundCheckpoint:
    """Return what this node has of a checkpoint: all, or some segments."""
    manifest, made = checkpoint.manifest, checkpoint.replication
    here, lacking = checkpoint.segments_here(memory.node, damaged_ranks)
    second = tuple(rank for rank in manifest.segments.rank if rank >= names.FROZEN)
    is_replicated = made.outcome == Outcome.REPLICATED
    finding = FoundCheckpoint(
        name=checkpoint.name,
        save_id=manifest.save_id,
        place=manifest.place,
        rejected=checkpoint.rejected,
        count=len(manifest.segments) - len(second),
        second=second,
        was_stored=checkpoint.flush.outcome == Outcome.DURABLE,
        replaces=manifest.replaces,
        redundancy=Redundancy(made.copies, made.parity) if is_replicated else Redundancy(),
    )
    if len(here) == len(manifest.segments):
        return finding
    return replace(
        _with_parity(finding, memory, checkpoint),
        segments=frozenset(segment.rank for segment in here),
        lacking=next(iter(lacking.values()), ""),
    )


def _with_parity(
    finding: FoundCheckpoint, memory: JobMemory, checkpoint: LocalCheckpoint
) -> FoundCheckpoint:
    """Return the finding with the parity here, and the sizes of the segments that it is of."""
    segments = checkpoint.manifest.segments
    nbytes = dict(zip(segments.rank, segments.nbytes, strict=True))
    stripes = {file: record.stripe for file, record in checkpoint.stripes().items()}
    covered = {share.rank for stripe in stripes.values() for share in stripe.shares}
    empty = {rank for rank, size in nbytes.items() if not size}  # parity doesn't mention these
    sizes = {rank: nbytes[rank] for rank in sorted(covered | empty)}
    return replace(finding, stripes=tuple(stripes.items()), sizes=sizes)


# -- storage ---------------------------------------------------------------------------------------


class StorageSurvey:
    """Asks storage what it has, for as long as it answers.

    `storage`: the job's; None for a job without. `silence`: why storage didn't answer; empty where
    it did. It isn't asked again then. `removed`: of the names whose directories saves had made,
    those that have none any more.
    """

    def __init__(self, storage: Storage | None) -> None:
        self.silence: list[str] = []
        self.removed: Collection[str] = ()
        self._storage = storage
        self._has_answered = threading.Event()

    def findings(
        self, search: Search, *, is_needed: bool, directories: Collection[str] = ()
    ) -> list[FoundCheckpoint]:
        """Return what storage has; nothing, and a line in `silence`, where it doesn't answer.

        `is_needed`: wait for as long as it takes: memory has nothing.
        """
        storage = self._storage
        if storage is None or self.silence:
            return []
        answer: list[list[FoundCheckpoint]] = []
        listing = daemon(lambda: answer.append(self._list(storage, search, directories)))
        if is_needed:
            listing.join()
        elif self._has_answered.wait(_FIRST_ANSWER_TIMEOUT):
            listing.join(_LISTING_TIMEOUT)
        if not answer and not self.silence:
            waited = _LISTING_TIMEOUT if self._has_answered.is_set() else _FIRST_ANSWER_TIMEOUT
            self.silence.append(f"storage {storage.url} did not answer within {waited:.0f} s")
        return answer[0] if answer else []

    def _list(
        self, storage: Storage, search: Search, directories: Collection[str]
    ) -> list[FoundCheckpoint]:
        try:
            wanted = [search.wanted] if search.wanted is not None else checkpoint_names(storage)
            if search.wanted is None:
                self._has_answered.set()
            found = in_daemons(lambda name: stored_findings(storage, name, search.scope), wanted)
            known = dict(zip(wanted, found, strict=True))
            unseen = sorted(name for name in directories if not known.get(name))
            listed = in_daemons(storage.ls, unseen)
            self.removed = {name for name, files in zip(unseen, listed, strict=True) if not files}
            return [finding for findings in found for finding in findings]
        except Exception as error:  # a checkpoint in memory may do without storage
            self.silence.append(str(error) if isinstance(error, DcpMemError) else described(error))
            return []
        finally:
            self._has_answered.set()


def stored_findings(storage: Storage, name: str, scope: str) -> list[FoundCheckpoint]:
    """Return what storage has under one name.

    `scope`: "" or the rank that saved alone.
    """
    found = stored_under(storage, name, scope)
    return [
        FoundCheckpoint(
            name=one.name,
            save_id=one.save_id,
            place=one.place,
            rejected=one.rejected,
            problem=one.problem,
            metadata=one.metadata,
            is_renamed=one.is_renamed,
        )
        for one in found
    ]


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
