"""Third stage of a load: an elected checkpoint, opened on all ranks or on none."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import cast

from torch.distributed.checkpoint.metadata import Metadata

from dcp_mem.comm.agreement import Attempted, attempt, described
from dcp_mem.common import faults
from dcp_mem.common.value_class import value_class
from dcp_mem.errors import DcpMemError, SegmentCorrupt
from dcp_mem.format import names
from dcp_mem.loading.load_attempt import DamagedSegment, LoadAttempt
from dcp_mem.loading.sources.base import Description, DescriptionFiles, Source
from dcp_mem.loading.sources.memory import MemorySource
from dcp_mem.loading.sources.stored import StorageSource
from dcp_mem.loading.survey import stored_findings
from dcp_mem.policy.election import ElectedCheckpoint
from dcp_mem.policy.order import newest_first
from dcp_mem.storage import Storage
from dcp_mem.storage.leases import ReadLease, read_lease

SharedFiles = Attempted[DescriptionFiles] | None
"""Description files that one rank has read for all, or its error.

None where each rank reads its own: they lie in its memory, or each rank saved alone.
"""


class CannotOpen(DcpMemError):
    """A rank can't open a candidate; the text says why.

    `lacking`: segments that the survey found in memory, and that can't be opened there.
    """

    def __init__(self, why: str, lacking: Collection[DamagedSegment] = ()) -> None:
        super().__init__(why)
        self.lacking = lacking


@value_class(eq=False)
class OpenCheckpoint:
    """A checkpoint that every rank has opened."""

    choice: ElectedCheckpoint
    description: Description
    sources: tuple[Source, ...]  # where this rank's bytes come from, nearest first
    # keeps the checkpoint on storage, where its bytes come from there
    lease: ReadLease | None = None

    def is_in_memory(self, file: str) -> bool:
        """Return whether some node has the segment."""
        return self.choice.holders is None or names.rank_of(file) in self.choice.holders

    @property
    def metadata(self) -> Metadata:
        """The checkpoint's DCP metadata."""
        return self.description.metadata

    def close(self) -> None:
        """End all leases, so that memory may recycle the checkpoint, and storage delete it."""
        for source in self.sources:
            source.close()
        if self.lease is not None:
            self.lease.close()


def open_together(load: LoadAttempt, choice: ElectedCheckpoint) -> OpenCheckpoint:
    """Open a candidate on all ranks, or on none.

    1. Every rank opens the sources that it sees.
    2. One rank reads the description files for those that don't see them.
    3. Every rank makes sure that it knows what the checkpoint consists of; one exchange.

    Raises CannotOpen.
    """
    with ExitStack() as unless_opened:
        located = attempt(partial(_locate, load, choice))
        if located.error is None:
            unless_opened.enter_context(closing(located.value))
        memory = located.value.memory if located.error is None else None
        files = _share_files(load, choice, memory)
        opened = attempt(partial(_open, load, choice, located, files))
        lacking = located.value.lacking if located.error is None else frozenset()
        own: _Outcome = load.ranks.rank, _trouble(opened), lacking
        _, trouble, lacking = load.ranks.all_reduce(own, _joined)
        if trouble:
            raise CannotOpen(trouble, lacking)
        unless_opened.pop_all()
    return opened.value


_Outcome = tuple[int, str, frozenset[DamagedSegment]]
"""A rank, its trouble, and the segments that some ranks lack."""


def _joined(first: _Outcome, second: _Outcome) -> _Outcome:
    """Join two ranks' outcomes: the trouble of the lower rank that has any, what both lack."""
    rank, trouble, _ = min(first, second, key=lambda one: (not one[1], one[0]))
    return rank, trouble, first[2] | second[2]


def _trouble(opened: Attempted[OpenCheckpoint]) -> str:
    error = opened.error
    if error is None:
        return ""
    return str(error) if isinstance(error, DcpMemError) else described(error)


