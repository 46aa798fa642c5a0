"""A checkpoint as a follower hands it out: it is loaded, or its files are given to a program."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dcp_mem.errors import ConfigError
from dcp_mem.following.hold import HoldingReader
from dcp_mem.loading.load_attempt import LoadAttempt
from dcp_mem.memory.links import LinkedCheckpoint
from dcp_mem.planning.tensor_choice import TensorChoice
from dcp_mem.reader import RecoveryReport
from dcp_mem.storage.leases import read_lease


@dataclass(frozen=True, slots=True)
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
