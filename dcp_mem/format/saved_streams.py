"""Streams that torch.save has written, told from damaged ones."""

from __future__ import annotations

import io
import zipfile


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
