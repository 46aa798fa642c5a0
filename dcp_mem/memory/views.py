"""Files seen as memory, at addresses where the kernel can map their huge pages as such."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Sequence

from dcp_mem.policy.slots import HUGE

_PROT_NONE, _MAP_FIXED, _MAP_FAILED = 0, 0x10, ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def mapped(descriptor: int, start: int, nbytes: int) -> memoryview:
    """Map bytes [start, start + nbytes) of a file for reading, until their last view is gone.

    Huge pages are mapped as such, which costs next to nothing; pages of 4 KiB cost as much as
    hashing.
    """
    return lent(descriptor, start, nbytes).toreadonly()


def lent(descriptor: int, start: int, nbytes: int) -> memoryview:
    """Map as `mapped` does, as a buffer that claims to be writable.

    For functions that take no read-only buffer although they only read: a write is SIGSEGV.
    """
    address = map_aligned(descriptor, nbytes, start, mmap.PROT_READ)
    return memoryview(kept_while_seen(address, nbytes)).cast("B")


def kept_while_seen(address: int, nbytes: int) -> ctypes.Array[ctypes.c_ubyte]:
    """Return a mapping's bytes; it is unmapped with the last view of them."""
    buffer = (ctypes.c_ubyte * nbytes).from_address(address)
    end = weakref.finalize(buffer, _libc.munmap, address, nbytes)
    end.atexit = False  # views may still be in use then
    return buffer


def view_of(address: int, nbytes: int) -> memoryview:
    """Return memory at an address as bytes; it must outlive the view."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def is_same(one: int, other: int, nbytes: int) -> bool:
    """Return whether there are the same bytes at two addresses."""
    return not _libc.memcmp(one, other, nbytes)


def fill(descriptor: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Fill buffers, one after the other, with a file's bytes."""
    if os.preadv(descriptor, buffers, offset) == sum(map(len, buffers)):
        return
    for buffer in buffers:  # it was cut short
        while buffer:
            count = os.preadv(descriptor, [buffer], offset)
            if not count:
                raise EOFError(f"the file ends at {offset}, {len(buffer)} bytes short")
            buffer, offset = buffer[count:], offset + count


def map_aligned(descriptor: int, nbytes: int, start: int, protection: int) -> int:
    """Map a file so that its huge pages lie at multiples of their size, and return the address.

    Elsewhere the kernel can't map them as huge pages.
    """
    anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    room_nbytes = nbytes + 2 * HUGE
    room = _mmap(0, room_nbytes, _PROT_NONE, anonymous, -1)
    address = -(-room // HUGE) * HUGE + start % HUGE
    try:
        _mmap(address, nbytes, protection, mmap.MAP_SHARED | _MAP_FIXED, descriptor, start)
    except OSError:
        _libc.munmap(room, room_nbytes)
        raise
    stop = address + -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    for first, last in ((room, address), (stop, room + room_nbytes)):
        if first < last:
            _libc.munmap(first, last - first)
    return address


def _mmap(
    address: int, nbytes: int, protection: int, flags: int, descriptor: int, start: int = 0
) -> int:
    result: int = _libc.mmap(address, nbytes, protection, flags, descriptor, start)
    if result == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"mmap of {nbytes} bytes: {os.strerror(number)}")
    return result
