"""The run that `init` has set up: its writer, and the completion of its checkpoints."""

from __future__ import annotations

import os
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any

from typing_extensions import Unpack

from dcp_mem.comm import Ranks, has_groups, refuse_missing_group, world_size
from dcp_mem.comm.bridge.calls import direct_call
from dcp_mem.common.arguments import takes
from dcp_mem.config import Settings, parse_bytes, root_url
from dcp_mem.errors import ConfigError
from dcp_mem.integrations.nebula.completion import Completion, JointCompletion
from dcp_mem.integrations.removals import Removals
from dcp_mem.options import DEFAULTS, WriterOptions, settings
from dcp_mem.policy.persistence import Persist, every_seconds
from dcp_mem.writer import MemoryStorageWriter

_INTERVAL = 100.0
_RETAINED = 2


class InitOptions(WriterOptions, total=False):
    """Options of `init`, beside its own.

    Attributes:
        num_of_versions_in_retention: As num_of_version_in_retention, in some samples.
    """

    num_of_versions_in_retention: int | str | None


class _Writer(MemoryStorageWriter):
    """A writer whose history of checkpoints lies where Nebula has it, too."""

    _of_kind = MappingProxyType({"shows_history": True})


class Run:
    """A job as `init` has described it. It takes hold of the job's memory with the first save."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.writer = _Writer(**options)
        self._completing: Completion | None = None
        self.alone = Completion(self.writer)
        self.elsewhere: dict[str, Run] = {}
        self.removals = Removals(self.settings)

    @property
    def settings(self) -> Settings:
        """The writer's settings."""
        return self.writer.settings

    @property
    def completing(self) -> Completion:
        """The completion of the run's checkpoints. Raises ConfigError."""
        if self._completing is None:
            if world_size() > 1:
                self._completing = JointCompletion(self.writer)
            else:
                refuse_missing_group()
                self._completing = self.alone
        return self._completing

    def ranks(self) -> Ranks:
        """Return the ranks that save together. Call it on all of them."""
        return direct_call(None, False, self.settings.purpose("save")).ranks

    def join(self) -> None:
        """Take part from here on in completing other ranks' checkpoints, if there are any."""
        if has_groups():
            _ = self.completing

    def settings_for(self, persist_path: str | os.PathLike[str] | None) -> Settings:
        """Return the settings of this run's job, or of another path's job, which is only read."""
        if persist_path is None or root_url(persist_path) == self.settings.url:
            return self.settings
        return settings(
            persist_path,
            memory_root=self.settings.memory_root,
            storage_options=self.options.get("storage_options"),
        )

    def end_removals(self, *, keep_newest: bool) -> None:
        """Try once more to remove what is left; under other paths the newest on storage stays."""
        self.removals.close(keep_newest=keep_newest)
        for run in self.elsewhere.values():
            run.removals.close(keep_newest=True)

    def close(self) -> None:
        """Stop completing other ranks' checkpoints, and removing any."""
        self.end_removals(keep_newest=True)
        if self._completing is not None:
            self._completing.close()
            self._completing = None

    def shut_down(self) -> None:
        """Stop completing checkpoints, and wait until storage has what it should have."""
        self.close()
        with ExitStack() as closing:  # all of them, whatever one raises
            for run in (self, *self.elsewhere.values()):
                closing.callback(run.writer.close)


_run: Run | None = None


