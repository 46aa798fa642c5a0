"""Modes of directories and files that are made for others than their owner."""

from __future__ import annotations

import os
from collections.abc import Sequence


def missing_directories(path: str) -> list[str]:
    """Return the directories that an export will make on the way to its target.

    Args:
        path: Of the target; a URL has none.
    """
    found = []
    while path.startswith("/") and not os.path.isdir(path):
        found.append(path)
        path = os.path.dirname(path)
    return found


def open_up(directories: Sequence[str], top: str) -> None:
    """Give what was written the modes that the umask asks for, as all other files get.

    A job's own directory is private; an export is for others as well.

    Args:
        directories: That were made on the way.
        top: Of a tree.
    """
    mask = os.umask(0o077)
    os.umask(mask)
    for directory in directories:
        os.chmod(directory, 0o777 & ~mask)
    for directory, _, files in os.walk(top):
        for file in files:
            os.chmod(os.path.join(directory, file), 0o666 & ~mask)
        os.chmod(directory, 0o777 & ~mask)
