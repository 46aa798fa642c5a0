"""`dcp-mem watch`."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import click
from rich.console import RenderableType
from rich.text import Text

from dcp_mem.agent import is_alive
from dcp_mem.bar import moving, told
from dcp_mem.cli.options import Asked, subcommand
from dcp_mem.cli.screen import age, colored, shown, size, table_of
from dcp_mem.config import memory_root
from dcp_mem.files import allocated_bytes, free_bytes
from dcp_mem.memory.job import JobMemory, jobs_in
from dcp_mem.memory.locks import job_is_live
from dcp_mem.operating.inventory import job_memory
from dcp_mem.values import CheckpointStatus, State
from dcp_mem.watch import status_of

_HELP = """Follow what lies in this node's memory, and what is on its way to storage.

Looks again and again until Ctrl-C. Storage isn't asked. Without ROOT and --job: all jobs of the node. With --json, an object a
look, each on a line of its own.

Examples:
  dcp-mem watch
  dcp-mem watch s3://ckpts/run-42 --every 0.5
  dcp-mem watch --times 1 --json | jq .jobs[].checkpoints[0].state
"""


@dataclass(frozen=True, slots=True)
class _Job:
    """A job as it is at this moment. durable: the newest one that storage has, with when that was; None where there is none."""

    name: str
    is_live: bool
    nbytes: int
    checkpoints: tuple[CheckpointStatus, ...]
    durable: tuple[str, float] | None


@subcommand("watch", _HELP, needs_root=False)
@click.option(
    "--every", "seconds", type=click.FloatRange(0.1), default=1.0, show_default=True, help="Seconds between looks."
)
@click.option("--times", type=click.IntRange(1), help="End after so many looks.")
def command(asked: Asked, seconds: float, times: int | None) -> int:
    root = memory_root(asked.memory)
    wanted = None if asked.root is None and asked.job is None else asked.settings()
    speeds = _Speeds()
    looks = 0
    with asked.screen.live() as show:
        while True:
            memories = [job_memory(wanted)] if wanted is not None else [JobMemory(root, job) for job in _jobs(root)]
            jobs = [_look(memory) for memory in memories if memory is not None]
            free, has_agent = _free(root), _has_agent(root)
            asked.screen.answer(memory=root, free_bytes=free, agent=has_agent, jobs=list(map(_facts, jobs)))
            agent = "the agent runs" if has_agent else "no agent"
            show([Text(f"{root}: {size(free)} free, {agent}", "dim"), *_parts(jobs, speeds)])
            looks += 1
            if times is not None and looks >= times:
                return 0
            try:
                time.sleep(seconds)
            except KeyboardInterrupt:
                return 0


class _Speeds:
    """How fast checkpoints have gone to storage since the look before."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[float, int]] = {}

    def of(self, one: CheckpointStatus) -> float:
        """Bytes per second; 0.0 at the first look."""
        now, done = time.monotonic(), one.transfer.stored_nbytes
        then, before = self._before.get(one.save_id, (now, done))
        self._before[one.save_id] = now, done
        return max(0, done - before) / (now - then) if now > then else 0.0


def _jobs(root: str) -> list[str]:
    return jobs_in(root) if os.path.isdir(root) else []


def _free(root: str) -> int:
    return free_bytes(root) if os.path.isdir(root) else 0


def _has_agent(root: str) -> bool:
    return os.path.isdir(root) and is_alive(root)


def _look(memory: JobMemory) -> _Job:
    checkpoints = tuple(map(status_of, memory.held()))
    durable = [(one.durable, one.name) for one in checkpoints if one.state is State.DURABLE]
    durable += [(line.durable, line.name) for line in memory.history() if line.outcome == "durable"]
    when, name = max(durable, default=(0.0, ""))
    nbytes = allocated_bytes(memory.directory)
    return _Job(memory.job, job_is_live(memory.directory), nbytes, checkpoints, (name, when) if name else None)


def _parts(jobs: Sequence[_Job], speeds: _Speeds) -> list[RenderableType]:
    parts: list[RenderableType] = []
    for job in jobs:
        life = Text("live", "green") if job.is_live else Text("dead", "yellow")
        where = f", {job.durable[0]} durable {age(job.durable[1])} ago" if job.durable else ", nothing durable yet"
        parts += [Text(), Text.assemble((shown(job.name), "bold"), "  ", life, f", {size(job.nbytes)}", shown(where))]
        if job.checkpoints:
            parts.append(table_of(_COLUMNS, [_row(one, speeds) for one in job.checkpoints]))
    return parts if jobs else [*parts, Text("no job has memory here", "dim")]


_COLUMNS = ["NAME", ">STEP", "STATE", ">SIZE", ">AGE", ">SAVE", "COPIES", "ON ITS WAY"]


def _row(one: CheckpointStatus, speeds: _Speeds) -> list[str | Text]:
    copies = f"{one.replicas} on other nodes" if one.replicas else f"parity({one.parity})" if one.parity else ""
    return [
        one.name,
        "" if one.step is None else str(one.step),
        colored(one.state),
        size(one.nbytes),
        age(one.created),
        f"{one.stage_seconds * 1000:.0f} ms",
        copies or Text(shown(one.replication_error), "red"),
        _way(one, speeds),
    ]


def _way(one: CheckpointStatus, speeds: _Speeds) -> str | Text:
    """What there is to say of its flush."""
    speed = speeds.of(one)
    if one.state is State.DURABLE or not one.persist:
        return "" if one.persist else Text("stays in memory", "dim")
    if one.state is State.FAILED:
        return Text(shown(told(one, time.time())), "red")
    return told(one, time.time()) or moving(one.transfer.stored_nbytes, one.transfer.nbytes, speed)


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
