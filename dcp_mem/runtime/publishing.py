"""A checkpoint becomes COMPLETE on this node, and visible to stock readers."""

from __future__ import annotations

import threading

from dcp_mem.common import faults
from dcp_mem.format.manifest import Manifest
from dcp_mem.memory.catalogs import Catalogs
from dcp_mem.memory.job import JobMemory
from dcp_mem.memory.stock_metadata_thread import StockMetadataThread


class Publisher:
    """Publishes checkpoints in the job's memory on this node.

    Checkpoints are published in turn; any thread may drain.
    """

    def __init__(self, memory: JobMemory, catalogs: Catalogs) -> None:
        self._memory, self._catalogs = memory, catalogs
        self._stock_metadata: StockMetadataThread | None = None
        self._guard = threading.Lock()  # not held while the thread ends

    def publish(self, manifest: Manifest) -> None:
        """Make a checkpoint COMPLETE, in the place of an older one of its name.

        Its segments and its catalog are there already: the manifest comes last.
        """
        directory = self._memory.make_checkpoint_directory(manifest.name)
        replaced = [
            checkpoint
            for checkpoint in self._memory.find(manifest.name)
            if checkpoint.manifest.scope == manifest.scope
        ]
        self._catalogs.link(manifest.catalog, directory)
        faults.point("complete.catalog")
        self._memory.publish(manifest)
        faults.point("complete.manifest")
        for checkpoint in replaced:
            self._memory.retire_replaced(checkpoint)

    def show(self, manifest: Manifest) -> None:
        """Put `.metadata` beside a complete checkpoint, in the background."""
        with self._guard:
            if self._stock_metadata is None:
                self._stock_metadata = StockMetadataThread(self._memory, self._catalogs)
            self._stock_metadata.add(manifest)

    def drain(self) -> None:
        """Finish what is being put there; a later checkpoint starts another thread."""
        with self._guard:
            thread, self._stock_metadata = self._stock_metadata, None
        if thread is not None:
            thread.close()
