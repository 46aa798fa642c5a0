"""Check a destination before the first save, without a request to it.

A flush to a URL that can't be written to fails for ever, hours after the mistake. One into a file
system that lives in the flushing process seems to succeed, and is gone with that process.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from dcp_mem.common.parallel import daemon
from dcp_mem.errors import ConfigError, DcpMemError, StorageRefused
from dcp_mem.storage.posix import PosixStorage

_CACHE = "a cache shows old files and loses the condition of a put: leave it out of the URL"
_UNFIT = {
    "http": "a web server takes no files",
    "https": "a web server takes no files",
    "zip": "an archive can't take files from several processes, nor lose one",
    "tar": "an archive is read only",
    "libarchive": "an archive is read only",
    "git": "fsspec reads repositories, and doesn't write to them",
    "github": "fsspec reads repositories, and doesn't write to them",
    "data": "the URL itself is all that there is to read",
    "reference": "references are read only",
    "simplecache": _CACHE,
    "filecache": _CACHE,
    "blockcache": _CACHE,
    "cached": _CACHE,
}
_OF_ONE_PROCESS = {"memory"}
_TRIAL_SECONDS = 1.0
"""The most that a save waits for the trial of its root."""


def refuse_unusable(
    url: str, storage_options: Mapping[str, Any], *, is_flushed_elsewhere: bool
) -> None:
    """Raise ConfigError where a URL alone says that checkpoints can't be brought there."""
    if url.startswith("/"):
        _refuse_read_only_file_system(url)
        return
    for protocol in _protocols(url, storage_options):
        if protocol in _UNFIT:
            raise ConfigError(
                f"path={url!r}: {protocol}:// can't take checkpoints ({_UNFIT[protocol]}): "
                "give a directory or an object store; to load from there, use a "
                "MemoryStorageReader, or persist=False"
            )
        if is_flushed_elsewhere and protocol in _OF_ONE_PROCESS:
            raise ConfigError(
                f"path={url!r}: {protocol}:// lives in one process, and the agent is another one: "
                "choose agent='thread', or path=None with job= for checkpoints in node memory only"
            )
        if is_flushed_elsewhere and not _is_known_elsewhere(protocol):
            raise ConfigError(
                f"path={url!r}: {protocol}:// is registered with fsspec in this process only, so "
                "the agent doesn't have it: choose agent='thread', or have the class's package "
                "register it (entry point fsspec.specs)"
            )


class Trial:
    """Tries in the background whether a directory takes files."""

    def __init__(self, url: str) -> None:
        self._url, self._refusal = url, ""
        self._thread = daemon(self._try, "dcp_mem-trial")

    def _try(self) -> None:
        try:
            PosixStorage(self._url).try_out()
        except StorageRefused as error:
            self._refusal = error.reason
        except DcpMemError:  # it may help to try again: the flush does
            pass

    def refusal(self) -> str:
        """Return why it takes none; "" where it does, or doesn't answer soon."""
        self._thread.join(_TRIAL_SECONDS)
        return self._refusal


def trial_of(url: str | None) -> Trial | None:
    """Return the trial of a job's root; None where it is no directory, or another rank tries it."""
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    return Trial(url) if url is not None and url.startswith("/") and is_first else None


def lives_in_one_process(url: str) -> bool:
    """Return whether what is written under a root stays in the process that writes it."""
    return not url.startswith("/") and not _OF_ONE_PROCESS.isdisjoint(_protocols(url, {}))


def _protocols(url: str, storage_options: Mapping[str, Any]) -> Iterator[str]:
    """Yield the protocols of a URL that may be a chain, such as dir::memory://run."""
    for link in url.split("::"):
        yield link.partition("://")[0]
    target = storage_options.get("target_protocol")
    if isinstance(target, str):
        yield target


def _refuse_read_only_file_system(path: str) -> None:
    while not os.path.exists(path) and path != "/":
        path = os.path.dirname(path)
    try:
        flags = os.statvfs(path).f_flag
    except OSError:  # such as a mount that hangs or is stale: the flush says what it is
        return
    if flags & os.ST_RDONLY:
        raise ConfigError(
            f"path={path!r} lies on a file system that is mounted read-only: mount it read-write, "
            "or give another path; to load from there, use a MemoryStorageReader, or persist=False"
        )


def _is_known_elsewhere(protocol: str) -> bool:
    """Return whether a new process's fsspec has the same class for a protocol as this one's."""
    from fsspec.registry import known_implementations, registry

    known = known_implementations.get(protocol, {}).get("class")
    if known is None or known.replace(":", ".") != _classes_of_a_new_process().get(protocol):
        return False
    module, _, name = known.replace(":", ".").rpartition(".")
    # Until a protocol is used first, its class isn't in the registry.
    return protocol not in registry or registry[protocol] is getattr(
        sys.modules.get(module), name, None
    )


def _classes_of_a_new_process() -> dict[str, str]:
    """Return, by protocol, the class's name that fsspec or an installed package has for it.

    What this process has added to its own registry isn't among them: the registry's source is run
    once more, apart from it.
    """
    from importlib.metadata import entry_points  # 20 ms: a directory needs none

    spec = importlib.util.find_spec("fsspec.registry")
    assert spec is not None
    assert spec.loader is not None
    anew = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(anew)
    found = {protocol: facts["class"] for protocol, facts in anew.known_implementations.items()}
    found |= {entry.name: entry.value for entry in entry_points(group="fsspec.specs")}
    return {protocol: name.replace(":", ".") for protocol, name in found.items()}
