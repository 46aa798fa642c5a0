"""Sizes that a file claims, held against what there is before anything is allocated for them.

Whoever can write to storage can claim any size: a few bytes of a pickle can ask for the memory of
the whole machine, and so can a small zip that unpacks to gigabytes.
"""

from __future__ import annotations

import io
import operator
import pickle
import pickletools
import zipfile
from typing import Any

from dcp_mem.errors import SizeRefused

_FILE_SIZE = operator.attrgetter("file_size")
_LENGTH_BYTES = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}
_LINE, _TWO_LINES, _LENGTH = -1, -2, -10
"""Kinds of arguments without a fixed size. `_LENGTH - n`: a length of n bytes comes before it."""


def _argument_kinds() -> list[int]:
    """Return for each opcode the bytes of its argument, or its kind."""
    kinds = [0] * 256
    for code in pickletools.opcodes:
        if code.arg is None:
            continue
        size = code.arg.n
        if code.arg.name == "stringnl_noescape_pair":
            size = _TWO_LINES
        elif size == pickletools.UP_TO_NEWLINE:
            size = _LINE
        elif size in _LENGTH_BYTES:
            size = _LENGTH - _LENGTH_BYTES[size]
        kinds[ord(code.code)] = size
    return kinds


_KINDS = _argument_kinds()
_PUT, _LONG_BINPUT, _STOP = pickle.PUT[0], pickle.LONG_BINPUT[0], pickle.STOP[0]


def refuse_greedy_pickle(data: bytes, what: str) -> None:
    """Make sure that unpickling takes memory in proportion to the pickle.

    Python's unpickler makes its memo as long as the largest number that a pickle names, and byte
    arrays as long as the pickle says.

    Raises SizeRefused.
    """
    kinds, size, position = _KINDS, len(data), 0
    while position < size:
        opcode = data[position]
        kind = kinds[opcode]
        start = position + 1
        if opcode == _STOP:
            return
        if opcode == _LONG_BINPUT:
            _check(int.from_bytes(data[start : start + 4], "little"), size, what)
        if kind >= 0:
            position = start + kind
        elif kind <= _LENGTH:
            position = start + _LENGTH - kind
            length = int.from_bytes(data[start:position], "little")
            _check(position + length, size, what)
            position += length
        else:
            position = _end_of_line(data, start)
            if opcode == _PUT:
                _check(_number(data[start:position]), size, what)
            if kind == _TWO_LINES:
                position = _end_of_line(data, position)


def _end_of_line(data: bytes, start: int) -> int:
    return data.find(b"\n", start) + 1 or len(data)


def _number(line: bytes) -> int:
    try:
        return int(line)
    except ValueError:  # the unpickler says so
        return 0


def refuse_packed_stream(data: memoryview, what: str) -> None:
    """Make sure that a `torch.save` stream doesn't unpack to more than it is.

    Torch's own are zips without compression; older ones are no zips.

    Raises SizeRefused.
    """
    if bytes(data[:2]) != b"PK":
        return
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            unpacked = sum(map(_FILE_SIZE, archive.infolist()))
    except (zipfile.BadZipFile, ValueError, EOFError, NotImplementedError):
        return  # torch says what is wrong with it
    _check(unpacked, len(data), what)


def refuse_beyond_file(offset: Any, length: Any, nbytes: int, what: str) -> None:
    """Make sure that an item lies within its file.

    Raises SizeRefused.
    """
    if type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
        raise SizeRefused(f"{what} at {offset!r}", 0, nbytes)
    _check(offset + length, nbytes, what)


def _check(claimed: int, held: int, what: str) -> None:
    if claimed > held:
        raise SizeRefused(what, claimed, held)
