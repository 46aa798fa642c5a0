"""Find the byte items that a load refuses by default, without torch where their pickles tell."""

from __future__ import annotations

import io
import pickletools
import re
import zipfile
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress

from dcp_mem.policy.pieces import merged

Location = tuple[str, int, int]
"""File, offset and bytes of an item's stream."""
_MOST_NBYTES = 64 << 20
"""Of byte items that are read, all together."""
_PLAIN = re.compile(
    "PROTO|STOP|MARK|NONE|NEWTRUE|NEWFALSE|BININT[12]?|LONG1|BINFLOAT|BINUNICODE|EMPTY_(DICT|LIST|"
    "TUPLE)|TUPLE[123]?|APPENDS?|SETITEMS?|(LONG_)?BIN(PUT|GET)"
)
"""Opcodes of numbers, texts and containers."""


def refusals_of(
    locations: Mapping[str, Location], read: Callable[[str, int, int], bytes]
) -> dict[str, str]:
    """Return by name why a load refuses an item; items that can't be read here aren't judged.

    `read`: returns bytes [start, stop) of a file, or b"".
    """
    by_file: dict[str, dict[str, tuple[int, int]]] = {}
    left = _MOST_NBYTES
    for name, (file, offset, nbytes) in locations.items():
        if nbytes <= left:
            left -= nbytes
            by_file.setdefault(file, {})[name] = offset, offset + nbytes
    found: dict[str, str] = {}
    for file, items in by_file.items():
        waiting = deque(sorted((low, high, name) for name, (low, high) in items.items()))
        for start, stop in merged(items.values()):
            data = read(file, start, stop)
            while waiting and waiting[0][0] < stop:
                low, high, name = waiting.popleft()
                if start <= low and len(data) == stop - start:
                    found[name] = _why_refused(data[low - start : high - start])
    return {name: why for name, why in found.items() if why}


def _why_refused(stream: bytes) -> str:
    if _is_plain(stream):
        return ""
    # Imported here because it takes seconds.
    from dcp_mem.format.saved_streams import is_whole, read_stream, why_refused

    try:
        read_stream(io.BytesIO(stream), weights_only=True, map_location="cpu")
    except Exception as error:
        return why_refused(error) if is_whole(stream) else ""
    return ""


def _is_plain(stream: bytes) -> bool:
    with suppress(Exception), zipfile.ZipFile(io.BytesIO(stream)) as archive:
        (pickled,) = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        opcodes = pickletools.genops(archive.read(pickled))
        return all(_PLAIN.fullmatch(opcode.name) for opcode, _, _ in opcodes)
    return False
