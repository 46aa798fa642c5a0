"""A checkpoint that a follower holds: it is loaded, or its files are given to a program."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from dcp_mem.comm.bridge.calls import DcpCall, direct_call
from dcp_mem.common.log import log
from dcp_mem.common.value_class import value_class
from dcp_mem.errors import ConfigError, DcpMemError
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
from dcp_mem.runtime.states import job_memory
from dcp_mem.storage.leases import read_lease
from dcp_mem.storage.routes import storage_of


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
        self._storage = storage_of(self.settings)
        self.watch = StorageWatch(self._storage)
        # The held checkpoint's files in this node's memory; None where there are none, or they are
        # leased.
        self.links: LinkedCheckpoint | None = None

    def memory(self) -> JobMemory | None:
        """Return the job's memory on this node; None where it has none, and none is made."""
        known = self._memory
        if known is None or not os.path.isdir(known.slots):
            self._memory = job_memory(self.settings)
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
        """The held checkpoint's description, from its manifest."""
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


@value_class(frozen=True)
class CheckpointFiles:
    """The files of a checkpoint, for a program that takes a path.

    Attributes:
        path: A directory of links in tmpfs, which the program may delete and must not write to;
            or the checkpoint's directory or URL on storage, which it must leave alone.
        pass_fds: For `subprocess`: a program that inherits these keeps the links for as long as it
            runs, even if this process is killed.
    """

    path: str
    pass_fds: tuple[int, ...] = ()


class FollowedCheckpoint:
    """A checkpoint that a follower hands out.

    Attributes:
        name: The checkpoint id.
        save_id: Of the save; "" for a checkpoint that torch's own writer made.
        step: The training step; None where the writer wasn't told.
        metrics: The figures given with the save.
        is_durable: Whether storage has it.
        report: What was loaded, and from where; None as long as nothing is.
    """

    def __init__(
        self, reader: HoldingReader, load: LoadAttempt, report: RecoveryReport | None
    ) -> None:
        """Describe what a load has opened last; `report`: of what is loaded already."""
        choice, found = load.tried[-1], report or reader.description
        self.name, self.save_id = choice.name, choice.save_id
        self.step, self.metrics, self.report = found.step, found.metrics, report
        self.is_durable = choice.storage
        self._reader, self._load = reader, load

    def load(
        self,
        state_dict: dict[str, Any],
        *,
        weights_only: bool = True,
        skip: TensorChoice | None = None,
    ) -> RecoveryReport:
        """Load into a state dict, in place, and end the lease. Call it on all ranks, and once.

        Args:
            state_dict: As for `dcp_mem.load`: the part of the checkpoint that is wanted.
            weights_only: As in `dcp_mem.load`.
            skip: As in `dcp_mem.load`.

        Returns:
            What was loaded, and from where.

        Raises:
            ConfigError: It isn't held any more.
            SegmentCorrupt: It is damaged, and no source has these bytes whole. Take the next one.
            RankFailed: It is damaged on another rank, or that has failed otherwise.
        """
        self._check_held()
        self.report = self._reader.load_held(state_dict, weights_only, skip)
        return self.report

    @contextmanager
    def files(self) -> Iterator[CheckpointFiles]:
        """Yield where a program finds the checkpoint, until the end of the block.

        Where all of it lies in this node's memory, that is a directory of links there; else where
        it lies on storage. torch's readers load both.

        Raises:
            ConfigError: It isn't held any more, or neither this node's memory nor storage has all
                of it.
            DcpMemError: Its files can't be linked.
        """
        self._check_held()
        memory, storage, held = self._load.memory, self._load.storage, self._reader.links
        if held is not None and memory is not None and held.is_whole:
            local = held.local
            segments = [one.file for one in local.manifest.segments]
            # The program may do away with these.
            with LinkedCheckpoint(memory.links, local, segments) as links:
                links.add_stock_metadata()
                yield CheckpointFiles(links.local.directory, (links.descriptor,))
            return
        if not self.is_durable or storage is None:
            raise ConfigError(
                f"this node's memory hasn't all of {self.name}, nor has storage so far: "
                "only_durable=True waits for storage"
            )
        # Other ranks may let go of the checkpoint earlier than this one.
        lease = read_lease(storage, self.name)
        try:
            yield CheckpointFiles(f"{storage.url}/{self.name}")
        finally:
            if lease is not None:
                lease.close()

    def release(self) -> None:
        """End the lease, so that memory may recycle the checkpoint. Releasing twice is fine."""
        if self._reader.holds(self._load):
            self._reader.close()

    def _check_held(self) -> None:
        if not self._reader.holds(self._load):
            raise ConfigError(
                f"{self.name} is held no more: it has been loaded or released, or the next "
                "checkpoint has been asked for"
            )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"
