"""`dcp-mem ls`: list checkpoints or jobs."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from dcp_mem.cli.options import CommonOptions
from dcp_mem.cli.screen import Screen, age, facts_of, fields_of, problem, size, state
from dcp_mem.common.values import MEMORY, CheckpointStatus, counted, figures
from dcp_mem.config import memory_root_path
from dcp_mem.operations.inventory import (
    count_superseded,
    list_jobs,
    searched_places,
)

_MOST_NAMED = 10


def run(common: CommonOptions) -> int:
    if common.root is None and common.job is None:
        return _list_jobs(common.screen, memory_root_path(common.memory_root))
    settings, found = common.find_all()
    superseded = count_superseded(settings)
    common.screen.answer(
        job=settings.job,
        root=settings.url,
        checkpoints=[facts_of(one) for one in found],
        superseded=superseded,
    )
    _show(common.screen, found)
    if superseded:
        what = counted(superseded, "save was", "saves were")
        common.screen.line(f"{what} superseded by a newer one before the flush")
    if not found:
        common.screen.note(f"no checkpoints in {searched_places(settings)}")
    lost = [one.name for one in found if one.problem and MEMORY not in one.places]
    if lost:
        names = ", ".join(lost[:_MOST_NAMED]) + (", …" if len(lost) > _MOST_NAMED else "")
        common.screen.note(f"{len(lost)} of {len(found)} can't be loaded from anywhere: {names}")
    return 0 if found and not lost else 1


def _list_jobs(screen: Screen, root: str) -> int:
    found = list_jobs(root)
    screen.answer(
        memory=root,
        jobs=[
            {**fields_of(job), "checkpoints": list(map(facts_of, job.checkpoints))} for job in found
        ],
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


def _show(screen: Screen, checkpoints: Sequence[CheckpointStatus]) -> None:
    screen.table(
        checkpoints,
        {
            "NAME": lambda one: one.name + (f" (rank {one.scope[1:]} alone)" if one.scope else ""),
            ">STEP": lambda one: "" if one.step is None else str(one.step),
            "STATE": state,
            "WHERE": lambda one: " + ".join(one.places),
            ">SIZE": lambda one: size(one.nbytes),
            ">AGE": lambda one: age(one.created),
            "METRICS": lambda one: figures(one.metrics),
            "PROBLEM": problem,
        },
    )
