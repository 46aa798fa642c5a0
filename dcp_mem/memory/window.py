"""A window: tmpfs that the ranks of a node fill and read together while they load."""

from __future__ import annotations

import contextlib
import mmap
import os

import numpy as np

from dcp_mem.common import faults
from dcp_mem.common.files import create, free_bytes, remove
from dcp_mem.errors import MemoryBudgetExceeded
from dcp_mem.memory.locks import end_lease, leased_alone, share
from dcp_mem.memory.root import open_root

_PREFIX = ".restoring-"


class Window:
    """Shared memory of one node.

    Its file's name is removed once every rank has opened it. After a kill before that, the next
    load on the node removes it.
    """

    def __init__(self, path: str, nbytes: int) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._mapping = mmap.mmap(descriptor, nbytes)
        finally:
            os.close(descriptor)
        self.address: int = np.frombuffer(self._mapping, np.uint8).ctypes.data

    def close(self) -> None:
        """Unmap it."""
        # An error on its way up may still hold a view; then the memory goes with the error.
        with contextlib.suppress(BufferError):
            self._mapping.close()


def window_path(root: str, token: str) -> str:
    """Return the path of a load's window, by the token that its ranks share."""
    return os.path.join(root, _PREFIX + token)


def make_window(root: str, token: str, nbytes: int) -> int:
    """Make a window's file, with all its pages.

    Returns a descriptor for `remove_window`. Its lease keeps other loads from removing the file.
    Raises MemoryBudgetExceeded.
    """
    descriptor = _leased_file(window_path(root, token))
    try:
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
        except OSError:
            raise MemoryBudgetExceeded(
                nbytes, free_bytes(root), "no room for a window to load through"
            ) from None
        faults.point("load.window")
        return descriptor
    except BaseException:
        remove_window(root, token, descriptor)
        raise


def remove_window(root: str, token: str, descriptor: int) -> None:
    """Remove a window's name; ranks that have opened it keep it."""
    remove(window_path(root, token))
    end_lease(descriptor)
    os.close(descriptor)


def _leased_file(path: str) -> int:
    """Make a file; return its descriptor, with a shared lease."""
    while True:
        descriptor = create(path, flags=os.O_EXCL)
        share(descriptor)
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)  # another load has taken it for a dead one


def _remove_dead_windows(root: str) -> None:
    """Remove the windows of loads whose first rank was killed before all ranks had opened them."""
    for name in os.listdir(root):
        if name.startswith(_PREFIX):
            path = os.path.join(root, name)
            with leased_alone(path) as descriptor:
                # Without a name, it is no longer the file at this path, and live ranks may use it.
                if descriptor is not None and os.fstat(descriptor).st_nlink:
                    remove(path)


def room_for_window(root: str) -> int:
    """Return the bytes of tmpfs that a load may take for a while: a part of what is free.

    Windows of loads that were killed are removed first.
    """
    _remove_dead_windows(open_root(root))
    return free_bytes(root) // 4
