"""The common part of a rebuild before a load and new redundancy after it: every node joins in.

A node that has nothing of the checkpoint, a new one for instance, gets its manifest and catalog
first, so that it can take segments, copies and parity of it.
"""

from __future__ import annotations

from collections.abc import Iterable

from dcp_mem.comm import Ranks, held_store, run_token
from dcp_mem.comm.agreement import Attempted, Failures, attempt, joined
from dcp_mem.common import faults
from dcp_mem.common.value_class import value_class
from dcp_mem.config import Settings, run_identity
from dcp_mem.errors import DcpMemError
from dcp_mem.format.manifest import Manifest
from dcp_mem.loading.load_attempt import LoadAttempt
from dcp_mem.loading.open import SharedFiles, share_files_in_memory
from dcp_mem.memory.checkpoint import LocalCheckpoint
from dcp_mem.memory.locks import RunIdentity, new_token
from dcp_mem.policy.election import ElectedCheckpoint
from dcp_mem.replicating.plan import FilePlan
from dcp_mem.replicating.task import ReplicationTask, slot_for
from dcp_mem.runtime.session import Session, session_for
from dcp_mem.runtime.topology import Topology

_TIMEOUT_VARIABLE = "DCP_MEM_REPLICATION_TIMEOUT"
_MOST_FAILURES = 3


class CannotRepair(DcpMemError):
    """Segments or redundancy of a checkpoint can't be made again; raised on all ranks alike."""


@value_class(kw_only=True)
class Repair:
    """One rank's part in making segments, copies or parity of a checkpoint again."""

    settings: Settings
    session: Session
    ranks: Ranks
    topology: Topology
    manifest: Manifest
    token: str  # of this repair alone, the same on all ranks

    @property
    def nodes(self) -> tuple[str, ...]:
        """The node of each rank."""
        return self.topology.nodes

    @property
    def checkpoint(self) -> LocalCheckpoint:
        """The checkpoint in this node's memory.

        Raises LookupError.
        """
        return _found(self.session, self.manifest.name, self.manifest.save_id)

    def task(self, file_plans: Iterable[FilePlan]) -> ReplicationTask:
        """Return this rank's part in making these files, with slots claimed for its own."""
        settings = self.settings
        ranks = self.ranks.dedicated(
            f"replicate {settings.job}", settings.replication_timeout, _TIMEOUT_VARIABLE, self.token
        )
        ranks.set_nodes(self.nodes)
        own = [
            plan for plan in file_plans if plan.receiver == ranks.rank or ranks.rank in plan.senders
        ]
        pool = self.session.slots
        slots = {one.file: slot_for(pool, one) for one in own if one.receiver == ranks.rank}
        return ReplicationTask(
            call=self.token,
            manifest=self.manifest,
            ranks=ranks,
            plans=own,
            slots=slots,
            own_slot=None,
            timeout=settings.replication_timeout,
            transport=settings.transport,
            store=held_store(),
        )


def begin_repair(load: LoadAttempt, choice: ElectedCheckpoint) -> Repair:
    """Let every node know the checkpoint, and return this rank's part.

    1. One rank reads the description files for nodes that have nothing of the checkpoint.
    2. Every rank opens its session; one all-reduce.
    3. One rank of each node that lacks them puts manifest and catalog there; one all-reduce.
    4. Every rank finds the checkpoint on its node; one all-reduce.
    5. Rank 0 tells the others a token of the repair.

    `load`: the load; this node has memory of the job from now on. Raises CannotRepair.
    """
    settings, ranks = load.request.settings, load.ranks
    files = share_files_in_memory(load, choice)
    opened = attempt(lambda: _open_session(settings, files))
    if opened.error is None:
        load.memory = opened.value.memory
    raise_cannot_repair(ranks.all_reduce(_session_failures(opened, ranks.rank), joined))
    session = opened.value
    topology = session.nodes.topology(ranks, settings.failure_domain)
    published = attempt(lambda: _publish_where_unknown(session, topology, choice, files))
    raise_cannot_repair(ranks.all_reduce(published.failures(ranks.rank), joined))
    found = attempt(lambda: _found(session, choice.name, choice.save_id))
    raise_cannot_repair(ranks.all_reduce(found.failures(ranks.rank), joined))
    load.local = [*load.local, found.value]
    faults.point("mend.begun")
    return Repair(
        settings=settings,
        session=session,
        ranks=ranks,
        topology=topology,
        manifest=found.value.manifest,
        token=ranks.broadcast(new_token()),
    )


def raise_cannot_repair(failures: Failures) -> None:
    """Raise if any rank has failed.

    Raises CannotRepair.
    """
    if failures:
        texts = [f"rank {rank}: {text}" for rank, text in failures[:_MOST_FAILURES]]
        raise CannotRepair("; ".join(texts))


def _open_session(settings: Settings, files: SharedFiles) -> Session:
    if files is not None and files.error is not None:
        raise files.error
    return session_for(settings, RunIdentity(run_identity() or run_token(), new_token()))


def _session_failures(opened: Attempted[Session], rank: int) -> Failures:
    if opened.error is None and opened.value.replicator.is_busy:
        return ((rank, "copies are under way"),)
    return opened.failures(rank)


def _publish_where_unknown(
    session: Session, topology: Topology, choice: ElectedCheckpoint, files: SharedFiles
) -> None:
    """Make the checkpoint known to this node, if it has nothing of it."""
    if topology.is_leader and _find(session, choice.name, choice.save_id) is None:
        assert files is not None  # some node doesn't know the checkpoint, so one rank has read them
        session.catalogs.put(files.value.catalog)
        session.publisher.publish(Manifest.from_json(files.value.manifest))


def _found(session: Session, name: str, save_id: str) -> LocalCheckpoint:
    found = _find(session, name, save_id)
    if found is None:
        raise LookupError(f"{name} has left memory")
    return found


def _find(session: Session, name: str, save_id: str) -> LocalCheckpoint | None:
    found = session.memory.find(name)
    return next((one for one in found if one.manifest.save_id == save_id), None)
