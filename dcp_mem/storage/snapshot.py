"""A storage as it is listed once, for programs that look at many checkpoints and change nothing.

Looking at a checkpoint takes several requests, one after the other. Here one listing serves all
checkpoints, where it isn't too long; and small files are kept on this machine for as long as the
listing shows the same size and time.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Sequence

from dcp_mem.common.files import read_bytes, remove, write_atomically
from dcp_mem.errors import DcpMemError
from dcp_mem.storage import Entry, Storage

_MOST_KEYS = 3_000
"""A listing of more keys is slower than a few short ones side by side."""
_MOST_BYTES = 256 << 10
_SETTLED_SECONDS = 60.0
"""Age from which a file is kept: a newer one could still be replaced within the same second."""


class Snapshot:
    """A storage whose listings are those of one moment, and whose small files may be kept."""

    def __init__(self, storage: Storage, cache: FileCache | None = None) -> None:
        self.url = storage.url
        self._storage, self._cache = storage, cache
        self._directories = _by_directory(storage.tree(_MOST_KEYS))
        self._facts = {
            f"{directory}/{entry.name}": entry
            for directory, entries in (self._directories or {}).items()
            for entry in entries
        }

    def ls(self, prefix: str) -> list[Entry]:
        if self._directories is not None:
            return self._directories.get(prefix, [])
        listed = self._storage.ls(prefix)
        self._facts.update((f"{prefix}/{entry.name}", entry) for entry in listed)
        return listed

    def get(self, key: str) -> bytes:
        known = self._kept(key, "")
        if known is None:
            known = self._storage.get(key)
            self._keep(key, "", known)
        return known

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> int:
        wanted, place = sum(map(len, buffers)), f"{offset}+{sum(map(len, buffers))}"
        known = self._kept(key, place) if len(buffers) == 1 else None
        if known is not None and len(known) == wanted:
            buffers[0][:] = known
            return wanted
        count = self._storage.read_into(key, offset, buffers)
        if len(buffers) == 1 and count == wanted:
            self._keep(key, place, bytes(buffers[0]))
        return count

    def _kept(self, key: str, place: str) -> bytes | None:
        identity = self._identity(key)
        return None if self._cache is None or not identity else self._cache.get(identity + place)

    def _keep(self, key: str, place: str, data: bytes) -> None:
        identity = self._identity(key)
        if self._cache is not None and identity and len(data) <= _MOST_BYTES:
            self._cache.put(identity + place, data)

    def _identity(self, key: str) -> str:
        """Return what stands for the bytes under a key; "" where they may become others."""
        facts = self._facts.get(key)
        if facts is None or not 0 < facts.modified < time.time() - _SETTLED_SECONDS:
            return ""
        return f"{key}\n{facts.nbytes}\n{facts.modified!r}\n"


def _by_directory(tree: Sequence[tuple[str, Entry]] | None) -> dict[str, list[Entry]] | None:
    """Return a tree's entries by their directory, with directories as entries of those above."""
    if tree is None:
        return None
    found: dict[str, list[Entry]] = {"": []}
    for directory, entry in tree:
        _add_directory(found, directory)
        found[directory].append(entry)
    return found


def _add_directory(found: dict[str, list[Entry]], directory: str) -> None:
    if directory not in found:
        found[directory] = []
        above, _, name = directory.rpartition("/")
        _add_directory(found, above)
        found[above].append(Entry(name, 0, is_directory=True))


class FileCache:
    """Small files in a private directory, by their bytes' identity; an unreadable one is none."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._used: set[str] = set()
        self._lock = threading.Lock()

    def get(self, identity: str) -> bytes | None:
        """Return the bytes; None where they aren't kept."""
        try:
            return read_bytes(self._path(identity))
        except OSError:
            return None

    def put(self, identity: str, data: bytes) -> None:
        """Keep bytes."""
        with contextlib.suppress(OSError, DcpMemError):
            for directory in (os.path.dirname(self._directory), self._directory):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(directory, 0o700)
            write_atomically(self._path(identity), data)

    def drop_unused(self) -> None:
        """Remove what hasn't been asked for since this object was made."""
        with contextlib.suppress(OSError):
            for file in os.listdir(self._directory):
                if file not in self._used:
                    remove(os.path.join(self._directory, file))

    def _path(self, identity: str) -> str:
        name = hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest()[:32]
        with self._lock:
            self._used.add(name)
        return os.path.join(self._directory, name)


def cache_under(memory_root: str, url: str) -> FileCache | None:
    """Return the cache of a job's storage, if the memory root is this user's own."""
    try:
        facts = os.lstat(memory_root)
    except OSError:
        return None
    if facts.st_uid != os.geteuid() or facts.st_mode & 0o022:
        return None
    where = hashlib.sha256(url.encode()).hexdigest()[:16]
    return FileCache(os.path.join(memory_root, ".listings", where))
