"""What is mounted where a path lies."""

from __future__ import annotations

import os

from dcp_mem.common.value_class import value_class


@value_class
class Mount:
    directory: str
    kind: str  # its file system; "" where the system doesn't tell
    source: str
    options: tuple[str, ...]

    @property
    def program(self) -> str:
        """What serves a FUSE mount; "" for all other file systems."""
        fuse, _, program = self.kind.partition(".")
        return (program or self.source) if fuse == "fuse" else ""


def mount_of(path: str) -> Mount:
    """Return the mount that holds a path."""
    found, path = Mount("", "", "", ()), os.path.realpath(path)
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as stream:
            lines = [line.split() for line in stream]
    except OSError:
        return found
    for fields in lines:
        directory = fields[4].replace("\\040", " ")
        inside = path == directory or path.startswith(directory.rstrip("/") + "/")
        if inside and len(directory) >= len(found.directory):
            kind, source, options = fields[fields.index("-") + 1 :][:3]
            found = Mount(directory, kind, source, (*fields[5].split(","), *options.split(",")))
    return found
