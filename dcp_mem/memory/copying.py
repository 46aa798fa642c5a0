"""Moving payload bytes between tensors and slots, with all the threads that torch would use.

The work is a list of plain moves (address, address, length). It is cut into shares of equal bytes, several for each
thread, and each move runs outside the interpreter lock.
"""

from __future__ import annotations

import ctypes
import errno
import operator
import os
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

T = TypeVar("T")
Columns = npt.NDArray[np.int64]
Move = tuple[int, int, int]
"""(destination address, source address, bytes) of a copy, or (destination address, file offset, bytes) of a read."""

_CHUNK = 32 << 20
_GAP = 16 << 10
"""Bytes between two ranges that are better read along than left out."""
_MOST_RANGES, _MOST_BYTES = 128, 4 << 20
_NBYTES = operator.itemgetter(2)
_SHARES_EACH = 8
_ALONE = 4 << 20  # below this the hand-over to threads costs more than it gains
_memmove = ctypes.CDLL(None).memmove
_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove.restype = None
_pread = ctypes.CDLL(None, use_errno=True).pread
_pread.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64)
_pread.restype = ctypes.c_ssize_t
_preadv = ctypes.CDLL(None, use_errno=True).preadv
_preadv.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64)
_preadv.restype = ctypes.c_ssize_t
_between_ranges = np.zeros(_GAP, np.uint8)  # whatever is read into it, by all threads, is of no use to anybody


def copy(moves: Sequence[Move]) -> None:
    """Copy memory to memory. Sources and destinations must stay alive and not overlap."""
    _in_shares(moves, copy_here)


def read(descriptor: int, moves: Sequence[Move]) -> None:
    """Read file ranges straight into memory. Raises EOFError where the file is shorter, OSError as the system does."""
    _in_shares(moves, lambda share: _read_share(descriptor, share))


def read_many(descriptor: int, address: Columns, offset: Columns, nbytes: Columns) -> None:
    """Read many small ranges, given by ascending offsets, straight into memory; neighbours with one call of the system.

    Raises what `read` raises.
    """
    if not len(offset):
        return
    ends = offset + nbytes
    gaps = np.append(offset[1:] - ends[:-1], 0)
    cuts = _batches(gaps, nbytes)
    buffers = np.empty(
        (2 * len(offset), 2), np.int64
    )  # struct iovec: each range, and what lies between it and the next
    buffers[0::2] = np.stack([address, nbytes], axis=1)
    buffers[1::2, 0], buffers[1::2, 1] = _between_ranges.ctypes.data, np.clip(gaps, 0, _GAP)

    def read_batch(batch: tuple[int, int]) -> None:
        start, stop = batch
        count = _preadv(descriptor, buffers[2 * start :].ctypes.data, 2 * (stop - start) - 1, int(offset[start]))
        if count != ends[stop - 1] - offset[start]:  # cut short, or failed: what is missing, and why?
            columns = (column[start:stop].tolist() for column in (address, offset, nbytes))
            _read_share(descriptor, list(zip(*columns, strict=True)))

    work_off(list(pairwise(cuts)), read_batch)


def _batches(gaps: Columns, nbytes: Columns) -> list[int]:
    """Where ranges are cut into batches: at long gaps, and so that there are enough of them for all threads."""
    many = np.arange(len(nbytes)) // _MOST_RANGES
    much = np.cumsum(nbytes) // _MOST_BYTES
    is_cut = (np.diff(many) > 0) | (np.diff(much) > 0) | (gaps[:-1] > _GAP) | (gaps[:-1] < 0)
    return [0, *(np.flatnonzero(is_cut) + 1).tolist(), len(nbytes)]


def copy_here(moves: Sequence[Move]) -> None:
    """Copy memory to memory in this thread alone."""
    memmove = _memmove
    for destination, source, nbytes in moves:
        memmove(destination, source, nbytes)


def _read_share(descriptor: int, moves: Sequence[Move]) -> None:
    for destination, offset, nbytes in moves:
        while nbytes:
            count = _pread(descriptor, destination, min(nbytes, _CHUNK), offset)
            if count < 0:
                number = ctypes.get_errno()
                if number == errno.EINTR:
                    continue
                raise OSError(number, os.strerror(number))
            if count == 0:
                raise EOFError(f"the file ends at {offset}, {nbytes} bytes short")
            destination, offset, nbytes = destination + count, offset + count, nbytes - count


def _in_shares(moves: Sequence[Move], act: Callable[[Sequence[Move]], None]) -> None:
    threads = torch.get_num_threads()
    if threads == 1 or sum(map(_NBYTES, moves)) < _ALONE:
        act(moves)
        return
    work_off(shares(moves, threads * _SHARES_EACH), act)


def work_off(work: Sequence[T], act: Callable[[T], object]) -> None:
    """Do all of the work with as many threads as torch uses; raises the first error.

    Each takes piece after piece until none is left: a thread that the machine holds up holds up only one.
    """
    threads = torch.get_num_threads()
    waiting = deque(work)
    helpers = [_pool(threads).submit(_take, waiting, act) for _ in range(min(threads, len(work)) - 1)]
    try:
        _take(waiting, act)
    finally:
        wait(helpers)  # after an error too: nobody may touch the caller's memory once this has returned
    for helper in helpers:
        helper.result()


def _take(waiting: deque[T], act: Callable[[T], object]) -> None:
    while True:
        try:
            piece = waiting.popleft()
        except IndexError:
            return
        try:
            act(piece)
        except BaseException:
            waiting.clear()
            raise


def shares(moves: Sequence[Move], count: int) -> list[list[Move]]:
    """Cut moves into at most `count` shares of nearly equal bytes, splitting moves; nothing is lost or doubled."""
    ends = list(accumulate(map(_NBYTES, moves)))
    total = ends[-1] if ends else 0
    cuts = [total * share // count for share in range(count + 1)]
    return [_between(moves, ends, start, stop) for start, stop in pairwise(cuts) if start < stop]


def _between(moves: Sequence[Move], ends: Sequence[int], start: int, stop: int) -> list[Move]:
    """The part of the moves that covers bytes [start, stop) of them all, laid end to end."""
    first, last = bisect_right(ends, start), bisect_left(ends, stop)
    part = list(moves[first : last + 1])
    destination, source, nbytes = part[-1]
    part[-1] = (destination, source, nbytes - (ends[last] - stop))
    destination, source, nbytes = part[0]
    skipped = start - (ends[first] - moves[first][2])
    part[0] = (destination + skipped, source + skipped, nbytes - skipped)
    return part


@lru_cache(maxsize=4)
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="dcp_mem-copy")
