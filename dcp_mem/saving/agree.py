"""First exchange of a save: all ranks settle on one save, and on what leaves memory for it."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import astuple, replace
from typing import Any

from dcp_mem.comm.agreement import Attempted, attempt, described, known_to_all, raise_together
from dcp_mem.common import faults
from dcp_mem.common.log import log
from dcp_mem.common.parallel import daemon
from dcp_mem.common.values import SaveInfo
from dcp_mem.errors import (
    CheckpointExists,
    ConfigError,
    DcpMemError,
    FlushFailed,
    MemoryBudgetExceeded,
    RankFailed,
)
from dcp_mem.flushing.registration import umask_for
from dcp_mem.format import names
from dcp_mem.memory.checkpoint import LocalCheckpoint
from dcp_mem.policy.admission import Verdict, admit, allowance
from dcp_mem.policy.order import SaveNumber
from dcp_mem.policy.persistence import Persisted
from dcp_mem.policy.slots import SlotNeed, capacity_for, growth
from dcp_mem.runtime.states import AgentPatience
from dcp_mem.runtime.topology import Topology
from dcp_mem.saving.retention import evict, records_nbytes
from dcp_mem.saving.room import give_back, kept_on, node_memories, own_claims, with_node
from dcp_mem.saving.values import (
    TAIL_ROOM,
    Agreed,
    Ballot,
    NoCommonPlan,
    Planned,
    Proposal,
    RankReport,
    SaveContext,
    Unplanned,
    ballot_of,
    packed_run,
    unpacked_run,
)
from dcp_mem.storage.posix import PosixStorage

_COMPLAIN_EVERY = 10.0
_MOST_SLOTS = 64
_DIRECTORY_SECONDS = 10.0
"""For which a save waits for a file system that doesn't answer."""
_PAUSE = 0.02


def agree(context: SaveContext, planned: Attempted[Planned | Unplanned]) -> Agreed | None:
    """Settle save id, persistence, eviction and admission for all ranks.

    1. Topology: who shares a node. An exchange for each new set of ranks.
    2. Report: what this rank needs, and what it sees against the save; an error, too (invariant 8).
    3. Ballot: all reports joined, in one exchange. A save like the one before needs no other.
    4. If copies of an older checkpoint are under way: wait for them, cancel them, or do without.
    5. If any rank sees something against the save: all ranks see all reports, and settle it at
       length.

    `planned`: this rank's part of the plan, or why it has none. Returns None where the save is to
    be skipped: memory is full, and `on_full` says so. Raises NoCommonPlan, MemoryBudgetExceeded,
    CheckpointExists, ConfigError, RankFailed.
    """
    started = time.monotonic()
    topology = context.session.nodes.topology(context.ranks, context.settings.failure_domain)
    report = _report(context, topology, planned)
    ballot = context.ranks.all_reduce(_ballot(context, topology, planned, report), Ballot.join)
    proposal, newest = ballot.proposal, SaveNumber.unpacked(ballot.newest)
    if ballot.is_usual and not ballot.plan_id:
        raise _no_common_plan(ballot.why_not, ballot.other_plan_ids, ballot.copied_on)
    may_replicate = True
    if ballot.is_replicating:
        may_replicate = _settle_replication(context)
        report = _report(context, topology, planned)  # there may be more room now
    if not ballot.is_usual:
        reports = _agree_at_length(context, topology, planned, report)
        if reports is None:
            return None
        proposal, newest = reports[0].proposal, max(one.newest for one in reports)
    faults.point("save.agreed")
    assert proposal is not None
    save_id, persist, now, packed, counts, *said = proposal
    *said, replaces = said or (None,)
    generation, run = unpacked_run(packed)
    number, run = context.session.numbers.begin(newest, generation, run)
    return Agreed(
        save_id=save_id,
        created=now,
        number=number,
        run=run,
        persist=persist,
        topology=topology,
        redundancy=context.redundancy_on(topology),
        started=started,
        may_replicate=may_replicate,
        info=SaveInfo(*said),
        replaces=replaces,
        persisted=None if counts is None else Persisted(*counts),
    )


