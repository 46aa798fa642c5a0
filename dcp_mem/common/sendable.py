"""Values as bytes, for other ranks: data that runs nothing, whoever has written it.

Plain values, NumPy's arrays of numbers, and classes that say so (`sendable`) can be sent; all else
is refused, on the sender by the name of its class. A message is

    length of the JSON, in eight bytes     JSON: the structure     bytes of arrays, in their order

In JSON, numbers, texts, booleans and None stand for themselves. All else is an array: a tag, and
what it is made of. Objects are numbered as they end; one that comes again is sent as its number.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from enum import Enum
from functools import cache
from itertools import chain, islice
from typing import Any, TypeVar

C = TypeVar("C", bound=type)
_PLAIN = {bool, int, float, str, type(None)}
_TUPLE, _LIST, _ROWS, _DICT, _BYTES, _ARRAY, _AGAIN = range(7)
_LENGTH_NBYTES = 8
_FEW = 16
"""Values of a sequence up to which each is looked at by itself."""
_NUMBERS = "biuf"
"""NumPy's kinds of elements that arrays may have: they are bytes and nothing else."""
_MOST_DIMENSIONS = 32


def _refuse(pairs: object) -> None:
    raise TypeError("an object of JSON")


_encode = json.JSONEncoder(separators=(",", ":")).encode
_decode = json.JSONDecoder(object_pairs_hook=_refuse).raw_decode
_Parts = Callable[[Any], Iterable[Any]]
_names: dict[type, tuple[str, _Parts]] = {}
_made_of: dict[str, Callable[..., Any]] = {}


def sendable(kind: C) -> C:
    """Let values of a class be sent: a dataclass, an enum or a named tuple of what can be sent."""
    if issubclass(kind, Enum):
        sendable_as(kind, lambda value: (value.value,), kind)
    elif issubclass(kind, tuple):
        sendable_as(
            kind,
            tuple,
            lambda *parts: kind._make(parts),  # type: ignore[attr-defined]
        )
    else:
        names = cache(lambda: [one.name for one in fields(kind)])  # type: ignore[arg-type]
        sendable_as(
            kind,
            lambda value: [getattr(value, name) for name in names()],
            lambda *parts: kind(**dict(zip(names(), parts, strict=True))),
        )
    return kind


def sendable_as(kind: type, parts_of: _Parts, made_of: Callable[..., Any]) -> None:
    """Let values of a class be sent as parts, of which the receiver makes them again."""
    name = kind.__qualname__
    if name in _made_of:
        raise ValueError(f"another {name} is sent already")
    _names[kind], _made_of[name] = (name, parts_of), made_of


sendable_as(set, list, lambda *parts: set(parts))
sendable_as(frozenset, list, lambda *parts: frozenset(parts))
sendable_as(range, lambda one: (one.start, one.stop, one.step), range)
sendable_as(Counter, lambda one: (dict(one),), Counter)


def encoded(value: Any) -> bytes:
    """Return a value as bytes; raise TypeError where a part of it can't be sent."""
    writer = _Writer()
    text = _encode(writer.packed(value)).encode("ascii")
    return b"".join([len(text).to_bytes(_LENGTH_NBYTES, "little"), text, *writer.blobs])


def decoded(data: Any) -> Any:
    """Return the value that is in a buffer; raise ValueError where none is."""
    view = memoryview(data)
    start = _LENGTH_NBYTES + int.from_bytes(view[:_LENGTH_NBYTES], "little")
    try:
        text = str(view[_LENGTH_NBYTES:start], "ascii")
        packed, end = _decode(text)
        reader = _Reader(view[start:])
        value = reader.unpacked(packed)
    except Exception as error:
        raise ValueError(f"what came is no message of a rank: {error}") from None
    if start > len(view) or end < len(text) or len(reader.blobs):
        raise ValueError("what came is no message of a rank: it has another length")
    return value


