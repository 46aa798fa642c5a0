"""Copies of payload bytes between tensors and slots, with all the threads that torch would use.

The work is a list of plain moves (address, address, length). It is cut into shares of equal bytes,
several for each thread; each move runs outside the interpreter lock.

Of thousands of small pieces each would take the lock again, and threads would wait for each other.
Linux copies those, hundreds with one system call.
"""

from __future__ import annotations

import ctypes
import errno
import operator
import os
import threading
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from dcp_mem.common.parallel import COPYING, KeptThreads

T = TypeVar("T")
Columns = npt.NDArray[np.int64]
Chosen = npt.NDArray[np.bool_]
Move = tuple[int, int, int]
"""A copy: (destination address, source address, bytes).

Or a read: (destination address, file offset, bytes).
"""

_CHUNK = 32 << 20
_GAP = 16 << 10
"""So many bytes between two ranges are better read along than left out."""
_MOST_RANGES, _MOST_BYTES = 128, 4 << 20
_NBYTES, _TENSOR_NBYTES = operator.itemgetter(2), operator.attrgetter("nbytes")
_SHARES_EACH = 8
_LEAST_READ = 1 << 20
"""Of many threads, each would take the interpreter's lock too often for less."""
_RANKS_HERE = "LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE"
"""Variables in which launchers give the number of a node's ranks."""
_MOST_READERS = 8
"""More would wait for the interpreter's lock rather than read."""
_ONE_THREAD_NBYTES = 4 << 20
"""Below this, handing over to threads costs more than it gains."""
_ONE_THREAD_PIECE = 32 << 10
"""Below this on average, threads spend more on the interpreter's lock than they save on copies."""
_pread = ctypes.CDLL(None, use_errno=True).pread
_pread.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64)
_pread.restype = ctypes.c_ssize_t
_preadv = ctypes.CDLL(None, use_errno=True).preadv
_preadv.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64)
_preadv.restype = ctypes.c_ssize_t
_MOST_PIECES = 1024
"""Of a system call: IOV_MAX."""
_MANY_PIECES = 512
_process_vm_writev = ctypes.CDLL(None, use_errno=True).process_vm_writev
_process_vm_writev.argtypes = (
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_ulong,
)
_process_vm_writev.restype = ctypes.c_ssize_t
_memmove = ctypes.CDLL(None).memmove  # outside the interpreter lock
_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove.restype = None
_LARGE = 1 << 20
"""Bytes of a piece that is worth setting up numpy's loop for, where that is the quicker one."""
_discarded = np.zeros(_GAP, np.uint8)
"""Takes the bytes between ranges, of all threads at once: nobody reads it."""


def copy(moves: Sequence[Move]) -> None:
    """Copy memory to memory; sources and destinations must stay alive, and not overlap."""
    _in_shares(moves, copy_here, torch.get_num_threads())


def copy_many(destination: Columns, source: Columns, nbytes: Columns) -> None:
    """Copy pieces of memory, as `copy` does; quicker if there are thousands of small ones."""
    work_off(copies_of(destination, source, nbytes), _call)


def copy_many_here(destination: Columns, source: Columns, nbytes: Columns) -> None:
    """Copy pieces of memory in this thread alone; it takes the interpreter's lock seldom."""
    for part in _parts(destination, source, nbytes):
        part()


def copies_of(destination: Columns, source: Columns, nbytes: Columns) -> list[Callable[[], None]]:
    """Return what copies pieces of memory, in parts that several threads can make at once."""
    total, threads = int(nbytes.sum()), torch.get_num_threads()
    if threads > 1 and total >= _ONE_THREAD_NBYTES and _are_many_and_small(nbytes):
        return _parts(destination, source, nbytes)
    moves = moves_of(destination, source, nbytes)
    if total < max(_ONE_THREAD_PIECE * len(nbytes), _ONE_THREAD_NBYTES):
        return [partial(copy_here, moves)]
    return [partial(copy_here, part) for part in shares(moves, threads * _SHARES_EACH)]


def moves_of(destination: Columns, source: Columns, nbytes: Columns) -> list[Move]:
    """Return columns as moves."""
    return list(zip(destination.tolist(), source.tolist(), nbytes.tolist(), strict=True))


def addresses_of(tensors: Sequence[torch.Tensor]) -> Columns:
    """Return the address of each tensor; of a device that has the highest bit set, below 0."""
    addresses = np.fromiter(map(torch.Tensor.data_ptr, tensors), np.uint64, len(tensors))
    return addresses.view(np.int64)


def sizes_of(tensors: Sequence[torch.Tensor]) -> Columns:
    """Return the bytes of each tensor's elements."""
    return np.fromiter(map(_TENSOR_NBYTES, tensors), np.int64, len(tensors))


