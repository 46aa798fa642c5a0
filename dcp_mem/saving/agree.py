"""First stage: all ranks settle on one save, and on what leaves memory for it."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from dcp_mem import faults
from dcp_mem.errors import CheckpointExists, ConfigError, MemoryBudgetExceeded, RankFailed
from dcp_mem.events import log
from dcp_mem.format import names
from dcp_mem.memory.job import Held, JobMemory
from dcp_mem.memory.locks import is_leased
from dcp_mem.memory.slots import capacity_for
from dcp_mem.policy.admission import Kept, NodeMemory, Verdict, admit, allowance, retire
from dcp_mem.policy.redundancy import Redundancy
from dcp_mem.policy.retention import Candidate, KeepLast, Retention
from dcp_mem.replicating.transfers import incoming
from dcp_mem.saving.plan import TAIL_ROOM
from dcp_mem.saving.values import Attempt, Caller, Planned, Unplanned
from dcp_mem.session import Topology
from dcp_mem.values import About

_COMPLAIN_EVERY = 10.0
_MOST_SLOTS = 64


_Proposal = tuple[Any, ...]
"""What the coordinator decides: a save id, whether the checkpoint goes to storage, its time, and what it says of it, if anything.

Plain, and without what nobody said: so a ballot fits into one letter.
"""


@dataclass(frozen=True, slots=True)
class _Survey:
    """What a rank brings to the agreement; what concerns its node comes from the node's leader.

    proposal: the coordinator's. needed: bytes that its segment takes. slots: bytes of
    its free ones, the largest first. exists, newest: of its node's checkpoints. plan_id, others, why_not: as in Planned and
    Unplanned.
    """

    name: str
    proposal: _Proposal | None = None
    needed: int = 0
    slots: tuple[int, ...] = ()
    node: NodeMemory | None = None
    exists: bool = False
    newest: float = 0.0
    plan_id: str = ""
    others: tuple[str, ...] = ()
    why_not: str = ""
    error: str = ""


class _Ballot(NamedTuple):
    """What all ranks' surveys come to; it stays about as small as this however many ranks there are.

    name: a digest of the checkpoint's. is_usual: no rank sees anything that speaks against staging at once, but for plans.
    proposal: the coordinator's. plan_id: "" where the ranks have none in common;
    others: plans that fit on every rank as well. why_not: (rank, why only DCP's planner can plan its state dict).
    is_replicating: some rank still has copies of an older checkpoint under way.
    """

    name: bytes
    plan_id: str
    is_usual: bool
    newest: float
    proposal: _Proposal | None
    others: tuple[str, ...] = ()
    why_not: tuple[tuple[int, str], ...] = ()
    is_replicating: bool = False

    def join(self, other: _Ballot) -> _Ballot:
        fitting = {self.plan_id, *self.others} & {other.plan_id, *other.others} - {""}
        plan_id = self.plan_id if self.plan_id == other.plan_id else ""
        return _Ballot(
            self.name,
            plan_id,
            self.name == other.name and self.is_usual and other.is_usual,
            max(self.newest, other.newest),
            self.proposal or other.proposal,
            tuple(sorted(fitting - {plan_id})),
            tuple(sorted(self.why_not + other.why_not)[:1]),
            self.is_replicating or other.is_replicating,
        )


class NoCommonPlan(Exception):
    """The ranks don't save by the same plan yet, or not any more.

    why_not: why they must leave it to DCP's planner, if they must. in_common: a plan that fits on every rank, if there is one.
    """

    def __init__(self, why_not: str, in_common: str = "") -> None:
        super().__init__(why_not, in_common)
        self.why_not, self.in_common = why_not, in_common


def agree(caller: Caller, planned: Planned | Unplanned | Exception) -> Attempt | None:
    """Settle save id, persistence, eviction and admission for all ranks; None where the save is to be skipped.

    planned: an exception where this rank couldn't plan. Raises on all ranks alike: MemoryBudgetExceeded,
    CheckpointExists, ConfigError, RankFailed, and NoCommonPlan, before anything has been decided.
    """
    started = time.monotonic()
    topology = caller.session.topology(caller.ranks, caller.settings.failure_domain)
    survey = _survey_or_error(caller, topology, planned)
    ballot = caller.ranks.all_reduce(_ballot(caller, topology, survey), _Ballot.join)
    proposal, newest = ballot.proposal, ballot.newest
    if ballot.is_usual and not ballot.plan_id:
        raise _no_common_plan(ballot.why_not, ballot.others)
    may_replicate = True
    if ballot.is_replicating:
        may_replicate = _settle_replication(caller)
        survey = _survey_or_error(caller, topology, planned)  # there may be more room now
    if not ballot.is_usual:
        surveys = _agree_at_length(caller, topology, planned, survey)
        if surveys is None:
            return None
        proposal, newest = surveys[0].proposal, max(survey.newest for survey in surveys)
    faults.point("save.agreed")
    assert proposal is not None
    save_id, persist, now, *said = proposal
    created, about = max(now, newest + 1e-3), About(*said)
    return Attempt(save_id, created, persist, topology, started, may_replicate, about)


def _settle_replication(caller: Caller) -> bool:
    """Do on all ranks alike what `on_replication` says of the older checkpoint's; whether the new one may have copies."""
    replicator = caller.session.replicator
    if caller.settings.on_replication == "skip":
        return False
    if caller.settings.on_replication == "overtake":
        replicator.cancel()
    replicator.wait()
    return True


def redundancy_on(caller: Caller, topology: Topology) -> Redundancy:
    """The redundancy that is wanted, as far as there are nodes for it."""
    return caller.settings.redundancy.on(len(set(topology.nodes)))


def _ballot(caller: Caller, topology: Topology, survey: _Survey) -> _Ballot:
    node, limit, keep = survey.node, caller.settings.memory_limit, caller.settings.keep
    has_room = _has_slots(caller, topology, survey) and (
        node is None or (len(node.kept) <= allowance(node.kept, keep) and (limit is None or node.used <= limit))
    )
    return _Ballot(
        hashlib.sha256(survey.name.encode()).digest()[:8],
        survey.plan_id,
        has_room and not (survey.error or survey.exists),
        survey.newest,
        survey.proposal,
        survey.others,
        ((caller.ranks.rank, survey.why_not),) if survey.why_not else (),
        caller.session.replicator.is_busy,
    )


def _has_slots(caller: Caller, topology: Topology, survey: _Survey) -> bool:
    """Whether this rank has a free slot for its segment, and one for each copy that will come to it, as far as it knows."""
    copies: tuple[int, ...] | None = ()
    if redundancy_on(caller, topology):
        copies = caller.session.expected_copies.get(caller.group)
    if copies is None:
        return False
    needs = [survey.needed, *copies]
    return _reusable(needs, survey.slots) == sum(needs)


def _reusable(needs: Sequence[int], slots: Sequence[int]) -> int:
    """How many of these bytes find room in slots that are there."""
    return sum(map(min, sorted(needs, reverse=True), slots))


def _agree_at_length(
    caller: Caller, topology: Topology, planned: Planned | Unplanned | Exception, survey: _Survey
) -> Sequence[_Survey] | None:
    """Look at every rank's survey: why not to stage, what to evict first, how long to wait. None where the save is skipped."""
    started = complained = time.monotonic()
    while True:
        surveys = caller.ranks.exchange(survey)
        if isinstance(planned, Exception):
            raise planned
        verdict = _verdict(caller, topology, surveys)
        if topology.is_leader:
            _evict(caller.session.memory, verdict.evict, "to make room for a newer checkpoint")
        if verdict.evict:
            caller.ranks.exchange(None)  # nobody stages before the room that is counted on is there
        if verdict.action == "stage":
            return surveys
        if caller.settings.on_full == "raise" or (caller.settings.on_full == "wait" and verdict.lasting):
            raise MemoryBudgetExceeded(verdict.needed, verdict.limit, f"{caller.name}: {verdict.why}")
        if caller.settings.on_full == "skip":
            log.warning("%s is skipped: %s", caller.name, verdict.why)
            return None
        complained = _complain(caller, verdict, started, complained)
        caller.session.wake_agent(caller.settings)
        time.sleep(0.02)
        survey = _survey_or_error(caller, topology, planned)


def _survey_or_error(caller: Caller, topology: Topology, planned: Planned | Unplanned | Exception) -> _Survey:
    try:
        if isinstance(planned, Exception):
            raise planned
        caller.session.stop_prefaulting()
        caller.session.slots.take_back(caller.session.memory.lists)  # if the last save failed, perhaps elsewhere
        if topology.is_leader and not caller.session.swept:
            caller.session.memory.sweep()
        caller.session.swept = True
        if isinstance(planned, Unplanned):
            return _Survey(caller.name, why_not=planned.why_not)
        return replace(_survey(caller, topology, planned), plan_id=planned.plan_id, others=planned.others)
    except Exception as error:
        return _Survey(caller.name, error=f"{type(error).__name__}: {error}")


def _survey(caller: Caller, topology: Topology, planned: Planned) -> _Survey:
    session = caller.session
    needed = capacity_for(planned.nbytes + TAIL_ROOM)
    slots = session.slots.spare_sizes()[:_MOST_SLOTS]
    if planned.is_written:  # it needs no other slot than its own
        slots = sorted([needed, *slots], reverse=True)
    mine = _Survey(
        name=caller.name,
        proposal=_proposal(caller) if caller.ranks.rank == 0 else None,
        needed=needed,
        slots=tuple(slots),
    )
    if not topology.is_leader:
        return mine
    memory = caller.session.memory
    kept = _kept(memory, caller.scope, caller.settings.keep_memory, bool(redundancy_on(caller, topology)))
    node = NodeMemory(
        kept=kept,
        used=memory.allocated_bytes(),
        spare=0,
        free=memory.free_bytes(),
        limit=caller.settings.memory_limit,
        needed=0,
    )
    exists = not caller.settings.overwrite and any(
        held.manifest.scope == caller.scope for held in memory.find(caller.name)
    )
    return replace(mine, node=node, exists=exists, newest=max((one.created for one in kept), default=0.0))


def _proposal(caller: Caller) -> _Proposal:
    persisted, policy = caller.session.persisted, caller.settings.persist
    about = caller.about
    persist = about.persist or policy.wants(persisted.saves, persisted.seconds())
    said = () if about == About() else (about.step, dict(about.metrics), about.persist, about.pause)
    return names.new_save_id(), persist, time.time(), *said


def keep_no_more(memory: JobMemory, scope: str, policy: Retention, gets_copies: bool) -> None:
    """Evict what the policy doesn't keep, but for what is being read or flushed at this moment, and what is still needed.

    gets_copies: checkpoints are replicated, so the newest one that is stays until a newer one is.
    """
    kept = _kept(memory, scope, policy, gets_copies)
    _evict(memory, retire(kept, policy.most or 1), "superseded by a newer checkpoint")


def _kept(memory: JobMemory, scope: str, policy: Retention, gets_copies: bool) -> tuple[Kept, ...]:
    result = []
    there = [held for held in memory.held() if held.manifest.scope == scope]
    chosen = _chosen(policy, there)
    for held in there:
        try:
            busy = is_leased(held.manifest_path)
        except FileNotFoundError:
            continue
        result.append(
            Kept(
                held.manifest.save_id,
                held.manifest.created,
                memory.nbytes_of(held),
                held.manifest.persist,
                held.pending,
                busy,
                replicated=gets_copies and held.replication.outcome == "replicated",
                chosen=held.manifest.save_id in chosen,
            )
        )
    return tuple(result)


def _chosen(policy: Retention, there: Sequence[Held]) -> frozenset[str]:
    """Save ids of those that the policy keeps; of all, where nothing but their number counts."""
    if isinstance(policy, KeepLast):
        return frozenset(held.manifest.save_id for held in there)
    manifests = [held.manifest for held in there]
    return policy.chosen([Candidate(one.save_id, one.created, one.step, one.metrics) for one in manifests])


def _verdict(caller: Caller, topology: Topology, surveys: Sequence[_Survey]) -> Verdict:
    """The same on every rank, from what every rank brought."""
    failures = [(rank, survey.error) for rank, survey in enumerate(surveys) if survey.error]
    if failures:
        raise RankFailed(f"preparing {caller.name}", failures)
    named = sorted({survey.name for survey in surveys})
    if len(named) > 1:
        raise ConfigError(f"the ranks save under different checkpoint ids: {', '.join(named)}")
    if len({survey.plan_id for survey in surveys}) > 1 or not surveys[0].plan_id:
        fitting = set.intersection(*({survey.plan_id, *survey.others} for survey in surveys)) - {""}
        raise _no_common_plan(
            [(rank, survey.why_not) for rank, survey in enumerate(surveys) if survey.why_not], fitting
        )
    if any(survey.exists for survey in surveys):
        raise CheckpointExists(caller.name, "memory")
    needs = _needs(caller, topology, surveys)
    nodes = []
    for leader, survey in enumerate(surveys):
        if survey.node is not None:
            neighbours = topology.neighbours(topology.nodes[leader])
            nodes.append(
                replace(
                    survey.node,
                    needed=sum(sum(needs[rank]) for rank in neighbours),
                    spare=sum(_reusable(needs[rank], surveys[rank].slots) for rank in neighbours),
                )
            )
    return admit(nodes, caller.settings.keep)


def _needs(caller: Caller, topology: Topology, surveys: Sequence[_Survey]) -> list[list[int]]:
    """Bytes that each rank needs for its segment, and for each copy, or parity, that will come to it."""
    sizes = tuple(survey.needed for survey in surveys)
    coming = incoming(topology.nodes, topology.domains, sizes, redundancy_on(caller, topology))
    return [[own, *others] for own, others in zip(sizes, coming, strict=True)]


def _no_common_plan(why_not: Sequence[tuple[int, str]], fitting: Collection[str]) -> NoCommonPlan:
    reasons = [f"rank {rank} has {text}" for rank, text in why_not]
    return NoCommonPlan(reasons[0] if reasons else "", min(fitting, default=""))


def _evict(memory: JobMemory, save_ids: frozenset[str], why: str) -> None:
    for held in memory.held() if save_ids else ():
        if held.manifest.save_id in save_ids:
            try:
                memory.evict(held, why)
            except OSError as error:  # the others go on to the next exchange, and so must this rank
                log.warning("%s could not be evicted: %s", held.name, error)


def _complain(caller: Caller, verdict: Verdict, started: float, complained: float) -> float:
    if time.monotonic() - complained < _COMPLAIN_EVERY:
        return complained
    log.warning(
        "%s has waited %.0f s for room in memory: %s (on_full='skip' would go on without it)",
        caller.name,
        time.monotonic() - started,
        verdict.why,
    )
    return time.monotonic()
