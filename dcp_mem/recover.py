"""The stages of a load before any tensor moves: survey, elect, open. All ranks take the same decision, or raise alike."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from torch.distributed.checkpoint.metadata import Metadata

from dcp_mem import faults
from dcp_mem.errors import (
    CheckpointNotFound,
    ConfigError,
    DcpMemError,
    NoRecoverableCheckpoint,
    RankFailed,
    SegmentCorrupt,
)
from dcp_mem.events import log
from dcp_mem.format import names
from dcp_mem.memory.job import Held, JobMemory
from dcp_mem.policy.election import Choice, Finding, RecoveryPlan, elect, in_common
from dcp_mem.policy.redundancy import Redundancy
from dcp_mem.ranks import Ranks
from dcp_mem.sources.base import Description, Source, StoredDescription, description_of
from dcp_mem.sources.memory import MemorySource
from dcp_mem.sources.stored import StorageSource
from dcp_mem.storage import Storage
from dcp_mem.storage.leases import ReadLease, read_lease
from dcp_mem.storage.listing import checkpoint_names, daemon, in_parallel, stored_under

_PATIENCE = 10.0
"""Seconds that a load waits for storage to answer at all when memory has a checkpoint as well."""
_LISTING_PATIENCE = 60.0
"""Seconds that it waits for the rest of what it asks, once storage has answered."""


Damage = tuple[str, str, int]
"""(node, save id, rank): a segment in that node's memory that is of no use."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where to look. memory: None where the job has none on this node. storage: None for memory-only jobs."""

    memory: JobMemory | None
    storage: Storage | None
    job: str

    @property
    def where(self) -> str:
        places = [f"memory (job {self.job})", *([self.storage.url] if self.storage is not None else [])]
        return " and ".join(places)


@dataclass(slots=True)
class Recovery:
    """A load's way through its candidates.

    wanted: the checkpoint that was asked for, None for the newest. refused: why this rank can't load at all.
    """

    origin: Origin
    ranks: Ranks
    rank: int
    wanted: str | None
    refused: Exception | None = None
    scope: str = names.COLLECTIVE
    plan: RecoveryPlan = field(default_factory=lambda: RecoveryPlan((), ()))
    reasons: list[str] = field(default_factory=list)
    tried: int = 0
    silence: list[str] = field(default_factory=list)
    """Why storage didn't answer: it is not asked again."""
    heard: threading.Event = field(default_factory=threading.Event)
    """Set once it has answered anything."""
    damaged: set[tuple[str, int]] = field(default_factory=set)
    """Segments (save id, rank) in this node's memory that have turned out to be of no use."""
    bring_back: Callable[[Recovery, Choice], Choice | str] = lambda recovery, choice: "nobody brings it back"
    """Makes the lost segments of a checkpoint from parity; returns what can be loaded then, or why that is nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class Opened:
    """A checkpoint that every rank has opened. sources: nearest first. lease: keeps it on storage, where it comes from there."""

    choice: Choice
    description: Description
    sources: tuple[Source, ...]
    lease: ReadLease | None = None

    def is_in_memory(self, file: str) -> bool:
        """Whether some node has the segment."""
        return self.choice.holders is None or names.rank_of(file) in self.choice.holders

    @property
    def metadata(self) -> Metadata:
        return self.description.metadata

    def close(self) -> None:
        for source in self.sources:
            source.close()
        if self.lease is not None:
            self.lease.close()


def recover(recovery: Recovery) -> Opened:
    """Survey, elect and open the best checkpoint on all ranks.

    Raises NoRecoverableCheckpoint or, where one was asked for by name, CheckpointNotFound; on all ranks alike.
    """
    for scope in (names.COLLECTIVE, names.rank_scope(recovery.rank)):
        recovery.scope = scope
        recovery.plan = survey(recovery)
        recovery.reasons = list(dict.fromkeys([*recovery.reasons, *recovery.plan.reasons]))
        recovery.tried = 0
        if recovery.plan.choices:
            break
    return open_next(recovery)


@dataclass(frozen=True, slots=True)
class _Survey:
    """What a rank brings to the election. error: why it can't take part."""

    wanted: str | None
    findings: Sequence[Finding] = ()
    error: str = ""


