"""`dcp-mem flush`: bring the checkpoints in this node's memory to storage."""

from __future__ import annotations

import click
from rich.text import Text

from dcp_mem.cli.options import CommonOptions, subcommand
from dcp_mem.cli.screen import size
from dcp_mem.common.progress_bar import progress_bar
from dcp_mem.common.values import shown
from dcp_mem.operations.flush import flush_now, promote

_HELP = """Bring the complete checkpoints in this node's memory to storage, and wait until they are
there.

These are the checkpoints that the job meant for storage and that its agent hasn't put there yet:
after a crash, or before the node goes away. The agent does it, with the credentials of this shell.
Checkpoints that were saved to stay in memory (persist=False, or between every_n_saves(n)) are left
alone unless --all is given. Where several nodes hold a checkpoint, run the command on each of them:
storage has the checkpoint once all nodes have put their part. Exit code 1 if a checkpoint didn't
get there.

Examples:
  dcp-mem flush s3://ckpts/run-42
  dcp-mem flush s3://ckpts/run-42 --all     # also what was to stay in memory
  dcp-mem flush /mnt/nfs/run-42 --all --newest 1
  dcp-mem flush s3://ckpts/run-42 --job my-run --all   # a job that was in memory only
"""


@subcommand("flush", _HELP)
@click.option("--all", "is_all", is_flag=True, help="Also flush what was saved to stay in memory.")
@click.option(
    "--newest",
    metavar="N",
    type=click.IntRange(min=1),
    help="With --all: only the newest N of these.",
)
@click.option(
    "--timeout", metavar="SECONDS", type=float, help="Stop waiting then; the agent goes on."
)
def command(common: CommonOptions, is_all: bool, newest: int | None, timeout: float | None) -> int:
    settings = common.settings()
    if newest is not None and not is_all:
        raise click.UsageError("--newest needs --all")
    promoted = promote(settings, newest) if is_all else []
    with progress_bar(not common.screen.is_json) as show:
        flushed = flush_now(settings, is_promoted=bool(promoted), show=show, timeout=timeout)
    common.screen.answer(promoted=promoted, flushed=flushed)
    common.screen.table(
        ["NAME", ">SIZE", "OUTCOME"],
        [
            [
                one.name,
                size(one.nbytes),
                Text(shown(one.error), "red") if one.error else Text("durable", "green"),
            ]
            for one in flushed
        ],
    )
    if not flushed:
        common.screen.note("nothing in this node's memory awaits its flush")
    return 1 if any(one.error for one in flushed) else 0
