"""Directories on the way to a file, made and opened so that network file systems agree; links."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from typing import TypeVar

from dcp_mem.common.files import UnfitFile, kind_of, sync_directory
from dcp_mem.config import is_checkpoint_name
from dcp_mem.errors import StorageRefused

T = TypeVar("T")

DESCRIPTORS = "/proc/self/fd"
SEARCHED = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_MOST_REMOVED = 5
"""Times that a directory is made anew that somebody removes meanwhile."""


def name_behind_link(url: str, name: str) -> str:
    """Return the name in the same directory that a link under the root stands for, else the name.

    People have links such as `latest`. They are names to load from, and nothing else follows them.
    """
    target = link_target(url, name)
    directory, _, base = os.path.join(url, target or name).rpartition("/")
    is_beside = target is not None and os.path.realpath(directory) == os.path.realpath(url)
    return base if is_beside and is_checkpoint_name(base) else name


def link_target(url: str, name: str) -> str | None:
    """Return where a link directly under a root leads; None where there is none by that name."""
    try:
        return os.readlink(os.path.join(url, name)).rstrip("/") if url.startswith("/") else None
    except OSError:  # no link, or not to be seen: whoever opens it says so
        return None


def enter(path: str) -> int:
    """Open a directory, to search it; raise UnfitFile for a link or anything else."""
    try:
        return os.open(path, SEARCHED | os.O_NOFOLLOW)
    except NotADirectoryError:
        what = f"{os.path.basename(path)} is {kind_of(os.lstat(path).st_mode)}"
        if what.endswith("link"):
            what += ", and links below the root aren't followed"
        raise UnfitFile(path, what) from None


def missing_directories(path: str) -> list[str]:
    """Return a path and those above it that are no directories, the path first."""
    missing = []
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    return missing


def make_root(url: str) -> list[str]:
    """Make the root, and the directories above it, where they are missing; return these."""
    for _ in range(_MOST_REMOVED):
        missing = missing_directories(url)
        try:
            for directory in reversed(missing):
                make_directory(directory)
        except FileNotFoundError:  # somebody removes them meanwhile, or none can be made
            continue
        return missing
    refuse_where_nothing_is_made(url, missing[-1])
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), url)


def takes_nameless_file(directory: str) -> bool:
    """Make a file that nothing is left of, whoever is killed. False: not here, or not at all."""
    try:
        os.close(os.open(directory, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    except OSError:
        return False
    return True


def refuse_where_nothing_is_made(url: str, missing: str) -> None:
    """Raise StorageRefused where the directory above is there: it takes none, as in /proc."""
    if os.path.isdir(os.path.dirname(missing)):
        reason = f"no directory can be made there ({missing}). Check the path."
        raise StorageRefused(url, reason)


def make_directory(path: str) -> None:
    """Make a directory, as durable as what is in it."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o777)
        # A directory that may be written but not read can't be synced.
        with contextlib.suppress(PermissionError):
            sync_directory(os.path.dirname(path))


def found_again(act: Callable[[str], T], path: str) -> T:
    """Return what `act` returns for a path; a missing name is looked for in its directory.

    An NFS client that has missed a name misses it for half a minute, unless it lists the directory.
    Raises FileNotFoundError only where the directory doesn't list the name.
    """
    try:
        return act(path)
    except FileNotFoundError:
        directory, name = os.path.split(path)
        # The directory may be one that may be searched but not read, or missing itself.
        with contextlib.suppress(PermissionError, FileNotFoundError):
            if name in os.listdir(directory):
                return act(path)
        raise


def answers(root: str) -> bool:
    """Return whether a root can be listed, and its file system answers: nothing keeps that."""
    try:
        os.statvfs(root)
        with os.scandir(root) as entries:
            next(entries, None)
    except OSError:
        return False
    return True
