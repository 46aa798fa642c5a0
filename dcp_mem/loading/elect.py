"""Second stage of a load: which checkpoints can be loaded, newest first; the same on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dcp_mem.comm.agreement import from_all_ranks, known_to_all
from dcp_mem.common import faults
from dcp_mem.common.sendable import sendable
from dcp_mem.errors import ConfigError
from dcp_mem.loading.load_attempt import LoadAttempt
from dcp_mem.loading.survey import Search, survey_memory
from dcp_mem.policy.election import FoundCheckpoint, RecoveryPlan, elect, in_common
from dcp_mem.runtime.numbers import note_seen

_LOOKING = "looking for checkpoints"


@sendable
@dataclass(frozen=True, slots=True)
class _Survey:
    """One rank's contribution to the election."""

    wanted: str | None  # name of the checkpoint that this rank was asked for; None for the newest
    findings: Sequence[FoundCheckpoint]
    plans_itself: bool


@sendable
@dataclass(frozen=True, slots=True)
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
        lambda: _Survey(search.wanted, _survey_memory(load, search), load.request.plans_itself),
        lambda surveys: _decide(load, search, surveys),
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
    note_seen(load.request.settings, plan.newest)
    return plan


def _decide(load: LoadAttempt, search: Search, surveys: Sequence[_Survey]) -> _Decision:
    wanted = sorted({survey.wanted or "the newest" for survey in surveys})
    if len(wanted) > 1:
        return _Decision(wanted)
    plan = None
    if search.is_collective:
        plan = _elect(load, search, [survey.findings for survey in surveys])
    all_plan = all(survey.plans_itself for survey in surveys)
    return _Decision(plan=plan, all_plan_themselves=all_plan)


def _survey_memory(load: LoadAttempt, search: Search) -> list[FoundCheckpoint]:
    if load.request.refusal is not None:
        raise load.request.refusal
    return survey_memory(load.memory, search, load.damaged_ranks)


def _elect(
    load: LoadAttempt, search: Search, inventories: Sequence[Sequence[FoundCheckpoint]]
) -> RecoveryPlan:
    """Survey storage, and elect from what memory and storage have."""
    has_any = any(not (one.problem or one.rejected) for found in inventories for one in found)
    directories = {
        one.name
        for found in inventories
        for one in found
        if one.replaces is not None and not one.was_stored
    }
    survey = load.storage_survey
    stored = survey.findings(search, is_needed=not has_any, directories=directories)
    plan = elect(inventories, stored, is_named=search.wanted is not None, removed=survey.removed)
    return replace(plan, reasons=(*plan.reasons, *load.storage_survey.silence))
