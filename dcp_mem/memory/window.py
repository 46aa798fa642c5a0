"""A window: tmpfs that the ranks of a node fill and read together while they load."""

from __future__ import annotations

import contextlib
import mmap
import os

import numpy as np

from dcp_mem.common.files import free_bytes, remove
from dcp_mem.errors import MemoryBudgetExceeded
from dcp_mem.memory.root import open_root


class Window:
    """Shared memory of one node.

    Its file's name is removed once every rank has opened it, so a kill leaves nothing behind.

    Args:
        path: As `window_path` returns it.
        nbytes: Length of the window.
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
    """Return the path of a load's window, by the token that its ranks share.

    Args:
        root: The memory root.
        token: That the load's ranks share.
    """
    return os.path.join(root, f".restoring-{token}")


def make_window(root: str, token: str, nbytes: int) -> None:
    """Make a window's file, with all its pages.

    Args:
        root: The memory root.
        token: That the load's ranks share.
        nbytes: Length of the window.

    Raises:
        MemoryBudgetExceeded: The tmpfs has no room for it.
    """
    path = window_path(root, token)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError:
        remove(path)
        raise MemoryBudgetExceeded(
            nbytes, free_bytes(root), "no room for a window to load through"
        ) from None
    finally:
        os.close(descriptor)


def remove_window(root: str, token: str) -> None:
    """Remove a window's name; ranks that have opened it keep it.

    Args:
        root: The memory root.
        token: That the load's ranks share.
    """
    remove(window_path(root, token))


def room_for_window(root: str) -> int:
    """Return the bytes of tmpfs that a load may take for a while: a part of what is free.

    Args:
        root: The memory root.
    """
    return free_bytes(open_root(root)) // 4
