"""The link to what works behind training: the node's agent, or threads of this process."""

from __future__ import annotations

import shlex
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from dcp_mem.common.log import log
from dcp_mem.config import Settings, job_name, memory_root_path
from dcp_mem.errors import gib
from dcp_mem.flushing.agent_handle import SILENT, AgentHandle, log_path
from dcp_mem.flushing.registration import registration_of
from dcp_mem.memory.checkpoint import LocalCheckpoint
from dcp_mem.memory.checksumming import ChecksumThread
from dcp_mem.memory.job import JobMemory

if TYPE_CHECKING:
    from dcp_mem.flushing.loop import FlushThread

_MOST_NAMES = 10
_SILENT_SECONDS = 3.0
"""Of an agent that doesn't answer, before it is called an error: it may only be busy."""


class AgentLink:
    """Wakes the flusher, and tells it where the job's ranks run; any thread may do so."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._agent = AgentHandle(root)
        self._has_agent = False
        self._thread: FlushThread | None = None
        self._checksums = ChecksumThread(root)
        self._told_nodes: frozenset[str] | None = None
        self._told_run = self._said = ""
        self._silent_since: float | None = None
        self._is_stopped = False
        self._guard = threading.Lock()  # not held while the thread ends

    def wake(
        self,
        settings: Settings,
        nodes: frozenset[str] | None,
        run: str = "",
        *,
        now: bool = False,
        is_waiting: bool = False,
    ) -> str:
        """Have pending checkpoints flushed. A job without storage has none.

        `nodes`: on which the job's ranks run, if that is known. The flusher waits for no others.
        `now`: try at once again what failed; otherwise that has its time.
        """
        if settings.url is None:
            return ""
        registration = registration_of(settings, now=now, nodes=nodes, run=run)
        with self._guard:
            self._told_nodes, self._told_run = nodes, run
            if settings.agent == "process":
                why_not = self._agent.wake(registration, is_waiting=is_waiting)
                self._has_agent = not self._agent.is_gone()
                self._complain(settings, why_not)
                return why_not
            if not self._is_stopped:
                if self._thread is None:
                    # A trainer that has an agent starts sooner without all that flushes.
                    from dcp_mem.flushing.loop import FlushThread

                    self._thread = FlushThread(self._root)
                self._thread.register(replace(registration, environment=None))
        return ""

    def sum_up(self, settings: Settings) -> None:
        """Have the checksums of complete checkpoints made that aren't to be flushed.

        The flusher makes them as well, where it runs: it looks for new checkpoints by itself.
        """
        with self._guard:
            if not (self._has_agent or self._thread is not None or self._is_stopped):
                self._checksums.wake(settings.job, settings.on_nonfinite)

    def _complain(self, settings: Settings, why_not: str) -> None:
        now = time.monotonic()
        if why_not != SILENT:
            self._silent_since = None
        elif self._silent_since is None:
            self._silent_since = now
        if self._silent_since is not None and now - self._silent_since < _SILENT_SECONDS:
            return
        if why_not and why_not != self._said:
            log.error("nothing reaches storage: %s", left_without_agent(settings, why_not)[1])
        self._said = why_not

    def is_behind(self, nodes: frozenset[str] | None) -> bool:
        """Return whether the flusher was told of other nodes, or was killed: a trainer lives still.

        It counts as told of these nodes now.
        """
        with self._guard:
            is_lost = self._has_agent and self._agent.is_gone()
            self._has_agent = self._has_agent and not is_lost
            is_news, self._told_nodes = nodes != self._told_nodes, nodes
            return is_lost or is_news

    def knows(self, run: str) -> bool:
        """Return whether the flusher was told of a run's settings."""
        return run == self._told_run

    def stop(self) -> None:
        """End this process's own threads, if there are any; none is started any more."""
        with self._guard:
            self._is_stopped = True
            thread = self._thread
        self._checksums.stop()
        if thread is not None:
            thread.stop()

    def drain(self) -> None:
        """Let this process's own flush thread finish what is pending, if there is one."""
        self._checksums.hurry()
        with self._guard:
            thread = self._thread
        if thread is not None:
            thread.drain()


# -- what stays in memory where nothing flushes it ------------------------------------------------


def left_without_agent(settings: Settings, why_not: str) -> tuple[Sequence[LocalCheckpoint], str]:
    """Return what awaits an agent that isn't there, and what to say of it."""
    memory = JobMemory(settings.memory_root, settings.job)
    pending = [checkpoint for checkpoint in memory.checkpoints() if checkpoint.pending]
    why = f"the agent {why_not} (its log: {log_path(settings.memory_root)})"
    return pending, with_remains(settings, pending, why, "an agent runs")


def with_remains(
    settings: Settings, left: Sequence[LocalCheckpoint], why: str, once: str = "storage admits it"
) -> str:
    """Return why, what stays in memory, and how to bring that to storage later."""
    count, nbytes = len(left), sum(one.local_nbytes() for one in left)
    names = ", ".join(one.name for one in left[:_MOST_NAMES])
    names += f" and {count - _MOST_NAMES} more" if count > _MOST_NAMES else ""
    what = f"{count} checkpoints stay" if count > 1 else "It stays"
    which = f" ({names}; {gib(nbytes)})"
    if not left:
        what, which = "Checkpoints stay", ""
    return (
        f"{why}. {what} in this node's memory{which}, for as long as the node "
        f"lives. Once {once}, the job's next start here flushes that; so does: "
        f"{_flush_command(settings)}"
    )


def _flush_command(settings: Settings) -> str:
    words = ["dcp-mem", "flush", settings.url or "-"]
    if settings.job != job_name(None, settings.url):
        words += ["--job", settings.job]
    if settings.memory_root != memory_root_path(None):
        words += ["--memory-root", settings.memory_root]
    return shlex.join(words)
