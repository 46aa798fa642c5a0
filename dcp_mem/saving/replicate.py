"""Behind a save: what is complete gets copies on other nodes, and each rank sets aside what comes to it, ahead of the thread."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial

from dcp_mem.errors import DcpMemError
from dcp_mem.events import log
from dcp_mem.format import names
from dcp_mem.format.manifest import Manifest, ReplicationRecord
from dcp_mem.memory.locks import share
from dcp_mem.memory.slots import Slot, capacity_for
from dcp_mem.replicating.replicator import Replication
from dcp_mem.replicating.transfers import Copy, copies_of, possible
from dcp_mem.saving.agree import gets_copies, keep_no_more
from dcp_mem.saving.plan import TAIL_ROOM
from dcp_mem.saving.values import Attempt, Caller, Staged
from dcp_mem.session import Topology


def replicate(caller: Caller, attempt: Attempt, staged: Staged, manifest: Manifest) -> int:
    """Have a complete checkpoint copied in the background, if that is wanted. Where it can't be, that is written down.

    Returns how many bytes of this node's memory that is about to take.
    """
    if not caller.settings.replicas:
        return 0
    try:
        why_not, remark = _obstacles(caller, attempt)
        if why_not:
            _skip(caller, attempt, manifest, why_not)
        elif _start(caller, attempt, staged, manifest, remark):
            return sum(copy.nbytes for copy in copies_here(caller, attempt.topology, manifest))
    except Exception:  # the checkpoint is complete, whatever this may be
        log.warning("the replication of %s could not begin on this rank", manifest.name, exc_info=True)
    return 0


def _obstacles(caller: Caller, attempt: Attempt) -> tuple[str, str]:
    """Why there will be no copies, or fewer than wanted; "" twice where all is well."""
    nodes, wanted = attempt.topology.nodes, caller.settings.replicas
    if len(set(nodes)) == 1:
        text = "all ranks that save together run on one node"
        _warn_once(caller, f"replicas={wanted} makes no copies: {text}")
        return text, ""
    if not attempt.replicate:
        return "the replication of an older checkpoint was under way", ""
    found = possible(nodes, wanted)
    if found == wanted:
        return "", ""
    text = f"the ranks run on {len(set(nodes))} nodes, which is enough for {found}"
    _warn_once(caller, f"replicas={wanted}: {text}")
    return "", text


def _warn_once(caller: Caller, text: str) -> None:
    """Log what would be the same at every save, and on every rank."""
    if caller.ranks.rank == 0 and text not in caller.session.warned:
        caller.session.warned.add(text)
        log.warning(text)


def _skip(caller: Caller, attempt: Attempt, manifest: Manifest, why_not: str) -> None:
    if attempt.topology.is_leader:
        record = ReplicationRecord(manifest.save_id, "skipped", error=why_not)
        caller.session.memory.record_replication(manifest, record)


def _start(caller: Caller, attempt: Attempt, staged: Staged, manifest: Manifest, remark: str) -> bool:
    """Whether new slots had to be made for what comes to this rank."""
    session, settings, topology = caller.session, caller.settings, attempt.topology
    copies = _copies(caller, topology, manifest)
    mine = [copy for copy in copies if copy.receiver == caller.ranks.rank]
    session.expected_copies[caller.group] = tuple(copy.nbytes for copy in mine)
    ranks = caller.ranks.apart(f"replicate {settings.job}", settings.replication_timeout, "DCP_MEM_REPLICATION_TIMEOUT")
    ranks.arrange(topology.nodes)
    held = os.path.join(session.memory.checkpoint_directory(manifest.name), names.manifest_file(manifest.scope))
    lease = os.open(held, os.O_RDONLY | os.O_CLOEXEC)
    share(lease)
    targets = _claimed(caller, mine)
    session.replicator.start(
        Replication(
            manifest,
            ranks,
            copies,
            possible(topology.nodes, settings.replicas),
            staged.slot,
            targets,
            lease,
            topology.is_leader,
            settings.replication_timeout,
            remark,
            partial(keep_no_more, session.memory, caller.scope, settings.keep, True),
        )
    )
    return any(not isinstance(slot, str) and slot.mapping is None for slot in targets.values())


def _claimed(caller: Caller, copies: Sequence[Copy]) -> Mapping[int, Slot | str]:
    """By sender, a slot for its segment, with nothing populated yet; or why there is none."""
    return {copy.sender: _taken(caller, copy) for copy in copies}


def _taken(caller: Caller, copy: Copy) -> Slot | str:
    try:
        return caller.session.slots.take(copy.nbytes, "")
    except (DcpMemError, OSError) as error:
        return f"{type(error).__name__}: {error}"


def copies_here(caller: Caller, topology: Topology, manifest: Manifest) -> Sequence[Copy]:
    """The copies of a checkpoint that come to this node."""
    node = topology.nodes[topology.rank]
    return [copy for copy in _copies(caller, topology, manifest) if topology.nodes[copy.receiver] == node]


def _copies(caller: Caller, topology: Topology, manifest: Manifest) -> Sequence[Copy]:
    if not gets_copies(caller, topology):
        return ()
    sizes = tuple(capacity_for(nbytes + TAIL_ROOM) for nbytes in manifest.segments.nbytes)
    return copies_of(topology.nodes, topology.domains, sizes, caller.settings.replicas)
