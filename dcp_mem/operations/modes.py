"""Modes of directories and files that are made for others than their owner."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping, Sequence

Tree = Mapping[str, tuple[int, int]]
"""Inode and time of modification of each file and directory, by path."""


def missing_directories(path: str) -> list[str]:
    """Return the directories that an export will make on the way to its target."""
    found = []
    while path.startswith("/") and not os.path.isdir(path):
        found.append(path)
        path = os.path.dirname(path)
    return found


def tree_of(top: str) -> Tree:
    return {path: _identity(found) for path, found in _walk(top)}


def open_up(directories: Sequence[str], top: str, before: Tree) -> None:
    """Give what was written the modes that the umask asks for; a job's own directory is private."""
    mask = os.umask(0o077)
    os.umask(mask)
    for directory in directories:
        os.chmod(directory, 0o777 & ~mask)
    for path, found in _walk(top):
        if stat.S_ISDIR(found.st_mode) and path not in before:
            os.chmod(path, 0o777 & ~mask)
        elif stat.S_ISREG(found.st_mode) and before.get(path) != _identity(found):
            os.chmod(path, 0o666 & ~mask)


def _walk(top: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield a directory, and all that is below it. Links aren't followed."""
    for directory, _, files in os.walk(top):
        yield directory, os.lstat(directory)
        for file in files:
            path = os.path.join(directory, file)
            yield path, os.lstat(path)


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_ino, found.st_mtime_ns