class _Writer:
    def __init__(self) -> None:
        self.blobs = list[Any]()
        self._sent = dict[int, tuple[int, Any]]()  # with the values, so that ids stay theirs

    def packed(self, value: Any) -> Any:
        kind, sent = type(value), self._sent
        if kind in _PLAIN:
            return value
        if id(value) in sent:
            return [_AGAIN, sent[id(value)][0]]
        if kind is tuple or kind is list:
            packed = self._sequence([_TUPLE if kind is tuple else _LIST], value)
        elif kind in _names:
            name, parts_of = _names[kind]
            packed = self._each([name], parts_of(value))
        elif kind is dict:
            packed = [_DICT, self.packed(list(value)), self.packed(list(value.values()))]
        elif kind is bytes or kind is bytearray:
            self.blobs.append(value)
            packed = [_BYTES, len(value)]
        else:
            packed = self._numbers(value)
            if type(packed) is not list:
                return packed
        sent[id(value)] = len(sent), value
        return packed

    def _numbers(self, value: Any) -> Any:
        # Not above: `dcp-mem --help` needs no NumPy, and the agent sends nothing.
        import numpy as np

        kind = type(value)
        if not isinstance(value, np.generic) and kind is not np.ndarray:
            raise TypeError(f"a {kind.__module__}.{kind.__qualname__} can't be sent to other ranks")
        if value.dtype.kind not in _NUMBERS:
            raise TypeError(f"NumPy's {value.dtype} can't be sent to other ranks")
        if kind is not np.ndarray:
            return value.item()
        self.blobs.append(value.tobytes())
        return [_ARRAY, value.dtype.str, *value.shape]

    def _sequence(self, packed: list[Any], values: Sequence[Any]) -> list[Any]:
        if len(values) > _FEW:
            kinds = set(map(type, values))
            if kinds <= _PLAIN:  # twenty thousand names at once
                packed += values
                return packed
            if kinds == {tuple}:
                flat = list(chain.from_iterable(values))
                if set(map(type, flat)) <= _PLAIN:
                    return [_ROWS, *packed, list(map(len, values)), flat]
        return self._each(packed, values)

    def _each(self, packed: list[Any], values: Iterable[Any]) -> list[Any]:
        pack = self.packed
        packed += [value if type(value) in _PLAIN else pack(value) for value in values]
        return packed


class _Reader:
    def __init__(self, blobs: memoryview) -> None:
        self.blobs = blobs
        self._came = list[Any]()

    def unpacked(self, packed: Any) -> Any:
        if type(packed) is not list:
            return packed
        tag = packed[0]
        if tag == _AGAIN:
            return self._came[_whole(packed[1])]
        value = self._made(tag, packed)
        self._came.append(value)
        return value

    def _made(self, tag: Any, packed: list[Any]) -> Any:
        del packed[0]
        if tag in (_ARRAY, _BYTES):
            return self._array(*packed) if tag == _ARRAY else bytes(self._blob(_whole(*packed)))
        if tag == _ROWS:
            return _rows(*packed)
        if len(packed) <= _FEW or list in set(map(type, packed)):
            unpack = self.unpacked
            packed = [unpack(one) if type(one) is list else one for one in packed]
        if tag == _TUPLE:
            return tuple(packed)
        if tag == _LIST:
            return packed
        return dict(zip(*packed, strict=True)) if tag == _DICT else _made_of[tag](*packed)

    def _array(self, code: str, *shape: int) -> Any:
        import numpy as np

        dtype = np.dtype(code)
        if dtype.kind not in _NUMBERS or len(shape) > _MOST_DIMENSIONS:
            raise TypeError(code)
        nbytes = dtype.itemsize * math.prod(map(_whole, shape))
        return np.frombuffer(self._blob(nbytes), dtype).reshape(shape).copy()

    def _blob(self, nbytes: int) -> memoryview:
        blob, self.blobs = self.blobs[:nbytes], self.blobs[nbytes:]
        if len(blob) != nbytes:
            raise LookupError("bytes that haven't come")
        return blob


def _rows(tag: int, lengths: list[int], flat: list[Any]) -> Any:
    if list in set(map(type, flat)) or sum(map(_whole, lengths)) != len(flat):
        raise TypeError("rows of other lengths")
    values = iter(flat)
    rows = [tuple(islice(values, length)) for length in lengths]
    return rows if tag == _LIST else tuple(rows)


def _whole(number: Any) -> int:
    if type(number) is not int or number < 0:
        raise TypeError(number)
    return number
