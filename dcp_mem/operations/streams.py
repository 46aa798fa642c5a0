"""Read the streams (byte items) of a checkpoint, with one process and without a process group.

A stream comes from this node's memory, else from other nodes', else from storage. Its bytes are
compared with their checksums.
"""

from __future__ import annotations

import io
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import cached_property, partial
from typing import Any, Protocol

from dcp_mem.common.log import log
from dcp_mem.common.value_class import value_class
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

_AHEAD_BYTES, _MOST_BYTES = 4 << 20, 64 << 20
"""How much is fetched from storage at once: for a short read, and for a part of a long one."""


class _NotThere(Exception):
    """A place that doesn't have a stream at all."""


_ERRORS = (*SOURCE_ERRORS, RankFailed, _NotThere)

Read = Callable[[int, int], memoryview]
"""Returns bytes [start, stop) of a stream, checked; raises one of `_ERRORS`."""


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


@value_class
class Place:
    """Where a stream lies: bytes [offset, offset + nbytes) of a segment."""

    segment: str
    offset: int
    nbytes: int


class OpenStreams:
    """The streams of one checkpoint; what they lie in is leased until this is closed."""

    def __init__(
        self,
        settings: Settings,
        storage: Storage | None,
        checkpoint: CheckpointStatus,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        self._storage = storage if STORAGE in checkpoint.places else None
        self._elsewhere = elsewhere if MEMORY in checkpoint.places else None
        self._resources = ExitStack()
        self._memory: MemorySource | None = None
        self._troubles: list[Exception] = []
        local = local_checkpoint_of(settings, checkpoint)
        try:
            if local is not None:
                self._memory = MemorySource(local, node_id(settings.memory_root))
                self._resources.callback(self._memory.close)
        except SOURCE_ERRORS as error:
            self._troubles.append(error)

    @cached_property
    def places(self) -> Mapping[str, Place]:
        """Where each stream lies, by name, as the nearest place that knows tells."""
        for describe in self._descriptions():
            try:
                description = describe()
            except _ERRORS as error:
                self._troubles.append(error)
                continue
            if description is not None:
                found = description.metadata.storage_data or {}
                return {
                    index.fqn: Place(info.relative_path, info.offset, info.length)
                    for index, info in found.items()
                }
        raise self._unreadable("what it consists of", self._troubles)

    def _descriptions(self) -> Iterator[Callable[[], Description | None]]:
        if self._memory is not None:
            yield self._memory.describe
        if self._elsewhere is not None:
            yield partial(self._elsewhere.describe, self._checkpoint)
        if self._storage is not None:
            yield self._stored.describe

    @cached_property
    def _stored(self) -> StorageSource:
        """The checkpoint on storage, leased from the moment on when it is first needed."""
        assert self._storage is not None
        name = self._checkpoint.name
        lease = read_lease(self._storage, name)
        if lease is not None:
            self._resources.callback(lease.close)
        return StorageSource(self._storage, name, self._checkpoint.save_id, self._checkpoint.scope)

    def place(self, name: str) -> Place:
        """Return where a stream lies. Raises ConfigError."""
        if name not in self.places:
            known = ", ".join(sorted(self.places)) or "nothing"
            raise ConfigError(f"{self._checkpoint.name} has no {name!r}; it has {known}")
        return self.places[name]

    def open(self, name: str) -> Stream:
        """Open a stream for reading at any place. Raises ConfigError, DcpMemError."""
        place = self.place(name)
        return Stream(self._reads(place), place.nbytes, lambda of: self._unreadable(name, of))

    def whole(self, name: str) -> memoryview:
        """Return a stream's bytes, mapped where this node's memory has them.

        They may be used until this is closed. Raises ConfigError, DcpMemError.
        """
        with self.open(name) as stream:
            return stream.view(0, stream.nbytes)

    def _reads(self, place: Place) -> Iterator[Read]:
        """Yield the ways to read a stream, nearest first, each opened at its turn."""
        if self._memory is not None:
            yield partial(self._from_memory, self._memory, place)
        if self._elsewhere is not None:
            yield partial(self._from_elsewhere, self._elsewhere, place)
        if self._storage is not None:
            yield _Fetched(self._stored, self._checkpoint.name, place).read

    def _from_memory(self, memory: MemorySource, place: Place, start: int, stop: int) -> memoryview:
        if memory.has(place.segment):
            return memory.checked(place.segment, place.offset + start, place.offset + stop)[0]
        rank, segments = names.rank_of(place.segment), memory.checkpoint.manifest.segments
        node = dict(zip(segments.rank, segments.node, strict=True))[rank]
        raise _NotThere(f"rank {rank} saved it on node {node}")

    def _from_elsewhere(
        self, elsewhere: Elsewhere, place: Place, start: int, stop: int
    ) -> memoryview:
        offset, nbytes = place.offset + start, stop - start
        data = elsewhere.fetch(self._checkpoint, place.segment, offset, nbytes)
        if data is None:
            raise _NotThere("no other node that can be asked has it")
        return data

    def _unreadable(self, name: str, troubles: list[Exception]) -> Exception:
        """Return the error where no place has a stream undamaged."""
        if troubles and all(isinstance(one, SegmentCorrupt) for one in troubles):
            return troubles[-1]
        return DcpMemError(
            f"{name} of {self._checkpoint.name} can't be read: "
            f"{'; '.join(map(str, troubles)) or 'it is gone'} (storage has it once it is durable: "
            "see dcp-mem ls; with copies, DCP_MEM_REPLICAS=1, another node's memory may have it as "
            "well)"
        )

    def close(self) -> None:
        """End the leases. Closing twice is fine."""
        self._resources.close()

    def __enter__(self) -> OpenStreams:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Stream(io.RawIOBase):
    """A stream as a file, read from the nearest place that has it undamaged.

    `reads`: the ways to read it. `unreadable`: makes the error where all of them have failed.
    """

    def __init__(
        self,
        reads: Iterator[Read],
        nbytes: int,
        unreadable: Callable[[list[Exception]], Exception],
    ) -> None:
        super().__init__()
        self.on_close: Callable[[], None] = lambda: None
        self.nbytes, self._position = nbytes, 0
        self._reads, self._unreadable = reads, unreadable
        self._read: Read | None = None
        self._troubles: list[Exception] = []

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
        """Read at the position. Raises DcpMemError where no place has the bytes undamaged."""
        self._refuse_closed()
        # Released at once: an error's traceback would keep them, and a mapping of the caller's,
        # which it couldn't unmap then.
        with memoryview(buffer) as whole, whole.cast("B") as view:
            count = max(min(len(view), self.nbytes - self._position), 0)
            for done in range(0, count, _MOST_BYTES):
                with view[done : min(done + _MOST_BYTES, count)] as piece:
                    start = self._position + done
                    piece[:] = self.view(start, start + len(piece))
        self._position += count
        return count

    def view(self, start: int, stop: int) -> memoryview:
        """Return bytes [start, stop); see `readinto`."""
        while True:
            self._read = self._read or next(self._reads, None)
            if self._read is None:
                raise self._unreadable(self._troubles)
            try:
                return self._read(start, stop)
            except _ERRORS as error:
                if not isinstance(error, _NotThere):
                    log.warning("%s; looking for it elsewhere", error)
                self._troubles.append(error)
                self._read = None

    def _refuse_closed(self) -> None:
        if self.closed:  # and its descriptors may be other files' by now
            raise ValueError("I/O operation on a closed file")


class _Fetched:
    """Fetches whole blocks, as only these can be checked, and keeps the last ones."""

    def __init__(self, source: StorageSource, checkpoint: str, place: Place) -> None:
        self._fetcher = Fetcher(source, checkpoint, [place.segment], verify=True)
        self._place = place
        self._start, self._kept = 0, memoryview(b"")

    def read(self, start: int, stop: int) -> memoryview:
        first, last = self._place.offset + start, self._place.offset + stop
        if not self._start <= first <= last <= self._start + len(self._kept):
            end = self._place.offset + self._place.nbytes
            low, high = self._whole_blocks(first, max(last, min(first + _AHEAD_BYTES, end)))
            self._kept = memoryview(b"")  # given back before the next ones are made
            kept = memoryview(bytearray(high - low))
            self._fetcher.fetch(self._place.segment, low, [kept])
            self._start, self._kept = low, kept
        return self._kept[first - self._start : last - self._start]

    def _whole_blocks(self, start: int, stop: int) -> tuple[int, int]:
        table = self._fetcher.table(self._place.segment)
        if table is None or not self._fetcher.checks(self._place.segment):
            return start, stop
        offsets = table.blocks.offsets.tolist()
        first, last = bisect_right(offsets, start) - 1, bisect_left(offsets, stop) - 1
        return offsets[first], max(stop, offsets[last] + int(table.blocks.lengths[last]))