def survey(recovery: Recovery) -> RecoveryPlan:
    """What can be loaded, by the findings of all ranks. Raises on all ranks alike: ConfigError, RankFailed."""
    try:
        if recovery.refused is not None:
            raise recovery.refused
        mine, trouble = _Survey(recovery.wanted, _in_memory(recovery)), None
    except Exception as error:  # it travels with the exchange: the other ranks wait for one
        mine, trouble = _Survey(recovery.wanted, error=f"{type(error).__name__}: {error}"), error
    surveys = recovery.ranks.exchange(mine)
    faults.point("recover.surveyed")
    if trouble is not None:
        raise trouble
    _check(surveys)
    if recovery.scope == names.COLLECTIVE:
        return _elect_for_all(recovery, [survey.findings for survey in surveys])
    plans = recovery.ranks.exchange(_elect(recovery, [mine.findings]))
    return in_common(plans)


def _check(surveys: Sequence[_Survey]) -> None:
    failures = [(rank, survey.error) for rank, survey in enumerate(surveys) if survey.error]
    if failures:
        raise RankFailed("looking for checkpoints", failures)
    wanted = sorted({survey.wanted or "the newest" for survey in surveys})
    if len(wanted) > 1:
        raise ConfigError(f"the ranks load different checkpoint ids: {', '.join(wanted)}")


def _elect_for_all(recovery: Recovery, inventories: Sequence[Sequence[Finding]]) -> RecoveryPlan:
    plan, trouble = RecoveryPlan((), ()), ""
    if recovery.ranks.rank == 0:
        try:
            plan = _elect(recovery, inventories)
        except Exception as error:  # the other ranks wait for what rank 0 decides
            trouble = f"{type(error).__name__}: {error}"
    plan, trouble = recovery.ranks.broadcast((plan, trouble))
    if trouble:
        raise RankFailed("looking for checkpoints", [(0, trouble)])
    return plan


def open_next(recovery: Recovery) -> Opened:
    """Open the next candidate; falls through to older ones, noting why, until all ranks have one open."""
    while recovery.tried < len(recovery.plan.choices):
        choice = recovery.plan.choices[recovery.tried]
        recovery.tried += 1
        opened, trouble = _open(recovery, _with_all_segments(recovery, choice))
        troubles = [text for text in recovery.ranks.exchange(trouble) if text]
        if not troubles and opened is not None:
            for reason in recovery.reasons:
                log.info("passed over %s", reason)
            return opened
        if opened is not None:
            opened.close()
        recovery.reasons.append(f"{choice.name}: {troubles[0]}")
    raise _nothing(recovery)


def _with_all_segments(recovery: Recovery, choice: Choice) -> Choice:
    """The choice with its lost segments brought back; where they don't come, what storage has, if it has any."""
    if not choice.lost:
        return choice
    found = recovery.bring_back(recovery, choice)
    if isinstance(found, str):
        recovery.reasons.append(f"{choice.name}: memory: {found}")
        return replace(choice, memory=False, lost={})
    return found


def without(recovery: Recovery, damage: Collection[Damage]) -> Opened:
    """Open the best checkpoint there is once these segments don't count; raises as `recover` does."""
    memory = recovery.origin.memory
    recovery.damaged.update((save_id, rank) for node, save_id, rank in damage if memory and node == memory.node)
    passed = {(choice.name, choice.save_id) for choice in recovery.plan.choices[: recovery.tried - 1]}
    plan = survey(recovery)
    choices = tuple(choice for choice in plan.choices if (choice.name, choice.save_id) not in passed)
    recovery.plan, recovery.tried = replace(plan, choices=choices), 0
    return open_next(recovery)


def _nothing(recovery: Recovery) -> NoRecoverableCheckpoint:
    if recovery.wanted is None:
        return NoRecoverableCheckpoint(recovery.origin.where, recovery.reasons)
    wanted = recovery.wanted
    everything = survey(replace(recovery, wanted=None, scope=names.COLLECTIVE))
    available = dict.fromkeys(choice.name for choice in everything.choices if choice.name != wanted)
    return CheckpointNotFound(wanted, recovery.origin.where, list(available), recovery.reasons)


def _open(recovery: Recovery, choice: Choice) -> tuple[Opened | None, str]:
    """Open every source that has the checkpoint; the first that shows what it consists of leads."""
    lease = _lease(recovery, choice)
    opened, trouble = _opened(recovery, choice, lease)
    if opened is None and lease is not None:
        lease.close()
    return opened, trouble


