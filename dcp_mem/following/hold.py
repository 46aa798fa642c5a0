"""The reader by which a follower opens checkpoints, holds them, and loads them."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from dcp_mem.comm.bridge.calls import DcpCall, direct_call
from dcp_mem.common.log import log
from dcp_mem.errors import DcpMemError
from dcp_mem.functional import load, raising_cause
from dcp_mem.loading.load_attempt import Eligible, LoadAttempt, Places
from dcp_mem.loading.open import OpenCheckpoint
from dcp_mem.loading.sources.base import Description
from dcp_mem.loading.sources.memory import MemorySource
from dcp_mem.loading.survey import StorageWatch
from dcp_mem.memory.job import JobMemory
from dcp_mem.memory.links import LinkedCheckpoint
from dcp_mem.options import FollowOptions
from dcp_mem.planning.tensor_choice import TensorChoice
from dcp_mem.reader import MemoryStorageReader, RecoveryReport
from dcp_mem.storage import Storage
from dcp_mem.storage.routes import open_storage


class HoldingReader(MemoryStorageReader):
    """A reader that holds what a follower has opened, and keeps its view of memory and storage."""

    def __init__(
        self,
        root: str | os.PathLike[str] | None,
        process_group: dist.ProcessGroup | None,
        options: FollowOptions,
    ) -> None:
        super().__init__(root, process_group=process_group, record=False, **options)
        self._memory: JobMemory | None = None
        self._storage: Storage | None = None
        if self.settings.url is not None:
            self._storage = open_storage(self.settings.url, self.settings.storage_options)
        self.watch = StorageWatch(self._storage)
        # The held checkpoint's files in this node's memory; None where there are none, or they are
        # leased.
        self.links: LinkedCheckpoint | None = None

    def memory(self) -> JobMemory | None:
        """Return the job's memory on this node; None where it has none, and none is made."""
        chosen = self.settings
        slots = os.path.join(chosen.memory_root, chosen.job, ".slots")
        if not os.path.isdir(slots):
            self._memory = None
        elif self._memory is None:
            self._memory = JobMemory(chosen.memory_root, chosen.job)
        return self._memory

    def _places(self) -> Places:
        return Places(self.memory(), self._storage, self.settings.job)

    def call(self) -> DcpCall:
        """Return the ranks that follow together."""
        return direct_call(self._process_group, False, self.settings.purpose("follow"))

    def attempt(self, call: DcpCall, eligible: Eligible) -> LoadAttempt:
        """Return a load that is about to begin."""
        self._is_coordinator = call.rank == 0
        request = replace(
            self._request(call, self._taken_id(), time.monotonic(), True), eligible=eligible
        )
        return LoadAttempt(request, self.watch)

    def hold(self, load: LoadAttempt, opened: OpenCheckpoint) -> None:
        """Keep an open checkpoint until `close`, by links to its files: no save waits for them."""
        self.close()
        self._load, self._opened = load, opened
        source = next((one for one in opened.sources if isinstance(one, MemorySource)), None)
        if source is None or load.memory is None:
            return
        try:
            self.links = LinkedCheckpoint(load.memory.links, source.checkpoint, source.files)
            damaged = load.damaged_ranks(source.checkpoint)
            linked = MemorySource(self.links.local, load.memory.node, damaged)
        except (OSError, DcpMemError) as error:
            log.info("%s stays leased: its files can't be linked: %s", opened.choice.name, error)
            self._end_links()
            return
        sources = tuple(linked if one is source else one for one in opened.sources)
        self._opened = replace(opened, sources=sources)
        source.close()

    def holds(self, load: LoadAttempt) -> bool:
        """Return whether what this load has opened is held still."""
        return self._load is load and self._opened is not None

    @property
    def description(self) -> Description:
        """What the manifest of the checkpoint that is held says of it."""
        assert self._opened is not None
        return self._opened.description

    def load_held(
        self, state_dict: dict[str, Any], weights_only: bool, skip: TensorChoice | None
    ) -> RecoveryReport:
        """Load what is held, and let go of it, however that ends."""
        try:
            raising_cause(
                load, state_dict, storage_reader=self, weights_only=weights_only, skip=skip
            )
        finally:
            self.close()
        return self.report()

    def _open(
        self, *_: object, weights_only: bool, refusal: object
    ) -> tuple[LoadAttempt, OpenCheckpoint]:
        """Return what is held, in the place of a checkpoint that is searched for."""
        load, opened = self._load, self._opened
        assert load is not None
        assert opened is not None
        load.request = replace(load.request, started=time.monotonic(), weights_only=weights_only)
        return load, opened

    def _end_leases(self) -> None:
        super()._end_leases()
        self._end_links()

    def _end_links(self) -> None:
        links, self.links = self.links, None
        if links is not None:
            links.close()