def _open(
    load: LoadAttempt,
    choice: ElectedCheckpoint,
    attempted: Attempted[_Located],
    files: SharedFiles,
) -> OpenCheckpoint:
    """Open a checkpoint on this rank; its usable sources count, troubles with others are noted.

    The nearest usable source describes it; on a rank without sources, the description files do.
    """
    located, description = attempted.value, cast("Description | None", None)
    sources: list[Source] = []
    troubles = [located.trouble] if located.trouble else []
    for source in (located.memory, located.stored):
        if source is None:
            continue
        try:
            if description is None:
                description = _described_by(source, files)
            sources.append(source)
        except DcpMemError as error:
            troubles.append(str(error))
            source.close()
    if description is None and located.stored is None and files is not None:
        try:
            description = files.value.description()
        except DcpMemError as error:
            troubles.append(str(error))
    if description is None:
        raise CannotOpen("; ".join(troubles) or "it is gone")
    for trouble in troubles:
        load.note(choice, trouble)
    return OpenCheckpoint(choice, description, tuple(sources), located.lease)


def _described_by(source: Source, files: SharedFiles) -> Description:
    if files is not None and isinstance(source, StorageSource):
        return source.describe_by(files.value)
    return source.describe()


# -- the sources that a rank sees ------------------------------------------------------------------


@value_class(kw_only=True)
class _Located:
    """The sources of a checkpoint that this rank sees; not yet asked what it consists of."""

    memory: MemorySource | None = None
    stored: StorageSource | None = None
    trouble: str = ""  # why memory or storage, which was to have the checkpoint, is no source
    lacking: frozenset[DamagedSegment] = frozenset()
    # keeps the checkpoint on storage, where its bytes come from there
    lease: ReadLease | None = None

    def close(self) -> None:
        """Close what is open."""
        for resource in (self.memory, self.stored, self.lease):
            if resource is not None:
                resource.close()


def _locate(load: LoadAttempt, choice: ElectedCheckpoint) -> _Located:
    """Return the sources of a checkpoint that this rank sees, under a lease where one is needed."""
    located = _Located()
    # The lease first: once it is taken, we look whether the checkpoint is still committed. One rank
    # keeps on storage, for all, what is to come from there.
    if load.storage is not None and load.ranks.rank == 0 and choice.save_id and not choice.memory:
        located = _Located(lease=read_lease(load.storage, choice.name))
    try:
        memory, trouble, lacking = _locate_memory(load, choice)
        located = replace(located, memory=memory, trouble=trouble, lacking=lacking)
        return replace(located, stored=_locate_stored(load, choice))
    except BaseException as error:
        if located.memory is not None and isinstance(error, DcpMemError):
            return replace(located, trouble=str(error))
        located.close()
        raise


def _locate_memory(
    load: LoadAttempt, choice: ElectedCheckpoint
) -> tuple[MemorySource | None, str, frozenset[DamagedSegment]]:
    """Return this node's memory as a source; else None, perhaps why, and what it lacks."""
    checkpoint = load.found_local(choice) if choice.memory or choice.holders else None
    if checkpoint is None or load.memory is None:
        return None, "", frozenset()
    node = load.memory.node
    try:
        source = MemorySource(checkpoint, node, load.damaged_ranks(checkpoint))
    except DcpMemError as error:
        return None, str(error), frozenset()
    if choice.holders is None and source.lacking:  # it was elected as whole on every node
        source.close()
        rank = min(source.lacking)
        corrupt = SegmentCorrupt(checkpoint.name, rank, source.label, source.lacking[rank])
        ranks = source.lacking if load.is_collective else ()  # else no other node has a copy
        return None, str(corrupt), frozenset((node, choice.save_id, rank) for rank in ranks)
    return source, "", frozenset()


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


# -- files for ranks that don't see the checkpoint -------------------------------------------------


def _share_files(
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
    """Do as `_share_files` does, for a checkpoint in memory that isn't open."""
    memory, _, _ = _locate_memory(load, choice)
    try:
        return _share_files(load, choice, memory)
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
