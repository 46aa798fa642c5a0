"""`dcp-mem gc`."""

from __future__ import annotations

import click
from rich.text import Text

from dcp_mem.cli.options import Asked, subcommand
from dcp_mem.cli.screen import Screen, age, shown, size
from dcp_mem.flushing.leftovers import Leftover
from dcp_mem.operating.housekeeping import Reclaimed, collect_leftovers, reclaim

_HELP = """Give back what nobody needs any more: memory of dead jobs on this node, and what broken-off saves left on storage.

Storage is that of ROOT. Only shows what there is, unless --yes. Live jobs, committed checkpoints, and files that aren't
dcp_mem's are never touched. With ROOT or --job, only that job's memory. Memory whose checkpoints never reached storage, though
they should have, stays unless --force. A dead job may be one that is about to start again: it has to load from storage then.

Examples:
  dcp-mem gc                                # dead jobs in this node's memory: only shows them
  dcp-mem gc --yes
  dcp-mem gc s3://ckpts/run-42 --older-than 48 --yes
"""
_HOUR = 3600.0


@subcommand("gc", _HELP, needs_root=False)
@click.option("--yes", is_flag=True, help="Do it.")
@click.option(
    "--force",
    is_flag=True,
    help="Also checkpoints that never reached storage: they are lost then.",
)
@click.option(
    "--older-than",
    metavar="HOURS",
    type=click.FloatRange(min=0),
    default=24.0,
    show_default=True,
    help="On storage: what nobody has touched for so long.",
)
def command(asked: Asked, yes: bool, force: bool, older_than: float) -> int:
    is_of_one = asked.root is not None or asked.job is not None
    settings = asked.settings() if is_of_one else None
    job = None if settings is None else settings.job
    memory = reclaim(asked.memory, job=job, force=force, dry_run=not yes)
    stored: list[Leftover] = []
    if settings is not None and settings.url is not None:
        stored = collect_leftovers(
            settings.url, older_than=older_than * _HOUR, storage_options=settings.storage_options, dry_run=not yes
        )
    asked.screen.answer(
        done=yes,
        memory=[{"job": one.job, "bytes": one.nbytes, "kept": one.kept} for one in memory],
        storage=[{"key": one.key, "bytes": one.nbytes, "modified": one.modified} for one in stored],
    )
    _show(asked.screen, memory, stored, yes)
    return 0


def _show(screen: Screen, memory: list[Reclaimed], stored: list[Leftover], done: bool) -> None:
    outcome = "given back" if done else "would be given back"
    rows: list[list[str | Text]] = [
        [one.job, size(one.nbytes), Text(f"stays: {shown(one.kept)}", "yellow") if one.kept else Text(outcome, "green")]
        for one in memory
    ]
    screen.table(["DEAD JOB", ">MEMORY", "OUTCOME"], rows)
    if memory and stored:
        screen.line()
    screen.table(
        ["LEFT ON STORAGE", ">SIZE", ">AGE", "OUTCOME"],
        [
            [
                one.key,
                "unfinished" if one.is_unfinished else size(one.nbytes),
                age(one.modified),
                Text(outcome, "green"),
            ]
            for one in stored
        ],
    )
    if not memory and not stored:
        screen.note("nothing to give back")
    elif not done and (stored or any(not one.kept for one in memory)):
        screen.note("nothing was touched; --yes does it")
