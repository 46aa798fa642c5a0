"""A checkpoint becomes COMPLETE on this node, and visible to stock readers."""

from __future__ import annotations

import threading
from concurrent.futures import Future, wait
from functools import partial

from dcp_mem.common import faults
from dcp_mem.common.log import log
from dcp_mem.common.parallel import KeptThreads, let_caller_return
from dcp_mem.format.manifest import Manifest
from dcp_mem.format.metadata_template import MetadataTemplate, template_of
from dcp_mem.memory.catalogs import Catalogs
from dcp_mem.memory.job import JobMemory

_CLOSE_SECONDS = 60.0


class Publisher:
    """Publishes checkpoints in the job's memory on this node.

    Checkpoints are published in turn; any thread may drain.
    """

    def __init__(self, memory: JobMemory, catalogs: Catalogs) -> None:
        self._memory, self._catalogs = memory, catalogs
        self._thread = KeptThreads(1, "dcp_mem-show")
        self._last: Future[None] | None = None
        self._template: tuple[str, MetadataTemplate] | None = None
        self._guard = threading.Lock()  # not held while the thread ends

    def publish(self, manifest: Manifest, *, sealed: bool = False) -> None:
        """Make a checkpoint COMPLETE, in the place of an older one of its name.

        Its catalog is there already, and so are its segments if they are `sealed`, with their
        directory: the manifest comes last.
        """
        directory = self._memory.checkpoint_directory(manifest.name)
        if not sealed:
            self._memory.make_checkpoint_directory(manifest.name)
        replaced = [
            checkpoint
            for checkpoint in self._memory.find(manifest.name)
            if checkpoint.manifest.scope == manifest.scope
        ]
        self._catalogs.link(manifest.catalog, directory)
        faults.point("complete.catalog")
        self._memory.publish(manifest, sealed=sealed)
        faults.point("complete.manifest")
        for checkpoint in replaced:
            self._memory.retire_replaced(checkpoint)

    def show(self, manifest: Manifest) -> None:
        """Put `.metadata` beside a complete checkpoint, if it lies on one node alone, behind it."""
        if len(manifest.nodes) == 1:
            with self._guard:
                self._last = self._thread.submit(partial(self._show, manifest))

    def close(self) -> None:
        """Finish what is being put there; a later checkpoint starts another thread."""
        with self._guard:
            last, self._last = self._last, None
            self._thread.close()
        if last is not None:
            wait([last], _CLOSE_SECONDS)

    def _show(self, manifest: Manifest) -> None:
        let_caller_return()
        try:
            if self._template is None or self._template[0] != manifest.catalog:
                template = template_of(self._catalogs.get(manifest.catalog))
                self._template = manifest.catalog, template
            self._memory.put_stock_metadata(manifest, self._template[1])
        except Exception as error:  # the checkpoints behind it have their turn all the same
            log.warning(
                "%s has no .metadata in memory, for torch's own readers: %r", manifest.name, error
            )