# -- what a rank reports ---------------------------------------------------------------------------


def _report(
    context: SaveContext, topology: Topology, planned: Attempted[Planned | Unplanned]
) -> RankReport:
    """Return what this rank has to say; an error too, for the other ranks wait for a report."""
    reported = attempt(lambda: _tidied_report(context, topology, planned.value))
    if reported.error is not None:
        return RankReport(name=context.name, error=described(reported.error))
    return reported.value


def _tidied_report(
    context: SaveContext, topology: Topology, planned: Planned | Unplanned
) -> RankReport:
    """Clear away what a failed save has left, then report what there is."""
    session = context.session
    session.prefaulting.stop()
    if not session.last_saves.is_clean:
        session.slots.take_back(session.memory.lists)
        if topology.is_leader:
            session.memory.sweep()
        session.last_saves.is_clean = True
    if isinstance(planned, Unplanned):
        return RankReport(name=context.name, why_not=planned.why_not)
    report = RankReport(
        name=context.name,
        newest=session.numbers.newest(),
        needed=capacity_for(planned.nbytes + TAIL_ROOM),
        frozen=capacity_for(planned.copied_frozen_nbytes),
        shared=capacity_for(planned.unreplicated_frozen_nbytes),
        slots=tuple(session.slots.free()[:_MOST_SLOTS]),
        is_written=planned.filled is not None,
        plan_id=planned.plan_id,
        other_plan_ids=planned.other_plan_ids,
    )
    return _of_node(context, topology, report) if topology.is_leader else report


def _of_node(context: SaveContext, topology: Topology, report: RankReport) -> RankReport:
    """Add what a node's leader sees in its memory, and what rank 0 proposes."""
    checkpoints = context.session.memory.checkpoints()
    manifests = [one.manifest for one in checkpoints]
    own = [one for one in checkpoints if one.manifest.scope == context.scope]
    return replace(
        report,
        exists=not context.settings.overwrite and context.name in [one.name for one in own],
        newest=max(report.newest, context.session.memory.newest_number(manifests)),
        has_too_many=_has_too_many(context, topology, own),
        proposal=_proposal(context, checkpoints) if context.ranks.rank == 0 else None,
    )


def _has_too_many(context: SaveContext, topology: Topology, own: Sequence[LocalCheckpoint]) -> bool:
    """Tell whether something must leave the node's memory before another checkpoint is staged."""
    settings, memory = context.settings, context.session.memory
    if len(own) > settings.keep:
        kept = kept_on(context, topology, own, in_detail=False)
        if len(kept) > allowance(kept, settings.keep):
            return True
    limit = settings.memory_limit
    return limit is not None and memory.allocated_bytes() + records_nbytes(own) > limit


def _proposal(context: SaveContext, checkpoints: Sequence[LocalCheckpoint]) -> Proposal:
    info, numbers = context.info, context.session.numbers
    generation, run = numbers.run([one.manifest for one in checkpoints])
    left = (one.manifest for one in checkpoints if one.manifest.run != run and not one.rejected)
    before = numbers.counted_before(context.scope, info.step, left)
    policy = context.settings.persist
    is_chosen, counts = policy.count(before, context.name, info.step, time.monotonic())
    replaces = _make_directory(context)
    said: tuple[Any, ...] = (info.step, dict(info.metrics), info.persist, info.pause, replaces)
    if info == SaveInfo() and replaces is None:
        said = ()
    persist = info.persist or is_chosen
    sent = None if counts is None else astuple(counts)
    return names.new_save_id(), persist, time.time(), packed_run(generation, run), sent, *said


