"""The streams of byte items: what a state dict holds besides tensors.

Most are plain values, such as the learning rate of a parameter group, and most saves have the same
ones. The stream of a plain value is made once.
"""

from __future__ import annotations

import io
import pickle
from functools import lru_cache
from typing import Any

import torch

_SCALARS = frozenset({bool, int, float, complex, str, bytes, type(None)})
_DEPTH = 3
"""Of lists, tuples and dicts within each other."""
_SMALL_BYTES, _MOST_BYTES = 1 << 10, 256 << 10
"""Of a pickled plain value: below the first, many are remembered; up to the other, a few."""


def stream_of(value: Any) -> io.BytesIO:
    """Return a value's bytes, as `torch.save` writes them.

    Raises Exception.
    """
    if is_plain_value(value):
        pickled = pickle.dumps(value, 2)
        if len(pickled) <= _SMALL_BYTES:
            return io.BytesIO(_small_stream(pickled))
        if len(pickled) <= _MOST_BYTES:
            return io.BytesIO(_large_stream(pickled))
    return _stream_of(value)


def is_plain_value(value: Any, depth: int = _DEPTH) -> bool:
    """Tell whether a value is a number or text, or lists, tuples and dicts of such."""
    kind = type(value)
    if kind in _SCALARS:
        return True
    if kind not in (tuple, list, dict) or not depth:
        return False
    if kind is dict and not all(is_plain_value(one, depth - 1) for one in value.values()):
        return False
    return _SCALARS.issuperset(map(type, value)) or all(
        is_plain_value(one, depth - 1) for one in value
    )


def _plain_stream(pickled: bytes) -> bytes:
    return _stream_of(pickle.loads(pickled)).getvalue()


_small_stream, _large_stream = lru_cache(1024)(_plain_stream), lru_cache(16)(_plain_stream)


def _stream_of(value: Any) -> io.BytesIO:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream
