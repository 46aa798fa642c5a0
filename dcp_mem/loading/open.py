"""Third stage of a load: an elected checkpoint, opened on all ranks or on none."""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import dataclass

from torch.distributed.checkpoint.metadata import Metadata

from dcp_mem.comm.agreement import Attempted, attempt, described
from dcp_mem.errors import DcpMemError
from dcp_mem.format import names
from dcp_mem.loading.describe import SharedFiles, share_description_files
from dcp_mem.loading.load_attempt import LoadAttempt
from dcp_mem.loading.locate import LocatedSources, locate
from dcp_mem.loading.sources.base import Description, Source
from dcp_mem.loading.sources.stored import StorageSource
from dcp_mem.policy.election import ElectedCheckpoint
from dcp_mem.storage.leases import ReadLease


class CannotOpen(DcpMemError):
    """A rank can't open a candidate; the text says why."""


@dataclass(frozen=True, slots=True, eq=False)
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
        located = attempt(lambda: unless_opened.enter_context(closing(locate(load, choice))))
        memory = located.value.memory if located.error is None else None
        files = share_description_files(load, choice, memory)
        opened = attempt(lambda: _open(load, choice, located.value, files))
        trouble = load.ranks.all_reduce((load.ranks.rank, _trouble(opened)), _first_trouble)[1]
        if trouble:
            raise CannotOpen(trouble)
        unless_opened.pop_all()
    return opened.value


def _first_trouble(first: tuple[int, str], second: tuple[int, str]) -> tuple[int, str]:
    """Join two ranks' troubles: the one of the lower rank that has any."""
    return min(first, second, key=lambda one: (not one[1], one[0]))


def _trouble(opened: Attempted[OpenCheckpoint]) -> str:
    error = opened.error
    if error is None:
        return ""
    return str(error) if isinstance(error, DcpMemError) else described(error)


def _open(
    load: LoadAttempt, choice: ElectedCheckpoint, located: LocatedSources, files: SharedFiles
) -> OpenCheckpoint:
    """Open a checkpoint on this rank."""
    description, sources, troubles = _described(located, files)
    for trouble in troubles:
        load.note(choice, trouble)
    return OpenCheckpoint(choice, description, sources, located.lease)


def _described(
    located: LocatedSources, files: SharedFiles
) -> tuple[Description, tuple[Source, ...], list[str]]:
    """Return what the checkpoint consists of, its usable sources, and troubles with the others.

    The nearest usable source describes it; on a rank without sources, the description files do.
    """
    description: Description | None = None
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
    return description, tuple(sources), troubles


def _described_by(source: Source, files: SharedFiles) -> Description:
    if files is not None and isinstance(source, StorageSource):
        return source.describe_by(files.value)
    return source.describe()
