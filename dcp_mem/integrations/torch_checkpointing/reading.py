"""The files of a checkpoint that `MemoryStorage` has made, for readers of single files."""

from __future__ import annotations

import io
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from dcp_mem.common.log import log
from dcp_mem.common.values import MEMORY, STORAGE, CheckpointStatus
from dcp_mem.config import Settings
from dcp_mem.errors import SegmentCorrupt, StorageRefused, StorageUnavailable
from dcp_mem.format import names
from dcp_mem.loading.fetch import Fetcher
from dcp_mem.loading.sources.base import SOURCE_ERRORS, Description
from dcp_mem.loading.sources.memory import MemorySource
from dcp_mem.loading.sources.stored import StorageSource
from dcp_mem.memory.root import node_id
from dcp_mem.operations import inventory
from dcp_mem.operations.contents import local_checkpoint_of
from dcp_mem.storage import Storage
from dcp_mem.storage.leases import read_lease
from dcp_mem.storage.listing import committed_under

_AHEAD_BYTES, _MOST_BYTES = 4 << 20, 64 << 20
"""How much of a file is fetched from storage at once: for a short read, and for a long one."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a file lies: bytes [offset, offset + nbytes) of a segment."""

    segment: str
    offset: int
    nbytes: int


class LeasedFiles:
    """The files of one checkpoint, in this node's memory or on storage; leased until closed."""

    def __init__(
        self, settings: Settings, storage: Storage | None, checkpoint: CheckpointStatus
    ) -> None:
        """Open what there is of it."""
        self.checkpoint, self.users = checkpoint, 0
        self._resources = ExitStack()
        self._memory: MemorySource | None = None
        self._stored: StorageSource | None = None
        self.places: dict[str, Place] = {}
        try:
            self._open(settings, storage)
        except BaseException:
            self.close()
            raise

    def _open(self, settings: Settings, storage: Storage | None) -> None:
        trouble: Exception | None = None
        local = local_checkpoint_of(settings, self.checkpoint)
        if local is not None:
            try:
                self._memory = MemorySource(local, node_id(settings.memory_root))
                self._resources.callback(self._memory.close)
                self.places = _places(self._memory.describe())
            except SOURCE_ERRORS as error:
                self._memory, trouble = None, error
        if storage is not None and STORAGE in self.checkpoint.places:
            name, scope = self.checkpoint.name, self.checkpoint.scope
            lease = read_lease(storage, name)
            if lease is not None:
                self._resources.callback(lease.close)
            self._stored = StorageSource(storage, name, self.checkpoint.save_id, scope)
            if not self.places:
                self.places = _places(self._stored.describe())
        if trouble is not None and not self.places:
            raise trouble

    def open(self, file: str) -> FileOfCheckpoint:
        """Open a file for reading at any place; bytes are compared with their checksums."""
        place = self.places[file]
        reads: list[Callable[[int, memoryview], None]] = []
        if self._memory is not None and self._memory.has(place.segment):
            reads.append(_InMemory(self._memory, place).read)
        if self._stored is not None:
            reads.append(_Fetched(self._stored, self.checkpoint.name, place).read)
        if not reads:
            raise SegmentCorrupt(
                self.checkpoint.name,
                names.rank_of(place.segment),
                MEMORY,
                f"{file} lies in another node's memory, and not yet on storage: wait until it is "
                "durable there (dcp-mem ls), or load an older checkpoint",
            )
        return FileOfCheckpoint(reads, place.nbytes)

    def close(self) -> None:
        """End the leases. Closing twice is fine."""
        self._resources.close()


def found(settings: Settings, storage: Storage | None, name: str) -> CheckpointStatus | None:
    """Return the newest whole checkpoint of that name; None where there is none."""
    local = [one for one in inventory.in_memory(settings) if one.name == name]
    known = local
    if storage is not None:
        try:
            known = inventory.merged(local, inventory.stored(committed_under(storage, name)))
        except (StorageUnavailable, StorageRefused) as error:
            if not any(map(inventory.counts, local)):
                raise
            log.warning("%s; reading %s from memory", error, name)
    return next((one for one in known if inventory.counts(one)), None)


