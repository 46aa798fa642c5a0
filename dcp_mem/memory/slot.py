"""`Slot`: a tmpfs file that this process has open, and mostly mapped with every page present.

So copies meet neither faults nor SIGBUS. First touch, page by page, costs several times the copy.
Where the kernel can (Linux 6.1, on any mount of tmpfs, even with huge=never), empty ranges are made
of huge pages instead. That costs less than one more copy, and every later mapping of the file,
after a restart say, costs nothing.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NoReturn

from dcp_mem.common import files
from dcp_mem.errors import MemoryBudgetExceeded
from dcp_mem.memory.copying import work_off
from dcp_mem.memory.locks import end_lease
from dcp_mem.memory.views import kept_while_seen, map_aligned
from dcp_mem.policy.slots import HUGE, capacity_for, file_size_for, is_too_large

_NAMELESS = "a slot without a name"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
_COLLAPSE = 25  # MADV_COLLAPSE, Linux 6.1
_STEP = 16 << 20
_FIRST_STEP = 4 << 20
_SLOW_COLLAPSE = 1e-3 / (1 << 20)
"""Seconds per byte; beyond it plain pages are quicker (where memory is fragmented, say)."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


@dataclass(eq=False, kw_only=True)
class Slot:
    """One slot that this process has open."""

    path: str  # where it lies: among the free slots, or as a segment, of several the newest
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
    # how often this process has claimed it; since the last time, its bytes are the same
    claims: int = 1
    # of those in this process that rely on its bytes; nobody here claims it meanwhile
    holds: set[object] = field(default_factory=set)

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


class Mapping:
    """The first `nbytes` of a file, mapped at a huge-page boundary.

    `descriptor`: of the file; it must stay open for as long as the mapping is used. `buffer`: the
    bytes; they stay mapped until the mapping and its last view are gone.
    """

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self.nbytes = nbytes
        # Opened anew: a mapping of the descriptor itself, in a forked child, would keep the lease.
        opened = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        try:
            self.address = map_aligned(opened, nbytes, 0, mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(opened)
        self.buffer = kept_while_seen(self.address, nbytes)
        self._descriptor = descriptor
        self._makes_huge = True

    def populate(self, wanted: Callable[[], bool] | None = None) -> bool:
        """Make every page present and writable; the file's content stays as it is.

        `wanted`: asked between steps whether to go on, which this thread does alone; None: use all
        threads. Returns whether all pages are present.
        """
        # A short step first: it tells whether huge pages are worth while.
        starts = [0, *range(_FIRST_STEP, self.nbytes, _STEP)]
        steps = [(start, stop - start) for start, stop in pairwise([*starts, self.nbytes])]
        if wanted is None:
            work_off(steps, self._populate)
            return True
        for step in steps:
            if not wanted():
                return False
            self._populate(step)
        return True

    def _populate(self, step: tuple[int, int]) -> None:
        offset, nbytes = step
        if self._makes_huge and self._is_empty(offset, nbytes):
            self._makes_huge = self._make_huge(offset, nbytes)
        number = _madvise(self.address + offset, nbytes, _POPULATE_WRITE)
        # An older kernel: the pages are made here, and mapped when they are first stored into.
        if number == errno.EINVAL:
            os.posix_fallocate(self._descriptor, offset, nbytes)
        elif number:
            raise _no_room(number)

    def _make_huge(self, offset: int, nbytes: int) -> bool:
        """Make an empty range of huge pages where possible; return whether more is worth while."""
        # A huge page without any present page would be refused.
        for place in range(offset, offset + nbytes - HUGE + 1, HUGE):
            if _madvise(self.address + place, mmap.PAGESIZE, _POPULATE_WRITE):
                return False
        started = time.perf_counter()
        refused = _madvise(self.address + offset, nbytes, _COLLAPSE)
        return (
            refused in (0, errno.EAGAIN) and time.perf_counter() - started < nbytes * _SLOW_COLLAPSE
        )

    def _is_empty(self, offset: int, nbytes: int) -> bool:
        try:
            return os.lseek(self._descriptor, offset, os.SEEK_DATA) >= offset + nbytes
        except OSError as error:
            return error.errno == errno.ENXIO


def _madvise(address: int, nbytes: int, advice: int) -> int:
    """Call madvise; return the error number, or 0."""
    while _libc.madvise(address, nbytes, advice) != 0:
        number = ctypes.get_errno()
        if number != errno.EINTR:
            return number
    return 0


def _no_room(number: int) -> OSError:
    # A full tmpfs says EFAULT here, where a store would have met SIGBUS.
    number = errno.ENOSPC if number in (errno.EFAULT, errno.ENOMEM) else number
    return OSError(number, os.strerror(number))
