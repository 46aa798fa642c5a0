"""`JsonLines`: a file of JSON lines, for everything that has no tracker of its own."""

from __future__ import annotations

import json
import os
from dataclasses import asdict

from dcp_mem.manager.tracker import Event


class JsonLines:
    """Append each event to a file, as a JSON object on its own line.

    An object has the fields of `Event`, and "bytes_per_second". The file is opened anew for each
    line, so it may be moved away at any time.

    Args:
        path: The file; its directory has to exist.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.path.abspath(os.path.expanduser(path))

    def track(self, event: Event) -> None:
        facts = asdict(event)
        facts["bytes"] = facts.pop("nbytes")
        line = json.dumps({**facts, "bytes_per_second": event.throughput}) + "\n"
        # One unbuffered write, so that no other process's line gets in between.
        with open(self._path, "ab", buffering=0) as stream:
            stream.write(line.encode())

    def close(self) -> None:
        return
