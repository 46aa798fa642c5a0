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
from dcp_mem.memory.slots import capacity_for
from dcp_mem.policy.election import Choice
from dcp_mem.policy.repair import Loads, homes, missing_copies
from dcp_mem.ranks import Ranks, run_token
from dcp_mem.recover import Recovery, tell
from dcp_mem.replicating.replicator import Replication
from dcp_mem.replicating.transfers import Making, Part, making_of, members_of, stripes_over
from dcp_mem.replicating.work import Work, Worker
from dcp_mem.session import Session, Topology, session_for
from dcp_mem.sources import StoredDescription

_VARIABLE = "DCP_MEM_REPLICATION_TIMEOUT"


def bring_back(settings: Settings, recovery: Recovery, choice: Choice) -> Choice | str:
    """Make the segments that no node has from parity; returns the choice with who has them now, or why they don't come back."""
    started = _begin(settings, recovery, choice)
    if isinstance(started, str):
        return started
    makings = started.makings_of_lost(choice)
    failures = started.work(settings, makings)
    faults.point("mend.done")
    if failures:
        return failures
    here = {names.rank_of(one.file) for one in makings if one.receiver in started.neighbours}
    recovery.damaged -= {(choice.save_id, rank) for rank in here}
    log.info("%s: %d segments came back from parity", choice.name, len(makings))
    members = started.members
    back = {names.rank_of(one.file): tuple(members[started.topology.nodes[one.receiver]]) for one in makings}
    return replace(choice, holders={**(choice.holders or {}), **back}, lost={})