class FileOfCheckpoint(io.RawIOBase):
    """A file, read from the first place that has it undamaged."""

    def __init__(self, reads: list[Callable[[int, memoryview], None]], nbytes: int) -> None:
        super().__init__()
        self.on_close: Callable[[], None] = lambda: None
        self._reads, self.nbytes, self._position = reads, nbytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._refuse_closed()
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.nbytes}[whence]
        if start + offset < 0:
            raise ValueError(f"negative position {start + offset}")
        self._position = start + offset
        return self._position

    def close(self) -> None:
        if not self.closed:
            self.on_close()
        super().close()

    def tell(self) -> int:
        return self._position

    def readall(self) -> bytes:
        """Read all that is left, at once: each of many reads would check whole blocks."""
        left = bytearray(max(self.nbytes - self._position, 0))
        self.readinto(left)
        return bytes(left)

    def readinto(self, buffer: Any) -> int:
        """Read at the position. Raises SegmentCorrupt where no place has the bytes undamaged."""
        self._refuse_closed()
        # Released at once: an error's traceback would keep them, and a mapping of the caller's,
        # which it couldn't unmap then.
        with memoryview(buffer) as whole, whole.cast("B") as view:
            count = max(min(len(view), self.nbytes - self._position), 0)
            with view[:count] as wanted:
                self._fill(wanted)
        self._position += count
        return count

    def _refuse_closed(self) -> None:
        if self.closed:  # and its descriptors may be other files' by now
            raise ValueError("I/O operation on a closed file")

    def _fill(self, wanted: memoryview) -> None:
        if not wanted:
            return
        try:
            self._reads[0](self._position, wanted)
        except SOURCE_ERRORS as error:
            if len(self._reads) == 1:
                raise
            log.warning("%s; reading it from storage", error)
            self._reads.pop(0)
            self._fill(wanted)


class _InMemory:
    def __init__(self, source: MemorySource, place: Place) -> None:
        self._source, self._place = source, place

    def read(self, position: int, view: memoryview) -> None:
        start = self._place.offset + position
        view[:] = self._source.checked(self._place.segment, start, start + len(view))[0]


class _Fetched:
    """Fetches whole blocks, as only these can be checked, and keeps the last ones."""

    def __init__(self, source: StorageSource, checkpoint: str, place: Place) -> None:
        self._fetcher = Fetcher(source, checkpoint, [place.segment], verify=True)
        self._place = place
        self._start, self._kept = 0, memoryview(b"")

    def read(self, position: int, view: memoryview) -> None:
        for done in range(0, len(view), _MOST_BYTES):
            with view[done : done + _MOST_BYTES] as piece:
                self._read(position + done, piece)

    def _read(self, position: int, view: memoryview) -> None:
        start = self._place.offset + position
        stop = start + len(view)
        if not self._start <= start <= stop <= self._start + len(self._kept):
            end = self._place.offset + self._place.nbytes
            low, high = self._whole_blocks(start, max(stop, min(start + _AHEAD_BYTES, end)))
            kept = memoryview(bytearray(high - low))
            self._fetcher.fetch(self._place.segment, low, [kept])
            self._start, self._kept = low, kept
        view[:] = self._kept[start - self._start : stop - self._start]

    def _whole_blocks(self, start: int, stop: int) -> tuple[int, int]:
        table = self._fetcher.table(self._place.segment)
        if table is None or not self._fetcher.checks(self._place.segment):
            return start, stop
        offsets = table.blocks.offsets.tolist()
        first, last = bisect_right(offsets, start) - 1, bisect_left(offsets, stop) - 1
        return offsets[first], max(stop, offsets[last] + int(table.blocks.lengths[last]))


def _places(description: Description) -> dict[str, Place]:
    return {
        index.fqn: Place(info.relative_path, info.offset, info.length)
        for index, info in (description.metadata.storage_data or {}).items()
    }
