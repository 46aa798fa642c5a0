"""Copies and parity that a loss of nodes has cost a checkpoint are made again, after it is loaded.

That is done in the background, by the session's replicator, as after a save.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from dcp_mem.comm.agreement import attempt_or_log, described
from dcp_mem.common.log import log
from dcp_mem.common.values import Outcome
from dcp_mem.errors import RankFailed
from dcp_mem.loading.load_attempt import LoadAttempt
from dcp_mem.loading.repair import CannotRepair, Repair, begin_repair
from dcp_mem.memory.locks import end_lease, open_leased
from dcp_mem.memory.root import node_id
from dcp_mem.policy.election import ElectedCheckpoint
from dcp_mem.policy.redundancy import Redundancy
from dcp_mem.replicating.plan import FilePlan
from dcp_mem.replicating.repair_plan import all_parity, missing_copies
from dcp_mem.replicating.replicator import Replication


def restore_redundancy(load: LoadAttempt, choice: ElectedCheckpoint) -> None:
    """Begin to make the redundancy again that a loaded checkpoint has lost.

    All ranks call this together. Failures are logged only: the checkpoint is loaded.
    """
    try:
        _restore(load, choice)
    except RankFailed as error:
        log.warning("%s gets no new copies: %s", choice.name, error)
    except Exception as error:
        log.warning("%s gets no new copies", choice.name, exc_info=True)
        load.ranks.leave(described(error))  # the other ranks must not wait for this one


def _restore(load: LoadAttempt, choice: ElectedCheckpoint) -> None:
    """Begin, if the checkpoint had redundancy, and lacks some now.

    1. Every rank says on which node it is; one all-reduce.
    2. Every node gets to know the checkpoint.
    3. Every rank plans alike what is missing.
    4. The replicators begin.
    """
    if choice.holders is None or not choice.redundancy or not choice.memory:
        return
    own_node = node_id(load.request.settings.memory_root)
    nodes = load.ranks.all_reduce({load.ranks.rank: own_node}, operator.or_)
    if not _lacks_redundancy(choice, nodes):
        return
    try:
        repair = begin_repair(load, choice)
    except CannotRepair as error:
        log.warning(
            "%s is loaded, and gets no copies again before the next save: %s", choice.name, error
        )
        return
    redundancy = choice.redundancy.on(len(set(repair.nodes)))
    plans, parity = _missing(repair, choice, redundancy)
    # A node that has just got to know the checkpoint has no record of its redundancy.
    has_no_record = repair.checkpoint.replication.outcome != Outcome.REPLICATED
    if repair.ranks.all_reduce(bool(plans) or has_no_record, operator.or_):
        # The other ranks may be in their next call: this one must not leave them for its failure.
        attempt_or_log(
            f"{choice.name} gets no new copies here",
            lambda: _start(repair, plans, redundancy, parity),
        )


def _lacks_redundancy(choice: ElectedCheckpoint, nodes: Mapping[int, str]) -> bool:
    """Return whether a node doesn't know the checkpoint, it has parity, or too few copies."""
    if choice.teller is not None or choice.parity:
        return True
    wanted = choice.redundancy.on(len(set(nodes.values()))).copies
    return any(
        len({nodes[rank] for rank in ranks}) <= wanted for ranks in (choice.holders or {}).values()
    )


def _missing(
    repair: Repair, choice: ElectedCheckpoint, redundancy: Redundancy
) -> tuple[list[FilePlan], frozenset[str]]:
    """Return the files that are to be made, and the names of all parity that shall be left."""
    nodes, domains = repair.nodes, repair.topology.domains
    holders, segments = choice.holders or {}, repair.manifest.segments
    if not redundancy.parity:
        return missing_copies(nodes, domains, segments, holders, redundancy.copies), frozenset()
    plans = all_parity(nodes, domains, segments, holders, redundancy.parity)
    present = repair.ranks.all_reduce(_local_parity(repair), operator.or_)
    missing = [plan for plan in plans if (plan.receiver, plan.file) not in present]
    return missing, frozenset(plan.file for plan in plans)


def _local_parity(repair: Repair) -> frozenset[tuple[int, str]]:
    """Return (rank, file) of the parity on this node, for each of the node's ranks."""
    topology = repair.topology
    if not topology.is_leader:
        return frozenset()
    files = repair.checkpoint.stripes()
    neighbours = topology.neighbours(repair.nodes[topology.rank])
    return frozenset((rank, file) for rank in neighbours for file in files)


def _start(
    repair: Repair, plans: Sequence[FilePlan], redundancy: Redundancy, parity: frozenset[str]
) -> None:
    """Have the replicator make the files; superseded parity is dropped when all are there."""

    def drop_superseded_parity(is_replicated: bool) -> None:
        if is_replicated and redundancy.parity:
            repair.session.memory.drop_parity(repair.manifest, parity)

    with ExitStack() as unless_started:
        lease = open_leased(repair.checkpoint.manifest_path)
        unless_started.callback(os.close, lease)
        unless_started.callback(end_lease, lease)
        task = repair.task(plans)
        replication = Replication(
            task=task,
            redundancy=redundancy,
            lease=lease,
            is_leader=repair.topology.is_leader,
            remark="",
            on_recorded=drop_superseded_parity,
        )
        unless_started.pop_all()
    repair.session.replicator.start(replication)