def _make_directory(context: SaveContext) -> str | None:
    """Make the checkpoint's directory, where its writer does; return what a manifest has of it.

    Programs that name only a path put files of their own there once the save has returned, list it,
    or remove it. What it has inside from then on tells the flush that nobody has removed it. What
    goes wrong is logged: the checkpoint in memory is worth more than its directory.
    """
    url = context.settings.url
    if not context.settings.makes_directories or url is None or "://" in url:
        return None
    made: list[str] = []
    errors: list[DcpMemError] = []

    def make() -> None:
        try:
            made.append(_made(url, context))
        except DcpMemError as error:
            errors.append(error)

    daemon(make, "dcp_mem-directory").join(_DIRECTORY_SECONDS)
    if not made:
        why = errors[0] if errors else f"no answer within {_DIRECTORY_SECONDS:.0f} s"
        log.warning("%s/%s appears with its flush alone: %s", url, context.name, why)
        return None
    return made[0]


def _made(url: str, context: SaveContext) -> str:
    """Make a directory; return the identity of the `.metadata` that lay there, "" for none."""
    mode, file = context.settings.storage_mode, names.metadata_file(context.scope)
    storage = PosixStorage(url, None if mode is None else 0o777 & ~umask_for(mode))
    replaced = {entry.name: entry.identity for entry in storage.ls(context.name)}.get(file, "")
    storage.make_directory(f"{context.name}/{names.OWN}")
    return replaced


# -- the ballot ------------------------------------------------------------------------------------


def _ballot(
    context: SaveContext,
    topology: Topology,
    planned: Attempted[Planned | Unplanned],
    report: RankReport,
) -> Ballot:
    has_room = not report.has_too_many and _has_slots(context, topology, planned, report)
    is_replicating = context.session.replicator.is_busy
    return ballot_of(context.ranks.rank, report, has_room=has_room, is_replicating=is_replicating)


def _has_slots(
    context: SaveContext,
    topology: Topology,
    planned: Attempted[Planned | Unplanned],
    report: RankReport,
) -> bool:
    """Tell whether this rank has slots for its segment and the copies that will come to it.

    Without a memory limit they may be made anew, where there is room even if every rank of the node
    needs as much, and twice that.
    """
    copies: tuple[int, ...] | None = ()
    if context.redundancy_on(topology):
        if report.shared:  # of other nodes' slots each rank hears only at length
            return False
        copies = context.session.last_saves.expected_copies.get(context.group)
    if copies is None:
        return False
    slots, limit = report.slots, context.settings.memory_limit
    if limit is not None:  # what nobody holds, other ranks may take
        slots = tuple(one for one in slots if one.is_held)
    grows = growth([*own_claims(planned), *map(SlotNeed, copies)], slots)
    if not grows or limit is not None:
        return not grows
    ranks = topology.nodes.count(topology.nodes[topology.rank])
    return 2 * ranks * grows <= context.session.memory.free_bytes()


def _settle_replication(context: SaveContext) -> bool:
    """Do with the older checkpoint's copies what `on_replication` says, on all ranks alike.

    Returns whether the new checkpoint may have copies.
    """
    replicator = context.session.replicator
    if context.settings.on_replication == "skip":
        return False
    if context.settings.on_replication == "cancel":
        replicator.cancel()
    replicator.wait()
    return True


# -- at length -------------------------------------------------------------------------------------


def _agree_at_length(
    context: SaveContext,
    topology: Topology,
    planned: Attempted[Planned | Unplanned],
    report: RankReport,
) -> Sequence[RankReport] | None:
    """Look at all ranks' reports until they allow the save, or forbid it; None where it is skipped.

    Each round: exchange reports; decide, alike on every rank; evict what is in the way, and see
    whether it has left; stage, raise, skip, or wait and report again.
    """
    waiting = _RoomWait(context)
    while True:
        reports = context.ranks.exchange(with_node(context, topology, report))
        _refuse_other_names(reports)
        if planned.error is not None:
            failed = [(rank, one.error) for rank, one in enumerate(reports) if one.error]
            cause = planned.error.__cause__ or RankFailed(f"preparing {context.name}", failed)
            raise known_to_all(planned.error) from cause
        verdict = _verdict(context, topology, reports)
        if topology.is_leader:
            memory = context.session.memory
            leaving = memory.checkpoints() if verdict.evict else ()
            evict(memory, leaving, verdict.evict, "to make room for a newer checkpoint")
        if verdict.evict:
            context.ranks.exchange(
                None
            )  # no rank stages before the room is there that is counted on
        if verdict.gives_back:
            verdict = give_back(context, topology, planned, reports) or verdict
        if verdict.action == "stage":
            return reports
        if not _waits(context, verdict):
            return None
        waiting.complain(verdict)
        why_not = waiting.in_vain()
        time.sleep(_PAUSE)
        report = _report(context, topology, planned)
        if why_not:
            why = f"memory is full until a flush frees some, and the agent {why_not}"
            report = replace(report, error=described(FlushFailed(context.name, why)))


