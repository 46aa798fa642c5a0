"""Storage: where checkpoints become durable. One small interface, and the routes behind it.

A route moves bytes and tries each request once; `retry` repeats what may be repeated. What is put
in which order, and what counts as committed, is decided in `flushing`. This room may import format,
config and what lies below them. Read its modules in this order: this one (the interface), `routes`
(which route serves a URL), `destination` (which URLs can take checkpoints at all), `retry`,
`posix` with `posix_upload`, `posix_paths` and `posix_mounts`, `fsspec_route`, `s3` with
`s3_client`, `gcs` (S3's route in another dialect), `azure` with `azure_client`, `file_system` and
`streams` (shared by routes), `translate` (errors), `listing` (what is committed), `leases` (who
reads).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY
from enum import Enum
from typing import Protocol

from dcp_mem.common.value_class import value_class
from dcp_mem.errors import DcpMemError, StorageKeyMissing, StorageRefused, StorageUnavailable

LEAST_PART = 16 << 20
_COMFORTABLE_PART = 64 << 20
_ENOUGH_PARTS, _MOST_PARTS = 8, 9000


class NotThisRoute(DcpMemError):
    """This route can't take over what fsspec was given for a URL: fsspec itself has to serve it."""


class UploadBroken(StorageUnavailable):
    """Bytes of this upload may be lost: it takes no more and is never finished; begin another."""


class OfOneFile(DcpMemError):
    """What went wrong with one file, or directory, while the root answers as it should."""


class FileUnavailable(OfOneFile, StorageUnavailable):
    """One file can't be read now; trying again may help."""


class FileRefused(OfOneFile, StorageRefused):
    """One file can't be read, or isn't one; trying again won't help."""


@value_class
class Entry:
    """One name directly under a prefix."""

    name: str
    nbytes: int
    is_directory: bool
    _: KW_ONLY
    # seconds since the epoch, by the storage's clock; 0.0 where it doesn't tell
    modified: float = 0.0
    # Of the content, in hexadecimal digits; "" where the listing doesn't tell. It may be of
    # something else, of the encrypted content, say: only where it is the expected one does it prove
    # anything.
    md5: str = ""
    # why it can't be read, as far as the listing tells; "" for files and directories
    what: str = ""

    @property
    def identity(self) -> str:
        """What changes where another file is put in this one's place."""
        return f"{self.nbytes}-{self.modified!r}"


@value_class
class Unfinished:
    """An upload that was begun and neither finished nor dropped."""

    key: str
    begun: float  # seconds since the epoch, by the storage's clock


class Copies(Enum):
    """What an upload can have copied on storage, from an object that is there already."""

    NOTHING = "nothing"
    PARTS = "parts"
    WHOLE = "whole"  # all of the object, or nothing


@value_class
class Source:
    """A stored object that an upload may copy from."""

    key: str
    nbytes: int
    # what its own upload returned as such: an object that isn't what was stored then isn't copied
    # from
    etag: str


class Upload(Protocol):
    """One object on its way to storage, in parts.

    Until `finish`, readers see nothing of it; or, where it has one part only, all of it.
    An upload that has raised UploadBroken can only be closed. Where a method raises
    StorageUnavailable or StorageRefused, the part, or the object, isn't stored.

    Attributes:
        part_nbytes: Length of the parts. Part n is bytes [n * part_nbytes, (n + 1) * part_nbytes),
            the last one what is left. An empty object has one empty part.
        in_order: Whether parts must be put one after the other, each once. Otherwise they may be
            put in any order, several at once, and repeatedly.
        copies: What can be copied from the source that the upload was given.
        verifies_copies: Whether a copy is known to have the bytes that were stored. Otherwise only
            its length is known, and that nobody has written to the source since.
    """

    part_nbytes: int
    in_order: bool
    copies: Copies
    verifies_copies: bool

    def put_part(self, number: int, data: memoryview, crc32c: int) -> bool:
        """Store a part, counted from 0; its data isn't used any more on return.

        Returns False where storage has it already, from an attempt that was cut short.
        """

    def copy_part(self, number: int, crc32c: int) -> bool:
        """Store a part by having the same range of the source copied on storage.

        `crc32c`: of the bytes that it must have. Returns False where it can't be had that way: then
        it has to be put.
        """

    def copy_whole(self) -> bool:
        """Store the object by having all of the source copied on storage, in place of all parts.

        On return the object is visible, whole and durable; `finish` needn't be called. Returns
        False where it can't be had that way: then its parts have to be put.
        """

    def etag(self) -> str:
        """Return what stands for the object's bytes, once it is finished.

        It changes where somebody stores others. A later upload needs it to copy from the object; ""
        where it can't.
        """

    def finish(self) -> None:
        """Make the object visible; on return it is whole and durable.

        Safe to repeat, unless parts come in order. Raises ValueError where a part was never put:
        nothing is made visible then. After any other error it may or may not be visible.
        """

    def close(self) -> None:
        """Give up this process's resources, whether or not the upload is finished.

        Stored parts of an unfinished upload stay where a later upload can go on with them.
        """