def _lease(recovery: Recovery, choice: Choice) -> ReadLease | None:
    """Keep on storage what is to come from there; one rank does so for all, before it looks whether it is still committed."""
    storage = recovery.origin.storage
    is_ours = recovery.ranks.rank == 0 and choice.save_id
    return read_lease(storage, choice.name) if storage is not None and is_ours and not choice.memory else None


def _opened(recovery: Recovery, choice: Choice, lease: ReadLease | None) -> tuple[Opened | None, str]:
    sources: list[Source] = []
    description: Description | None = None
    troubles: list[str] = []
    found = _sources(recovery, choice, troubles)
    told = _told(recovery, choice, found)
    for source in found:
        try:
            if description is None:
                description = _described(source, told)
        except DcpMemError as error:
            troubles.append(str(error))
            source.close()
            continue
        sources.append(source)
    if description is None and told is not None:  # this node has nothing of it, and storage neither
        try:
            description = _adopted(told)
        except DcpMemError as error:
            troubles.append(str(error))
    if description is None:
        return None, "; ".join(troubles) or "it is gone"
    recovery.reasons.extend(f"{choice.name}: {text}" for text in troubles)
    return Opened(choice, description, tuple(sources), lease), ""


def tell(recovery: Recovery, choice: Choice) -> StoredDescription | DcpMemError | None:
    """The same for a checkpoint of memory that isn't open."""
    found = _sources(recovery, replace(choice, storage=False), [])
    try:
        return _told(recovery, choice, found)
    finally:
        for source in found:
            source.close()


def _told(recovery: Recovery, choice: Choice, found: Sequence[Source]) -> StoredDescription | DcpMemError | None:
    """What one rank says of the checkpoint to all of them: who has it in memory, or rank 0 for storage.

    None where each sees it by itself: in its memory, or since each rank saved alone.
    """
    if recovery.scope != names.COLLECTIVE or (choice.memory and choice.teller is None):
        return None
    told: StoredDescription | DcpMemError | None = None
    if recovery.ranks.rank == (choice.teller or 0):
        try:
            told = _tell(recovery, choice, found)
        except Exception as error:  # the other ranks wait for it
            told = error if isinstance(error, DcpMemError) else DcpMemError(f"{type(error).__name__}: {error}")
    if choice.teller:
        told = next((one for one in recovery.ranks.gather(told) if one is not None), None)
    told = recovery.ranks.broadcast(told)
    faults.point("recover.told")
    return told


def _tell(recovery: Recovery, choice: Choice, found: Sequence[Source]) -> StoredDescription:
    if choice.teller is not None and found and isinstance(found[0], MemorySource):
        return found[0].tell()
    if not choice.storage or recovery.origin.storage is None:
        raise DcpMemError("it has left memory")
    return StorageSource(recovery.origin.storage, choice.name, choice.save_id, recovery.scope).fetch_description()


def _described(source: Source, told: StoredDescription | DcpMemError | None) -> Description:
    if isinstance(source, MemorySource) or told is None:
        return source.describe()
    if isinstance(told, DcpMemError):
        raise told
    return source.adopt(told) if isinstance(source, StorageSource) else source.describe()


def _adopted(told: StoredDescription | DcpMemError) -> Description:
    if isinstance(told, DcpMemError):
        raise told
    return description_of(told)


def _sources(recovery: Recovery, choice: Choice, troubles: list[str]) -> list[Source]:
    found: list[Source] = []
    held = _held(recovery, choice) if choice.memory or choice.holders else None
    memory = recovery.origin.memory
    if held is not None and memory is not None:
        try:
            source = MemorySource(held, memory.node, _damaged(recovery, held))
            if choice.holders is None and source.lacking:
                source.close()
                raise SegmentCorrupt(held.name, min(source.lacking), source.label, source.lacking[min(source.lacking)])
            found.append(source)
        except DcpMemError as error:
            troubles.append(str(error))
    if choice.storage and recovery.origin.storage is not None:
        save_id = choice.save_id if recovery.scope == names.COLLECTIVE else _own_save_id(recovery, choice)
        found.append(StorageSource(recovery.origin.storage, choice.name, save_id, recovery.scope))
    return found


