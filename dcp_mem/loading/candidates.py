"""The way through a load's candidates: survey, elect, open the newest that can be opened."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from dcp_mem.comm.agreement import Failures, joined, known_to_all
from dcp_mem.common import faults
from dcp_mem.common.log import log
from dcp_mem.errors import CheckpointNotFound, NoRecoverableCheckpoint
from dcp_mem.format import names
from dcp_mem.loading.elect import elect_together
from dcp_mem.loading.load_attempt import DamagedSegment, LoadAttempt
from dcp_mem.loading.open import CannotOpen, OpenCheckpoint, open_together
from dcp_mem.loading.repair import CannotRepair, Repair, begin_repair, raise_cannot_repair
from dcp_mem.loading.survey import Search
from dcp_mem.policy.election import ElectedCheckpoint
from dcp_mem.replicating.plan import FilePlan, members_of
from dcp_mem.replicating.repair_plan import lost_segments


def open_newest(load: LoadAttempt) -> OpenCheckpoint:
    """Open the newest checkpoint that all ranks can load, or the one that was asked for.

    1. Survey and elect checkpoints that all ranks saved together; where there are none, those that
       each rank saved alone.
    2. Open the newest; fall through to older ones, noting why.

    Raises NoRecoverableCheckpoint, CheckpointNotFound, ConfigError, RankFailed.
    """
    for scope in (names.COLLECTIVE, names.rank_scope(load.request.rank)):
        load.search_in(scope)
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
    failures = _carry_out(repair, plans)
    faults.point("mend.done")
    raise_cannot_repair(failures)
    holders = _holders(repair, plans)
    own_node = repair.nodes[load.ranks.rank]
    here = [rank for rank, ranks in holders.items() if repair.nodes[ranks[0]] == own_node]
    load.mark_rebuilt(choice.save_id, here)
    log.info("%s: %d segments came back from parity", choice.name, len(plans))
    return replace(choice, holders={**(choice.holders or {}), **holders}, lost={})


def _carry_out(repair: Repair, plans: Sequence[FilePlan]) -> Failures:
    """Take part in the work now; return what has failed, the same on all ranks."""
    texts = [text for _, text in repair.session.replicator.carry_out(repair.task(plans))]
    own: Failures = ((repair.ranks.rank, texts[0]),) if texts else ()
    return repair.ranks.all_reduce(own, joined)


def _holders(repair: Repair, plans: Sequence[FilePlan]) -> Mapping[int, tuple[int, ...]]:
    """Return the ranks whose node has it, for each rebuilt segment."""
    members = members_of(repair.nodes)
    return {names.rank_of(plan.file): tuple(members[repair.nodes[plan.receiver]]) for plan in plans}
