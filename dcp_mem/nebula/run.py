"""What `init` has set: where checkpoints go, and how they become complete."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from dcp_mem.config import Settings, parse_bytes, root_url, settings
from dcp_mem.errors import ConfigError
from dcp_mem.nebula.completing import Alone, Completing, Together
from dcp_mem.policy.persistence import Persist, interval
from dcp_mem.writer import MemoryStorageWriter

_INTERVAL = 100.0
_RETAINED = 2


class Run:
    """A job as `init` has described it. It takes hold of the job's memory with the first save, and not before."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.writer = MemoryStorageWriter(**options)
        self._completing: Completing | None = None
        self.alone = Alone(self.writer)
        self.elsewhere: dict[str, Run] = {}

    @property
    def settings(self) -> Settings:
        return self.writer.settings

    @property
    def completing(self) -> Completing:
        """Raises ConfigError where the job has several ranks, and they haven't met."""
        if self._completing is None:
            if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
                self._completing = Together(self.writer)
            elif int(os.environ.get("WORLD_SIZE") or 1) > 1:
                raise ConfigError(
                    "WORLD_SIZE is above 1, but torch.distributed isn't initialised: call init_process_group before the first "
                    "save"
                )
            else:
                self._completing = self.alone
        return self._completing

    def join(self) -> None:
        """Where the ranks have met, take part from here on in what any of them completes."""
        if dist.is_available() and dist.is_initialized():
            _ = self.completing

    def settings_for(self, persist_path: str | os.PathLike[str] | None) -> Settings:
        """The same job, or the one of another path, which may only be read."""
        if persist_path is None:
            return self.settings
        other = settings(persist_path, memory=self.settings.memory_root)
        if other.url == self.settings.url:
            return self.settings
        return settings(
            persist_path, memory=self.settings.memory_root, storage_options=self.options.get("storage_options")
        )

    def close(self) -> None:
        if self._completing is not None:
            self._completing.close()
            self._completing = None


_run: Run | None = None


def init(
    persistent_storage_path: str | os.PathLike[str] | None = None,
    persistent_time_interval: float | str | None = None,
    num_of_version_in_retention: int | str | None = None,
    **options: Any,
) -> None:
    """Say where checkpoints go, and how often storage gets one. Call it on all ranks, best of all after init_process_group.

    persistent_storage_path: an fsspec URL or a plain path; default $NEBULA_PERSISTENT_STORAGE_PATH; None keeps checkpoints in
    memory only. persistent_time_interval: seconds from one checkpoint that storage gets to the next, 0 for all of them; default
    $NEBULA_PERSISTENT_TIME_INTERVAL, else 100. num_of_version_in_retention: checkpoints that stay in memory; default 2.
    $NEBULA_MEMORY_BUFFER_SIZE, in bytes or as "80GiB", bounds a node's memory by its half, which its processes share.
    options: whatever else `MemoryStorageWriter` takes, such as storage_options or replicas. Raises ConfigError.
    """
    global _run
    if "num_of_versions_in_retention" in options:
        num_of_version_in_retention = options.pop("num_of_versions_in_retention")
    found = {
        "path": persistent_storage_path or os.environ.get("NEBULA_PERSISTENT_STORAGE_PATH") or None,
        "persist": _persist(persistent_time_interval),
        "keep": _retained(num_of_version_in_retention),
        "memory_limit": _memory_limit(),
        **options,
    }
    if _run is not None:
        _run.close()
    _run = Run(found)
    _run.join()


def join() -> None:
    """Have this rank take part in what others complete, if `init` has been called."""
    if _run is not None:
        _run.join()


def current() -> Run:
    """The run that `init` has set, or the one that the environment describes. Raises ConfigError where neither does."""
    if _run is None:
        if not os.environ.get("NEBULA_PERSISTENT_STORAGE_PATH"):
            raise ConfigError(
                "call init(persistent_storage_path=…) first, or set NEBULA_PERSISTENT_STORAGE_PATH in the environment"
            )
        init()
    assert _run is not None
    return _run


def run_elsewhere(persist_path: str | os.PathLike[str] | None) -> Run:
    """The current run, or one that is like it but for its path, and stays for later saves there."""
    here = current()
    url = root_url(persist_path)
    if url is None or url == here.settings.url:
        return here
    if url not in here.elsewhere:
        here.elsewhere[url] = Run({**here.options, "path": url})
    return here.elsewhere[url]


def run_for(persist_path: str | os.PathLike[str] | None) -> Run:
    """The current run; for a reader that names its path itself there need not be one."""
    if _run is None and persist_path is not None:
        return Run({"path": persist_path})
    return current()


def _persist(seconds: float | str | None) -> bool | Persist:
    given = seconds if seconds is not None else os.environ.get("NEBULA_PERSISTENT_TIME_INTERVAL") or _INTERVAL
    try:
        number = float(given)
    except (TypeError, ValueError):
        number = -1.0
    if number < 0 or isinstance(given, bool):
        raise ConfigError(f"persistent_time_interval={given!r}: give a number of seconds, 0 for every checkpoint")
    return interval(number) if number else True


def _retained(given: int | str | None) -> int:
    text = str(_RETAINED if given is None else given)
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"num_of_version_in_retention={given!r}: give a whole number of checkpoints, at least 1")
    return int(text)


def _memory_limit() -> int | None:
    """Nebula's rule is for each process: half of the buffer, divided by the node's processes. That is the half for a node."""
    text = os.environ.get("NEBULA_MEMORY_BUFFER_SIZE")
    return parse_bytes(text, "NEBULA_MEMORY_BUFFER_SIZE") // 2 if text else None
