"""Streams that torch.save has written: read back, damaged ones, and those that are refused."""

from __future__ import annotations

import datetime as dt
import io
import math
import pathlib
import pickle
import re
import threading
import uuid
import zipfile
from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

_MARK = "WeightsUnpickler error: "


# -- reading back ----------------------------------------------------------------------------------


def read_stream(stream: io.BytesIO, *, weights_only: bool, map_location: Any = None) -> Any:
    """Return the value of a stream; `weights_only` admits what torch does, and harmless kinds."""
    if weights_only:
        try:
            return torch.load(stream, map_location, weights_only=True)
        except pickle.UnpicklingError:
            stream.seek(0)
            return _read_harmless(stream, map_location)
    return torch.load(stream, map_location, weights_only=False)


def _read_harmless(stream: io.BytesIO, map_location: Any) -> Any:
    """Return the value of a stream that may also hold paths, dates, numpy's values and the like."""
    kinds = HarmlessKinds()
    with _safe_globals_guard, torch.serialization.safe_globals(_not_known_yet(kinds.admitted())):
        value = torch.load(stream, map_location, weights_only=True)
    return kinds.value_of(value)


_safe_globals_guard = threading.Lock()  # torch has one set of safe globals for all threads


def _not_known_yet(kinds: list[Any]) -> list[Any]:
    """Return those that the user hasn't admitted: torch forgets what it was given for a while."""
    known = torch.serialization.get_safe_globals()
    return [kind for kind in kinds if kind not in known]


# -- judging ---------------------------------------------------------------------------------------


def is_whole(stream: bytes) -> bool:
    """Return whether a stream is a zip whose every record has the checksum that torch gave it.

    What can't be unpickled although its stream is whole was saved like that.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(stream)) as archive:
            records = archive.infolist()
            return bool(records) and archive.testzip() is None
    except Exception:  # the zipfile module raises errors of many kinds
        return False


def why_refused(error: Exception) -> str:
    """Return in one sentence why `torch.load(weights_only=True)` refused a stream.

    torch's text begins with a page of advice; the class that it stumbled over comes last.
    """
    lines = str(error).strip().split("\n")
    telling = (line for line in lines[1:] if _MARK in line or " GLOBAL " in line)
    told = next(telling, lines[0]).strip().removeprefix(_MARK)
    return told.partition(". Please use")[0]


_MOST = 1 << 20
"""Numbers of a range: torch's own kinds may make a list of them."""
_PATHLIB = ("pathlib", "pathlib._local")  # Python 3.13 has the second
_FACTORIES = (bool, int, float, str, list, dict, set, tuple)


def _refuse(what: str) -> Any:
    raise pickle.UnpicklingError(what)


class _Factory:
    """A class that a defaultdict calls; nothing here does."""

    def __init__(self, kind: type) -> None:
        self.kind = kind


class _Dtype:
    """A numpy dtype of plain elements; its state tells no more than the order of bytes."""

    def __init__(self, code: Any = "", *_: Any) -> None:
        if not isinstance(code, str) or not re.fullmatch(r"[biufcSUMm]\d+|[?]", code):
            _refuse(f"a numpy array of {code!r}")
        self.dtype: np.dtype[Any] = np.dtype(code)

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, tuple) or len(state) < 5 or state[2:5] != (None, None, None):
            _refuse("a numpy dtype with fields")
        if self.dtype.kind in "Mm":
            last: Any = state[-1]
            unit: Any = last[1] if isinstance(last, tuple) and len(last) == 2 else ()
            if not unit or not re.fullmatch(r"[A-Za-z]{1,7}", str(unit[0], "ascii")):
                _refuse("a numpy date without a unit")
            self.dtype = np.dtype(f"{self.dtype.kind}8[{str(unit[0], 'ascii')}]")
        if state[1] in ("<", ">"):
            self.dtype = self.dtype.newbyteorder(state[1])


