"""Read one byte item (a stream) of a checkpoint, with one process and without a process group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

from dcp_mem.common.values import MEMORY, STORAGE, CheckpointStatus
from dcp_mem.config import Settings
from dcp_mem.errors import ConfigError, DcpMemError, RankFailed, SegmentCorrupt
from dcp_mem.format import names
from dcp_mem.loading.fetch import Fetcher
from dcp_mem.loading.sources.base import SOURCE_ERRORS, Description
from dcp_mem.loading.sources.memory import MemorySource
from dcp_mem.loading.sources.stored import StorageSource
from dcp_mem.memory.root import node_id
from dcp_mem.operations.contents import local_checkpoint_of
from dcp_mem.storage import Storage
from dcp_mem.storage.leases import read_lease

Pick = Callable[[Sequence[str]], str | None]
"""Picks one of the streams of a checkpoint, by their names; None if none of them is meant."""


class Elsewhere(Protocol):
    """Other nodes' memory.

    Both methods return None where no node has what is asked for, and raise SegmentCorrupt and the
    like where it is damaged.
    """

    def describe(self, checkpoint: CheckpointStatus) -> Description | None:
        """Return what the checkpoint consists of."""

    def fetch(
        self, checkpoint: CheckpointStatus, file: str, offset: int, nbytes: int
    ) -> memoryview | None:
        """Return bytes of one of the checkpoint's segments."""


@contextmanager
def open_stream(
    settings: Settings,
    storage: Storage | None,
    checkpoint: CheckpointStatus,
    pick: Pick,
    wanted: str,
    elsewhere: Elsewhere | None = None,
) -> Iterator[memoryview]:
    """Yield the bytes of a stream, from this node's memory, else other nodes', else storage. They
    are compared with their checksums.
    """
    troubles: list[str] = []
    with ExitStack() as stack:
        data = _from_memory(settings, checkpoint, pick, wanted, stack, troubles)
        if data is None and elsewhere is not None and MEMORY in checkpoint.places:
            data = _from_elsewhere(elsewhere, checkpoint, pick, wanted, troubles)
        if data is None:
            data = _from_storage(storage, checkpoint, pick, wanted, stack, troubles)
        if data is None:
            raise DcpMemError(
                f"{wanted} of {checkpoint.name} can't be read: "
                f"{'; '.join(troubles) or 'it is gone'} (storage has it once it "
                f"is durable; with copies, DCP_MEM_REPLICAS=1, another node's memory may have it "
                f"as well)"
            )
        yield data


def _from_memory(
    settings: Settings,
    checkpoint: CheckpointStatus,
    pick: Pick,
    wanted: str,
    stack: ExitStack,
    troubles: list[str],
) -> memoryview | None:
    local = local_checkpoint_of(settings, checkpoint)
    if local is None:
        return None
    try:
        source = MemorySource(local, node_id(settings.memory_root))
        stack.callback(source.close)
        file, offset, nbytes = _place(source.describe(), checkpoint, pick, wanted)
        if source.has(file):
            return source.checked(file, offset, offset + nbytes)[0]
    except SOURCE_ERRORS as error:
        troubles.append(str(error))
        return None
    rank = names.rank_of(file)
    node = dict(zip(local.manifest.segments.rank, local.manifest.segments.node, strict=True))[rank]
    troubles.append(f"rank {rank} saved it on node {node}")
    return None


def _from_elsewhere(
    elsewhere: Elsewhere, checkpoint: CheckpointStatus, pick: Pick, wanted: str, troubles: list[str]
) -> memoryview | None:
    try:
        description = elsewhere.describe(checkpoint)
        if description is None:
            return None
        data = elsewhere.fetch(checkpoint, *_place(description, checkpoint, pick, wanted))
    except (*SOURCE_ERRORS, RankFailed) as error:
        troubles.append(str(error))
        return None
    if data is None:
        troubles.append("no other node that can be asked has it")
    return data


def _from_storage(
    storage: Storage | None,
    checkpoint: CheckpointStatus,
    pick: Pick,
    wanted: str,
    stack: ExitStack,
    troubles: list[str],
) -> memoryview | None:
    if storage is None or STORAGE not in checkpoint.places:
        if MEMORY not in checkpoint.places:
            troubles.append("it is gone")
        return None
    lease = read_lease(storage, checkpoint.name)
    if lease is not None:
        stack.callback(lease.close)
    source = StorageSource(storage, checkpoint.name, checkpoint.save_id, checkpoint.scope)
    try:
        file, offset, nbytes = _place(source.describe(), checkpoint, pick, wanted)
        data = memoryview(bytearray(nbytes))
        Fetcher(source, checkpoint.name, [file], verify=True).fetch(file, offset, [data])
    except SegmentCorrupt as error:
        if not troubles:
            raise
        troubles.append(str(error))
        return None
    return data


def _place(
    description: Description, checkpoint: CheckpointStatus, pick: Pick, wanted: str
) -> tuple[str, int, int]:
    """Return the segment in which a stream lies, the offset there, and its bytes."""
    places: dict[str, Any] = {
        index.fqn: info for index, info in (description.metadata.storage_data or {}).items()
    }
    name = pick(sorted(places))
    if name is None:
        raise ConfigError(
            f"{checkpoint.name} has no {wanted!r}; it has {', '.join(sorted(places)) or 'nothing'}"
        )
    return places[name].relative_path, places[name].offset, places[name].length
