"""Streams that torch.save has written: damaged ones, and those that torch.load refuses."""

from __future__ import annotations

import io
import zipfile

_MARK = "WeightsUnpickler error: "


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