class _Array:
    """A numpy array, of the bytes that it has."""

    def __init__(self, *_: Any) -> None:
        self.array: np.ndarray[Any, Any] | None = None

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, is_fortran, data = state
        plain = isinstance(kind, _Dtype) and isinstance(data, bytes) and isinstance(shape, tuple)
        if not plain or not all(isinstance(one, int) and one >= 0 for one in shape):
            _refuse("a numpy array of objects")
        if len(data) != math.prod(shape) * kind.dtype.itemsize:
            _refuse("a numpy array of another size than its bytes")
        found = np.frombuffer(data, kind.dtype) if data else np.zeros(0, kind.dtype)
        self.array = found.reshape(shape, order="F" if is_fortran else "C").copy("K")


def _scalar(kind: Any, data: Any) -> Any:
    if not isinstance(kind, _Dtype) or not isinstance(data, bytes):
        _refuse("a numpy object")
    if len(data) != kind.dtype.itemsize or not data:
        _refuse("a numpy number of another size than its bytes")
    return np.frombuffer(data, kind.dtype)[0]


def _range(*numbers: Any) -> range:
    made = range(*numbers)
    return made if not made[_MOST:] else _refuse(f"a range of more than {_MOST} numbers")


def _frozenset(items: Any = ()) -> frozenset[Any]:
    return frozenset(items) if type(items) in (list, tuple, set) else _refuse("a frozenset")


def _bytes() -> bytes:
    return b""  # torch makes all others


class HarmlessKinds:
    """The kinds that torch is told to admit for one stream, and the value read with them."""

    def __init__(self) -> None:
        self._stand_ins: dict[int, tuple[Any, Callable[[Any], Any]]] = {}

    def admitted(self) -> list[Any]:
        paths = (pathlib.PosixPath, pathlib.PurePosixPath)
        return [
            (_Dtype, "numpy.dtype"),
            (_Array, "numpy.ndarray"),
            # numpy 1 and numpy 2 have these in other places.
            *((_scalar, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
            *((_Array, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")),
            *((path, f"{module}.{path.__name__}") for path in paths for module in _PATHLIB),
            *(dt.datetime, dt.date, dt.time, dt.timedelta, dt.timezone),
            *(uuid.UUID, slice, io.BytesIO),
            (_range, "builtins.range"),
            (_frozenset, "builtins.frozenset"),
            (_bytes, "builtins.bytes"),
            (self._deque, "collections.deque"),
            (self._defaultdict, "collections.defaultdict"),
            *((_Factory(kind), f"builtins.{kind.__name__}") for kind in _FACTORIES),
        ]

    def _deque(self, items: Any = (), most: int | None = None) -> list[Any]:
        container = list(items) if type(items) in (list, tuple) else _refuse("a deque")
        self._stand_ins[id(container)] = container, partial(deque, maxlen=most)
        return container

    def _defaultdict(self, make: Any = None) -> dict[Any, Any]:
        container: dict[Any, Any] = {}
        kind = make.kind if isinstance(make, _Factory) else None
        if make is not None and kind is None:
            _refuse("a defaultdict of other values than numbers, texts and containers")
        self._stand_ins[id(container)] = container, partial(defaultdict, kind)
        return container

    def value_of(self, read: Any) -> Any:
        """Return what was read, with what its stand-ins stand for."""
        return self._exchanged(read, {})

    def _exchanged(self, value: Any, done: dict[int, Any]) -> Any:
        if id(value) in done:
            return done[id(value)][1]
        if isinstance(value, _Dtype):
            return value.dtype
        if isinstance(value, _Array):
            return value.array if value.array is not None else _refuse("a numpy array")
        if isinstance(value, _Factory):
            _refuse(f"the class {value.kind.__name__}")
        result = value
        if isinstance(value, (list, dict)):
            if id(value) in self._stand_ins:
                result = self._stand_ins[id(value)][1](())
            done[id(value)] = value, result
            if isinstance(value, dict):
                for key, one in list(value.items()):
                    result[key] = self._exchanged(one, done)
            else:
                items = [self._exchanged(one, done) for one in value]
                result.clear()
                result.extend(items)
        elif type(value) is tuple:
            result = tuple(self._exchanged(one, done) for one in value)
            done[id(value)] = value, result
        elif type(value) in (set, frozenset):
            result = type(value)(self._exchanged(one, done) for one in value)
        return result
