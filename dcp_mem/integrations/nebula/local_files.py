"""Files of checkpoints as files of this machine, for whoever opens them by path.

They lie in the directory for temporary files. Processes share them, each with a lease on the
directory of a checkpoint; the last one that ends removes it, or, where that one was killed, the
next process that makes such a file.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import threading
import uuid
from pathlib import Path
from urllib.parse import quote

from dcp_mem.memory.locks import open_leased, try_lease
from dcp_mem.memory.root import private_directory

_guard = threading.Lock()
_leased: dict[Path, int] = {}
"""The directories that this process uses, each with the descriptor that has its lease."""


def local_file(save_id: str, item: str, tag: str, name: str, data: memoryview) -> str:
    """Put the bytes of a checkpoint's file on this machine, unless they are there; return its path.

    The path ends in "<tag>/<name>". The file stays until this process ends, or makes a file of
    another checkpoint.

    `item`: what the file is called in the checkpoint, alone among its ranks. Raises OSError.
    """
    with _guard:
        root = Path(private_directory(str(_root())))
        directory = root / save_id
        _release([used for used in _leased if used != directory])
        if directory not in _leased:
            _remove_unused(root)
            _leased[directory] = _taken(directory)
        path = directory / _part(item) / tag / _part(name)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".{uuid.uuid4().hex}.tmp")
            try:
                temporary.write_bytes(data)
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)
        return str(path)


def is_local_file(path: str) -> bool:
    """Return whether `local_file` has made the file of this path, and it is still there."""
    return Path(path).is_relative_to(_root()) and os.path.isfile(path)


def release_all() -> None:
    """Remove the files that no other process uses."""
    with _guard:
        _release(list(_leased))


def _root() -> Path:
    return Path(tempfile.gettempdir(), f"dcp_mem-{os.getuid()}-files")


def _part(name: str) -> str:
    """Return a name as one part of a path."""
    quoted = quote(name, safe="@=+,:~ ")
    return quoted.replace(".", "%2E") if quoted.strip(".") == "" else quoted


def _taken(directory: Path) -> int:
    """Take a lease on a directory, which is made where it isn't there."""
    while True:
        directory.mkdir(mode=0o700, exist_ok=True)
        try:
            return open_leased(str(directory))
        except FileNotFoundError:
            continue  # another process has removed it meanwhile


def _release(directories: list[Path]) -> None:
    for directory in directories:
        _remove_if_unused(directory, _leased.pop(directory))


def _remove_unused(root: Path) -> None:
    """Remove what killed processes have left."""
    for directory in root.iterdir():
        try:
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            continue
        _remove_if_unused(directory, descriptor)


def _remove_if_unused(directory: Path, descriptor: int) -> None:
    try:
        if try_lease(descriptor, exclusive=True):
            shutil.rmtree(directory, ignore_errors=True)
    finally:
        os.close(descriptor)


atexit.register(release_all)
