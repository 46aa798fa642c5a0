"""Bytes in memory as files to send, and bodies of HTTP answers read to where they belong."""

from __future__ import annotations

import http.client
import io
from collections.abc import Callable, Sequence
from typing import Any

_PIECE = 1 << 20


def fill(stream: Any, buffers: Sequence[memoryview], nbytes: int) -> int:
    """Fill buffers from a body; its connection is used again if it is read to its end."""
    readinto = _readinto(stream)
    done, is_at_end = 0, False
    try:
        for buffer in buffers:
            rest = buffer[: nbytes - done]
            while rest:
                count = readinto(rest)
                if count == 0:
                    return done
                done, rest = done + count, rest[count:]
        is_at_end = done == nbytes
    finally:
        if is_at_end and (release := getattr(stream, "release_conn", None)) is not None:
            release()
        stream.close()
    return done


def _readinto(stream: Any) -> Callable[[memoryview], int]:
    """Return the standard library's `readinto`: urllib3's own reads into new memory, and copies."""
    response = getattr(stream, "_fp", None)
    if isinstance(response, http.client.HTTPResponse):
        return response.readinto
    return lambda buffer: _copied(stream, buffer)


def _copied(stream: Any, buffer: memoryview) -> int:
    piece = stream.read(min(len(buffer), _PIECE))
    buffer[: len(piece)] = piece
    return len(piece)


class Body(io.RawIOBase):
    """Memory of others, as a file to read. `read` copies nothing; `view` must stay unchanged."""

    def __init__(self, view: memoryview) -> None:
        self.view = view
        self._position = 0

    def __len__(self) -> int:
        return len(self.view)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: len(self.view)}[
            whence
        ] + offset
        return self._position

    def read(self, count: int | None = -1) -> memoryview:
        stop = len(self.view) if count is None or count < 0 else self._position + count
        piece = self.view[self._position : stop]
        self._position += len(piece)
        return piece

    def readinto(self, buffer: Any) -> int:
        """Copy into a buffer: botocore hashes that way where the AWS CRT is installed."""
        piece = self.read(len(buffer))
        buffer[: len(piece)] = piece
        return len(piece)
