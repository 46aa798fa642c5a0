"""Segments that no node has any more are rebuilt from parity, before the checkpoint is opened."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from dcp_mem.comm.agreement import Failures, joined
from dcp_mem.common import faults
from dcp_mem.common.log import log
from dcp_mem.format import names
from dcp_mem.loading.load_attempt import LoadAttempt
from dcp_mem.loading.repair import Repair, begin_repair, raise_cannot_repair
from dcp_mem.policy.election import ElectedCheckpoint
from dcp_mem.replicating.plan import FilePlan, members_of
from dcp_mem.replicating.repair_plan import lost_segments


def rebuild_lost_segments(load: LoadAttempt, choice: ElectedCheckpoint) -> ElectedCheckpoint:
    """Rebuild the segments that no node has; return the choice with the ranks that have them now.

    1. Every node gets to know the checkpoint.
    2. Every rank plans alike which node rebuilds which segment.
    3. The segments are rebuilt; one all-reduce says how that went.

    All ranks call this together.

    `choice`: the checkpoint, with what each lost segment is the XOR of. Raises CannotRepair.
    """
    repair = begin_repair(load, choice)
    plans = lost_segments(repair.nodes, repair.manifest.segments, choice)
    failures = _run(repair, plans)
    faults.point("mend.done")
    raise_cannot_repair(failures)
    holders = _holders(repair, plans)
    own_node = repair.nodes[load.ranks.rank]
    here = [rank for rank, ranks in holders.items() if repair.nodes[ranks[0]] == own_node]
    load.mark_rebuilt(choice.save_id, here)
    log.info("%s: %d segments came back from parity", choice.name, len(plans))
    return replace(choice, holders={**(choice.holders or {}), **holders}, lost={})


def _run(repair: Repair, plans: Sequence[FilePlan]) -> Failures:
    """Take part in the work now; return what has failed, the same on all ranks."""
    texts = [text for _, text in repair.session.replicator.carry_out(repair.task(plans))]
    own: Failures = ((repair.ranks.rank, texts[0]),) if texts else ()
    return repair.ranks.all_reduce(own, joined)


def _holders(repair: Repair, plans: Sequence[FilePlan]) -> Mapping[int, tuple[int, ...]]:
    """Return the ranks whose node has it, for each rebuilt segment."""
    members = members_of(repair.nodes)
    return {names.rank_of(plan.file): tuple(members[repair.nodes[plan.receiver]]) for plan in plans}
