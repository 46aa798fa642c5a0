"""Links to a checkpoint's files in memory, for programs that take a path.

A link is one more name of a segment's file. While it is there, the file is recycled by nobody
(`recycling.retire`), and deleting it deletes the link alone. Each directory of links has a lease,
which vanishes with the processes that hold it. Links without a lease would keep memory for ever, so
whoever looks for memory removes them first (ADR 32).
"""

from __future__ import annotations

import os
import shutil
import uuid
from types import TracebackType

from dcp_mem.common.files import raise_if_full
from dcp_mem.format import names
from dcp_mem.memory.checkpoint import LocalCheckpoint, files_in
from dcp_mem.memory.locks import end_lease, share, try_lease
from dcp_mem.memory.root import private_directory
from dcp_mem.memory.stock_metadata import lend_stock_metadata


class LinkedCheckpoint:
    """A directory with links to all files that torch's readers need of a checkpoint.

    Args:
        links: The job's directory of links; made where it is missing.
        checkpoint: All of its segments lie on this node; the caller holds leases on them.

    Attributes:
        path: The directory, called as the checkpoint.
        descriptor: Of the lease. A process that inherits it keeps the links as well.

    Raises:
        FileNotFoundError: The checkpoint was replaced just now by a newer save of its name.
        ManifestInvalid: Its catalog is damaged.
        MemoryBudgetExceeded: Memory is full.
    """

    def __init__(self, links: str, checkpoint: LocalCheckpoint) -> None:
        self._directory, self.descriptor = _leased_directory(private_directory(links))
        try:
            self.path = private_directory(os.path.join(self._directory, checkpoint.name))
            self._link(checkpoint)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise_if_full(error, self._directory)
            raise

    def _link(self, checkpoint: LocalCheckpoint) -> None:
        manifest = checkpoint.manifest
        for segment in manifest.segments:
            target = os.path.join(self.path, segment.file)
            os.link(checkpoint.segment_path(segment.file), target)
        metadata = os.path.join(self.path, names.metadata_file(manifest.scope))
        lend_stock_metadata(checkpoint.directory, manifest, metadata)  # last, as in a commit

    def close(self) -> None:
        """Remove the links, and whatever else was put there. Closing twice is fine."""
        if self.descriptor >= 0:
            shutil.rmtree(self._directory, ignore_errors=True)
            end_lease(self.descriptor)
            os.close(self.descriptor)
            self.descriptor = -1

    def __enter__(self) -> LinkedCheckpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _leased_directory(parent: str) -> tuple[str, int]:
    """Make a directory; return its path, and a descriptor with a shared lease on it."""
    while True:
        path = private_directory(os.path.join(parent, uuid.uuid4().hex[:12]))
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:  # it was taken for a dead one
            continue
        if share(descriptor) and os.fstat(descriptor).st_nlink:
            return path, descriptor
        os.close(descriptor)


def drop_dead_links(links: str) -> None:
    """Remove the links of processes that have ended without doing so.

    Args:
        links: The job's directory of links; there may be none.
    """
    for entry in files_in(links):
        path = os.path.join(links, entry)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            continue
        try:
            if try_lease(descriptor, exclusive=True):
                shutil.rmtree(path, ignore_errors=True)
                end_lease(descriptor)
        finally:
            os.close(descriptor)
