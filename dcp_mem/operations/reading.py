"""Read a checkpoint piece by piece, with one process and without a process group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from dcp_mem.config import Settings
from dcp_mem.functional import load, raising_cause
from dcp_mem.loading.load_attempt import LoadRequest
from dcp_mem.policy.election import ElectedCheckpoint
from dcp_mem.reader import MemoryStorageReader
from dcp_mem.storage.leases import being_read
from dcp_mem.storage.routes import storage_of


class _ReaderOfSave(MemoryStorageReader):
    """Reads one save, and no other one of its name."""

    def __init__(self, settings: Settings, save_id: str) -> None:
        super().__init__(
            settings.url,
            memory_root=settings.memory_root,
            job=settings.job,
            storage_options=settings.storage_options,
            record=False,
        )
        self._save_id = save_id

    def _request(self, *args: Any, **options: Any) -> LoadRequest:
        request = super()._request(*args, **options)
        return replace(request, eligible=self._of_save) if self._save_id else request

    def _of_save(self, choices: Sequence[ElectedCheckpoint]) -> list[ElectedCheckpoint]:
        return [one for one in choices if one.save_id == self._save_id]


class Reading:
    """A checkpoint from which several state dicts are loaded, all of one save. Memory may recycle
    it between two loads; storage keeps it.
    """

    def __init__(self, reader: MemoryStorageReader, name: str) -> None:
        self._reader, self._name = reader, name
        reader.reset(name)
        self.metadata: Metadata = reader.read_metadata()
        reader.close()
        self.entries = list(self.metadata.state_dict_metadata.items())

    def load(self, state: dict[str, Any], *, trust: bool = False) -> None:
        if not state:
            return
        raising_cause(
            load,
            state,
            checkpoint_id=self._name,
            storage_reader=self._reader,
            no_dist=True,
            weights_only=not trust,
        )


@contextmanager
def open_reading(settings: Settings, name: str, save_id: str) -> Iterator[Reading]:
    """Yield a checkpoint to load from; the save id is "" for what torch's own writer made."""
    with ExitStack() as held:
        storage = storage_of(settings)
        if storage is not None and storage.ls(name):
            held.enter_context(being_read(storage, name))
        yield Reading(held.enter_context(_ReaderOfSave(settings, save_id)), name)
