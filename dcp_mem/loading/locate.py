"""Third stage of a load, first step: the sources of a checkpoint that this rank sees."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dcp_mem.errors import DcpMemError, SegmentCorrupt
from dcp_mem.loading.load_attempt import LoadAttempt
from dcp_mem.loading.sources.memory import MemorySource
from dcp_mem.loading.sources.stored import StorageSource
from dcp_mem.loading.survey import stored_findings
from dcp_mem.memory.checkpoint import LocalCheckpoint
from dcp_mem.policy.election import ElectedCheckpoint
from dcp_mem.policy.order import newest_first
from dcp_mem.storage import Storage
from dcp_mem.storage.leases import ReadLease, read_lease


@dataclass(frozen=True, slots=True)
class LocatedSources:
    """The sources of a checkpoint that this rank sees; not yet asked what it consists of."""

    memory: MemorySource | None = None
    stored: StorageSource | None = None
    trouble: str = ""  # why memory or storage, which was to have the checkpoint, is no source
    # keeps the checkpoint on storage, where its bytes come from there
    lease: ReadLease | None = None

    def close(self) -> None:
        """Close what is open."""
        for resource in (self.memory, self.stored, self.lease):
            if resource is not None:
                resource.close()


def locate(load: LoadAttempt, choice: ElectedCheckpoint) -> LocatedSources:
    """Return the sources of a checkpoint that this rank sees, under a lease where one is needed."""
    # The lease first: once it is taken, we look whether the checkpoint is still committed.
    located = LocatedSources(lease=_take_lease(load, choice))
    try:
        memory, trouble = locate_memory(load, choice)
        located = replace(located, memory=memory, trouble=trouble)
        return replace(located, stored=_locate_stored(load, choice))
    except BaseException as error:
        if located.memory is not None and isinstance(error, DcpMemError):
            return replace(located, trouble=str(error))
        located.close()
        raise


def _take_lease(load: LoadAttempt, choice: ElectedCheckpoint) -> ReadLease | None:
    """Keep on storage what is to come from there; one rank does so for all."""
    is_ours = load.ranks.rank == 0 and choice.save_id
    if load.storage is None or not is_ours or choice.memory:
        return None
    return read_lease(load.storage, choice.name)


def locate_memory(load: LoadAttempt, choice: ElectedCheckpoint) -> tuple[MemorySource | None, str]:
    """Return this node's memory as a source; None, and perhaps why, where it isn't one."""
    checkpoint = _find_local(load, choice) if choice.memory or choice.holders else None
    if checkpoint is None or load.memory is None:
        return None, ""
    try:
        source = MemorySource(checkpoint, load.memory.node, load.damaged_ranks(checkpoint))
    except DcpMemError as error:
        return None, str(error)
    if choice.holders is None and source.lacking:  # it was elected as whole on every node
        source.close()
        rank = min(source.lacking)
        lacking = SegmentCorrupt(checkpoint.name, rank, source.label, source.lacking[rank])
        return None, str(lacking)
    return source, ""


def _find_local(load: LoadAttempt, choice: ElectedCheckpoint) -> LocalCheckpoint | None:
    for checkpoint in load.memory.find(choice.name) if load.memory is not None else ():
        manifest = checkpoint.manifest
        # A rank that saved alone has a save id of its own.
        is_same_save = not load.is_collective or manifest.save_id == choice.save_id
        if manifest.scope == load.search.scope and is_same_save:
            return checkpoint
    return None


def _locate_stored(load: LoadAttempt, choice: ElectedCheckpoint) -> StorageSource | None:
    if not choice.storage or load.storage is None:
        return None
    save_id = choice.save_id if load.is_collective else _own_save_id(load, load.storage, choice)
    return StorageSource(load.storage, choice.name, save_id, load.search.scope)


def _own_save_id(load: LoadAttempt, storage: Storage, choice: ElectedCheckpoint) -> str:
    """Return the save id of what this rank saved alone under that name."""
    found = stored_findings(storage, choice.name, load.search.scope)
    sound = [finding for finding in found if not finding.problem]
    newest = newest_first(sound, lambda finding: finding.place)
    return newest[0].save_id if newest else choice.save_id
