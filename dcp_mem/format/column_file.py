"""Columns of integers and blobs of bytes in one file: versioned, checked, mappable, free of pickle.

The file holds a magic word, the CRC32C of all that follows, the length of a JSON head, the head,
and then what the head's table lists: each column at a multiple of 64 bytes, in the smallest type
that holds its values.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from itertools import chain
from mmap import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

from dcp_mem.common.value_class import value_class
from dcp_mem.errors import ManifestInvalid
from dcp_mem.format.checksums import checksum
from dcp_mem.format.layout import align

Ints = npt.NDArray[np.int64]
_MAGIC = b"dcpmemC1"
_FRAME = struct.Struct("<8sII")
_CHECKED = _FRAME.size - 4
"""The checksum covers everything from this offset on: the head's length, the head, the body."""
_TYPES = ("<u1", "<i1", "<u2", "<i2", "<u4", "<i4", "<i8")
_BLOB = "bytes"


@value_class(eq=False)
class Packed:
    """The content of a file."""

    facts: Mapping[str, Any]
    columns: Mapping[str, Ints]  # integers, as int64, so that sums don't overflow
    blobs: Mapping[str, bytes]


def pack(packed: Packed, version: int) -> bytes:
    """Return the file; the same content gives the same bytes."""
    table: dict[str, tuple[str, Sequence[int], int]] = {}
    body = bytearray()
    for name, column in packed.columns.items():
        kind = _smallest(column)
        table[name] = (kind, column.shape, len(body))
        body += column.astype(kind).tobytes()
        body += bytes(align(len(body)) - len(body))
    for name, blob in packed.blobs.items():
        table[name] = (_BLOB, (len(blob),), len(body))
        body += blob
        body += bytes(align(len(body)) - len(body))
    facts = {"version": version, "table": table, "facts": packed.facts}
    # Not in ASCII: two escaped surrogates beside each other would be read as one character.
    head = json.dumps(facts, separators=(",", ":"), ensure_ascii=False).encode(
        "utf-8", "surrogatepass"
    )
    head += b" " * (align(_FRAME.size + len(head)) - _FRAME.size - len(head))
    data = bytearray(_FRAME.pack(_MAGIC, 0, len(head)) + head + body)
    struct.pack_into("<I", data, _CHECKED - 4, checksum(memoryview(data)[_CHECKED:]))
    return bytes(data)


def unpack(data: bytes | memoryview | mmap, version: int) -> Packed:
    """Read what `pack` wrote; nothing of `data` is kept.

    `version`: the format version that the caller knows. Raises ManifestInvalid.
    """
    view = memoryview(data).cast("B")
    if len(view) < _FRAME.size:
        raise ManifestInvalid("a catalog is cut short")
    magic, crc, length = _FRAME.unpack_from(view)
    if magic != _MAGIC:
        raise ManifestInvalid("not a catalog of dcp_mem")
    if checksum(view[_CHECKED:]) != crc:
        raise ManifestInvalid("a catalog is damaged (checksum)")
    try:
        head = json.loads(bytes(view[_FRAME.size : _FRAME.size + length]))
        if head["version"] != version:
            raise ManifestInvalid(
                f"a catalog of version {head['version']}, not {version}: use the "
                "dcp_mem that wrote it, or torch's own readers"
            )
        return _unpack(head, view[_FRAME.size + length :])
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ManifestInvalid(f"a catalog's head is damaged: {error}") from None


def _unpack(head: Mapping[str, Any], body: memoryview) -> Packed:
    columns: dict[str, Ints] = {}
    blobs: dict[str, bytes] = {}
    left = len(body)
    for name, (kind, shape, offset) in head["table"].items():
        if kind not in (_BLOB, *_TYPES):
            raise ValueError(f"a column of type {kind}")
        nbytes = math.prod(shape) * (1 if kind == _BLOB else np.dtype(kind).itemsize)
        if min(shape) < 0 or not 0 <= offset <= offset + nbytes <= len(body):
            raise ValueError(f"{name} lies outside of the catalog")
        left -= nbytes
        if left < 0:
            raise ValueError("columns overlap")
        piece = body[offset : offset + nbytes]
        if kind == _BLOB:
            blobs[name] = bytes(piece)
        else:
            columns[name] = np.frombuffer(piece, kind).astype(np.int64).reshape(shape)
    return Packed(head["facts"], columns, blobs)


def matrix(columns: Mapping[str, Ints], name: str, rows: int) -> Ints:
    """Return a column that has so many rows.

    Raises KeyError, ValueError.
    """
    column = columns[name]
    if column.ndim != 2 or len(column) != rows:
        raise ValueError(f"{name} of another shape")
    return column


def padded(rows: Sequence[Sequence[int]], width: int, value: int) -> Ints:
    """Return rows of at most `width` integers as int64[rows, width], padded with `value`."""
    counts = np.fromiter(map(len, rows), np.int64, len(rows))
    result = np.full((len(rows), width), value, np.int64)
    integers = np.fromiter(chain.from_iterable(rows), np.int64, int(counts.sum()))
    result[np.arange(width) < counts[:, None]] = integers
    return result


def in_32_bits(column: Ints) -> Ints:
    """Return the same integers in 32 bits, where they fit: half the memory."""
    least, most = column.min(initial=0), column.max(initial=0)
    fits = np.iinfo(np.int32).min <= least and most <= np.iinfo(np.int32).max
    return column.astype(np.int32) if fits else column


def distinct_rows(keys: Ints) -> tuple[Ints, Ints]:
    """Return the first of each kind of equal rows, in ascending order; and each row's kind."""
    varies = (keys != keys[:1]).any(axis=0)
    varies[-1] = True
    keys = keys[:, varies]
    order = np.lexsort(keys.T[::-1])
    is_new = np.ones(len(keys), bool)
    found = keys[order]
    is_new[1:] = (found[1:] != found[:-1]).any(axis=1)
    kinds = np.empty(len(keys), np.int64)
    kinds[order] = np.cumsum(is_new) - 1
    return order[is_new], kinds


def _smallest(column: Ints) -> str:
    least, most = int(column.min(initial=0)), int(column.max(initial=0))
    return next(
        kind for kind in _TYPES if np.iinfo(kind).min <= least and most <= np.iinfo(kind).max
    )