def _are_many_and_small(nbytes: Columns) -> bool:
    return len(nbytes) >= _MANY_PIECES and nbytes.sum() < _ONE_THREAD_PIECE * len(nbytes)


def _parts(destination: Columns, source: Columns, nbytes: Columns) -> list[Callable[[], None]]:
    """Return what copies pieces: many small ones by the kernel, hundreds with a system call."""
    if not _are_many_and_small(nbytes) or not _may_copy_by_the_kernel():
        return [partial(copy_here, moves_of(destination, source, nbytes))]
    # Arrays of struct iovec.
    targets, sources = np.stack([destination, nbytes], 1), np.stack([source, nbytes], 1)

    def copy_batch(batch: slice) -> None:
        if not _is_copied_by_the_kernel(targets[batch], sources[batch]):
            copy_here(moves_of(destination[batch], source[batch], nbytes[batch]))

    starts = range(0, len(nbytes), _MOST_PIECES)
    return [partial(copy_batch, slice(start, start + _MOST_PIECES)) for start in starts]


def _is_copied_by_the_kernel(targets: Columns, sources: Columns) -> bool:
    """Copy pieces of this process's memory to others, and return whether all of it was done."""
    count = len(targets)
    done = _process_vm_writev(
        os.getpid(), sources.ctypes.data, count, targets.ctypes.data, count, 0
    )
    return bool(done == sources[:, 1].sum())


@lru_cache(maxsize=1)
def _may_copy_by_the_kernel() -> bool:
    """Return whether this process may; a container may forbid even that of one's own memory."""
    pieces = np.arange(2)
    one = np.array([[pieces.ctypes.data, pieces.itemsize]])
    other = np.array([[pieces.ctypes.data + pieces.itemsize, pieces.itemsize]])
    return _is_copied_by_the_kernel(other, one) and pieces[1] == pieces[0]


def read(descriptor: int, moves: Sequence[Move]) -> None:
    """Read file ranges straight into memory.

    `moves`: the reads; their destinations must stay alive, and not overlap.
    """
    act = partial(_read_share, descriptor)
    _in_shares(moves, act, read_threads(), _LEAST_READ)


def read_many(descriptor: int, address: Columns, offset: Columns, nbytes: Columns) -> None:
    """Read many small file ranges straight into memory, neighbours with one system call.

    `offset`: where each range begins in the file, ascending.
    """
    if not len(offset):
        return
    ends = offset + nbytes
    gaps = np.append(offset[1:] - ends[:-1], 0)
    cuts = _batches(gaps, nbytes)
    # An array of struct iovec: each range, and then what lies between it and the next one.
    buffers = np.empty((2 * len(offset), 2), np.int64)
    buffers[0::2] = np.stack([address, nbytes], axis=1)
    buffers[1::2, 0], buffers[1::2, 1] = _discarded.ctypes.data, np.clip(gaps, 0, _GAP)

    def read_batch(batch: tuple[int, int]) -> None:
        start, stop = batch
        count = _preadv(
            descriptor, buffers[2 * start :].ctypes.data, 2 * (stop - start) - 1, int(offset[start])
        )
        # Cut short, or failed: read the ranges one by one, which says what is wrong.
        if count != ends[stop - 1] - offset[start]:
            ranges = slice(start, stop)
            _read_share(descriptor, moves_of(address[ranges], offset[ranges], nbytes[ranges]))

    work_off(list(pairwise(cuts)), read_batch, read_threads())


def _batches(gaps: Columns, nbytes: Columns) -> list[int]:
    """Return where to cut ranges into batches: at long gaps, and into enough for all threads."""
    many = np.arange(len(nbytes)) // _MOST_RANGES
    much = np.cumsum(nbytes) // _MOST_BYTES
    is_cut = (np.diff(many) > 0) | (np.diff(much) > 0) | (gaps[:-1] > _GAP) | (gaps[:-1] < 0)
    return [0, *(np.flatnonzero(is_cut) + 1).tolist(), len(nbytes)]


def copy_here(moves: Sequence[Move]) -> None:
    """Copy memory to memory in this thread alone."""
    for destination, source, nbytes in moves:
        if nbytes < _LARGE:
            _memmove(destination, source, nbytes)
        else:
            _copy_large(destination, source, nbytes)


class _Bytes:
    """Memory at an address, for numpy."""

    __slots__ = ("__array_interface__",)

    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "typestr": "|i1",
            "shape": (nbytes,),
            "data": (address, False),
        }


def _by_loop(destination: int, source: int, nbytes: int) -> None:
    """Copy memory by numpy's loop, outside the interpreter lock."""
    np.positive(np.asarray(_Bytes(source, nbytes)), out=np.asarray(_Bytes(destination, nbytes)))


