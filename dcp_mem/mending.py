"""What a loss of nodes has left: lost segments come back from parity before a load, and redundancy is made again after it.

All ranks of a load call these together. Redundancy is made behind training, by the session's replicator, as after a save.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Event

from dcp_mem import faults
from dcp_mem.config import Settings, run_identity
from dcp_mem.errors import DcpMemError, RankFailed
from dcp_mem.events import log
from dcp_mem.format import names
from dcp_mem.format.manifest import Manifest
from dcp_mem.memory.job import Held
from dcp_mem.memory.locks import RunIdentity, new_token, share
from dcp_mem.memory.root import node_id
from dcp_mem.policy.election import Choice
from dcp_mem.ranks import Ranks, run_token
from dcp_mem.recover import Recovery, tell
from dcp_mem.replicating.repairs import all_parity, coming_back, missing_copies
from dcp_mem.replicating.replicator import Replication
from dcp_mem.replicating.transfers import Making, members_of
from dcp_mem.replicating.work import Work, Worker
from dcp_mem.session import Session, Topology, session_for
from dcp_mem.sources.base import StoredDescription

_VARIABLE = "DCP_MEM_REPLICATION_TIMEOUT"


def bring_back(settings: Settings, recovery: Recovery, choice: Choice) -> Choice | str:
    """Make the segments that no node has from parity; returns the choice with who has them now, or why they don't come back."""
    started = _begin(settings, recovery, choice)
    if isinstance(started, str):
        return started
    makings = coming_back(started.nodes, started.manifest.segments, choice)
    failures = started.work(settings, makings)
    faults.point("mend.done")
    if failures:
        return failures
    members, here = members_of(started.nodes), started.nodes[recovery.ranks.rank]
    back = {names.rank_of(one.file): tuple(members[started.nodes[one.receiver]]) for one in makings}
    recovery.damaged -= {(choice.save_id, rank) for rank, ranks in back.items() if started.nodes[ranks[0]] == here}
    log.info("%s: %d segments came back from parity", choice.name, len(makings))
    return replace(choice, holders={**(choice.holders or {}), **back}, lost={})


def restore_redundancy(settings: Settings, recovery: Recovery, choice: Choice) -> None:
    """Begin to make again, in the background, what copies or parity a loaded checkpoint has lost.

    What speaks against it is logged: the checkpoint is loaded, whatever this may be.
    """
    try:
        _restore(settings, recovery, choice)
    except RankFailed as error:
        log.warning("%s gets no new copies: %s", choice.name, error)
    except Exception as error:
        log.warning("%s gets no new copies", choice.name, exc_info=True)
        recovery.ranks.leave(f"{type(error).__name__}: {error}")  # the others must not wait for this rank


def _restore(settings: Settings, recovery: Recovery, choice: Choice) -> None:
    if choice.holders is None or not choice.redundancy or not choice.memory:
        return
    nodes = recovery.ranks.all_reduce({recovery.ranks.rank: node_id(settings.memory_root)}, operator.or_)
    if not _lacks_redundancy(choice, nodes):
        return
    started = _begin(settings, recovery, choice)
    if isinstance(started, str):
        log.warning("%s is loaded, and gets no copies again before the next save: %s", choice.name, started)
    else:
        started.replicate(settings, choice)


def _lacks_redundancy(choice: Choice, nodes: Mapping[int, str]) -> bool:
    """Whether somebody came to know the checkpoint only now, segments came back, or some have too few copies."""
    if choice.teller is not None or choice.parity:
        return True
    wanted = choice.redundancy.on(len(set(nodes.values()))).copies
    return any(len({nodes[rank] for rank in ranks}) <= wanted for ranks in (choice.holders or {}).values())


def _begin(settings: Settings, recovery: Recovery, choice: Choice) -> _Mending | str:
    """This rank's part, with the checkpoint known to every node; or why there is none, on all ranks alike."""
    ranks = recovery.ranks
    session: Session | None = None
    trouble = ""
    told = tell(recovery, choice)
    try:
        if isinstance(told, DcpMemError):
            raise told
        session = session_for(settings, RunIdentity(run_identity() or run_token(), new_token()))
        recovery.origin = replace(recovery.origin, memory=session.memory)
        if session.replicator.is_busy:
            trouble = "copies are under way"
    except Exception as error:  # the others hear of it
        trouble = f"{type(error).__name__}: {error}"
    troubles = ranks.all_reduce({ranks.rank: trouble} if trouble else {}, operator.or_)
    if troubles or session is None:
        return _some(troubles)
    topology = session.topology(ranks, settings.failure_domain)
    try:
        if topology.is_leader and _held(session, choice) is None:
            assert isinstance(told, StoredDescription)  # who hasn't got it is told
            _adopt(session, told)
    except Exception as error:
        trouble = f"{type(error).__name__}: {error}"
    troubles = ranks.all_reduce({ranks.rank: trouble} if trouble else {}, operator.or_)
    held = _held(session, choice)
    if troubles or held is None:
        return _some(troubles) or "it is gone"
    faults.point("mend.begun")
    return _Mending(session, ranks, topology, held.manifest)


