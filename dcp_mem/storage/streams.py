"""The bodies of HTTP answers, read right into the memory where they belong."""

from __future__ import annotations

import http.client
from collections.abc import Callable, Sequence
from typing import Any

_PIECE = 1 << 20


def fill(stream: Any, buffers: Sequence[memoryview], nbytes: int) -> int:
    """Fill the buffers, one after the other, with up to `nbytes` from a body of urllib3's; how many there were.

    The connection is free for the next request if the body was read to its end, and closed otherwise.
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
    """`readinto` of the standard library's response below: urllib3's own reads into new memory and copies from there."""
    response = getattr(stream, "_fp", None)
    if isinstance(response, http.client.HTTPResponse):
        return response.readinto
    return lambda buffer: _copied(stream, buffer)


def _copied(stream: Any, buffer: memoryview) -> int:
    piece = stream.read(min(len(buffer), _PIECE))
    buffer[: len(piece)] = piece
    return len(piece)
