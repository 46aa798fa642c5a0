"""The memory root of a node: it is private to this user, or refused."""

from __future__ import annotations

import os
import stat
import uuid

from dcp_mem.common.files import own_directory, raise_if_full, read_bytes, settled
from dcp_mem.common.log import log
from dcp_mem.common.mounts import mount_of
from dcp_mem.errors import MemoryRootRefused, MemoryUnavailable

_NODE = ".node"


def open_root(path: str) -> str:
    """Make the memory root if it is missing; check that it is this user's alone, and writable."""
    own_directory(path)
    if not os.access(path, os.W_OK | os.X_OK):
        raise MemoryUnavailable(path, "it is not writable")
    # It is new as long as no node has its name there; the ranks' secret may come first.
    is_new = not os.path.exists(os.path.join(path, _NODE))
    if is_new and (kind := mount_of(path).kind) not in ("tmpfs", "ramfs", "hugetlbfs"):
        log.warning(
            "memory root %s lies on %s, not on a tmpfs: saves will be as slow as that", path, kind
        )
    return path


def private_directory(path: str) -> str:
    """Make a directory (0700) under the root, if it is missing, and return its path."""
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        facts = os.lstat(path)
        if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid():
            raise MemoryRootRefused(path, "it is not a directory of yours") from None
    except OSError as error:
        raise_if_full(error, path)
        raise
    return path


def node_id(root: str) -> str:
    """Return the id of the root's node: ranks that read the same id share a tmpfs."""
    path = os.path.join(root, _NODE)
    try:
        return read_bytes(path).decode()
    except FileNotFoundError:
        # This process may be the first one.
        return settled(path, uuid.uuid4().hex[:12].encode()).decode()
