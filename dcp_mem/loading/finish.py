"""The end of a load: its report, the record that it leaves, and redundancy that is made again.

Nothing of the last two can fail a load.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import os
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import field

import torch.distributed as dist

from dcp_mem.comm import SingleRank
from dcp_mem.comm.agreement import attempt_or_log, described
from dcp_mem.common.log import log
from dcp_mem.common.parallel import daemon
from dcp_mem.common.value_class import value_class
from dcp_mem.common.values import RECOVERIES, Outcome
from dcp_mem.errors import DcpMemError, RankFailed, StorageRefused
from dcp_mem.format import names
from dcp_mem.format.recoveries import (
    MOST_RECOVERIES,
    RecoveryRecord,
    merge_recoveries,
    to_lines,
)
from dcp_mem.loading.load_attempt import LoadAttempt
from dcp_mem.loading.open import OpenCheckpoint
from dcp_mem.loading.repair import CannotRepair, Repair, begin_repair
from dcp_mem.loading.sources.base import PEERS
from dcp_mem.loading.sources.memory import MemorySource
from dcp_mem.memory.job import JobMemory
from dcp_mem.memory.locks import end_lease, open_leased
from dcp_mem.memory.records import add_recovery, recoveries_in
from dcp_mem.memory.root import node_id
from dcp_mem.policy.election import ElectedCheckpoint
from dcp_mem.policy.redundancy import Redundancy
from dcp_mem.replicating.plan import FilePlan
from dcp_mem.replicating.repair_plan import all_parity, missing_copies
from dcp_mem.replicating.replicator import Replication
from dcp_mem.storage import OfOneFile, Storage
from dcp_mem.storage.recoveries import recoveries_on

_STORAGE = "storage"
_KINDS = (MemorySource.label, PEERS, _STORAGE)


@value_class(kw_only=True)
class RecoveryReport:
    """The report of a load, for all ranks together."""

    checkpoint_id: str
    save_id: str  # of the save; "" for a checkpoint that torch's own writer made
    # "memory" (of the rank's own node), "peers" (other nodes' memory), "storage", or several of
    # them with "and"
    source: str
    passed_over: tuple[str, ...]
    seconds: float
    step: int | None = None  # training step of the checkpoint; None where the writer wasn't told
    # Bytes that ranks took, by "memory", "peers" and "storage". What several ranks need counts for
    # each.
    sources: Mapping[str, int] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    # names of the checkpoint's entries below a loaded one that no rank has loaded; of all that no
    # rank has loaded with strict=False
    left_out: tuple[str, ...] = ()
    # with strict=False, names of the state dict's entries that the checkpoint lacks, on any rank
    missing: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes that ranks took, all together."""
        return sum(self.sources.values())


def report_of(
    load: LoadAttempt,
    opened: OpenCheckpoint,
    used: Counter[str],
    left_out: Sequence[str],
    missing: Sequence[str],
) -> RecoveryReport:
    """Return the report of a load that has just ended.

    `opened`: the checkpoint that was read; it may be closed by now. `used`: bytes that all ranks
    took, by the label of the source.
    """
    sources = _by_kind(used)
    choice = opened.choice
    return RecoveryReport(
        checkpoint_id=choice.name,
        save_id=choice.save_id,
        source=" and ".join(sources) or (MemorySource.label if choice.memory else _STORAGE),
        passed_over=tuple(load.reasons),
        seconds=time.monotonic() - load.request.started,
        step=opened.description.step,
        sources=sources,
        metrics=opened.description.metrics,
        left_out=tuple(left_out),
        missing=tuple(missing),
    )


def _by_kind(used: Counter[str]) -> dict[str, int]:
    """Return bytes by kind; a label other than memory's and peers' is a storage's."""
    added: Counter[str] = Counter()
    for label, nbytes in used.items():
        added[label if label in _KINDS else _STORAGE] += nbytes
    return {kind: added[kind] for kind in _KINDS if kind in added}


_STORAGE_TIMEOUT = 1.0
"""Seconds that training waits for storage to take the record; after that it goes on meanwhile."""


def record_load(load: LoadAttempt, report: RecoveryReport) -> None:
    """Add a record of a load to memory and storage; one rank does so for all.

    What goes wrong is logged. A storage that was silent isn't asked.
    """
    if isinstance(load.ranks, SingleRank) and dist.is_initialized() and dist.get_rank() > 0:
        return  # every rank loads by itself, and rank 0 leaves the record
    record = RecoveryRecord(
        token=uuid.uuid4().hex[:12],
        time=time.time(),
        name=report.checkpoint_id,
        save_id=report.save_id,
        step=report.step,
        seconds=report.seconds,
        sources=report.sources,
        passed_over=report.passed_over,
        world_size=load.ranks.size,
    )
    memory, storage = load.memory, load.storage
    if memory is not None:
        try:
            add_recovery(memory.directory, record)
        except (OSError, DcpMemError) as error:
            log.warning(
                "that %s was loaded can't be written down in memory: %s", record.name, error
            )
    if storage is not None and not load.storage_survey.silence:
        daemon(lambda: _put(storage, record, memory)).join(_STORAGE_TIMEOUT)


def _put(storage: Storage, record: RecoveryRecord, memory: JobMemory | None) -> None:
    """Add a record to those on storage; also earlier ones, which it may not have taken then."""
    name, earlier = record.name, list[RecoveryRecord]()
    if memory is not None:
        with contextlib.suppress(OSError):  # it was said, when the record was to go there
            earlier = recoveries_in(memory.directory)
    try:
        known = merge_recoveries(recoveries_on(storage), earlier, [record], most=MOST_RECOVERIES)
        storage.put(names.job_file(RECOVERIES), to_lines(known))
    except Exception as error:  # the checkpoint is loaded, whatever this may be
        # A job that only reads may not be allowed to write.
        is_expected = isinstance(error, StorageRefused) and not isinstance(error, OfOneFile)
        level = logging.INFO if is_expected else logging.WARNING
        text = "that %s was loaded can't be written down in %s: %s"
        log.log(level, text, name, storage.url, error)


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
