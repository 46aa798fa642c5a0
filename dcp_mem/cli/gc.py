"""`dcp-mem gc`: free memory of dead jobs, and what interrupted saves have left on storage."""

from __future__ import annotations

from rich.text import Text

from dcp_mem.cli.options import CommonOptions
from dcp_mem.cli.screen import Screen, age, size
from dcp_mem.common.values import shown
from dcp_mem.flushing.orphans import Orphan
from dcp_mem.operations.housekeeping import Reclaimed, collect_orphans, reclaim

_HOUR = 3600.0


def run(common: CommonOptions, yes: bool, force: bool, older_than: float) -> int:
    is_of_one_job = common.root is not None or common.job is not None
    settings = common.settings() if is_of_one_job else None
    job = None if settings is None else settings.job
    memory = reclaim(common.memory_root, job=job, force=force, dry_run=not yes)
    stored: list[Orphan] = []
    if settings is not None and settings.url is not None:
        stored = collect_orphans(
            settings.url,
            older_than=older_than * _HOUR,
            storage_options=settings.storage_options,
            dry_run=not yes,
        )
    common.screen.answer(
        done=yes,
        memory=memory,
        storage=[{"key": one.key, "bytes": one.nbytes, "modified": one.modified} for one in stored],
    )
    _show(common.screen, memory, stored, yes)
    return 0


def _show(screen: Screen, memory: list[Reclaimed], stored: list[Orphan], done: bool) -> None:
    outcome = "given back" if done else "would be given back"
    screen.table(
        memory,
        {
            "DEAD JOB": lambda one: one.job,
            ">MEMORY": lambda one: size(one.nbytes),
            "OUTCOME": lambda one: (
                Text(f"stays: {shown(one.kept)}", "yellow") if one.kept else Text(outcome, "green")
            ),
        },
    )
    if memory and stored:
        screen.line()
    screen.table(
        stored,
        {
            "LEFT ON STORAGE": lambda one: one.key,
            ">SIZE": lambda one: "unfinished" if one.is_unfinished else size(one.nbytes),
            ">AGE": lambda one: age(one.modified),
            "OUTCOME": lambda _: Text(outcome, "green"),
        },
    )
    if not memory and not stored:
        screen.note("nothing to give back")
    elif not done and (stored or any(not one.kept for one in memory)):
        screen.note("nothing was touched; --yes does it")
