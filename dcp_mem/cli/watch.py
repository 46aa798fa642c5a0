"""`dcp-mem watch`: follow the checkpoints in this node's memory."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import count

from rich.console import RenderableType
from rich.text import Text

from dcp_mem.cli.options import CommonOptions
from dcp_mem.cli.screen import Columns, age, colored, size, table_of
from dcp_mem.common.files import free_bytes
from dcp_mem.common.progress_bar import state_text, transfer_text
from dcp_mem.common.values import CheckpointStatus, State, shown
from dcp_mem.config import memory_root_path
from dcp_mem.flushing.agent_handle import is_alive
from dcp_mem.operations.inventory import Job, job_in, list_jobs
from dcp_mem.runtime.states import job_memory


def run(common: CommonOptions, seconds: float, times: int | None) -> int:
    root = memory_root_path(common.memory_root)
    wanted = None if common.root is None and common.job is None else common.settings()
    speeds = _Speeds()
    with common.screen.live() as show, suppress(KeyboardInterrupt):
        for look in count(1):
            is_there = os.path.isdir(root)
            if wanted is None:
                jobs = sorted(list_jobs(root), key=lambda job: job.name) if is_there else []
            else:
                memory = job_memory(wanted)
                jobs = [] if memory is None else [job_in(memory)]
            free, has_agent = free_bytes(root) if is_there else 0, is_there and is_alive(root)
            common.screen.answer(memory=root, free_bytes=free, agent=has_agent, jobs=jobs)
            agent = "the agent runs" if has_agent else "no agent"
            show([Text(f"{root}: {size(free)} free, {agent}", "dim"), *_screen_parts(jobs, speeds)])
            if look == times:
                break
            time.sleep(seconds)
    return 0


class _Speeds:
    """The speeds at which checkpoints have gone to storage since the last look."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[float, int]] = {}

    def of(self, one: CheckpointStatus) -> float:
        """Return bytes per second; 0.0 at the first look."""
        now, done = time.monotonic(), one.transfer.stored_nbytes
        then, before = self._before.get(one.save_id, (now, done))
        self._before[one.save_id] = now, done
        return max(0, done - before) / (now - then) if now > then else 0.0


def _screen_parts(jobs: Sequence[Job], speeds: _Speeds) -> list[RenderableType]:
    parts: list[RenderableType] = []
    columns: Columns[CheckpointStatus] = {
        "NAME": lambda one: one.name,
        ">STEP": lambda one: "" if one.step is None else str(one.step),
        "STATE": lambda one: colored(one.state),
        ">SIZE": lambda one: size(one.nbytes),
        ">AGE": lambda one: age(one.created),
        ">SAVE": lambda one: f"{one.stage_seconds * 1000:.0f} ms",
        "COPIES": _copies,
        "ON ITS WAY": lambda one: _flush_progress(one, speeds),
    }
    for job in jobs:
        life = Text("live", "green") if job.is_live else Text("dead", "yellow")
        where = (
            f", {job.durable.name} durable {age(job.durable.at)} ago"
            if job.durable
            else ", nothing durable yet"
        )
        parts += [
            Text(),
            Text.assemble(
                (shown(job.name), "bold"), "  ", life, f", {size(job.nbytes)}", shown(where)
            ),
        ]
        if job.checkpoints:
            parts.append(table_of(job.checkpoints, columns))
    return parts if jobs else [*parts, Text("no job has memory here", "dim")]


def _copies(one: CheckpointStatus) -> str | Text:
    if one.replicas:
        return f"{one.replicas} on other nodes"
    return f"parity({one.parity})" if one.parity else Text(shown(one.replication_error), "red")


def _flush_progress(one: CheckpointStatus, speeds: _Speeds) -> str | Text:
    speed = speeds.of(one)
    if one.state is State.DURABLE or not one.persist:
        return "" if one.persist else Text("stays in memory", "dim")
    if one.state is State.FAILED:
        return Text(shown(state_text(one, time.time())), "red")
    return state_text(one, time.time()) or transfer_text(
        one.transfer.stored_nbytes, one.transfer.nbytes, speed
    )
