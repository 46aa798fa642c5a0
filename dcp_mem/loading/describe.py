"""Third stage of a load, second step: description files for ranks that don't see the checkpoint."""

from __future__ import annotations

from dcp_mem.comm.agreement import Attempted, attempt, described
from dcp_mem.common import faults
from dcp_mem.errors import DcpMemError
from dcp_mem.loading.load_attempt import LoadAttempt
from dcp_mem.loading.locate import locate_memory
from dcp_mem.loading.sources.base import DescriptionFiles
from dcp_mem.loading.sources.memory import MemorySource
from dcp_mem.loading.sources.stored import StorageSource
from dcp_mem.policy.election import ElectedCheckpoint

SharedFiles = Attempted[DescriptionFiles] | None
"""Description files that one rank has read for all, or its error.

None where each rank reads its own: they lie in its memory, or each rank saved alone.
"""


def share_description_files(
    load: LoadAttempt, choice: ElectedCheckpoint, memory: MemorySource | None
) -> SharedFiles:
    """Have one rank read the description files for all ranks.

    It is one whose node has them in memory, or rank 0 for storage. All ranks call this together:
    one broadcast; before it a gather, where rank 0's node doesn't have them in memory.
    """
    ranks, describing_rank = load.ranks, choice.teller
    if not load.is_collective or (choice.memory and describing_rank is None):
        return None
    files: SharedFiles = None
    if ranks.rank == (describing_rank or 0):
        files = attempt(lambda: _read_files(load, choice, memory))
        if files.error is not None and not isinstance(files.error, DcpMemError):
            # It goes to other ranks: only our own errors can be sent.
            files = Attempted(error=DcpMemError(described(files.error)))
    if describing_rank:
        files = next((sent for sent in ranks.gather(files) if sent is not None), None)
    files = ranks.broadcast(files)
    faults.point("recover.told")
    return files


def share_files_in_memory(load: LoadAttempt, choice: ElectedCheckpoint) -> SharedFiles:
    """Do as `share_description_files` does, for a checkpoint in memory that isn't open."""
    memory, _ = locate_memory(load, choice)
    try:
        return share_description_files(load, choice, memory)
    finally:
        if memory is not None:
            memory.close()


def _read_files(
    load: LoadAttempt, choice: ElectedCheckpoint, memory: MemorySource | None
) -> DescriptionFiles:
    if choice.teller is not None and memory is not None:
        return memory.description_files()
    if not choice.storage or load.storage is None:
        raise DcpMemError("it has left memory")
    source = StorageSource(load.storage, choice.name, choice.save_id, load.search.scope)
    return source.description_files()
