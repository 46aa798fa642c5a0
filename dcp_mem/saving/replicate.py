"""Behind a save: what is complete is made safe on other nodes, and each rank sets aside what comes to it, ahead of the thread."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress

from dcp_mem.events import log
from dcp_mem.format import names
from dcp_mem.format.manifest import Manifest, ReplicationRecord
from dcp_mem.memory.locks import share
from dcp_mem.memory.slots import capacity_for
from dcp_mem.replicating.replicator import Replication
from dcp_mem.replicating.transfers import incoming, makings_of
from dcp_mem.replicating.work import Work
from dcp_mem.saving.agree import keep_no_more, redundancy_on
from dcp_mem.saving.plan import TAIL_ROOM
from dcp_mem.saving.values import Attempt, Caller, Staged
from dcp_mem.session import Topology


def replication_of(caller: Caller, attempt: Attempt, staged: Staged, manifest: Manifest) -> Replication | None:
    """What makes a complete checkpoint safe, to be done in the background, if that is wanted.

    Where it can't be, that is written down.
    """
    if not caller.settings.redundancy:
        return None
    try:
        why_not, remark = _obstacles(caller, attempt)
        if not why_not:
            return _arranged(caller, attempt, staged, manifest, remark)
        _skip(caller, attempt, manifest, why_not)
    except Exception as error:  # the checkpoint is complete, whatever this may be
        log.warning("the replication of %s could not begin on this rank", manifest.name, exc_info=True)
        record = ReplicationRecord(manifest.save_id, "failed", error=f"it could not begin: {error}")
        with suppress(OSError):
            _write_down(caller, attempt, record, manifest)
    return None


def _obstacles(caller: Caller, attempt: Attempt) -> tuple[str, str]:
    """Why there will be no copies (or parity), or fewer than wanted; "" twice where all is well."""
    nodes, wanted = len(set(attempt.topology.nodes)), caller.settings.redundancy
    if nodes == 1:
        text = "all ranks that save together run on one node"
        _warn_once(caller, f"{wanted} makes no copies: {text}")
        return text, ""
    if not attempt.replicate:
        return "the replication of an older checkpoint was under way", ""
    found = wanted.on(nodes)
    if found == wanted:
        return "", ""
    text = f"the ranks run on {nodes} nodes, which is enough for {found}"
    _warn_once(caller, f"{wanted}: {text}")
    return "", text


def _warn_once(caller: Caller, text: str) -> None:
    """Log what would be the same at every save, and on every rank."""
    if caller.ranks.rank == 0 and text not in caller.session.warned:
        caller.session.warned.add(text)
        log.warning(text)


def _skip(caller: Caller, attempt: Attempt, manifest: Manifest, why_not: str) -> None:
    _write_down(caller, attempt, ReplicationRecord(manifest.save_id, "skipped", error=why_not), manifest)


def _write_down(caller: Caller, attempt: Attempt, record: ReplicationRecord, manifest: Manifest) -> None:
    """Say what became of the copies, once for each node: whoever waits for them must hear of it."""
    if attempt.topology.is_leader:
        caller.session.memory.record_replication(manifest, record)


def _arranged(caller: Caller, attempt: Attempt, staged: Staged, manifest: Manifest, remark: str) -> Replication:
    session, settings, topology = caller.session, caller.settings, attempt.topology
    rooms = _rooms(manifest)
    made = redundancy_on(caller, topology)
    session.expected_copies[caller.group] = incoming(topology.nodes, topology.domains, rooms, made)[topology.rank]
    ranks = caller.ranks.apart(f"replicate {settings.job}", settings.replication_timeout, "DCP_MEM_REPLICATION_TIMEOUT")
    ranks.arrange(topology.nodes)
    held = os.path.join(session.memory.checkpoint_directory(manifest.name), names.manifest_file(manifest.scope))
    lease = os.open(held, os.O_RDONLY | os.O_CLOEXEC)
    share(lease)
    makings = makings_of(topology.rank, topology.nodes, topology.domains, rooms, made, manifest.segments)
    targets = session.slots_for(one for one in makings if one.receiver == topology.rank)
    work = Work(manifest, ranks, makings, targets, staged.slot, settings.replication_timeout)

    def then(is_replicated: bool) -> None:
        keep_no_more(session.memory, caller.scope, settings.keep_memory, True)

    return Replication(work, made, lease, topology.is_leader, remark, then)


def coming_here(caller: Caller, topology: Topology, manifest: Manifest) -> Sequence[Sequence[int]]:
    """Bytes of the slots that each rank of this node sets aside for others' segments or parity; none of others' ranks."""
    made = redundancy_on(caller, topology)
    if not made:
        return [() for _ in topology.nodes]
    found = incoming(topology.nodes, topology.domains, _rooms(manifest), made)
    here = topology.nodes[topology.rank]
    return [sizes if node == here else () for node, sizes in zip(topology.nodes, found, strict=True)]


def _rooms(manifest: Manifest) -> tuple[int, ...]:
    return tuple(capacity_for(nbytes + TAIL_ROOM) for nbytes in manifest.segments.nbytes)
