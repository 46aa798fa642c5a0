"""Where checkpoints become durable: one small interface, and the routes behind it.

A route moves bytes; what is put in which order, and what counts as committed, is decided in `flush`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Entry:
    """One name directly under a prefix. modified: seconds since the epoch, 0.0 where the storage doesn't tell."""

    name: str
    nbytes: int
    is_directory: bool
    modified: float = 0.0


class Storage(Protocol):
    """The storage under one root URL. Keys are relative to it, with `/` between their parts.

    Every method is safe to repeat and to call from several threads. All raise StorageUnavailable where a retry may help
    and StorageRefused where it won't; error texts hold no credentials.
    """

    url: str

    def put_stream(self, key: str, pieces: Iterable[memoryview], nbytes: int) -> None:
        """Store `nbytes` bytes given in pieces; on return they are durable and whole.

        A piece is only valid until the next one is asked for. After an error or a kill a shorter object may be left
        under the key (so keys of streams are unique to an attempt, and nothing refers to them before they are whole).
        What `pieces` raises leaves as it is. Raises ValueError where they add up to another length.
        """

    def put(self, key: str, data: bytes, *, create: bool = False) -> None:
        """Store data whole and durably: every reader sees all of it or, on error, nothing of it.

        create: only if there is nothing under that key yet. Raises CheckpointExists otherwise.
        """

    def get(self, key: str) -> bytes:
        """All bytes under the key. Raises StorageKeyMissing."""

    def read_into(self, key: str, offset: int, buffer: memoryview) -> int:
        """Fill the buffer from `offset` on and return how much there was, 0 behind the end. Raises StorageKeyMissing."""

    def ls(self, prefix: str) -> list[Entry]:
        """What lies directly under the prefix ("" for the root); nothing if there is nothing. Never from a cache.

        Raises StorageRefused where not even the bucket or container is there.
        """

    def delete(self, key: str) -> None:
        """Delete an object; that it is gone already is fine."""
