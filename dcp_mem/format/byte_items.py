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
_MOST_BYTES = 1 << 10


def stream_of(value: Any) -> io.BytesIO:
    """Return a value's bytes, as `torch.save` writes them.

    Args:
        value: Anything that can be pickled.

    Raises:
        Exception: What pickling raises.
    """
    if _is_plain(value):
        pickled = pickle.dumps(value, 2)
        if len(pickled) <= _MOST_BYTES:
            return io.BytesIO(_plain_stream(pickled))
    return _stream_of(value)


def _is_plain(value: Any) -> bool:
    kind = type(value)
    return kind in _SCALARS or (kind in (tuple, list) and _SCALARS.issuperset(map(type, value)))


@lru_cache(1024)
def _plain_stream(pickled: bytes) -> bytes:
    return _stream_of(pickle.loads(pickled)).getvalue()


def _stream_of(value: Any) -> io.BytesIO:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream
