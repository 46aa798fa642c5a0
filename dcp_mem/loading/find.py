"""A load's candidates: which all ranks can load, and the newest that can be opened."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial

from dcp_mem.comm.agreement import Failures, from_all_ranks, joined, known_to_all
from dcp_mem.common import faults
from dcp_mem.common.log import log
from dcp_mem.common.sendable import sendable
from dcp_mem.common.value_class import value_class
from dcp_mem.errors import CheckpointNotFound, ConfigError, NoRecoverableCheckpoint
from dcp_mem.format import names
from dcp_mem.loading.load_attempt import DamagedSegment, LoadAttempt
from dcp_mem.loading.open import CannotOpen, OpenCheckpoint, open_together
from dcp_mem.loading.repair import CannotRepair, begin_repair, raise_cannot_repair
from dcp_mem.loading.survey import Search, survey_memory
from dcp_mem.policy.election import (
    ElectedCheckpoint,
    FoundCheckpoint,
    RecoveryPlan,
    elect,
    in_common,
)
from dcp_mem.replicating.plan import members_of
from dcp_mem.replicating.repair_plan import lost_segments
from dcp_mem.runtime.last_saves import Loaded, note_loaded


def open_newest(load: LoadAttempt) -> OpenCheckpoint:
    """Open the newest checkpoint that all ranks can load, or the one that was asked for.

    1. Survey and elect checkpoints that all ranks saved together; where there are none, those that
       each rank saved alone.
    2. Open the newest; fall through to older ones, noting why.

    Raises NoRecoverableCheckpoint, CheckpointNotFound, ConfigError, RankFailed.
    """
    for scope in (names.COLLECTIVE, names.rank_scope(load.request.rank)):
        load.search = replace(load.search, scope=scope)
        plan = elect_together(load, load.search)
        load.adopt(plan)
        if plan.choices:
            break
    return open_next(load)


def open_next(load: LoadAttempt) -> OpenCheckpoint:
    """Open the next candidate that all ranks can open; raise as `open_newest` does."""
    while (candidate := load.next_candidate()) is not None:
        try:
            opened = open_together(load, _with_lost_segments(load, candidate))
        except CannotOpen as error:
            log.warning("%s can't be opened (%s)", candidate.name, error)
            load.note(candidate, str(error))
            if error.lacking:  # another node, or storage, may have them
                load.mark_damaged(error.lacking)
                load.adopt_again(elect_together(load, load.search))
            continue
        for reason in load.reasons:
            log.info("passed over %s", reason)
        _note_contradiction(load)
        return opened
    raise known_to_all(_nothing_found(load))


def open_without(load: LoadAttempt, damaged: Collection[DamagedSegment]) -> OpenCheckpoint:
    """Open the best checkpoint there is without these segments; raise as `open_newest` does.

    That may be the last candidate again, from other copies or parity.

    `damaged`: segments that are of no use from now on, on any node.
    """
    load.mark_damaged(damaged)
    load.adopt_again(elect_together(load, load.search))
    return open_next(load)


def _with_lost_segments(load: LoadAttempt, candidate: ElectedCheckpoint) -> ElectedCheckpoint:
    """Return the candidate with its lost segments rebuilt; without memory where that fails."""
    if not candidate.lost:
        return candidate
    try:
        return _rebuild_lost_segments(load, candidate)
    except CannotRepair as error:
        load.note(candidate, f"memory: {error}")
        return replace(candidate, memory=False, lost={})


def _note_contradiction(load: LoadAttempt) -> None:
    """Say aloud where a checkpoint that is older by the job's order has a later step."""
    contradiction = load.contradiction()
    if contradiction and contradiction not in load.reasons:
        load.reasons.append(contradiction)
        log.warning("%s", contradiction)


def _nothing_found(load: LoadAttempt) -> NoRecoverableCheckpoint:
    where, wanted = str(load.request.places), load.request.wanted
    if wanted is None:
        return NoRecoverableCheckpoint(where, load.reasons)
    everything = elect_together(load, Search(None, names.COLLECTIVE))
    available = dict.fromkeys(choice.name for choice in everything.choices if choice.name != wanted)
    return CheckpointNotFound(wanted, where, list(available), load.reasons)


# -- segments that no node has any more ------------------------------------------------------------


