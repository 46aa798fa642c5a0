"""The bodies of HTTP answers, read straight into the memory where they belong."""

from __future__ import annotations

import http.client
from collections.abc import Callable, Sequence
from typing import Any

_PIECE = 1 << 20


def fill(stream: Any, buffers: Sequence[memoryview], nbytes: int) -> int:
    """Fill buffers, one after the other, from a body.

    The connection is free for the next request if the body was read to its end, and closed
    otherwise.

    Returns how many bytes there were.
    """
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
