"""`dcp-mem flush`."""

from __future__ import annotations

import click
from rich.text import Text

from dcp_mem.bar import progress_bar
from dcp_mem.cli.options import Asked, subcommand
from dcp_mem.cli.screen import shown, size
from dcp_mem.operating.promote import flush_now, promote

_HELP = """Bring to storage what is complete in this node's memory, and wait for it.

That is what the job meant for storage and its agent hasn't put there yet: after a crash, say, or before the node goes away. The
agent does it, with the credentials of this shell. Checkpoints that were saved to stay in memory (persist=False, or between
every(n)) are left alone unless --all. Where several nodes hold a checkpoint, run it on each of them: storage has it once all
have put their part. Exits with 1 where something didn't get there.

Examples:
  dcp-mem flush s3://ckpts/run-42
  dcp-mem flush s3://ckpts/run-42 --all     # also what was to stay in memory
  dcp-mem flush /mnt/nfs/run-42 --all --newest 1
  dcp-mem flush s3://ckpts/run-42 --job my-run --all   # a job that was in memory only
"""


@subcommand("flush", _HELP)
@click.option("--all", "is_all", is_flag=True, help="Also what was saved to stay in memory.")
@click.option("--newest", metavar="N", type=click.IntRange(min=1), help="With --all: only the newest N of that.")
@click.option("--timeout", metavar="SECONDS", type=float, help="Wait no longer; the agent goes on.")
def command(asked: Asked, is_all: bool, newest: int | None, timeout: float | None) -> int:
    settings = asked.settings()
    if newest is not None and not is_all:
        raise click.UsageError("--newest needs --all")
    promoted = promote(settings, newest) if is_all else []
    with progress_bar(not asked.screen.is_json) as show:
        flushed = flush_now(settings, is_promoted=bool(promoted), show=show, timeout=timeout)
    asked.screen.answer(
        promoted=promoted,
        flushed=[
            {"name": one.name, "save_id": one.save_id, "bytes": one.nbytes, "error": one.error} for one in flushed
        ],
    )
    asked.screen.table(
        ["NAME", ">SIZE", "OUTCOME"],
        [
            [one.name, size(one.nbytes), Text(shown(one.error), "red") if one.error else Text("durable", "green")]
            for one in flushed
        ],
    )
    if not flushed:
        asked.screen.note("nothing in this node's memory awaits its flush")
    return 1 if any(one.error for one in flushed) else 0
