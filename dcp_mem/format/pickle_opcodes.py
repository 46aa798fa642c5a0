"""Opcodes of a pickle: for one value, for values that are shared, and for many records at once."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from dcp_mem.format.column_file import Ints

Matrix = npt.NDArray[np.uint8]
Column = npt.NDArray[Any]
"""One little-endian number for each record."""
LONG8 = pickle.LONG1 + b"\x08"
"""An integer of eight bytes, whatever its value."""
NEW = pickle.EMPTY_TUPLE + pickle.NEWOBJ
"""Make an object of the class on the stack, without calling its `__init__`."""
STATE, BUILD = pickle.EMPTY_DICT + pickle.MARK, pickle.SETITEMS + pickle.BUILD
"""Stand around the attributes of an object that has just been made."""
_LARGEST_BININT = (1 << 31) - 1
_LARGEST_LONG1 = 255
_LARGEST_BINGET = 255


class Memo:
    """Values that a pickle writes once, at its beginning, and then refers to by number.

    `data`: the opcodes so far; they leave nothing on the unpickler's stack.
    """

    def __init__(self, first: int) -> None:
        self.data = bytearray()
        self._next = first
        self._shared: dict[bytes, bytes] = {}

    def share(self, code: bytes) -> bytes:
        """Return the opcodes that refer to the value that `code` writes; write it if it is new."""
        if code not in self._shared:
            number = self.keep(code)
            is_short = number <= _LARGEST_BINGET
            self._shared[code] = (
                pickle.BINGET + bytes([number])
                if is_short
                else pickle.LONG_BINGET + struct.pack("<I", number)
            )
        return self._shared[code]

    def keep(self, code: bytes) -> int:
        """Write a value and return its number."""
        return int(self.keep_all([code])[0])

    def keep_all(self, codes: Sequence[bytes]) -> Ints:
        """Write values and return their numbers."""
        numbers = np.arange(self._next, self._next + len(codes))
        self._next += len(codes)
        puts = slices(records(len(codes), pickle.LONG_BINPUT, short(numbers), pickle.POP))
        self.data += b"".join(chain.from_iterable(zip(codes, puts, strict=True)))
        return numbers


def refer(numbers: Ints) -> list[bytes]:
    """Return the opcodes that refer to each of these numbers of the memo."""
    return slices(records(len(numbers), pickle.LONG_BINGET, short(numbers)))


def global_name(module: str, name: str) -> bytes:
    """Return the opcodes of a class or function."""
    return pickle.GLOBAL + f"{module}\n{name}\n".encode()


def string(text: str) -> bytes:
    """Return the opcodes of a text."""
    return strings([text])[0]


def strings(texts: Iterable[str]) -> list[bytes]:
    """Return the opcodes of each text."""
    encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
    lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
    heads = slices(records(len(encoded), pickle.BINUNICODE, short(lengths)))
    return [head + text for head, text in zip(heads, encoded, strict=True)]


def integer(value: int) -> bytes:
    """Return the opcodes of any integer, in as many bytes as it takes."""
    if -_LARGEST_BININT <= value <= _LARGEST_BININT:
        return pickle.BININT + struct.pack("<i", value)
    length = value.bit_length() // 8 + 1
    head = (
        pickle.LONG1 + bytes([length])
        if length <= _LARGEST_LONG1
        else pickle.LONG4 + struct.pack("<i", length)
    )
    return head + value.to_bytes(length, "little", signed=True)


def integers(column: Ints) -> tuple[bytes, Column]:
    """Return the opcode and the operands of these integers, all with the same number of bytes."""
    if int(column.max(initial=0)) > _LARGEST_BININT:
        return LONG8, column.astype("<i8")
    return pickle.BININT, column.astype("<i4")


def short(column: Ints) -> Column:
    """Return the integers in four bytes each, as lengths and numbers of the memo have.

    `column`: integers of at least 0, below 2**32.
    """
    return column.astype("<u4")


def records(rows: int, *pieces: bytes | Column) -> Matrix:
    """Return records as uint8[rows, bytes].

    `pieces`: bytes that all records have, and columns with a number for each.
    """
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
    """Return the bytes that these pieces of a record take."""
    return sum(len(piece) if isinstance(piece, bytes) else piece.dtype.itemsize for piece in pieces)


def slices(matrix: Matrix) -> list[bytes]:
    """Return each record on its own.

    `matrix`: uint8[records, bytes], as `records` returns it.
    """
    data, step = matrix.tobytes(), matrix.shape[1]
    return [data[start : start + step] for start in range(0, len(data), step)]