def restore_redundancy(settings: Settings, recovery: Recovery, choice: Choice) -> None:
    """Begin to make again, in the background, what copies or parity a loaded checkpoint has lost.

    What speaks against it is logged. The checkpoint is loaded, whatever this may be.
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
        log.info("%s gets no new copies: %s", choice.name, started)
        return
    made = choice.redundancy.on(len(started.members))
    if made:
        started.replicate(settings, choice, made.copies, made.parity)


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
        return "; ".join(f"rank {rank}: {text}" for rank, text in sorted(troubles.items())[:3])
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
        return "; ".join(f"rank {rank}: {text}" for rank, text in sorted(troubles.items())[:3]) or "it is gone"
    faults.point("mend.begun")
    return _Mending(session, ranks, topology, held.manifest)


def _held(session: Session, choice: Choice) -> Held | None:
    found = session.memory.find(choice.name)
    return next((held for held in found if held.manifest.save_id == choice.save_id), None)


def _adopt(session: Session, told: StoredDescription) -> None:
    """Make a checkpoint known to this node, which has none of its segments."""
    memory, manifest = session.memory, Manifest.from_json(told.manifest)
    directory = memory.make_checkpoint_directory(manifest.name)
    replaced = [held for held in memory.find(manifest.name) if held.manifest.scope == manifest.scope]
    session.catalogs.link(session.catalogs.put(told.catalog), directory)
    memory.publish(manifest)
    for held in replaced:
        memory.retire_replaced(held)


@dataclass(frozen=True, slots=True)
class _Mending:
    """One rank's part in mending a checkpoint."""

    session: Session
    ranks: Ranks
    topology: Topology
    manifest: Manifest

    @property
    def members(self) -> dict[str, list[int]]:
        return members_of(self.topology.nodes)

    @property
    def neighbours(self) -> Sequence[int]:
        return self.topology.neighbours(self.topology.nodes[self.topology.rank])

    # -- what is to be made -------------------------------------------------------------------------------------

    def makings_of_lost(self, choice: Choice) -> list[Making]:
        """How lost segments come back, on the nodes that have least."""
        segments, members = self.manifest.segments, list(self.members.values())
        number = {rank: node for node, ranks in enumerate(members) for rank in ranks}
        held = [0] * len(members)
        for segment, ranks in (choice.holders or {}).items():
            for node in {number[rank] for rank in ranks}:
                held[node] += segments.nbytes[segment]
        receiving, sending, found = Loads(), Loads(), []
        for segment, node in homes({rank: segments.nbytes[rank] for rank in choice.lost}, held).items():
            receiver = receiving.give(members[node], segments.nbytes[segment])
            parts = []
            for term in choice.lost[segment]:
                file, holders = (
                    choice.parity[term.of]
                    if term.is_stripe
                    else (
                        names.segment_file(term.of, choice.save_id),
                        (choice.holders or {})[term.of],
                    )
                )
                sender = receiver if receiver in holders else sending.give(holders, term.stop - term.start)
                parts.append(Part(sender, file, term.start, term.stop, term.place))
            file, nbytes = names.segment_file(segment, choice.save_id), segments.nbytes[segment]
            found.append(Making(receiver, file, nbytes, capacity_for(nbytes), tuple(parts)))
        return found

    def missing_copies(self, holders: Mapping[int, Sequence[int]], copies: int) -> list[Making]:
        """The copies that are missing, each sent by one of those who have the segment, in turns."""
        segments, members = self.manifest.segments, list(self.members.values())
        number = {rank: node for node, ranks in enumerate(members) for rank in ranks}
        having = [{number[rank] for rank in holders[segment]} for segment in range(len(segments))]
        domains = [self.topology.domains[ranks[0]] for ranks in members]
        receiving, sending, found = Loads(), Loads(), []
        for segment, node in missing_copies(having, segments.nbytes, domains, copies):
            nbytes, file = segments.nbytes[segment], segments[segment].file
            receiver = receiving.give(members[node], nbytes)
            sender = sending.give(holders[segment], nbytes)
            found.append(Making(receiver, file, nbytes, capacity_for(nbytes), (Part(sender, file, 0, nbytes, 0),)))
        return found

    def all_parity(self, holders: Mapping[int, Sequence[int]], k: int) -> list[Making]:
        """The parity that the nodes shall keep, of the segments as they lie now; each counts for one node that has it."""
        segments, members = self.manifest.segments, list(self.members.values())
        number = {rank: node for node, ranks in enumerate(members) for rank in ranks}
        homes: list[dict[int, int]] = [{} for _ in members]
        senders = {}
        for segment, ranks in sorted(holders.items()):
            node = number[segment] if segment in ranks else number[min(ranks)]
            senders[segment] = segment if segment in ranks else members[node][segment % len(members[node])]
            homes[node][segment] = segments.nbytes[segment]
        domains = [self.topology.domains[ranks[0]] for ranks in members]
        found = stripes_over(homes, members, domains, k)
        return [making_of(stripe, capacity_for(stripe.nbytes), segments, senders) for stripe in found]

    # -- having it made -----------------------------------------------------------------------------------------

    def work(self, settings: Settings, makings: Sequence[Making]) -> str:
        """Have it done now; returns what has failed, "" for nothing, on all ranks alike."""
        worker = Worker(self.session.memory, self.session.slots, self._work(settings, makings), Event())
        troubles = [text for _, text in worker.run()]
        everybodys = self.ranks.all_reduce({self.ranks.rank: troubles[0]} if troubles else {}, operator.or_)
        return "; ".join(f"rank {rank}: {text}" for rank, text in sorted(everybodys.items())[:3])

    def _work(self, settings: Settings, makings: Iterable[Making]) -> Work:
        ranks = self.ranks.apart(f"replicate {settings.job}", settings.replication_timeout, _VARIABLE)
        ranks.arrange(self.topology.nodes)
        mine = [one for one in makings if one.receiver == ranks.rank or ranks.rank in one.senders]
        targets = self.session.slots_for(one for one in mine if one.receiver == ranks.rank)
        return Work(self.manifest, ranks, mine, targets, None, settings.replication_timeout)

    def replicate(self, settings: Settings, choice: Choice, copies: int, parity: int) -> None:
        """Have missing copies or parity made in the background."""
        holders = choice.holders or {}
        makings, wanted = self.missing_copies(holders, copies), set[str]()
        if parity:
            makings = self.all_parity(holders, parity)
            wanted = {one.file for one in makings}
            there = self.ranks.all_reduce(self._parity_here(), operator.or_)
            makings = [one for one in makings if (one.receiver, one.file) not in there]
        is_lacking = self.ranks.all_reduce(self._lacks_record(), operator.or_)
        if not makings and not is_lacking:
            return
        work = self._work(settings, makings)
        held = os.path.join(self.session.memory.checkpoint_directory(choice.name), names.manifest_file(""))
        lease = os.open(held, os.O_RDONLY | os.O_CLOEXEC)
        share(lease)
        redundancy = replace(choice.redundancy, copies=copies, parity=parity)

        def then() -> None:
            if parity:
                self.session.memory.drop_parity(self.manifest, wanted)

        is_leader = self.topology.is_leader
        self.session.replicator.start(Replication(work, redundancy, lease, is_leader, "", then))

    def _parity_here(self) -> frozenset[tuple[int, str]]:
        held = next(one for one in self.session.memory.find(self.manifest.name))
        if not self.topology.is_leader:
            return frozenset()
        files = self.session.memory.stripes_of(held)
        return frozenset((rank, file) for rank in self.neighbours for file in files)

    def _lacks_record(self) -> bool:
        held = next(one for one in self.session.memory.find(self.manifest.name))
        return held.replication.outcome != "replicated"
