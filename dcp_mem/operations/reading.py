"""Read a checkpoint piece by piece, with one process and without a process group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from dcp_mem.config import Settings
from dcp_mem.functional import load_or_raise_cause
from dcp_mem.reader import MemoryStorageReader


class Reading:
    """A checkpoint from which several state dicts are loaded.

    Nothing of it is leased between two loads, so memory may recycle it, and storage delete it.

    Attributes:
        metadata: DCP's.
        entries: Flattened names, and what the metadata has of each.
    """

    def __init__(self, reader: MemoryStorageReader, name: str) -> None:
        self._reader, self._name = reader, name
        reader.reset(name)
        self.metadata: Metadata = reader.read_metadata()
        reader.close()
        self.entries = list(self.metadata.state_dict_metadata.items())

    def load(self, state: dict[str, Any], *, trust: bool = False) -> str:
        """Load into a state dict.

        Args:
            state: Flattened names, with what is loaded into, or replaced.
            trust: Unpickle byte items without restrictions.

        Returns:
            The id of the save that it was loaded from; "" for what torch's own writer made, or
            where there was nothing to load.
        """
        if not state:
            return ""
        load_or_raise_cause(
            state,
            checkpoint_id=self._name,
            storage_reader=self._reader,
            no_dist=True,
            weights_only=not trust,
        )
        return self._reader.report().save_id


@contextmanager
def open_reading(settings: Settings, name: str) -> Iterator[Reading]:
    """Yield a checkpoint of a job, to be loaded from.

    Args:
        settings: The job's.
        name: Of the checkpoint.

    Raises:
        CheckpointNotFound: It is neither in this node's memory nor on storage.
    """
    reader = MemoryStorageReader(
        settings.url,
        memory_root=settings.memory_root,
        job=settings.job,
        storage_options=settings.storage_options,
        record=False,
    )
    with reader:
        yield Reading(reader, name)