def _is_amd() -> bool:
    """Return whether this machine's processor is one of AMD's."""
    try:
        with open("/proc/cpuinfo", "rb") as file:
            return b"AuthenticAMD" in file.read(4096)
    except OSError:
        return False


_copy_large = _by_loop if _is_amd() else _memmove
"""For pieces that no cache holds, numpy's loop is the quicker one on AMD's processors (ADR 42)."""


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


def _in_shares(
    moves: Sequence[Move],
    act: Callable[[Sequence[Move]], None],
    threads: int,
    least: int = 1,
) -> None:
    """Call `act` for shares of the moves, of at least so many bytes where there are enough."""
    nbytes = sum(map(_NBYTES, moves))
    if threads == 1 or nbytes < max(_ONE_THREAD_NBYTES, _ONE_THREAD_PIECE * len(moves)):
        act(moves)
        return
    count = min(threads * _SHARES_EACH, max(threads, nbytes // least))
    work_off(shares(moves, count), act, threads)


def read_threads() -> int:
    """Return the threads for the reads of a load: the training stands still meanwhile.

    So these are this rank's part of the machine's processors, where torch uses fewer. torchrun has
    it use one.
    """
    ranks = next((one for one in map(os.environ.get, _RANKS_HERE) if one and one.isdecimal()), "1")
    processors = len(os.sched_getaffinity(0)) // max(1, int(ranks))
    return max(torch.get_num_threads(), min(processors, _MOST_READERS))


def work_off(work: Sequence[T], act: Callable[[T], object], threads: int = 0) -> None:
    """Call `act` for each piece of work, in several threads."""
    if len(work) == 1:
        act(work[0])
        return
    _Work(work, act).do(min(threads or torch.get_num_threads(), len(work)) - 1)


class _Work(Generic[T]):
    """Work that threads share: each takes piece after piece until none is left."""

    def __init__(self, work: Sequence[T], act: Callable[[T], object]) -> None:
        self._waiting, self._act = deque(work), act
        self._at_work: set[int] = set()  # threads, by their numbers
        self._changed = threading.Condition()
        self._error: BaseException | None = None

    def do(self, helpers: int) -> None:
        """Take part until all is done; however it ends, no other thread is at work any more."""
        pool = _pool(max(torch.get_num_threads(), read_threads()))
        try:
            for _ in range(helpers):
                pool.submit(self._take)
            self._take()
            self._wait()
        except BaseException:
            self._cancel()
            raise
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback has this frame

    def _cancel(self) -> None:
        """Leave what nobody has begun with. An interrupt is raised once no thread is at work."""
        self._waiting.clear()
        interrupt: BaseException | None = None
        while True:
            try:
                self._wait()
                break
            except BaseException as error:
                interrupt = error
        self._error = None
        if interrupt is not None:
            raise interrupt

    def _take(self) -> None:
        with self._changed:
            self._at_work.add(threading.get_ident())
        try:
            while True:
                try:
                    piece = self._waiting.popleft()
                except IndexError:
                    return
                self._act(piece)
        except BaseException as error:
            self._waiting.clear()
            if self._error is None or not isinstance(error, Exception):  # an interrupt wins
                self._error = error
        finally:
            with self._changed:
                self._at_work.discard(threading.get_ident())
                self._changed.notify_all()

    def _wait(self) -> None:
        here = threading.get_ident()  # an interrupt may have left it there
        with self._changed:
            self._changed.wait_for(lambda: self._at_work <= {here})


def _call(part: Callable[[], None]) -> None:
    part()


def shares(moves: Sequence[Move], count: int) -> list[list[Move]]:
    """Cut moves into at most `count` shares of nearly equal bytes; moves may be split."""
    ends = list(accumulate(map(_NBYTES, moves)))
    total = ends[-1] if ends else 0
    cuts = [total * share // count for share in range(count + 1)]
    return [_between(moves, ends, start, stop) for start, stop in pairwise(cuts) if start < stop]


def _between(moves: Sequence[Move], ends: Sequence[int], start: int, stop: int) -> list[Move]:
    """Return the moves of bytes [start, stop), counted as if all moves lay end to end."""
    first, last = bisect_right(ends, start), bisect_left(ends, stop)
    part = list(moves[first : last + 1])
    destination, source, nbytes = part[-1]
    part[-1] = (destination, source, nbytes - (ends[last] - stop))
    destination, source, nbytes = part[0]
    skipped = start - (ends[first] - moves[first][2])
    part[0] = (destination + skipped, source + skipped, nbytes - skipped)
    return part


@lru_cache(maxsize=4)
def _pool(threads: int) -> KeptThreads:
    return KeptThreads(threads, COPYING)
