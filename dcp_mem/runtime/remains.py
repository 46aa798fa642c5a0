"""What stays in a node's memory where nothing flushes it, and how to flush it later: in words."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from dcp_mem.config import Settings, job_name, memory_root_path
from dcp_mem.errors import gib
from dcp_mem.flushing.agent_handle import log_path
from dcp_mem.memory.checkpoint import LocalCheckpoint
from dcp_mem.memory.job import JobMemory

_MOST_NAMES = 10


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
