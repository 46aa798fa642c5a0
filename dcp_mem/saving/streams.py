"""Streams that a rank writes into a slot ahead of the save that makes a checkpoint of them.

A state dict is staged once all ranks have agreed to save it; streams lie in their slot by then. The
result is the same: a segment whose items are all behind its layout, each a stream as `torch.save`
writes it.
"""

from __future__ import annotations

import io
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import IO, Any

from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from dcp_mem.common import faults
from dcp_mem.format.catalog import Catalog, Extent
from dcp_mem.format.catalog_conversion import RankItems, catalog_of
from dcp_mem.format.frames import Specs
from dcp_mem.format.layout import align
from dcp_mem.memory.locks import end_lease, open_leased
from dcp_mem.memory.slot import Slot
from dcp_mem.memory.slots import SlotPool
from dcp_mem.runtime.layouts import PlanLayout
from dcp_mem.saving.values import STREAMS_PLAN, Filled, Items, Planned, SaveContext

_BUFFER = 1 << 20
_COPIED_AT_ONCE = 16 << 20


class NothingNew(Exception):
    """No rank has any new stream, so there is nothing to save; raised on all ranks."""


class Streams:
    """One rank's streams for a checkpoint that isn't saved yet; owns their slot until then.

    `slots`: where the slot that the streams are written into comes from.
    """

    def __init__(self, slots: SlotPool) -> None:
        self._slots = slots
        self._slot: Slot | None = None
        self._extents: dict[str, Extent] = {}

    @property
    def extents(self) -> dict[str, Extent]:
        """The extent of each stream, by name."""
        return dict(self._extents)

    @property
    def nbytes(self) -> int:
        """Bytes from the first stream's beginning to the last one's end."""
        return max((offset + nbytes for offset, nbytes in self._extents.values()), default=0)

    def add(self, name: str, write: Callable[[IO[bytes]], None]) -> int:
        """Append a stream; it replaces an older one of its name.

        Raises MemoryBudgetExceeded, Exception.
        """
        with self.writing(name) as file:
            write(file)
        return self._extents[name][1]

    @contextmanager
    def writing(self, name: str) -> Iterator[IO[bytes]]:
        """Append a stream, as `add` does, by a file that is open until the block ends.

        `name`: of the stream. Of a block that ends by an error nothing counts. Raises
        MemoryBudgetExceeded.
        """
        offset = align(
            max((start + max(nbytes, 1) for start, nbytes in self._extents.values()), default=0)
        )
        end = _End(self._own_slot(), offset)
        with io.BufferedWriter(end, _BUFFER) as buffered:
            yield buffered
        nbytes = end.place - offset
        end.write(bytes(align(offset + max(nbytes, 1)) - end.place))  # as between other items
        self._extents.pop(name, None)
        self._extents[name] = (offset, nbytes)

    def add_copies(self, path: str, extents: Mapping[str, Extent]) -> None:
        """Append streams of a complete checkpoint, but for those whose names are here already.

        Raises MemoryBudgetExceeded, OSError.
        """
        descriptor = open_leased(path)  # so that nothing claims it as a slot
        try:
            for name, (offset, nbytes) in extents.items():
                if name not in self._extents:
                    self.add(name, partial(_copy, descriptor, offset, nbytes))
        finally:
            end_lease(descriptor)
            os.close(descriptor)

    def planned(self, context: SaveContext) -> Planned:
        """Return this rank's part of the save that makes a checkpoint of what is here by now."""
        self._own_slot()  # also where nothing is here: each rank has a segment
        layout = context.session.layouts.of(Specs([], []))
        return Planned(
            items=_NamedItems(),
            tensors=(),
            objects=tuple(self._extents),
            layout=layout,
            nbytes=self.nbytes,
            plan_id=STREAMS_PLAN,
            filled=lambda: self._filled(layout),
        )

    def _filled(self, layout: PlanLayout) -> Filled:
        """Hand over the slot, as it is to be sealed: from here on it isn't ours."""
        slot, extents = self._own_slot(), self._extents
        slot.reserve(max(self.nbytes, 1))
        faults.point("stage.copied")
        self._slot = None
        return Filled(
            slot=slot,
            layout=layout,
            items=_NamedItems(),
            order=tuple(extents),
            tail=tuple(extents.values()),
        )

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
    """A file that is written into a slot, from a place on."""

    def __init__(self, slot: Slot, place: int) -> None:
        super().__init__()
        self._slot, self.place = slot, place

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        """Write at the end. Raises MemoryBudgetExceeded."""
        view = memoryview(data).cast("B")
        self._slot.write_on(self.place, view)
        self.place += len(view)
        return len(view)


class _NamedItems(Items):
    """Items that are their own names; of equal ones, each is called after its rank as well."""

    def index(self, item: str) -> MetadataIndex:
        return MetadataIndex(item)

    def catalog(self, parts: Sequence[RankItems]) -> Catalog:
        count = Counter(index.fqn for part in parts for index in part.indexes)

        def index_of(index: MetadataIndex, rank: int) -> MetadataIndex:
            if count[index.fqn] == 1:
                return index
            return MetadataIndex(name_of_rank(index.fqn, rank))

        named = [
            RankItems(
                part.rank, [index_of(index, part.rank) for index in part.indexes], part.layout
            )
            for part in parts
        ]
        known = {index.fqn: BytesStorageMetadata() for part in named for index in part.indexes}
        return catalog_of(Metadata(dict(known)), named)


def name_of_rank(name: str, rank: int) -> str:
    """Return what a rank's stream is called where other ranks have one of the same name."""
    return f"{name}@{rank}"


def _copy(source: int, offset: int, nbytes: int, target: IO[bytes]) -> None:
    for start in range(offset, offset + nbytes, _COPIED_AT_ONCE):
        wanted = min(_COPIED_AT_ONCE, offset + nbytes - start)
        data = os.pread(source, wanted, start)
        if len(data) < wanted:
            raise EOFError("the segment ends before the stream does")
        target.write(data)
