"""Streams that torch.save has written: read back, damaged ones, and those that are refused."""

from __future__ import annotations

import datetime as dt
import io
import pathlib
import pickle
import threading
import uuid
import zipfile
from collections import defaultdict, deque
from collections.abc import Callable
from functools import cache, partial
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
    stand_ins: dict[int, tuple[Any, Callable[[Any], Any]]] = {}

    # Torch fills lists and dicts alone: they stand for deques and defaultdicts, until all is read.
    def a_deque(items: Any = (), most: int | None = None) -> list[Any]:
        container = list(items)
        stand_ins[id(container)] = container, partial(deque, maxlen=most)
        return container

    def a_defaultdict(make: Any = None) -> dict[Any, Any]:
        container: dict[Any, Any] = {}
        stand_ins[id(container)] = container, partial(defaultdict, make)
        return container

    kinds = ((a_deque, "collections.deque"), (a_defaultdict, "collections.defaultdict"))
    with (
        _safe_globals_guard,
        torch.serialization.safe_globals(_not_known_yet([*_harmless(), *kinds])),
    ):
        value = torch.load(stream, map_location, weights_only=True)
    return _without_stand_ins(value, stand_ins, {}) if stand_ins else value


_safe_globals_guard = threading.Lock()  # torch has one set of safe globals for all threads


def _not_known_yet(kinds: list[Any]) -> list[Any]:
    """Return those that the user hasn't admitted: torch forgets what it was given for a while."""
    known = torch.serialization.get_safe_globals()
    return [kind for kind in kinds if kind not in known]


@cache
def _harmless() -> list[Any]:
    """Return classes and functions that can do no harm, as `safe_globals` takes them."""
    dtypes = {type(np.dtype(code)) for code in "?bhilqBHILQefdgFDGSUMm"}
    paths = (pathlib.PosixPath, pathlib.PurePosixPath)
    scalar, array = np.float64().__reduce__()[0], np.zeros(0).__reduce__()[0]
    return [
        *dtypes,
        np.ndarray,
        (_plain_dtype, "numpy.dtype"),
        # numpy 1 and numpy 2 have these in other places.
        *((scalar, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
        *((array, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")),
        *((path, f"{module}.{path.__name__}") for path in paths for module in _PATHLIB),
        dt.datetime,
        dt.date,
        dt.time,
        dt.timedelta,
        dt.timezone,
        uuid.UUID,
        *(range, slice, frozenset, bytes, io.BytesIO),
        *(bool, int, float, str, list, dict, set, tuple),  # a defaultdict's factory
    ]


_PATHLIB = ("pathlib", "pathlib._local")  # Python 3.13 has the second


def _plain_dtype(*args: Any) -> np.dtype[Any]:
    found: np.dtype[Any] = np.dtype(*args)
    if found.hasobject:
        raise pickle.UnpicklingError("a numpy array of objects")
    return found


def _without_stand_ins(
    value: Any, stand_ins: dict[int, tuple[Any, Callable[[Any], Any]]], done: dict[int, Any]
) -> Any:
    """Return a value with what its stand-ins stand for."""
    if id(value) in done:
        return done[id(value)]
    again = partial(_without_stand_ins, stand_ins=stand_ins, done=done)
    result = value
    if type(value) is tuple:
        return tuple(map(again, value))
    if isinstance(value, (list, dict)):
        if id(value) in stand_ins:
            result = stand_ins[id(value)][1](())
        done[id(value)] = result
        if isinstance(value, dict):
            result.update({key: again(one) for key, one in value.items()})
        else:
            items = [again(one) for one in value]
            result.clear()
            result.extend(items)
    return result


# -- judging ---------------------------------------------------------------------------------------


def is_whole(stream: bytes) -> bool:
    """Return whether a stream is a zip whose every record has the checksum that torch gave it.

    What can't be unpickled although its stream is whole was saved like that.

    Args:
        stream: All of it.
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

    Args:
        error: What torch raised.
    """
    lines = str(error).strip().split("\n")
    telling = (line for line in lines[1:] if _MARK in line or " GLOBAL " in line)
    told = next(telling, lines[0]).strip().removeprefix(_MARK)
    return told.partition(". Please use")[0]
