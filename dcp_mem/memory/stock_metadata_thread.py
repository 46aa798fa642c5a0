"""A thread that puts `.metadata` beside complete checkpoints: only torch's own readers need it."""

from __future__ import annotations

import threading
from queue import SimpleQueue

from dcp_mem.common.background import let_caller_return
from dcp_mem.common.log import log
from dcp_mem.format.manifest import Manifest
from dcp_mem.format.metadata_template import MetadataTemplate, template_of
from dcp_mem.memory.catalogs import Catalogs
from dcp_mem.memory.job import JobMemory

_CLOSE_SECONDS = 60.0


class StockMetadataThread:
    """Puts `.metadata` beside checkpoints, in the order in which they were saved."""

    def __init__(self, memory: JobMemory, catalogs: Catalogs) -> None:
        self._memory, self._catalogs = memory, catalogs
        self._queue: SimpleQueue[Manifest | None] = SimpleQueue()
        self._template: tuple[str, MetadataTemplate] | None = None
        self._thread = threading.Thread(target=self._work, name="dcp_mem-show", daemon=True)
        self._thread.start()

    def add(self, manifest: Manifest) -> None:
        """Have `.metadata` put beside this checkpoint soon, if it lies on one node alone."""
        if len(manifest.nodes) == 1:
            self._queue.put(manifest)

    def close(self) -> None:
        """Finish what is in the queue, and end the thread."""
        self._queue.put(None)
        self._thread.join(_CLOSE_SECONDS)

    def _work(self) -> None:
        while (manifest := self._queue.get()) is not None:
            let_caller_return()
            self._put(manifest)

    def _put(self, manifest: Manifest) -> None:
        try:
            self._memory.put_stock_metadata(manifest, self._template_of(manifest.catalog))
        except Exception as error:  # the checkpoints behind it have their turn all the same
            log.warning(
                "%s has no .metadata in memory, for torch's own readers: %r", manifest.name, error
            )

    def _template_of(self, catalog: str) -> MetadataTemplate:
        if self._template is None or self._template[0] != catalog:
            self._template = catalog, template_of(self._catalogs.get(catalog))
        return self._template[1]
