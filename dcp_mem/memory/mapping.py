"""Shared mappings of tmpfs files with every page present, so that a copy into them meets neither a fault nor SIGBUS.

First touch, page by page, costs several times the copy. Where the kernel offers it (6.1, any mount of tmpfs, even with
huge=never) empty ranges are made of huge pages instead, which costs less than one more copy and makes every later
mapping of the file, after a restart say, cost nothing.
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
from dcp_mem.memory.views import HUGE, kept_while_seen, map_aligned

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
_COLLAPSE = 25  # MADV_COLLAPSE, Linux 6.1
_STEP = 16 << 20
_FIRST_STEP = 4 << 20
_SLOW_COLLAPSE = 1e-3 / (1 << 20)  # seconds per byte; beyond that plain pages are quicker (memory is fragmented, say)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Mapping:
    """The first `nbytes` of a file, at a huge-page boundary.

    buffer: the bytes, for whoever wants a view; they stay mapped until the mapping and its last view are gone.
    """

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self.address = map_aligned(descriptor, nbytes, 0, mmap.PROT_READ | mmap.PROT_WRITE)
        self.buffer = kept_while_seen(self.address, nbytes)
        self._descriptor = descriptor
        self._makes_huge = True

    def populate(self, wanted: Callable[[], bool] | None = None) -> bool:
        """Have every page present and writable; what the file holds stays as it is.

        With all threads; or, where `wanted` is given, in this one for as long as it says so. Whether all is done.
        Raises OSError (ENOSPC) where there is no room; pages made by then stay.
        """
        # A short one first: it tells whether huge pages are worth while.
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
        if number == errno.EINVAL:  # an older kernel: the pages are made here, and mapped as they are stored into
            os.posix_fallocate(self._descriptor, offset, nbytes)
        elif number:
            raise _no_room(number)

    def _make_huge(self, offset: int, nbytes: int) -> bool:
        """Make an empty range of huge pages, as far as possible; whether it's worth while to go on so."""
        for place in range(offset, offset + nbytes - HUGE + 1, HUGE):  # a wholly empty huge page would be refused
            if _madvise(self.address + place, mmap.PAGESIZE, _POPULATE_WRITE):
                return False
        started = time.perf_counter()
        refused = _madvise(self.address + offset, nbytes, _COLLAPSE)
        return refused in (0, errno.EAGAIN) and time.perf_counter() - started < nbytes * _SLOW_COLLAPSE

    def _is_empty(self, offset: int, nbytes: int) -> bool:
        try:
            return os.lseek(self._descriptor, offset, os.SEEK_DATA) >= offset + nbytes
        except OSError as error:
            return error.errno == errno.ENXIO


def _madvise(address: int, nbytes: int, advice: int) -> int:
    """The error number, or 0."""
    while _libc.madvise(address, nbytes, advice) != 0:
        number = ctypes.get_errno()
        if number != errno.EINTR:
            return number
    return 0


def _no_room(number: int) -> OSError:
    # A full tmpfs says EFAULT here: what a store would have met as SIGBUS.
    number = errno.ENOSPC if number in (errno.EFAULT, errno.ENOMEM) else number
    return OSError(number, os.strerror(number))
