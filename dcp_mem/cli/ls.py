"""`dcp-mem ls`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from dcp_mem.cli.options import PATIENCE, Asked, places_of, subcommand
from dcp_mem.cli.screen import Screen, age, facts_of, figures, size, state, trouble
from dcp_mem.config import memory_root
from dcp_mem.operating.inventory import Checkpoint, Job, inventory, jobs

_HELP = """List a job's checkpoints in this node's memory and on storage, newest first.

Without ROOT and --job: the jobs in this node's memory, and what each has there. Exits with 1 where there is nothing.

Examples:
  dcp-mem ls s3://ckpts/run-42
  dcp-mem ls                                # what lies in this node's memory
  dcp-mem ls --job my-run                   # a job that is in memory only
  dcp-mem ls /mnt/nfs/run-42 --json | jq -r '.checkpoints[].name'
"""


@subcommand("ls", _HELP, needs_root=False)
def command(asked: Asked) -> int:
    if asked.root is None and asked.job is None:
        return _list_jobs(asked.screen, memory_root(asked.memory))
    settings = asked.settings()
    found = inventory(settings, patience=PATIENCE)
    asked.screen.answer(job=settings.job, root=settings.url, checkpoints=[facts_of(one) for one in found])
    _show(asked.screen, found)
    if not found:
        asked.screen.note(f"no checkpoints in {places_of(settings)}")
    return 0 if found else 1


def _list_jobs(screen: Screen, root: str) -> int:
    found = jobs(root)
    screen.answer(
        memory=root, jobs=[{**_facts(job), "checkpoints": list(map(facts_of, job.checkpoints))} for job in found]
    )
    for number, job in enumerate(found):
        if number:
            screen.line()
        life = Text("live", "green") if job.is_live else Text("dead", "yellow")
        tail = f", {size(job.nbytes)}, last save {age(job.last_use)} ago"
        screen.line(Text.assemble((job.name, "bold"), "  ", life, tail))
        _show(screen, job.checkpoints)
    if not found:
        screen.note(f"no job has memory in {root}")
    return 0 if found else 1


def _facts(job: Job) -> dict[str, object]:
    return {"name": job.name, "is_live": job.is_live, "bytes": job.nbytes, "last_use": job.last_use}


def _show(screen: Screen, checkpoints: Sequence[Checkpoint]) -> None:
    rows: list[list[str | Text]] = [
        [
            one.name + (f" (rank {one.scope[1:]} alone)" if one.scope else ""),
            "" if one.step is None else str(one.step),
            state(one),
            " + ".join(one.places),
            size(one.nbytes),
            age(one.created),
            figures(one.metrics),
            trouble(one),
        ]
        for one in checkpoints
    ]
    screen.table(["NAME", ">STEP", "STATE", "WHERE", ">SIZE", ">AGE", "METRICS", "PROBLEM"], rows)