class InParts:
    """What uploads have in common: which parts there are; nothing is copied."""

    copies = Copies.NOTHING
    verifies_copies = False
    _etag = ""

    def __init__(self, nbytes: int) -> None:
        self.part_nbytes = part_nbytes(nbytes)
        self._nbytes = nbytes
        self._missing = set(range(part_count(nbytes, self.part_nbytes)))

    def copy_part(self, number: int, crc32c: int) -> bool:
        return False

    def copy_whole(self) -> bool:
        return False

    def etag(self) -> str:
        return self._etag

    def _range(self, number: int) -> tuple[int, int]:
        """Return where a part begins, and its length."""
        start = number * self.part_nbytes
        return start, min(self.part_nbytes, self._nbytes - start)

    def _check_that_all_were_put(self) -> None:
        if self._missing:
            raise ValueError(f"{len(self._missing)} parts were never put")


class StoredFiles(Protocol):
    """What can be read under one root URL. Keys are relative to it, with `/` between their parts.

    What holds for every method, and for those of `Storage`:

    - Ordering: what a method has stored or deleted is what all later calls see, of any process.
    - Idempotence: every method is safe to repeat, and to call from several threads.
    - Durability: what `put` and `Upload.finish` have stored survives a crash once they return.
    - Errors: StorageUnavailable where repeating may help, StorageRefused where it won't; both
      OfOneFile as well where only what was to be read is at fault. Their texts hold no credentials.
    - Links below the root aren't followed. They are listed, and deleted, as such.
    """

    url: str

    def get(self, key: str) -> bytes:
        """Return all bytes under a key. Raises StorageKeyMissing."""

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> int:
        """Fill buffers, one after the other, with the bytes from an offset on, in one request.

        Returns how many bytes there were: fewer than the buffers hold where the object ends. Raises
        StorageKeyMissing.
        """

    def ls(self, prefix: str) -> list[Entry]:
        """Return what lies directly under a prefix, if anything. Never from a cache.

        `prefix`: without a `/` at its end; "" is the root. Raises StorageRefused where not even the
        bucket or container is there.
        """


class Storage(StoredFiles, Protocol):
    """The storage under one root URL, to read and to write."""

    def upload(self, key: str, nbytes: int, source: Source | None = None) -> Upload:
        """Begin an upload, or go on with one in which an earlier process was killed.

        `key`: unique to one attempt at saving: what lies under it already is taken for this
        object's. `source`: what may be copied from; it may be gone by now. None: everything is put.
        """

    def put(self, key: str, data: bytes, *, create: bool = False) -> None:
        """Store an object whole: readers see all of it or, on error, all or nothing of it.

        `create`: only if there is nothing under that key yet. Raises CheckpointExists where there
        is something; it may be what an earlier try of this very put has stored, whose answer was
        lost. Callers that need to know read it back.
        """

    def tree(self, most: int) -> list[tuple[str, Entry]] | None:
        """Return all objects under the root, each with its directory, if that is one short listing.

        Returns None where there are more than `most`, or where this storage lists one directory
        after the other.
        """

    def delete(self, key: str) -> None:
        """Delete an object; one that is gone already is fine."""

    def has_conditions(self) -> bool:
        """Return whether `swap` and `remove` can't be overtaken by another process.

        Where they can, they only look before they act.
        """

    def swap(self, key: str, old: bytes, new: bytes) -> bool:
        """Replace an object as `put` does, but only if it is still what it was.

        Returns False where it is another one by now, or gone. It may be `new`, of an earlier try
        whose answer was lost; callers that need to know read it back.
        """

    def remove(self, key: str, old: bytes) -> bool:
        """Delete an object, if it is still what it was; False where it is another one, or gone."""

    def unfinished(self, prefix: str) -> list[Unfinished]:
        """Return unfinished uploads of keys under a prefix, at any depth, that take up space."""

    def drop_unfinished(self, key: str) -> None:
        """Free what unfinished uploads of a key take up; an object under the key stays."""


def is_still(storage: StoredFiles, key: str, data: bytes) -> bool:
    """Return whether an object is still these bytes; False where it is gone."""
    try:
        return storage.get(key) == data
    except StorageKeyMissing:
        return False


def part_nbytes(nbytes: int) -> int:
    """Return the length of the parts of an object, in whole MiB.

    At least 16 MiB. Up to 64 MiB for objects that are then still cut into enough parts for several
    threads: each request costs an SDK some milliseconds of CPU. Longer where there would be more
    parts than any store's limit of 10,000.
    """
    comfortable = min(_COMFORTABLE_PART, nbytes // _ENOUGH_PARTS >> 20 << 20)
    return max(LEAST_PART, comfortable, -(-nbytes // _MOST_PARTS >> 20 << 20))


def part_count(nbytes: int, of_part: int) -> int:
    """Return how many parts of that length an object has: at least one."""
    return max(1, -(-nbytes // of_part))


def scatter(piece: bytes, start: int, buffers: Sequence[memoryview]) -> None:
    """Copy bytes into buffers that stand for one range, cut up, in order."""
    for buffer in buffers:
        if start < len(buffer):
            count = min(len(buffer) - start, len(piece))
            buffer[start : start + count] = piece[:count]
            piece, start = piece[count:], 0
            if not piece:
                return
        else:
            start -= len(buffer)
