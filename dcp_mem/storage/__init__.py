"""Where checkpoints become durable: one small interface, and the routes behind it.

A route moves bytes; what is put in which order, and what counts as committed, is decided in `flush`. A route tries each
request once; `patient` repeats what may be repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from dcp_mem.errors import DcpMemError

LEAST_PART = 16 << 20
_COMFORTABLE_PART = 64 << 20
_ENOUGH_PARTS, _MOST_PARTS = 8, 9000


class NotThisRoute(DcpMemError):
    """What fsspec was given for a URL can't be carried over to this route: fsspec itself has to serve it."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One name directly under a prefix. modified: seconds since the epoch, 0.0 where the storage doesn't tell."""

    name: str
    nbytes: int
    is_directory: bool
    modified: float = 0.0


@dataclass(frozen=True, slots=True)
class Unfinished:
    """An upload that was begun and neither finished nor dropped. begun: seconds since the epoch, as storage tells it."""

    key: str
    begun: float


class Upload(Protocol):
    """One object on its way to storage, in parts. Until `finish` readers see none of it, or (one part only) all of it.

    part_nbytes: where it is cut: part n is bytes [n * part_nbytes, (n + 1) * part_nbytes), the last one what is left;
    an empty object has one empty part.
    in_order: parts are put one after the other, each once. Otherwise in any order, several at once, and repeatedly.
    """

    part_nbytes: int
    in_order: bool

    def put_part(self, number: int, data: memoryview, crc32c: int) -> bool:
        """Store a part; False where storage has it already, from an attempt that was cut short. `data` isn't kept."""

    def finish(self) -> None:
        """Make the object visible, whole and durable. Safe to repeat where parts come in any order.

        Raises ValueError, and makes nothing visible, where a part was never put.
        """

    def close(self) -> None:
        """End this process's part in an upload that may not be finished. What a later one can go on with stays."""


class Storage(Protocol):
    """The storage under one root URL. Keys are relative to it, with `/` between their parts.

    Every method is safe to repeat and to call from several threads. All raise StorageUnavailable where a retry may help
    and StorageRefused where it won't; error texts hold no credentials.
    """

    url: str

    def upload(self, key: str, nbytes: int) -> Upload:
        """Begin an upload of so many bytes, or go on with one that an earlier process was killed in.

        Only for keys that are unique to an attempt at saving: whoever goes on with an upload takes it for his own.
        """

    def put(self, key: str, data: bytes, *, create: bool = False) -> None:
        """Store data whole and durably: every reader sees all of it or, on error, nothing of it.

        create: only if there is nothing under that key yet. Raises CheckpointExists otherwise, also where an earlier try
        of this very put succeeded without an answer: who needs to know reads it back.
        """

    def get(self, key: str) -> bytes:
        """All bytes under the key. Raises StorageKeyMissing."""

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> int:
        """Fill the buffers, one after the other, with the bytes from `offset` on, in one request.

        Returns how many there were, fewer where the object ends. Raises StorageKeyMissing.
        """

    def ls(self, prefix: str) -> list[Entry]:
        """What lies directly under the prefix ("" for the root); nothing if there is nothing. Never from a cache.

        Raises StorageRefused where not even the bucket or container is there.
        """

    def delete(self, key: str) -> None:
        """Delete an object; that it is gone already is fine."""

    def unfinished(self, prefix: str) -> list[Unfinished]:
        """Uploads of keys under the prefix, at any depth, that take up space and that nobody has finished."""

    def drop_unfinished(self, key: str) -> None:
        """Free what unfinished uploads of the key take up. An object that is there stays."""


def part_nbytes(nbytes: int) -> int:
    """How long the parts of an object of so many bytes are, in whole MiB.

    At least 16 MiB and, for objects that leave enough of them for several threads, up to 64, since each request costs an SDK
    some milliseconds of CPU; longer where there would be more than any store's limit of 10,000.
    """
    comfortable = min(_COMFORTABLE_PART, nbytes // _ENOUGH_PARTS >> 20 << 20)
    return max(LEAST_PART, comfortable, -(-nbytes // _MOST_PARTS >> 20 << 20))


def part_count(nbytes: int, of_part: int) -> int:
    """How many parts of that length an object has: at least one."""
    return max(1, -(-nbytes // of_part))


def scatter(piece: bytes, start: int, buffers: Sequence[memoryview]) -> None:
    """Put `piece` where it belongs, at byte `start` of the buffers as if they lay behind each other."""
    for buffer in buffers:
        if start < len(buffer):
            count = min(len(buffer) - start, len(piece))
            buffer[start : start + count] = piece[:count]
            piece, start = piece[count:], 0
            if not piece:
                return
        else:
            start -= len(buffer)
