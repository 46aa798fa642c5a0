"""A file of JSON lines, for everything that has no tracker of its own."""

from __future__ import annotations

import json
import os
from dataclasses import asdict

from dcp_mem.trackers.base import Event


class JsonLines:
    """Appends each event to a file, as a JSON object on a line of its own: the fields of `Event`, and "bytes_per_second".

    The file is opened anew for each line, so it may be moved away at any time. Its directory has to be there.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.path.abspath(path)

    def track(self, event: Event) -> None:
        facts = asdict(event)
        facts["bytes"] = facts.pop("nbytes")
        line = json.dumps({**facts, "bytes_per_second": event.throughput}) + "\n"
        with open(self._path, "ab", buffering=0) as stream:  # one write, lest another process's line get into it
            stream.write(line.encode())

    def close(self) -> None:
        return