@takes(InitOptions, DEFAULTS)
def init(
    persistent_storage_path: str | os.PathLike[str] | tuple[str] | None = None,
    persistent_time_interval: float | str | None = None,
    num_of_version_in_retention: int | str | None = None,
    **options: Unpack[InitOptions],
) -> None:
    """Set where checkpoints go, and how often one is flushed to storage.

    Call this on all ranks, best of all after init_process_group. $NEBULA_MEMORY_BUFFER_SIZE, in
    bytes or as "80GiB", limits a node's memory to half of that, which its processes share.

    Args:
        persistent_storage_path: An fsspec URL or a plain path; default
            $NEBULA_PERSISTENT_STORAGE_PATH. Without either, checkpoints stay in memory. A tuple
            with a path is one, too: Microsoft's samples have a comma behind it.
        persistent_time_interval: Seconds between checkpoints that are flushed, 0 for all of them;
            default $NEBULA_PERSISTENT_TIME_INTERVAL, else 100.
        num_of_version_in_retention: Checkpoints that stay in memory; default 2.
        **options: Whatever else `MemoryStorageWriter` takes, such as storage_options or replicas.

    Raises:
        ConfigError: A value makes no sense.
    """
    global _run
    if "num_of_versions_in_retention" in options:
        num_of_version_in_retention = options.pop("num_of_versions_in_retention")
    found = {
        "path": _path(persistent_storage_path)
        or os.environ.get("NEBULA_PERSISTENT_STORAGE_PATH")
        or None,
        "persist": _persist(persistent_time_interval),
        "keep_memory": _retained(num_of_version_in_retention),
        "memory_limit": _memory_limit(),
        **options,
    }
    if _run is not None:
        _run.close()
    _run = Run(found)
    _run.join()


def _path(
    given: str | os.PathLike[str] | tuple[str] | None,
) -> str | os.PathLike[str] | None:
    return given[0] if isinstance(given, tuple) and len(given) == 1 else given


def has_run() -> bool:
    """Return whether `init` was called in this process."""
    return _run is not None


def shut_down() -> None:
    """End the run, once storage has what it should have; call this on all ranks."""
    global _run
    run, _run = _run, None
    if run is not None:
        run.shut_down()


def join() -> None:
    """Take part from here on in completing other ranks' checkpoints, if `init` was called."""
    if _run is not None:
        _run.join()


def current() -> Run:
    """Return the run that `init` has set, or the one that the environment describes."""
    if _run is None:
        if not os.environ.get("NEBULA_PERSISTENT_STORAGE_PATH"):
            raise ConfigError(
                "call init(persistent_storage_path=…) first, or set NEBULA_PERSISTENT_STORAGE_PATH "
                "in the environment"
            )
        init()
    assert _run is not None
    return _run


def run_elsewhere(persist_path: str | os.PathLike[str] | None) -> Run:
    """Return the current run, or one with another path, which is kept for later saves there."""
    run = current()
    url = root_url(persist_path)
    if url is None or url == run.settings.url:
        return run
    if url not in run.elsewhere:
        run.elsewhere[url] = Run({**run.options, "path": url})
    return run.elsewhere[url]


def run_for(persist_path: str | os.PathLike[str] | None) -> Run:
    """Return the current run; without one, a run for readers of `persist_path`."""
    if _run is None and persist_path is not None:
        return Run({"path": persist_path})
    return current()


def _persist(seconds: float | str | None) -> bool | Persist:
    given = (
        seconds
        if seconds is not None
        else os.environ.get("NEBULA_PERSISTENT_TIME_INTERVAL") or _INTERVAL
    )
    try:
        number = float(given)
    except (TypeError, ValueError):
        number = -1.0
    if number < 0 or isinstance(given, bool):
        raise ConfigError(
            f"persistent_time_interval={given!r}: give a number of seconds, 0 for every checkpoint"
        )
    return every_seconds(number) if number else True


def _retained(given: int | str | None) -> int:
    text = str(_RETAINED if given is None else given)
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(
            f"num_of_version_in_retention={given!r}: give a whole number of checkpoints, at least 1"
        )
    return int(text)


def _memory_limit() -> int | None:
    """Return half of the buffer, for a node: Nebula's is for a process, divided by their number."""
    text = os.environ.get("NEBULA_MEMORY_BUFFER_SIZE")
    return parse_bytes(text, "NEBULA_MEMORY_BUFFER_SIZE") // 2 if text else None
