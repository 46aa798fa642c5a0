"""Links to a checkpoint's files in memory, for followers of the run and for other programs.

A link is one more name of a segment's file. While it is there, nobody recycles the file
(`recycling.retire`), and deleting it deletes the link alone. The checkpoint itself may leave memory
meanwhile, so a save waits for no follower unless memory is short. Each directory of links has a
lease, which vanishes with the processes that hold it. Links without a lease would keep memory for
ever, so saves remove them first (ADR 34).
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace

from dcp_mem.common import files
from dcp_mem.format import names
from dcp_mem.memory.catalogs import lend_stock_metadata
from dcp_mem.memory.checkpoint import LocalCheckpoint, files_in, own_files
from dcp_mem.memory.locks import end_lease, leased_alone, share
from dcp_mem.memory.root import private_directory


class LinkedCheckpoint:
    """A checkpoint whose files are links, in a directory of their own, until it is closed.

    `local`: the checkpoint; its directory is called as the checkpoint. `descriptor`: of the lease.
    A process that inherits it keeps the links as well.
    """

    def __init__(self, links: str, checkpoint: LocalCheckpoint, segments: Collection[str]) -> None:
        """Link segments, and what describes the checkpoint.

        `segments`: their files; the caller holds leases on them.
        """
        self._directory, self.descriptor = _leased_directory(private_directory(links))
        try:
            path = private_directory(os.path.join(self._directory, checkpoint.name))
            self.local = replace(checkpoint, directory=path)
            self._link(checkpoint, segments)
        except BaseException:
            self.close()
            raise

    def _link(self, checkpoint: LocalCheckpoint, segments: Collection[str]) -> None:
        manifest, path = checkpoint.manifest, self.local.directory
        for file in segments:
            files.link(checkpoint.segment_path(file), self.local.segment_path(file))
        own = private_directory(os.path.join(path, names.OWN))
        of_manifest = os.path.basename(self.local.manifest_path)
        for file in own_files(manifest, segments) - {of_manifest}:
            with suppress(FileNotFoundError):  # not all of them are made at once
                files.link(os.path.join(checkpoint.directory, names.OWN, file), f"{own}/{file}")
        # A copy: a lease on the manifest itself would keep the checkpoint in memory.
        files.write_atomically(self.local.manifest_path, manifest.to_json())

    @property
    def is_whole(self) -> bool:
        """Whether all segments are here."""
        here = set(files_in(self.local.directory))
        return here.issuperset(segment.file for segment in self.local.manifest.segments)

    def add_stock_metadata(self) -> None:
        """Add what torch's readers need beside the segments."""
        lend_stock_metadata(self.local.directory, self.local.manifest)

    def close(self) -> None:
        """Remove the links, and whatever else was put there. Closing twice is fine."""
        if self.descriptor >= 0:
            shutil.rmtree(self._directory, ignore_errors=True)
            end_lease(self.descriptor)
            os.close(self.descriptor)
            self.descriptor = -1

    def __enter__(self) -> LinkedCheckpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _leased_directory(parent: str) -> tuple[str, int]:
    """Make a directory; return its path, and a descriptor with a shared lease on it."""
    while True:
        path = private_directory(os.path.join(parent, uuid.uuid4().hex[:12]))
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:  # it was taken for a dead one
            continue
        is_ours = False
        try:
            is_ours = share(descriptor) and os.fstat(descriptor).st_nlink > 0
        finally:
            if not is_ours:
                os.close(descriptor)
        if is_ours:
            return path, descriptor


def drop_dead_links(links: str) -> bool:
    """Remove the links of processes that have ended without doing so.

    `links`: the job's directory of links; there may be none. Returns whether links of live
    processes are left.
    """
    are_left = False
    for entry in files_in(links):
        path = os.path.join(links, entry)
        if not os.path.isdir(path):
            continue
        with leased_alone(path) as descriptor:
            if descriptor is not None:
                shutil.rmtree(path, ignore_errors=True)
        are_left = are_left or os.path.exists(path)  # another process may be removing it
    return are_left
