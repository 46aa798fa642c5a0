"""The words of a pickle: what writes a value, a value that is referred to later, or many records of one form at once."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from dcp_mem.format.packed import Ints

Matrix = npt.NDArray[np.uint8]
Column = npt.NDArray[Any]
"""One little-endian number a record."""
LONG8 = pickle.LONG1 + b"\x08"
"""An integer of eight bytes, whatever its value."""
NEW = pickle.EMPTY_TUPLE + pickle.NEWOBJ
"""Makes an object of the class before it, without calling its `__init__`."""
STATE, BUILD = pickle.EMPTY_DICT + pickle.MARK, pickle.SETITEMS + pickle.BUILD
"""Around the attributes of an object that has just been made."""
_LARGEST_BININT = (1 << 31) - 1
_LARGEST_LONG1 = 255
_LARGEST_BINGET = 255


class Memo:
    """What a pickle writes in front, once, and then refers to by number.

    first: the first number that isn't taken. data: what is written so far; it leaves nothing on the unpickler's stack.
    """

    def __init__(self, first: int) -> None:
        self.data = bytearray()
        self._next = first
        self._shared: dict[bytes, bytes] = {}

    def share(self, code: bytes) -> bytes:
        """What stands for the value that `code` writes."""
        if code not in self._shared:
            number = self.keep(code)
            is_short = number <= _LARGEST_BINGET
            self._shared[code] = (
                pickle.BINGET + bytes([number]) if is_short else pickle.LONG_BINGET + struct.pack("<I", number)
            )
        return self._shared[code]

    def keep(self, code: bytes) -> int:
        """The number of the value that `code` writes."""
        return int(self.keep_all([code])[0])

    def keep_all(self, codes: Sequence[bytes]) -> Ints:
        """The numbers of the values that these write."""
        numbers = np.arange(self._next, self._next + len(codes))
        self._next += len(codes)
        puts = slices(records(len(codes), pickle.LONG_BINPUT, short(numbers), pickle.POP))
        self.data += b"".join(chain.from_iterable(zip(codes, puts, strict=True)))
        return numbers


def refer(numbers: Ints) -> list[bytes]:
    """What stands for each of these numbers of the memo."""
    return slices(records(len(numbers), pickle.LONG_BINGET, short(numbers)))


def global_name(module: str, name: str) -> bytes:
    return pickle.GLOBAL + f"{module}\n{name}\n".encode()


def string(text: str) -> bytes:
    return strings([text])[0]


def strings(texts: Iterable[str]) -> list[bytes]:
    encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
    lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
    heads = slices(records(len(encoded), pickle.BINUNICODE, short(lengths)))
    return [head + text for head, text in zip(heads, encoded, strict=True)]


def integer(value: int) -> bytes:
    """Any integer, in as many bytes as it takes."""
    if -_LARGEST_BININT <= value <= _LARGEST_BININT:
        return pickle.BININT + struct.pack("<i", value)
    length = value.bit_length() // 8 + 1
    head = pickle.LONG1 + bytes([length]) if length <= _LARGEST_LONG1 else pickle.LONG4 + struct.pack("<i", length)
    return head + value.to_bytes(length, "little", signed=True)


def integers(column: Ints) -> tuple[bytes, Column]:
    """How to write these integers, all with the same number of bytes: the opcode, and what stands behind it."""
    if int(column.max(initial=0)) > _LARGEST_BININT:
        return LONG8, column.astype("<i8")
    return pickle.BININT, column.astype("<i4")


def short(column: Ints) -> Column:
    """As the four bytes of a length, or of a number in the memo."""
    return column.astype("<u4")


def records(rows: int, *pieces: bytes | Column) -> Matrix:
    """Records that are the same but for the columns among the pieces, as uint8[rows, bytes]."""
    matrix = np.empty((rows, width(pieces)), np.uint8)
    start = 0
    for piece in pieces:
        stop = start + width([piece])
        matrix[:, start:stop] = (
            np.frombuffer(piece, np.uint8)
            if isinstance(piece, bytes)
            else piece.view(np.uint8).reshape(rows, piece.itemsize)
        )
        start = stop
    return matrix


def width(pieces: Sequence[bytes | Column]) -> int:
    """Bytes that these pieces of a record take."""
    return sum(len(piece) if isinstance(piece, bytes) else piece.dtype.itemsize for piece in pieces)


def slices(matrix: Matrix) -> list[bytes]:
    """Each record on its own."""
    data, step = matrix.tobytes(), matrix.shape[1]
    return [data[start : start + step] for start in range(0, len(data), step)]
