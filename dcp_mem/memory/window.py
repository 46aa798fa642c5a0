"""A piece of tmpfs that the ranks of a node fill and read together while they load."""

from __future__ import annotations

import contextlib
import mmap
import os

import numpy as np

from dcp_mem.errors import MemoryBudgetExceeded
from dcp_mem.files import free_bytes, remove
from dcp_mem.memory.root import open_root


class Window:
    """Shared memory of one node. Its file has no name any more once every rank has opened it: nothing is left of it."""

    def __init__(self, path: str, nbytes: int) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._mapping = mmap.mmap(descriptor, nbytes)
        finally:
            os.close(descriptor)
        self.address: int = np.frombuffer(self._mapping, np.uint8).ctypes.data

    def close(self) -> None:
        with contextlib.suppress(BufferError):  # an error on its way up still holds a part; it goes with the error
            self._mapping.close()


def window_path(root: str, token: str) -> str:
    return os.path.join(root, f".restoring-{token}")


def make_window(root: str, token: str, nbytes: int) -> None:
    """Make the file, with all its pages. Raises MemoryBudgetExceeded where the tmpfs has no room for it."""
    path = window_path(root, token)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError:
        remove(path)
        raise MemoryBudgetExceeded(nbytes, free_bytes(root), "no room for a window to load through") from None
    finally:
        os.close(descriptor)


def remove_window(root: str, token: str) -> None:
    """Take the file's name away; whoever has opened it keeps it."""
    remove(window_path(root, token))


def room_for_window(root: str) -> int:
    """Bytes of tmpfs that a load may take for a while: a small part of what is free."""
    return free_bytes(open_root(root)) // 4
