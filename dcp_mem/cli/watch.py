"""`dcp-mem watch`: follow the checkpoints in this node's memory."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import count

from rich.console import RenderableType
from rich.text import Text

from dcp_mem.cli.options import CommonOptions
from dcp_mem.cli.screen import age, colored, size, table_of
from dcp_mem.common.files import allocated_bytes, free_bytes
from dcp_mem.common.progress_bar import state_text, transfer_text
from dcp_mem.common.values import CheckpointStatus, State, shown
from dcp_mem.config import memory_root_path
from dcp_mem.flushing.agent_handle import is_alive
from dcp_mem.memory.job import JobMemory, jobs_in
from dcp_mem.memory.locks import job_is_live
from dcp_mem.operations.inventory import job_memory
from dcp_mem.runtime.states import status_of


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    name: str
    is_live: bool
    nbytes: int
    checkpoints: tuple[CheckpointStatus, ...]
    # the checkpoint that became durable last, and when; None where there is none
    durable: tuple[str, float] | None


def run(common: CommonOptions, seconds: float, times: int | None) -> int:
    root = memory_root_path(common.memory_root)
    wanted = None if common.root is None and common.job is None else common.settings()
    speeds = _Speeds()
    with common.screen.live() as show, suppress(KeyboardInterrupt):
        for look in count(1):
            is_there = os.path.isdir(root)
            if wanted is not None:
                memories = [job_memory(wanted)]
            else:
                memories = [JobMemory(root, job) for job in jobs_in(root)] if is_there else []
            jobs = [_look(memory) for memory in memories if memory is not None]
            free, has_agent = free_bytes(root) if is_there else 0, is_there and is_alive(root)
            common.screen.answer(
                memory=root, free_bytes=free, agent=has_agent, jobs=list(map(_facts, jobs))
            )
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


def _look(memory: JobMemory) -> _Job:
    checkpoints = tuple(map(status_of, memory.checkpoints()))
    durable = [(one.durable, one.name) for one in checkpoints if one.state is State.DURABLE]
    durable += [
        (row.durable, row.name) for row in memory.history.rows() if row.outcome == "durable"
    ]
    when, name = max(durable, default=(0.0, ""))
    return _Job(
        name=memory.job,
        is_live=job_is_live(memory.directory),
        nbytes=allocated_bytes(memory.directory),
        checkpoints=checkpoints,
        durable=(name, when) if name else None,
    )


def _screen_parts(jobs: Sequence[_Job], speeds: _Speeds) -> list[RenderableType]:
    parts: list[RenderableType] = []
    for job in jobs:
        life = Text("live", "green") if job.is_live else Text("dead", "yellow")
        where = (
            f", {job.durable[0]} durable {age(job.durable[1])} ago"
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
            parts.append(table_of(_COLUMNS, [_row(one, speeds) for one in job.checkpoints]))
    return parts if jobs else [*parts, Text("no job has memory here", "dim")]


_COLUMNS = ["NAME", ">STEP", "STATE", ">SIZE", ">AGE", ">SAVE", "COPIES", "ON ITS WAY"]


def _row(one: CheckpointStatus, speeds: _Speeds) -> list[str | Text]:
    copies = (
        f"{one.replicas} on other nodes"
        if one.replicas
        else f"parity({one.parity})"
        if one.parity
        else ""
    )
    return [
        one.name,
        "" if one.step is None else str(one.step),
        colored(one.state),
        size(one.nbytes),
        age(one.created),
        f"{one.stage_seconds * 1000:.0f} ms",
        copies or Text(shown(one.replication_error), "red"),
        _flush_progress(one, speeds),
    ]


def _flush_progress(one: CheckpointStatus, speeds: _Speeds) -> str | Text:
    speed = speeds.of(one)
    if one.state is State.DURABLE or not one.persist:
        return "" if one.persist else Text("stays in memory", "dim")
    if one.state is State.FAILED:
        return Text(shown(state_text(one, time.time())), "red")
    return state_text(one, time.time()) or transfer_text(
        one.transfer.stored_nbytes, one.transfer.nbytes, speed
    )


def _facts(job: _Job) -> dict[str, object]:
    checkpoints = [{**asdict(one), "state": one.state.value} for one in job.checkpoints]
    durable = {"name": job.durable[0], "at": job.durable[1]} if job.durable else None
    return {
        "name": job.name,
        "is_live": job.is_live,
        "bytes": job.nbytes,
        "durable": durable,
        "checkpoints": checkpoints,
    }
