"""Streams that torch.save has written: read back, damaged ones, and those that are refused."""

from __future__ import annotations

import io
import pickle
import threading
import zipfile
from typing import Any

import torch

from dcp_mem.format.harmless_kinds import HarmlessKinds

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