def _some(troubles: Mapping[int, str]) -> str:
    """What went wrong, by rank; "" for nothing."""
    return "; ".join(f"rank {rank}: {text}" for rank, text in sorted(troubles.items())[:3])


def _held(session: Session, choice: Choice) -> Held | None:
    found = session.memory.find(choice.name)
    return next((held for held in found if held.manifest.save_id == choice.save_id), None)


def _adopt(session: Session, told: StoredDescription) -> None:
    """Make a checkpoint known to this node, which has none of its segments."""
    session.catalogs.put(told.catalog)
    session.publish(Manifest.from_json(told.manifest))


@dataclass(frozen=True, slots=True)
class _Mending:
    """One rank's part in mending a checkpoint."""

    session: Session
    ranks: Ranks
    topology: Topology
    manifest: Manifest

    @property
    def nodes(self) -> tuple[str, ...]:
        return self.topology.nodes

    @property
    def held(self) -> Held:
        """What lies here of it. Raises StopIteration where that has just left memory."""
        found = self.session.memory.find(self.manifest.name)
        return next(held for held in found if held.manifest.save_id == self.manifest.save_id)

    # -- having it made -----------------------------------------------------------------------------------------

    def work(self, settings: Settings, makings: Sequence[Making]) -> str:
        """Have it done now; returns what has failed, "" for nothing, on all ranks alike."""
        worker = Worker(self.session.memory, self.session.slots, self._work(settings, makings), Event())
        troubles = [text for _, text in worker.run()]
        everybodys = self.ranks.all_reduce({self.ranks.rank: troubles[0]} if troubles else {}, operator.or_)
        return _some(everybodys)

    def _work(self, settings: Settings, makings: Iterable[Making]) -> Work:
        ranks = self.ranks.apart(f"replicate {settings.job}", settings.replication_timeout, _VARIABLE)
        ranks.arrange(self.nodes)
        mine = [one for one in makings if one.receiver == ranks.rank or ranks.rank in one.senders]
        targets = self.session.slots_for(one for one in mine if one.receiver == ranks.rank)
        return Work(self.manifest, ranks, mine, targets, None, settings.replication_timeout)

    def replicate(self, settings: Settings, choice: Choice) -> None:
        """Have missing copies or parity made in the background."""
        redundancy = choice.redundancy.on(len(set(self.nodes)))
        holders, segments, domains = choice.holders or {}, self.manifest.segments, self.topology.domains
        wanted = set[str]()
        if redundancy.parity:
            makings = all_parity(self.nodes, domains, segments, holders, redundancy.parity)
            wanted = {one.file for one in makings}
            there = self.ranks.all_reduce(self._parity_here(), operator.or_)
            makings = [one for one in makings if (one.receiver, one.file) not in there]
        else:
            makings = missing_copies(self.nodes, domains, segments, holders, redundancy.copies)
        # by a node that has just come to know the checkpoint
        is_unknown = self.held.replication.outcome != "replicated"
        if not self.ranks.all_reduce(bool(makings) or is_unknown, operator.or_):
            return
        work = self._work(settings, makings)
        lease = os.open(self.held.manifest_path, os.O_RDONLY | os.O_CLOEXEC)
        share(lease)

        def then(is_replicated: bool) -> None:
            if is_replicated and redundancy.parity:
                self.session.memory.drop_parity(self.manifest, wanted)

        is_leader = self.topology.is_leader
        self.session.replicator.start(Replication(work, redundancy, lease, is_leader, "", then))

    def _parity_here(self) -> frozenset[tuple[int, str]]:
        """The parity on this node, beside each of the node's ranks."""
        if not self.topology.is_leader:
            return frozenset()
        neighbours = self.topology.neighbours(self.nodes[self.topology.rank])
        return frozenset((rank, file) for rank in neighbours for file in self.session.memory.stripes_of(self.held))
