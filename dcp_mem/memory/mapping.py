"""Shared mappings of tmpfs files with every page present: copies meet neither faults nor SIGBUS.

First touch, page by page, costs several times the copy. Where the kernel can (Linux 6.1, on any
mount of tmpfs, even with huge=never), empty ranges are made of huge pages instead. That costs less
than one more copy, and every later mapping of the file, after a restart say, costs nothing.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import time
from collections.abc import Callable
from itertools import pairwise

from dcp_mem.memory.copying import work_off
from dcp_mem.memory.views import kept_while_seen, map_aligned
from dcp_mem.policy.slots import HUGE

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
_COLLAPSE = 25  # MADV_COLLAPSE, Linux 6.1
_STEP = 16 << 20
_FIRST_STEP = 4 << 20
_SLOW_COLLAPSE = 1e-3 / (1 << 20)
"""Seconds per byte; beyond it plain pages are quicker (where memory is fragmented, say)."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


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