def _rebuild_lost_segments(load: LoadAttempt, choice: ElectedCheckpoint) -> ElectedCheckpoint:
    """Rebuild the segments that no node has; return the choice with the ranks that have them now.

    1. Every node gets to know the checkpoint.
    2. Every rank plans alike which node rebuilds which segment.
    3. The segments are rebuilt; one all-reduce says how that went.

    All ranks call this together.

    `choice`: the checkpoint, with what each lost segment is the XOR of. Raises CannotRepair.
    """
    repair = begin_repair(load, choice)
    plans = lost_segments(repair.nodes, repair.manifest.segments, choice)
    texts = [text for _, text in repair.session.replicator.carry_out(repair.task(plans))]
    own: Failures = ((repair.ranks.rank, texts[0]),) if texts else ()
    failures = repair.ranks.all_reduce(own, joined)
    faults.point("mend.done")
    raise_cannot_repair(failures)
    members = members_of(repair.nodes)
    holders = {
        names.rank_of(plan.file): tuple(members[repair.nodes[plan.receiver]]) for plan in plans
    }
    own_node = repair.nodes[load.ranks.rank]
    here = [rank for rank, ranks in holders.items() if repair.nodes[ranks[0]] == own_node]
    load.mark_rebuilt(choice.save_id, here)
    log.info("%s: %d segments came back from parity", choice.name, len(plans))
    return replace(choice, holders={**(choice.holders or {}), **holders}, lost={})


_LOOKING = "looking for checkpoints"


@sendable
@value_class
class _Survey:
    """One rank's contribution to the election."""

    wanted: str | None  # name of the checkpoint that this rank was asked for; None for the newest
    findings: Sequence[FoundCheckpoint]
    plans_itself: bool


@sendable
@value_class
class _Decision:
    """Rank 0's decision from all ranks' surveys."""

    wanted: Sequence[str] = ()  # the names that ranks were asked for, where they differ
    # what can be loaded; None where it isn't rank 0 alone that elects
    plan: RecoveryPlan | None = None
    all_plan_themselves: bool = False


def elect_together(load: LoadAttempt, search: Search) -> RecoveryPlan:
    """Return what can be loaded, newest first, and why the rest can't; the same on all ranks.

    1. Every rank surveys its node's memory. Surveys go up the tree to rank 0; equal ones, as of
       the ranks of a node, are sent once.
    2. Rank 0 surveys storage for all, and elects; one broadcast. Where ranks saved alone, each
       does so for itself; one exchange.
    3. Every rank remembers the greatest number of all checkpoints: its next saves are newer.

    `load`: the load; it is told what the ranks have in common, and of the silence of storage.
    Raises ConfigError, Exception, RankFailed.
    """
    decision = from_all_ranks(
        load.ranks,
        _LOOKING,
        partial(_survey, load, search),
        partial(_decide, load, search),
    )
    faults.point("recover.surveyed")
    if decision.wanted:
        text = f"the ranks load different checkpoint ids: {', '.join(decision.wanted)}"
        raise known_to_all(ConfigError(text))
    plan, load.all_plan_themselves = decision.plan, decision.all_plan_themselves
    if plan is None:
        # Nothing raises in front of this exchange: a silent storage is a reason, not an error.
        findings = _survey_memory(load, search)
        plan = in_common(load.ranks.exchange(_elect(load, search, [findings])))
    note_loaded(load.request.settings, Loaded(plan.newest))
    return plan


def _survey(load: LoadAttempt, search: Search) -> _Survey:
    return _Survey(search.wanted, _survey_memory(load, search), load.request.plans_itself)


def _decide(load: LoadAttempt, search: Search, surveys: Sequence[_Survey]) -> _Decision:
    wanted = sorted({survey.wanted or "the newest" for survey in surveys})
    if len(wanted) > 1:
        return _Decision(wanted)
    plan = None
    if search.scope == names.COLLECTIVE:
        plan = _elect(load, search, [survey.findings for survey in surveys])
    all_plan = all(survey.plans_itself for survey in surveys)
    return _Decision(plan=plan, all_plan_themselves=all_plan)


def _survey_memory(load: LoadAttempt, search: Search) -> list[FoundCheckpoint]:
    if load.request.refusal is not None:
        raise load.request.refusal
    findings, load.local = survey_memory(load.memory, search, load.damaged_ranks)
    return findings


def _elect(
    load: LoadAttempt, search: Search, inventories: Sequence[Sequence[FoundCheckpoint]]
) -> RecoveryPlan:
    """Survey storage, and elect from what memory and storage have."""
    found = [one for inventory in inventories for one in inventory]
    sound = [one for one in found if not (one.problem or one.rejected)]
    directories = {one.name for one in found if one.replaces is not None and not one.was_stored}
    survey = load.storage_survey
    stored = survey.findings(search, is_needed=not sound, directories=directories)
    plan = elect(inventories, stored, is_named=search.wanted is not None, removed=survey.removed)
    return replace(plan, reasons=(*plan.reasons, *load.storage_survey.silence))
