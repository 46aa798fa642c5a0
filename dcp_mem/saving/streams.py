"""Streams that a rank writes into a slot ahead of the save that makes a checkpoint of them: objects that were pickled by name.

Where a state dict is staged once all ranks have agreed to save it, these lie in their slot by then. What comes about is the same:
a segment whose items are all behind its layout, each a stream as `torch.save` writes it.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import IO, Any

from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from dcp_mem import faults
from dcp_mem.format.catalog import Catalog, Extent
from dcp_mem.format.described import RankItems, catalog_of
from dcp_mem.format.frames import Specs
from dcp_mem.format.layout import align
from dcp_mem.memory.locks import end_lease, open_leased
from dcp_mem.memory.slots import Slot, SlotPool
from dcp_mem.saving.stage import seal
from dcp_mem.saving.values import Attempt, Caller, Planned, Staged

STREAMS_PLAN = "streams"
"""Plan id of saves of streams; there is nothing to plan about them."""
_BUFFER = 1 << 20
_COPIED_AT_ONCE = 16 << 20


class Streams:
    """What one rank has written for one checkpoint that isn't saved yet; it owns the slot until then."""

    def __init__(self, slots: SlotPool) -> None:
        self._slots = slots
        self._slot: Slot | None = None
        self._extents: dict[str, Extent] = {}

    @property
    def extents(self) -> dict[str, Extent]:
        """By name, where each stream lies."""
        return dict(self._extents)

    @property
    def nbytes(self) -> int:
        """Bytes from the first stream's beginning to the last one's end."""
        return max((offset + nbytes for offset, nbytes in self._extents.values()), default=0)

    def add(self, name: str, write: Callable[[IO[bytes]], None]) -> int:
        """Have a stream written behind the others, in the place of an older one of its name; returns its bytes.

        Raises MemoryBudgetExceeded, or what `write` raises; then nothing of it counts.
        """
        offset = align(max((start + max(nbytes, 1) for start, nbytes in self._extents.values()), default=0))
        end = _End(self._own_slot(), offset)
        with io.BufferedWriter(end, _BUFFER) as buffered:
            write(buffered)
        self._extents.pop(name, None)
        self._extents[name] = (offset, end.place - offset)
        return end.place - offset

    def add_copies(self, path: str, extents: Mapping[str, Extent]) -> None:
        """Add streams that lie in a segment of a complete checkpoint, but for those whose names are here already.

        Raises MemoryBudgetExceeded, or OSError where it has left memory.
        """
        descriptor = open_leased(path)  # nobody claims it as a slot meanwhile
        try:
            for name, (offset, nbytes) in extents.items():
                if name not in self._extents:
                    self.add(name, partial(_copy, descriptor, offset, nbytes))
        finally:
            end_lease(descriptor)
            os.close(descriptor)

    def planned(self, caller: Caller) -> Planned:
        """This rank's part in the save that makes a checkpoint of what is here by now."""
        layout = caller.session.plan_layout(Specs([], []))
        is_written = self._slot is not None
        return Planned(
            _Named(), (), tuple(self._extents), layout, self.nbytes, plan_id=STREAMS_PLAN, is_written=is_written
        )

    def stage(self, caller: Caller, attempt: Attempt, planned: Planned) -> Staged:
        """Seal the slot as this rank's segment; from here on it isn't ours."""
        slot, extents = self._own_slot(), tuple(self._extents.values())
        try:
            slot.reserve(max(self.nbytes, 1))
            faults.point("stage.copied")
            segment = seal(caller, attempt, slot, planned.layout, extents)
            faults.point("stage.sealed")
        except BaseException:
            self.close()
            raise
        self._slot = None
        offsets, lengths = [offset for offset, _ in extents], [nbytes for _, nbytes in extents]
        return Staged(segment, planned.plan, planned.objects, offsets, lengths, slot, planned.layout)

    def close(self) -> None:
        """Give the slot back, with what is in it, unless it has become a segment."""
        slot, self._slot = self._slot, None
        self._extents.clear()
        if slot is not None:
            self._slots.abandon(slot)

    def _own_slot(self) -> Slot:
        if self._slot is None:
            self._slot = self._slots.take(1, "")
            self._slot.frames = ""  # whatever it holds is written over
        return self._slot


class _End(io.RawIOBase):
    """Writes into a slot from a place on. Raises MemoryBudgetExceeded."""

    def __init__(self, slot: Slot, place: int) -> None:
        super().__init__()
        self._slot, self.place = slot, place

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._slot.write_on(self.place, view)
        self.place += len(view)
        return len(view)


class _Named:
    """Items that are their own names."""

    def resolve(self, item: str) -> Any:
        raise AssertionError(f"{item} lies in its slot already")

    def index(self, item: str) -> MetadataIndex:
        return MetadataIndex(item)

    def fingerprint(self, items: Sequence[str]) -> int:
        return hash(tuple(items))


class DescribingStreams:
    """Each rank says which streams it has. Where several have the same name, each is called after its rank as well."""

    def part(self, rank: int, staged: Staged) -> RankItems:
        return RankItems(rank, list(map(staged.plan.index, staged.items)), staged.layout.described)

    def share(self, parts: Sequence[RankItems]) -> Sequence[RankItems]:
        return parts

    def catalog(self, parts: Sequence[RankItems]) -> Catalog:
        count: dict[str, int] = {}
        for part in parts:
            for index in part.indexes:
                count[index.fqn] = count.get(index.fqn, 0) + 1
        named = [
            RankItems(
                part.rank,
                [
                    index if count[index.fqn] == 1 else MetadataIndex(name_of_rank(index.fqn, part.rank))
                    for index in part.indexes
                ],
                part.layout,
            )
            for part in parts
        ]
        known = {index.fqn: BytesStorageMetadata() for part in named for index in part.indexes}
        return catalog_of(Metadata(dict(known)), named)


def name_of_rank(name: str, rank: int) -> str:
    """What a stream is called that other ranks have one of the same name beside."""
    return f"{name}@{rank}"


def _copy(source: int, offset: int, nbytes: int, target: IO[bytes]) -> None:
    for start in range(offset, offset + nbytes, _COPIED_AT_ONCE):
        wanted = min(_COPIED_AT_ONCE, offset + nbytes - start)
        data = os.pread(source, wanted, start)
        if len(data) < wanted:
            raise EOFError("the segment ends before the stream does")
        target.write(data)
