"""`Slot`: a tmpfs file that this process has open, and mostly mapped."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

from dcp_mem.common import files
from dcp_mem.errors import MemoryBudgetExceeded
from dcp_mem.memory.locks import end_lease
from dcp_mem.memory.mapping import Mapping
from dcp_mem.policy.slots import capacity_for, file_size_for, is_too_large

_NAMELESS = "a slot without a name"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(eq=False, kw_only=True)
class Slot:
    """One slot that this process has open."""

    path: str  # where it lies: among the free slots, or as a segment
    # carries a lease for as long as it is open: exclusive while staging, shared afterwards. -1:
    # closed
    descriptor: int
    capacity: int
    inode: int  # by which it is recognised wherever it lies
    frames: str = ""  # key of the heads and tails that it holds; "": of none
    mapping: Mapping | None = None  # has all its pages present; None where nothing is mapped
    on_unmap: list[Callable[[], None]] = field(default_factory=list)
    # whether a thread of this process has claimed it or prefaults it; the process's own lease
    # doesn't tell
    busy: bool = True
    # where it lies as a segment of several checkpoints
    links: list[str] = field(default_factory=list)
    # how often this process has claimed it; since the last time, its bytes are the same
    claims: int = 1
    # of those in this process that rely on its bytes; nobody here claims it meanwhile
    holds: set[SlotHold] = field(default_factory=set)

    @property
    def address(self) -> int:
        """Address of the first byte, in the mapping."""
        assert self.mapping is not None
        return self.mapping.address

    def map(self, nbytes: int, room: int, wanted: Callable[[], bool] | None = None) -> None:
        """Map at least `nbytes` with every page present, unless they are mapped already.

        `room`: a new mapping is of this capacity, or of the slot's own if that is more. `wanted`:
        asked now and then whether to go on; where it says no, the slot stays unmapped.
        """
        had = 0 if self.mapping is None else self.mapping.nbytes
        if had and had >= nbytes:
            return
        self.unmap()
        room = max(self.capacity, file_size_for(max(nbytes, room, 1)))
        try:
            if room > self.capacity:
                os.ftruncate(self.descriptor, room)
            mapping = Mapping(self.descriptor, room)
            is_whole = mapping.populate(wanted)
        except OSError as error:
            if not had:  # it isn't known which of its pages are present
                self.capacity, self.frames = 0, ""
            os.ftruncate(self.descriptor, self.capacity)
            self._raise_full(error, room)
        self.mapping, self.capacity = mapping if is_whole else None, room

    def reserve(self, nbytes: int) -> None:
        """Make room for `nbytes` in all, of which the mapping may be a part."""
        if nbytes > self.capacity:
            wanted = file_size_for(nbytes)
            try:
                os.posix_fallocate(self.descriptor, self.capacity, wanted - self.capacity)
            except OSError as error:
                self._raise_full(error, wanted)
            self.capacity = wanted

    def write_at(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Write bytes outside the mapped part, for which there is room."""
        view = memoryview(data)
        while view:
            try:
                written = os.pwrite(self.descriptor, view, offset)
            except OSError as error:
                self._raise_full(error, offset + len(view))
            view, offset = view[written:], offset + written

    def write_on(self, offset: int, data: bytes | memoryview) -> None:
        """Write bytes outside the mapped part, and let the slot grow for them."""
        self.write_at(offset, data)
        self.capacity = max(self.capacity, offset + len(data))

    def _raise_full(self, error: OSError, nbytes: int) -> NoReturn:
        if error.errno not in _FULL:
            raise error
        free = (
            files.free_bytes(os.path.dirname(self.path)) + os.fstat(self.descriptor).st_blocks * 512
        )
        raise MemoryBudgetExceeded(
            nbytes, free, f"the memory root of {self.path} is full"
        ) from None

    def shrink(self, nbytes: int) -> None:
        """Give back memory far beyond `nbytes`, where the plan has become much smaller."""
        if is_too_large(self.capacity, nbytes):
            self.cut(nbytes)

    def cut(self, nbytes: int) -> None:
        """Give back all memory that a segment of so many bytes doesn't take."""
        wanted = file_size_for(nbytes)
        if os.fstat(self.descriptor).st_size > wanted:
            self.unmap()
            self.frames = ""
            self.capacity = min(self.capacity, wanted)
            os.ftruncate(self.descriptor, wanted)

    @property
    def is_populated(self) -> bool:
        """Whether all of its pages are present; some are missing if prefaulting was stopped.

        Such a slot counts as memory by its size, and would grow by its pages as well.
        """
        facts = os.fstat(self.descriptor)
        return facts.st_blocks * 512 >= facts.st_size

    def set_aside(self, nbytes: int, room: int) -> None:
        """Have the file's size tell others that memory will be taken, if `map` will take any."""
        is_mapped = self.mapping is not None and self.mapping.nbytes >= nbytes
        if not is_mapped and os.fstat(self.descriptor).st_size < room:
            os.ftruncate(self.descriptor, capacity_for(room))

    def see_truncation(self) -> None:
        """Forget pages that were cut off meanwhile: a store into them would be SIGBUS."""
        nbytes = os.fstat(self.descriptor).st_size
        if nbytes < self.capacity:
            self.unmap()
            self.capacity, self.frames = nbytes, ""

    def give_back(self) -> None:
        """Give the memory of a slot without a name back, even where others have it open or mapped.

        Checksums are made without a lease, and a forked child has copies of what its parent had.
        """
        files.give_back_memory(self.descriptor)

    def unmap(self) -> None:
        """Drop the mapping."""
        for callback in self.on_unmap:
            callback()
        self.on_unmap.clear()
        self.mapping = None

    def close(self) -> None:
        """Drop mapping, lease and descriptor."""
        self.unmap()
        # Forgotten first: another thread may fork, and the child closes what it finds here.
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            end_lease(descriptor)
            os.close(descriptor)

    def leave_to_parent(self) -> None:
        """In a forked child: close its copy of the descriptor; lease and mapping stay as they are.

        The lease is the parent's as well: it lasts until both have closed it, or one ends it.
        """
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def nameless_slot(directory: str) -> Slot:
    """Return a new slot that no directory lists: its memory is free again once nobody has it open.

    So a process that is killed leaves nothing of it behind. It can't become a segment.
    """
    descriptor = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    return Slot(
        path=os.path.join(directory, _NAMELESS),
        descriptor=descriptor,
        capacity=0,
        inode=os.fstat(descriptor).st_ino,
    )


class SlotHold:
    """Keeps this process from claiming a slot, until `end`; ending it twice is fine."""

    def __init__(self, slot: Slot, guard: threading.RLock) -> None:
        self._slot, self._guard = slot, guard
        slot.holds.add(self)

    def end(self) -> None:
        """Let the slot be claimed again, once it is free."""
        with self._guard:
            self._slot.holds.discard(self)