def _held(recovery: Recovery, choice: Choice) -> Held | None:
    if recovery.origin.memory is None:
        return None
    own = recovery.scope != names.COLLECTIVE  # a rank that saved alone has a save id of its own
    return next(
        (
            held
            for held in recovery.origin.memory.find(choice.name)
            if held.manifest.scope == recovery.scope and (own or held.manifest.save_id == choice.save_id)
        ),
        None,
    )


def _own_save_id(recovery: Recovery, choice: Choice) -> str:
    assert recovery.origin.storage is not None
    found = [one for one in _stored_under(recovery.origin.storage, choice.name, recovery.scope) if not one.problem]
    return max(found, key=lambda one: one.created).save_id if found else choice.save_id


def _elect(recovery: Recovery, inventories: Sequence[Sequence[Finding]]) -> RecoveryPlan:
    stored, trouble = _on_storage(recovery, patient=not any(inventories))
    plan = elect(inventories, stored)
    return RecoveryPlan(plan.choices, (*plan.reasons, *trouble))


# -- memory ----------------------------------------------------------------------------------------------------------


def _in_memory(recovery: Recovery) -> list[Finding]:
    memory = recovery.origin.memory
    if memory is None:
        return []
    found = memory.held() if recovery.wanted is None else memory.find(recovery.wanted)
    return [
        _in_memory_of(memory, held, _damaged(recovery, held)) for held in found if held.manifest.scope == recovery.scope
    ]


def _in_memory_of(memory: JobMemory, held: Held, damaged: Collection[int]) -> Finding:
    """What this node has of a checkpoint."""
    manifest = held.manifest
    finding = Finding(held.name, manifest.save_id, manifest.created, count=len(manifest.segments))
    try:
        source = MemorySource(held, memory.node, damaged)
    except DcpMemError as error:
        return replace(finding, problem=str(error))
    source.close()
    if held.replication.outcome == "replicated":
        redundancy = Redundancy(held.replication.copies, held.replication.parity)
        finding = replace(finding, redundancy=redundancy)
    if len(source.present) == len(manifest.segments):
        return finding
    stripes = {file: record.stripe for file, record in memory.stripes_of(held).items()}
    sizes = {
        rank: 0 for rank, nbytes in enumerate(manifest.segments.nbytes) if not nbytes
    }  # of which there is no parity
    ranks = {one.rank for stripe in stripes.values() for one in stripe.shares}
    sizes |= {rank: manifest.segments.nbytes[rank] for rank in ranks}
    lacking = next(iter(source.lacking.values()), "")
    return replace(finding, segments=source.present, lacking=lacking, stripes=tuple(stripes.items()), sizes=sizes)


def _damaged(recovery: Recovery, held: Held) -> list[int]:
    return [rank for save_id, rank in recovery.damaged if save_id == held.manifest.save_id]


# -- storage ---------------------------------------------------------------------------------------------------------


def _on_storage(recovery: Recovery, *, patient: bool) -> tuple[list[Finding], list[str]]:
    """What storage has; where it doesn't answer, the reason. patient: wait for as long as it takes."""
    storage = recovery.origin.storage
    if storage is None or recovery.silence:
        return [], recovery.silence
    answer: list[list[Finding]] = []
    asking = daemon(lambda: answer.append(_ask(storage, recovery)))
    if patient:
        asking.join()
    elif recovery.heard.wait(_PATIENCE):
        asking.join(_LISTING_PATIENCE)
    if not answer and not recovery.silence:
        waited = _LISTING_PATIENCE if recovery.heard.is_set() else _PATIENCE
        recovery.silence.append(f"storage {storage.url} did not answer within {waited:.0f} s")
    return (answer[0] if answer else []), recovery.silence


def _ask(storage: Storage, recovery: Recovery) -> list[Finding]:
    try:
        wanted = [recovery.wanted] if recovery.wanted is not None else checkpoint_names(storage)
        if recovery.wanted is None:
            recovery.heard.set()
        found = in_parallel(lambda name: _stored_under(storage, name, recovery.scope), wanted)
        return [finding for findings in found for finding in findings]
    except Exception as error:
        recovery.silence.append(str(error) if isinstance(error, DcpMemError) else f"{type(error).__name__}: {error}")
        return []
    finally:
        recovery.heard.set()


def _stored_under(storage: Storage, name: str, scope: str) -> list[Finding]:
    found = stored_under(storage, name, scope)
    return [Finding(one.name, one.save_id, one.created, one.problem) for one in found]
