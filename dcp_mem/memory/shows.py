"""`.metadata` beside checkpoints in memory, made in the background: only torch's own readers look at it."""

from __future__ import annotations

import threading
from queue import SimpleQueue

from dcp_mem.events import log
from dcp_mem.format.manifest import Manifest
from dcp_mem.format.pickled import MetadataTemplate, template_of
from dcp_mem.memory.catalogs import Catalogs
from dcp_mem.memory.job import JobMemory

_PATIENCE = 60.0


class Shows:
    """A thread that shows complete checkpoints to stock readers, in the order in which they were saved."""

    def __init__(self, memory: JobMemory, catalogs: Catalogs) -> None:
        self._memory, self._catalogs = memory, catalogs
        self._waiting: SimpleQueue[Manifest | None] = SimpleQueue()
        self._template: tuple[str, MetadataTemplate] | None = None
        self._thread = threading.Thread(target=self._work, name="dcp_mem-show", daemon=True)
        self._thread.start()

    def add(self, manifest: Manifest) -> None:
        """Show this one soon."""
        if len(manifest.nodes) == 1:
            self._waiting.put(manifest)

    def close(self) -> None:
        """Finish what is waiting, and end."""
        self._waiting.put(None)
        self._thread.join(_PATIENCE)

    def _work(self) -> None:
        while (manifest := self._waiting.get()) is not None:
            self._show(manifest)

    def _show(self, manifest: Manifest) -> None:
        try:
            self._memory.show_to_stock_readers(manifest, self._template_of(manifest.catalog))
        except Exception as error:  # later ones have their turn all the same
            log.warning("%s has no .metadata in memory, for torch's own readers: %r", manifest.name, error)

    def _template_of(self, catalog: str) -> MetadataTemplate:
        if self._template is None or self._template[0] != catalog:
            self._template = catalog, template_of(self._catalogs.get(catalog))
        return self._template[1]
