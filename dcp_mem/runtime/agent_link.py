"""The link to what flushes checkpoints: the node's agent, or a thread of this process."""

from __future__ import annotations

from dataclasses import replace

from dcp_mem.common.log import log
from dcp_mem.config import Settings
from dcp_mem.flushing.agent import AgentHandle
from dcp_mem.flushing.registration import registration_of
from dcp_mem.flushing.thread import FlushThread


class AgentLink:
    """Wakes the flusher, and tells it where the job's ranks run.

    Args:
        root: The memory root, whose agent this is.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._agent = AgentHandle(root)
        self._thread: FlushThread | None = None
        self._told_nodes: frozenset[str] | None = None

    def wake(self, settings: Settings, nodes: frozenset[str] | None, *, now: bool = False) -> None:
        """Have pending checkpoints flushed. A job without storage has none.

        Args:
            settings: Of the job: where it flushes to, and who does.
            nodes: On which the job's ranks run, if that is known. The flusher waits for no others.
            now: Try at once again what failed; otherwise that has its time.
        """
        if settings.url is None:
            return
        registration = registration_of(settings, now=now, nodes=nodes)
        self._told_nodes = nodes
        if settings.agent == "process":
            try:
                self._agent.wake(registration)
            except OSError as error:
                log.error(
                    "the agent can't be started, so nothing reaches storage "
                    "(agent='thread' needs none): %s",
                    error,
                )
            return
        if self._thread is None:
            self._thread = FlushThread(self._root)
        self._thread.wake(replace(registration, environment=None))

    def is_news(self, nodes: frozenset[str] | None) -> bool:
        """Return whether the flusher knows of other nodes; it counts as told of these now.

        Args:
            nodes: The nodes of all ranks; None where they aren't known.
        """
        is_news = nodes != self._told_nodes
        self._told_nodes = nodes
        return is_news

    def stop(self) -> None:
        """End this process's own flush thread, if there is one."""
        if self._thread is not None:
            self._thread.stop()

    def drain(self) -> None:
        """Let this process's own flush thread finish what is pending, if there is one."""
        if self._thread is not None:
            self._thread.drain()