def _waits(context: SaveContext, verdict: Verdict) -> bool:
    """Decide whether to wait for room, or else to skip the save. Raises MemoryBudgetExceeded."""
    on_full = context.settings.on_full
    if on_full == "raise" or (on_full == "wait" and verdict.lasting):
        why = f"{context.name}: {verdict.why}"
        raise known_to_all(MemoryBudgetExceeded(verdict.needed, verdict.limit, why))
    if on_full == "skip":
        log.warning("%s is skipped: %s", context.name, verdict.why)
        return False
    return True


class _RoomWait:
    """The time that a save has waited for room, logged from time to time."""

    def __init__(self, context: SaveContext) -> None:
        self._context = context
        self._started = self._complained = time.monotonic()
        self._patience = AgentPatience(context.settings, self._wake)

    def in_vain(self) -> str:
        """Return why there is no agent that would free a slot; "" while there may be one."""
        return self._patience.ended_by()

    def _wake(self, _: bool) -> str:
        return self._context.session.wake_agent(self._context.settings, is_waiting=True)

    def complain(self, verdict: Verdict) -> None:
        now = time.monotonic()
        if now - self._complained >= _COMPLAIN_EVERY:
            self._complained = now
            log.warning(
                "%s has waited %.0f s for room in memory: %s "
                "(on_full='skip' would go on without it)",
                self._context.name,
                now - self._started,
                verdict.why,
            )


def _verdict(context: SaveContext, topology: Topology, reports: Sequence[RankReport]) -> Verdict:
    """Decide from what every rank reported; the same on every rank."""
    failures = [(rank, report.error) for rank, report in enumerate(reports) if report.error]
    raise_together(f"preparing {context.name}", tuple(failures))
    _check_plans(reports)
    if any(report.exists for report in reports):
        raise known_to_all(CheckpointExists(context.name, "memory"))
    return admit(node_memories(context, topology, reports), context.settings.keep)


def _refuse_other_names(reports: Sequence[RankReport]) -> None:
    """Raise ConfigError, on all ranks, where they save different checkpoints."""
    named = sorted({report.name for report in reports})
    if len(named) > 1:
        text = (
            f"the ranks save under different checkpoint ids: {', '.join(named)} "
            f"(where several threads save, they must do so in the same order on all ranks)"
        )
        raise known_to_all(ConfigError(text), is_of_one_call=False)


def _check_plans(reports: Sequence[RankReport]) -> None:
    """Raise NoCommonPlan unless all ranks save by one plan."""
    if len({report.plan_id for report in reports}) > 1 or not reports[0].plan_id:
        fitting = set.intersection(
            *({report.plan_id, *report.other_plan_ids} for report in reports)
        )
        reasons = [(rank, report.why_not) for rank, report in enumerate(reports) if report.why_not]
        copied_on = [rank for rank, report in enumerate(reports) if report.is_written]
        raise _no_common_plan(reasons, fitting - {""}, copied_on)


def _no_common_plan(
    why_not: Sequence[tuple[int, str]], fitting: Collection[str], copied_on: Sequence[int]
) -> NoCommonPlan:
    reasons = [f"rank {rank} has {text}" for rank, text in why_not]
    first = reasons[0] if reasons else ""
    return known_to_all(NoCommonPlan(first, min(fitting, default=""), copied_on))
