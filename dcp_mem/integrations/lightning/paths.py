"""Translate Lightning's paths into names of checkpoints; the address of the newest one."""

from __future__ import annotations

import datetime as dt
import hashlib
import os
from typing import Any
from urllib.parse import quote

import fsspec
from fsspec.spec import AbstractFileSystem

from dcp_mem.config import root_url

PROTOCOL = "dcp-mem"
NEWEST = f"{PROTOCOL}://newest"
"""As `ckpt_path=`: the newest whole checkpoint, or nothing if there is none yet."""

_ALLOWED = "_.=+,@~:-"
_FIRST = ".:-"


def directory_of(job: str) -> str:
    """Return the address of a `MemoryCheckpoint` without a dirpath."""
    return f"{PROTOCOL}://job/{job}"


def name_of(path: str | os.PathLike[str], root: str | None) -> str:
    """Return a checkpoint's name in its job.

    What lies under the job's root is named as it is there, with slashes as %2F. From elsewhere two
    files of one name may come: such a name ends in "@" and a checksum of its directory.
    """
    text = os.fspath(path)
    protocol, separator, rest = text.partition("://")
    if separator and protocol == PROTOCOL:
        return _quoted(rest.split("/", 2)[-1])
    if "/" not in text:
        return _quoted(text)
    text = root_url(text) or ""
    directory, _, base = text.rpartition("/")
    # Only the directory's: a link is a name of its own.
    real = f"{_real(directory)}/{base}"
    for one, other in ((text, root), (real, _real(root or ""))):
        if other and one.startswith(f"{other}/"):
            return _quoted(one[len(other) + 1 :])
    return f"{_quoted(base)}@{hashlib.sha256(_real(directory).encode()).hexdigest()[:8]}"


def is_local(path: str | os.PathLike[str]) -> bool:
    """Tell whether this is a path of the machine's file system, and no URL."""
    return "://" not in os.fspath(path)


def is_file(path: str | os.PathLike[str]) -> bool:
    """Tell whether this is a file, as Lightning itself writes them; ours are directories."""
    return is_local(path) and os.path.isfile(path)


def is_link(path: str | os.PathLike[str]) -> bool:
    """Tell whether this is a link, as `ModelCheckpoint(save_last="link")` makes them."""
    return is_local(path) and os.path.islink(path)


def target_of(path: str | os.PathLike[str]) -> str:
    """Return what a link of Lightning's points to, even if nothing is there; else the path."""
    text = os.fspath(path)
    if not is_link(text):
        return text
    return os.path.normpath(os.path.join(_real(os.path.dirname(text)), os.readlink(text)))


def _real(path: str) -> str:
    return path if "://" in path else os.path.realpath(path) if path else ""


def _quoted(name: str) -> str:
    quoted = quote(name, safe=_ALLOWED)
    return f"%{ord(quoted[0]):02X}{quoted[1:]}" if quoted[:1] and quoted[0] in _FIRST else quoted


class _Jobs(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """The file system of our addresses: it says that the newest checkpoint is always there.

    Each rank asks before there is a process group. If ranks went by what they see themselves, a
    node that has lost its memory would begin anew while the others resume; so they find out
    together, when they load.
    """

    protocol = PROTOCOL

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        if path.rstrip("/").rpartition("/")[2] != NEWEST.rpartition("/")[2]:
            raise FileNotFoundError(path)
        return {"name": path, "size": 0, "type": "directory"}

    def modified(self, path: str) -> dt.datetime:
        return dt.datetime.now(dt.timezone.utc)


fsspec.register_implementation(PROTOCOL, _Jobs, clobber=True)
